#include "weights/source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <span>
#include <thread>
#include <tuple>
#include <utility>

#include "io/safetensors.h"

namespace oscar {
namespace {

using testing::HasSubstr;

struct Fp8Case {
  const char* name;
  int64_t outputs, inputs;
  Fp8Tiles blocks;
};
class Fp8Goldens : public testing::TestWithParam<Fp8Case> {};

// tools/make_fp8_goldens.py wrote both sides from integers and fractions.
TEST_P(Fp8Goldens, MultiplyOutAsExpected) {
  const auto& [name, outputs, inputs, blocks] = GetParam();
  const auto source = OpenCheckpointWeights(OSCAR_TEST_DATA "/fp8");
  ASSERT_TRUE(source.has_value()) << source.error().ToString();
  auto file = SafetensorsFile::Open(OSCAR_TEST_DATA "/fp8/expected.safetensors");
  const std::vector<float> expected = *ToFloatVector(*file->Get(name));
  const std::vector<int64_t> shape = {outputs, inputs};
  std::vector<float> values(expected.size());
  Status status = (*source)->Load(name, shape, values);
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(values, expected);
  std::vector<Bf16> rounded(expected.size());
  ASSERT_TRUE((*source)->LoadBf16(name, shape, rounded).ok());
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(rounded[i], ToBf16(expected[i]));

  const auto found = (*source)->Fp8Of(name, outputs, inputs);
  ASSERT_TRUE(found.has_value() && found->has_value());
  EXPECT_EQ(**found, blocks);
  std::vector<uint8_t> codes(expected.size());
  std::vector<float> scales(
      static_cast<size_t>(blocks.NumRows(outputs) * blocks.NumColumns(inputs)));
  status = (*source)->LoadFp8(name, outputs, inputs, codes, scales);
  ASSERT_TRUE(status.ok()) << status.ToString();
  for (int64_t i = 0; i < outputs; ++i) {
    for (int64_t j = 0; j < inputs; ++j) {
      const auto at = static_cast<size_t>(i * inputs + j);
      const float scale = scales[static_cast<size_t>(i / blocks.rows * blocks.NumColumns(inputs) +
                                                     j / blocks.columns)];
      EXPECT_EQ(F8E4M3ToFloat(codes[at]) * scale, expected[at]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Fp8Goldens,
                         testing::Values(Fp8Case{"block.weight", 130, 260, {128, 128}},
                                         Fp8Case{"block_bf16.weight", 129, 128, {128, 128}},
                                         Fp8Case{"channel.weight", 24, 96, {1, 96}},
                                         Fp8Case{"channel_flat.weight", 16, 64, {1, 64}},
                                         Fp8Case{"tensor.weight", 8, 40, {8, 40}},
                                         Fp8Case{"tensor_one.weight", 8, 40, {8, 40}}),
                         [](const auto& test) {
                           std::string name = test.param.name;
                           return name.substr(0, name.find('.'));
                         });

TEST(Fp8Weights, RefusesWhatItCannotTrust) {
  const auto source = OpenCheckpointWeights(OSCAR_TEST_DATA "/fp8");
  ASSERT_TRUE(source.has_value());
  std::vector<float> out(8);
  const std::vector<int64_t> shape = {2, 4};
  EXPECT_THAT((*source)->Load("nan.weight", shape, out).message(),
              HasSubstr("nan.weight is not a number at element 5"));
  EXPECT_THAT((*source)->Load("bare.weight", shape, out).message(),
              HasSubstr("expected a matrix with bare.weight_scale_inv or bare.weight_scale"));
  EXPECT_THAT(
      (*source)->Load("odd.weight", shape, out).message(),
      HasSubstr("odd.weight_scale has shape [3]; expected one scale for all of odd.weight"));
  EXPECT_THAT((*source)->Load("infinite.weight", shape, out).message(),
              HasSubstr("infinite.weight_scale holds a scale that is not finite"));
}

class StoredWeights : public testing::Test {
 protected:
  // One tensor "w" of this type; element 70000 is `value`.
  Status Load(DType dtype, float value, bool as_bf16) {
    constexpr size_t kCount = 100000;
    std::vector<std::byte> data;
    for (size_t i = 0; i < kCount; ++i) {
      const float x = i == 70000 ? value : 0.5f;
      const Bf16 narrow = ToBf16(x);
      const auto bytes = dtype == DType::kBf16 ? std::as_bytes(std::span(&narrow, 1))
                                               : std::as_bytes(std::span(&x, 1));
      data.insert(data.end(), bytes.begin(), bytes.end());
    }
    const std::vector<int64_t> shape = {kCount};
    const TensorView view{"w", dtype, shape, data};
    const auto path = std::filesystem::path(testing::TempDir()) / "oscar_stored_weights";
    std::filesystem::create_directories(path);
    EXPECT_TRUE(WriteSafetensors(path / "model.safetensors", {&view, 1}, {}).ok());
    const auto source = OpenCheckpointWeights(path.string());
    std::vector<float> floats(kCount);
    std::vector<Bf16> halves(kCount);
    return as_bf16 ? (*source)->LoadBf16("w", shape, halves) : (*source)->Load("w", shape, floats);
  }
};

TEST_F(StoredWeights, MustBeFinite) {
  for (const bool as_bf16 : {false, true}) {
    for (const DType dtype : {DType::kBf16, DType::kF32}) {
      EXPECT_TRUE(Load(dtype, -3e38f, as_bf16).ok());
      for (const float bad : {NAN, -NAN, INFINITY, -INFINITY}) {
        EXPECT_THAT(Load(dtype, bad, as_bf16).message(),
                    HasSubstr("oscar_stored_weights: tensor 'w' is not a finite number at element "
                              "70000"));
      }
    }
  }
  EXPECT_FALSE(Load(DType::kF32, 3.4e38f, true).ok());  // beyond BF16
  EXPECT_THAT(Load(DType::kI32, 1.0f, true).message(), HasSubstr("oscar_stored_weights: tensor"));
}

// Another process may truncate or rewrite a file at any moment of loading. Either the weights are
// whole or the error names the file; a memory map would end the process (SIGBUS).
TEST(ChangingWeights, AreAnErrorThatNamesTheFile) {
  constexpr int64_t kRows = 256, kColumns = 4096;
  const std::vector<int64_t> shape = {kRows, kColumns};
  const std::vector<Bf16> ones(kRows * kColumns, ToBf16(1.0f));
  const TensorView view{"w", DType::kBf16, shape, std::as_bytes(std::span(ones))};
  const auto folder = std::filesystem::path(testing::TempDir()) / "oscar_changing_weights";
  std::filesystem::create_directories(folder);
  const auto path = folder / "model.safetensors";
  // How often the other one comes first is a matter of timing; the message counts, which ten show.
  int refused = 0;
  for (int round = 0; round < 100 || (round < 2000 && refused <= 10); ++round) {
    ASSERT_TRUE(WriteSafetensors(path, {&view, 1}, {}).ok());
    std::atomic<bool> opened = false;
    std::jthread other([&] {
      if (round % 2 == 0) opened.wait(false);
      std::this_thread::sleep_for(std::chrono::microseconds(7 * (round % 100)));
      std::error_code ignored;
      std::filesystem::resize_file(path, round % 3 == 0 ? 0 : 1 << 20, ignored);
    });
    const auto source = OpenCheckpointWeights(folder.string());
    opened = true;
    opened.notify_all();
    Status status = source.has_value() ? Status() : source.error();
    std::vector<Bf16> loaded(ones.size());
    for (int pass = 0; pass < 3 && status.ok(); ++pass) {
      status = (*source)->LoadBf16("w", shape, loaded);
      if (status.ok()) {
        ASSERT_EQ(loaded, ones);
      }
    }
    if (!status.ok()) {
      ++refused;
      EXPECT_THAT(status.message(), HasSubstr(path.string() + ": "));
    }
    if (!status.ok() && source.has_value()) {
      EXPECT_THAT(status.message(), HasSubstr("model.safetensors: changed while it was read"));
    }
  }
  EXPECT_GT(refused, 10);
  std::filesystem::remove_all(folder);
}

// What transformers makes of a config that ties the head: the head it finds where that differs from
// the embedding, and one matrix under either name where it does not.
class TiedHead : public testing::Test {
 protected:
  void SetUp() override {
    spec_.vocab_size = 700;
    spec_.hidden = 1024;  // rows are compared in several parts
    spec_.name(Role::kEmbedding) = "model.embed_tokens.weight";
    spec_.name(Role::kHead) = "lm_head.weight";
    spec_.tied_head = true;
    embedding_.resize(size_t{700} * 1024);
    const std::vector<int64_t> shape = {700, 1024};
    ASSERT_TRUE(MakeRandomWeights(8)->LoadBf16("w", shape, embedding_).ok());
    head_ = embedding_;
  }
  Result<bool> Follow(bool with_embedding, bool with_head) {
    std::vector<TensorView> views;
    for (const auto& [name, values, wanted] :
         {std::tuple("model.embed_tokens.weight", &embedding_, with_embedding),
          std::tuple("lm_head.weight", &head_, with_head)}) {
      if (wanted) {
        views.push_back({name, DType::kBf16, {700, 1024}, std::as_bytes(std::span(*values))});
      }
    }
    const auto path = std::filesystem::path(testing::TempDir()) / "oscar_tied_head";
    std::filesystem::create_directories(path);
    EXPECT_TRUE(WriteSafetensors(path / "model.safetensors", views, {}).ok());
    return FollowCheckpoint(**OpenCheckpointWeights(path.string()), &spec_);
  }
  ModelSpec spec_;
  std::vector<Bf16> embedding_, head_;
};

TEST_F(TiedHead, IsTheEmbeddingWhereTheCheckpointHasNoOther) {
  EXPECT_FALSE(*Follow(/*with_embedding=*/true, /*with_head=*/false));
  EXPECT_TRUE(spec_.tied_head);
  EXPECT_FALSE(*Follow(true, true));
  EXPECT_TRUE(spec_.tied_head);
  EXPECT_EQ(spec_.name(Role::kEmbedding), "model.embed_tokens.weight");
}

TEST_F(TiedHead, IsTheCheckpointsWhereItDiffers) {
  head_[size_t{699} * 1024 + 5] = ToBf16(3.0f);
  const uint64_t tied = TensorTable(spec_).num_parameters();
  EXPECT_TRUE(*Follow(true, true));
  EXPECT_FALSE(spec_.tied_head);
  EXPECT_EQ(TensorTable(spec_).num_parameters(), tied + 700 * 1024);
}

TEST_F(TiedHead, StandsForTheEmbeddingWhereThatIsMissing) {
  EXPECT_FALSE(*Follow(false, true));
  EXPECT_TRUE(spec_.tied_head);
  EXPECT_EQ(spec_.name(Role::kEmbedding), "lm_head.weight");
}

TEST_F(TiedHead, OfAnUntiedModelIsLeftAlone) {
  spec_.tied_head = false;
  EXPECT_FALSE(*Follow(false, true));
  EXPECT_EQ(spec_.name(Role::kEmbedding), "model.embed_tokens.weight");
}

// A model whose layer has a matrix of this name.
ModelSpec SpecWithMatrix(const std::string& name) {
  ModelSpec spec;
  SetLayers({}, 1, &spec);
  spec.name(Role::kDown) = name;
  return spec;
}

// Rows are the same numbers alone and with others, wherever in a piece, a block of scales or a
// sample of random numbers they begin.
void ExpectRowsOf(const WeightSource& source, const std::string& name, int64_t outputs,
                  int64_t inputs) {
  const std::vector<int64_t> shape = {outputs, inputs};
  const auto width = static_cast<size_t>(inputs);
  std::vector<float> all(static_cast<size_t>(outputs) * width);
  std::vector<Bf16> all_narrow(all.size());
  ASSERT_TRUE(source.Load(name, shape, all).ok());
  ASSERT_TRUE(source.LoadBf16(name, shape, all_narrow).ok());
  for (const int64_t at_once : {int64_t{1}, int64_t{3}, int64_t{32}, outputs - 1}) {
    std::vector<float> values(all.size());
    std::vector<Bf16> narrow(all.size());
    for (int64_t row = 0; row < outputs; row += at_once) {
      const WeightRows rows{row, std::min(at_once, outputs - row)};
      const size_t at = static_cast<size_t>(row) * width;
      const size_t count = static_cast<size_t>(rows.count) * width;
      ASSERT_TRUE(source.LoadRows(name, shape, rows, std::span(values).subspan(at, count)).ok());
      ASSERT_TRUE(
          source.LoadBf16Rows(name, shape, rows, std::span(narrow).subspan(at, count)).ok());
    }
    EXPECT_EQ(values, all) << name << ", " << at_once << " at once";
    EXPECT_EQ(narrow, all_narrow) << name << ", " << at_once << " at once";
  }
}

TEST(WeightRows, AreThoseOfTheTensor) {
  const auto fp8 = OpenCheckpointWeights(OSCAR_TEST_DATA "/fp8");
  ExpectRowsOf(**fp8, "block.weight", 130, 260);
  ExpectRowsOf(**fp8, "channel.weight", 24, 96);
  ExpectRowsOf(**fp8, "tensor.weight", 8, 40);
  ExpectRowsOf(*MakeRandomWeights(5), "w", 37, 1023);
  ExpectRowsOf(*QuantizeWeights(MakeRandomWeights(5), SpecWithMatrix("w")), "w", 37, 1023);
  ExpectRowsOf(*QuantizeWeights(MakeRandomWeights(5), SpecWithMatrix("w"), Fp8Tiles{16, 128}), "w",
               37, 1023);

  constexpr int64_t kOutputs = 67, kInputs = 1021;
  std::vector<float> wide(kOutputs * kInputs);
  std::vector<Bf16> narrow;
  ASSERT_TRUE(MakeRandomWeights(6)->Load("w", std::vector<int64_t>{kOutputs, kInputs}, wide).ok());
  for (const float x : wide) narrow.push_back(ToBf16(x));
  const std::vector<TensorView> views = {
      {"f32", DType::kF32, {kOutputs, kInputs}, std::as_bytes(std::span(wide))},
      {"bf16", DType::kBf16, {kOutputs, kInputs}, std::as_bytes(std::span(narrow))}};
  const auto path = std::filesystem::path(testing::TempDir()) / "oscar_weight_rows";
  std::filesystem::create_directories(path);
  ASSERT_TRUE(WriteSafetensors(path / "model.safetensors", views, {}).ok());
  const auto stored = OpenCheckpointWeights(path.string());
  ASSERT_TRUE(stored.has_value()) << stored.error().ToString();
  ExpectRowsOf(**stored, "f32", kOutputs, kInputs);
  ExpectRowsOf(**stored, "bf16", kOutputs, kInputs);
  // And errors count from the tensor's beginning.
  std::vector<float> row(4);
  EXPECT_THAT((*fp8)->LoadRows("nan.weight", std::vector<int64_t>{2, 4}, {1, 1}, row).message(),
              HasSubstr("nan.weight is not a number at element 5"));
}

// Quantised while loading: every weight within half a step, the largest exact, scales by row.
TEST(Fp8Weights, QuantizeWeights) {
  ModelSpec spec = SpecWithMatrix("w");
  spec.name(Role::kEmbedding) = "embedding";
  const auto plain = MakeRandomWeights(3);
  const auto source = QuantizeWeights(MakeRandomWeights(3), spec);
  constexpr int64_t kOutputs = 24, kInputs = 256;
  const std::vector<int64_t> shape = {kOutputs, kInputs};
  std::vector<Bf16> exact(kOutputs * kInputs), rounded(exact.size());
  std::vector<float> values(exact.size());
  ASSERT_TRUE(plain->LoadBf16("w", shape, exact).ok());
  ASSERT_TRUE(source->Load("w", shape, values).ok());
  for (size_t row = 0; row < kOutputs; ++row) {
    float largest = 0.0f;
    size_t where = 0;
    for (size_t i = row * kInputs; i < (row + 1) * kInputs; ++i) {
      if (std::fabs(ToFloat(exact[i])) > largest) where = i;
      largest = std::max(largest, std::fabs(ToFloat(exact[i])));
    }
    EXPECT_NEAR(values[where], ToFloat(exact[where]), 1e-6f * largest);
    for (size_t i = row * kInputs; i < (row + 1) * kInputs; ++i) {
      const float x = ToFloat(exact[i]);
      // Four significant bits, or the smallest step of 2^-9 / 448 of the largest.
      EXPECT_LE(std::fabs(values[i] - x),
                std::max(std::fabs(x) / 16.0f, largest / 448.0f * 0x1p-10f) * 1.0001f);
    }
  }
  // Embedding and vectors are left alone, and the model is another one.
  ASSERT_TRUE(source->LoadBf16("embedding", shape, rounded).ok());
  ASSERT_TRUE(plain->LoadBf16("embedding", shape, exact).ok());
  EXPECT_EQ(rounded, exact);
  EXPECT_FALSE(source->Fp8Of("embedding", kOutputs, kInputs)->has_value());
  EXPECT_NE(source->Fingerprint(), plain->Fingerprint());
}

// Blocks, whose last ones are cut short: codes times scales are what Load gives, scales by block.
TEST(Fp8Weights, QuantizeWeightsInBlocks) {
  constexpr int64_t kOutputs = 40, kInputs = 200;
  constexpr Fp8Tiles kTiles{32, 128};
  const std::vector<int64_t> shape = {kOutputs, kInputs};
  const auto plain = MakeRandomWeights(3);
  const auto source = QuantizeWeights(MakeRandomWeights(3), SpecWithMatrix("w"), kTiles);
  ASSERT_EQ(*source->Fp8Of("w", kOutputs, kInputs), std::optional(kTiles));
  std::vector<Bf16> exact(kOutputs * kInputs);
  std::vector<float> values(exact.size()), scales(4);
  std::vector<uint8_t> codes(exact.size());
  ASSERT_TRUE(plain->LoadBf16("w", shape, exact).ok());
  ASSERT_TRUE(source->Load("w", shape, values).ok());
  ASSERT_TRUE(source->LoadFp8("w", kOutputs, kInputs, codes, scales).ok());
  std::vector<float> largest(4, 0.0f);
  const auto block = [](size_t i) { return i / kInputs / 32 * 2 + i % kInputs / 128; };
  for (size_t i = 0; i < exact.size(); ++i) {
    largest[block(i)] = std::max(largest[block(i)], std::fabs(ToFloat(exact[i])));
    EXPECT_EQ(values[i], F8E4M3ToFloat(codes[i]) * scales[block(i)]);
  }
  for (size_t b = 0; b < 4; ++b) EXPECT_EQ(scales[b], largest[b] / 448.0f) << b;
}

}  // namespace
}  // namespace oscar
