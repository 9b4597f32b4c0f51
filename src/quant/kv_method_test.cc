#include "quant/kv_method.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "quant/quant_test_util.h"
#include "quant/uniform_rows.h"

namespace oscar {
namespace {

KvMethod Make(const std::string& name, int head_dim = 128) {
  KvMethodOptions options;
  options.name = name;
  options.head_dim = head_dim;
  options.has_rotation = name == "oscar";
  auto method = MakeKvMethod(options);
  EXPECT_TRUE(method.has_value()) << name << ": " << method.error().ToString();
  return *method;
}

TEST(KvMethod, TheTableHasTheNames) {
  std::vector<std::string_view> names;
  for (const KvMethodInfo& info : KvMethodTable()) names.push_back(info.name);
  EXPECT_THAT(names, testing::ElementsAre("bf16", "naive", "quarot", "saw-int4", "int4",
                                          "turboquant", "turboquant-skip", "kivi", "kivi-sink",
                                          "oscar-su", "oscar", "oscar+", "kitty"));
}

TEST(KvMethod, UnknownNamesListTheKnownOnes) {
  const auto method = FindKvMethod("oskar");
  ASSERT_FALSE(method.has_value());
  EXPECT_EQ(method.error().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(method.error().param(), "kv");
  for (const KvMethodInfo& info : KvMethodTable()) {
    EXPECT_THAT(method.error().message(), testing::HasSubstr(std::string(info.name)));
  }
}

TEST(KvMethod, HistoryBits) {
  // 8 KV heads of 128, metadata included; the sums in bits are written out.
  const std::map<std::string, double> expected = {
      {"bf16", 16.0},
      {"naive", 2.25},
      {"quarot", 2.25},
      {"saw-int4", 4.25},
      {"int4", 4.25},
      {"turboquant", (3.0 + 16.0 / 128 + 3.0 + 32.0 / 128) / 2},  // 3.1875
      {"turboquant-skip", 3.1875},
      {"kivi", 3.0},
      {"kivi-sink", 2.25},
      {"oscar-su", (3.0 + 32.0 / 1024 + 3.0) / 2},  // the norm of a token
      {"oscar", 2.25},
      {"oscar+", 2.25},
      {"kitty", (2.0 + 0.25 + 40.0 / 128 + 2.25) / 2},
  };
  for (const KvMethodInfo& info : KvMethodTable()) {
    EXPECT_EQ(Make(std::string(info.name)).HistoryBits(8, 128), expected.at(std::string(info.name)))
        << info.name;
  }
}

TEST(KvMethod, GeometrySealsWhenTheNewestPartIsFull) {
  const KvMethod m = Make("oscar+");
  for (int64_t n = 0; n < 2000; ++n) {
    // The rule itself, one token at a time.
    int64_t history = 0;
    for (int64_t i = 1; i <= n; ++i) {
      if (i - 64 - history >= 256 + 64) history += 64;
    }
    const TokenSplit split = m.Split(n);
    ASSERT_EQ(split.history, history) << n;
    ASSERT_EQ(split.sink, std::min<int64_t>(n, 64));
    ASSERT_EQ(split.sink + split.history + split.newest, n);
  }
  EXPECT_EQ(m.Split(383).history, 0);  // below sink + recent + 64 nothing is INT2
  EXPECT_EQ(m.Split(384).history, 64);
  EXPECT_EQ(Make("naive").Split(63).history, 0);  // no windows: as soon as a page is full
  EXPECT_EQ(Make("naive").Split(64).history, 64);
  EXPECT_EQ(Make("kivi-sink").Split(64 + 128 + 127).history, 0);
  EXPECT_EQ(Make("kivi-sink").Split(64 + 128 + 128).history, 128);
  EXPECT_EQ(Make("bf16").Split(100000).history, 0);
}

TEST(KvMethod, StoredBitsCountWindowsAndMetadata) {
  const KvMethod m = Make("oscar+");
  EXPECT_NEAR(m.StoredBits(131072, 8, 128, 36), 2.25 + 13.75 * 320 / 131072, 1e-12);  // 2.2836
  EXPECT_GT(m.StoredBits(131071, 8, 128, 36), 2.28);
  EXPECT_LT(m.StoredBits(131071, 8, 128, 36), 2.295);  // one token before a seal
  EXPECT_NEAR(m.StoredBits(14336, 8, 128, 36), 2.557, 1e-3);
  EXPECT_DOUBLE_EQ(m.StoredBits(384, 8, 128, 36), (320 * 16 + 64 * 2.25) / 384);
  EXPECT_EQ(m.StoredBits(300, 8, 128, 36), 16.0);
  EXPECT_EQ(Make("bf16").StoredBits(1000, 8, 128, 36), 16.0);
  // A page of 64 tokens of one head of 128 takes 4608 bytes, as docs/cache-format.md states.
  EXPECT_EQ(m.StoredBytes(384, 1, 128, 1) - m.StoredBytes(320, 1, 128, 1), 4608u);
  EXPECT_EQ(Make("saw-int4").StoredBytes(64, 1, 128, 1), 8704u);
}

TEST(KvMethod, SkippedLayersStayExact) {
  const KvMethod m = Make("turboquant-skip");
  EXPECT_FALSE(m.IsQuantizedLayer(0, 36));
  EXPECT_FALSE(m.IsQuantizedLayer(1, 36));
  EXPECT_TRUE(m.IsQuantizedLayer(2, 36));
  EXPECT_TRUE(m.IsQuantizedLayer(33, 36));
  EXPECT_FALSE(m.IsQuantizedLayer(34, 36));
  EXPECT_DOUBLE_EQ(m.StoredBits(6400, 8, 128, 36), (32 * 3.1875 + 4 * 16) / 36);
  EXPECT_EQ(m.StoredBits(6400, 8, 128, 4), 16.0);  // nothing is left of four layers
  EXPECT_TRUE(Make("turboquant").IsQuantizedLayer(0, 36));
  EXPECT_FALSE(Make("bf16").IsQuantizedLayer(0, 36));
}

TEST(KvMethod, RecipesAreThoseOfTheTable) {
  using enum RotationKind;
  const KvMethod oscar = Make("oscar");
  EXPECT_EQ(oscar.k_rows, (RowSpec{RowRule::kMinMax, 2, 128, 0.96f, MetaType::kFp16}));
  EXPECT_EQ(oscar.v_rows, (RowSpec{RowRule::kMinMax, 2, 128, 0.92f, MetaType::kFp16}));
  EXPECT_EQ(oscar.k_rotation, kCalibrated);
  EXPECT_EQ(oscar.v_rotation, kCalibrated);
  EXPECT_FALSE(oscar.is_simulated());

  const KvMethod data_free = Make("oscar+");
  EXPECT_EQ(data_free.k_rows.rule, RowRule::kMseFitUnbiased);
  EXPECT_EQ(data_free.v_rows.rule, RowRule::kMseFit);
  EXPECT_EQ(data_free.k_rotation, kHadamard);
  KvMethodOptions options;
  options.has_rotation = true;
  const auto calibrated = MakeKvMethod(options);
  ASSERT_TRUE(calibrated.has_value());
  EXPECT_EQ(calibrated->k_rows.rule, RowRule::kMseFitUnbiased);
  EXPECT_EQ(calibrated->v_rows, oscar.v_rows);
  EXPECT_EQ(calibrated->v_rotation, kCalibrated);
  EXPECT_EQ(calibrated->Describe(2.25), "oscar+ (calibrated rotation), real, 2.25 history bits");
  EXPECT_EQ(data_free.Describe(2.25), "oscar+ (Hadamard), real, 2.25 history bits");
  EXPECT_THAT(Make("turboquant-skip").Describe(3.1875),
              testing::EndsWith("history bits, first 2 and last 2 layers BF16"));
  EXPECT_EQ(Make("turboquant").Describe(3.1875),
            "turboquant (Hadamard), simulated, 3.188 history bits");

  EXPECT_EQ(Make("saw-int4").hadamard_block, 128);
  EXPECT_EQ(Make("saw-int4", 64).hadamard_block, 64);
  EXPECT_EQ(Make("saw-int4", 256).hadamard_block, 128);
  EXPECT_EQ(Make("saw-int4").v_rotation, kNone);
  EXPECT_EQ(Make("quarot").v_rotation, kHadamard);
  EXPECT_EQ(Make("oscar-su").v_rotation, kHadamard);
  EXPECT_EQ(Make("kivi").k_rotation, kNone);
  EXPECT_EQ(Make("turboquant").v_rotation, kNone);
}

TEST(KvMethod, EveryMethodCodesBlocksAtEveryHeadDim) {
  for (const KvMethodInfo& info : KvMethodTable()) {
    for (int dims : {64, 128, 256}) {
      const KvMethod m = Make(std::string(info.name), dims);
      EXPECT_EQ(m.run_tokens % 64, 0);
      EXPECT_EQ(m.sink_tokens % 64, 0);
      EXPECT_EQ(m.recent_tokens % 64, 0);
      const TileShape shape{m.run_tokens, 2, dims};
      const auto rows = GaussianRows(shape.elements(), 21);
      for (const auto& q : {m.k_quantizer, m.v_quantizer}) {
        ASSERT_EQ(m.run_tokens % q->tokens_per_run(), 0);
        std::vector<std::byte> bytes(q->EncodedBytes(shape));
        std::vector<float> back(rows.size());
        EXPECT_EQ(q->Encode(shape, rows, bytes), 0);
        ASSERT_TRUE(q->Decode(shape, bytes, back).ok());
        EXPECT_LT(RelativeError(rows, back), 0.32) << info.name << " " << q->description();
      }
    }
  }
}

TEST(KvMethod, OptionsOverrideAndAreChecked) {
  KvMethodOptions options;
  options.group_dims = 32;
  options.sink_tokens = 0;
  options.recent_tokens = 512;
  auto m = MakeKvMethod(options);
  ASSERT_TRUE(m.has_value());
  EXPECT_EQ(m->HistoryBits(8, 128), 3.0);
  EXPECT_EQ(m->sink_tokens, 0);
  EXPECT_EQ(m->recent_tokens, 512);

  const auto refused = [](const KvMethodOptions& o, const std::string& param,
                          const std::string& text) {
    const auto result = MakeKvMethod(o);
    ASSERT_FALSE(result.has_value()) << text;
    EXPECT_EQ(result.error().code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(result.error().param(), param);
    EXPECT_THAT(result.error().message(), testing::HasSubstr(text));
  };
  refused({.name = "oscar"}, "rotation", "oscar calibrate");
  refused({.name = "kivi", .has_rotation = true}, "rotation", "uses no rotation");
  refused({.name = "kivi", .group_dims = 64}, "group_dims", "its own groups");
  refused({.group_dims = 48}, "group_dims", "divide");
  refused({.group_dims = 16}, "group_dims", "32, 64, 128");  // rows could, pages cannot
  refused({.recent_tokens = 100}, "recent", "multiple of 64");
  refused({.sink_tokens = -64}, "sink", "multiple of 64");
  refused({.k_clip = 0.9f}, "k_clip", "without one");
  refused({.name = "oscar", .has_rotation = true, .v_clip = 1.5f}, "v_clip", "[0, 1]");
  refused({.name = "bf16", .v_clip = 0.9f}, "v_clip", "without one");

  const auto clipped = MakeKvMethod({.name = "oscar", .has_rotation = true, .k_clip = 0.9f});
  ASSERT_TRUE(clipped.has_value());
  EXPECT_EQ(clipped->k_rows.clip_ratio, 0.9f);
  EXPECT_EQ(static_cast<const UniformRows&>(*clipped->k_quantizer).spec(), clipped->k_rows);
}

}  // namespace
}  // namespace oscar
