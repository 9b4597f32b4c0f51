// Causal attention in fp64 over captured Q, K and V, for the objective sst_exact: with scores S,
// V^T S^T S V is O^T O of the outputs O = S V, so the second moment of the outputs is all it takes.
// A straightforward two-pass softmax; calibration only.
#pragma once

#include <cstdint>
#include <span>

#include "base/thread_pool.h"

namespace oscar {

struct QkvShape {
  int num_query_heads = 0;
  int num_kv_heads = 0;  // divides num_query_heads
  int head_dim = 0;
  int group() const { return num_query_heads / num_kv_heads; }
  friend bool operator==(const QkvShape&, const QkvShape&) = default;
};

// One sequence: q [T, H_q, D], k and v [T, H_kv, D]; token t sees 0..t; logits times 1/sqrt(D).
// `out` is [T, H_q, D], each element rounded once to fp32. Bits do not depend on the pool.
void CausalAttentionOutputs(const QkvShape& shape, int64_t num_tokens, std::span<const float> q,
                            std::span<const float> k, std::span<const float> v,
                            std::span<float> out, ThreadPool& pool);

}  // namespace oscar
