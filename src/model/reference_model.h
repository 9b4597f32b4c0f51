// ReferenceModel: the decoder in plain fp32 loops, whole sequence at once, no cache and no
// quantisation: the specification that the engine's forward pass is judged by, and judged itself by
// the outputs of transformers. Slow; for tests and for finding out what a kernel got wrong.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "arch/rope.h"
#include "arch/spec.h"
#include "oscar/status.h"
#include "weights/source.h"

namespace oscar {

class ReferenceModel {
 public:
  static Result<ReferenceModel> Load(const ModelSpec& spec, const WeightSource& source);

  // What a layer computes for one token on its way: q and k after their norm and before RoPE, v.
  // [heads, head_dim] each.
  using Tap = std::function<void(int layer, int64_t position, std::span<const float> q,
                                 std::span<const float> k, std::span<const float> v)>;
  // Logits [tokens, vocab] of every position. With `bf16_cache` keys and values are rounded to BF16
  // before attention reads them: what a BF16 cache does, and nothing else.
  std::vector<float> Forward(std::span<const int32_t> tokens, const Tap& tap = {},
                             bool bf16_cache = false) const;
  const ModelSpec& spec() const { return spec_; }

 private:
  struct Layer {
    std::vector<float> attention_norm, feed_forward_norm, q, k, v, o, q_bias, k_bias, v_bias,
        o_bias, q_norm, k_norm, gate, up, down;
  };
  explicit ReferenceModel(const ModelSpec& spec)
      : spec_(spec), rope_(spec.rope_theta, spec.rope_scaling, spec.head_dim) {}

  ModelSpec spec_;
  RopeTable rope_;
  std::vector<float> embedding_, final_norm_, head_;
  std::vector<Layer> layers_;
};

}  // namespace oscar
