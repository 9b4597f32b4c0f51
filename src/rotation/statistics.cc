#include "rotation/statistics.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "numeric/eigen.h"
#include "numeric/hadamard.h"

namespace oscar {
namespace {

constexpr int64_t kRowsPerTask = 64;
// Guards of the published fitter, against empty data.
constexpr double kMinWeightSum = 1e-12;
constexpr double kMinRange = 1e-8;

bool NeedsWeights(const FitOptions& options) {
  return options.objectives.v == Objective::kSst || options.objectives.v == Objective::kUresidual;
}

bool NeedsQueryMoment(const FitOptions& options) {
  return options.objectives.k == Objective::kQqt || options.objectives.k == Objective::kUresidual ||
         NeedsWeights(options) || options.fit_clip;
}

std::vector<Matrix> SecondMoments(const CovarianceAccumulator& sums) {
  std::vector<Matrix> moments;
  moments.reserve(static_cast<size_t>(sums.num_groups()));
  for (int group = 0; group < sums.num_groups(); ++group) {
    moments.push_back(sums.SecondMoment(group));
  }
  return moments;
}

// The mean over heads where the layer shares one matrix.
std::vector<Matrix> ShareUnless(bool per_head, std::vector<Matrix> moments) {
  if (per_head || moments.empty()) return moments;
  Matrix mean(moments[0].rows(), moments[0].cols());
  for (const Matrix& moment : moments) AddTo(mean, moment);
  return {Scaled(mean, 1.0 / static_cast<double>(moments.size()))};
}

// y = x M for one row, in fp64.
void RotateRow(const float* x, const Matrix& m, std::span<double> y) {
  std::fill(y.begin(), y.end(), 0.0);
  for (int i = 0; i < m.rows(); ++i) {
    const double value = x[i];
    const std::span<const double> row = m.row(i);
    for (size_t j = 0; j < y.size(); ++j) y[j] += value * row[j];
  }
}

// What 2-bit min/max over the whole row loses, without clip: y <- y - y^.
void TakeResidual(std::span<double> y) {
  const auto [low, high] = std::minmax_element(y.begin(), y.end());
  const double min = *low;
  const double scale = std::max(*high - min, kMinRange) / 3.0;
  for (double& x : y) {
    const double code = std::clamp(std::floor((x - min) / scale + 0.5), 0.0, 3.0);
    x -= code * scale + min;
  }
}

std::vector<float> Residuals(std::span<const float> rows, const QkvShape& shape,
                             const SideRotation& reference, ThreadPool& pool) {
  const auto dim = static_cast<size_t>(shape.head_dim);
  const auto heads = static_cast<size_t>(shape.num_kv_heads);
  std::vector<Matrix> matrices;
  matrices.reserve(heads);
  for (int head = 0; head < shape.num_kv_heads; ++head) {
    matrices.push_back(
        Matrix::FromFloats(reference.MatrixOf(head), shape.head_dim, shape.head_dim));
  }
  std::vector<float> residuals(rows.size());
  const auto count = static_cast<int64_t>(rows.size() / dim);
  pool.ParallelFor((count + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int) {
    std::vector<double> rotated(dim);
    const int64_t last = std::min(count, (task + 1) * kRowsPerTask);
    for (int64_t r = task * kRowsPerTask; r < last; ++r) {
      const auto row = static_cast<size_t>(r);
      RotateRow(rows.data() + row * dim, matrices[row % heads], rotated);
      TakeResidual(rotated);
      for (size_t d = 0; d < dim; ++d) residuals[row * dim + d] = static_cast<float>(rotated[d]);
    }
  });
  return residuals;
}

// U_e Pi U^T: Pi takes the r-th smallest residual direction to the r-th largest of the objective.
// Both bases are ascending, so that is column r of U_e with column D-1-r of U.
Matrix PairBases(const Matrix& residual_basis, const Matrix& basis) {
  const int dim = basis.cols();
  std::vector<int> reversed(static_cast<size_t>(dim));
  for (int j = 0; j < dim; ++j) reversed[static_cast<size_t>(j)] = dim - 1 - j;
  return Multiply(residual_basis, basis.PermutedColumns(reversed).Transposed());
}

}  // namespace

Status CheckFitOptions(const FitOptions& options, const QkvShape& shape) {
  if (shape.head_dim < 1 || shape.head_dim > kMaxRotationDim || shape.num_kv_heads < 1 ||
      shape.num_kv_heads > kMaxRotationHeads || shape.num_query_heads < 1 ||
      shape.num_query_heads % shape.num_kv_heads != 0) {
    return InvalidArgument(fmt::format(
        "{} query heads, {} KV heads and head dimension {} do not make grouped-query attention",
        shape.num_query_heads, shape.num_kv_heads, shape.head_dim));
  }
  const bool composes =
      !IgnoresComposition(options.objectives.k) || !IgnoresComposition(options.objectives.v);
  const bool hadamard =
      options.objectives.k == Objective::kHadamard || options.objectives.v == Objective::kHadamard;
  if (!IsPowerOfTwo(shape.head_dim) &&
      (hadamard || (composes && options.composition != Composition::kPlain))) {
    return InvalidArgument(
        fmt::format("objective {} with composition {} needs a head dimension that is a power of "
                    "two, not {}",
                    NameOf(options.objectives), NameOf(options.composition), shape.head_dim));
  }
  const bool residual = options.objectives.k == Objective::kUresidual ||
                        options.objectives.v == Objective::kUresidual;
  if (residual && options.reference == nullptr) {
    return InvalidArgument(
        "objective uresidual needs a reference rotation (the file that a first fit wrote)");
  }
  for (const float clip : {options.k_clip, options.v_clip}) {
    if (!(clip >= 0.0f && clip <= 1.0f)) {
      return InvalidArgument(fmt::format("clip ratio {} is not in [0, 1]", clip));
    }
  }
  if (options.fit_clip) OSCAR_RETURN_IF_ERROR(ValidateClipOptions(options.clip, shape.head_dim));
  return {};
}

LayerStatistics::LayerStatistics(int layer, const QkvShape& shape, const FitOptions& options)
    : layer_(layer), shape_(shape), options_(options) {
  const int kv_heads = shape.num_kv_heads;
  const int dim = shape.head_dim;
  if (NeedsQueryMoment(options)) q_moments_.emplace(kv_heads, shape.group(), dim);
  if (options.objectives.k == Objective::kKtk) k_moments_.emplace(kv_heads, 1, dim);
  if (options.objectives.v == Objective::kVtv || NeedsWeights(options)) {
    v_moments_.emplace(kv_heads, 1, dim);
  } else if (options.objectives.v == Objective::kSstExact) {
    v_moments_.emplace(kv_heads, shape.group(), dim);
  }
  if (options.objectives.k == Objective::kUresidual) k_residual_.emplace(kv_heads, 1, dim);
  if (options.objectives.v == Objective::kUresidual) v_residual_.emplace(kv_heads, 1, dim);
  weight_sums_.resize(static_cast<size_t>(kv_heads));
}

int LayerStatistics::NumPasses(const FitOptions& options) {
  return 1 + (NeedsWeights(options) ? 1 : 0) + (options.fit_clip ? 1 : 0);
}

std::string LayerStatistics::Where(char side, Objective objective) const {
  return fmt::format("layer {} {} ({})", layer_, side, NameOf(objective));
}

Status LayerStatistics::CheckChunk(const QkvChunk& chunk) const {
  const int64_t query = chunk.num_tokens * shape_.num_query_heads * shape_.head_dim;
  const int64_t key = chunk.num_tokens * shape_.num_kv_heads * shape_.head_dim;
  if (chunk.num_tokens < 0 || static_cast<int64_t>(chunk.q.size()) != query ||
      static_cast<int64_t>(chunk.k.size()) != key || static_cast<int64_t>(chunk.v.size()) != key) {
    return InvalidArgument(fmt::format(
        "layer {}: {} query, {} key and {} value elements are not {} tokens of {} and {} heads of "
        "dimension {}",
        layer_, chunk.q.size(), chunk.k.size(), chunk.v.size(), chunk.num_tokens,
        shape_.num_query_heads, shape_.num_kv_heads, shape_.head_dim));
  }
  if (options_.objectives.v == Objective::kSstExact && pass_ == Pass::kMoments) {
    int64_t sum = 0;
    for (const int32_t length : chunk.seq_lens) {
      if (length < 0)
        return InvalidArgument(fmt::format("layer {}: sequence length {}", layer_, length));
      sum += length;
    }
    if (sum != chunk.num_tokens) {
      return InvalidArgument(fmt::format(
          "layer {}: the sequence lengths sum to {}, the chunk has {} tokens; sst_exact needs to "
          "know where sequences begin",
          layer_, sum, chunk.num_tokens));
    }
  }
  return {};
}

Status LayerStatistics::Add(const QkvChunk& chunk, ThreadPool& pool) {
  OSCAR_CHECK(pass_ != Pass::kDone);
  OSCAR_RETURN_IF_ERROR(CheckChunk(chunk));
  switch (pass_) {
    case Pass::kMoments:
      OSCAR_RETURN_IF_ERROR(AddMoments(chunk, pool));
      break;
    case Pass::kWeightedValues:
      AddWeightedValues(chunk, pool);
      break;
    case Pass::kClip:
      AddClip(chunk, pool);
      break;
    case Pass::kDone:
      break;
  }
  pass_tokens_ += chunk.num_tokens;
  return {};
}

Status LayerStatistics::AddMoments(const QkvChunk& chunk, ThreadPool& pool) {
  q_hash_.Add(chunk.q);
  k_hash_.Add(chunk.k);
  v_hash_.Add(chunk.v);
  if (q_moments_) q_moments_->Add(chunk.q, pool);
  if (k_moments_) k_moments_->Add(chunk.k, pool);
  if (options_.objectives.v == Objective::kVtv) v_moments_->Add(chunk.v, pool);
  if (options_.objectives.v == Objective::kSstExact) {
    const auto query =
        static_cast<size_t>(shape_.num_query_heads) * static_cast<size_t>(shape_.head_dim);
    const auto key =
        static_cast<size_t>(shape_.num_kv_heads) * static_cast<size_t>(shape_.head_dim);
    size_t first = 0;
    std::vector<float> outputs;
    for (const int32_t seq_len : chunk.seq_lens) {
      const auto length = static_cast<size_t>(seq_len);
      outputs.resize(length * query);
      CausalAttentionOutputs(shape_, seq_len, chunk.q.subspan(first * query, length * query),
                             chunk.k.subspan(first * key, length * key),
                             chunk.v.subspan(first * key, length * key), outputs, pool);
      v_moments_->Add(outputs, pool);
      first += length;
    }
  }
  if (k_residual_ || v_residual_) {
    const LayerRotation* reference = options_.reference->Find(layer_);
    if (reference == nullptr) {
      return InvalidArgument(fmt::format("the reference rotation has no layer {}", layer_));
    }
    const auto usable = [&](const SideRotation& side) {
      return options_.reference->head_dim == shape_.head_dim &&
             (side.num_heads == 1 || side.num_heads == shape_.num_kv_heads);
    };
    if (!usable(reference->k) || !usable(reference->v)) {
      return InvalidArgument(fmt::format(
          "the reference rotation of layer {} has {} matrices of dimension {}; the data has {} KV "
          "heads of dimension {}",
          layer_, reference->k.num_heads, options_.reference->head_dim, shape_.num_kv_heads,
          shape_.head_dim));
    }
    if (k_residual_) k_residual_->Add(Residuals(chunk.k, shape_, reference->k, pool), pool);
    if (v_residual_) v_residual_->Add(Residuals(chunk.v, shape_, reference->v, pool), pool);
  }
  return {};
}

std::vector<double> LayerStatistics::KeyWeights(const QkvChunk& chunk, ThreadPool& pool) const {
  const auto dim = static_cast<size_t>(shape_.head_dim);
  const auto heads = static_cast<size_t>(shape_.num_kv_heads);
  const int64_t count = chunk.num_tokens * shape_.num_kv_heads;
  std::vector<double> weights(static_cast<size_t>(count));
  pool.ParallelFor((count + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int) {
    std::vector<double> key(dim);
    std::vector<double> scratch(dim);
    const int64_t last = std::min(count, (task + 1) * kRowsPerTask);
    for (int64_t r = task * kRowsPerTask; r < last; ++r) {
      const auto row = static_cast<size_t>(r);
      std::copy_n(chunk.k.begin() + static_cast<ptrdiff_t>(row * dim), dim, key.begin());
      weights[row] = QuadraticForm(key, query_moment_[row % heads], scratch);
    }
  });
  return weights;
}

void LayerStatistics::AddWeightedValues(const QkvChunk& chunk, ThreadPool& pool) {
  const std::vector<double> weights = KeyWeights(chunk, pool);
  SumWeights(weights);
  v_moments_->Add(chunk.v, weights, pool);
}

void LayerStatistics::SumWeights(std::span<const double> weights) {
  for (size_t row = 0; row < weights.size(); ++row) {
    weight_sums_[row % weight_sums_.size()] += weights[row];
  }
}

void LayerStatistics::AddClip(const QkvChunk& chunk, ThreadPool& pool) {
  const int64_t stride =
      std::max<int64_t>(1, (num_tokens_ + options_.clip.max_tokens - 1) / options_.clip.max_tokens);
  std::vector<int64_t> tokens;  // of this chunk
  for (int64_t t = (stride - pass_tokens_ % stride) % stride; t < chunk.num_tokens; t += stride) {
    tokens.push_back(t);
  }
  // Where no pass has summed the weights, this one does, and EndPass scales by them.
  const bool summed = NeedsWeights(options_);
  std::vector<double> chunk_weights;
  if (!summed) {
    chunk_weights = KeyWeights(chunk, pool);
    SumWeights(chunk_weights);
  }
  const auto dim = static_cast<size_t>(shape_.head_dim);
  const int heads = shape_.num_kv_heads;
  // A head's rows go to its own sums in token order; heads and sides are independent.
  pool.ParallelFor(int64_t{2} * heads, [&](int64_t task, int) {
    const int head = static_cast<int>(task / 2);
    const bool is_k = task % 2 == 0;
    const SideRotation& side = is_k ? result_.rotation.k : result_.rotation.v;
    const Matrix matrix = Matrix::FromFloats(side.MatrixOf(head), shape_.head_dim, shape_.head_dim);
    const std::span<const float> rows = is_k ? chunk.k : chunk.v;
    std::vector<float> rotated(tokens.size() * dim);
    std::vector<double> weights;
    std::vector<double> row(dim);
    std::vector<double> scratch(dim);
    for (size_t i = 0; i < tokens.size(); ++i) {
      const size_t at = static_cast<size_t>(tokens[i] * heads + head) * dim;
      RotateRow(rows.data() + at, matrix, row);
      for (size_t d = 0; d < dim; ++d) rotated[i * dim + d] = static_cast<float>(row[d]);
      const auto h = static_cast<size_t>(head);
      if (!is_k && !summed) {
        weights.push_back(chunk_weights[at / dim]);
      } else if (!is_k) {
        std::copy_n(chunk.k.begin() + static_cast<ptrdiff_t>(at), dim, row.begin());
        weights.push_back(QuadraticForm(row, query_moment_[h], scratch) *
                          static_cast<double>(num_tokens_) /
                          std::max(weight_sums_[h], kMinWeightSum));
      }
    }
    (is_k ? k_search_ : v_search_)[static_cast<size_t>(head)].Add(rotated, weights);
  });
}

Status LayerStatistics::EndPass() {
  OSCAR_CHECK(pass_ != Pass::kDone);
  if (pass_ == Pass::kMoments) {
    if (pass_tokens_ == 0) return InvalidArgument(fmt::format("layer {}: no tokens", layer_));
    num_tokens_ = pass_tokens_;
    if (q_moments_) query_moment_ = SecondMoments(*q_moments_);
  } else if (pass_tokens_ != num_tokens_) {
    return InvalidArgument(
        fmt::format("layer {}: this pass had {} tokens, the first had {}; every pass must see the "
                    "same data",
                    layer_, pass_tokens_, num_tokens_));
  }
  pass_tokens_ = 0;

  if (pass_ == Pass::kMoments && NeedsWeights(options_)) {
    pass_ = Pass::kWeightedValues;
    return {};
  }
  if (pass_ != Pass::kClip) {
    OSCAR_RETURN_IF_ERROR(Solve());
    if (options_.fit_clip) {
      pass_ = Pass::kClip;
      return {};
    }
  } else {
    for (size_t head = 0; !NeedsWeights(options_) && head < v_search_.size(); ++head) {
      v_search_[head].Scale(static_cast<double>(num_tokens_) /
                            std::max(weight_sums_[head], kMinWeightSum));
    }
    for (const bool is_k : {true, false}) {
      SideRotation& side = is_k ? result_.rotation.k : result_.rotation.v;
      std::vector<ClipSearch>& search = is_k ? k_search_ : v_search_;
      if (side.num_heads == 1) {
        for (size_t head = 1; head < search.size(); ++head) search[0].Merge(search[head]);
      }
      auto& curves = is_k ? result_.k_clip_curves : result_.v_clip_curves;
      for (size_t head = 0; head < side.clip.size(); ++head) {
        side.clip[head] = search[head].Best().ratio;
        const std::span<const double> errors = search[head].errors();
        const double first = errors.front() > 0 ? errors.front() : 1.0;
        curves.emplace_back();
        for (const double error : errors) curves.back().push_back(error / first);
      }
    }
  }
  pass_ = Pass::kDone;
  return {};
}

Status LayerStatistics::Solve() {
  std::vector<Matrix> k_moments;
  if (options_.objectives.k == Objective::kQqt || options_.objectives.k == Objective::kUresidual) {
    k_moments = query_moment_;
  } else if (k_moments_) {
    k_moments = SecondMoments(*k_moments_);
  }
  std::vector<Matrix> v_moments;
  if (v_moments_) v_moments = SecondMoments(*v_moments_);
  if (NeedsWeights(options_)) {
    // The sums hold raw weights; dividing by their mean normalises them to mean 1.
    for (size_t head = 0; head < v_moments.size(); ++head) {
      v_moments[head] = Scaled(v_moments[head], static_cast<double>(num_tokens_) /
                                                    std::max(weight_sums_[head], kMinWeightSum));
    }
  }
  const CovarianceAccumulator* k_residual = k_residual_ ? &*k_residual_ : nullptr;
  const CovarianceAccumulator* v_residual = v_residual_ ? &*v_residual_ : nullptr;
  const auto& [k_objective, v_objective] = options_.objectives;
  if (options_.also_shared) {
    std::vector<Matrix> k = k_moments, v = v_moments;
    OSCAR_ASSIGN_OR_RETURN(result_.shared.k,
                           SolveSide('k', k_objective, false, kPublishedKClip, k_residual, k));
    OSCAR_ASSIGN_OR_RETURN(result_.shared.v,
                           SolveSide('v', v_objective, false, kPublishedVClip, v_residual, v));
  }
  OSCAR_ASSIGN_OR_RETURN(result_.rotation.k, SolveSide('k', k_objective, options_.per_head_k,
                                                       options_.k_clip, k_residual, k_moments));
  OSCAR_ASSIGN_OR_RETURN(result_.rotation.v, SolveSide('v', v_objective, options_.per_head_v,
                                                       options_.v_clip, v_residual, v_moments));
  result_.k_moments = std::move(k_moments);
  result_.v_moments = std::move(v_moments);
  if (options_.fit_clip) {
    for (int head = 0; head < shape_.num_kv_heads; ++head) {
      const Matrix m =
          Matrix::FromFloats(result_.rotation.k.MatrixOf(head), shape_.head_dim, shape_.head_dim);
      const Matrix rotated =
          Multiply(Multiply(m.Transposed(), query_moment_[static_cast<size_t>(head)]), m);
      k_search_.emplace_back(shape_.head_dim, rotated, options_.clip);
      v_search_.emplace_back(shape_.head_dim, Matrix(), options_.clip);
    }
  }
  return {};
}

Result<SideRotation> LayerStatistics::SolveSide(char name, Objective objective, bool per_head,
                                                float clip, const CovarianceAccumulator* residual,
                                                std::vector<Matrix>& moments) const {
  SideRotation side;
  const int dim = shape_.head_dim;
  if (objective == Objective::kHadamard || objective == Objective::kIdentity) {
    const Matrix matrix =
        objective == Objective::kHadamard ? HadamardMatrix(dim) : Matrix::Identity(dim);
    const std::vector<double> ones(static_cast<size_t>(dim), 1.0);
    const int heads = per_head ? shape_.num_kv_heads : 1;
    for (int head = 0; head < heads; ++head) AppendHead(side, matrix, ones, clip);
    return side;
  }
  moments = ShareUnless(per_head, std::move(moments));
  std::vector<Matrix> residuals;
  if (residual != nullptr) residuals = ShareUnless(per_head, SecondMoments(*residual));
  for (size_t head = 0; head < moments.size(); ++head) {
    auto eigen = DecomposeSymmetric(moments[head]);
    if (!eigen) return Unexpected(eigen.error().WithContext(Where(name, objective)));
    Matrix matrix;
    if (objective == Objective::kUresidual) {
      auto residual_eigen = DecomposeSymmetric(residuals[head]);
      if (!residual_eigen) {
        return Unexpected(residual_eigen.error().WithContext(Where(name, objective)));
      }
      matrix = PairBases(residual_eigen->vectors, eigen->vectors);
    } else {
      OSCAR_ASSIGN_OR_RETURN(matrix, Compose(eigen->vectors, eigen->values, options_.composition));
    }
    AppendHead(side, matrix, eigen->values, clip);
  }
  return side;
}

FittedLayer LayerStatistics::TakeResult() {
  OSCAR_CHECK(pass_ == Pass::kDone);
  result_.num_tokens = num_tokens_;
  ContentHash hash;
  hash.Add(q_hash_.Digest());
  hash.Add(k_hash_.Digest());
  hash.Add(v_hash_.Digest());
  result_.data_hash = hash.Digest();
  return std::move(result_);
}

Status QkvStatistics::Add(int layer, const QkvChunk& chunk, ThreadPool& pool) {
  auto found = layers_.find(layer);
  if (found == layers_.end()) {
    OSCAR_RETURN_IF_ERROR(CheckFitOptions(options_, shape_));
    found = layers_.try_emplace(layer, layer, shape_, options_).first;
  }
  return found->second.Add(chunk, pool);
}

Status QkvStatistics::EndPass() {
  for (auto& [layer, statistics] : layers_) OSCAR_RETURN_IF_ERROR(statistics.EndPass());
  return {};
}

Result<Rotation> QkvStatistics::Fit() {
  std::map<int, FittedLayer> fitted;
  for (auto& [layer, statistics] : layers_) fitted.emplace(layer, statistics.TakeResult());
  return AssembleRotation(shape_, options_, fitted);
}

RotationInfo DescribeFit(const FitOptions& options) {
  RotationInfo info;
  info.k_objective = NameOf(options.objectives.k);
  info.v_objective = NameOf(options.objectives.v);
  const bool composes =
      !IgnoresComposition(options.objectives.k) || !IgnoresComposition(options.objectives.v);
  info.composition = NameOf(composes ? options.composition : Composition::kPlain);
  const bool published = options.k_clip == kPublishedKClip && options.v_clip == kPublishedVClip;
  info.clip_source = options.fit_clip ? "fitted" : published ? "published" : "given";
  info.model_fingerprint = options.model_fingerprint;
  return info;
}

namespace {

Result<Rotation> Assemble(const QkvShape& shape, RotationInfo info,
                          const std::map<int, FittedLayer>& layers,
                          LayerRotation FittedLayer::*form) {
  Rotation rotation;
  rotation.head_dim = shape.head_dim;
  ContentHash hash;
  for (auto& [layer, fitted] : layers) {
    hash.Add(static_cast<uint64_t>(layer));
    hash.Add(fitted.data_hash);
    info.calibration_tokens = std::max(info.calibration_tokens, fitted.num_tokens);
    rotation.layers.emplace(layer, fitted.*form);
  }
  info.calibration_hash = hash.ToString();
  rotation.info = std::move(info);
  OSCAR_RETURN_IF_ERROR(ValidateRotation(rotation));
  return rotation;
}

}  // namespace

Result<Rotation> AssembleRotation(const QkvShape& shape, const FitOptions& options,
                                  const std::map<int, FittedLayer>& layers) {
  return Assemble(shape, DescribeFit(options), layers, &FittedLayer::rotation);
}

Result<Rotation> AssembleSharedRotation(const QkvShape& shape, const FitOptions& options,
                                        const std::map<int, FittedLayer>& layers) {
  RotationInfo info = DescribeFit(options);
  info.clip_source = "published";
  return Assemble(shape, std::move(info), layers, &FittedLayer::shared);
}

}  // namespace oscar
