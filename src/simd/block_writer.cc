#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "simd/block_writer.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "cache/block_codec.h"
#include "quant/kitty.h"
#include "quant/lloyd_max.h"
#include "quant/row_quantizer.h"
#include "quant/turboquant.h"
#include "simd/lanes16-inl.h"

#if OSCAR_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {
namespace {

constexpr int kMaxVectors = kMaxHeadDim / 16;

// A row as QuantizeRow sees it: NaN is 0, values saturate at +-65504.
struct Row {
  F16x x[kMaxVectors];
  int saturated;
};

HWY_INLINE void LoadRow(const Bf16* source, int vectors, Row& row) {
  const F16x top = Set(kFp16Max), bottom = Set(-kFp16Max);
  row.saturated = 0;
  for (int i = 0; i < vectors; ++i) {
    const F16x raw = LoadBf16(source + i * 16);
    const F16x number = IfThenElseZero(Equal(raw, raw), raw);
    row.x[i] = Min(Max(number, bottom), top);
    row.saturated += 16 - static_cast<int>(CountTrue(Equal(row.x[i], raw)));
  }
}

// Element `index` of the ascending order of |row|. A BF16 magnitude is a 15-bit integer that orders
// like the number, so fifteen halvings of its range find the element exactly.
HWY_INLINE float MagnitudeAt(const Bf16* source, int dims, int index) {
  using D16 = hn::ScalableTag<int16_t>;
  const D16 d;
  constexpr int kLanes = static_cast<int>(2 * kWidth);
  constexpr int16_t kInfinity = 0x7f80;
  constexpr int16_t kBeyondFp16 = 0x4780;  // 65536, the first BF16 number that saturates
  hn::Vec<D16> magnitude[kMaxHeadDim / kLanes];
  const int vectors = dims / kLanes;
  for (int i = 0; i < vectors; ++i) {
    const auto bits = hn::LoadU(d, reinterpret_cast<const int16_t*>(source) + i * kLanes);
    const auto size = hn::And(bits, hn::Set(d, 0x7fff));
    const auto is_nan = hn::Gt(size, hn::Set(d, kInfinity));
    magnitude[i] = hn::IfThenElse(is_nan, hn::Zero(d), hn::Min(size, hn::Set(d, kBeyondFp16)));
  }
  // The largest t with at most `index` elements below it.
  int t = 0;
  for (int bit = 1 << 14; bit > 0; bit >>= 1) {
    const auto trial = hn::Set(d, static_cast<int16_t>(t | bit));
    size_t below = 0;
    for (int i = 0; i < vectors; ++i) below += hn::CountTrue(d, hn::Lt(magnitude[i], trial));
    if (below <= static_cast<size_t>(index)) t |= bit;
  }
  return t == kBeyondFp16 ? kFp16Max : oscar::ToFloat(Bf16{static_cast<uint16_t>(t)});
}

// Codes as bytes.
HWY_INLINE void StoreCodes(const I16x& codes, uint8_t* out) {
  for (int i = 0; i < kParts; ++i) {
    const hn::Rebind<uint8_t, DI> d_byte;
    hn::StoreU(hn::DemoteTo(d_byte, codes.v[i]), d_byte, out + i * kWidth);
  }
}

// The sign of the smallest element where that is a zero: std::min_element gives the first of
// equals, and -0 and +0 round to different fp16 bits. Clamping keeps the sign of its input.
HWY_INLINE float FirstZero(const F16x* x, int vectors, const Bf16* source) {
  for (int i = 0; i < vectors; ++i) {
    alignas(64) float lanes[16];
    Store(x[i], lanes);
    for (int l = 0; l < 16; ++l) {
      if (lanes[l] != 0.0f) continue;
      const float v = oscar::ToFloat(source[i * 16 + l]);
      return std::isnan(v) ? 0.0f : std::copysign(0.0f, v);
    }
  }
  return 0.0f;
}

HWY_INLINE void MinMaxGroup(const F16x* x, int vectors, const Bf16* source, int bits,
                            uint8_t* codes, float* scale, float* min) {
  F16x low = x[0], high = x[0];
  for (int i = 1; i < vectors; ++i) {
    low = Min(low, x[i]);
    high = Max(high, x[i]);
  }
  float lo = ReduceMin(low);
  const float hi = ReduceMax(high);
  if (lo == 0.0f) lo = FirstZero(x, vectors, source);
  const auto levels = static_cast<float>((1 << bits) - 1);
  *scale = std::max(RoundMeta(std::max(hi - lo, kMinRange) / levels, MetaType::kFp16), kMinScale);
  *min = RoundMeta(lo, MetaType::kFp16);
  const F16x s = Set(*scale), m = Set(*min), half = Set(0.5f), zero = Set(0.0f), top = Set(levels);
  for (int i = 0; i < vectors; ++i) {
    const F16x q = Floor(Add(Div(Sub(x[i], m), s), half));
    StoreCodes(ToInt(Min(Max(q, zero), top)), codes + i * 16);
  }
}

HWY_INLINE void SymmetricGroup(const F16x* x, int vectors, int bits, uint8_t* codes, float* scale,
                               float* min) {
  F16x high = Abs(x[0]);
  for (int i = 1; i < vectors; ++i) high = Max(high, Abs(x[i]));
  const float largest = ReduceMax(high);
  const auto half = static_cast<float>(1 << (bits - 1));
  *scale =
      std::max(RoundMeta(std::max(largest, kMinRange) / (half - 1.0f), MetaType::kFp16), kMinScale);
  *scale = std::min(*scale, kFp16Max / half);
  *min = -half * *scale;
  const F16x s = Set(*scale), bottom = Set(-half), top = Set(half - 1.0f), offset = Set(half);
  for (int i = 0; i < vectors; ++i) {
    const F16x q = Min(Max(Round(Div(x[i], s)), bottom), top);
    StoreCodes(ToInt(Add(q, offset)), codes + i * 16);
  }
}

// One group, of a row or of a channel, by a rule of quant/affine_group.h: (scale, min) as they are
// stored, and what codes are chosen with.
struct AffineGroup {
  float scale, min;
  float factor, offset;  // kIntegerZero: code = rint(x factor + offset); else of x - min, / scale
};

inline AffineGroup ChooseAffine(RowRule rule, float levels, float lo, float hi) {
  AffineGroup g{0.0f, 0.0f, 0.0f, 0.0f};
  if (rule == RowRule::kIntegerZero) {
    if (lo == 0.0f && hi == 0.0f) lo = -1.0f, hi = 1.0f;
    const float range = hi - lo;
    if (!(range > 1e-30f)) {
      g.min = RoundMeta(lo, MetaType::kFp16);  // and all codes 0
      return g;
    }
    const float step = range / levels;
    g.offset = std::nearbyint(-lo / step);
    g.factor = levels / range;
    g.scale = RoundMeta(step, MetaType::kFp16);
    g.min = RoundMeta(-g.offset * step, MetaType::kFp16);
    return g;
  }
  const float range = rule == RowRule::kMinMax ? std::max(hi - lo, kMinRange) : hi - lo;
  g.scale = std::max(RoundMeta(range / levels, MetaType::kFp16), kMinScale);
  g.min = RoundMeta(lo, MetaType::kFp16);
  return g;
}

// Codes of 16 numbers, each by the group in its lane.
HWY_INLINE I16x AffineCodes(RowRule rule, const F16x& x, const F16x& scale, const F16x& min,
                            const F16x& factor, const F16x& offset, const F16x& levels) {
  const F16x zero = Set(0.0f);
  if (rule == RowRule::kIntegerZero) {
    const F16x q = Round(Add(Mul(x, factor), offset));
    return ToInt(Min(Max(q, zero), levels));
  }
  const F16x steps = Div(Sub(x, min), scale);
  if (rule == RowRule::kMinMax) {
    return ToInt(Min(Max(Floor(Add(steps, Set(0.5f))), zero), levels));
  }
  return ToInt(Round(Min(Max(steps, zero), levels)));
}

HWY_INLINE void RowAffineGroup(const F16x* x, int vectors, RowRule rule, int bits, uint8_t* codes,
                               float* scale, float* min) {
  F16x low = x[0], high = x[0];
  for (int i = 1; i < vectors; ++i) {
    low = Min(low, x[i]);
    high = Max(high, x[i]);
  }
  const auto levels = static_cast<float>((1 << bits) - 1);
  const AffineGroup g = ChooseAffine(rule, levels, ReduceMin(low) + 0.0f, ReduceMax(high) + 0.0f);
  *scale = g.scale;
  *min = g.min;
  for (int i = 0; i < vectors; ++i) {
    StoreCodes(AffineCodes(rule, x[i], Set(g.scale), Set(g.min), Set(g.factor), Set(g.offset),
                           Set(levels)),
               codes + i * 16);
  }
}

template <int kBits>
HWY_INLINE I16x FitCodes(const F16x& centred, const F16x& step) {
  if constexpr (kBits == 2) {
    return Add(
        Add(OneIf(GreaterEqual(centred, Neg(step))), OneIf(GreaterEqual(centred, Set(0.0f)))),
        OneIf(GreaterEqual(centred, step)));
  } else {
    constexpr auto kHalf = static_cast<float>(1 << (kBits - 1));
    const F16x q = Min(Max(Floor(Div(centred, step)), Set(-kHalf)), Set(kHalf - 1.0f));
    return Add(ToInt(q), SetInt(1 << (kBits - 1)));
  }
}

// A group about its mean; `centred` gets its numbers, the result is the sum of their squares.
// Sums start from their first vector, as Sum16 does: 0 + -0 would lose the sign of a zero mean.
HWY_INLINE float Centre(const F16x* x, int vectors, F16x* centred, float* mean) {
  F16x total = x[0];
  for (int i = 1; i < vectors; ++i) total = Add(total, x[i]);
  *mean = ReduceSum(total) / static_cast<float>(vectors * 16);
  for (int i = 0; i < vectors; ++i) {
    centred[i] = Sub(x[i], Set(*mean));
    const F16x square = Mul(centred[i], centred[i]);
    total = i == 0 ? square : Add(total, square);
  }
  return ReduceSum(total);
}

HWY_INLINE void LloydMaxGroup(const F16x* x, int vectors, uint8_t* codes, float* scale,
                              float* min) {
  F16x centred[kMaxVectors];
  float mean = 0.0f;
  const float variance = Centre(x, vectors, centred, &mean) / static_cast<float>(vectors * 16);
  const float deviation = std::sqrt(variance + kLloydMaxVariance);
  *scale = std::max(RoundMeta(kLloydMaxScale * deviation, MetaType::kFp16), kMinScale);
  *min = RoundMeta(mean - 1.5f * *scale, MetaType::kFp16);
  const F16x step = Set(kLloydMaxThreshold * deviation);
  for (int i = 0; i < vectors; ++i) StoreCodes(FitCodes<2>(centred[i], step), codes + i * 16);
}

template <int kBits>
HWY_INLINE void MseFitGroup(const F16x* x, int vectors, bool unbiased, uint8_t* codes, float* scale,
                            float* min) {
  const int n = vectors * 16;
  const auto count = static_cast<float>(n);
  F16x centred[kMaxVectors], total = Set(0.0f);
  float mean = 0.0f;
  const float sxx = Centre(x, vectors, centred, &mean);
  const float deviation = std::sqrt(sxx / count);
  float best_score = 0.0f, best_slope = 0.0f, best_sqx = 0.0f, best_step = 0.0f;
  int best_sum = 0;
  for (const float factor : kMseStepFactors) {
    const float step = factor * MseStepScale(kBits) * deviation;
    if (!(step > 0.0f)) break;
    const F16x width = Set(step);
    I16x sums = SetInt(0), squares = SetInt(0);
    for (int i = 0; i < vectors; ++i) {
      const I16x q = FitCodes<kBits>(centred[i], width);
      sums = Add(sums, q);
      squares = Add(squares, Mul(q, q));
      const F16x product = Mul(ToFloat(q), centred[i]);
      total = i == 0 ? product : Add(total, product);
    }
    const int sum = ReduceAddInt(sums);
    const int spread = n * ReduceAddInt(squares) - sum * sum;
    if (spread == 0) continue;
    const float variance = static_cast<float>(spread) / count;
    const float sqx = ReduceSum(total);
    const float score = sqx * sqx / variance;
    if (score > best_score) {
      best_score = score;
      best_slope = sqx / variance;
      best_sqx = sqx;
      best_sum = sum;
      best_step = step;
    }
  }
  // The codes of the best step are a function of it: cheaper to find again than to keep.
  for (int i = 0; i < vectors; ++i) {
    StoreCodes(best_step > 0.0f ? FitCodes<kBits>(centred[i], Set(best_step)) : SetInt(0),
               codes + i * 16);
  }
  float slope = best_slope;
  if (unbiased && best_sqx > 0.0f) {
    slope *= std::clamp(sxx / (best_slope * best_sqx), 0.5f, 2.0f);
  }
  *scale = std::max(RoundMeta(slope, MetaType::kFp16), kMinScale);
  *min = RoundMeta(mean - *scale * (static_cast<float>(best_sum) / count), MetaType::kFp16);
}

HWY_INLINE uint64_t Load64(const uint8_t* p) {
  uint64_t x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}

// K: a row's codes become one 32-bit word a vector, in the lane of its token. Of 3 bits, the low
// two.
template <int kBits>
HWY_INLINE void PackKRow(const uint8_t* codes, int dims, int token, std::byte* out) {
  constexpr uint64_t kEven = kBits == 2 ? 0x0003000300030003u : 0x000f000f000f000fu;
  constexpr int kDimsPerWord = 32 / kBits;
  const int vectors = dims / kDimsPerWord;
  std::byte* lane = out + static_cast<ptrdiff_t>(token / 16) * vectors * 64 + token % 16 * 4;
  for (int v = 0; v < vectors; ++v) {
    uint64_t even = 0, odd = 0;
    for (int part = 0; part < kDimsPerWord / 8; ++part) {
      const uint64_t eight = Load64(codes + v * kDimsPerWord + part * 8);
      even |= _pext_u64(eight, kEven) << (part * 4 * kBits);
      odd |= _pext_u64(eight, kEven << 8) << (part * 4 * kBits);
    }
    const auto word = static_cast<uint32_t>(even | (odd << 16));
    std::memcpy(lane + v * 64, &word, sizeof(word));
  }
}

// The high bits of a row of K: 32 dims become one word. Pairs 8i + j and 8i + j + 4 are 8 bits
// apart.
HWY_INLINE void PackKHighBits(const uint8_t* codes, int dims, int token, std::byte* out) {
  constexpr uint64_t kEven = 0x0004000400040004u;
  const int vectors = dims / 32;
  std::byte* lane = out + static_cast<ptrdiff_t>(token / 16) * vectors * 64 + token % 16 * 4;
  for (int v = 0; v < vectors; ++v) {
    uint64_t even = 0, odd = 0;
    for (int part = 0; part < 4; ++part) {  // four pairs each
      const uint64_t eight = Load64(codes + v * 32 + part * 8);
      const int shift = part / 2 * 4 + part % 2 * 8;
      even |= _pext_u64(eight, kEven) << shift;
      odd |= _pext_u64(eight, kEven << 8) << shift;
    }
    const auto word = static_cast<uint32_t>(even | (odd << 16));
    std::memcpy(lane + v * 64, &word, sizeof(word));
  }
}

// 16 codes, less the bits that are not in `mask`, moved right by `shift`.
HWY_INLINE I16x LoadCodes(const uint8_t* source, int mask, int shift) {
  I16x wide;
  for (int part = 0; part < kParts; ++part) {
    const hn::Rebind<uint8_t, DI> d_byte;
    const VI codes = hn::PromoteTo(DI(), hn::LoadU(d_byte, source + part * kWidth));
    wide.v[part] = hn::ShiftRightSame(hn::And(codes, hn::Set(DI(), mask)), shift);
  }
  return wide;
}

// The high bits of V: a word takes those of 32 tokens.
HWY_INLINE void PackVHighBits(const uint8_t* codes, int dims, std::byte* out) {
  constexpr int kVectors = kPageTokens / 32;
  for (int tile = 0; tile < dims / 16; ++tile) {
    for (int v = 0; v < kVectors; ++v) {
      I16x words = SetInt(0);
      for (int i = 0; i < 32; ++i) {
        const int pair = i / 2;
        const int shift = pair / 8 * 4 + pair % 4 + pair / 4 % 2 * 8 + 16 * (i & 1);
        words = Or(words, ShlSame(LoadCodes(codes + (v * 32 + i) * dims + tile * 16, 4, 2), shift));
      }
      StoreInt(words, reinterpret_cast<int32_t*>(out) + (tile * kVectors + v) * 16);
    }
  }
}

// V: lanes are dims; a word takes the codes of 32 / kBits tokens; of 3 bits, the low two.
template <int kBits>
HWY_INLINE void PackV(const uint8_t* codes, int dims, std::byte* out) {
  constexpr int kTokensPerWord = 32 / kBits;
  constexpr int kVectors = kPageTokens / kTokensPerWord;
  for (int tile = 0; tile < dims / 16; ++tile) {
    for (int v = 0; v < kVectors; ++v) {
      I16x words = SetInt(0);
      for (int i = 0; i < kTokensPerWord; ++i) {
        const uint8_t* source = codes + (v * kTokensPerWord + i) * dims + tile * 16;
        const I16x wide = LoadCodes(source, (1 << kBits) - 1, 0);
        words = Or(words, ShlSame(wide, i / 2 * kBits + 16 * (i & 1)));
      }
      StoreInt(words, reinterpret_cast<int32_t*>(out) + (tile * kVectors + v) * 16);
    }
  }
}

template <int kBits>
HWY_NOINLINE int EncodeSide(const BlockLayout& layout, bool is_k, RowRule rule, float clip_ratio,
                            const Bf16* rows, std::byte* block) {
  constexpr int kLowBits = kBits == 3 ? 2 : kBits;
  const int dims = layout.head_dim(), vectors = dims / 16;
  const int groups = layout.num_groups(), group_vectors = layout.group_dims() / 16;
  const bool clips = Clips(rule) && clip_ratio > 0.0f;
  const int clip_index = clips ? ClipIndex(clip_ratio, dims) : 0;
  alignas(64) uint8_t codes[kPageTokens * kMaxHeadDim];
  int saturated = 0;
  for (int token = 0; token < kPageTokens; ++token) {
    const Bf16* source = rows + token * dims;
    uint8_t* row_codes = codes + token * dims;
    Row row;
    LoadRow(source, vectors, row);
    saturated += row.saturated;
    if (clips) {
      const float t = MagnitudeAt(source, dims, clip_index);
      const F16x top = Set(t), bottom = Set(-t);
      for (int i = 0; i < vectors; ++i) row.x[i] = Min(Max(row.x[i], bottom), top);
    }
    for (int g = 0; g < groups; ++g) {
      const F16x* x = row.x + g * group_vectors;
      const Bf16* part = source + g * layout.group_dims();
      uint8_t* out = row_codes + g * layout.group_dims();
      float scale = 0.0f, min = 0.0f;
      switch (rule) {
        case RowRule::kMinMax:
          MinMaxGroup(x, group_vectors, part, kBits, out, &scale, &min);
          break;
        case RowRule::kSymmetric:
          SymmetricGroup(x, group_vectors, kBits, out, &scale, &min);
          break;
        case RowRule::kMseFit:
        case RowRule::kMseFitUnbiased:
          MseFitGroup<kBits>(x, group_vectors, rule == RowRule::kMseFitUnbiased, out, &scale, &min);
          break;
        case RowRule::kRealMin:
        case RowRule::kIntegerZero:
          RowAffineGroup(x, group_vectors, rule, kBits, out, &scale, &min);
          break;
        case RowRule::kLloydMax:
          OSCAR_DCHECK(kBits == 2);
          LloydMaxGroup(x, group_vectors, out, &scale, &min);
          break;
      }
      const uint16_t scale_bits = ToFp16(scale).bits, min_bits = ToFp16(min).bits;
      std::memcpy(block + (is_k ? layout.KScale(token, g) : layout.VScale(token, g)), &scale_bits,
                  sizeof(scale_bits));
      std::memcpy(block + (is_k ? layout.KMin(token, g) : layout.VMin(token, g)), &min_bits,
                  sizeof(min_bits));
    }
    if (!is_k) continue;
    PackKRow<kLowBits>(row_codes, dims, token, block + layout.k_codes_offset());
    if (kBits == 3) PackKHighBits(row_codes, dims, token, block + layout.k_high_offset());
  }
  if (is_k) return saturated;
  PackV<kLowBits>(codes, dims, block + layout.v_codes_offset());
  if (kBits == 3) PackVHighBits(codes, dims, block + layout.v_high_offset());
  return saturated;
}

// Norm of one row: Sum16 of its squares.
HWY_INLINE float RowNorm(const Row& row, int vectors) {
  F16x sum = Mul(row.x[0], row.x[0]);
  for (int i = 1; i < vectors; ++i) sum = Add(sum, Mul(row.x[i], row.x[i]));
  return std::sqrt(ReduceSum(sum));
}

// A token's codes of keys, as bytes, into their places.
HWY_INLINE void PackKCodes(const BlockLayout& layout, const uint8_t* codes, int token,
                           std::byte* block) {
  if (layout.k_bits() == 4) {
    PackKRow<4>(codes, layout.head_dim(), token, block);
    return;
  }
  PackKRow<2>(codes, layout.head_dim(), token, block);
  if (layout.k_bits() == 3) {
    PackKHighBits(codes, layout.head_dim(), token, block + layout.k_high_offset());
  }
}

HWY_NOINLINE int EncodeCodebookKeys(const BlockLayout& layout, const Bf16* rows, std::byte* block) {
  const int dims = layout.head_dim(), vectors = dims / 16, bits = layout.k_bits();
  const GaussianCodebook& book = LloydMaxCodebook(bits);
  const float root = std::sqrt(static_cast<float>(dims));
  alignas(64) uint8_t codes[kMaxHeadDim];
  int saturated = 0;
  for (int token = 0; token < kPageTokens; ++token) {
    Row row;
    LoadRow(rows + token * dims, vectors, row);
    saturated += row.saturated;
    const float norm = RowNorm(row, vectors);
    const F16x divisor = Set(norm + 1e-8f), factor = Set(root);
    for (int i = 0; i < vectors; ++i) {
      const F16x u = Mul(Div(row.x[i], divisor), factor);
      I16x code = SetInt(0);
      for (const double t : book.thresholds) {
        code = Add(code, OneIf(Less(Set(static_cast<float>(t)), u)));
      }
      StoreCodes(code, codes + i * 16);
    }
    int length = 0;
    for (int d = 0; d < dims; ++d) length += ByteLevel(bits, codes[d]) * ByteLevel(bits, codes[d]);
    const float fit = norm * (ByteLevelUnit(bits) * root) / std::sqrt(static_cast<float>(length));
    const uint16_t stored = SaturateToFp16(fit).bits;
    std::memcpy(block + layout.KRowNorm(token), &stored, sizeof(stored));
    PackKCodes(layout, codes, token, block);
  }
  return saturated;
}

// Lanes are dims, so that what a channel needs stays in its lane.
HWY_NOINLINE int EncodeChannelKeys(const BlockLayout& layout, RowRule rule, const BlockRun& run) {
  const int dims = layout.head_dim(), vectors = dims / 16;
  const int tokens = static_cast<int>(run.k.size()) * kPageTokens;
  const int group = std::min(tokens, layout.group_tokens());
  std::vector<float> numbers(static_cast<size_t>(tokens * dims));
  std::vector<uint8_t> codes(numbers.size());
  float* const x = numbers.data();
  int saturated = 0;
  for (int t = 0; t < tokens; ++t) {
    Row row;
    LoadRow(run.k[static_cast<size_t>(t / kPageTokens)] + t % kPageTokens * dims, vectors, row);
    saturated += row.saturated;
    float norm = run.norms != nullptr ? run.norms[t] : 1.0f;
    if (layout.has_head_norms()) {
      norm = RowNorm(row, vectors);
      if (!(norm > 0.0f)) norm = 1.0f;
      std::memcpy(run.blocks[static_cast<size_t>(t / kPageTokens)] + layout.KNorm(t % kPageTokens),
                  &norm, sizeof(norm));
    }
    for (int i = 0; i < vectors; ++i) Store(Div(row.x[i], Set(norm)), x + t * dims + i * 16);
  }
  std::vector<uint8_t> index(static_cast<size_t>(dims), kNotBoosted);
  if (layout.k_form() == SideForm::kMixed) {
    std::vector<float> sums(static_cast<size_t>(dims));
    for (int t = 0; t < tokens; ++t) {
      for (int d = 0; d < dims; d += 16) {
        Store(Add(Load(sums.data() + d), Abs(Load(x + t * dims + d))), sums.data() + d);
      }
    }
    index = RankChannels(sums, layout.boosted_dims());
    for (int d = 0; d < dims; ++d) {
      run.blocks[static_cast<size_t>(d / layout.channel_dims())]
                [layout.KIndex(d % layout.channel_dims())] =
          std::byte{index[static_cast<size_t>(d)]};
    }
  }
  const auto plain_levels = static_cast<float>((1 << layout.k_bits()) - 1);
  for (int first = 0; first < tokens; first += group) {
    for (int d = 0; d < dims; d += 16) {
      F16x low = Load(x + first * dims + d), high = low;
      for (int t = first + 1; t < first + group; ++t) {
        low = Min(low, Load(x + t * dims + d));
        high = Max(high, Load(x + t * dims + d));
      }
      alignas(64) float lo[16], hi[16], scale[16], min[16], factor[16], offset[16], levels[16];
      Store(Add(low, Set(0.0f)), lo);
      Store(Add(high, Set(0.0f)), hi);
      for (int lane = 0; lane < 16; ++lane) {
        const int dim = d + lane;
        levels[lane] = index[static_cast<size_t>(dim)] == kNotBoosted ? plain_levels : 15.0f;
        const AffineGroup g = ChooseAffine(rule, levels[lane], lo[lane], hi[lane]);
        scale[lane] = g.scale, min[lane] = g.min;
        factor[lane] = g.factor, offset[lane] = g.offset;
        // A group of the page it begins in, or the half of a pair that has this dim.
        const int at = dim % layout.channel_dims();
        const int page =
            layout.pages_together() > 1 ? dim / layout.channel_dims() : first / kPageTokens;
        const int in_page = first % kPageTokens / group;
        std::byte* const block = run.blocks[static_cast<size_t>(page)];
        const uint16_t scale_bits = ToFp16(g.scale).bits, min_bits = ToFp16(g.min).bits;
        std::memcpy(block + layout.KChannelScale(in_page, at), &scale_bits, sizeof(scale_bits));
        std::memcpy(block + layout.KChannelMin(in_page, at), &min_bits, sizeof(min_bits));
      }
      for (int t = first; t < first + group; ++t) {
        StoreCodes(AffineCodes(rule, Load(x + t * dims + d), Load(scale), Load(min), Load(factor),
                               Load(offset), Load(levels)),
                   codes.data() + t * dims + d);
      }
    }
  }
  for (int t = 0; t < tokens; ++t) {
    PackKCodes(layout, codes.data() + t * dims, t % kPageTokens,
               run.blocks[static_cast<size_t>(t / kPageTokens)]);
  }
  for (int d = 0; d < dims; ++d) {
    const uint8_t boost = index[static_cast<size_t>(d)];
    if (boost == kNotBoosted) continue;
    for (int t = 0; t < tokens; t += 4) {
      int byte = 0;
      for (int i = 0; i < 4; ++i)
        byte |= codes[static_cast<size_t>((t + i) * dims + d)] >> 2 << i * 2;
      run.blocks[static_cast<size_t>(t / kPageTokens)]
                [layout.KBoost(boost) + static_cast<uint32_t>(t % kPageTokens / 4)] =
          static_cast<std::byte>(byte);
    }
  }
  return saturated;
}

}  // namespace

// Of blocks that are not BF16.
int EncodeCodes(const BlockLayout& layout, const BlockRules& rules, const BlockRun& run) {
  const auto encode = [](int bits) {
    return bits == 2 ? &EncodeSide<2> : bits == 3 ? &EncodeSide<3> : &EncodeSide<4>;
  };
  int saturated = 0;
  for (size_t i = 0; i < run.blocks.size(); ++i) {
    std::byte* const block = run.blocks[i];
    if (layout.is_rows()) {
      saturated +=
          encode(layout.k_bits())(layout, true, rules.k_rule, rules.k_clip_ratio, run.k[i], block);
    } else if (layout.k_form() == SideForm::kCodebook) {
      saturated += EncodeCodebookKeys(layout, run.k[i], block);
    }
    saturated +=
        encode(layout.v_bits())(layout, false, rules.v_rule, rules.v_clip_ratio, run.v[i], block);
  }
  if (layout.k_form() == SideForm::kChannels || layout.k_form() == SideForm::kMixed) {
    saturated += EncodeChannelKeys(layout, rules.k_rule, run);
  }
  return saturated;
}

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OSCAR_SIMD_TARGET

#if HWY_ONCE
#include <utility>

#include "simd/block_writer.h"
#include "simd/dispatch.h"

namespace oscar::simd {

int WriteBlocks(const BlockLayout& layout, const BlockRules& rules, const BlockRun& run) {
  OSCAR_CHECK(std::cmp_equal(run.blocks.size(), layout.pages_together()) &&
              run.k.size() == run.blocks.size() && run.v.size() == run.blocks.size());
  if (layout.order() != CodeOrder::kCpu) return EncodeBlocks(layout, rules, run);
  if (layout.is_bf16()) {
    const auto bytes = static_cast<size_t>(kPageTokens * layout.head_dim()) * sizeof(Bf16);
    std::memcpy(run.blocks[0], run.k[0], bytes);
    std::memcpy(run.blocks[0] + layout.v_codes_offset(), run.v[0], bytes);
    return 0;
  }
  const auto encode = ActiveTarget() == Target::kAvx2 ? &N_AVX2::EncodeCodes : &N_AVX3::EncodeCodes;
  return encode(layout, rules, run);
}

int WriteBlock(const BlockLayout& layout, const BlockRules& rules, std::span<const Bf16> k,
               std::span<const Bf16> v, std::span<std::byte> block) {
  const auto rows = static_cast<size_t>(kPageTokens * layout.head_dim());
  OSCAR_CHECK(k.size() == rows && v.size() == rows && block.size() == layout.block_bytes());
  const Bf16 *const k_rows = k.data(), *const v_rows = v.data();
  std::byte* const out = block.data();
  return WriteBlocks(layout, rules, {{&k_rows, 1}, {&v_rows, 1}, {&out, 1}});
}

}  // namespace oscar::simd
#endif  // HWY_ONCE
