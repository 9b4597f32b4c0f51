// From captured Q, K and V (post-norm, post-RoPE) to rotations. The data streams by, once or more:
// sst weighs each value by its key under the query moment of all the data, and clip ratios are
// tried on rows under the finished rotation, so those need further passes over the same tokens
// (nothing but sums is kept). num_passes() says how many; feed the same data, in the same order, in
// each.
//
// Results depend on the tokens and their order only: not on chunking (save that sst_exact never
// attends across the sequences of seq_lens), not on the number of threads. One thread at a time per
// object; the pool does the work.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "numeric/covariance.h"
#include "oscar/status.h"
#include "rotation/attention_outputs.h"
#include "rotation/clip.h"
#include "rotation/content_hash.h"
#include "rotation/recipe.h"
#include "rotation/rotation.h"

namespace oscar {

struct FitOptions {
  ObjectivePair objectives;
  Composition composition = Composition::kRHPbr;
  // One matrix per KV head in place of one per layer.
  bool per_head_k = false;
  bool per_head_v = false;
  // Beside them, also the layer's shared ones, from the same sums: FittedLayer::shared.
  bool also_shared = false;
  float k_clip = kPublishedKClip;
  float v_clip = kPublishedVClip;
  bool fit_clip = false;  // choose clips on the data, by the rules of clip.h
  ClipOptions clip;
  // For uresidual: the rotation whose quantisation residual is studied. Must outlive the fit.
  const Rotation* reference = nullptr;
  std::string model_fingerprint;
};

// Some tokens of one layer: q [T, H_q, D], k and v [T, H_kv, D].
struct QkvChunk {
  int64_t num_tokens = 0;
  std::span<const float> q;
  std::span<const float> k;
  std::span<const float> v;
  // Lengths of the sequences in the chunk, summing to num_tokens. Only sst_exact needs them.
  std::span<const int32_t> seq_lens;
};

struct FittedLayer {
  LayerRotation rotation;
  // Where asked for: what a fit without per_head_k and per_head_v would give, with published clips.
  LayerRotation shared;
  // The matrices whose eigenvectors were taken, [1 or H_kv]; empty for data-free objectives.
  std::vector<Matrix> k_moments;
  std::vector<Matrix> v_moments;
  // Where clips were fitted: each candidate's error over the first one's, [1 or H_kv][candidates].
  std::vector<std::vector<double>> k_clip_curves;
  std::vector<std::vector<double>> v_clip_curves;
  int64_t num_tokens = 0;
  uint64_t data_hash = 0;
};

class LayerStatistics {
 public:
  // `layer` names the layer in errors and finds its reference rotation.
  LayerStatistics(int layer, const QkvShape& shape, const FitOptions& options);

  static int NumPasses(const FitOptions& options);

  Status Add(const QkvChunk& chunk, ThreadPool& pool);
  Status EndPass();
  // REQUIRES: EndPass was called NumPasses() times, without error.
  FittedLayer TakeResult();

 private:
  enum class Pass : uint8_t { kMoments, kWeightedValues, kClip, kDone };

  Status CheckChunk(const QkvChunk& chunk) const;
  Status AddMoments(const QkvChunk& chunk, ThreadPool& pool);
  void AddWeightedValues(const QkvChunk& chunk, ThreadPool& pool);
  void AddClip(const QkvChunk& chunk, ThreadPool& pool);
  // w_t = k_t A_h k_t^T, [tokens, H_kv].
  std::vector<double> KeyWeights(const QkvChunk& chunk, ThreadPool& pool) const;
  void SumWeights(std::span<const double> weights);
  Status Solve();
  // One matrix or one per KV head from its moments, which stay behind as what was decomposed.
  Result<SideRotation> SolveSide(char name, Objective objective, bool per_head, float clip,
                                 const CovarianceAccumulator* residual,
                                 std::vector<Matrix>& moments) const;
  std::string Where(char side, Objective objective) const;

  int layer_;
  QkvShape shape_;
  FitOptions options_;
  Pass pass_ = Pass::kMoments;
  int64_t pass_tokens_ = 0;
  int64_t num_tokens_ = 0;

  std::optional<CovarianceAccumulator> q_moments_;
  std::optional<CovarianceAccumulator> k_moments_;
  std::optional<CovarianceAccumulator> v_moments_;  // of V, of weighted V or of attention outputs
  std::optional<CovarianceAccumulator> k_residual_;
  std::optional<CovarianceAccumulator> v_residual_;
  std::vector<Matrix> query_moment_;  // A_h, [H_kv]
  std::vector<double> weight_sums_;   // [H_kv]
  std::vector<ClipSearch> k_search_;  // [H_kv]
  std::vector<ClipSearch> v_search_;
  ContentHash q_hash_, k_hash_, v_hash_;
  FittedLayer result_;
};

// All layers at once, for data that comes straight from a running model.
class QkvStatistics {
 public:
  QkvStatistics(const QkvShape& shape, FitOptions options)
      : shape_(shape), options_(std::move(options)) {}

  int num_passes() const { return LayerStatistics::NumPasses(options_); }
  // The first call also checks options and shape.
  Status Add(int layer, const QkvChunk& chunk, ThreadPool& pool);
  Status EndPass();
  // REQUIRES: EndPass was called num_passes() times.
  Result<Rotation> Fit();

 private:
  QkvShape shape_;
  FitOptions options_;
  std::map<int, LayerStatistics> layers_;
};

// Options that no data can satisfy, in words.
Status CheckFitOptions(const FitOptions& options, const QkvShape& shape);

// The provenance that the options alone tell: objectives, composition, clips, model.
RotationInfo DescribeFit(const FitOptions& options);

// Joins fitted layers into a validated rotation with its provenance.
Result<Rotation> AssembleRotation(const QkvShape& shape, const FitOptions& options,
                                  const std::map<int, FittedLayer>& layers);
// The same of their shared form. REQUIRES: options.also_shared.
Result<Rotation> AssembleSharedRotation(const QkvShape& shape, const FitOptions& options,
                                        const std::map<int, FittedLayer>& layers);

}  // namespace oscar
