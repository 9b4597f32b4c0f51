#include "cache/method_layout.h"

#include "base/check.h"

namespace oscar {

BlockKind KindOf(int bits) {
  OSCAR_CHECK(bits >= 2 && bits <= 4, "{} bits", bits);
  return bits == 2 ? BlockKind::kInt2 : bits == 3 ? BlockKind::kInt3 : BlockKind::kInt4;
}

BlockLayout LayoutOf(const KvMethod& method, int k_bits, int v_bits, CodeOrder order,
                     int head_dim) {
  OSCAR_CHECK(method.is_quantized);
  return {{.kind = KindOf(k_bits),
           .form = method.k.form,
           .group_tokens = method.k.group_tokens,
           .head_norms = method.k.norm == TokenNorm::kPerHead,
           .boosted_dims = method.k.boosted_dims},
          KindOf(v_bits),
          order,
          head_dim,
          method.v.rows.group_dims};
}

BlockLayout LayoutOf(const KvMethod& method, CodeOrder order, int head_dim) {
  return LayoutOf(method, method.k.rows.bits, method.v.rows.bits, order, head_dim);
}

BlockRules RulesOf(const KvMethod& method) {
  return {method.k.rows.rule, method.v.rows.rule, method.k.rows.clip_ratio,
          method.v.rows.clip_ratio};
}

}  // namespace oscar
