// INT2 decode by tables of 16-bit partial sums (AVX-512BW and VNNI, for processors whose permutes
// of words are single operations: Zen 4 and later). Included once per target.
//
// A dot product of 2-bit codes with numbers q is a sum over bits: bit i of a run of codes adds x_i,
// with x = q[0], 2 q[0], q[1], 2 q[1], ... A word holds 8 codes (16 bits) of one token; five or six
// of its bits at a time select an entry of a table in registers (VPERMW, VPERMI2W), and one
// addition of words counts it: 6 instructions for 8 codes x 32 tokens, where 16-bit products take
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
// about their mean: at most 4.3e-4 of a flat page and less of any other.
#if defined(OSCAR_SIMD_ATTENTION_WORDS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OSCAR_SIMD_ATTENTION_WORDS_INL_H_
#undef OSCAR_SIMD_ATTENTION_WORDS_INL_H_
#else
#define OSCAR_SIMD_ATTENTION_WORDS_INL_H_
#endif

#include "simd/attention_codes-inl.h"

#if HWY_TARGET == HWY_AVX3
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {

// Keeps the compiler from moving loads across: it would begin a dozen steps at once and spill.
#define OSCAR_IN_ORDER() asm volatile("" : : : "memory")

// Largest centred sum of a chunk, short of 2^15 by what rounding its terms can add.
inline constexpr float kWordLimit = 32700.0f;
inline constexpr int kChunkDims = 16;    // of keys
inline constexpr int kChunkTokens = 32;  // of values
// The running reference m of the softmax may fall this far (in powers of two) below a page's
// largest logit before everything summed so far is scaled: rarely, and never waited for.
inline constexpr float kSlack = 8.0f;

// Fetches blocks to come into L2, a few lines at each step; L1 is full of tables.
struct PagesPrefetch {
  const std::byte* at;
  const std::byte* end;

  HWY_INLINE void Step() {
    for (int i = 0; i < 5 && at < end; ++i, at += 64) __builtin_prefetch(at, 0, 2);
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
};

inline void PrepareWordQuery(const float* q, const PageLayout& layout, float scale, int head,
                             WordQuery& out) {
  constexpr float kFinest = 1.0f / 2048;  // 16 chunks of 2^15 x 2^11 stay within 32 bits
  VF signs[4];                            // of bit b of a lane's number
  for (int b = 0; b < 4; ++b) {
    constexpr __mmask16 kSet[4] = {0xaaaa, 0xcccc, 0xf0f0, 0xff00};
    signs[b] = VF{_mm512_mask_blend_ps(kSet[b], _mm512_set1_ps(-1.0f), _mm512_set1_ps(1.0f))};
  }
  for (int g = 0; g < layout.num_groups(); ++g) {
    const int begin = g * layout.group_dims(), chunks = layout.group_dims() / kChunkDims;
    float bound[kMaxPageDims / kChunkDims];  // of a centred sum
    float lowest = 3e38f, highest = 1e-30f;
    F16x sum = Set(0.0f);
    for (int c = 0; c < chunks; ++c) {
      F16x absolute = Set(0.0f);
      for (int d = begin + c * kChunkDims; d < begin + (c + 1) * kChunkDims; d += 16) {
        absolute = Add(absolute, Abs(Load(q + d)));
        sum = Add(sum, Load(q + d));
      }
      bound[c] = 1.5f * ReduceSum(absolute);
      lowest = std::min(lowest, bound[c]);
      highest = std::max(highest, bound[c]);
    }
    const float unit = std::max(lowest, highest * kFinest) / kWordLimit;
    out.unit[head][g] = unit * scale;
    out.sums[head][g] = ReduceSum(sum) * scale;
    for (int c = 0; c < chunks; ++c) {
      const int weight = std::max(1, static_cast<int>(std::ceil(bound[c] / (unit * kWordLimit))));
      const int first = begin + c * kChunkDims;
      out.weight[0][head][first / kChunkDims] = weight;
      out.weight[1][head][first / kChunkDims] = weight << 16;
      const float inverse = 0.5f / (unit * static_cast<float>(weight));
      for (int v = first / 16; v < (first + kChunkDims) / 16; ++v) {
        for (int odd = 0; odd < 2; ++odd) {
          float x[16];  // what half a bit is worth
          for (int i = 0; i < 16; ++i) {
            x[i] = q[v * 16 + i / 2 * 2 + odd] * inverse * static_cast<float>(1 + i % 2);
          }
          for (int t = 0; t < 3; ++t) {
            // Entries of four bits: -x or +x for each bit of the entry's number.
            const float* bits = x + t * 5;
            VF four = hn::Mul(signs[0], hn::Set(DF(), bits[0]));
            for (int b = 1; b < 4; ++b) {
              four = hn::MulAdd(signs[b], hn::Set(DF(), bits[b]), four);
            }
            const auto store = [&](int table, float rest) HWY_ATTR {
              for (int upper = 0; upper < 2; ++upper) {
                const VF entry =
                    hn::Add(four, hn::Set(DF(), rest + (upper == 0 ? -bits[4] : bits[4])));
                _mm256_store_si256(
                    reinterpret_cast<__m256i*>(out.tables[v][odd][table][head] + upper * 16),
                    _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(entry.raw)));
              }
            };
            store(t, t < 2 ? 0.0f : -x[15]);
            if (t == 2) store(3, x[15]);
          }
        }
      }
    }
  }
}

// Word 2 i of the result is half `odd` of a's lane i, word 2 i + 1 that of b's.
HWY_INLINE __m512i EvenWords() {
  return _mm512_add_epi32(
      _mm512_set1_epi32(0x00200000),
      _mm512_mullo_epi32(_mm512_set1_epi32(0x00020002),
                         _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)));
}

HWY_INLINE __m512i AddProducts(__m512i sum, __m512i a, __m512i b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
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
// The same with 64 entries, the upper 32 in u.
HWY_INLINE void AddLongEntries(__m512i& s0, __m512i& s1, __m512i& s2, __m512i& s3, __m512i t0,
                               __m512i t1, __m512i t2, __m512i t3, __m512i u01, __m512i u23,
                               __m512i i0, __m512i i1, __m512i i2, __m512i i3) {
  asm("vpermt2w %8, %10, %4\n\tvpermt2w %8, %11, %5\n\tvpermt2w %9, %12, %6\n\t"
      "vpermt2w %9, %13, %7\n\t"
      "vpaddw %4, %0, %0\n\tvpaddw %5, %1, %1\n\tvpaddw %6, %2, %2\n\tvpaddw %7, %3, %3"
      : "+v"(s0), "+v"(s1), "+v"(s2), "+v"(s3), "+&v"(t0), "+&v"(t1), "+&v"(t2), "+&v"(t3)
      : "v"(u01), "v"(u23), "v"(i0), "v"(i1), "v"(i2), "v"(i3));
}
HWY_INLINE void AddEntry(__m512i& sum, __m512i table, __m512i index) {
  asm("vpermw %1, %2, %1\n\tvpaddw %1, %0, %0" : "+v"(sum), "+&v"(table) : "v"(index));
}
HWY_INLINE void AddLongEntry(__m512i& sum, __m512i table, __m512i upper, __m512i index) {
  asm("vpermt2w %2, %3, %1\n\tvpaddw %1, %0, %0"
      : "+v"(sum), "+&v"(table)
      : "v"(upper), "v"(index));
}

// As CodeLogits, for 2 bits.
template <int kHeads>
HWY_INLINE void WordLogits(const PageLayout& layout, const std::byte* HWY_RESTRICT block,
                           const WordQuery& query, PagesPrefetch& prefetch,
                           float (&logits)[kMaxBlockHeads][kPageTokens]) {
  constexpr int kVectors = kChunkDims / 16;
  const size_t tile_bytes = static_cast<size_t>(layout.head_dim()) * 4;
  const int group_chunks = layout.group_dims() / kChunkDims;
  const __m512i even = EvenWords(), odd = _mm512_add_epi16(even, _mm512_set1_epi16(1));
  // Sums of a group's chunks, [chunk][head][pair of tiles of tokens].
  alignas(64) int16_t chunk_sums[kMaxPageDims / kChunkDims][kHeads][2][32];
  for (int g = 0; g < layout.num_groups(); ++g) {
    for (int chunk = 0; chunk < group_chunks; ++chunk) {
      const int first = (g * group_chunks + chunk) * kVectors;
      __m512i acc[kHeads][2];
      OSCAR_UNROLL
      for (int h = 0; h < kHeads; ++h) acc[h][0] = acc[h][1] = _mm512_setzero_si512();
      OSCAR_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        prefetch.Step();
        const std::byte* words = block + (first + v) * 64;
        OSCAR_UNROLL
        for (int o = 0; o < 2; ++o) {
          __m512i index[2];
          OSCAR_UNROLL
          for (int i = 0; i < 2; ++i) {
            const std::byte* at = words + static_cast<size_t>(2 * i) * tile_bytes;
            index[i] = _mm512_permutex2var_epi16(_mm512_loadu_si512(at), o == 0 ? even : odd,
                                                 _mm512_loadu_si512(at + tile_bytes));
          }
          OSCAR_UNROLL
          for (int t = 0; t < 3; ++t) {
            OSCAR_UNROLL
            for (int h = 0; h + 1 < kHeads; h += 2) {
              OSCAR_IN_ORDER();
              const auto& tables = query.tables[first + v][o];
              const __m512i ta = _mm512_load_si512(tables[t][h]);
              const __m512i tb = _mm512_load_si512(tables[t][h + 1]);
              if (t < 2) {
                AddEntries(acc[h][0], acc[h][1], acc[h + 1][0], acc[h + 1][1], ta, ta, tb, tb,
                           index[0], index[1], index[0], index[1]);
              } else {
                AddLongEntries(acc[h][0], acc[h][1], acc[h + 1][0], acc[h + 1][1], ta, ta, tb, tb,
                               _mm512_load_si512(tables[3][h]), _mm512_load_si512(tables[3][h + 1]),
                               index[0], index[1], index[0], index[1]);
              }
            }
            if constexpr (kHeads % 2 == 1) {
              OSCAR_IN_ORDER();
              const auto& tables = query.tables[first + v][o];
              const __m512i table = _mm512_load_si512(tables[t][kHeads - 1]);
              OSCAR_UNROLL
              for (int i = 0; i < 2; ++i) {
                if (t < 2) {
                  AddEntry(acc[kHeads - 1][i], table, index[i]);
                } else {
                  AddLongEntry(acc[kHeads - 1][i], table, _mm512_load_si512(tables[3][kHeads - 1]),
                               index[i]);
                }
              }
            }
            if (t < 2) {
              OSCAR_UNROLL
              for (int i = 0; i < 2; ++i) index[i] = _mm512_srli_epi16(index[i], 5);
            }
          }
        }
      }
      OSCAR_UNROLL
      for (int h = 0; h < kHeads; ++h) {
        _mm512_store_si512(chunk_sums[chunk][h][0], acc[h][0]);
        _mm512_store_si512(chunk_sums[chunk][h][1], acc[h][1]);
      }
    }
    F16x s[4], middle[4];
    OSCAR_UNROLL
    for (int t = 0; t < 4; ++t) {
      s[t] = LoadFp16(reinterpret_cast<const uint16_t*>(block + layout.KScale(t * 16, g)));
      middle[t] =
          MulAdd(s[t], Set(1.5f),
                 LoadFp16(reinterpret_cast<const uint16_t*>(block + layout.KMin(t * 16, g))));
    }
    OSCAR_UNROLL
    for (int h = 0; h < kHeads; ++h) {
      __m512i sum[4];
      OSCAR_UNROLL
      for (int t = 0; t < 4; ++t) sum[t] = _mm512_setzero_si512();
      for (int chunk = 0; chunk < group_chunks; ++chunk) {
        const __m512i low = _mm512_set1_epi32(query.weight[0][h][g * group_chunks + chunk]);
        const __m512i high = _mm512_set1_epi32(query.weight[1][h][g * group_chunks + chunk]);
        OSCAR_UNROLL
        for (int t = 0; t < 4; ++t) {
          sum[t] = AddProducts(sum[t], _mm512_load_si512(chunk_sums[chunk][h][t / 2]),
                               t % 2 == 0 ? low : high);
        }
      }
      const F16x unit = Set(query.unit[h][g]), q_sum = Set(query.sums[h][g]);
      OSCAR_UNROLL
      for (int t = 0; t < 4; ++t) {
        const F16x steps{{hn::ConvertTo(DF(), VI{sum[t]})}};
        F16x value = MulAdd(Mul(steps, unit), s[t], Mul(middle[t], q_sum));
        if (g > 0) value = Add(value, Load(logits[h] + t * 16));
        Store(value, logits[h] + t * 16);
      }
    }
  }
}

// What one page and group of dims needs to be summed: p s in steps (as words in the order of
// VPACKUSDW, and twice that), and the first four entries of every table.
struct WordWeights {
  alignas(64) uint16_t x[kMaxBlockHeads][kPageTokens];
  alignas(64) uint16_t x2[kMaxBlockHeads][kPageTokens];
  // [table][chunk][half][code of the table's first token]; those of half 0, table 0 also hold -3/2
  // of the chunk's sum, which centres it.
  alignas(64) uint16_t quarters[kMaxBlockHeads][3][2][4][4];
  alignas(16) float step[kMaxBlockHeads];
};

// Where VPACKUSDW of tokens [0, 16) and [16, 32) of a chunk leaves `token`.
constexpr int WordPosition(int token) {
  return token / 32 * 32 + token % 16 / 4 * 8 + token / 16 % 2 * 4 + token % 4;
}

// Where quarters[table] find their token among a page's words.
struct TokenOrder {
  alignas(64) uint16_t first[3][32];
};
inline constexpr TokenOrder kTokenOrder = [] {
  TokenOrder order{};
  for (int t = 0; t < 3; ++t) {
    for (int i = 0; i < 32; ++i) {
      const int half = i / 4 % 4, token = i / 16 * 32 + half / 2 * 16 + t * 6 + half % 2;
      order.first[t][i] = static_cast<uint16_t>(WordPosition(token));
    }
  }
  return order;
}();

// Tokens 6 kTable, 6 kTable + 2, ... (two or three of them) of half kHalf of a chunk: a table for
// each head, looked up for all dims. Halves are the even and the odd tokens of 16, twice.
template <int kHeads, int kVectors, int kHalf, int kTable>
HWY_INLINE void AddValueTable(const WordWeights& weights, int chunk,
                              const __m512i (&index)[kVectors], __m512i (&acc)[kHeads][kVectors]) {
  // The second token's code in an entry's number.
  const __m256i second_code =
      _mm256_set_epi64x(0x0003000300030003, 0x0002000200020002, 0x0001000100010001, 0);
  OSCAR_UNROLL
  for (int h = 0; h < kHeads; ++h) {
    OSCAR_IN_ORDER();
    const uint16_t* x = weights.x[h] + chunk * kChunkTokens;
    const uint16_t* x2 = weights.x2[h] + chunk * kChunkTokens;
    const auto word = [](const uint16_t* from, int n) HWY_ATTR {
      return static_cast<int16_t>(
          from[WordPosition(kHalf / 2 * 16 + (kTable * 3 + n) * 2 + kHalf % 2)]);
    };
    int64_t quarter;
    std::memcpy(&quarter, weights.quarters[h][kTable][chunk][kHalf], sizeof(quarter));
    // Two tokens make 16 entries; the third adds its low bit to make 32, its high bit 64.
    const __m256i pair =
        _mm256_add_epi16(_mm256_set1_epi64x(quarter),
                         _mm256_mullo_epi16(_mm256_set1_epi16(word(x, 1)), second_code));
    __m512i table = _mm512_castsi256_si512(pair), upper = table;
    if constexpr (kTable < 2) {
      table = _mm512_inserti64x4(table, _mm256_add_epi16(pair, _mm256_set1_epi16(word(x, 2))), 1);
      upper = _mm512_add_epi16(table, _mm512_set1_epi16(word(x2, 2)));
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
  const __m512i words_of =
      kHalf % 2 == 0 ? EvenWords() : _mm512_add_epi16(EvenWords(), _mm512_set1_epi16(1));
  const std::byte* words = codes + (chunk * 2 + kHalf / 2) * 64;
  __m512i index[kVectors];
  OSCAR_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    const std::byte* at = words + static_cast<size_t>(2 * i) * kTileBytes;
    index[i] = _mm512_permutex2var_epi16(_mm512_loadu_si512(at), words_of,
                                         _mm512_loadu_si512(at + kTileBytes));
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
HWY_INLINE void WordValues(const std::byte* HWY_RESTRICT codes, int dims,
                           const WordWeights& weights, PagesPrefetch& prefetch,
                           float* HWY_RESTRICT o) {
  alignas(64) int16_t before[kHeads][kVectors][32];  // the first chunk's sums
  for (int chunk = 0; chunk < 2; ++chunk) {
    __m512i acc[kHeads][kVectors];
    OSCAR_UNROLL
    for (int h = 0; h < kHeads; ++h) {
      OSCAR_UNROLL
      for (int i = 0; i < kVectors; ++i) acc[h][i] = _mm512_setzero_si512();
    }
    AddValueHalf<kHeads, kVectors, 0>(codes, weights, chunk, prefetch, acc);
    AddValueHalf<kHeads, kVectors, 1>(codes, weights, chunk, prefetch, acc);
    AddValueHalf<kHeads, kVectors, 2>(codes, weights, chunk, prefetch, acc);
    AddValueHalf<kHeads, kVectors, 3>(codes, weights, chunk, prefetch, acc);
    if (chunk == 0) {
      OSCAR_UNROLL
      for (int h = 0; h < kHeads; ++h) {
        OSCAR_UNROLL
        for (int i = 0; i < kVectors; ++i) _mm512_store_si512(before[h][i], acc[h][i]);
      }
      continue;
    }
    const __m512i low = _mm512_set1_epi32(1), high = _mm512_set1_epi32(0x10000);
    OSCAR_UNROLL
    for (int h = 0; h < kHeads; ++h) {
      const VF step = hn::Set(DF(), weights.step[h]);
      OSCAR_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        const __m512i other = _mm512_load_si512(before[h][i]);
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

// 2^(x - m) for whole m to 3e-6; at least 2^-126.
HWY_INLINE __m512 Exp2From(__m512 x, float m) {
  constexpr float kMagic = 12582912.0f;  // 1.5 2^23: the last bit of a sum with it is worth 1
  x = _mm512_max_ps(x, _mm512_set1_ps(m - 126.0f));
  const __m512 magic = _mm512_set1_ps(kMagic - m);
  const __m512 shifted = _mm512_add_ps(x, magic);
  const __m512 f = _mm512_sub_ps(x, _mm512_sub_ps(shifted, magic));
  // Minimax on [-1/2, 1/2].
  __m512 p = _mm512_set1_ps(0.00957010143f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.0559178603f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.240247448f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.693121815f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.999999261f));
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), exponent));
}

// The weights of one page: p = 2^(logit - m) in place of logits, d and `low` (what is added to all
// dims of a group) brought up to date. False where the page is negligible.
template <int kHeads>
HWY_INLINE bool WordSoftmax(float (&logits)[kMaxBlockHeads][kPageTokens], int visible, int dims,
                            int groups, float* m, float* d, float (*low)[kMaxPageGroups],
                            float* o) {
  __mmask16 counts = 0, above = 0;
  OSCAR_UNROLL
  for (int h = 0; h < kHeads; ++h) {
    for (int t = visible; t < kPageTokens; ++t) logits[h][t] = kEmptyMax;
    const F16x top = Max(Max(Load(logits[h]), Load(logits[h] + 16)),
                         Max(Load(logits[h] + 32), Load(logits[h] + 48)));
    counts |= _mm512_cmp_ps_mask(top.v[0].raw, _mm512_set1_ps(m[h] - kNegligible), _CMP_GT_OQ);
    above |= _mm512_cmp_ps_mask(top.v[0].raw, _mm512_set1_ps(m[h] + kSlack), _CMP_GT_OQ);
  }
  if (counts == 0) return false;
  if (above != 0) {
    for (int h = 0; h < kHeads; ++h) {
      const F16x top = Max(Max(Load(logits[h]), Load(logits[h] + 16)),
                           Max(Load(logits[h] + 32), Load(logits[h] + 48)));
      const float largest = std::max(m[h], std::ceil(ReduceMax(top)));
      const float factor = m[h] == kEmptyMax ? 0.0f : std::exp2(m[h] - largest);
      m[h] = largest;
      d[h] *= factor;
      for (int g = 0; g < groups; ++g) low[h][g] *= factor;
      for (int i = h * dims; i < (h + 1) * dims; i += 16) {
        Store(Mul(Load(o + i), Set(factor)), o + i);
      }
    }
  }
  OSCAR_UNROLL
  for (int h = 0; h < kHeads; ++h) {
    OSCAR_UNROLL
    for (int i = 0; i < kPageTokens; i += 16) {
      _mm512_store_ps(logits[h] + i, Exp2From(_mm512_load_ps(logits[h] + i), m[h]));
    }
  }
  return true;
}

// Rounds p s of group g into words.
template <int kHeads>
HWY_INLINE void RoundWeights(const PageLayout& layout, const std::byte* block, int g,
                             const float (&p)[kMaxBlockHeads][kPageTokens], float* d,
                             float (*low)[kMaxPageGroups], WordWeights& out) {
  F16x s[4], middle[4];
  OSCAR_UNROLL
  for (int i = 0; i < 4; ++i) {
    s[i] = LoadFp16(reinterpret_cast<const uint16_t*>(block + layout.VScale(i * 16, g)));
    middle[i] = MulAdd(s[i], Set(1.5f),
                       LoadFp16(reinterpret_cast<const uint16_t*>(block + layout.VMin(i * 16, g))));
  }
  // Of a head: two chunks' sums of p s, the sum of p, the sum of p times the middle.
  __m512 parts[16];
  OSCAR_UNROLL
  for (int h = 0; h < 4; ++h) {
    if (h >= kHeads) {
      parts[h] = parts[4 + h] = parts[8 + h] = parts[12 + h] = parts[0];
      continue;
    }
    F16x x[4];
    OSCAR_UNROLL
    for (int i = 0; i < 4; ++i) x[i] = Load(p[h] + i * 16);
    parts[h] = MulAdd(x[0], s[0], Mul(x[1], s[1])).v[0].raw;
    parts[4 + h] = MulAdd(x[2], s[2], Mul(x[3], s[3])).v[0].raw;
    parts[8 + h] = Add(Add(x[0], x[1]), Add(x[2], x[3])).v[0].raw;
    parts[12 + h] = Add(MulAdd(x[0], middle[0], Mul(x[1], middle[1])),
                        MulAdd(x[2], middle[2], Mul(x[3], middle[3])))
                        .v[0]
                        .raw;
  }
  const __m512 sums = SumSixteen(parts);
  const __m128 chunk0 = _mm512_castps512_ps128(sums), chunk1 = _mm512_extractf32x4_ps(sums, 1);
  const __m128 top = _mm_max_ps(_mm_max_ps(chunk0, chunk1), _mm_set1_ps(1e-30f));
  const __m128 limit = _mm_set1_ps(kWordLimit / 1.5f);
  const __m128 inverse = _mm_div_ps(limit, top);
  const __m128 step = _mm_mul_ps(top, _mm_set1_ps(1.5f / kWordLimit));
  const __m128 centre = _mm_mul_ps(inverse, _mm_set1_ps(-1.5f));
  const __m128i centre0 = _mm_cvtps_epi32(_mm_mul_ps(chunk0, centre));
  const __m128i centre1 = _mm_cvtps_epi32(_mm_mul_ps(chunk1, centre));
  alignas(16) int16_t centre_words[8];
  _mm_store_si128(reinterpret_cast<__m128i*>(centre_words), _mm_packs_epi32(centre0, centre1));
  _mm_store_ps(out.step, step);
  alignas(16) float inverses[4], p_sums[4], low_sums[4], centres[4];
  _mm_store_ps(inverses, inverse);
  _mm_store_ps(p_sums, _mm512_extractf32x4_ps(sums, 2));
  _mm_store_ps(low_sums, _mm512_extractf32x4_ps(sums, 3));
  _mm_store_ps(centres, _mm_cvtepi32_ps(_mm_add_epi32(centre0, centre1)));
  constexpr __mmask32 kChunk0 = 0xf, kChunk1 = 0xf0000;  // half 0 of each
  const __m512i codes = _mm512_set1_epi64(0x0003000200010000);
  F16x rounded[4];
  OSCAR_UNROLL
  for (int h = 0; h < 4; ++h) {
    if (h >= kHeads) {
      rounded[h] = rounded[0];
      continue;
    }
    const F16x factor = Set(inverses[h]);
    __m512i x[4];
    OSCAR_UNROLL
    for (int i = 0; i < 4; ++i) {
      x[i] = _mm512_cvtps_epi32(Mul(Mul(Load(p[h] + i * 16), s[i]), factor).v[0].raw);
    }
    __m512i both[2];
    OSCAR_UNROLL
    for (int c = 0; c < 2; ++c) {
      const __m512i words = _mm512_packus_epi32(x[2 * c], x[2 * c + 1]);
      _mm512_store_si512(out.x[h] + c * 32, words);
      _mm512_store_si512(out.x2[h] + c * 32, _mm512_add_epi16(words, words));
      both[c] = words;
    }
    OSCAR_UNROLL
    for (int t = 0; t < 3; ++t) {
      __m512i entries = _mm512_mullo_epi16(
          _mm512_permutex2var_epi16(both[0], _mm512_load_si512(kTokenOrder.first[t]), both[1]),
          codes);
      if (t == 0) {
        entries =
            _mm512_mask_add_epi16(entries, kChunk0, entries, _mm512_set1_epi16(centre_words[h]));
        entries = _mm512_mask_add_epi16(entries, kChunk1, entries,
                                        _mm512_set1_epi16(centre_words[4 + h]));
      }
      _mm512_store_si512(out.quarters[h][t], entries);
    }
    rounded[h] = ToFloat(
        I16x{{VI{_mm512_add_epi32(_mm512_add_epi32(x[0], x[1]), _mm512_add_epi32(x[2], x[3]))}}});
  }
  float rounded_sums[kMaxBlockHeads];
  hn::StoreU(SumFour(rounded[0], rounded[1], rounded[2], rounded[3]), hn::Full128<float>(),
             rounded_sums);
  for (int h = 0; h < kHeads; ++h) {
    if (g == 0) d[h] += p_sums[h];
    low[h][g] += low_sums[h] - out.step[h] * (centres[h] + 1.5f * rounded_sums[h]);
  }
}

// kHeads query heads over a run of sealed pages. While the weights of one page are waited for, the
// keys of the next are worked on.
template <int kHeads>
HWY_NOINLINE void WordPages(const PageLayout& layout, const std::byte* const* blocks, int count,
                            int last_visible, const WordQuery& query, float* m, float* d,
                            float* o) {
  const int dims = layout.head_dim(), groups = layout.num_groups();
  const int vectors = layout.group_dims() / 32;
  // Added to every dim of a group at the end.
  float low[kMaxBlockHeads][kMaxPageGroups] = {};
  alignas(64) float p[2][kMaxBlockHeads][kPageTokens];
  for (int h = 0; h < kHeads; ++h) {  // a whole reference, for Exp2From
    if (m[h] == kEmptyMax || m[h] == std::ceil(m[h])) continue;
    const float factor = std::exp2(m[h] - std::ceil(m[h]));
    m[h] = std::ceil(m[h]);
    d[h] *= factor;
    for (int i = h * dims; i < (h + 1) * dims; i += 16) {
      Store(Mul(Load(o + i), Set(factor)), o + i);
    }
  }
  PagesPrefetch none{nullptr, nullptr};
  WordLogits<kHeads>(layout, blocks[0], query, none, p[0]);
  for (int page = 0; page < count; ++page) {
    const std::byte* block = blocks[page];
    float(&weights)[kMaxBlockHeads][kPageTokens] = p[page % 2];
    const int visible = page + 1 == count ? last_visible : kPageTokens;
    const bool counts = WordSoftmax<kHeads>(weights, visible, dims, groups, m, d, low, o);
    WordWeights words;
    if (counts) RoundWeights<kHeads>(layout, block, 0, weights, d, low, words);
    const std::byte* ahead = page + 2 < count ? blocks[page + 2] : nullptr;
    PagesPrefetch prefetch{ahead, ahead == nullptr ? nullptr : ahead + layout.block_bytes()};
    if (page + 1 < count) {
      WordLogits<kHeads>(layout, blocks[page + 1], query, prefetch, p[(page + 1) % 2]);
    }
    if (!counts) continue;
    for (int g = 0; g < groups; ++g) {
      if (g > 0) RoundWeights<kHeads>(layout, block, g, weights, d, low, words);
      const std::byte* codes =
          block + layout.v_codes_offset() + static_cast<size_t>(g * layout.group_dims()) * 16;
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
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int i = 0; i < dims; i += 16) {
      float* out = o + h * dims + i;
      Store(Add(Load(out), Set(low[h][i / layout.group_dims()])), out);
    }
  }
}

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_AVX3

#endif  // per-target include guard
