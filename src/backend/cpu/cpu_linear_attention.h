// Linear attention (LinearAttentionSpec) on the CPU: convolution, gates, the delta rule and the
// norm of what it gives. Prompts and generated tokens alike go token by token, so that it does not
// show where a prompt was cut; the rule costs little beside the GEMMs around it. One caller at a
// time.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "arch/spec.h"
#include "base/thread_pool.h"
#include "cpu/cpu_weights.h"
#include "simd/aligned_buffer.h"

namespace oscar {

class CpuLinearAttention {
 public:
  // Consecutive rows of one sequence, and its state of the layer
  // (LinearAttentionSpec::matrix_floats, then conv_floats), which is changed.
  struct Item {
    size_t first_row = 0, rows = 0;
    float* state = nullptr;
  };
  // `inputs` [rows, input_width]; `out` [rows, value_width].
  void Run(const LinearAttentionSpec& spec, const CpuWeights::Layer& weights, float epsilon,
           std::span<const Item> items, const float* inputs, float* out, ThreadPool& threads);

 private:
  // Brings the inputs of one row into the order of the convolution's channels.
  const float* ChannelsOf(const LinearAttentionSpec& spec, const float* inputs, size_t row) const;
  void Convolve(const LinearAttentionSpec& spec, const CpuWeights::Layer& weights, const Item& item,
                const float* inputs, size_t row);

  simd::AlignedBuffer<float> channels_;      // [rows, channels], where inputs are grouped
  simd::AlignedBuffer<float> convolved_;     // [rows, channels]: q, k of length 1, v
  simd::AlignedBuffer<float> decay_, beta_;  // [rows, value heads]
  std::vector<float> ones_, q_scale_, k_scale_;
  std::vector<Item> row_items_;  // by row
};

}  // namespace oscar
