#include "cpu/cpu_experts.h"

#include <algorithm>
#include <numeric>

#include "simd/vec_ops.h"

namespace oscar {

void CpuExperts::Route(const ExpertsSpec& spec, const CpuWeights::Experts& weights, const float* x,
                       size_t num_rows, size_t hidden, ThreadPool& threads) {
  const auto count = static_cast<size_t>(spec.num_experts);
  const auto chosen = static_cast<size_t>(spec.experts_per_token);
  scores_.Grow(num_rows * count);
  choices_.resize(num_rows * chosen);
  constexpr size_t kPerTask = 16;
  const size_t parts = (count + kPerTask - 1) / kPerTask;
  threads.ParallelFor(static_cast<int64_t>(num_rows * parts), [&](int64_t task, int) {
    const size_t row = static_cast<size_t>(task) / parts, part = static_cast<size_t>(task) % parts;
    for (size_t e = part * kPerTask; e < std::min(count, (part + 1) * kPerTask); ++e) {
      scores_.data()[row * count + e] =
          simd::Dot({weights.router.data() + e * hidden, hidden}, {x + row * hidden, hidden});
    }
  });
  threads.ParallelFor(static_cast<int64_t>(num_rows), [&](int64_t i, int) {
    const auto row = static_cast<size_t>(i);
    const std::span<float> scores(scores_.data() + row * count, count);
    if (!weights.logit_bias.empty()) simd::Add(scores, weights.logit_bias);
    if (spec.score == RouterScore::kSoftmax) {
      simd::Softmax(scores);
    } else {
      simd::Sigmoid(scores);
    }
    RouteToken(spec, scores, weights.choice_bias,
               std::span(choices_).subspan(row * chosen, chosen));
  });
}

void CpuExperts::Run(const ExpertsSpec& spec, const CpuWeights::Experts& weights, const float* x,
                     size_t num_rows, size_t hidden, float* stream, ThreadPool& threads) {
  if (num_rows == 0) return;
  Route(spec, weights, x, num_rows, hidden, threads);
  const auto chosen = static_cast<size_t>(spec.experts_per_token);
  const auto count = static_cast<size_t>(spec.num_experts);
  const auto middle = static_cast<size_t>(spec.intermediate);
  // Where each expert's choices begin, then a counting sort.
  std::vector<size_t> begin(count + 1, 0);
  for (const ExpertChoice& choice : choices_) ++begin[static_cast<size_t>(choice.expert) + 1];
  std::partial_sum(begin.begin(), begin.end(), begin.begin());
  rows_.resize(choices_.size());
  places_.resize(choices_.size());
  std::vector<size_t> next = begin;
  for (size_t i = 0; i < choices_.size(); ++i) {
    const size_t place = next[static_cast<size_t>(choices_[i].expert)]++;
    rows_[place] = static_cast<int32_t>(i / chosen);
    places_[i] = static_cast<int32_t>(place);
  }
  own_rows_.resize(choices_.size());
  std::iota(own_rows_.begin(), own_rows_.end(), 0);
  gate_up_.Grow(choices_.size() * 2 * middle);
  gated_.Grow(choices_.size() * middle);
  outputs_.Grow(choices_.size() * hidden);

  ++traffic_.layers;
  // Each choice's expert adds its part of [experts, width] to the choice's row.
  const auto add_bias = [&](const std::vector<float>& bias, size_t choice, float* row,
                            size_t width) {
    if (bias.empty()) return;
    const auto expert = static_cast<size_t>(choices_[choice].expert);
    simd::Add({row, width}, std::span(bias).subspan(expert * width, width));
  };
  const auto multiply = [&](const std::vector<simd::PackedMatrix>& matrices,
                            const std::vector<int32_t>& rows, const float* in, size_t in_width,
                            float* out, size_t out_width) {
    groups_.clear();
    for (size_t e = 0; e < count; ++e) {
      if (begin[e] == begin[e + 1]) continue;
      groups_.push_back({&matrices[e], std::span(rows).subspan(begin[e], begin[e + 1] - begin[e]),
                         out + begin[e] * out_width});
      traffic_.bytes += matrices[e].bytes();
    }
    simd::GroupedGemm(threads, gemm_, in, in_width, groups_);
  };
  multiply(weights.gate_up, rows_, x, hidden, gate_up_.data(), 2 * middle);
  traffic_.experts += groups_.size();
  threads.ParallelFor(static_cast<int64_t>(choices_.size()), [&](int64_t i, int) {
    const auto place = static_cast<size_t>(places_[static_cast<size_t>(i)]);
    float* const gate = gate_up_.data() + place * 2 * middle;
    const std::span<float> gated(gated_.data() + place * middle, middle);
    add_bias(weights.gate_up_bias, static_cast<size_t>(i), gate, 2 * middle);
    if (spec.clamped.has_value()) {
      simd::ClampedGateMul({gate, 2 * middle}, spec.clamped->limit, spec.clamped->slope, gated);
    } else {
      simd::SiluMul({gate, middle}, {gate + middle, middle}, gated);
    }
  });
  multiply(weights.down, own_rows_, gated_.data(), middle, outputs_.data(), hidden);
  // Best first, whatever the batch.
  threads.ParallelFor(static_cast<int64_t>(num_rows), [&](int64_t i, int) {
    const auto row = static_cast<size_t>(i);
    for (size_t j = row * chosen; j < (row + 1) * chosen; ++j) {
      add_bias(weights.down_bias, j, outputs_.data() + static_cast<size_t>(places_[j]) * hidden,
               hidden);
      simd::AddScaled({stream + row * hidden, hidden}, choices_[j].weight,
                      {outputs_.data() + static_cast<size_t>(places_[j]) * hidden, hidden});
    }
  });
}

}  // namespace oscar
