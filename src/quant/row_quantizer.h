// The row quantiser: one (token, KV head) vector of D numbers becomes D codes and one (scale, min)
// a group; x^ = code * scale + min. This scalar code is the specification: SIMD and CUDA writers
// are bit-equal to it on the same BF16 row, for every rule.
//
// To make that possible every operation below is IEEE binary32, unfused, and every sum runs in one
// fixed order (Sum16): lane l of 16 adds x[l], x[l+16], ... in turn, then lanes fold 8, 4, 2, 1.
// 16 lanes are one AVX-512 register, two AVX2 registers, or half a warp.
//
// Input: NaN counts as 0; values beyond +-65504 saturate (both are counted). Rows are whatever the
// cache holds: rotated, post-RoPE.
//
// Rules, per group of n dims, L = 2^bits - 1, h = 2^(bits-1):
//  kMinMax   clip first if a ratio r > 0 is given: t = (|row| sorted ascending)[min(floor(r D),
//            D - 1)] over the whole row, before grouping; x = clamp(x, -t, t). Then
//            s = max(max - min, 1e-8) / L;  q = clamp(floor((x - min) / s + 1/2), 0, L)
//            with s and min already rounded to the metadata type.
//  kSymmetric  the same clip; s = max(max|x|, 1e-8) / (h - 1), rounded, and in fp16 at most
//            65504 / h, so that min is finite there;
//            q = clamp(rint(x / s), -h, h - 1), ties to even, stored plus h;
//            min is -h s, exactly, and need not be stored.
//  kMseFit   m = mean, xc = x - m, sd = sqrt(sum(xc^2) / n). For each of five steps s = (f b) sd
//            (f = 0.75, 0.85, 0.95, 1.05, 1.15; b = 1, 0.5884, 0.3365 at 2, 3, 4 bits, the ratio of
//            the Gaussian-optimal steps) code q = clamp(floor(xc / s) + h, 0, L) and refit by least
//            squares: a = sqx / var with sqx = sum(q xc) and var = (n sum(q^2) - sum(q)^2) / n, the
//            numerator in integers. At 2 bits q counts xc >= -s, xc >= 0, xc >= s: no division.
//            Keep the step with the largest sqx^2 / var, which leaves the smallest squared error
//            (the first of equals; a step that gives all dims one code is passed over).
//            Stored: scale a, min = m - scale mean(q), so that the mean is kept whatever rounding
//            did to the scale.
//  kMseFitUnbiased  as kMseFit, then a *= clamp(sum(xc^2) / (a sqx), 0.5, 2), the ratio of <xc, xc>
//            to <xc, x^c>: an MSE-optimal reconstruction is shorter than its row, which would
//            flatten attention logits. Codes are not chosen again: nearest levels of the longer
//            scale would undo the rescale.
//  kLloydMax  what OSCAR's Lloyd-Max switch stores (reference: its prefill write kernel). 2 bits
//            alone. The same clip as kMinMax's; m and xc as kMseFit's;
//            sd = sqrt(sum(xc^2) / n + 1e-8); q counts xc >= -t sd, xc >= 0, xc >= t sd, with the
//            Gaussian threshold t = 0.98107. The levels are not Lloyd's but equally spaced, so that
//            x^ = code * scale + min can read them: scale = (2 * 1.50956 / 3) * 1.16 sd,
//            min = m - 1.5 scale, that is m +- 0.584 sd and m +- 1.751 sd.
//
//  kRealMin, kIntegerZero  as published by KIVI, and by QuaRot and OScaR: quant/affine_group.h.
//
// Stored scales are at least 2^-24, so that a reader may divide by them; a constant row codes to
// its own value (to the rounding of min; kIntegerZero may store a scale of 0 for it). The min of a
// fit may lie below every number of its group (where no dim takes code 0) and saturates in fp16:
// groups beyond about +-24000 may come back shifted. The min of kLloydMax is 1.751 sd below the
// mean and saturates the same way. Groups whose spread is below about 1e-20 count as constant in
// the fits (their squares underflow); kLloydMax has no level at the mean of a constant group and
// misses it by half a step of its least scale, 6e-5.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "base/half.h"

namespace oscar {

enum class RowRule : uint8_t {
  kMinMax,
  kSymmetric,
  kMseFit,
  kMseFitUnbiased,
  kRealMin,
  kIntegerZero,
  kLloydMax,
};
// Whether rows are clipped first where a ratio is given.
constexpr bool Clips(RowRule rule) {
  return rule == RowRule::kMinMax || rule == RowRule::kSymmetric || rule == RowRule::kLloydMax;
}
enum class MetaType : uint8_t { kFp16, kBf16, kFp32 };

inline constexpr int kMaxHeadDim = 256;
inline constexpr int kMaxGroups = 8;  // head dim 256 in groups of 32
inline constexpr float kMinScale = kFp16MinSubnormal;
inline constexpr float kMinRange = 1e-8f;  // of a constant group

// The step search of kMseFit, in standard deviations at 2 bits, and the Gaussian-optimal uniform
// steps of 3 and 4 bits (Max, 1960) relative to the 2-bit one.
inline constexpr std::array<float, 5> kMseStepFactors = {0.75f, 0.85f, 0.95f, 1.05f, 1.15f};
constexpr float MseStepScale(int bits) { return bits == 2 ? 1.0f : bits == 3 ? 0.5884f : 0.3365f; }

// kLloydMax, in standard deviations, as OSCAR's fp32 source has them: the outer threshold, and the
// scale from the outer level and the stretch that its authors chose.
inline constexpr float kLloydMaxThreshold = 0.9810652732849121f;
inline constexpr float kLloydMaxScale = 2.0f * 1.5095585584640503f / 3.0f * 1.16f;
inline constexpr float kLloydMaxVariance = 1e-8f;  // added to a group's

struct RowSpec {
  RowRule rule = RowRule::kMinMax;
  int bits = 2;             // 2, 3, 4 or 8 (kMseFit*: 2, 3 or 4; kLloydMax: 2)
  int group_dims = 128;     // divides the row; a multiple of 16
  float clip_ratio = 0.0f;  // of rules that clip; 0 is off, else (0, 1]
  MetaType meta = MetaType::kFp16;

  friend bool operator==(const RowSpec&, const RowSpec&) = default;
};

// Element of the ascending order of |row| that the clip rule takes. REQUIRES: ratio > 0.
int ClipIndex(float clip_ratio, int head_dim);
// Clamps a whole row to that element, in place.
void ClipRow(float clip_ratio, std::span<float> row);

// Rounds a scale or min to the stored type; saturates at the type's largest finite value.
float RoundMeta(float x, MetaType type);

// The fixed summation order. REQUIRES: x.size() is a positive multiple of 16.
float Sum16(std::span<const float> x);

// Quantises one row. `codes` has row.size() entries; `scale` and `min` one per group, already
// rounded to spec.meta. Returns the number of input values that were NaN or saturated. REQUIRES:
// row.size() <= kMaxHeadDim, a multiple of spec.group_dims.
int QuantizeRow(const RowSpec& spec, std::span<const float> row, std::span<uint8_t> codes,
                std::span<float> scale, std::span<float> min);

// x^ = code * scale + min, unfused.
void DequantizeRow(const RowSpec& spec, std::span<const uint8_t> codes,
                   std::span<const float> scale, std::span<const float> min, std::span<float> row);

// Exact storage cost: codes plus metadata (one number a group where symmetric, else two).
double BitsPerElement(const RowSpec& spec);

}  // namespace oscar
