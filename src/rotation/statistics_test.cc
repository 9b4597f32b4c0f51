#include "rotation/statistics.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "io/safetensors.h"
#include "numeric/eigen.h"
#include "numeric/hadamard.h"
#include "rotation/rotation_file.h"
#include "rotation/test_util.h"

namespace oscar {
namespace {

constexpr QkvShape kShape{4, 2, 16};

// tests/data/rotation/golden.safetensors: numpy's answers (tools/make_rotation_golden.py).
class Golden {
 public:
  static const Golden& Get() {
    static const Golden golden;
    return golden;
  }
  std::vector<Matrix> Matrices(const std::string& name) const {
    const LoadedTensor loaded = Load(file_->Get(name).value()).value();
    const TensorView& tensor = loaded.view;
    EXPECT_EQ(tensor.dtype, DType::kF64);
    const uint64_t size = 16 * 16;
    std::vector<Matrix> matrices(tensor.num_elements() / size, Matrix(16, 16));
    for (uint64_t i = 0; i < tensor.num_elements(); ++i) {
      matrices[i / size].data()[i % size] = LoadElement<double>(tensor, i);
    }
    return matrices;
  }
  std::vector<double> Values(const std::string& name) const {
    const LoadedTensor loaded = Load(file_->Get(name).value()).value();
    const TensorView& tensor = loaded.view;
    std::vector<double> values(tensor.num_elements());
    for (uint64_t i = 0; i < values.size(); ++i) values[i] = LoadElement<double>(tensor, i);
    return values;
  }
  DumpChunk Chunk(int layer, int chunk) const {
    DumpChunk out;
    out.shape = kShape;
    const auto floats = [&](char part) {
      return ToFloatVector(file_->Get(fmt::format("{}.{}.{}", layer, part, chunk)).value()).value();
    };
    out.q = floats('q');
    out.k = floats('k');
    out.v = floats('v');
    const std::vector<int64_t> lengths =
        ToIntVector(file_->Get(fmt::format("seq_lens.{}", chunk)).value()).value();
    for (const int64_t length : lengths) {
      out.seq_lens.push_back(static_cast<int32_t>(length));
      out.num_tokens += length;
    }
    return out;
  }

 private:
  Golden() {
    auto file =
        SafetensorsFile::Open(std::string(OSCAR_TEST_DATA) + "/rotation/golden.safetensors");
    if (!file) {
      ADD_FAILURE() << file.error().ToString();
      std::abort();
    }
    file_ = std::make_unique<SafetensorsFile>(std::move(*file));
  }
  std::unique_ptr<SafetensorsFile> file_;
};

FittedLayer FitGoldenLayer(int layer, const FitOptions& options, ThreadPool& pool) {
  LayerStatistics statistics(layer, kShape, options);
  for (int pass = 0; pass < LayerStatistics::NumPasses(options); ++pass) {
    for (const int chunk : {0, 1}) {
      const Status status = statistics.Add(Golden::Get().Chunk(layer, chunk).View(), pool);
      EXPECT_TRUE(status.ok()) << status.ToString();
    }
    const Status status = statistics.EndPass();
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
  return statistics.TakeResult();
}

FitOptions OptionsOf(std::string_view objectives, Composition composition, bool per_head) {
  FitOptions options;
  options.objectives = ParseObjectives(objectives).value();
  options.composition = composition;
  options.per_head_k = options.per_head_v = per_head;
  return options;
}

Matrix Mean(const std::vector<Matrix>& matrices) {
  Matrix mean(16, 16);
  for (const Matrix& m : matrices) AddTo(mean, m);
  return Scaled(mean, 1.0 / static_cast<double>(matrices.size()));
}

double Relative(const Matrix& a, const Matrix& b) {
  return MaxAbsDifference(a, b) / StatsOf(b).frobenius;
}

class GoldenMoments : public testing::TestWithParam<std::tuple<int, const char*, const char*>> {};

TEST_P(GoldenMoments, MatchNumpy) {
  const auto [layer, k_name, v_name] = GetParam();
  ThreadPool pool(2);
  const std::string objectives = fmt::format("{}_{}", k_name, v_name);
  // sst_exact goes through attention outputs rounded to fp32, the others stay in fp64.
  const double budget = std::string_view(v_name) == "sst_exact" ? 1e-7 : 1e-14;
  const auto k_expected = Golden::Get().Matrices(fmt::format("{}.{}", layer, k_name));
  const auto v_expected = Golden::Get().Matrices(fmt::format("{}.{}", layer, v_name));

  const FittedLayer shared =
      FitGoldenLayer(layer, OptionsOf(objectives, Composition::kPlain, false), pool);
  ASSERT_EQ(shared.k_moments.size(), 1u);
  EXPECT_LT(Relative(shared.k_moments[0], Mean(k_expected)), 1e-14);
  EXPECT_LT(Relative(shared.v_moments[0], Mean(v_expected)), budget);
  EXPECT_EQ(shared.num_tokens, 50);

  const FittedLayer per_head =
      FitGoldenLayer(layer, OptionsOf(objectives, Composition::kPlain, true), pool);
  ASSERT_EQ(per_head.k_moments.size(), 2u);
  for (size_t head = 0; head < 2; ++head) {
    EXPECT_LT(Relative(per_head.k_moments[head], k_expected[head]), 1e-14);
    EXPECT_LT(Relative(per_head.v_moments[head], v_expected[head]), budget);
    // The stored matrix diagonalises the expected moment, to the fp32 it is stored in.
    const Matrix r =
        Matrix::FromFloats(per_head.rotation.k.MatrixOf(static_cast<int>(head)), 16, 16);
    const Matrix rotated = Multiply(Multiply(r.Transposed(), k_expected[head]), r);
    for (int i = 0; i < 16; ++i) {
      const auto at = static_cast<size_t>(i);
      EXPECT_NEAR(rotated(i, i), per_head.rotation.k.EigenvaluesOf(static_cast<int>(head))[at],
                  1e-6 * StatsOf(k_expected[head]).trace);
      for (int j = 0; j < i; ++j) {
        EXPECT_NEAR(rotated(i, j), 0, 1e-6 * StatsOf(k_expected[head]).trace);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Objectives, GoldenMoments,
                         testing::Combine(testing::Values(1, 4), testing::Values("qqt", "ktk"),
                                          testing::Values("sst", "sst_exact", "vtv")));

// One run gives both forms, and the shared one is that of a run of its own, bit for bit.
TEST(Statistics, SharedMatricesComeBesidePerHeadOnes) {
  ThreadPool pool(2);
  for (const char* objectives : {"qqt_sst", "ktk_vtv", "qqt_sst_exact", "hadamard"}) {
    const FitOptions alone = OptionsOf(objectives, Composition::kRHPbr, false);
    FitOptions both = OptionsOf(objectives, Composition::kRHPbr, true);
    both.also_shared = true;
    both.fit_clip = true;
    const FittedLayer shared = FitGoldenLayer(1, alone, pool),
                      fitted = FitGoldenLayer(1, both, pool);
    EXPECT_EQ(fitted.rotation.k.num_heads, 2) << objectives;
    EXPECT_EQ(fitted.shared, shared.rotation) << objectives;
    const auto rotation = AssembleSharedRotation(kShape, both, {{1, fitted}});
    ASSERT_TRUE(rotation.has_value()) << rotation.error().ToString();
    EXPECT_EQ(rotation->info, AssembleRotation(kShape, alone, {{1, shared}})->info);
  }
}

class GoldenCompositions : public testing::TestWithParam<Composition> {};

TEST_P(GoldenCompositions, RotateTheMomentAsNumpyDoes) {
  ThreadPool pool(1);
  for (const int layer : {1, 4}) {
    const FittedLayer fitted = FitGoldenLayer(layer, OptionsOf("qqt_sst", GetParam(), false), pool);
    for (const char side : {'k', 'v'}) {
      const SideRotation& rotation = side == 'k' ? fitted.rotation.k : fitted.rotation.v;
      const Matrix c =
          Mean(Golden::Get().Matrices(fmt::format("{}.{}", layer, side == 'k' ? "qqt" : "sst")));
      const Matrix m = Matrix::FromFloats(rotation.MatrixOf(0), 16, 16);
      Matrix rotated = Multiply(Multiply(m.Transposed(), c), m);
      Matrix expected =
          Golden::Get().Matrices(fmt::format("{}.{}.{}", layer, side, NameOf(GetParam())))[0];
      if (GetParam() == Composition::kHRPbr || GetParam() == Composition::kHPbrR) {
        // R is not the first factor, so the signs of its columns show.
        for (double& x : rotated.data()) x = std::abs(x);
        for (double& x : expected.data()) x = std::abs(x);
      }
      EXPECT_LT(Relative(rotated, expected), 1e-6) << layer << side;
      EXPECT_LT(OrthogonalityError(m), 1e-6);
      const std::vector<double> eigenvalues =
          Golden::Get().Values(fmt::format("{}.{}.eigenvalues", layer, side));
      for (size_t i = 0; i < 16; ++i) {
        EXPECT_NEAR(rotation.EigenvaluesOf(0)[i], eigenvalues[i], 1e-6 * StatsOf(c).trace);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GoldenCompositions,
                         testing::Values(Composition::kPlain, Composition::kPbr, Composition::kBr,
                                         Composition::kBrH128, Composition::kRH, Composition::kHPbr,
                                         Composition::kHRPbr, Composition::kHPbrR,
                                         Composition::kRHPbr),
                         [](const auto& test) { return std::string(NameOf(test.param)); });

TEST(StatisticsTest, EigenspacesMatchNumpys) {
  // The plain rotation's leading columns span the space that numpy's moment gives.
  ThreadPool pool(1);
  const FittedLayer fitted =
      FitGoldenLayer(1, OptionsOf("qqt_sst", Composition::kPlain, false), pool);
  const auto eigen = DecomposeSymmetric(Mean(Golden::Get().Matrices("1.qqt")));
  ASSERT_TRUE(eigen.has_value());
  const Matrix r = Matrix::FromFloats(fitted.rotation.k.MatrixOf(0), 16, 16);
  for (const int count : {1, 4, 8}) {
    EXPECT_LT(
        SubspaceDistance(r.Columns(16 - count, count), eigen->vectors.Columns(16 - count, count)),
        1e-5);
  }
}

TEST(StatisticsTest, UresidualMatchesNumpy) {
  ThreadPool pool(2);
  const std::vector<int> layers{1, 4};
  const Rotation reference = MakeDataFreeRotation("hadamard", layers, 16).value();
  FitOptions options = OptionsOf("uresidual", Composition::kRHPbr, false);
  options.reference = &reference;
  for (const int layer : layers) {
    const FittedLayer fitted = FitGoldenLayer(layer, options, pool);
    for (const char side : {'k', 'v'}) {
      const SideRotation& rotation = side == 'k' ? fitted.rotation.k : fitted.rotation.v;
      const Matrix m = Matrix::FromFloats(rotation.MatrixOf(0), 16, 16);
      EXPECT_LT(OrthogonalityError(m), 1e-6);
      // Signs of either basis may differ, but they act on eigenvectors that are paired one to one:
      // M^T E M must be diagonal in the objective's basis, in the opposite order.
      const Matrix c =
          Mean(Golden::Get().Matrices(fmt::format("{}.{}", layer, side == 'k' ? "qqt" : "sst")));
      const Matrix e = Golden::Get().Matrices(fmt::format("{}.{}.residual", layer, side))[0];
      const auto basis = DecomposeSymmetric(c);
      const auto residual = DecomposeSymmetric(e);
      ASSERT_TRUE(basis.has_value() && residual.has_value());
      const Matrix mu = Multiply(m, basis->vectors);
      const Matrix diagonal = Multiply(Multiply(mu.Transposed(), e), mu);
      for (int i = 0; i < 16; ++i) {
        EXPECT_NEAR(diagonal(i, i), residual->values[static_cast<size_t>(15 - i)],
                    1e-5 * StatsOf(e).trace);
        for (int j = 0; j < i; ++j) EXPECT_NEAR(diagonal(i, j), 0, 1e-5 * StatsOf(e).trace);
      }
    }
  }
}

TEST(StatisticsTest, DataFreeObjectivesIgnoreTheData) {
  ThreadPool pool(1);
  const FittedLayer fitted =
      FitGoldenLayer(1, OptionsOf("hadamard_identity", Composition::kRHPbr, true), pool);
  EXPECT_EQ(fitted.rotation.k.num_heads, 2);
  EXPECT_EQ(MaxAbsDifference(Matrix::FromFloats(fitted.rotation.k.MatrixOf(1), 16, 16),
                             HadamardMatrix(16)),
            0);  // 1/4 is exact
  EXPECT_EQ(MaxAbsDifference(Matrix::FromFloats(fitted.rotation.v.MatrixOf(0), 16, 16),
                             Matrix::Identity(16)),
            0);
  EXPECT_EQ(fitted.rotation.k.eigenvalues, std::vector<float>(32, 1.0f));
}

TEST(StatisticsTest, SstExactNeverAttendsAcrossSequences) {
  // Two sequences in one chunk give what two chunks of one sequence give.
  ThreadPool pool(1);
  const DumpChunk both = SyntheticChunk(kShape, {9, 6}, 3);
  const size_t q_cut = size_t{9} * 4 * 16;
  const size_t k_cut = size_t{9} * 2 * 16;
  const FitOptions options = OptionsOf("qqt_sst_exact", Composition::kPlain, true);
  LayerStatistics together(0, kShape, options);
  ASSERT_TRUE(together.Add(both.View(), pool).ok());
  LayerStatistics apart(0, kShape, options);
  const std::vector<int32_t> first{9};
  const std::vector<int32_t> second{6};
  const std::span<const float> q(both.q), k(both.k), v(both.v);
  ASSERT_TRUE(apart.Add({9, q.first(q_cut), k.first(k_cut), v.first(k_cut), first}, pool).ok());
  ASSERT_TRUE(
      apart.Add({6, q.subspan(q_cut), k.subspan(k_cut), v.subspan(k_cut), second}, pool).ok());
  ASSERT_TRUE(together.EndPass().ok() && apart.EndPass().ok());
  EXPECT_EQ(together.TakeResult().rotation, apart.TakeResult().rotation);

  // One sequence of 15 is something else.
  LayerStatistics joined(0, kShape, options);
  const std::vector<int32_t> one{15};
  ASSERT_TRUE(joined.Add({15, q, k, v, one}, pool).ok());
  ASSERT_TRUE(joined.EndPass().ok());
  LayerStatistics again(0, kShape, options);
  ASSERT_TRUE(again.Add(both.View(), pool).ok());
  ASSERT_TRUE(again.EndPass().ok());
  EXPECT_GT(MaxAbsDifference(joined.TakeResult().v_moments[0], again.TakeResult().v_moments[0]),
            1e-3);
}

Rotation FitStream(const std::vector<DumpChunk>& chunks, const FitOptions& options, int threads) {
  ThreadPool pool(threads);
  QkvStatistics statistics(kShape, options);
  for (int pass = 0; pass < statistics.num_passes(); ++pass) {
    for (const DumpChunk& chunk : chunks) {
      for (const int layer : {0, 3}) EXPECT_TRUE(statistics.Add(layer, chunk.View(), pool).ok());
    }
    EXPECT_TRUE(statistics.EndPass().ok());
  }
  auto rotation = statistics.Fit();
  EXPECT_TRUE(rotation.has_value()) << rotation.error().ToString();
  return *rotation;
}

TEST(StatisticsTest, SameBitsForAnyThreadsAndChunks) {
  FitOptions options = OptionsOf("qqt_sst", Composition::kRHPbr, true);
  options.fit_clip = true;
  options.clip.max_tokens = 100;
  const DumpChunk whole = SyntheticChunk(kShape, {150, 150}, 5);
  std::vector<DumpChunk> parts;
  int64_t first = 0;
  for (const int32_t tokens : {1, 99, 200}) {
    DumpChunk part;
    part.shape = kShape;
    part.num_tokens = tokens;
    const auto cut = [&](const std::vector<float>& x, int heads) {
      const int64_t row = int64_t{heads} * 16;
      return std::vector<float>(x.begin() + first * row, x.begin() + (first + tokens) * row);
    };
    part.q = cut(whole.q, 4);
    part.k = cut(whole.k, 2);
    part.v = cut(whole.v, 2);
    parts.push_back(std::move(part));
    first += tokens;
  }
  const Rotation one = FitStream({whole}, options, 1);
  for (const int threads : {1, 3}) {
    const Rotation other = FitStream(parts, options, threads);
    EXPECT_EQ(other.layers, one.layers);
    EXPECT_EQ(other.info, one.info);
  }
  EXPECT_EQ(one.info.clip_source, "fitted");
  EXPECT_EQ(one.info.calibration_tokens, 300);
  EXPECT_TRUE(one.info.calibration_hash.starts_with("xxh3:"));
  const Rotation elsewhere = FitStream({SyntheticChunk(kShape, {300}, 6)}, options, 1);
  EXPECT_NE(elsewhere.info.calibration_hash, one.info.calibration_hash);
}

// Clips of values follow the attention that tokens get, whatever the matrices were fitted for.
TEST(StatisticsTest, ValueClipsAreWeighedUnderEveryObjective) {
  // Values of tokens with attention are four levels, which a clip would spoil; those of tokens
  // without are larger, and have a last one that is best clipped.
  DumpChunk chunk = SyntheticChunk(kShape, {400}, 8);
  constexpr size_t kRow = 16;
  for (size_t r = 0; r < chunk.v.size() / kRow; ++r) {
    const bool seen = r / 2 % 2 == 0;
    for (size_t d = 0; d < kRow; ++d) {
      const float light = d == 0 ? 140.0f : static_cast<float>((r * 7 + d * 37) % 200) - 100.0f;
      chunk.k[r * kRow + d] = seen ? 1.0f : 1e-4f;
      chunk.v[r * kRow + d] = !seen ? light : d == 0 ? 3.0f : static_cast<float>(d % 3);
    }
  }
  for (const char* objectives : {"identity", "ktk_identity", "qqt_identity"}) {
    for (const bool per_head : {false, true}) {
      FitOptions options = OptionsOf(objectives, Composition::kPlain, per_head);
      options.fit_clip = true;
      const Rotation rotation = FitStream({chunk}, options, 2);
      for (const float clip : rotation.layers.begin()->second.v.clip) {
        EXPECT_EQ(clip, 0.0f) << objectives;
      }
    }
  }
}

TEST(StatisticsTest, BadDataIsAnError) {
  ThreadPool pool(1);
  const FitOptions options = OptionsOf("qqt_sst", Composition::kRHPbr, false);
  DumpChunk chunk = SyntheticChunk(kShape, {8}, 7);
  {
    LayerStatistics statistics(5, kShape, options);
    QkvChunk view = chunk.View();
    view.k = view.k.subspan(16);
    EXPECT_EQ(statistics.Add(view, pool).code(), StatusCode::kInvalidArgument);
  }
  {
    LayerStatistics statistics(5, kShape, options);
    EXPECT_EQ(statistics.EndPass().code(), StatusCode::kInvalidArgument);  // no tokens
  }
  {  // passes must see the same data
    LayerStatistics statistics(5, kShape, options);
    ASSERT_TRUE(statistics.Add(chunk.View(), pool).ok());
    ASSERT_TRUE(statistics.EndPass().ok());
    const Status status = statistics.EndPass();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find('8'), std::string::npos) << status.message();
  }
  {  // sequence lengths that do not add up
    LayerStatistics statistics(5, kShape, OptionsOf("qqt_sst_exact", Composition::kPlain, false));
    chunk.seq_lens = {3, 4};
    EXPECT_EQ(statistics.Add(chunk.View(), pool).code(), StatusCode::kInvalidArgument);
  }
  {  // NaN in the capture
    chunk.q[5] = std::numeric_limits<float>::quiet_NaN();
    LayerStatistics statistics(5, kShape, OptionsOf("qqt_vtv", Composition::kPlain, false));
    ASSERT_TRUE(statistics.Add(chunk.View(), pool).ok());
    const Status status = statistics.EndPass();
    EXPECT_EQ(status.code(), StatusCode::kDataLoss);
    EXPECT_NE(status.message().find("layer 5 k"), std::string::npos) << status.message();
  }
}

TEST(StatisticsTest, SidesMayDifferInTheirNumberOfMatrices) {
  ThreadPool pool(1);
  FitOptions options = OptionsOf("qqt_sst", Composition::kRHPbr, false);
  const LayerRotation shared = FitGoldenLayer(1, options, pool).rotation;
  options.per_head_k = true;
  const LayerRotation mixed = FitGoldenLayer(1, options, pool).rotation;
  EXPECT_EQ(mixed.k.num_heads, 2);
  EXPECT_EQ(mixed.v, shared.v);
  options.per_head_v = true;
  EXPECT_EQ(FitGoldenLayer(1, options, pool).rotation.k, mixed.k);
}

TEST(StatisticsTest, OptionsThatCannotWork) {
  ThreadPool pool(1);
  QkvStatistics unsound({5, 2, 16}, {});
  EXPECT_EQ(unsound.Add(0, {}, pool).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(CheckFitOptions({}, kShape).ok());
  EXPECT_FALSE(CheckFitOptions({}, {5, 2, 16}).ok());
  EXPECT_FALSE(CheckFitOptions({}, {4, 2, 24}).ok());  // H of order 24
  FitOptions plain;
  plain.composition = Composition::kPlain;
  EXPECT_TRUE(CheckFitOptions(plain, {4, 2, 24}).ok());
  EXPECT_FALSE(CheckFitOptions(OptionsOf("uresidual", Composition::kPlain, false), kShape).ok());
  FitOptions clip;
  clip.k_clip = 1.5f;
  EXPECT_FALSE(CheckFitOptions(clip, kShape).ok());
}

}  // namespace
}  // namespace oscar
