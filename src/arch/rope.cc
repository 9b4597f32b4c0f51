#include "arch/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace oscar {
namespace {

// Llama 3.1: wavelengths beyond the original context are stretched by `factor`, short ones are
// kept, and those between blend linearly in the number of turns they make over that context.
double Llama3Frequency(double frequency, const RopeScaling& s) {
  const double turns =
      static_cast<double>(s.original_max_position) * frequency / (2.0 * std::numbers::pi);
  if (turns < s.low_freq_factor) return frequency / s.factor;
  if (turns > s.high_freq_factor) return frequency;
  const double blend = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
  return (1.0 - blend) * frequency / s.factor + blend * frequency;
}

// YaRN (Peng et al., arXiv 2309.00071): the pair index at which a dimension makes `turns` full
// turns over the original context.
double YarnIndex(double turns, double theta, const RopeScaling& s, int head_dim) {
  const auto context = static_cast<double>(s.original_max_position);
  return head_dim * std::log(context / (turns * 2.0 * std::numbers::pi)) / (2.0 * std::log(theta));
}

double YarnMagnitude(double scale, double multiplier) {
  return scale <= 1.0 ? 1.0 : 0.1 * multiplier * std::log(scale) + 1.0;
}

}  // namespace

RopeTable::RopeTable(double theta, const RopeScaling& scaling, int head_dim) {
  const int half = head_dim / 2;
  frequency_.resize(static_cast<size_t>(half));
  double low = 0.0, high = 0.0;
  if (scaling.type == RopeScalingType::kYarn) {
    low = YarnIndex(scaling.beta_fast, theta, scaling, head_dim);
    high = YarnIndex(scaling.beta_slow, theta, scaling, head_dim);
    if (scaling.truncate) low = std::floor(low), high = std::ceil(high);
    low = std::max(low, 0.0);
    high = std::min(high, static_cast<double>(head_dim - 1));
    if (low == high) high += 0.001;  // a ramp of no width would divide by zero
    magnitude_ =
        static_cast<float>(scaling.attention_factor > 0.0 ? scaling.attention_factor
                                                          : YarnMagnitude(scaling.factor, 1.0));
  }
  for (int i = 0; i < half; ++i) {
    double frequency = 1.0 / std::pow(theta, 2.0 * i / head_dim);
    switch (scaling.type) {
      case RopeScalingType::kNone:
        break;
      case RopeScalingType::kLinear:
        frequency /= scaling.factor;
        break;
      case RopeScalingType::kLlama3:
        frequency = Llama3Frequency(frequency, scaling);
        break;
      case RopeScalingType::kYarn: {
        const double ramp = std::clamp((i - low) / (high - low), 0.0, 1.0);
        frequency = frequency / scaling.factor * ramp + frequency * (1.0 - ramp);
        break;
      }
    }
    frequency_[static_cast<size_t>(i)] = static_cast<float>(frequency);
  }
}

void RopeTable::Fill(int64_t position, std::span<float> cos, std::span<float> sin) const {
  const auto at = static_cast<float>(position);
  for (size_t i = 0; i < frequency_.size(); ++i) {
    const double angle = at * frequency_[i];  // the product is binary32, see above
    cos[i] = static_cast<float>(std::cos(angle)) * magnitude_;
    sin[i] = static_cast<float>(std::sin(angle)) * magnitude_;
  }
}

}  // namespace oscar
