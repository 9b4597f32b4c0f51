// Seals pages: 64 rotated BF16 rows of K and of V become one quantised block in tensor-core order,
// bit-equal to EncodeBlock (cache/block_codec.h) on the same rows.
//
// Grid       (jobs x KV heads, layers), 128 threads: one thread per row, K rows first. A thread
// holds
//            its whole row in registers, so that every sum runs in the specified order (16 lanes,
//            then folds) without a shuffle, and selection needs no exchange either.
// Shared     the source block (32 KiB at D 128) and the target block.
// Bytes      32 KiB read, 4608 B written a page and head at INT2, D 128.
// Bound      instruction issue. H200: see docs/benchmarks.md.
//
// BF16 patterns below 2^16 are finite, ordered the same way when read as fp16; so packed fp16
// compares (HSET2) work on pairs of BF16 values. A code is the number of thresholds a value
// reaches: every rule is monotone in the value, so its thresholds on the BF16 grid are found by
// evaluating the rule's exact arithmetic at a few grid points, and no element is ever divided.
#pragma once

#include <cstdint>

#include "cache/block_layout.h"
#include "cuda/device/ptx.cuh"
#include "cuda/kv/seal_params.h"
#include "quant/row_quantizer.h"

namespace oscar::cuda {

// 65536 as BF16: what values beyond 65504 are held as until they are clamped.
inline constexpr int kSaturatedKey = 0x4780;

// The BF16 grid as integers in numeric order; 0 stands for both zeros.
__device__ __forceinline__ float GridValue(int index) {
  const uint32_t magnitude = static_cast<uint32_t>(index < 0 ? -index : index) << 16;
  return __uint_as_float(magnitude | (index < 0 ? 0x80000000u : 0u));
}
__device__ __forceinline__ uint32_t GridPair(int index) {
  const uint32_t bits =
      static_cast<uint32_t>(index < 0 ? -index : index) | (index < 0 ? 0x8000u : 0u);
  return bits * 0x00010001u;
}

// The first grid point at which a monotone predicate holds; kSaturatedKey + 1 if none does.
template <typename Predicate>
__device__ __forceinline__ int FirstOnGrid(float guess, Predicate holds) {
  const uint32_t bits = __float_as_uint(guess);
  const int magnitude = static_cast<int>((bits & 0x7fffffffu) >> 16);
  const int at =
      min(max((bits >> 31) != 0 ? -magnitude : magnitude, -kSaturatedKey + 1), kSaturatedKey - 2);
  int below = at - 1, above = at + 2;  // holds is false at below, true at above
  if (holds(GridValue(below))) below = -kSaturatedKey - 1;
  if (!holds(GridValue(above))) above = kSaturatedKey + 1;
  while (above - below > 1) {
    const int middle = (above + below) >> 1;
    if (holds(GridValue(middle))) {
      above = middle;
    } else {
      below = middle;
    }
  }
  return above;
}

// What one row writes to, and the arithmetic that both ways of sealing share.
template <BlockKind kKind, int kDim, int kGroup>
struct RowTarget {
  static constexpr BlockLayout kLayout{kKind, CodeOrder::kTensorCore, kDim, kGroup};
  // The same as a value: device code cannot take the address of a static member.
  __device__ static constexpr BlockLayout Layout() {
    return {kKind, CodeOrder::kTensorCore, kDim, kGroup};
  }
  static constexpr int kBits = kLayout.bits();
  static constexpr bool kSplit = kBits == 3;  // low two bits, then high ones
  static constexpr int kLowBits = kSplit ? 2 : kBits;
  static constexpr int kPairs = kDim / 2, kGroupPairs = kGroup / 2;
  static constexpr int kLevels = (1 << kBits) - 1;
  static constexpr float kInverseGroup = 1.0f / kGroup;  // exact: a power of two

  // Where the block would begin if this side's codes, or its metadata, lay in it as in one whose
  // sides are alike: both the block itself, unless they are not.
  uint8_t* codes;
  uint8_t* meta;
  int token;
  bool is_k;

  // One side of a block whose sides differ in bits.
  __device__ static RowTarget Of(uint8_t* block, const BlockLayout& layout, int token, bool is_k) {
    if (is_k)
      return {block, block + layout.k_meta_offset() - Layout().k_meta_offset(), token, is_k};
    return {block + layout.v_codes_offset() - Layout().v_codes_offset(),
            block + layout.v_meta_offset() - Layout().v_meta_offset(), token, is_k};
  }

  struct Choice {
    float score = 0.0f, slope = 0.0f, sqx = 0.0f, step = 0.0f;
    int sum = 0;
    int t_low = kSaturatedKey + 1, t_zero = kSaturatedKey + 1, t_high = kSaturatedKey + 1;
  };
  __device__ static __forceinline__ float RoundFp16(float x) {
    return __half2float(__float2half_rn(fminf(fmaxf(x, -kFp16Max), kFp16Max)));
  }
  // The specified summation order: 16 lanes, then folds of 8, 4, 2, 1.
  __device__ static __forceinline__ float Fold(float (&lane)[16]) {
#pragma unroll
    for (int l = 0; l < 8; ++l) lane[l] = __fadd_rn(lane[l], lane[l + 8]);
#pragma unroll
    for (int l = 0; l < 4; ++l) lane[l] = __fadd_rn(lane[l], lane[l + 4]);
#pragma unroll
    for (int l = 0; l < 2; ++l) lane[l] = __fadd_rn(lane[l], lane[l + 2]);
    lane[0] = __fadd_rn(lane[0], lane[1]);
    return lane[0];
  }
  // Keeps a step if its score is higher; sum and squares are those of its codes.
  __device__ static __forceinline__ bool Improve(Choice* best, int sum, int squares, float sqx) {
    const int spread = kGroup * squares - sum * sum;
    if (spread == 0) return false;
    const float variance = static_cast<float>(spread) * kInverseGroup;
    const float score = __fdiv_rn(__fmul_rn(sqx, sqx), variance);
    if (!(score > best->score)) return false;
    best->score = score;
    best->slope = __fdiv_rn(sqx, variance);
    best->sqx = sqx;
    best->sum = sum;
    return true;
  }

  __device__ void StoreMeta(int group, float scale, float minimum) const {
    const uint32_t at = is_k ? Layout().KScale(token, group) : Layout().VScale(token, group);
    *reinterpret_cast<uint32_t*>(meta + at) = PackHalf(scale, minimum);
  }

  __device__ void StoreFit(int group, RowRule rule, float mean, float sxx,
                           const Choice& best) const {
    float slope = best.slope;
    if (rule == RowRule::kMseFitUnbiased && best.sqx > 0.0f) {
      const float longer = __fdiv_rn(sxx, __fmul_rn(best.slope, best.sqx));
      slope = __fmul_rn(slope, fminf(fmaxf(longer, 0.5f), 2.0f));
    }
    const float scale = fmaxf(RoundFp16(slope), kMinScale);
    const float mean_code = static_cast<float>(best.sum) * kInverseGroup;
    StoreMeta(group, scale, RoundFp16(__fsub_rn(mean, __fmul_rn(scale, mean_code))));
  }

  __device__ __forceinline__ void Or(CodePosition at, uint32_t bits) const {
    atomicOr(reinterpret_cast<uint32_t*>(codes + at.offset), bits << at.shift);
  }
  // Codes of the pair (dim, dim + 1) and of those at the same place in the steps after it; of three
  // bits the low two.
  __device__ __forceinline__ void StoreWord(int dim, uint32_t word) const {
    if (is_k) {
      Or(Layout().KCode(token, dim), word);
    } else {
      Or(Layout().VCode(token, dim), word & 0xffffu);
      Or(Layout().VCode(token, dim + 1), word >> 16);
    }
  }
  __device__ __forceinline__ void StoreHighWord(int dim, uint32_t word) const {
    if (is_k) {
      Or(Layout().KHighBit(token, dim), word);
    } else {
      Or(Layout().VHighBit(token, dim), word & 0xffffu);
      Or(Layout().VHighBit(token, dim + 1), word >> 16);
    }
  }
  __device__ void StoreCode(int dim, uint32_t code) const {
    Or(is_k ? Layout().KCode(token, dim) : Layout().VCode(token, dim), kSplit ? code & 3u : code);
    if constexpr (kSplit) {
      Or(is_k ? Layout().KHighBit(token, dim) : Layout().VHighBit(token, dim), code >> 2);
    }
  }
};

// A row sealed the plain way, a value at a time out of shared memory: what is rare.
template <BlockKind kKind, int kDim, int kGroup>
struct PlainSealer {
  using Target = RowTarget<kKind, kDim, kGroup>;
  Target target;
  const uint8_t* source;  // the page side
  float clip;

  __device__ float PlainValue(int dim) const {
    const uint32_t at = (dim / 64 * kPageTokens + target.token) * 128 +
                        ((dim % 64 / 8) ^ (target.token & 7)) * 16 + dim % 8 * 2;
    const float x =
        __uint_as_float(uint32_t{*reinterpret_cast<const uint16_t*>(source + at)} << 16);
    return isnan(x) ? 0.0f : fminf(fmaxf(x, -clip), clip);
  }
  __device__ static uint32_t CodeOf(float centred, float step) {
    constexpr float kHalf = 1 << (Target::kBits - 1);
    if (Target::kBits == 2) {
      return (centred >= -step ? 1u : 0u) + (centred >= 0.0f ? 1u : 0u) +
             (centred >= step ? 1u : 0u);
    }
    const float q = floorf(__fdiv_rn(centred, step));
    return static_cast<uint32_t>(fminf(fmaxf(q, -kHalf), kHalf - 1.0f) + kHalf);
  }
  template <typename Term>
  __device__ __forceinline__ float PlainSum(int group, Term term) const {
    float lane[16];
#pragma unroll
    for (int l = 0; l < 16; ++l) lane[l] = term(PlainValue(group * kGroup + l));
#pragma unroll 1
    for (int i = 16; i < kGroup; i += 16) {
#pragma unroll
      for (int l = 0; l < 16; ++l) {
        lane[l] = __fadd_rn(lane[l], term(PlainValue(group * kGroup + i + l)));
      }
    }
    return Target::Fold(lane);
  }
  __device__ __noinline__ void Seal(RowRule rule, int group) const {
    if (rule == RowRule::kSymmetric) {
      constexpr float kHalf = 1 << (Target::kBits - 1);
      float largest = 0.0f;
      for (int d = group * kGroup; d < (group + 1) * kGroup; ++d) {
        largest = fmaxf(largest, fabsf(PlainValue(d)));
      }
      const float rounded = Target::RoundFp16(__fdiv_rn(fmaxf(largest, 1e-8f), kHalf - 1.0f));
      const float scale = fminf(fmaxf(rounded, kMinScale), kFp16Max / kHalf);
      target.StoreMeta(group, scale, -kHalf * scale);
      for (int d = group * kGroup; d < (group + 1) * kGroup; ++d) {
        const float q = rintf(__fdiv_rn(PlainValue(d), scale));
        target.StoreCode(d, static_cast<uint32_t>(fminf(fmaxf(q, -kHalf), kHalf - 1.0f) + kHalf));
      }
      return;
    }
    const float mean = PlainSum(group, [](float x) { return x; }) * Target::kInverseGroup;
    const float sxx = PlainSum(group, [&](float x) {
      const float c = __fsub_rn(x, mean);
      return __fmul_rn(c, c);
    });
    if (rule == RowRule::kLloydMax) {
      if constexpr (Target::kBits == 2) SealLloydMax(group, mean, sxx);
      return;
    }
    const float deviation = __fsqrt_rn(sxx * Target::kInverseGroup);
    typename Target::Choice best;
    for (int f = 0; f < 5; ++f) {
      const float factor = f == 0   ? 0.75f
                           : f == 1 ? 0.85f
                           : f == 2 ? 0.95f
                           : f == 3 ? 1.05f
                                    : 1.15f;
      const float step = __fmul_rn(__fmul_rn(factor, MseStepScale(Target::kBits)), deviation);
      if (!(step > 0.0f)) break;
      int sum = 0, squares = 0;
      const float sqx = PlainSum(group, [&](float x) {
        const float c = __fsub_rn(x, mean);
        const auto q = static_cast<int>(CodeOf(c, step));
        sum += q;
        squares += q * q;
        return __fmul_rn(static_cast<float>(q), c);
      });
      if (Target::Improve(&best, sum, squares, sqx)) best.step = step;
    }
    if (best.score > 0.0f) {
      for (int d = group * kGroup; d < (group + 1) * kGroup; ++d) {
        target.StoreCode(d, CodeOf(__fsub_rn(PlainValue(d), mean), best.step));
      }
    }
    target.StoreFit(group, rule, mean, sxx, best);
  }
  __device__ __forceinline__ void SealLloydMax(int group, float mean, float sxx) const {
    const float variance = __fadd_rn(sxx * Target::kInverseGroup, kLloydMaxVariance);
    const float deviation = __fsqrt_rn(variance);
    const float scale = fmaxf(Target::RoundFp16(__fmul_rn(kLloydMaxScale, deviation)), kMinScale);
    target.StoreMeta(group, scale, Target::RoundFp16(__fsub_rn(mean, __fmul_rn(1.5f, scale))));
    const float step = __fmul_rn(kLloydMaxThreshold, deviation);
    for (int d = group * kGroup; d < (group + 1) * kGroup; ++d) {
      target.StoreCode(d, CodeOf(__fsub_rn(PlainValue(d), mean), step));
    }
  }
};

// A row sealed by least squares at 2 bits. Reads the row out of shared memory 16 values at a time,
// in loops: unrolled over the whole row the code would not fit the instruction cache.
template <BlockKind kKind, int kDim, int kGroup>
struct FitSealer {
  using Target = RowTarget<kKind, kDim, kGroup>;
  Target target;
  const uint8_t* source;  // the page side; every value within the range

  // Values [16 step, 16 step + 16) of the row, in pairs.
  __device__ __forceinline__ void Load(uint32_t (&pair)[8], int step) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int chunk = step * 2 + half;
      const uint4 v =
          *reinterpret_cast<const uint4*>(source + (chunk / 8 * kPageTokens + target.token) * 128 +
                                          ((chunk % 8) ^ (target.token & 7)) * 16);
      pair[half * 4] = v.x;
      pair[half * 4 + 1] = v.y;
      pair[half * 4 + 2] = v.z;
      pair[half * 4 + 3] = v.w;
    }
  }
  // -0 + x is x for every x, so lanes may start there.
  template <typename Term>
  __device__ __forceinline__ float Sum(int group, Term term) const {
    float lane[16];
#pragma unroll
    for (int l = 0; l < 16; ++l) lane[l] = -0.0f;
#pragma unroll 2
    for (int step = group * kSteps; step < (group + 1) * kSteps; ++step) {
      uint32_t pair[8];
      Load(pair, step);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        lane[2 * i] = __fadd_rn(lane[2 * i], term(Bf16Low(pair[i])));
        lane[2 * i + 1] = __fadd_rn(lane[2 * i + 1], term(Bf16High(pair[i])));
      }
    }
    return Target::Fold(lane);
  }

  __device__ __forceinline__ void Seal(RowRule rule, int group) const {
    const float mean = Sum(group, [](float x) { return x; }) * Target::kInverseGroup;
    const float sxx = Sum(group, [&](float x) {
      const float c = __fsub_rn(x, mean);
      return __fmul_rn(c, c);
    });
    const float deviation = __fsqrt_rn(sxx * Target::kInverseGroup);
    constexpr float kFactors[5] = {0.75f, 0.85f, 0.95f, 1.05f, 1.15f};
    typename Target::Choice best;
    if (__fmul_rn(kFactors[4], deviation) > 0.0f) {  // else a constant row
      const int zero = FirstOnGrid(mean, [&](float x) { return __fsub_rn(x, mean) >= 0.0f; });
      const __half2 b_zero = AsHalf2(GridPair(zero));
      int low[5], high[5];
      float lane[5][16];
      __half2 count_low[5], count_high[5], count_zero = AsHalf2(0);
#pragma unroll
      for (int f = 0; f < 5; ++f) {
        const float step = __fmul_rn(kFactors[f], deviation);
        low[f] = FirstOnGrid(mean - step, [&](float x) { return __fsub_rn(x, mean) >= -step; });
        high[f] = FirstOnGrid(mean + step, [&](float x) { return __fsub_rn(x, mean) >= step; });
        count_low[f] = AsHalf2(0);
        count_high[f] = AsHalf2(0);
#pragma unroll
        for (int l = 0; l < 16; ++l) lane[f][l] = -0.0f;
      }
#pragma unroll 1
      for (int step = group * kSteps; step < (group + 1) * kSteps; ++step) {
        uint32_t pair[8];
        Load(pair, step);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const __half2 x = AsHalf2(pair[i]);
          const float c0 = __fsub_rn(Bf16Low(pair[i]), mean);
          const float c1 = __fsub_rn(Bf16High(pair[i]), mean);
          const __half2 above_zero = __hge2(x, b_zero);
          count_zero = __hadd2(count_zero, above_zero);
#pragma unroll
          for (int f = 0; f < 5; ++f) {
            const __half2 above_low = __hge2(x, AsHalf2(GridPair(low[f])));
            const __half2 above_high = __hge2(x, AsHalf2(GridPair(high[f])));
            count_low[f] = __hadd2(count_low[f], above_low);
            count_high[f] = __hadd2(count_high[f], above_high);
            const float2 q = __half22float2(__hadd2(__hadd2(above_low, above_zero), above_high));
            lane[f][2 * i] = __fadd_rn(lane[f][2 * i], __fmul_rn(q.x, c0));
            lane[f][2 * i + 1] = __fadd_rn(lane[f][2 * i + 1], __fmul_rn(q.y, c1));
          }
        }
      }
      const int n_zero = Total(count_zero);
#pragma unroll
      for (int f = 0; f < 5; ++f) {
        const int n_low = Total(count_low[f]), n_high = Total(count_high[f]);
        const float sqx = Target::Fold(lane[f]);
        if (__fmul_rn(kFactors[f], deviation) > 0.0f &&
            Target::Improve(&best, n_low + n_zero + n_high, n_low + 3 * n_zero + 5 * n_high, sqx)) {
          best.t_low = low[f];
          best.t_zero = zero;
          best.t_high = high[f];
        }
      }
    }
    Pack(group, best);
    target.StoreFit(group, rule, mean, sxx, best);
  }

 private:
  static constexpr int kSteps = kGroup / 16;

  __device__ static __forceinline__ __half2 AsHalf2(uint32_t x) {
    return *reinterpret_cast<const __half2*>(&x);
  }
  __device__ static __forceinline__ int Total(__half2 count) {
    return static_cast<int>(__low2float(count) + __high2float(count));
  }
  // Eight words of codes, one a place in the 16-dim steps; as many steps as share a word.
  __device__ __forceinline__ void Pack(int group, const typename Target::Choice& best) const {
    constexpr int kPerWord = 8 < kSteps ? 8 : kSteps;
    const __half2 b1 = AsHalf2(GridPair(best.t_low)), b2 = AsHalf2(GridPair(best.t_zero)),
                  b3 = AsHalf2(GridPair(best.t_high));
    for (int first = 0; first < kSteps; first += kPerWord) {
      uint32_t word[8] = {};
#pragma unroll 1
      for (int i = 0; i < kPerWord; ++i) {
        uint32_t pair[8];
        Load(pair, group * kSteps + first + i);
#pragma unroll
        for (int w = 0; w < 8; ++w) {
          const __half2 x = AsHalf2(pair[w]);
          const uint32_t m1 = __hge2_mask(x, b1), m2 = __hge2_mask(x, b2), m3 = __hge2_mask(x, b3);
          word[w] |= ((m1 ^ m2 ^ m3) & (0x00010001u << (2 * i))) | (m2 & (0x00020002u << (2 * i)));
        }
      }
#pragma unroll
      for (int w = 0; w < 8; ++w) target.StoreWord(group * kGroup + first * 16 + w * 2, word[w]);
    }
  }
};

template <BlockKind kKind, int kDim, int kGroup>
class RowSealer {
 public:
  using Target = RowTarget<kKind, kDim, kGroup>;
  using Choice = typename Target::Choice;
  static constexpr BlockLayout kLayout = Target::kLayout;
  static constexpr int kBits = Target::kBits, kLevels = Target::kLevels;
  static constexpr int kPairs = Target::kPairs, kGroupPairs = Target::kGroupPairs;
  static constexpr float kInverseGroup = Target::kInverseGroup;

  __device__ explicit RowSealer(const Target& target) : target_(target) {}

  // Reads the row out of a BF16 page side in tensor-core order. Returns how many values were NaN
  // (now 0) or beyond the range (now +-65536, clamped later).
  __device__ int Load(const uint8_t* side) {
    uint32_t over = 0;
#pragma unroll
    for (int chunk = 0; chunk < kDim / 8; ++chunk) {
      const uint4 v =
          *reinterpret_cast<const uint4*>(side + (chunk / 8 * kPageTokens + target_.token) * 128 +
                                          ((chunk % 8) ^ (target_.token & 7)) * 16);
      x_[chunk * 4] = v.x;
      x_[chunk * 4 + 1] = v.y;
      x_[chunk * 4 + 2] = v.z;
      x_[chunk * 4 + 3] = v.w;
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) over |= (x_[i] & 0x7fff7fffu) + 0x38803880u;
    if ((over & 0x80008000u) == 0) return 0;
    int changed = 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      uint32_t fixed = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t bits = (x_[i] >> (16 * half)) & 0xffffu;
        if ((bits & 0x7fffu) >= kSaturatedKey) {
          bits = (bits & 0x7fffu) > 0x7f80u ? 0u : (bits & 0x8000u) | kSaturatedKey;
          ++changed;
        }
        fixed |= bits << (16 * half);
      }
      x_[i] = fixed;
    }
    return changed;
  }

  // `source`: the page side the row was loaded from; `changed`: what Load returned.
  template <bool kFit>
  __device__ void Seal(const SealSide& side, const uint8_t* source, int changed) {
    const auto rule = static_cast<RowRule>(side.rule);
    const bool fits = rule == RowRule::kMseFit || rule == RowRule::kMseFitUnbiased;
    clip_ = kFp16Max;
    if (!fits && side.clip_index >= 0) clip_ = fminf(ClipThreshold(side.clip_index), kFp16Max);
    // What is rare is written as plainly as the scalar code: other rules, rows with values beyond
    // the range.
    if (rule == RowRule::kSymmetric || rule == RowRule::kLloydMax ||
        (fits && (kBits != 2 || changed > 0))) {
      const PlainSealer<kKind, kDim, kGroup> plain{target_, source, clip_};
      for (int group = 0; group < kDim / kGroup; ++group) plain.Seal(rule, group);
      return;
    }
    if constexpr (kFit) {
      if (fits) {
        const FitSealer<kKind, kDim, kGroup> fit{target_, source};
        for (int group = 0; group < kDim / kGroup; ++group) fit.Seal(rule, group);
        return;
      }
    }
    Groups<0>();
  }

 private:
  __device__ static __forceinline__ __half2 AsHalf2(uint32_t x) {
    return *reinterpret_cast<const __half2*>(&x);
  }
  __device__ __forceinline__ float Clamp(float x) const { return fminf(fmaxf(x, -clip_), clip_); }
  __device__ __forceinline__ float Value(int element) const {
    return element & 1 ? Bf16High(x_[element / 2]) : Bf16Low(x_[element / 2]);
  }

  // The value at `index` of the ascending order of |row|, by bisection over the 15-bit patterns:
  // the largest c with at least kDim - index values >= c.
  __device__ float ClipThreshold(int index) const {
    __half2 largest = AsHalf2(x_[0] & 0x7fff7fffu);
#pragma unroll
    for (int i = 1; i < kPairs; ++i) largest = __hmax2(largest, AsHalf2(x_[i] & 0x7fff7fffu));
    const uint32_t pair = *reinterpret_cast<const uint32_t*>(&largest);
    const int top = static_cast<int>(max(pair & 0xffffu, pair >> 16));
    const int need = kDim - index;
    // Nearly always within four octaves of the largest value.
    int below = max(top - 512, 0), above = top + 1;
    if (below > 0 && CountAtLeast(below) < need) {
      above = below;
      below = 0;
    }
    while (above - below > 1) {
      const int middle = (above + below) >> 1;
      if (CountAtLeast(middle) >= need) {
        below = middle;
      } else {
        above = middle;
      }
    }
    return __uint_as_float(static_cast<uint32_t>(below) << 16);
  }
  // 1.0 or 0.0 a half. One asm statement, or the compiler hoists the magnitudes out of the
  // bisection: a second copy of the row in registers.
  __device__ static __forceinline__ uint32_t MagnitudesAtLeast(uint32_t pair, uint32_t bound) {
    uint32_t result;
    asm("{ .reg .b32 m; and.b32 m, %1, 0x7fff7fff; set.ge.f16x2.f16x2 %0, m, %2; }"
        : "=r"(result)
        : "r"(pair), "r"(bound));
    return result;
  }
  __device__ __forceinline__ int CountAtLeast(int key) const {
    const uint32_t bound = static_cast<uint32_t>(key) * 0x00010001u;
    __half2 count[4] = {AsHalf2(0), AsHalf2(0), AsHalf2(0), AsHalf2(0)};
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      count[i % 4] = __hadd2(count[i % 4], AsHalf2(MagnitudesAtLeast(x_[i], bound)));
    }
    const __half2 sum = __hadd2(__hadd2(count[0], count[1]), __hadd2(count[2], count[3]));
    return static_cast<int>(__low2float(sum) + __high2float(sum));
  }

  template <int kIndex>
  __device__ __forceinline__ void Groups() {
    if constexpr (kIndex < kDim / kGroup) {
      MinMax<kIndex>();
      Groups<kIndex + 1>();
    }
  }

  // Codes of one group by thresholds: code = number of t[k] that a value reaches (2 bits).
  template <int kIndex>
  __device__ __forceinline__ void PackByThresholds(int t1, int t2, int t3) {
    const __half2 b1 = AsHalf2(GridPair(t1)), b2 = AsHalf2(GridPair(t2)),
                  b3 = AsHalf2(GridPair(t3));
    Pack<kIndex>([&](int pair, int shift) {
      const __half2 x = AsHalf2(x_[pair]);
      const uint32_t m1 = __hge2_mask(x, b1), m2 = __hge2_mask(x, b2), m3 = __hge2_mask(x, b3);
      return ((m1 ^ m2 ^ m3) & (0x00010001u << shift)) | (m2 & (0x00020002u << shift));
    });
  }
  // Codes of one group from a function of the value.
  template <int kIndex, typename Code>
  __device__ __forceinline__ void PackByValue(Code code) {
    Pack<kIndex>([&](int pair, int shift) {
      return (code(Bf16Low(x_[pair])) | (code(Bf16High(x_[pair])) << 16)) << shift;
    });
  }
  // `codes(pair, shift)`: both codes of a pair of dims, shifted to their place in a word. The pairs
  // at the same place of the 16-dim steps of one word go together.
  template <int kIndex, typename Codes>
  __device__ __forceinline__ void Pack(Codes codes) {
    constexpr int kSteps = kGroup / 16;
    constexpr int kMost = 16 / Target::kLowBits;
    constexpr int kPerWord = kMost < kSteps ? kMost : kSteps;
#pragma unroll
    for (int first = 0; first < kSteps; first += kPerWord) {
#pragma unroll
      for (int w = 0; w < 8; ++w) {
        uint32_t word = 0, high = 0;
#pragma unroll
        for (int i = 0; i < kPerWord; ++i) {
          const int pair = kIndex * kGroupPairs + (first + i) * 8 + w;
          if constexpr (Target::kSplit) {
            const uint32_t both = codes(pair, 0);
            word |= (both & 0x00030003u) << (2 * i);
            high |= (both >> 2 & 0x00010001u) << i;
          } else {
            word |= codes(pair, kBits * i);
          }
        }
        target_.StoreWord(kIndex * kGroup + first * 16 + w * 2, word);
        if constexpr (Target::kSplit) {
          target_.StoreHighWord(kIndex * kGroup + first * 16 + w * 2, high);
        }
      }
    }
  }

  template <int kIndex>
  __device__ __forceinline__ void MinMax() {
    __half2 low = AsHalf2(x_[kIndex * kGroupPairs]), high = low;
#pragma unroll
    for (int i = 1; i < kGroupPairs; ++i) {
      low = __hmin2(low, AsHalf2(x_[kIndex * kGroupPairs + i]));
      high = __hmax2(high, AsHalf2(x_[kIndex * kGroupPairs + i]));
    }
    const uint32_t l = *reinterpret_cast<const uint32_t*>(&low),
                   h = *reinterpret_cast<const uint32_t*>(&high);
    float lowest = Clamp(fminf(Bf16Low(l), Bf16High(l)));
    const float highest = Clamp(fmaxf(Bf16Low(h), Bf16High(h)));
    if (lowest == 0.0f) lowest = FirstZero<kIndex>();
    const float scale = fmaxf(
        Target::RoundFp16(__fdiv_rn(fmaxf(__fsub_rn(highest, lowest), 1e-8f), kLevels)), kMinScale);
    const float minimum = Target::RoundFp16(lowest);
    target_.StoreMeta(kIndex, scale, minimum);
    const auto rounded = [&](float x) {
      return __fadd_rn(__fdiv_rn(__fsub_rn(Clamp(x), minimum), scale), 0.5f);
    };
    if constexpr (kBits == 2) {
      int t[3];
#pragma unroll
      for (int k = 0; k < 3; ++k) {
        const float level = static_cast<float>(k + 1);
        t[k] = FirstOnGrid(fmaf(scale, level - 0.5f, minimum),
                           [&](float x) { return rounded(x) >= level; });
      }
      PackByThresholds<kIndex>(t[0], t[1], t[2]);
    } else {
      PackByValue<kIndex>([&](float x) {
        const float q = floorf(rounded(x));
        return static_cast<uint32_t>(fminf(fmaxf(q, 0.0f), static_cast<float>(kLevels)));
      });
    }
  }
  // The sign of a zero minimum is that of the first zero of the clipped row.
  template <int kIndex>
  __device__ float FirstZero() const {
    float first = 0.0f;
    bool found = false;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const float x = Value(kIndex * kGroup + i);
      if (!found && (clip_ == 0.0f || x == 0.0f)) {
        found = true;
        first = copysignf(0.0f, x);
      }
    }
    return first;
  }

  const Target target_;
  float clip_;
  uint32_t x_[kPairs];  // pairs of BF16 in dim order
};

// What a block of threads does around the rows, whatever their bits. All threads.
template <int kDim>
class SealJob {
 public:
  static constexpr BlockLayout kOpenLayout{BlockKind::kBf16, CodeOrder::kTensorCore, kDim, kDim};
  static constexpr int kSideBytes = static_cast<int>(kOpenLayout.code_bytes());

  // The source to the beginning of `shared`; the target block, which lies behind it, is cleared.
  __device__ static __forceinline__ void Load(uint8_t* shared, uint64_t* bar,
                                              const std::byte* source, int block_bytes) {
    const auto thread = static_cast<int>(threadIdx.x);
    const uint32_t full = SharedAddress(bar);
    if (thread == 0) {
      BarrierInit(full, FullArrivals());
      BarrierInitFence();
    }
    __syncthreads();
    if (thread < 32) {
      const StageFill fill(full, 2 * kSideBytes, thread);
      fill.Copy(SharedAddress(shared), source, 2 * kSideBytes);
      fill.End();
    }
    uint8_t* block = shared + 2 * kSideBytes;
    for (int i = thread; i < block_bytes / 16; i += kSealThreads) {
      reinterpret_cast<uint4*>(block)[i] = uint4{0, 0, 0, 0};
    }
    __syncthreads();
    BarrierWait(full, 0);
  }
  template <bool kFit, typename Sealer>
  __device__ static __forceinline__ void Seal(const SealKernelParams& p, Sealer& row,
                                              const uint8_t* source, bool is_k) {
    const int changed = row.Load(source);
    if (changed > 0 && p.saturated != nullptr) {
      atomicAdd(p.saturated, static_cast<unsigned long long>(changed));
    }
    row.template Seal<kFit>(is_k ? p.k : p.v, source, changed);
  }
  __device__ static __forceinline__ void Store(const uint8_t* shared, std::byte* target,
                                               int block_bytes) {
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < block_bytes / 16; i += kSealThreads) {
      reinterpret_cast<uint4*>(target)[i] =
          reinterpret_cast<const uint4*>(shared + 2 * kSideBytes)[i];
    }
  }
};

// kFit: some side uses a least-squares rule, which needs twice the registers.
template <int kDim, bool kFit>
inline constexpr int kSealBlocksPerSm = kDim > 128 ? 2
                                        : kFit     ? 3
                                                   : 4;

template <BlockKind kKind, int kDim, int kGroup, bool kFit>
__global__ void __launch_bounds__(kSealThreads, kSealBlocksPerSm<kDim, kFit>)
    SealPagesKernel(const __grid_constant__ SealKernelParams p) {
  using Sealer = RowSealer<kKind, kDim, kGroup>;
  using Job = SealJob<kDim>;
  constexpr int kBlockBytes = static_cast<int>(Sealer::kLayout.block_bytes());
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint64_t bar;
  WaitForPredecessor();
  const int job = static_cast<int>(blockIdx.x) / p.num_kv_heads;
  const int64_t head = static_cast<int>(blockIdx.x) % p.num_kv_heads, layer = blockIdx.y;
  const int64_t source_page = p.source_pages[job], target_page = p.target_pages[job];
  if (source_page < 0) return;
  Job::Load(shared, &bar,
            p.window_pool + layer * p.window_layer_stride + source_page * p.window_page_stride +
                head * (2 * Job::kSideBytes),
            kBlockBytes);
  const auto thread = static_cast<int>(threadIdx.x);
  const bool is_k = thread < kPageTokens;
  uint8_t* block = shared + 2 * Job::kSideBytes;
  Sealer row({block, block, thread % kPageTokens, is_k});
  Job::template Seal<kFit>(p, row, shared + (is_k ? 0 : Job::kSideBytes), is_k);
  Job::Store(shared,
             p.history_pool + layer * p.history_layer_stride + target_page * p.history_page_stride +
                 head * kBlockBytes,
             kBlockBytes);
}

// Heads and sides differ in bits: the two warps of a side take the path of its kind.
template <int kDim, int kGroup>
__global__ void __launch_bounds__(kSealThreads, kSealBlocksPerSm<kDim, true>)
    MixedSealPagesKernel(const __grid_constant__ MixedSealParams p) {
  using Job = SealJob<kDim>;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint64_t bar;
  WaitForPredecessor();
  const int job = static_cast<int>(blockIdx.x) / p.num_kv_heads;
  const int64_t head = static_cast<int>(blockIdx.x) % p.num_kv_heads, layer = blockIdx.y;
  const int64_t source_page = p.source_pages[job], target_page = p.target_pages[job];
  if (source_page < 0) return;
  const HeadBlock at = p.heads[layer * p.heads_stride + head];
  const BlockLayout layout = at.Layout(kDim, kGroup);
  const auto block_bytes = static_cast<int>(layout.block_bytes());
  Job::Load(shared, &bar,
            p.window_pool + layer * p.window_layer_stride + source_page * p.window_page_stride +
                head * (2 * Job::kSideBytes),
            block_bytes);
  const auto thread = static_cast<int>(threadIdx.x);
  const bool is_k = thread < kPageTokens;
  uint8_t* block = shared + 2 * Job::kSideBytes;
  // Inlined: a call would read the parameters through memory.
  const auto seal = [&]<BlockKind kKind>() __attribute__((always_inline)) {
    using Sealer = RowSealer<kKind, kDim, kGroup>;
    Sealer row(Sealer::Target::Of(block, layout, thread % kPageTokens, is_k));
    Job::template Seal<true>(p, row, shared + (is_k ? 0 : Job::kSideBytes), is_k);
  };
  const BlockKind kind = is_k ? at.k : at.v;
  if (kind == BlockKind::kInt2) {
    seal.template operator()<BlockKind::kInt2>();
  } else if (kind == BlockKind::kInt3) {
    seal.template operator()<BlockKind::kInt3>();
  } else {
    seal.template operator()<BlockKind::kInt4>();
  }
  Job::Store(shared, p.history_pool + at.offset + target_page * p.history_page_stride, block_bytes);
}

}  // namespace oscar::cuda
