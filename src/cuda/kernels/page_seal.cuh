// Seals pages: 64 rotated BF16 rows of K and of V become one quantised block in tensor-core order,
// bit-equal to EncodePage (cache/page_codec.h) on the same rows.
//
// Grid       (jobs x KV heads, layers), 128 threads: one thread a row, K rows first. A thread holds
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

#include "cache/page_layout.h"
#include "cuda/kernels/ptx.cuh"
#include "cuda/kernels/seal_params.h"
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

template <PageKind kKind, int kDim, int kGroup>
class RowSealer {
 public:
  static constexpr PageLayout kLayout{kKind, CodeOrder::kTensorCore, kDim, kGroup};
  // The same as a value: device code cannot take the address of a static member.
  __device__ static constexpr PageLayout Layout() {
    return {kKind, CodeOrder::kTensorCore, kDim, kGroup};
  }
  static constexpr int kBits = kLayout.bits();
  static constexpr int kPairs = kDim / 2, kGroupPairs = kGroup / 2;
  static constexpr int kLevels = (1 << kBits) - 1;
  static constexpr float kInverseGroup = 1.0f / kGroup;  // exact: a power of two

  __device__ RowSealer(uint8_t* block, int token, bool is_k)
      : block_(block), token_(token), is_k_(is_k) {}

  // Reads the row out of a BF16 page side in tensor-core order. Returns how many values were NaN
  // (now 0) or beyond the range (now +-65536, clamped later).
  __device__ int Load(const uint8_t* side) {
    uint32_t over = 0;
#pragma unroll
    for (int chunk = 0; chunk < kDim / 8; ++chunk) {
      const uint4 v = *reinterpret_cast<const uint4*>(
          side + (chunk / 8 * kPageTokens + token_) * 128 + ((chunk % 8) ^ (token_ & 7)) * 16);
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

  template <bool kFit>
  __device__ void Seal(const SealSide& side) {
    const auto rule = static_cast<RowRule>(side.rule);
    const bool fits = kFit && (rule == RowRule::kMseFit || rule == RowRule::kMseFitUnbiased);
    clip_ = kFp16Max;
    if (!fits && side.clip_index >= 0) clip_ = fminf(ClipThreshold(side.clip_index), kFp16Max);
    Groups<0, kFit>(rule, fits);
  }

 private:
  __device__ static __forceinline__ __half2 AsHalf2(uint32_t x) {
    return *reinterpret_cast<const __half2*>(&x);
  }
  __device__ static __forceinline__ float RoundFp16(float x) {
    return __half2float(__float2half_rn(fminf(fmaxf(x, -kFp16Max), kFp16Max)));
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

  template <int kIndex, bool kFit>
  __device__ __forceinline__ void Groups(RowRule rule, bool fits) {
    if constexpr (kIndex < kDim / kGroup) {
      if (fits) {
        if constexpr (kFit) Fit<kIndex>(rule);
      } else if (rule == RowRule::kSymmetric) {
        Symmetric<kIndex>();
      } else {
        MinMax<kIndex>();
      }
      Groups<kIndex + 1, kFit>(rule, fits);
    }
  }

  __device__ void StoreMeta(int group, float scale, float minimum) {
    const uint32_t at = is_k_ ? Layout().KScale(token_, group) : Layout().VScale(token_, group);
    *reinterpret_cast<uint32_t*>(block_ + at) = PackHalf(scale, minimum);
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
    constexpr int kPerWord = 16 / kBits < kSteps ? 16 / kBits : kSteps;
#pragma unroll
    for (int first = 0; first < kSteps; first += kPerWord) {
#pragma unroll
      for (int w = 0; w < 8; ++w) {
        uint32_t word = 0;
#pragma unroll
        for (int i = 0; i < kPerWord; ++i) {
          word |= codes(kIndex * kGroupPairs + (first + i) * 8 + w, kBits * i);
        }
        const int dim = kIndex * kGroup + first * 16 + w * 2;
        if (is_k_) {
          const CodePosition at = Layout().KCode(token_, dim);
          atomicOr(reinterpret_cast<uint32_t*>(block_ + at.offset), word << at.shift);
        } else {
          const CodePosition even = Layout().VCode(token_, dim),
                             odd = Layout().VCode(token_, dim + 1);
          atomicOr(reinterpret_cast<uint32_t*>(block_ + even.offset), (word & 0xffffu)
                                                                          << even.shift);
          atomicOr(reinterpret_cast<uint32_t*>(block_ + odd.offset), (word >> 16) << odd.shift);
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
    const float scale =
        fmaxf(RoundFp16(__fdiv_rn(fmaxf(__fsub_rn(highest, lowest), 1e-8f), kLevels)), kMinScale);
    const float minimum = RoundFp16(lowest);
    StoreMeta(kIndex, scale, minimum);
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

  template <int kIndex>
  __device__ __forceinline__ void Symmetric() {
    constexpr float kHalf = 1 << (kBits - 1);
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      largest = fmaxf(largest, fabsf(Clamp(Value(kIndex * kGroup + i))));
    }
    const float scale = fmaxf(RoundFp16(__fdiv_rn(fmaxf(largest, 1e-8f), kHalf - 1.0f)), kMinScale);
    StoreMeta(kIndex, scale, -kHalf * scale);
    PackByValue<kIndex>([&](float x) {
      const float q = rintf(__fdiv_rn(Clamp(x), scale));
      return static_cast<uint32_t>(fminf(fmaxf(q, -kHalf), kHalf - 1.0f) + kHalf);
    });
  }

  // The specified summation order: 16 lanes, then folds of 8, 4, 2, 1.
  __device__ static __forceinline__ float Fold(float (&lane)[16]) {
#pragma unroll
    for (int width = 8; width > 0; width /= 2) {
#pragma unroll
      for (int l = 0; l < width; ++l) lane[l] = __fadd_rn(lane[l], lane[l + width]);
    }
    return lane[0];
  }
  template <int kIndex, typename Term>
  __device__ __forceinline__ float Sum(Term term) const {
    float lane[16];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      uint32_t pair;  // opaque: expanded again by each sum, not kept
      asm volatile("mov.b32 %0, %1;" : "=r"(pair) : "r"(x_[(kIndex * kGroup + i) / 2]));
      const float x = term(Clamp(i & 1 ? Bf16High(pair) : Bf16Low(pair)));
      lane[i % 16] = i < 16 ? x : __fadd_rn(lane[i % 16], x);
    }
    return Fold(lane);
  }

  template <int kIndex>
  __device__ __forceinline__ void Fit(RowRule rule) {
    const float mean = Sum<kIndex>([](float x) { return x; }) * kInverseGroup;
    const float sxx = Sum<kIndex>([&](float x) {
      const float c = __fsub_rn(x, mean);
      return __fmul_rn(c, c);
    });
    const float deviation = __fsqrt_rn(sxx * kInverseGroup);
    constexpr float kStepScale = kBits == 2 ? 1.0f : 0.3365f;
    constexpr float kFactors[5] = {0.75f * kStepScale, 0.85f * kStepScale, 0.95f * kStepScale,
                                   1.05f * kStepScale, 1.15f * kStepScale};
    Choice best;
    if constexpr (kBits == 2) {
      best = SearchByThresholds<kIndex>(mean, deviation, kFactors);
      PackByThresholds<kIndex>(best.t_low, best.t_zero, best.t_high);
    } else {
      best = SearchByValue<kIndex>(mean, deviation, kFactors);
      if (best.score > 0.0f) {
        PackByValue<kIndex>([&](float x) { return CodeOf(__fsub_rn(Clamp(x), mean), best.step); });
      }
    }
    float slope = best.slope;
    if (rule == RowRule::kMseFitUnbiased && best.sqx > 0.0f) {
      const float longer = __fdiv_rn(sxx, __fmul_rn(best.slope, best.sqx));
      slope = __fmul_rn(slope, fminf(fmaxf(longer, 0.5f), 2.0f));
    }
    const float scale = fmaxf(RoundFp16(slope), kMinScale);
    const float mean_code = static_cast<float>(best.sum) * kInverseGroup;
    StoreMeta(kIndex, scale, RoundFp16(__fsub_rn(mean, __fmul_rn(scale, mean_code))));
  }

  struct Choice {
    float score = 0.0f, slope = 0.0f, sqx = 0.0f, step = 0.0f;
    int sum = 0;
    int t_low = kSaturatedKey + 1, t_zero = kSaturatedKey + 1, t_high = kSaturatedKey + 1;
  };
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

  // The steps in passes over the row, several at a time as registers allow.
  template <int kIndex>
  __device__ __forceinline__ Choice SearchByThresholds(float mean, float deviation,
                                                       const float (&factors)[5]) const {
    constexpr int kPass = kDim > 128 ? 1 : 3;
    Choice best;
    if (!(__fmul_rn(factors[4], deviation) > 0.0f)) return best;  // constant row
    const int zero = FirstOnGrid(mean, [&](float x) { return __fsub_rn(Clamp(x), mean) >= 0.0f; });
    SearchPasses<kIndex, 0, kPass>(mean, deviation, factors, zero, &best);
    return best;
  }
  template <int kIndex, int kFirst, int kPass>
  __device__ __forceinline__ void SearchPasses(float mean, float deviation,
                                               const float (&factors)[5], int zero,
                                               Choice* best) const {
    if constexpr (kFirst < 5) {
      constexpr int kCount = kPass < 5 - kFirst ? kPass : 5 - kFirst;
      const auto centred = [&](float x) { return __fsub_rn(Clamp(x), mean); };
      const __half2 b_zero = AsHalf2(GridPair(zero));
      int low[kCount], high[kCount];
      float lane[kCount][16];
      __half2 count_low[kCount], count_high[kCount], count_zero = AsHalf2(0);
#pragma unroll
      for (int f = 0; f < kCount; ++f) {
        const float step = __fmul_rn(factors[kFirst + f], deviation);
        low[f] = FirstOnGrid(mean - step, [&](float x) { return centred(x) >= -step; });
        high[f] = FirstOnGrid(mean + step, [&](float x) { return centred(x) >= step; });
        count_low[f] = AsHalf2(0);
        count_high[f] = AsHalf2(0);
      }
#pragma unroll
      for (int i = 0; i < kGroupPairs; ++i) {
        uint32_t pair;  // opaque, so that centred values are computed again in each pass, not kept
        asm volatile("mov.b32 %0, %1;" : "=r"(pair) : "r"(x_[kIndex * kGroupPairs + i]));
        const __half2 x = AsHalf2(pair);
        const float c0 = centred(Bf16Low(pair)), c1 = centred(Bf16High(pair));
        const __half2 above_zero = __hge2(x, b_zero);
        count_zero = __hadd2(count_zero, above_zero);
#pragma unroll
        for (int f = 0; f < kCount; ++f) {
          const __half2 above_low = __hge2(x, AsHalf2(GridPair(low[f])));
          const __half2 above_high = __hge2(x, AsHalf2(GridPair(high[f])));
          count_low[f] = __hadd2(count_low[f], above_low);
          count_high[f] = __hadd2(count_high[f], above_high);
          const float2 q = __half22float2(__hadd2(__hadd2(above_low, above_zero), above_high));
          const int l = i % 8 * 2;
          const float p0 = __fmul_rn(q.x, c0), p1 = __fmul_rn(q.y, c1);
          lane[f][l] = i < 8 ? p0 : __fadd_rn(lane[f][l], p0);
          lane[f][l + 1] = i < 8 ? p1 : __fadd_rn(lane[f][l + 1], p1);
        }
      }
      const int n_zero = Total(count_zero);
#pragma unroll
      for (int f = 0; f < kCount; ++f) {
        const int n_low = Total(count_low[f]), n_high = Total(count_high[f]);
        const float sqx = Fold(lane[f]);
        if (__fmul_rn(factors[kFirst + f], deviation) > 0.0f &&
            Improve(best, n_low + n_zero + n_high, n_low + 3 * n_zero + 5 * n_high, sqx)) {
          best->t_low = low[f];
          best->t_zero = zero;
          best->t_high = high[f];
        }
      }
      SearchPasses<kIndex, kFirst + kCount, kPass>(mean, deviation, factors, zero, best);
    }
  }
  __device__ static __forceinline__ int Total(__half2 count) {
    return static_cast<int>(__low2float(count) + __high2float(count));
  }

  __device__ static __forceinline__ uint32_t CodeOf(float centred, float step) {
    constexpr float kHalf = 1 << (kBits - 1);
    const float q = floorf(__fdiv_rn(centred, step));
    return static_cast<uint32_t>(fminf(fmaxf(q, -kHalf), kHalf - 1.0f) + kHalf);
  }
  template <int kIndex>
  __device__ __forceinline__ Choice SearchByValue(float mean, float deviation,
                                                  const float (&factors)[5]) const {
    Choice best;
#pragma unroll 1
    for (int f = 0; f < 5; ++f) {
      const float step = __fmul_rn(factors[f], deviation);
      if (!(step > 0.0f)) break;
      int sum = 0, squares = 0;
      const float sqx = Sum<kIndex>([&](float x) {
        const float c = __fsub_rn(x, mean);
        const auto q = static_cast<int>(CodeOf(c, step));
        sum += q;
        squares += q * q;
        return __fmul_rn(static_cast<float>(q), c);
      });
      if (Improve(&best, sum, squares, sqx)) best.step = step;
    }
    return best;
  }

  uint8_t* block_;
  const int token_;
  const bool is_k_;
  float clip_;
  uint32_t x_[kPairs];  // pairs of BF16 in dim order
};

// kFit: some side uses a least-squares rule, which needs twice the registers.
template <PageKind kKind, int kDim, int kGroup, bool kFit>
__global__ void __launch_bounds__(kSealThreads, kDim > 128 || kFit ? 2 : 4)
    SealPagesKernel(const __grid_constant__ SealKernelParams p) {
  using Sealer = RowSealer<kKind, kDim, kGroup>;
  constexpr int kSideBytes = kPageTokens * kDim * 2;
  constexpr int kBlockBytes = static_cast<int>(Sealer::kLayout.block_bytes());
  extern __shared__ __align__(128) uint8_t shared[];
  uint8_t* block = shared + 2 * kSideBytes;
  __shared__ uint64_t bar;
  WaitForPredecessor();
  const int job = static_cast<int>(blockIdx.x) / p.num_kv_heads;
  const int64_t head = static_cast<int>(blockIdx.x) % p.num_kv_heads, layer = blockIdx.y;
  const int64_t source_page = p.source_pages[job], target_page = p.target_pages[job];
  if (source_page < 0) return;
  const auto thread = static_cast<int>(threadIdx.x);
  const uint32_t full = SharedAddress(&bar);
  if (thread == 0) {
    BarrierInit(full, FullArrivals());
    BarrierInitFence();
  }
  __syncthreads();
  if (thread < 32) {
    const StageFill fill(full, 2 * kSideBytes, thread);
    fill.Copy(SharedAddress(shared),
              p.window_pool + layer * p.window_layer_stride + source_page * p.window_page_stride +
                  head * (2 * kSideBytes),
              2 * kSideBytes);
    fill.End();
  }
  for (int i = thread; i < kBlockBytes / 16; i += kSealThreads) {
    reinterpret_cast<uint4*>(block)[i] = uint4{0, 0, 0, 0};
  }
  __syncthreads();
  BarrierWait(full, 0);
  const bool is_k = thread < kPageTokens;
  Sealer row(block, thread % kPageTokens, is_k);
  const int changed = row.Load(shared + (is_k ? 0 : kSideBytes));
  if (changed > 0 && p.saturated != nullptr) {
    atomicAdd(p.saturated, static_cast<unsigned long long>(changed));
  }
  row.template Seal<kFit>(is_k ? p.k : p.v);
  __syncthreads();
  auto* target = reinterpret_cast<uint4*>(p.history_pool + layer * p.history_layer_stride +
                                          target_page * p.history_page_stride + head * kBlockBytes);
  for (int i = thread; i < kBlockBytes / 16; i += kSealThreads) {
    target[i] = reinterpret_cast<const uint4*>(block)[i];
  }
}

}  // namespace oscar::cuda
