// Published ways to code one group of numbers as code * scale + offset with min/max range, each
// with its own rounding (RowRule). A group is a part of a row, or what one channel has in a run of
// tokens.
//
//  kMinMax       (channels alone: Kitty) as quant/row_quantizer.h's.
//  kRealMin      (KIVI) s = (max - min) / L and min, both rounded to the metadata type, s at least
//                2^-24; q = rint(clamp((x - min) / s, 0, L)), ties to even; offset = min.
//                The published code divides 0 / 0 on a constant group; here it decodes to its value
//                (to the rounding of min).
//  kIntegerZero  (QuaRot, OScaR) r = max - min, s = r / L, z = rint(-min / s), not clamped to 0..L;
//                q = clamp(rint(x (L / r) + z), 0, L); offset = -z s. Codes are chosen with the
//                exact s; s and offset are rounded to the metadata type afterwards. Zeros alone
//                count as the range [-1, 1] and decode to 0 (exactly at 2 bits, else to the
//                rounding of the offset). Another constant group, or one whose range is below 1e-30
//                (L / r would overflow), is s = 0, q = 0, offset = min. The offset may lie half a
//                step below min: in fp16 it saturates for groups beyond about +-49000, which come
//                back shifted.
//
// The least and the largest number count as +0 where they are -0.
#pragma once

#include <cstdint>
#include <span>

#include "quant/row_quantizer.h"

namespace oscar {

// Codes one group of finite numbers by one of these rules; scale and offset come back rounded to
// `meta`.
void QuantizeAffine(RowRule rule, int bits, MetaType meta, std::span<const float> x,
                    std::span<uint8_t> codes, float* scale, float* offset);

}  // namespace oscar
