// INT2 decode by tables of 16-bit partial sums (AVX-512BW and VNNI, for processors whose permutes
// of words are single operations: Zen 4 and later). Included once per target.
//
// A dot product of 2-bit codes with numbers q is a sum over bits: bit i of a run of codes adds x_i,
// with x = q[0], 2 q[0], q[1], 2 q[1], ... A word holds 8 codes (16 bits) of one token; five or six
// of its bits at a time select an entry of a table in registers (VPERMW, VPERMI2W), and one
// addition of words counts it: 6 instructions for 8 codes x 32 tokens, where 16-bit multiplies take
// 16. Permutes of words ignore the index bits above what they need, so nothing is masked.
//
//   keys     tables of q, made once a sequence: bits 0-4, 5-9, 10-15 of a word of 8 dims
//   values   tables of p s, made in registers for each page and used on all dims of a group:
//            bits 0-5, 6-11, 12-15 of a word of 8 tokens
//
// Sums wrap modulo 2^16 on the way; what counts is that the sum over a chunk (16 dims, 32 tokens),
// centred on code 3/2, fits. VPDPWSSD then widens it, times the chunk's own unit for keys, so a
// large dim of q coarsens its own chunk alone. For values the rounding of p s has a part common to
// all dims, sum (3/2) (w - step w'), which is known and taken back, so the error is that of codes
// about their mean: at most 5e-4 of a flat page and less of any other.
//
// A page of four heads and 128 dims takes 1040 instructions for keys, 1240 for values, 250 for the
// softmax and 140 to round its weights, all but a few of 512 bits. Zen 4 starts two of those a
// cycle, one of them a permute, and 1335 cycles become 1800 with pages in L2:
// docs/lab/2026-11-16-benchmarks.md has what was measured and what was tried.
#if defined(OSCAR_SIMD_ATTENTION_WORDS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OSCAR_SIMD_ATTENTION_WORDS_INL_H_
#undef OSCAR_SIMD_ATTENTION_WORDS_INL_H_
#else
#define OSCAR_SIMD_ATTENTION_WORDS_INL_H_
#endif

#include <type_traits>

#include "simd/attention_codes-inl.h"

#if HWY_TARGET == HWY_AVX3
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {

// Keeps the compiler from moving loads across: it would begin a dozen steps at once and spill.
#define OSCAR_IN_ORDER() asm volatile("" : : : "memory")

// Largest centred sum of a chunk, short of 2^15 by what rounding its terms can add.
inline constexpr float kWordLimit = 32700.0f;
// 1.5 2^23: the last bit of a sum with it is 1, so its low word is the number rounded.
inline constexpr float kMagic = 12582912.0f;
inline constexpr int kChunkDims = 16;    // of keys: one vector of codes
inline constexpr int kChunkTokens = 32;  // of values
// The reference of the softmax may fall this far (in powers of two) below a page's largest logit
// before it and everything summed so far are brought up: rarely, and never waited for.
inline constexpr float kSlack = 8.0f;

// Token `n` of a half: halves are the even and the odd tokens of 16, twice.
constexpr int HalfToken(int half, int n) { return half / 2 * 16 + n * 2 + half % 2; }

// Which words go where.
struct WordOrder {
  alignas(64) uint16_t low[32];          // the low halves of 32 lanes
  alignas(64) uint16_t quarters[3][32];  // [table]: tokens a, from the words of two chunks
  alignas(64) uint16_t second[2][32];    // [half / 2]: tokens b of four rows
  alignas(64) uint16_t third[2][32];     // [half / 2]: tokens c
  alignas(64) uint16_t singles[32];      // from the words of two chunks
  alignas(64) uint16_t row[2][2][32];    // [half % 2][table]: row entries of a table's entries
};
inline constexpr WordOrder kWordOrder = [] {
  WordOrder order{};
  for (int i = 0; i < 32; ++i) {
    order.low[i] = static_cast<uint16_t>(2 * i);
    constexpr int kSingle[4] = {2, 5, 7, 7};
    order.singles[i] =
        static_cast<uint16_t>(i / 16 * kChunkTokens + HalfToken(i / 4 % 4, kSingle[i % 4]));
    for (int t = 0; t < 3; ++t) {
      order.quarters[t][i] =
          static_cast<uint16_t>(i / 16 * kChunkTokens + HalfToken(i / 4 % 4, t * 3));
    }
    for (int k = 0; k < 2; ++k) {
      const int half = 2 * k + i / 16, table = i / 8 % 2;
      order.second[k][i] = static_cast<uint16_t>(HalfToken(half, table * 3 + 1));
      order.third[k][i] = static_cast<uint16_t>(HalfToken(half, table * 3 + 2));
      for (int t = 0; t < 2; ++t)
        order.row[k][t][i] = static_cast<uint16_t>(16 * k + 8 * t + i / 4);
    }
  }
  return order;
}();

// Fetches blocks to come into L2, a few lines at each step; L1 is full of tables. May reach a few
// lines past the end.
struct PagesPrefetch {
  const std::byte* at;
  const std::byte* end;

  HWY_INLINE void Step() {
    if (at >= end) return;
    OSCAR_UNROLL
    for (int i = 0; i < 5; ++i) __builtin_prefetch(at + i * 64, 0, 2);
    at += 5 * 64;
  }
};

struct WordQuery {
  // [16 dims][even, odd dims][bits 0-4, 5-9, 10-14, 10-14 with bit 15 set][head][entry], in the
  // order of use.
  alignas(64) int16_t tables[kMaxPageDims / 16][2][4][kMaxBlockHeads][32];
  // Of a chunk's unit, in unit[group]: as the low word of a lane, and as the high one.
  int32_t weight[2][kMaxBlockHeads][kMaxPageDims / kChunkDims];
  float unit[kMaxBlockHeads][kMaxPageGroups];  // times softmax scale and log2 e
  float sums[kMaxBlockHeads][kMaxPageGroups];  // of q, times softmax scale and log2 e
  ScaleLimits limits;
};

inline void PrepareWordQuery(const float* q, const BlockLayout& layout, float scale, int head,
                             QueryPart part, WordQuery& out) {
  // Units are multiples of one: enough times that for the multiple to fit well; not more than lets
  // 16 chunks of 2^15 x 2^11 stay within 32 bits.
  constexpr float kLeast = 1.0f / 8, kFinest = 1.0f / 2048;
  // Half a unit at most is left of each of a chunk's six entries.
  constexpr float kFiner = 8192.0f;
  const bool rest = part == QueryPart::kRemainder;
  constexpr __mmask16 kSet[4] = {0xaaaa, 0xcccc, 0xf0f0, 0xff00};  // lanes whose number has bit b
  __m512 signs[4];
  for (int b = 0; b < 4; ++b) {
    signs[b] = _mm512_mask_blend_ps(kSet[b], _mm512_set1_ps(-1.0f), _mm512_set1_ps(1.0f));
  }
  const __m512i low_words = _mm512_load_si512(kWordOrder.low);
  for (int g = 0; g < layout.num_groups(); ++g) {
    const int begin = g * layout.group_dims(), chunks = layout.group_dims() / kChunkDims;
    // One lane a chunk, as many as are in a group of 256.
    __m512 sum = _mm512_setzero_ps(), absolute[16];
    OSCAR_UNROLL
    for (int c = 0; c < 16; ++c) {
      absolute[c] = _mm512_setzero_ps();
      if (c >= chunks) continue;
      const __m512 dims = _mm512_loadu_ps(q + begin + c * kChunkDims);
      sum = _mm512_add_ps(sum, dims);
      absolute[c] = _mm512_abs_ps(dims);
    }
    const auto used = static_cast<__mmask16>((1u << chunks) - 1);
    const __m512 bound = _mm512_mul_ps(SumSixteen(absolute), _mm512_set1_ps(1.5f));
    const float lowest = _mm512_mask_reduce_min_ps(used, bound);
    const float highest = std::max(_mm512_mask_reduce_max_ps(used, bound), 1e-30f);
    const float unit = std::max(lowest * kLeast, highest * kFinest) / kWordLimit;
    out.unit[head][g] = rest ? unit * scale / kFiner : unit * scale;
    out.sums[head][g] = rest ? 0.0f : ReduceSum(F16x{{VF{sum}}}) * scale;
    const __m512 multiple =
        _mm512_max_ps(_mm512_set1_ps(1.0f),
                      _mm512_roundscale_ps(_mm512_div_ps(bound, _mm512_set1_ps(unit * kWordLimit)),
                                           _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC));
    const float multiples =
        std::sqrt(_mm512_mask_reduce_add_ps(used, _mm512_mul_ps(multiple, multiple)));
    // Six entries a chunk, each rounded.
    out.limits.Add(head, g, ScaleLimit(layout, unit * scale * multiples * 0.7071f));
    alignas(64) float halves[16];  // of a chunk's unit
    _mm512_store_ps(halves, _mm512_div_ps(_mm512_set1_ps(0.5f / unit), multiple));
    const __m512i weight = _mm512_cvtps_epi32(multiple);
    const int first_chunk = begin / kChunkDims;
    _mm512_mask_storeu_epi32(out.weight[0][head] + first_chunk, used, weight);
    _mm512_mask_storeu_epi32(out.weight[1][head] + first_chunk, used,
                             _mm512_slli_epi32(weight, 16));
    // The weight of half a bit: dims of the same parity, once and twice. All of them first, since
    // the tables load them one by one.
    alignas(64) float half_bits[16][2][16];
    for (int c = 0; c < chunks; ++c) {
      const __m512 once =
          _mm512_mul_ps(_mm512_loadu_ps(q + begin + c * kChunkDims), _mm512_set1_ps(halves[c]));
      const __m512 x = _mm512_moveldup_ps(once), y = _mm512_movehdup_ps(once);
      _mm512_store_ps(half_bits[c][0], _mm512_mask_add_ps(x, kSet[0], x, x));
      _mm512_store_ps(half_bits[c][1], _mm512_mask_add_ps(y, kSet[0], y, y));
    }
    for (int c = 0; c < 2 * chunks; ++c) {
      const float(&x)[16] = half_bits[c / 2][c % 2];
      OSCAR_UNROLL
      for (int t = 0; t < 3; ++t) {
        // Entries of four bits: -x or +x for each bit of the entry's number.
        const float* bits = x + t * 5;
        __m512 four = _mm512_mul_ps(signs[0], _mm512_set1_ps(bits[0]));
        OSCAR_UNROLL
        for (int b = 1; b < 4; ++b) {
          four = _mm512_fmadd_ps(signs[b], _mm512_set1_ps(bits[b]), four);
        }
        const auto round = [&](__m512 exact) HWY_ATTR {
          const __m512 magic = _mm512_set1_ps(kMagic);
          const __m512 rounded = _mm512_add_ps(exact, magic);
          if (!rest) return rounded;
          const __m512 left = _mm512_sub_ps(exact, _mm512_sub_ps(rounded, magic));
          return _mm512_fmadd_ps(left, _mm512_set1_ps(kFiner), magic);
        };
        const auto store = [&](int table, __m512 others) HWY_ATTR {
          const __m512 fifth = _mm512_set1_ps(bits[4]);
          const __m512 lower = round(_mm512_sub_ps(others, fifth));
          const __m512 upper = round(_mm512_add_ps(others, fifth));
          _mm512_store_si512(out.tables[first_chunk + c / 2][c % 2][table][head],
                             _mm512_permutex2var_epi16(_mm512_castps_si512(lower), low_words,
                                                       _mm512_castps_si512(upper)));
        };
        if (t < 2) {
          store(t, four);
        } else {
          store(2, _mm512_sub_ps(four, _mm512_set1_ps(x[15])));
          store(3, _mm512_add_ps(four, _mm512_set1_ps(x[15])));
        }
      }
    }
  }
}

// Words of two tiles: word 2 i of the result is half kHalf of a's lane i, word 2 i + 1 that of b's.
// Without a permute: what look-ups wait for is the two pipes that permute.
template <int kHalf>
HWY_INLINE __m512i MergeWords(__m512i a, __m512i b) {
  constexpr __mmask32 kOdd = 0xaaaaaaaa;
  return kHalf == 0 ? _mm512_mask_blend_epi16(kOdd, a, _mm512_slli_epi32(b, 16))
                    : _mm512_mask_blend_epi16(kOdd, _mm512_srli_epi32(a, 16), b);
}

HWY_INLINE __m512i AddProducts(__m512i sum, __m512i a, __m512i b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}
// The same pair of words b for every lane.
HWY_INLINE void AddProducts(__m512i& sum, __m512i a, const int32_t& b) {
  asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(a), "m"(b));
}

// sum += table[index], four times over: four permutes, then four additions, as one block. Order
// matters twice. Left to itself the compiler keeps a dozen entries to add later, and spills; and a
// processor that deals instructions out to two schedulers leaves ports idle when permutes and
// additions take turns (5 cycles for four of each on Zen 4, against 3.9).
HWY_INLINE void AddEntries(__m512i& s0, __m512i& s1, __m512i& s2, __m512i& s3, __m512i t0,
                           __m512i t1, __m512i t2, __m512i t3, __m512i i0, __m512i i1, __m512i i2,
                           __m512i i3) {
  asm("vpermw %4, %8, %4\n\tvpermw %5, %9, %5\n\tvpermw %6, %10, %6\n\tvpermw %7, %11, %7\n\t"
      "vpaddw %4, %0, %0\n\tvpaddw %5, %1, %1\n\tvpaddw %6, %2, %2\n\tvpaddw %7, %3, %3"
      : "+v"(s0), "+v"(s1), "+v"(s2), "+v"(s3), "+&v"(t0), "+&v"(t1), "+&v"(t2), "+&v"(t3)
      : "v"(i0), "v"(i1), "v"(i2), "v"(i3));
}
// The same with 64 entries, the upper 32 in u (registers or memory).
template <typename Upper>
HWY_INLINE void AddLongEntries(__m512i& s0, __m512i& s1, __m512i& s2, __m512i& s3, __m512i t0,
                               __m512i t1, __m512i t2, __m512i t3, const Upper& u01,
                               const Upper& u23, __m512i i0, __m512i i1, __m512i i2, __m512i i3) {
#define OSCAR_LONG_ENTRIES(constraint)                                                     \
  asm("vpermt2w %8, %10, %4\n\tvpermt2w %8, %11, %5\n\tvpermt2w %9, %12, %6\n\t"           \
      "vpermt2w %9, %13, %7\n\t"                                                           \
      "vpaddw %4, %0, %0\n\tvpaddw %5, %1, %1\n\tvpaddw %6, %2, %2\n\tvpaddw %7, %3, %3"   \
      : "+v"(s0), "+v"(s1), "+v"(s2), "+v"(s3), "+&v"(t0), "+&v"(t1), "+&v"(t2), "+&v"(t3) \
      : constraint(u01), constraint(u23), "v"(i0), "v"(i1), "v"(i2), "v"(i3))
  if constexpr (std::is_same_v<Upper, __m512i>) {
    OSCAR_LONG_ENTRIES("v");
  } else {
    OSCAR_LONG_ENTRIES("m");
  }
#undef OSCAR_LONG_ENTRIES
}
HWY_INLINE void AddEntry(__m512i& sum, __m512i table, __m512i index) {
  asm("vpermw %1, %2, %1\n\tvpaddw %1, %0, %0" : "+v"(sum), "+&v"(table) : "v"(index));
}
HWY_INLINE void AddLongEntry(__m512i& sum, __m512i table, __m512i upper, __m512i index) {
  asm("vpermt2w %2, %3, %1\n\tvpaddw %1, %0, %0"
      : "+v"(sum), "+&v"(table)
      : "v"(upper), "v"(index));
}

// Looks up both vectors of tokens for one or two heads; `kFirst` begins their sums.
template <int kCount, int kHeads>
HWY_INLINE void AddKeys(bool first, int t, int h, const int16_t (&tables)[4][kMaxBlockHeads][32],
                        const __m512i (&index)[2], __m512i (&acc)[kHeads][2]) {
  __m512i ta = _mm512_load_si512(tables[t][h]);
  if constexpr (kCount == 2) {
    __m512i tb = _mm512_load_si512(tables[t][h + 1]);
    if (first) {
      asm("" : "+v"(ta), "+v"(tb));  // one load for two look-ups: 64 bytes are all a cycle has
      acc[h][0] = _mm512_permutexvar_epi16(index[0], ta);
      acc[h][1] = _mm512_permutexvar_epi16(index[1], ta);
      acc[h + 1][0] = _mm512_permutexvar_epi16(index[0], tb);
      acc[h + 1][1] = _mm512_permutexvar_epi16(index[1], tb);
    } else if (t < 2) {
      AddEntries(acc[h][0], acc[h][1], acc[h + 1][0], acc[h + 1][1], ta, ta, tb, tb, index[0],
                 index[1], index[0], index[1]);
    } else {
      AddLongEntries(acc[h][0], acc[h][1], acc[h + 1][0], acc[h + 1][1], ta, ta, tb, tb,
                     tables[3][h], tables[3][h + 1], index[0], index[1], index[0], index[1]);
    }
  } else {
    OSCAR_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (first) {
        acc[h][i] = _mm512_permutexvar_epi16(index[i], ta);
      } else if (t < 2) {
        AddEntry(acc[h][i], ta, index[i]);
      } else {
        AddLongEntry(acc[h][i], ta, _mm512_load_si512(tables[3][h]), index[i]);
      }
    }
  }
}

// As CodeLogits, for 2 bits; the rounded form less reference[head]. Every sum stays in a register:
// stores of chunks, 4 KiB per page, would share their low 12 address bits with the loads of tables,
// which then wait for them on Zen 4 (180 cycles per page).
template <int kHeads>
HWY_NOINLINE void WordLogits(const BlockLayout& layout, const std::byte* HWY_RESTRICT block,
                             const WordQuery& query, QueryPart part, const float* reference,
                             PagesPrefetch& prefetch,
                             float (&logits)[kMaxBlockHeads][kPageTokens]) {
  const size_t tile_bytes = layout.k_tile_bytes();
  const int group_chunks = layout.group_dims() / kChunkDims;
  for (int g = 0; g < layout.num_groups(); ++g) {
    __m512i sum[kHeads][4];  // of words times their chunk's unit, by tile of 16 tokens
    OSCAR_UNROLL
    for (int h = 0; h < kHeads; ++h) {
      OSCAR_UNROLL
      for (int t = 0; t < 4; ++t) sum[h][t] = _mm512_setzero_si512();
    }
    for (int chunk = g * group_chunks; chunk < (g + 1) * group_chunks; ++chunk) {
      prefetch.Step();
      const std::byte* words = block + chunk * 64;
      __m512i acc[kHeads][2];
      OSCAR_UNROLL
      for (int o = 0; o < 2; ++o) {
        const auto& tables = query.tables[chunk][o];
        __m512i index[2];
        OSCAR_UNROLL
        for (int i = 0; i < 2; ++i) {
          const std::byte* at = words + static_cast<size_t>(2 * i) * tile_bytes;
          const __m512i a = _mm512_loadu_si512(at), b = _mm512_loadu_si512(at + tile_bytes);
          index[i] = o == 0 ? MergeWords<0>(a, b) : MergeWords<1>(a, b);
        }
        OSCAR_UNROLL
        for (int t = 0; t < 3; ++t) {
          OSCAR_UNROLL
          for (int h = 0; h < kHeads; h += 2) {
            OSCAR_IN_ORDER();
            if (h + 1 == kHeads) {
              AddKeys<1>(o == 0 && t == 0, t, h, tables, index, acc);
            } else {
              AddKeys<2>(o == 0 && t == 0, t, h, tables, index, acc);
            }
          }
          if (t < 2) {
            OSCAR_UNROLL
            for (int i = 0; i < 2; ++i) index[i] = _mm512_srli_epi16(index[i], 5);
          }
        }
      }
      OSCAR_UNROLL
      for (int h = 0; h < kHeads; ++h) {
        OSCAR_UNROLL
        for (int t = 0; t < 4; ++t) {
          AddProducts(sum[h][t], acc[h][t / 2], query.weight[t % 2][h][chunk]);
        }
      }
    }
    const auto* scale = reinterpret_cast<const uint16_t*>(block + layout.KScale(0, g));
    const auto* min = reinterpret_cast<const uint16_t*>(block + layout.KMin(0, g));
    OSCAR_UNROLL
    for (int t = 0; t < 4; ++t) {
      OSCAR_IN_ORDER();
      const F16x s = LoadFp16(scale + t * 16);
      const F16x middle = MulAdd(s, Set(1.5f), LoadFp16(min + t * 16));
      OSCAR_UNROLL
      for (int h = 0; h < kHeads; ++h) {
        const F16x steps{{hn::ConvertTo(DF(), VI{sum[h][t]})}};
        const bool begins = g == 0 && part == QueryPart::kRounded;
        const F16x before = begins ? Set(-reference[h]) : Load(logits[h] + t * 16);
        const F16x rest = MulAdd(middle, Set(query.sums[h][g]), before);
        Store(MulAdd(steps, Mul(s, Set(query.unit[h][g])), rest), logits[h] + t * 16);
      }
    }
  }
}

// What one page and group of dims needs to be summed. A table of the tokens a, b, c (six bits, or
// four without c) is made as it is used: entry[a + 4 b + 16 c] = quarter[a] + row[b + 4 (c % 2)],
// and twice c's weight more where c is 2 or 3.
//
// On Zen 4 a load waits for an earlier store whose address has the same low 12 bits, so what values
// load and what they store share a page of memory: V took 730 to 980 cycles by where it lay.
struct alignas(4096) WordWeights {
  alignas(64) uint16_t quarters[kMaxBlockHeads][3][2][4][4];  // [table][chunk][half]
  alignas(64) uint16_t rows[kMaxBlockHeads][2][2][2][2][8];   // [chunk][half / 2, % 2][table]
  // [chunk][half]: twice the weights of tokens 2 and 5, the weight of token 7.
  alignas(64) uint16_t singles[kMaxBlockHeads][2][4][4];
  alignas(64) int16_t sums[kMaxBlockHeads][4][32];  // of the first chunk, while values are added
  alignas(16) int16_t centre[2][kMaxBlockHeads];    // of a chunk: -3/2 of all its steps
  alignas(16) float step[kMaxBlockHeads];
  alignas(16) float inverse[kMaxBlockHeads];
  alignas(64) float ps[kMaxBlockHeads][kPageTokens];  // p s, to be rounded to multiples of `step`
};

// Tokens 3 kTable, 3 kTable + 1, ... (two or three of them) of half kHalf of a chunk: one table a
// head, looked up for all dims.
template <int kHeads, int kVectors, int kHalf, int kTable>
HWY_INLINE void AddValueTable(const WordWeights& weights, int chunk,
                              const __m512i (&index)[kVectors], __m512i (&acc)[kHeads][kVectors]) {
  const __m512i row_order = _mm512_load_si512(kWordOrder.row[kHalf % 2][kTable % 2]);
  // The second token's code in an entry's number.
  const __m256i second_code =
      _mm256_set_epi64x(0x0003000300030003, 0x0002000200020002, 0x0001000100010001, 0);
  OSCAR_UNROLL
  for (int h = 0; h < kHeads; ++h) {
    OSCAR_IN_ORDER();
    int64_t quarter;
    std::memcpy(&quarter, weights.quarters[h][kTable][chunk][kHalf], sizeof(quarter));
    const auto single = static_cast<int16_t>(weights.singles[h][chunk][kHalf][kTable]);
    __m512i table, upper;
    if constexpr (kTable < 2) {
      table =
          _mm512_add_epi16(_mm512_set1_epi64(quarter),
                           _mm512_permutexvar_epi16(
                               row_order, _mm512_load_si512(weights.rows[h][chunk][kHalf / 2])));
      upper = _mm512_add_epi16(table, _mm512_set1_epi16(single));
    } else {
      table = _mm512_castsi256_si512(_mm256_add_epi16(
          _mm256_set1_epi64x(quarter), _mm256_mullo_epi16(_mm256_set1_epi16(single), second_code)));
      upper = table;
    }
    __m512i(&sum)[kVectors] = acc[h];
    if constexpr (kVectors == 4) {
      if constexpr (kTable < 2) {
        AddLongEntries(sum[0], sum[1], sum[2], sum[3], table, table, table, table, upper, upper,
                       index[0], index[1], index[2], index[3]);
      } else {
        AddEntries(sum[0], sum[1], sum[2], sum[3], table, table, table, table, index[0], index[1],
                   index[2], index[3]);
      }
    } else {
      OSCAR_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        if constexpr (kTable < 2) {
          AddLongEntry(sum[i], table, upper, index[i]);
        } else {
          AddEntry(sum[i], table, index[i]);
        }
      }
    }
  }
}

template <int kHeads, int kVectors, int kHalf>
HWY_INLINE void AddValueHalf(const std::byte* HWY_RESTRICT codes, const WordWeights& weights,
                             int chunk, PagesPrefetch& prefetch, __m512i (&acc)[kHeads][kVectors]) {
  constexpr size_t kTileBytes = kPageTokens * 16 / 4;
  prefetch.Step();
  const std::byte* words = codes + (chunk * 2 + kHalf / 2) * 64;
  __m512i index[kVectors];
  OSCAR_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    const std::byte* at = words + static_cast<size_t>(2 * i) * kTileBytes;
    index[i] = MergeWords<kHalf % 2>(_mm512_loadu_si512(at), _mm512_loadu_si512(at + kTileBytes));
  }
  AddValueTable<kHeads, kVectors, kHalf, 0>(weights, chunk, index, acc);
  OSCAR_UNROLL
  for (int i = 0; i < kVectors; ++i) index[i] = _mm512_srli_epi16(index[i], 6);
  AddValueTable<kHeads, kVectors, kHalf, 1>(weights, chunk, index, acc);
  OSCAR_UNROLL
  for (int i = 0; i < kVectors; ++i) index[i] = _mm512_srli_epi16(index[i], 6);
  AddValueTable<kHeads, kVectors, kHalf, 2>(weights, chunk, index, acc);
}

// o[h, :] += step[h] (sum over tokens of w[h, t] (code[t, :] - 3/2)) for kVectors x 32 dims; codes
// and o begin at the first of them.
template <int kHeads, int kVectors>
HWY_NOINLINE void WordValues(const std::byte* HWY_RESTRICT codes, int dims, WordWeights& weights,
                             PagesPrefetch& prefetch, float* HWY_RESTRICT o) {
  for (int chunk = 0; chunk < 2; ++chunk) {
    __m512i acc[kHeads][kVectors];
    OSCAR_UNROLL
    for (int h = 0; h < kHeads; ++h) {
      OSCAR_UNROLL
      for (int i = 0; i < kVectors; ++i) acc[h][i] = _mm512_set1_epi16(weights.centre[chunk][h]);
    }
    AddValueHalf<kHeads, kVectors, 0>(codes, weights, chunk, prefetch, acc);
    AddValueHalf<kHeads, kVectors, 1>(codes, weights, chunk, prefetch, acc);
    AddValueHalf<kHeads, kVectors, 2>(codes, weights, chunk, prefetch, acc);
    AddValueHalf<kHeads, kVectors, 3>(codes, weights, chunk, prefetch, acc);
    if (chunk == 0) {
      OSCAR_UNROLL
      for (int h = 0; h < kHeads; ++h) {
        OSCAR_UNROLL
        for (int i = 0; i < kVectors; ++i) _mm512_store_si512(weights.sums[h][i], acc[h][i]);
      }
      continue;
    }
    const __m512i low = _mm512_set1_epi32(1), high = _mm512_set1_epi32(0x10000);
    OSCAR_UNROLL
    for (int h = 0; h < kHeads; ++h) {
      const VF step = hn::Set(DF(), weights.step[h]);
      OSCAR_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        const __m512i other = _mm512_load_si512(weights.sums[h][i]);
        OSCAR_UNROLL
        for (int part = 0; part < 2; ++part) {
          const __m512i one = part == 0 ? low : high;
          const __m512i dot = AddProducts(_mm512_madd_epi16(other, one), acc[h][i], one);
          float* out = o + h * dims + i * 32 + part * 16;
          hn::StoreU(hn::MulAdd(hn::ConvertTo(DF(), VI{dot}), step, hn::LoadU(DF(), out)), DF(),
                     out);
        }
      }
    }
  }
}

// 2^x to 7.5e-5.
HWY_INLINE __m512 Exp2(__m512 x) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, whole);
  // Minimax on [-1/2, 1/2].
  __m512 p = _mm512_set1_ps(0.05517167f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.24261113f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.69326097f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.99992806f));
  return _mm512_scalef_ps(p, whole);
}

// The running softmax of a run of pages, in lanes: nothing that a page adds is summed over lanes
// before the run ends.
struct WordState {
  alignas(64) float d[kMaxBlockHeads][16];
  // Added to every dim of a group: lanes of a head, and (`centre`) one lane a head.
  alignas(64) float low[kMaxPageGroups][kMaxBlockHeads][16];
  alignas(16) float centre[kMaxPageGroups][kMaxBlockHeads];
  float reference[kMaxBlockHeads];  // what logits are relative to: m, or 0 before the first page
  float* o;                         // [heads, D]
};

// Brings the reference of every head up to the page's largest logit, and all that was summed with
// it.
template <int kHeads>
HWY_NOINLINE void RaiseReference(int dims, int groups, bool first,
                                 float (&logits)[kMaxBlockHeads][kPageTokens], WordState& state) {
  for (int h = 0; h < kHeads; ++h) {
    const F16x top = Max(Max(Load(logits[h]), Load(logits[h] + 16)),
                         Max(Load(logits[h] + 32), Load(logits[h] + 48)));
    const float largest = ReduceMax(top), rise = first ? largest : std::max(largest, 0.0f);
    const F16x factor = Set(std::exp2(-rise));
    state.reference[h] += rise;
    for (int t = 0; t < kPageTokens; t += 16) {
      Store(Sub(Load(logits[h] + t), Set(rise)), logits[h] + t);
    }
    if (first) continue;  // nothing was summed yet
    Store(Mul(Load(state.d[h]), factor), state.d[h]);
    for (int g = 0; g < groups; ++g) {
      Store(Mul(Load(state.low[g][h]), factor), state.low[g][h]);
      state.centre[g][h] *= std::exp2(-rise);
    }
    for (int i = h * dims; i < (h + 1) * dims; i += 16) {
      Store(Mul(Load(state.o + i), factor), state.o + i);
    }
  }
}

// Lane sums of eight vectors: those of x[0..3], then of x[4..7].
HWY_INLINE void SumEight(const __m512 (&x)[8], __m128& low, __m128& high) {
  __m512 four[4], two[2];
  OSCAR_UNROLL
  for (int i = 0; i < 4; ++i) {  // 256-bit halves: x[i] below, x[i + 4] above
    four[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x[i], x[i + 4], 0x44),
                            _mm512_shuffle_f32x4(x[i], x[i + 4], 0xee));
  }
  OSCAR_UNROLL
  for (int i = 0; i < 2; ++i) {
    two[i] = _mm512_add_ps(_mm512_unpacklo_ps(four[i], four[i + 2]),
                           _mm512_unpackhi_ps(four[i], four[i + 2]));
  }
  const __m512 one =
      _mm512_add_ps(_mm512_unpacklo_ps(two[0], two[1]), _mm512_unpackhi_ps(two[0], two[1]));
  low = _mm_add_ps(_mm512_castps512_ps128(one), _mm512_extractf32x4_ps(one, 1));
  high = _mm_add_ps(_mm512_extractf32x4_ps(one, 2), _mm512_extractf32x4_ps(one, 3));
}

// Chooses the step from the sums of p s over chunks, in lanes: four heads, twice.
HWY_INLINE void ChooseSteps(const __m512 (&chunks)[8], int g, WordState& state, WordWeights& out) {
  __m128 chunk0, chunk1;
  SumEight(chunks, chunk0, chunk1);
  const __m128 top = _mm_max_ps(_mm_max_ps(chunk0, chunk1), _mm_set1_ps(1e-30f));
  const __m128 inverse = _mm_div_ps(_mm_set1_ps(kWordLimit / 1.5f), top);
  const __m128 step = _mm_mul_ps(top, _mm_set1_ps(1.5f / kWordLimit));
  const __m128 centre = _mm_mul_ps(inverse, _mm_set1_ps(-1.5f));
  const __m128i centre0 = _mm_cvtps_epi32(_mm_mul_ps(chunk0, centre));
  const __m128i centre1 = _mm_cvtps_epi32(_mm_mul_ps(chunk1, centre));
  _mm_store_si128(reinterpret_cast<__m128i*>(out.centre[0]), _mm_packs_epi32(centre0, centre1));
  _mm_store_ps(out.step, step);
  _mm_store_ps(out.inverse, inverse);
  // Whatever the centres, and (RoundWeights) the rounded weights, add to all dims is taken back.
  _mm_store_ps(state.centre[g], _mm_fnmadd_ps(_mm_cvtepi32_ps(_mm_add_epi32(centre0, centre1)),
                                              step, _mm_load_ps(state.centre[g])));
}

// p s of one page and group; p is what `weight_of` makes of `from`.
template <int kHeads, typename WeightOf>
HWY_INLINE void ScaleWeights(const BlockLayout& layout, const std::byte* block, int g,
                             const float (&from)[kMaxBlockHeads][kPageTokens], WordState& state,
                             WordWeights& out, const WeightOf& weight_of) {
  const auto* scale = reinterpret_cast<const uint16_t*>(block + layout.VScale(0, g));
  const auto* min = reinterpret_cast<const uint16_t*>(block + layout.VMin(0, g));
  __m512 s[4], middle[4];
  OSCAR_UNROLL
  for (int i = 0; i < 4; ++i) {
    s[i] = LoadFp16(scale + i * 16).v[0].raw;
    middle[i] = _mm512_fmadd_ps(s[i], _mm512_set1_ps(1.5f), LoadFp16(min + i * 16).v[0].raw);
  }
  __m512 chunks[8];
  OSCAR_UNROLL
  for (int h = 0; h < 4; ++h) {
    if (h >= kHeads) {
      chunks[h] = chunks[4 + h] = chunks[0];
      continue;
    }
    OSCAR_IN_ORDER();
    __m512 p[4], ps[4];
    OSCAR_UNROLL
    for (int i = 0; i < 4; ++i) p[i] = weight_of(_mm512_load_ps(from[h] + i * 16));
    OSCAR_UNROLL
    for (int i = 0; i < 4; ++i) {
      ps[i] = _mm512_mul_ps(p[i], s[i]);
      _mm512_store_ps(out.ps[h] + i * 16, ps[i]);
    }
    chunks[h] = _mm512_add_ps(ps[0], ps[1]);
    chunks[4 + h] = _mm512_add_ps(ps[2], ps[3]);
    __m512 low = _mm512_load_ps(state.low[g][h]);
    OSCAR_UNROLL
    for (int i = 0; i < 4; ++i) low = _mm512_fmadd_ps(p[i], middle[i], low);
    _mm512_store_ps(state.low[g][h], low);
    if (g == 0) {
      const __m512 sum = _mm512_add_ps(_mm512_add_ps(p[0], p[1]), _mm512_add_ps(p[2], p[3]));
      _mm512_store_ps(state.d[h], _mm512_add_ps(_mm512_load_ps(state.d[h]), sum));
    }
  }
  ChooseSteps(chunks, g, state, out);
}

// Weights of one page for group 0, from its logits; with more groups p = 2^logit takes the place of
// those. False where the page is negligible.
template <int kHeads>
HWY_NOINLINE bool WordSoftmax(const BlockLayout& layout, const std::byte* block,
                              float (&logits)[kMaxBlockHeads][kPageTokens], WordState& state,
                              WordWeights& out) {
  __mmask16 counts = 0, above = 0;
  OSCAR_UNROLL
  for (int h = 0; h < kHeads; ++h) {
    const __m512 top = _mm512_max_ps(
        _mm512_max_ps(_mm512_load_ps(logits[h]), _mm512_load_ps(logits[h] + 16)),
        _mm512_max_ps(_mm512_load_ps(logits[h] + 32), _mm512_load_ps(logits[h] + 48)));
    counts |= _mm512_cmp_ps_mask(top, _mm512_set1_ps(-kNegligible), _CMP_GT_OQ);
    above |= _mm512_cmp_ps_mask(top, _mm512_set1_ps(kSlack), _CMP_GT_OQ);
  }
  if (counts == 0) return false;
  const int groups = layout.num_groups();
  if (above != 0) RaiseReference<kHeads>(layout.head_dim(), groups, false, logits, state);
  ScaleWeights<kHeads>(layout, block, 0, logits, state, out,
                       [](__m512 x) HWY_ATTR { return Exp2(x); });
  if (groups == 1) return true;
  for (int h = 0; h < kHeads; ++h) {
    for (int i = 0; i < kPageTokens; i += 16) {
      _mm512_store_ps(logits[h] + i, Exp2(_mm512_load_ps(logits[h] + i)));
    }
  }
  return true;
}

// Rounds them into words and lays out what tables are made of.
template <int kHeads>
HWY_NOINLINE void RoundWeights(int g, WordState& state, WordWeights& out) {
  constexpr __mmask32 kUpperFour = 0xf0f0f0f0, kLowerTwo = 0x33333333;
  const __m512i codes = _mm512_set1_epi64(0x0003000200010000);
  const __m512i ones = _mm512_set1_epi16(1);
  OSCAR_UNROLL
  for (int h = 0; h < kHeads; ++h) {
    const __m512 factor = _mm512_set1_ps(out.inverse[h]);
    __m512i words[2];
    OSCAR_UNROLL
    for (int c = 0; c < 2; ++c) {
      __m512i part[2];
      OSCAR_UNROLL
      for (int i = 0; i < 2; ++i) {
        part[i] = _mm512_castps_si512(_mm512_fmadd_ps(_mm512_load_ps(out.ps[h] + (2 * c + i) * 16),
                                                      factor, _mm512_set1_ps(kMagic)));
      }
      words[c] = _mm512_permutex2var_epi16(part[0], _mm512_load_si512(kWordOrder.low), part[1]);
      OSCAR_UNROLL
      for (int k = 0; k < 2; ++k) {
        const __m512i second =
            _mm512_permutexvar_epi16(_mm512_load_si512(kWordOrder.second[k]), words[c]);
        const __m512i third = _mm512_maskz_permutexvar_epi16(
            kUpperFour, _mm512_load_si512(kWordOrder.third[k]), words[c]);
        _mm512_store_si512(out.rows[h][c][k],
                           _mm512_add_epi16(_mm512_mullo_epi16(second, codes), third));
      }
    }
    OSCAR_UNROLL
    for (int t = 0; t < 3; ++t) {
      const __m512i first =
          _mm512_permutex2var_epi16(words[0], _mm512_load_si512(kWordOrder.quarters[t]), words[1]);
      _mm512_store_si512(out.quarters[h][t], _mm512_mullo_epi16(first, codes));
    }
    const __m512i single =
        _mm512_permutex2var_epi16(words[0], _mm512_load_si512(kWordOrder.singles), words[1]);
    _mm512_store_si512(out.singles[h], _mm512_mask_add_epi16(single, kLowerTwo, single, single));
    const __m512i sum = AddProducts(_mm512_madd_epi16(words[0], ones), words[1], ones);
    const __m512 correction = _mm512_set1_ps(1.5f * out.step[h]);
    _mm512_store_ps(state.low[g][h], _mm512_fnmadd_ps(_mm512_cvtepi32_ps(sum), correction,
                                                      _mm512_load_ps(state.low[g][h])));
  }
}

// kHeads query heads over `count` sealed pages, of which the last has `last_visible` tokens; blocks
// up to `known` come next and are fetched. Nothing that takes long to come is used at once: the
// keys of page n + 1 lie between the step of page n's weights and its use, the values of page n
// between the logits of page n + 1 and their softmax.
template <int kHeads>
HWY_NOINLINE void WordPages(const BlockLayout& layout, const std::byte* const* blocks, int count,
                            int known, int last_visible, const WordQuery& query,
                            Remainder<WordQuery>& remainder, float* m, float* d, float* o) {
  constexpr float kUnseen = -1000.0f;
  const int dims = layout.head_dim(), groups = layout.num_groups();
  const int vectors = layout.group_dims() / 32;
  WordState state;
  state.o = o;
  const bool empty = m[0] == kEmptyMax;
  for (int h = 0; h < kHeads; ++h) {
    state.reference[h] = empty ? 0.0f : m[h];
    Store(Set(0.0f), state.d[h]);
    state.d[h][0] = d[h];
    for (int g = 0; g < groups; ++g) {
      Store(Set(0.0f), state.low[g][h]);
      state.centre[g][h] = 0.0f;
    }
  }
  alignas(64) float logits[2][kMaxBlockHeads][kPageTokens];  // of even and odd pages
  WordWeights words;
  PagesPrefetch prefetch{nullptr, nullptr};
  const auto keys = [&](int page) HWY_ATTR {
    WordLogits<kHeads>(layout, blocks[page], query, QueryPart::kRounded, state.reference, prefetch,
                       logits[page % 2]);
    if (query.limits.Exceeded(layout, blocks[page])) {
      WordLogits<kHeads>(layout, blocks[page], remainder.Get(layout), QueryPart::kRemainder,
                         state.reference, prefetch, logits[page % 2]);
    }
    if (page + 1 < count) return;
    for (int h = 0; h < kHeads; ++h) {
      for (int t = last_visible; t < kPageTokens; ++t) logits[page % 2][h][t] = kUnseen;
    }
  };
  keys(0);
  if (empty) RaiseReference<kHeads>(dims, groups, true, logits[0], state);
  bool counts = WordSoftmax<kHeads>(layout, blocks[0], logits[0], state, words);
  for (int page = 0; page < count; ++page) {
    if (page + 2 < known) prefetch = {blocks[page + 2], blocks[page + 2] + layout.block_bytes()};
    if (page + 1 < count) keys(page + 1);
    for (int g = 0; counts && g < groups; ++g) {
      if (g > 0) {
        ScaleWeights<kHeads>(layout, blocks[page], g, logits[page % 2], state, words,
                             [](__m512 p) HWY_ATTR { return p; });
      }
      RoundWeights<kHeads>(g, state, words);
      const std::byte* codes = blocks[page] + layout.v_codes_offset() +
                               static_cast<size_t>(g * layout.group_dims()) * 16;
      float* out = o + g * layout.group_dims();
      if (vectors == 1) {
        WordValues<kHeads, 1>(codes, dims, words, prefetch, out);
      } else if (vectors == 2) {
        WordValues<kHeads, 2>(codes, dims, words, prefetch, out);
      } else {
        for (int v = 0; v < vectors; v += 4) {
          WordValues<kHeads, 4>(codes + static_cast<size_t>(v) * 32 * 16, dims, words, prefetch,
                                out + v * 32);
        }
      }
    }
    if (page + 1 < count) {
      counts = WordSoftmax<kHeads>(layout, blocks[page + 1], logits[(page + 1) % 2], state, words);
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    m[h] = state.reference[h];
    d[h] = ReduceSum(Load(state.d[h]));
    for (int g = 0; g < groups; ++g) {
      const F16x low = Set(ReduceSum(Load(state.low[g][h])) + state.centre[g][h]);
      float* out = o + h * dims + g * layout.group_dims();
      for (int i = 0; i < layout.group_dims(); i += 16) {
        Store(Add(Load(out + i), low), out + i);
      }
    }
  }
}

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_AVX3

#endif  // per-target include guard
