// The memory that one thread works in while it reads prompts, and its sizes. Included once per
// target.
#if defined(OSCAR_SIMD_ATTENTION_SCRATCH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OSCAR_SIMD_ATTENTION_SCRATCH_INL_H_
#undef OSCAR_SIMD_ATTENTION_SCRATCH_INL_H_
#else
#define OSCAR_SIMD_ATTENTION_SCRATCH_INL_H_
#endif

#include <algorithm>
#include <utility>

#include "base/half.h"
#include "cache/block_layout.h"
#include "simd/attention_tiles-inl.h"

#if OSCAR_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {

// Query rows (token, head) that share a decoded page: 64 tokens of 4 heads repay the decoding 256
// times over, and states and operands (about 450 KiB at D 128) stay in 1 MiB of L2.
inline constexpr int kMaxRows = 256;
// Of those, the ones that go from q to o together: their logits and weights stay in L1 between the
// products. A multiple of kBlockRows.
inline constexpr int kRowsAtOnce = 48;
inline constexpr float kInt16Limit = 32767.0f;
// Logit of a row that a token sees in the page's other form. Finite, because a token may see none
// of a form: what that adds is gone as soon as a real logit comes, of which the other form has one.
inline constexpr float kUnseen = -1e30f;

// q in 16 bits, or what rounding left of it, for a pass over packed pages.
struct RowCodes {
  uint16_t* codes;  // [rows, D] int16, in steps; for tiles a row's high bytes, then its low ones
  float* step;      // [rows, groups], times softmax scale and log2 e
  float* sum;       // [rows, groups] of q, in steps
  float* centre;    // [rows, groups]: what rounding took from sum, times the middle code
};

// One thread's memory. Rows are (token, head), head the faster index.
struct Scratch {
  int32_t* k_pairs;  // [D / 2, 64]
  int32_t* v_pairs;  // [32, D]
  float* k;          // [D, 64]
  float* v;          // [64, D]
  Bf16* page;        // [2, 64, D]: a page that is not yet full, padded
  TileMeta meta;
  float* q;          // [rows, D], times softmax scale and log2 e
  uint16_t* q_bf16;  // [rows, D], the same rounded
  RowCodes rounded;
  RowCodes rest;       // of the rows that some page needs it for
  float* scale_limit;  // [rows, groups]: the largest K scale for which `rounded` is enough
  float* o;            // [rows, D]
  float* p;            // [rows, 64]: logits, then weights
  uint16_t* weights;   // [groups, rows, 64]: p s int16 in steps, or its bytes; or p in BF16
  float* weight_step;  // [groups, rows]
  float* weight_min;   // [groups, rows]: sum of p min
  float* m;            // [rows]
  float* d;
  float* alpha;
  int32_t* sums;  // of tiles, [D or 64 tokens, 2 planes, 16 rows]
  size_t floats;  // in all

  // [D / 2, 64]: what keys that are not rows leave of their BF16 numbers. Such a page needs no
  // padded copy.
  int32_t* k_rest() const { return reinterpret_cast<int32_t*>(page); }

  // Null pointers where `memory` is null: for the size alone.
  Scratch(float* memory, int head_dim, int num_groups) {
    const auto dims = static_cast<size_t>(head_dim), rows = static_cast<size_t>(kMaxRows);
    const auto groups = static_cast<size_t>(std::max(num_groups, 1));
    constexpr size_t kTokens = kPageTokens;
    floats = 0;
    const auto take = [&](size_t count) {
      const size_t at = std::exchange(floats, floats + (count + 15) / 16 * 16);
      return memory == nullptr ? nullptr : memory + at;
    };
    k_pairs = reinterpret_cast<int32_t*>(take(dims / 2 * kTokens));
    v_pairs = reinterpret_cast<int32_t*>(take(dims / 2 * kTokens));
    k = take(dims * kTokens);
    v = take(dims * kTokens);
    page = reinterpret_cast<Bf16*>(take(dims * kTokens));
    meta = {take(groups * kTokens), take(groups * kTokens), take(groups * kTokens),
            take(groups * kTokens)};
    q = take(rows * dims);
    q_bf16 = reinterpret_cast<uint16_t*>(take(rows * dims / 2));
    for (RowCodes* part : {&rounded, &rest}) {
      *part = {reinterpret_cast<uint16_t*>(take(rows * dims / 2)), take(rows * groups),
               take(rows * groups), take(rows * groups)};
    }
    scale_limit = take(rows * groups);
    o = take(rows * dims);
    p = take(rows * kTokens);
    weights = reinterpret_cast<uint16_t*>(take(groups * rows * kTokens / 2));
    weight_step = take(groups * rows);
    weight_min = take(groups * rows);
    m = take(rows);
    d = take(rows);
    alpha = take(rows);
    sums = reinterpret_cast<int32_t*>(take(2 * 16 * std::max(dims, kTokens)));
  }
};

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OSCAR_SIMD_TARGET

#endif  // per-target include guard
