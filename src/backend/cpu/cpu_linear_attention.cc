#include "cpu/cpu_linear_attention.h"

#include <algorithm>
#include <cmath>

#include "simd/delta_rule.h"
#include "simd/vec_ops.h"

namespace oscar {
namespace {

// Of |q| and |k| before they are divided by it, whatever the model's norms have.
constexpr float kLengthEpsilon = 1e-6f;

// log(1 + exp(x)); beyond 20 that is x.
double Softplus(double x) { return x > 20.0 ? x : std::log1p(std::exp(x)); }

}  // namespace

const float* CpuLinearAttention::ChannelsOf(const LinearAttentionSpec& spec, const float* inputs,
                                            size_t row) const {
  return spec.grouped_inputs ? channels_.data() + row * static_cast<size_t>(spec.conv_channels())
                             : inputs + row * static_cast<size_t>(spec.input_width());
}

void CpuLinearAttention::Convolve(const LinearAttentionSpec& spec, const CpuWeights::Layer& weights,
                                  const Item& item, const float* inputs, size_t row) {
  const auto channels = static_cast<size_t>(spec.conv_channels());
  const auto kernel = static_cast<size_t>(spec.conv_kernel);
  const auto key_dim = static_cast<size_t>(spec.key_dim);
  const float* const kept = item.state + spec.matrix_floats();
  float* const out = convolved_.data() + row * channels;
  std::fill_n(out, channels, 0.0f);
  // Tap j meets the token kernel - 1 - j before this one.
  for (size_t j = 0; j < kernel; ++j) {
    const size_t at = row - item.first_row + j;  // among the kept inputs and then the rows
    const float* const input = at + 1 < kernel
                                   ? kept + at * channels
                                   : ChannelsOf(spec, inputs, item.first_row + at + 1 - kernel);
    simd::AddMul({out, channels}, {weights.conv.data() + j * channels, channels},
                 {input, channels});
  }
  simd::SiluMul({out, channels}, ones_, {out, channels});
  // x / sqrt(sum x^2 + e) is a norm by the mean with e / dims, over the root of dims.
  const float epsilon = kLengthEpsilon / static_cast<float>(spec.key_dim);
  for (size_t head = 0; head < 2 * static_cast<size_t>(spec.key_heads); ++head) {
    const std::span<float> x(out + head * key_dim, key_dim);
    const bool is_q = head < static_cast<size_t>(spec.key_heads);
    simd::RmsNorm(x, is_q ? q_scale_ : k_scale_, epsilon, x);
  }
}

void CpuLinearAttention::Run(const LinearAttentionSpec& spec, const CpuWeights::Layer& weights,
                             float epsilon, std::span<const Item> items, const float* inputs,
                             float* out, ThreadPool& threads) {
  const auto channels = static_cast<size_t>(spec.conv_channels());
  const auto width = static_cast<size_t>(spec.input_width());
  const auto heads = static_cast<size_t>(spec.value_heads);
  const auto key_dim = static_cast<size_t>(spec.key_dim);
  const auto value_dim = static_cast<size_t>(spec.value_dim);
  const auto value_width = static_cast<size_t>(spec.value_width());
  row_items_.clear();
  for (const Item& item : items) {
    row_items_.resize(std::max(row_items_.size(), item.first_row + item.rows));
    std::fill_n(row_items_.begin() + static_cast<ptrdiff_t>(item.first_row), item.rows, item);
  }
  const size_t num_rows = row_items_.size();
  if (spec.grouped_inputs) channels_.Grow(num_rows * channels);
  convolved_.Grow(num_rows * channels);
  decay_.Grow(num_rows * heads);
  beta_.Grow(num_rows * heads);
  ones_.assign(channels, 1.0f);
  k_scale_.assign(key_dim, 1.0f / std::sqrt(static_cast<float>(key_dim)));
  q_scale_.assign(key_dim, 1.0f / static_cast<float>(key_dim));
  const auto each_row = [&](const auto& body) {
    threads.ParallelFor(static_cast<int64_t>(num_rows),
                        [&](int64_t row, int) { body(static_cast<size_t>(row)); });
  };
  if (spec.grouped_inputs) {
    each_row([&](size_t row) {
      const float* const in = inputs + row * width;
      float* to = channels_.data() + row * channels;
      for (int head = 0; head < spec.key_heads; ++head) {
        to = std::copy_n(in + spec.QOf(head), key_dim, to);
      }
      for (int head = 0; head < spec.key_heads; ++head) {
        to = std::copy_n(in + spec.KOf(head), key_dim, to);
      }
      for (int head = 0; head < spec.value_heads; ++head) {
        to = std::copy_n(in + spec.VOf(head), value_dim, to);
      }
    });
  }
  each_row([&](size_t row) {
    Convolve(spec, weights, row_items_[row], inputs, row);
    const float* const in = inputs + row * width;
    for (size_t head = 0; head < heads; ++head) {
      const double a = in[spec.AOf(static_cast<int>(head))];
      const double b = in[spec.BOf(static_cast<int>(head))];
      const double step = Softplus(a + weights.step_bias[head]);
      decay_.data()[row * heads + head] =
          static_cast<float>(std::exp(-static_cast<double>(weights.decay_rate[head]) * step));
      beta_.data()[row * heads + head] = static_cast<float>(1.0 / (1.0 + std::exp(-b)));
    }
  });
  // The inputs that the next tokens' convolutions see.
  threads.ParallelFor(static_cast<int64_t>(items.size()), [&](int64_t i, int) {
    const Item& item = items[static_cast<size_t>(i)];
    const auto kept_rows = static_cast<size_t>(spec.conv_kernel - 1);
    float* const kept = item.state + spec.matrix_floats();
    const size_t stay = kept_rows - std::min(kept_rows, item.rows);
    std::copy_n(kept + (kept_rows - stay) * channels, stay * channels, kept);
    for (size_t j = stay; j < kept_rows; ++j) {
      const size_t row = item.first_row + item.rows - (kept_rows - j);
      std::copy_n(ChannelsOf(spec, inputs, row), channels, kept + j * channels);
    }
  });
  constexpr auto kColumns = static_cast<size_t>(simd::kDeltaRuleColumns);
  const size_t parts = (value_dim + kColumns - 1) / kColumns;
  threads.ParallelFor(static_cast<int64_t>(items.size() * heads * parts), [&](int64_t task, int) {
    const size_t part = static_cast<size_t>(task) % parts;
    const size_t head = static_cast<size_t>(task) / parts % heads;
    const Item& item = items[static_cast<size_t>(task) / parts / heads];
    const size_t key_head = head / static_cast<size_t>(spec.values_per_key_head());
    const size_t column = part * kColumns;
    const float* const row = convolved_.data() + item.first_row * channels;
    const size_t gate = item.first_row * heads + head;
    simd::RunDeltaRule(
        {.q = row + key_head * key_dim,
         .k = row + static_cast<size_t>(spec.key_width()) + key_head * key_dim,
         .v = row + 2 * static_cast<size_t>(spec.key_width()) + head * value_dim + column,
         .qkv_stride = channels,
         .decay = decay_.data() + gate,
         .beta = beta_.data() + gate,
         .gate_stride = heads,
         .state = item.state + head * key_dim * value_dim + column,
         .state_stride = value_dim,
         .out = out + item.first_row * value_width + head * value_dim + column,
         .out_stride = value_width,
         .tokens = static_cast<int>(item.rows),
         .key_dim = spec.key_dim,
         .columns = static_cast<int>(std::min(kColumns, value_dim - column))});
  });
  each_row([&](size_t row) {
    for (size_t head = 0; head < heads; ++head) {
      const std::span<float> o(out + row * value_width + head * value_dim, value_dim);
      const float* const z = inputs + row * width + spec.ZOf(static_cast<int>(head));
      simd::RmsNorm(o, weights.state_norm, epsilon, o);
      simd::SiluMul({z, value_dim}, o, o);
    }
  });
}

}  // namespace oscar
