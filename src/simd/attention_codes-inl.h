// Attention of up to four query heads over one packed page, straight from its codes. Included once
// per target.
//
//   logit_t = s_t (q . code_t) + min_t sum(q)          out = sum (p_t s_t) code_t + sum p_t min_t
//
// Both products are integer: q (and p s) are rounded to 15 bits, q = step (256 hi + lo), and each
// signed byte plane meets the codes, unsigned bytes, in a four-way dot product (VPDPBUSD, or
// VPMADDUBSW and VPMADDWD). Codes unpack four dims at a time:
//
//   64 bytes of K = 16 lanes (tokens) x 32 bits     INT2, position p: (word >> 2p) & 0x03030303
//     bits 31..............16 15...............0    its bytes: dims 2p, 2p + 8, 2p + 1, 2p + 9
//          odd dims             even dims           INT4, position p: (word >> 4p) & 0x0f0f0f0f
//     8 dims of 2 bits or 4 dims of 4 bits each     its bytes: dims 2p, 2p + 4, 2p + 1, 2p + 5
//
// INT3 is INT2 with a second vector of high bits for every two, whose bit 4 (v mod 2) + p of a byte
// goes with position p of vector v.
//
// and V is the same with dims and tokens exchanged, so one routine serves both. The planes of q and
// p s are stored in that byte order. Scale, min and step never touch an element.
//
// What rounding q does to a logit is s_t times a random sum over dims, about the middle code: no
// more for keys far from zero than for others. Where a page has scales for which that could matter
// (sharp logits, one large dim of q), its keys are met a second time, by what rounding left of q.
#if defined(OSCAR_SIMD_ATTENTION_CODES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OSCAR_SIMD_ATTENTION_CODES_INL_H_
#undef OSCAR_SIMD_ATTENTION_CODES_INL_H_
#else
#define OSCAR_SIMD_ATTENTION_CODES_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/half.h"
#include "cache/block_layout.h"
#include "cache/query_rounding.h"
#include "simd/attention_state.h"
#include "simd/lanes16-inl.h"

#if OSCAR_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {

inline constexpr int kMaxBlockHeads = 4;  // query heads that share one unpacking
inline constexpr int kMaxPageDims = 256;  // of a head
inline constexpr int kMaxPageGroups = 8;  // 256 dims in groups of 32
inline constexpr float kPlaneLimit =
    32512.0f;  // 127 * 256: hi stays a signed byte when lo rounds up
// A page whose largest logit is this far (in powers of two) below the running maximum adds less
// than 2^-34 of the result.
inline constexpr float kNegligible = 40.0f;

// What is prepared of q: its rounded form, or what rounding left, in units as much finer.
enum class QueryPart : uint8_t { kRounded, kRemainder };

// q of a group in steps of largest / limit.
struct RoundedSteps {
  float step, inverse;

  RoundedSteps(const float* q, int first, int end, float limit) {
    F16x largest = Set(0.0f);
    for (int d = first; d < end; d += 16) largest = Max(largest, Abs(Load(q + d)));
    const float top = std::max(ReduceMax(largest), 1e-30f);
    step = top / limit;
    inverse = limit / top;
  }
  HWY_INLINE F16x Of(const float* q) const { return Round(Mul(Load(q), Set(inverse))); }
  // What that leaves.
  HWY_INLINE F16x Left(const float* q) const { return MulAdd(Of(q), Set(-step), Load(q)); }
};

// The largest K scales, as fp16 bits, for which the rounded form of q is enough; one for all heads
// of a block, because they share a pass over codes.
struct ScaleLimits {
  uint16_t bits[kMaxPageGroups];

  void Add(int head, int g, float scale_limit) {
    const uint16_t limit = SaturateToFp16(scale_limit).bits;
    bits[g] = head == 0 ? limit : std::min(bits[g], limit);
  }
  // Scales are not negative, so their bits are in the order of what they stand for.
  HWY_INLINE bool Exceeded(const BlockLayout& layout, const std::byte* block) const {
    const hn::ScalableTag<uint16_t> d;
    for (int g = 0; g < layout.num_groups(); ++g) {
      const auto* scales = reinterpret_cast<const uint16_t*>(block + layout.KScale(0, g));
      auto largest = hn::LoadU(d, scales);
      OSCAR_UNROLL
      for (size_t i = hn::Lanes(d); i < kPageTokens; i += hn::Lanes(d)) {
        largest = hn::Max(largest, hn::LoadU(d, scales + i));
      }
      if (!hn::AllFalse(d, hn::Gt(largest, hn::Set(d, bits[g])))) return true;
    }
    return false;
  }
};

// What rounding left of the q of a block of heads, made when a page first needs it.
template <typename Query>
class Remainder {
 public:
  using Prepare = void(const float* q, const BlockLayout&, float scale, int head, QueryPart,
                       Query&);

  // q: [heads, D]. Leaves the query itself unset: it is large, and seldom needed.
  Remainder(const float* q, int heads, float scale, Prepare* prepare)
      : q_(q), heads_(heads), scale_(scale), prepare_(prepare) {}

  HWY_NOINLINE const Query& Get(const BlockLayout& layout) {
    for (int h = 0; !made_ && h < heads_; ++h) {
      prepare_(q_ + h * layout.head_dim(), layout, scale_, h, QueryPart::kRemainder, query_);
    }
    made_ = true;
    return query_;
  }

 private:
  const float* q_;
  int heads_;
  float scale_;
  Prepare* prepare_;
  bool made_ = false;
  Query query_;
};

// Fetches the next block into L1 while this one is worked on: a few lines at each step, because a
// burst of 72 would hold up the loads that the arithmetic waits for. Blocks of one head lie a whole
// page apart, which no hardware prefetcher follows.
struct BlockPrefetch {
  const std::byte* at;
  const std::byte* end;
  int lines_per_step;

  HWY_INLINE void Step() {
    for (int i = 0; i < lines_per_step && at < end; ++i, at += 64) __builtin_prefetch(at);
  }
};

// The byte planes of 16 numbers: 4 words for 4 positions.
struct Planes {
  alignas(64) uint8_t hi[kMaxPageDims];
  alignas(64) uint8_t lo[kMaxPageDims];
};

// INT2 keys with VNNI and VBMI: instead of two planes in four steps, a nibble (two codes) looks its
// partial sum up. A 64-byte table serves one nibble of a vector, 16 entries for each of a word's
// four bytes:
//
//   entry[16 b + c0 + 4 c1] = round(((c0 - 3/2) q[d0] + (c1 - 3/2) q[d1]) / unit)
//
// in 16 bits, split over two tables of bytes; VPERMB looks up, VPDPBUSD with ones adds. That takes
// half the dot products, and the permutes run on another port: 512 cycles a page of 4 heads x 128
// dims on Zen 4 instead of 1024. Values would need new tables for each page, which eats the gain.
struct QueryTables {
  alignas(64) uint8_t lo[kMaxBlockHeads][kMaxPageDims / 16][2][64];
  alignas(64) uint8_t hi[kMaxBlockHeads][kMaxPageDims / 16][2][64];
  float unit[kMaxBlockHeads][kMaxPageGroups];  // times softmax scale and log2 e
  float sums[kMaxBlockHeads][kMaxPageGroups];  // of q, times softmax scale and log2 e
};

// What a head block keeps for the whole sequence.
struct QueryCodes {
  QueryTables tables;
  Planes planes[kMaxBlockHeads];
  // Of q in each group, times softmax scale and log2 e; a large dim coarsens its own group alone.
  float step[kMaxBlockHeads][kMaxPageGroups];
  float sums[kMaxBlockHeads][kMaxPageGroups];  // of q, in steps
  // What rounding took from sums, times the middle code.
  float centre[kMaxBlockHeads][kMaxPageGroups];
  ScaleLimits limits;
};

// Whole numbers [16], at most kPlaneLimit -> the two planes in code order.
template <int kBits>
HWY_INLINE void StoreIntPlanes(const I16x& n, uint8_t* hi, uint8_t* lo) {
  const hn::Full128<uint8_t> d8;
  alignas(16) static constexpr uint8_t kOrder2[16] = {0, 8,  1, 9,  2, 10, 3, 11,
                                                      4, 12, 5, 13, 6, 14, 7, 15};
  alignas(16) static constexpr uint8_t kOrder4[16] = {0, 4,  1, 5,  2,  6,  3,  7,
                                                      8, 12, 9, 13, 10, 14, 11, 15};
  const auto order = hn::Load(d8, kBits == 4 ? kOrder4 : kOrder2);
  // n = 256 upper + lower with lower signed: its low byte is n's own.
#if HWY_TARGET == HWY_AVX3
  const VI upper = hn::ShiftRight<8>(hn::Add(n.v[0], hn::Set(DI(), 128)));
  const hn::Vec128<uint8_t> high{_mm512_cvtepi32_epi8(upper.raw)};
  const hn::Vec128<uint8_t> low{_mm512_cvtepi32_epi8(n.v[0].raw)};
#else
  alignas(16) int8_t bytes[2][16];
  for (int i = 0; i < kParts; ++i) {
    const hn::Rebind<int8_t, DI> d_byte;
    const VI upper = hn::ShiftRight<8>(hn::Add(n.v[i], hn::Set(DI(), 128)));
    const VI lower = hn::Sub(n.v[i], hn::ShiftLeft<8>(upper));
    hn::StoreU(hn::DemoteTo(d_byte, upper), d_byte, bytes[0] + i * kWidth);
    hn::StoreU(hn::DemoteTo(d_byte, lower), d_byte, bytes[1] + i * kWidth);
  }
  const auto high = hn::Load(d8, reinterpret_cast<const uint8_t*>(bytes[0]));
  const auto low = hn::Load(d8, reinterpret_cast<const uint8_t*>(bytes[1]));
#endif
  hn::StoreU(hn::TableLookupBytes(high, order), d8, hi);
  hn::StoreU(hn::TableLookupBytes(low, order), d8, lo);
}
// Of numbers in steps.
template <int kBits>
HWY_INLINE void StorePlanes(const F16x& values, uint8_t* hi, uint8_t* lo) {
  StoreIntPlanes<kBits>(NearestInt(values), hi, lo);
}

template <bool kVnni>
HWY_INLINE VI DotBytes(VI sum, VI codes, VI plane) {
#if HWY_TARGET == HWY_AVX3
  if constexpr (kVnni) {
    // By name: the target attribute that would allow the intrinsic also allows instructions that
    // not every VNNI machine has.
    asm("vpdpbusd %2, %1, %0" : "+v"(sum.raw) : "v"(codes.raw), "v"(plane.raw));
    return sum;
  }
  const __m512i pairs = _mm512_maddubs_epi16(codes.raw, plane.raw);
  return hn::Add(sum, VI{_mm512_madd_epi16(pairs, _mm512_set1_epi16(1))});
#else
  const __m256i pairs = _mm256_maddubs_epi16(codes.raw, plane.raw);
  return hn::Add(sum, VI{_mm256_madd_epi16(pairs, _mm256_set1_epi16(1))});
#endif
}

HWY_INLINE VI BroadcastWord(const uint8_t* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof(word));
  return hn::Set(DI(), word);
}

// ByteLevel() + 128 of codes of 2, 3 and 4 bits.
struct ShiftedLevels {
  alignas(16) uint8_t of[3][16];
};
inline constexpr ShiftedLevels kShiftedLevels = [] {
  ShiftedLevels out{};
  for (int bits = 2; bits <= 4; ++bits) {
    for (int c = 0; c < 1 << bits; ++c) {
      out.of[bits - 2][c] = static_cast<uint8_t>(ByteLevel(bits, c) + 128);
    }
  }
  return out;
}();

// Where the codes of some tiles begin: of 3 bits the low two, whose high bits are elsewhere.
struct TileCodes {
  const std::byte* codes;
  size_t tile_bytes;
  const std::byte* high;  // 3 bits; tiles half as far apart

  // Vectors that a code of `bits` bits lies in with others.
  static constexpr int LowBits(int bits) { return bits == 3 ? 2 : bits; }
};

// Bits [4 (v mod 2) + p] of each byte, at bit 2.
template <int kPosition>
HWY_INLINE VI HighBits(VI word) {
  if constexpr (kPosition < 2) {
    word = hn::ShiftLeft<2 - kPosition>(word);
  } else {
    word = hn::ShiftRight<kPosition - 2>(word);
  }
  return hn::And(word, hn::Set(DI(), 0x04040404));
}

// sums[t][first + h] = codes of tile t (16 lanes) . plane words of head first + h, h < kHeads, over
// `num_vectors` vectors. kBook: of the levels that codes name, plus 128; with VNNI alone, because
// VPMADDUBSW saturates.
template <int kBits, int kTiles, int kHeads, bool kVnni, bool kBook, int kAllHeads>
HWY_INLINE void DotTilesOf(int first, const TileCodes& from, int num_vectors,
                           const Planes* HWY_RESTRICT planes, int plane_offset,
                           BlockPrefetch& prefetch, I16x (&sums)[kTiles][kAllHeads]) {
  constexpr int kLowBits = TileCodes::LowBits(kBits);
  constexpr int kPositions = 8 / kLowBits;
  constexpr int kMask = kLowBits == 2 ? 0x03030303 : 0x0f0f0f0f;
  static_assert(kVnni || !kBook);
  const hn::Repartition<uint8_t, DI> d8;
  [[maybe_unused]] const auto levels =
      hn::LoadDup128(d8, kShiftedLevels.of[static_cast<size_t>(kBits - 2)]);
  I16x hi[kTiles][kHeads], lo[kTiles][kHeads];
  OSCAR_UNROLL
  for (int t = 0; t < kTiles; ++t) {
    OSCAR_UNROLL
    for (int h = 0; h < kHeads; ++h) hi[t][h] = lo[t][h] = SetInt(0);
  }
  for (int v = 0; v < num_vectors; ++v) {
    prefetch.Step();
    I16x words[kTiles];
    [[maybe_unused]] I16x high[kTiles];
    OSCAR_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      const size_t tile = static_cast<size_t>(t) * from.tile_bytes;
      words[t] = LoadInt(reinterpret_cast<const int32_t*>(from.codes + tile) + v * 16);
      if constexpr (kBits == 3) {
        high[t] = LoadInt(reinterpret_cast<const int32_t*>(from.high + tile / 2) + v / 2 * 16);
        for (int i = 0; i < kParts; ++i) {
          high[t].v[i] = hn::ShiftRightSame(high[t].v[i], v % 2 * 4);
        }
      }
    }
    const int at = plane_offset + v * kPositions * 4;
    const auto position = [&]<int p>() HWY_ATTR {
      I16x part[kTiles];
      OSCAR_UNROLL
      for (int t = 0; t < kTiles; ++t) {
        for (int i = 0; i < kParts; ++i) {
          part[t].v[i] = hn::And(words[t].v[i], hn::Set(DI(), kMask));
          words[t].v[i] = hn::ShiftRight<kLowBits>(words[t].v[i]);
          if constexpr (kBits == 3) {
            part[t].v[i] = hn::Or(part[t].v[i], HighBits<p>(high[t].v[i]));
          }
          if constexpr (kBook) {
            const auto codes = hn::BitCast(d8, part[t].v[i]);
            part[t].v[i] = hn::BitCast(DI(), hn::TableLookupBytes(levels, codes));
          }
        }
      }
      OSCAR_UNROLL
      for (int h = 0; h < kHeads; ++h) {
        const VI upper = BroadcastWord(planes[first + h].hi + at + p * 4);
        const VI lower = BroadcastWord(planes[first + h].lo + at + p * 4);
        OSCAR_UNROLL
        for (int t = 0; t < kTiles; ++t) {
          for (int i = 0; i < kParts; ++i) {
            hi[t][h].v[i] = DotBytes<kVnni>(hi[t][h].v[i], part[t].v[i], upper);
            lo[t][h].v[i] = DotBytes<kVnni>(lo[t][h].v[i], part[t].v[i], lower);
          }
        }
      }
    };
    position.template operator()<0>();
    position.template operator()<1>();
    if constexpr (kPositions == 4) {
      position.template operator()<2>();
      position.template operator()<3>();
    }
  }
  OSCAR_UNROLL
  for (int t = 0; t < kTiles; ++t) {
    OSCAR_UNROLL
    for (int h = 0; h < kHeads; ++h) sums[t][first + h] = Add(Shl<8>(hi[t][h]), lo[t][h]);
  }
}

// All heads; on AVX2 two at a time, for which its registers last.
template <int kBits, int kTiles, int kHeads, bool kVnni, bool kBook = false>
HWY_INLINE void DotTiles(const TileCodes& codes, int num_vectors, const Planes* HWY_RESTRICT planes,
                         int plane_offset, BlockPrefetch& prefetch, I16x (&sums)[kTiles][kHeads]) {
  constexpr int kFirst = kParts == 1 || kHeads <= 2 ? kHeads : 2;
  DotTilesOf<kBits, kTiles, kFirst, kVnni, kBook>(0, codes, num_vectors, planes, plane_offset,
                                                  prefetch, sums);
  if constexpr (kFirst < kHeads) {
    DotTilesOf<kBits, kTiles, kHeads - kFirst, kVnni, kBook>(kFirst, codes, num_vectors, planes,
                                                             plane_offset, prefetch, sums);
  }
}

// Tiles in flight: as many accumulators as registers allow (2 planes x heads x tiles).
inline constexpr int kTilesAtOnce = kParts == 1 ? 2 : 1;

template <int kBits>
HWY_INLINE void PrepareQuery(const float* q, const BlockLayout& layout, float scale, int head,
                             QueryPart part, QueryCodes& out) {
  const CodeStatistics statistics = StatisticsOf(layout);
  const bool is_rest = part == QueryPart::kRemainder;
  alignas(64) float rest[kMaxPageDims];
  for (int g = 0; g < layout.num_groups(); ++g) {
    const int first = g * layout.group_dims(), end = first + layout.group_dims();
    if (is_rest) {
      const RoundedSteps steps(q, first, end, kPlaneLimit);
      for (int d = first; d < end; d += 16) Store(steps.Left(q + d), rest + d);
    }
    const float* x = is_rest ? rest : q;
    const RoundedSteps steps(x, first, end, kPlaneLimit);
    F16x sum = Set(0.0f), rounded = Set(0.0f);
    for (int d = first; d < end; d += 16) {
      const F16x n = steps.Of(x + d);
      sum = Add(sum, Load(x + d));
      rounded = Add(rounded, n);
      StorePlanes<kBits>(n, out.planes[head].hi + d, out.planes[head].lo + d);
    }
    out.step[head][g] = steps.step * scale;
    // The rounded form comes with all that the sum of q adds.
    out.sums[head][g] = is_rest ? 0.0f : ReduceSum(sum) * steps.inverse;
    out.centre[head][g] = statistics.middle * (out.sums[head][g] - ReduceSum(rounded));
    out.limits.Add(head, g,
                   ScaleLimit(layout, out.step[head][g] * statistics.Noise(layout.group_dims())));
  }
}

// Logits in base 2 of a whole page: [kHeads][64]. A remainder adds to what is there.
template <int kBits, int kHeads, bool kVnni>
HWY_INLINE void CodeLogits(const BlockLayout& layout, const std::byte* block,
                           const QueryCodes& query, QueryPart part, BlockPrefetch& prefetch,
                           float (&logits)[kMaxBlockHeads][kPageTokens]) {
  const int group_vectors = layout.group_dims() * TileCodes::LowBits(kBits) / 32;
  const size_t tile_bytes = layout.k_tile_bytes();
  for (int tile = 0; tile < 4; tile += kTilesAtOnce) {
    F16x sum[kTilesAtOnce][kHeads];
    for (int g = 0; g < layout.num_groups(); ++g) {
      I16x dots[kTilesAtOnce][kHeads];
      const size_t at =
          static_cast<size_t>(tile) * tile_bytes + static_cast<size_t>(g * group_vectors) * 64;
      DotTiles<kBits, kTilesAtOnce, kHeads, kVnni>(
          {block + at, tile_bytes, block + layout.k_high_offset() + at / 2}, group_vectors,
          query.planes, g * layout.group_dims(), prefetch, dots);
      for (int t = 0; t < kTilesAtOnce; ++t) {
        const int token = (tile + t) * 16;
        const F16x s = LoadFp16(reinterpret_cast<const uint16_t*>(block + layout.KScale(token, g)));
        const F16x m = LoadFp16(reinterpret_cast<const uint16_t*>(block + layout.KMin(token, g)));
        for (int h = 0; h < kHeads; ++h) {
          const F16x low = Mul(m, Set(query.sums[h][g]));
          const F16x dot = Add(ToFloat(dots[t][h]), Set(query.centre[h][g]));
          const F16x value = MulAdd(dot, s, low), step = Set(query.step[h][g]);
          if (g == 0) {
            sum[t][h] = part == QueryPart::kRounded ? Set(0.0f) : Load(logits[h] + (tile + t) * 16);
          }
          sum[t][h] = MulAdd(value, step, sum[t][h]);
        }
      }
    }
    for (int t = 0; t < kTilesAtOnce; ++t) {
      for (int h = 0; h < kHeads; ++h) {
        Store(sum[t][h], logits[h] + (tile + t) * 16);
      }
    }
  }
}

#if HWY_TARGET == HWY_AVX3
inline void PrepareQueryTables(const float* q, const BlockLayout& layout, float scale, int head,
                               QueryPart part, QueryTables& out, ScaleLimits& limits) {
  // Half a unit at most is left of an entry.
  constexpr float kFiner = 2.0f * kPlaneLimit;
  alignas(64) float first[16], second[16];  // c0 - 3/2 and c1 - 3/2 of each entry
  for (int i = 0; i < 16; ++i) {
    first[i] = static_cast<float>(i % 4) - 1.5f;
    second[i] = static_cast<float>(i / 4) - 1.5f;
  }
  const F16x c0 = Load(first), c1 = Load(second);
  // Dim of position `p` in byte `b` of a word.
  const auto dim_of = [](int b, int p) { return 2 * (b % 2 * 4 + p) + b / 2; };
  for (int g = 0; g < layout.num_groups(); ++g) {
    const int begin = g * layout.group_dims(), end = begin + layout.group_dims();
    // Pairs that share a nibble are two dims apart; no entry is larger than this.
    float top = 1e-30f;
    F16x sum = Set(0.0f);
    for (int d = begin; d < end; d += 4) {
      top = std::max(top, std::max(std::fabs(q[d]) + std::fabs(q[d + 2]),
                                   std::fabs(q[d + 1]) + std::fabs(q[d + 3])));
    }
    for (int d = begin; d < end; d += 16) sum = Add(sum, Load(q + d));
    const float unit = 1.5f * top / kPlaneLimit;
    const bool rest = part == QueryPart::kRemainder;
    out.unit[head][g] = rest ? unit * scale / kFiner : unit * scale;
    out.sums[head][g] = rest ? 0.0f : ReduceSum(sum) * scale;
    // An entry for every two dims, each rounded.
    const float rounded = std::sqrt(static_cast<float>(layout.group_dims()) / 24);
    limits.Add(head, g, ScaleLimit(layout, unit * scale * rounded));
    const F16x inverse = Set(1.0f / unit);
    for (int v = begin / 16; v < end / 16; ++v) {
      for (int n = 0; n < 2; ++n) {
        for (int b = 0; b < 4; ++b) {
          const F16x a0 = Set(q[v * 16 + dim_of(b, 2 * n)]);
          const F16x a1 = Set(q[v * 16 + dim_of(b, 2 * n + 1)]);
          F16x exact = Mul(MulAdd(a1, c1, Mul(a0, c0)), inverse);
          if (rest) exact = Mul(Sub(exact, Round(exact)), Set(kFiner));
          const I16x entry = NearestInt(exact);
          const VI upper = hn::ShiftRight<8>(entry.v[0]);
          _mm_store_si128(reinterpret_cast<__m128i*>(out.lo[head][v][n] + b * 16),
                          _mm512_cvtepi32_epi8(entry.v[0].raw));
          _mm_store_si128(reinterpret_cast<__m128i*>(out.hi[head][v][n] + b * 16),
                          _mm512_cvtepi32_epi8(upper.raw));
        }
      }
    }
  }
}

HWY_INLINE __m512i LookUp(__m512i index, __m512i table) {
  __m512i out;
  asm("vpermb %2, %1, %0" : "=v"(out) : "v"(index), "v"(table));
  return out;
}

// As CodeLogits, for 2 bits.
template <int kHeads>
HWY_INLINE void TableLogits(const BlockLayout& layout, const std::byte* block,
                            const QueryTables& query, QueryPart part, BlockPrefetch& prefetch,
                            float (&logits)[kMaxBlockHeads][kPageTokens]) {
  constexpr int kTiles = 2;
  const int group_vectors = layout.group_dims() / 16, tile_vectors = layout.head_dim() / 16;
  const VI ones{_mm512_set1_epi8(1)};
  const __m512i nibble = _mm512_set1_epi32(0x0f0f0f0f), byte = _mm512_set1_epi32(0x30201000);
  for (int tile = 0; tile < 4; tile += kTiles) {
    F16x sum[kTiles][kHeads];
    for (int g = 0; g < layout.num_groups(); ++g) {
      VI lo[kTiles][kHeads], hi[kTiles][kHeads];
      for (int t = 0; t < kTiles; ++t) {
        for (int h = 0; h < kHeads; ++h) lo[t][h] = hi[t][h] = hn::Zero(DI());
      }
      for (int v = g * group_vectors; v < (g + 1) * group_vectors; ++v) {
        prefetch.Step();
        __m512i words[kTiles];
        for (int t = 0; t < kTiles; ++t) {
          words[t] = _mm512_loadu_si512(block + ((tile + t) * tile_vectors + v) * 64);
        }
        for (int n = 0; n < 2; ++n) {
          __m512i index[kTiles];
          for (int t = 0; t < kTiles; ++t) {
            index[t] = _mm512_ternarylogic_epi32(words[t], nibble, byte, 0xea);  // (a & b) | c
            words[t] = _mm512_srli_epi32(words[t], 4);
          }
          for (int h = 0; h < kHeads; ++h) {
            __m512i table_lo = _mm512_load_si512(query.lo[h][v][n]);
            __m512i table_hi = _mm512_load_si512(query.hi[h][v][n]);
            // One load for both tiles: the compiler would rather load twice, and loads are the
            // limit.
            asm("" : "+v"(table_lo), "+v"(table_hi));
            for (int t = 0; t < kTiles; ++t) {
              lo[t][h] = DotBytes<true>(lo[t][h], VI{LookUp(index[t], table_lo)}, ones);
              hi[t][h] = DotBytes<true>(hi[t][h], ones, VI{LookUp(index[t], table_hi)});
            }
          }
        }
      }
      for (int t = 0; t < kTiles; ++t) {
        const int token = (tile + t) * 16;
        const F16x s = LoadFp16(reinterpret_cast<const uint16_t*>(block + layout.KScale(token, g)));
        const F16x m = LoadFp16(reinterpret_cast<const uint16_t*>(block + layout.KMin(token, g)));
        const F16x middle = MulAdd(s, Set(1.5f), m);
        for (int h = 0; h < kHeads; ++h) {
          const VI dot = hn::Add(hn::ShiftLeft<8>(hi[t][h]), lo[t][h]);
          const F16x steps{{hn::ConvertTo(DF(), dot)}};
          const F16x rest = Mul(middle, Set(query.sums[h][g]));
          const F16x value = MulAdd(Mul(steps, Set(query.unit[h][g])), s, rest);
          if (g > 0) {
            sum[t][h] = Add(sum[t][h], value);
          } else {
            sum[t][h] = part == QueryPart::kRounded ? value : Add(value, Load(logits[h] + token));
          }
        }
      }
    }
    for (int t = 0; t < kTiles; ++t) {
      for (int h = 0; h < kHeads; ++h) Store(sum[t][h], logits[h] + (tile + t) * 16);
    }
  }
}
#endif  // HWY_AVX3

// Lane sums of four accumulators, in the lanes of one 128-bit vector; a third of the steps that
// four separate sums take.
#if HWY_TARGET == HWY_AVX2
HWY_INLINE hn::Vec256<float> FoldSum(const F16x& x) { return hn::Add(x.v[0], x.v[1]); }
HWY_INLINE hn::Vec256<float> FoldMax(const F16x& x) { return hn::Max(x.v[0], x.v[1]); }
#else
HWY_INLINE hn::Vec256<float> FoldSum(const F16x& x) {
  const hn::Full256<float> d8;
  return hn::Add(hn::LowerHalf(d8, x.v[0]), hn::UpperHalf(d8, x.v[0]));
}
HWY_INLINE hn::Vec256<float> FoldMax(const F16x& x) {
  const hn::Full256<float> d8;
  return hn::Max(hn::LowerHalf(d8, x.v[0]), hn::UpperHalf(d8, x.v[0]));
}
#endif

HWY_INLINE hn::Vec128<float> SumFour(const F16x& a, const F16x& b, const F16x& c, const F16x& d) {
  const hn::Full128<float> d4;
  // [a0+a1, a2+a3, b0+b1, b2+b3 | ...], then the same once more.
  const __m256 ab = _mm256_hadd_ps(FoldSum(a).raw, FoldSum(b).raw);
  const __m256 cd = _mm256_hadd_ps(FoldSum(c).raw, FoldSum(d).raw);
  const hn::Vec256<float> all{_mm256_hadd_ps(ab, cd)};
  return hn::Add(hn::LowerHalf(d4, all), hn::UpperHalf(d4, all));
}

#if HWY_TARGET == HWY_AVX3
// Lane sums of sixteen vectors, sum[i] in lane i: 45 steps where four times SumFour takes 76.
HWY_INLINE __m512 SumSixteen(const __m512 (&x)[16]) {
  __m512 eight[8], four[4], two[2];
  OSCAR_UNROLL
  for (int i = 0; i < 8; ++i) {  // 256-bit halves: x[i] below, x[i + 8] above
    eight[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x[i], x[i + 8], 0x44),
                             _mm512_shuffle_f32x4(x[i], x[i + 8], 0xee));
  }
  OSCAR_UNROLL
  for (int i = 0; i < 4; ++i) {  // 128-bit blocks: i, i + 8, i + 4, i + 12
    four[i] = _mm512_add_ps(_mm512_shuffle_f32x4(eight[i], eight[i + 4], 0x88),
                            _mm512_shuffle_f32x4(eight[i], eight[i + 4], 0xdd));
  }
  OSCAR_UNROLL
  for (int i = 0; i < 2; ++i) {
    two[i] = _mm512_add_ps(_mm512_unpacklo_ps(four[i], four[i + 2]),
                           _mm512_unpackhi_ps(four[i], four[i + 2]));
  }
  const __m512 one =
      _mm512_add_ps(_mm512_unpacklo_ps(two[0], two[1]), _mm512_unpackhi_ps(two[0], two[1]));
  // Lanes of a block are i = 0, 1, 2, 3; blocks are 0, 8, 4, 12.
  return _mm512_shuffle_f32x4(one, one, 0xd8);
}
#endif  // HWY_AVX3

HWY_INLINE hn::Vec128<float> MaxFour(const F16x& a, const F16x& b, const F16x& c, const F16x& d) {
  const hn::Full128<float> d4;
  // The pairs that hadd would add.
  const auto pairs = [](__m256 x, __m256 y) HWY_ATTR {
    return _mm256_max_ps(_mm256_shuffle_ps(x, y, 0x88), _mm256_shuffle_ps(x, y, 0xdd));
  };
  const hn::Vec256<float> all{
      pairs(pairs(FoldMax(a).raw, FoldMax(b).raw), pairs(FoldMax(c).raw, FoldMax(d).raw))};
  return hn::Max(hn::LowerHalf(d4, all), hn::UpperHalf(d4, all));
}

// Reductions of one vector a head; the unused lanes repeat head 0.
template <int kHeads>
HWY_INLINE void SumHeads(const F16x (&x)[kHeads], float (&out)[kMaxBlockHeads]) {
  hn::StoreU(SumFour(x[0], x[kHeads > 1 ? 1 : 0], x[kHeads > 2 ? 2 : 0], x[kHeads > 3 ? 3 : 0]),
             hn::Full128<float>(), out);
}
template <int kHeads>
HWY_INLINE void MaxHeads(const F16x (&x)[kHeads], float (&out)[kMaxBlockHeads]) {
  hn::StoreU(MaxFour(x[0], x[kHeads > 1 ? 1 : 0], x[kHeads > 2 ? 2 : 0], x[kHeads > 3 ? 3 : 0]),
             hn::Full128<float>(), out);
}

// The online softmax of one tile of 64 logits for each head, in place: logits become p, alpha the
// factor for what was summed before. `visible` tokens count, the rest get no weight. All heads of a
// block together, so that their long chains overlap. False, and nothing done, where every head's
// page is negligible.
template <int kHeads>
HWY_INLINE bool SoftmaxTiles(float (&logits)[kMaxBlockHeads][kPageTokens], int visible, float* m,
                             float* d, float (&alpha)[kMaxBlockHeads]) {
  F16x largest[kHeads];
  for (int h = 0; h < kHeads; ++h) {
    for (int t = visible; t < kPageTokens; ++t) logits[h][t] = kEmptyMax;
    largest[h] = Max(Max(Load(logits[h]), Load(logits[h] + 16)),
                     Max(Load(logits[h] + 32), Load(logits[h] + 48)));
  }
  float top[kMaxBlockHeads];
  MaxHeads<kHeads>(largest, top);
  bool any = false;
  alignas(64) float change[16] = {};
  for (int h = 0; h < kHeads; ++h) {
    any = any || top[h] > m[h] - kNegligible;
    top[h] = std::max(top[h], m[h]);
    change[h] = m[h] - top[h];
  }
  if (!any) return false;
  Store(Exp2NotAbove0(Load(change)), change);
  F16x sum[kHeads];
  for (int h = 0; h < kHeads; ++h) {
    const F16x shift = Set(top[h]);
    sum[h] = Set(0.0f);
    for (int i = 0; i < kPageTokens; i += 16) {
      const F16x p = Exp2NotAbove0(Sub(Load(logits[h] + i), shift));
      Store(p, logits[h] + i);
      sum[h] = Add(sum[h], p);
    }
  }
  float sums[kMaxBlockHeads];
  SumHeads<kHeads>(sum, sums);
  for (int h = 0; h < kHeads; ++h) {
    alpha[h] = change[h];
    m[h] = top[h];
    d[h] = d[h] * alpha[h] + sums[h];
  }
  return true;
}

// Rounds p s of one page and group into the planes that plane_of(head, 0 = hi or 1 = lo) points to,
// 64 bytes each, in steps of step[head]; every dim gets low[head] besides.
template <int kBits, int kHeads, typename PlaneOf>
HWY_INLINE void RoundToPlanes(const BlockLayout& layout, const std::byte* block, int g,
                              const float (&p)[kMaxBlockHeads][kPageTokens],
                              const PlaneOf& plane_of, float* step, float* low) {
  F16x s[4], mn[4], largest[kHeads], minimum[kHeads];
  for (int i = 0; i < 4; ++i) {
    s[i] = LoadFp16(reinterpret_cast<const uint16_t*>(block + layout.VScale(i * 16, g)));
    mn[i] = LoadFp16(reinterpret_cast<const uint16_t*>(block + layout.VMin(i * 16, g)));
  }
  for (int h = 0; h < kHeads; ++h) {
    largest[h] = minimum[h] = Set(0.0f);
    for (int i = 0; i < 4; ++i) {
      const F16x weight = Load(p[h] + i * 16);
      largest[h] = Max(largest[h], Mul(weight, s[i]));
      minimum[h] = MulAdd(weight, mn[i], minimum[h]);
    }
  }
  float tops[kMaxBlockHeads], lows[kMaxBlockHeads];
  MaxHeads<kHeads>(largest, tops);
  SumHeads<kHeads>(minimum, lows);
  for (int h = 0; h < kHeads; ++h) {
    const float top = std::max(tops[h], 1e-30f);
    step[h] = top / kPlaneLimit;
    low[h] = lows[h];
    const F16x inverse = Set(kPlaneLimit / top);
    for (int i = 0; i < 4; ++i) {
      StorePlanes<kBits>(Mul(Mul(Load(p[h] + i * 16), s[i]), inverse), plane_of(h, 0) + i * 16,
                         plane_of(h, 1) + i * 16);
    }
  }
}

// What CodePage takes of a query.
template <int kBits, bool kVnni>
inline void PrepareCodes(const float* q, const BlockLayout& layout, float scale, int head,
                         QueryPart part, QueryCodes& out) {
#if HWY_TARGET == HWY_AVX3
  if constexpr (kBits == 2 && kVnni) {
    PrepareQueryTables(q, layout, scale, head, part, out.tables, out.limits);
    return;
  }
#endif
  PrepareQuery<kBits>(q, layout, scale, head, part, out);
}

// The logits of a page whose K has kBits bits.
template <int kBits, int kHeads, bool kVnni>
HWY_NOINLINE void CodeKeys(const BlockLayout& layout, const std::byte* block,
                           const QueryCodes& query, QueryPart part, BlockPrefetch& prefetch,
                           float (&logits)[kMaxBlockHeads][kPageTokens]) {
#if HWY_TARGET == HWY_AVX3
  if constexpr (kBits == 2 && kVnni) {
    TableLogits<kHeads>(layout, block, query.tables, part, prefetch, logits);
    return;
  }
#endif
  CodeLogits<kBits, kHeads, kVnni>(layout, block, query, part, prefetch, logits);
}

// o = alpha o + p V of a page whose V has kBits bits.
template <int kBits, int kHeads, bool kVnni>
HWY_NOINLINE void CodeValues(const BlockLayout& layout, const std::byte* block,
                             const float (&p)[kMaxBlockHeads][kPageTokens],
                             const float (&alpha)[kMaxBlockHeads], BlockPrefetch& prefetch,
                             float* o) {
  constexpr int kVectors = kPageTokens * TileCodes::LowBits(kBits) / 32;  // of a tile of 16 dims
  constexpr size_t kTileBytes = static_cast<size_t>(kVectors) * 64;
  const int dims = layout.head_dim();
  for (int g = 0; g < layout.num_groups(); ++g) {
    Planes planes[kHeads];
    float step[kMaxBlockHeads], low[kMaxBlockHeads];
    RoundToPlanes<kBits, kHeads>(
        layout, block, g, p,
        [&](int h, int plane) { return plane == 0 ? planes[h].hi : planes[h].lo; }, step, low);
    const int first = g * layout.group_dims() / 16, end = first + layout.group_dims() / 16;
    for (int tile = first; tile < end; tile += kTilesAtOnce) {
      I16x dots[kTilesAtOnce][kHeads];
      const size_t at = static_cast<size_t>(tile) * kTileBytes;
      DotTiles<kBits, kTilesAtOnce, kHeads, kVnni>(
          {block + layout.v_codes_offset() + at, kTileBytes,
           block + layout.v_high_offset() + at / 2},
          kVectors, planes, 0, prefetch, dots);
      for (int t = 0; t < kTilesAtOnce; ++t) {
        for (int h = 0; h < kHeads; ++h) {
          float* out = o + h * dims + (tile + t) * 16;
          const F16x value = MulAdd(ToFloat(dots[t][h]), Set(step[h]), Set(low[h]));
          Store(MulAdd(Load(out), Set(alpha[h]), value), out);
        }
      }
    }
  }
}

template <int kHeads, bool kVnni>
HWY_NOINLINE void CodePage(const BlockLayout& layout, const std::byte* block, int visible,
                           const std::byte* next, const QueryCodes& query,
                           Remainder<QueryCodes>& remainder, float* m, float* d, float* o) {
  // Steps of K and of V: one per vector and set of tiles.
  const int k_bits = layout.k_bits(), v_bits = layout.v_bits();
  const int steps = layout.head_dim() * (TileCodes::LowBits(k_bits) + TileCodes::LowBits(v_bits)) /
                    8 / kTilesAtOnce;
  const auto lines = static_cast<int>(layout.block_bytes() / 64);
  BlockPrefetch prefetch{next, next == nullptr ? nullptr : next + layout.block_bytes(),
                         (lines + steps - 1) / steps};
  alignas(64) float p[kMaxBlockHeads][kPageTokens];
  const auto keys = k_bits == 2   ? &CodeKeys<2, kHeads, kVnni>
                    : k_bits == 3 ? &CodeKeys<3, kHeads, kVnni>
                                  : &CodeKeys<4, kHeads, kVnni>;
  keys(layout, block, query, QueryPart::kRounded, prefetch, p);
  if (query.limits.Exceeded(layout, block)) {
    keys(layout, block, remainder.Get(layout), QueryPart::kRemainder, prefetch, p);
  }
  float alpha[kMaxBlockHeads];
  if (!SoftmaxTiles<kHeads>(p, visible, m, d, alpha)) return;
  const auto values = v_bits == 2   ? &CodeValues<2, kHeads, kVnni>
                      : v_bits == 3 ? &CodeValues<3, kHeads, kVnni>
                                    : &CodeValues<4, kHeads, kVnni>;
  values(layout, block, p, alpha, prefetch, o);
}

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OSCAR_SIMD_TARGET

#endif  // per-target include guard
