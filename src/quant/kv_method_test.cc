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
  EXPECT_THAT(names,
              testing::ElementsAre("bf16", "naive", "naive-sym", "quarot", "saw-int4", "int4",
                                   "turboquant", "turboquant-skip", "kivi", "kivi-sink", "oscar-su",
                                   "oscar", "oscar+", "kitty", "lloyd-max"));
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
      {"naive-sym", 2.25},  // pages hold its min, too, though it is -2 s
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
      {"lloyd-max", 2.25},
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

TEST(KvMethod, SkippedLayersStayExact) {
  const KvMethod m = Make("turboquant-skip");
  EXPECT_FALSE(m.IsQuantizedLayer(0, 36));
  EXPECT_FALSE(m.IsQuantizedLayer(1, 36));
  EXPECT_TRUE(m.IsQuantizedLayer(2, 36));
  EXPECT_TRUE(m.IsQuantizedLayer(33, 36));
  EXPECT_FALSE(m.IsQuantizedLayer(34, 36));
  EXPECT_TRUE(Make("turboquant").IsQuantizedLayer(0, 36));
  EXPECT_FALSE(Make("bf16").IsQuantizedLayer(0, 36));
}

TEST(KvMethod, RecipesAreThoseOfTheTable) {
  using enum RotationKind;
  const KvMethod oscar = Make("oscar");
  EXPECT_EQ(oscar.k.rows, (RowSpec{RowRule::kMinMax, 2, 128, 0.96f, MetaType::kFp16}));
  EXPECT_EQ(oscar.v.rows, (RowSpec{RowRule::kMinMax, 2, 128, 0.92f, MetaType::kFp16}));
  EXPECT_EQ(oscar.k.rotation, kCalibrated);
  EXPECT_EQ(oscar.v.rotation, kCalibrated);

  const KvMethod data_free = Make("oscar+");
  EXPECT_EQ(data_free.k.rows.rule, RowRule::kMseFitUnbiased);
  EXPECT_EQ(data_free.v.rows.rule, RowRule::kMseFit);
  EXPECT_EQ(data_free.k.rotation, kHadamard);
  KvMethodOptions options;
  options.has_rotation = true;
  const auto calibrated = MakeKvMethod(options);
  ASSERT_TRUE(calibrated.has_value());
  EXPECT_EQ(calibrated->k.rows.rule, RowRule::kMseFitUnbiased);
  EXPECT_EQ(calibrated->v.rows, oscar.v.rows);
  EXPECT_EQ(calibrated->v.rotation, kCalibrated);
  EXPECT_EQ(calibrated->Describe(2.25), "oscar+ (calibrated rotation), 2.25 history bits");
  EXPECT_EQ(data_free.Describe(2.25), "oscar+ (Hadamard), 2.25 history bits");
  EXPECT_THAT(Make("turboquant-skip").Describe(3.1875),
              testing::EndsWith("history bits, first 2 and last 2 layers BF16"));
  EXPECT_EQ(Make("turboquant").Describe(3.1875), "turboquant (Hadamard), 3.188 history bits");

  EXPECT_EQ(Make("saw-int4").hadamard_block, 128);
  EXPECT_EQ(Make("saw-int4", 64).hadamard_block, 64);
  EXPECT_EQ(Make("saw-int4", 256).hadamard_block, 128);
  EXPECT_EQ(Make("saw-int4").v.rotation, kNone);
  EXPECT_EQ(Make("quarot").v.rotation, kHadamard);
  const KvMethod lloyd_max = Make("lloyd-max");
  EXPECT_EQ(lloyd_max.k.rows, (RowSpec{RowRule::kLloydMax, 2, 128, 0.96f, MetaType::kFp16}));
  EXPECT_EQ(lloyd_max.v.rows, (RowSpec{RowRule::kLloydMax, 2, 128, 0.92f, MetaType::kFp16}));
  EXPECT_EQ(lloyd_max.k.rotation, kHadamard);
  EXPECT_EQ(lloyd_max.v.rotation, kHadamard);
  EXPECT_EQ(lloyd_max.sink_tokens, 64);
  EXPECT_EQ(lloyd_max.recent_tokens, 256);
  EXPECT_EQ(Make("oscar-su").v.rotation, kHadamard);
  EXPECT_EQ(Make("kivi").k.rotation, kNone);
  EXPECT_EQ(Make("turboquant").v.rotation, kNone);
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
      for (const auto& q : {m.k.quantizer, m.v.quantizer}) {
        ASSERT_EQ(m.run_tokens % q->tokens_per_run(), 0);
        std::vector<std::byte> bytes(q->EncodedBytes(shape));
        std::vector<float> back(rows.size());
        EXPECT_EQ(q->Encode(shape, rows, bytes), 0);
        ASSERT_TRUE(q->Decode(shape, bytes, back).ok());
        EXPECT_LT(RelativeError(rows, back), info.name == "naive-sym" ? 0.75 : 0.32)
            << info.name << " " << q->description();
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
  EXPECT_EQ(clipped->k.rows.clip_ratio, 0.9f);
  const auto unclipped = MakeKvMethod({.name = "lloyd-max", .v_clip = 0.0f});
  ASSERT_TRUE(unclipped.has_value());
  EXPECT_EQ(unclipped->v.rows.clip_ratio, 0.0f);
  EXPECT_EQ(static_cast<const UniformRows&>(*clipped->k.quantizer).spec(), clipped->k.rows);
}

TEST(KvMethod, SwitchesChangeTheRow) {
  const KvMethod plain = Make("oscar-su");
  EXPECT_EQ(plain.k.norm, TokenNorm::kAllHeads);
  EXPECT_EQ(plain.k.group_tokens, 32);
  const KvMethod all = Make("oscar-su:bits=3:norm=head:rotation=off:group=128");
  EXPECT_EQ(all.name, "oscar-su:bits=3:norm=head:rotation=off:group=128");
  EXPECT_EQ(all.k.rows.bits, 3);
  EXPECT_EQ(all.v.rows.bits, 3);
  EXPECT_EQ(all.k.norm, TokenNorm::kPerHead);
  EXPECT_EQ(all.k.rotation, RotationKind::kNone);
  EXPECT_EQ(all.v.rotation, RotationKind::kNone);
  EXPECT_EQ(all.k.group_tokens, 128);
  EXPECT_EQ(all.v.rows.group_dims, 128);
  EXPECT_EQ(all.run_tokens, 128);
  EXPECT_DOUBLE_EQ(all.HistoryBits(8, 128), (3.25 + 32.0 / 128 + 3.25) / 2);
  EXPECT_EQ(Make("oscar-su:group=128", 64).v.rows.group_dims, 64);
  const KvMethod rows = Make("oscar-su:k=token");
  EXPECT_EQ(rows.k.form, SideForm::kRows);
  EXPECT_EQ(rows.k.rows.group_dims, 32);
  EXPECT_EQ(rows.run_tokens, 64);
  EXPECT_EQ(rows.HistoryBits(8, 128), 3.0);
  EXPECT_DOUBLE_EQ(Make("turboquant:k_bits=4:v_bits=2").HistoryBits(8, 128),
                   (4 + 16.0 / 128 + 2.25) / 2);

  for (const auto& [name, text] : std::map<std::string, std::string>{
           {"oscar-su:", "its switches are"},
           {"oscar-su:bits", "must be 2, 3 or 4"},
           {"oscar-su:bits=5", "must be 2, 3 or 4"},
           {"oscar-su:group=48", "32, 64 or 128"},
           {"oscar-su:norm=some", "all, head or none"},
           {"oscar-su:rotation=1", "on or off"},
           {"oscar-su:k=dim", "channel or token"},
           {"oscar-su:k=token:norm=head", "leave norm out"},
           {"oscar-su:bits=2:", "its switches are"},
           {"kivi:norm=all", "its switches are bits k_bits v_bits group"},
           {"naive:bits=2", "this method has none"},
           {"kitty:bits=2", "this method has none"}}) {
    const auto method = MakeKvMethod({.name = name});
    ASSERT_FALSE(method.has_value()) << name;
    EXPECT_EQ(method.error().param(), "kv") << name;
    EXPECT_THAT(method.error().message(), testing::HasSubstr(text)) << name;
  }
}

}  // namespace
}  // namespace oscar
