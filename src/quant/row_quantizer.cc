#include "quant/row_quantizer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

#include "base/check.h"
#include "quant/affine_group.h"

namespace oscar {
namespace {

constexpr float kBf16Max = 3.3895313892515355e38f;

void QuantizeMinMax(const RowSpec& spec, std::span<const float> x, std::span<uint8_t> codes,
                    float* scale, float* min) {
  const auto [lo, hi] = std::minmax_element(x.begin(), x.end());
  const auto levels = static_cast<float>((1 << spec.bits) - 1);
  *scale = std::max(RoundMeta(std::max(*hi - *lo, kMinRange) / levels, spec.meta), kMinScale);
  *min = RoundMeta(*lo, spec.meta);
  for (size_t i = 0; i < x.size(); ++i) {
    const float q = std::floor((x[i] - *min) / *scale + 0.5f);
    codes[i] = static_cast<uint8_t>(std::clamp(q, 0.0f, levels));
  }
}

void QuantizeSymmetric(const RowSpec& spec, std::span<const float> x, std::span<uint8_t> codes,
                       float* scale, float* min) {
  float largest = 0.0f;
  for (float v : x) largest = std::max(largest, std::fabs(v));
  const auto half = static_cast<float>(1 << (spec.bits - 1));
  *scale = std::max(RoundMeta(std::max(largest, kMinRange) / (half - 1.0f), spec.meta), kMinScale);
  // A page stores min in fp16, too; the quotient is exact.
  if (spec.meta == MetaType::kFp16) *scale = std::min(*scale, kFp16Max / half);
  *min = -half * *scale;
  for (size_t i = 0; i < x.size(); ++i) {
    const float q = std::nearbyint(x[i] / *scale);
    codes[i] = static_cast<uint8_t>(std::clamp(q, -half, half - 1.0f) + half);
  }
}

// A group about its mean.
struct Centred {
  float mean, sxx;  // sxx: sum of squares of x
  std::array<float, kMaxHeadDim> x;
};

Centred Centre(std::span<const float> x) {
  Centred c;
  std::array<float, kMaxHeadDim> square;
  c.mean = Sum16(x) / static_cast<float>(x.size());
  for (size_t i = 0; i < x.size(); ++i) c.x[i] = x[i] - c.mean;
  for (size_t i = 0; i < x.size(); ++i) square[i] = c.x[i] * c.x[i];
  c.sxx = Sum16({square.data(), x.size()});
  return c;
}

// The code of 2 bits whose thresholds are -step, 0 and step.
int TwoBitCode(float centred, float step) {
  return (centred >= -step ? 1 : 0) + (centred >= 0.0f ? 1 : 0) + (centred >= step ? 1 : 0);
}

void QuantizeMseFit(const RowSpec& spec, std::span<const float> x, std::span<uint8_t> codes,
                    float* scale, float* min) {
  // Wider codes would overflow the exact integer sums below.
  OSCAR_CHECK(spec.bits <= 4, "{} bits: a fit has 2, 3 or 4", spec.bits);
  const size_t n = x.size();
  const auto count = static_cast<float>(n);
  const Centred group = Centre(x);
  std::array<float, kMaxHeadDim> product;
  const float deviation = std::sqrt(group.sxx / count);

  const int half = 1 << (spec.bits - 1);
  float best_score = 0.0f, best_slope = 0.0f, best_sqx = 0.0f;
  int best_sum = 0;
  std::fill_n(codes.begin(), n, uint8_t{0});
  std::array<uint8_t, kMaxHeadDim> trial;
  for (const float factor : kMseStepFactors) {
    const float step = factor * MseStepScale(spec.bits) * deviation;
    if (!(step > 0.0f)) break;  // constant row
    int sum = 0, squares = 0;
    for (size_t i = 0; i < n; ++i) {
      // Thresholds at whole multiples of the step; comparing avoids a division and its rounding.
      int q = half;
      if (spec.bits == 2) {
        q = TwoBitCode(group.x[i], step);
      } else {
        q += static_cast<int>(std::clamp(std::floor(group.x[i] / step), -static_cast<float>(half),
                                         static_cast<float>(half - 1)));
      }
      trial[i] = static_cast<uint8_t>(q);
      sum += q;
      squares += q * q;
      product[i] = static_cast<float>(q) * group.x[i];
    }
    const int spread = static_cast<int>(n) * squares - sum * sum;  // n^2 var(q), exact
    if (spread == 0) continue;
    const float variance = static_cast<float>(spread) / count;  // sum of (q - mean q)^2
    const float sqx = Sum16({product.data(), n});
    // The squared error after the refit is sxx - sqx^2 / variance.
    const float score = sqx * sqx / variance;
    if (score > best_score) {
      best_score = score;
      best_slope = sqx / variance;
      best_sqx = sqx;
      best_sum = sum;
      std::copy_n(trial.begin(), n, codes.begin());
    }
  }
  float slope = best_slope;
  if (spec.rule == RowRule::kMseFitUnbiased && best_sqx > 0.0f) {
    // <xc, x^c> is slope * sqx.
    slope *= std::clamp(group.sxx / (best_slope * best_sqx), 0.5f, 2.0f);
  }
  *scale = std::max(RoundMeta(slope, spec.meta), kMinScale);
  const float mean_code = static_cast<float>(best_sum) / count;
  *min = RoundMeta(group.mean - *scale * mean_code, spec.meta);
}

void QuantizeLloydMax(const RowSpec& spec, std::span<const float> x, std::span<uint8_t> codes,
                      float* scale, float* min) {
  OSCAR_CHECK(spec.bits == 2, "{} bits: Lloyd-Max rows have 2", spec.bits);
  const Centred group = Centre(x);
  const float variance = group.sxx / static_cast<float>(x.size());
  const float deviation = std::sqrt(variance + kLloydMaxVariance);
  *scale = std::max(RoundMeta(kLloydMaxScale * deviation, spec.meta), kMinScale);
  *min = RoundMeta(group.mean - 1.5f * *scale, spec.meta);
  const float step = kLloydMaxThreshold * deviation;
  for (size_t i = 0; i < x.size(); ++i) {
    codes[i] = static_cast<uint8_t>(TwoBitCode(group.x[i], step));
  }
}

}  // namespace

int ClipIndex(float clip_ratio, int head_dim) {
  const int index = static_cast<int>(std::floor(static_cast<double>(clip_ratio) * head_dim));
  return std::clamp(index, 0, head_dim - 1);
}

void ClipRow(float clip_ratio, std::span<float> row) {
  OSCAR_CHECK(row.size() <= kMaxHeadDim);
  std::array<float, kMaxHeadDim> magnitude;
  for (size_t i = 0; i < row.size(); ++i) magnitude[i] = std::fabs(row[i]);
  auto* const nth = magnitude.begin() + ClipIndex(clip_ratio, static_cast<int>(row.size()));
  std::nth_element(magnitude.begin(), nth, magnitude.begin() + row.size());
  for (float& v : row) v = std::clamp(v, -*nth, *nth);
}

float RoundMeta(float x, MetaType type) {
  switch (type) {
    case MetaType::kFp16:
      return ToFloat(SaturateToFp16(x));
    case MetaType::kBf16:
      return ToFloat(ToBf16(std::clamp(x, -kBf16Max, kBf16Max)));
    case MetaType::kFp32:
      break;
  }
  return x;
}

float Sum16(std::span<const float> x) {
  OSCAR_DCHECK(!x.empty() && x.size() % 16 == 0);
  std::array<float, 16> lane;
  std::copy_n(x.begin(), 16, lane.begin());
  for (size_t i = 16; i < x.size(); i += 16) {
    for (size_t l = 0; l < 16; ++l) lane[l] += x[i + l];
  }
  for (size_t width = 8; width > 0; width /= 2) {
    for (size_t l = 0; l < width; ++l) lane[l] += lane[l + width];
  }
  return lane[0];
}

int QuantizeRow(const RowSpec& spec, std::span<const float> row, std::span<uint8_t> codes,
                std::span<float> scale, std::span<float> min) {
  const size_t dims = row.size(), group = static_cast<size_t>(spec.group_dims);
  OSCAR_CHECK(dims <= kMaxHeadDim && group > 0 && group % 16 == 0 && dims % group == 0 && dims > 0);
  OSCAR_CHECK(spec.bits >= 2 && (spec.bits <= 4 || spec.bits == 8), "{} bits", spec.bits);
  std::array<float, kMaxHeadDim> x;
  int saturated = 0;
  for (size_t i = 0; i < dims; ++i) {
    const float v = row[i];
    x[i] = std::isnan(v) ? 0.0f : std::clamp(v, -kFp16Max, kFp16Max);
    saturated += x[i] == v ? 0 : 1;
  }
  if (Clips(spec.rule) && spec.clip_ratio > 0.0f) ClipRow(spec.clip_ratio, {x.data(), dims});
  for (size_t g = 0; g < dims / group; ++g) {
    const std::span<const float> part{x.data() + g * group, group};
    const std::span<uint8_t> part_codes = codes.subspan(g * group, group);
    switch (spec.rule) {
      case RowRule::kMinMax:
        QuantizeMinMax(spec, part, part_codes, &scale[g], &min[g]);
        break;
      case RowRule::kSymmetric:
        QuantizeSymmetric(spec, part, part_codes, &scale[g], &min[g]);
        break;
      case RowRule::kMseFit:
      case RowRule::kMseFitUnbiased:
        QuantizeMseFit(spec, part, part_codes, &scale[g], &min[g]);
        break;
      case RowRule::kRealMin:
      case RowRule::kIntegerZero:
        QuantizeAffine(spec.rule, spec.bits, spec.meta, part, part_codes, &scale[g], &min[g]);
        break;
      case RowRule::kLloydMax:
        QuantizeLloydMax(spec, part, part_codes, &scale[g], &min[g]);
        break;
    }
  }
  return saturated;
}

void DequantizeRow(const RowSpec& spec, std::span<const uint8_t> codes,
                   std::span<const float> scale, std::span<const float> min, std::span<float> row) {
  const auto group = static_cast<size_t>(spec.group_dims);
  for (size_t i = 0; i < row.size(); ++i) {
    row[i] = static_cast<float>(codes[i]) * scale[i / group] + min[i / group];
  }
}

double BitsPerElement(const RowSpec& spec) {
  const double meta_bits = spec.meta == MetaType::kFp32 ? 32.0 : 16.0;
  const double numbers = spec.rule == RowRule::kSymmetric ? 1.0 : 2.0;
  return spec.bits + numbers * meta_bits / spec.group_dims;
}

}  // namespace oscar
