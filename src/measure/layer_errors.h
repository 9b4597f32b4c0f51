// Where in the model a method loses precision: the error of stored rows, layer by layer, on text
// that the model has read. Keys are judged by their logits, sum (k - k^) C_Q (k - k^)^T over the
// same of k with C_Q the query second moment of the KV head; values by their squared error. Rows go
// through the method's own pages. One thread.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "engine/loaded_model.h"
#include "oscar/status.h"

namespace oscar {

class LayerErrorProbe {
 public:
  static constexpr int64_t kMaxTokens = 1024;
  // Runs the sequences, one after the other and up to kMaxTokens in all. REQUIRES: a bf16 plan.
  static Result<LayerErrorProbe> Capture(LoadedModel& model,
                                         std::span<const std::vector<int32_t>> sequences);
  // (K, V) relative errors of each layer over the tokens that are quantised; 0 where none is.
  Result<std::vector<std::pair<double, double>>> Measure(const KvPlan& plan) const;
  // Eigenvalues of the query second moment of each layer over their mean, largest first, averaged
  // over KV heads: how unequal the directions are that a rotation evens out. [layers][D]
  Result<std::vector<std::vector<double>>> QuerySpectra() const;

  // Keys as computed, after RoPE, of the i-th layer with a history: [tokens, KV heads, D].
  std::span<const float> Keys(int i) const { return layers_[static_cast<size_t>(i)].k; }
  int64_t num_tokens() const { return num_tokens_; }

 private:
  LayerErrorProbe() = default;
  // sum q q^T over every few tokens and the query heads of a KV head. [D, D]
  std::vector<double> QueryMoment(int layer, int kv_head, const SideTransform* rotation) const;
  std::vector<int> slots_;  // of the layers that quantise, which the rest counts
  int num_layers_ = 0, num_heads_ = 0, kv_heads_ = 0, head_dim_ = 0;
  int64_t num_tokens_ = 0;
  struct LayerRows {
    std::vector<float> q, k, v;  // [tokens, heads, D]
  };
  std::vector<LayerRows> layers_;
};

}  // namespace oscar
