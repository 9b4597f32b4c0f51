#include "simd/delta_rule.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "simd/delta_rule.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h

#include <algorithm>

#include "base/check.h"
#include "simd/dispatch.h"
#include "simd/lanes16-inl.h"

#if OSCAR_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {
namespace {

HWY_INLINE F16x LoadColumns(const float* x, size_t count) {
  return count >= 16 ? Load(x) : LoadPart(x, count, 0.0f);
}
HWY_INLINE void StoreColumns(const F16x& v, float* x, size_t count) {
  if (count >= 16) {
    Store(v, x);
  } else {
    StorePart(v, x, count);
  }
}

// kBlocks times 16 columns, the last of them `last` wide. Even and odd key dims are summed apart
// and then added, which hides the latency of a sum.
template <int kBlocks>
void Columns(const DeltaRule& rule, size_t last) {
  const auto key_dim = static_cast<size_t>(rule.key_dim);
  const auto width = [&](int block) { return block + 1 == kBlocks ? last : size_t{16}; };
  for (size_t t = 0; t < static_cast<size_t>(rule.tokens); ++t) {
    const float* const q = rule.q + t * rule.qkv_stride;
    const float* const k = rule.k + t * rule.qkv_stride;
    const float* const v = rule.v + t * rule.qkv_stride;
    const F16x decay = Set(rule.decay[t * rule.gate_stride]);
    const F16x beta = Set(rule.beta[t * rule.gate_stride]);
    F16x sum[2][kBlocks], change[kBlocks];
    OSCAR_UNROLL
    for (int j = 0; j < kBlocks; ++j) sum[0][j] = sum[1][j] = Set(0.0f);
    // Decay, and what the decayed state holds for this key.
    const auto decay_row = [&](size_t d, F16x* into) {
      const F16x key = Set(k[d]);
      float* const row = rule.state + d * rule.state_stride;
      OSCAR_UNROLL
      for (int j = 0; j < kBlocks; ++j) {
        const F16x s = Mul(LoadColumns(row + 16 * j, width(j)), decay);
        StoreColumns(s, row + 16 * j, width(j));
        into[j] = MulAdd(key, s, into[j]);
      }
    };
    size_t d = 0;
    for (; d + 2 <= key_dim; d += 2) {
      decay_row(d, sum[0]);
      decay_row(d + 1, sum[1]);
    }
    if (d < key_dim) decay_row(d, sum[0]);
    OSCAR_UNROLL
    for (int j = 0; j < kBlocks; ++j) {
      const F16x held = Add(sum[0][j], sum[1][j]);
      change[j] = Mul(beta, Sub(LoadColumns(v + 16 * j, width(j)), held));
      sum[0][j] = sum[1][j] = Set(0.0f);
    }
    // Write, then read.
    const auto write_row = [&](size_t i, F16x* into) {
      const F16x key = Set(k[i]), query = Set(q[i]);
      float* const row = rule.state + i * rule.state_stride;
      OSCAR_UNROLL
      for (int j = 0; j < kBlocks; ++j) {
        const F16x s = MulAdd(key, change[j], LoadColumns(row + 16 * j, width(j)));
        StoreColumns(s, row + 16 * j, width(j));
        into[j] = MulAdd(query, s, into[j]);
      }
    };
    for (d = 0; d + 2 <= key_dim; d += 2) {
      write_row(d, sum[0]);
      write_row(d + 1, sum[1]);
    }
    if (d < key_dim) write_row(d, sum[0]);
    float* const out = rule.out + t * rule.out_stride;
    OSCAR_UNROLL
    for (int j = 0; j < kBlocks; ++j) {
      StoreColumns(Add(sum[0][j], sum[1][j]), out + 16 * j, width(j));
    }
  }
}

void RunRule(const DeltaRule& rule) {
  DeltaRule part = rule;
  for (int first = 0; first < rule.columns; first += kDeltaRuleColumns) {
    const int columns = std::min(kDeltaRuleColumns, rule.columns - first);
    part.v = rule.v + first;
    part.state = rule.state + first;
    part.out = rule.out + first;
    if (columns > 16) {
      Columns<2>(part, static_cast<size_t>(columns - 16));
    } else {
      Columns<1>(part, static_cast<size_t>(columns));
    }
  }
}

}  // namespace

struct DeltaRuleKernels {
  static constexpr auto kRun = &RunRule;
};

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OSCAR_SIMD_TARGET

#if HWY_ONCE
namespace oscar::simd {

void RunDeltaRule(const DeltaRule& rule) {
  OSCAR_DCHECK(rule.tokens > 0 && rule.key_dim > 0 && rule.columns > 0);
  const auto run = ActiveTarget() == Target::kAvx2 ? N_AVX2::DeltaRuleKernels::kRun
                                                   : N_AVX3::DeltaRuleKernels::kRun;
  run(rule);
}

}  // namespace oscar::simd
#endif  // HWY_ONCE
