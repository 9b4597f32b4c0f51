// The gated delta rule of one head in fp32, token by token (numeric/delta_rule.h is its
// specification). Columns of the state do not meet, so callers divide them over threads; a column's
// sums run over the key dims in one order, whatever the columns beside it and the instruction set.
#pragma once

#include <cstddef>

namespace oscar::simd {

struct DeltaRule {
  const float *q, *k;  // of the first token, [key_dim]
  const float* v;      // of the first token and column
  size_t qkv_stride;   // between tokens
  const float *decay, *beta;
  size_t gate_stride;
  float* state;  // [key_dim, ...], at the first column
  size_t state_stride;
  float* out;  // of the first token and column
  size_t out_stride;
  int tokens, key_dim, columns;
};

// Columns of a task: their part of a state of 128 key dims stays in the nearest cache.
inline constexpr int kDeltaRuleColumns = 32;

void RunDeltaRule(const DeltaRule& rule);

}  // namespace oscar::simd
