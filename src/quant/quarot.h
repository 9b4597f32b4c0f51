// QuaRot's KV quantisers (spcl/QuaRot), on rows that the recipe has rotated by the Hadamard of the
// whole head (K after RoPE; V folded into the weights). One group is one (token, head) row.
//
//  kSymmetric    its default: s = max|x| / (2^(b-1) - 1), levels -2^(b-1) .. 2^(b-1) - 1 (2 bits:
//                -2, -1, 0, 1). Bits: b + 16 / D.
//  kIntegerZero  its asymmetric form: integer zero point (quant/affine_group.h). Bits: b + 32 / D.
//  kRealMin      the form of its INT4 kernels, and of the "QuaRot-INT2" that comparisons quote:
//                min/max with a real-valued minimum. Fits cache pages; the `quarot` method.
//                Bits: b + 32 / D.
// Published clip ratios are 1.0 for the KV cache: no clip.
#pragma once

#include <memory>

#include "quant/kv_quantizer.h"

namespace oscar {

enum class QuarotForm : uint8_t { kSymmetric, kIntegerZero, kRealMin };

std::unique_ptr<KvQuantizer> MakeQuarot(QuarotForm form, int bits, int head_dim);

}  // namespace oscar
