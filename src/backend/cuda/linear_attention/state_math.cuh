// What the kernels of linear attention compute of a token beside the delta rule.
#pragma once

#include <cstdint>

#include "arch/spec.h"
#include "cuda/device/ptx.cuh"

namespace oscar::cuda {

// Of |q| and |k| before they are divided by it, whatever the model's norms have.
inline constexpr float kLengthEpsilon = 1e-6f;

// Off by a few units of the last place, and by |x| 2^-24 of itself.
__device__ __forceinline__ float Exp(float x) { return Exp2(x * 1.4426950408889634f); }
__device__ __forceinline__ float Silu(float x) { return x / (1.0f + Exp(-x)); }
__device__ __forceinline__ float SigmoidOf(float x) { return 1.0f / (1.0f + Exp(-x)); }
// log(1 + exp(x)); beyond 20 that is x. What rounding 1 + e loses is in the quotient.
__device__ __forceinline__ float Softplus(float x) {
  const float e = Exp(x), u = 1.0f + e;
  if (x > 20.0f || u == 1.0f) return x > 20.0f ? x : e;
  return logf(u) * (e / (u - 1.0f));
}

// Where a channel of the convolution lies in a row of inputs, for a value head and its key head:
// `part` 0: q, 1: k, 2: v.
struct HeadChannels {
  int input;    // in a row of inputs
  int channel;  // of the convolution
};
__device__ __forceinline__ HeadChannels ChannelsOf(const LinearAttentionSpec& spec, int head,
                                                   int part) {
  const int key_head = head / spec.values_per_key_head();
  if (part == 0) return {spec.QOf(key_head), key_head * spec.key_dim};
  if (part == 1) return {spec.KOf(key_head), spec.key_width() + key_head * spec.key_dim};
  return {spec.VOf(head), 2 * spec.key_width() + head * spec.value_dim};
}

}  // namespace oscar::cuda
