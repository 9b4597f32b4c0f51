// What the pages of a method (quant/kv_method.h) look like, and by what rules they are written.
#pragma once

#include "cache/block_codec.h"
#include "cache/block_layout.h"
#include "quant/kv_method.h"

namespace oscar {

// REQUIRES: 2, 3 or 4 bits.
BlockKind KindOf(int bits);
// The blocks of heads that have these bits. REQUIRES: method.is_quantized.
BlockLayout LayoutOf(const KvMethod& method, int k_bits, int v_bits, CodeOrder order, int head_dim);
// The same with the method's own bits.
BlockLayout LayoutOf(const KvMethod& method, CodeOrder order, int head_dim);
BlockRules RulesOf(const KvMethod& method);

}  // namespace oscar
