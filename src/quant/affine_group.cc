#include "quant/affine_group.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace oscar {
namespace {

constexpr float kSmallestRange = 1e-30f;

void IntegerZero(float levels, MetaType meta, std::span<const float> x, float lo, float hi,
                 std::span<uint8_t> codes, float* scale, float* offset) {
  if (lo == 0.0f && hi == 0.0f) {
    lo = -1.0f;
    hi = 1.0f;
  }
  const float range = hi - lo;
  if (!(range > kSmallestRange)) {
    std::fill_n(codes.begin(), x.size(), uint8_t{0});
    *scale = 0.0f;
    *offset = RoundMeta(lo, meta);
    return;
  }
  const float step = range / levels;
  const float zero = std::nearbyint(-lo / step);
  for (size_t i = 0; i < x.size(); ++i) {
    const float q = std::nearbyint(x[i] * (levels / range) + zero);
    codes[i] = static_cast<uint8_t>(std::clamp(q, 0.0f, levels));
  }
  *scale = RoundMeta(step, meta);
  *offset = RoundMeta(-zero * step, meta);
}

}  // namespace

void QuantizeAffine(RowRule rule, int bits, MetaType meta, std::span<const float> x,
                    std::span<uint8_t> codes, float* scale, float* offset) {
  const auto [least, largest] = std::minmax_element(x.begin(), x.end());
  const float lo = *least + 0.0f, hi = *largest + 0.0f;  // -0 becomes +0
  const auto levels = static_cast<float>((1 << bits) - 1);
  if (rule == RowRule::kIntegerZero) {
    IntegerZero(levels, meta, x, lo, hi, codes, scale, offset);
    return;
  }
  *offset = RoundMeta(lo, meta);
  if (rule == RowRule::kMinMax) {
    *scale = std::max(RoundMeta(std::max(hi - lo, kMinRange) / levels, meta), kMinScale);
    for (size_t i = 0; i < x.size(); ++i) {
      const float q = std::floor((x[i] - *offset) / *scale + 0.5f);
      codes[i] = static_cast<uint8_t>(std::clamp(q, 0.0f, levels));
    }
    return;
  }
  OSCAR_DCHECK(rule == RowRule::kRealMin);
  *scale = std::max(RoundMeta((hi - lo) / levels, meta), kMinScale);
  for (size_t i = 0; i < x.size(); ++i) {
    codes[i] =
        static_cast<uint8_t>(std::nearbyint(std::clamp((x[i] - *offset) / *scale, 0.0f, levels)));
  }
}

}  // namespace oscar
