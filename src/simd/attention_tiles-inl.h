// One cached page as the right-hand operands of prefill's two GEMMs: q k^T, whose columns
// are the 64 tokens, and p v, whose columns are the D dims. Included once per target.
//
// Pair tiles hold 16-bit numbers, two of the summed index in a 32-bit word, as VPDPWSSD, VPMADDWD
// and VDPBF16PS take them:
//   k [D / 2][64 tokens][2 dims]        v [32][D][2 tokens]
// Packed pages need no more than a shift and a mask for that: their words already hold codes that
// way, 16 / bits pairs deep. Float tiles are k [D][64] and v [64][D].
#if defined(OSCAR_SIMD_ATTENTION_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OSCAR_SIMD_ATTENTION_TILES_INL_H_
#undef OSCAR_SIMD_ATTENTION_TILES_INL_H_
#else
#define OSCAR_SIMD_ATTENTION_TILES_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "base/half.h"
#include "cache/block_layout.h"
#include "quant/turboquant.h"
#include "simd/lanes16-inl.h"

#if OSCAR_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {

// (scale, min) of a packed page's rows in fp32: [groups][64] each.
struct TileMeta {
  float* k_scale;
  float* k_min;
  float* v_scale;
  float* v_min;
};

// `tiles` tiles of `pairs` pairs of codes for each of 16 lanes become rows of `stride` words. Of 3
// bits, `codes` are the low two and `high` the others.
template <int kBits>
HWY_NOINLINE void UnpackSide(const std::byte* codes, const std::byte* high, int tiles, int pairs,
                             int stride, int32_t* out) {
  constexpr int kLowBits = kBits == 3 ? 2 : kBits;
  constexpr int kPairs = 16 / kLowBits;  // in a word
  const I16x mask = SetInt(((1 << kLowBits) - 1) * 0x00010001);
  const int vectors = pairs / kPairs;
  for (int tile = 0; tile < tiles; ++tile) {
    for (int i = 0; i < vectors; ++i) {
      const int vector = tile * vectors + i;
      const I16x words = LoadInt(reinterpret_cast<const int32_t*>(codes) + vector * 16);
      [[maybe_unused]] I16x tops;
      if constexpr (kBits == 3) {
        tops = LoadInt(reinterpret_cast<const int32_t*>(high) + vector / 2 * 16);
      }
      for (int p = 0; p < kPairs; ++p) {
        I16x pair;
        for (int part = 0; part < kParts; ++part) {
          pair.v[part] = hn::ShiftRightSame(words.v[part], p * kLowBits);
        }
        pair = And(pair, mask);
        if constexpr (kBits == 3) {
          const int shift = vector % 2 * 4 + p % 4 + p / 4 * 8;
          for (int part = 0; part < kParts; ++part) {
            const VI bit =
                hn::And(hn::ShiftRightSame(tops.v[part], shift), hn::Set(DI(), 0x00010001));
            pair.v[part] = hn::Or(pair.v[part], hn::ShiftLeft<2>(bit));
          }
        }
        StoreInt(pair, out + (i * kPairs + p) * stride + tile * 16);
      }
    }
  }
}

// The codes of K as 16-bit integers.
inline void UnpackKeys(const BlockLayout& layout, const std::byte* block, int32_t* k) {
  const auto unpack = layout.k_bits() == 2   ? &UnpackSide<2>
                      : layout.k_bits() == 3 ? &UnpackSide<3>
                                             : &UnpackSide<4>;
  unpack(block, block + layout.k_high_offset(), kPageTokens / 16, layout.head_dim() / 2,
         kPageTokens, k);
}

// Two bits of 16 tokens each, the first in the low bits.
HWY_INLINE I16x ExpandBoost(uint32_t bits) {
  alignas(64) static constexpr int32_t kShifts[16] = {0,  2,  4,  6,  8,  10, 12, 14,
                                                      16, 18, 20, 22, 24, 26, 28, 30};
  I16x out;
  for (int i = 0; i < kParts; ++i) {
    const auto shifts = hn::BitCast(DU(), hn::LoadU(DI(), kShifts + i * kWidth));
    const auto shifted = hn::Shr(hn::Set(DU(), bits), shifts);
    out.v[i] = hn::BitCast(DI(), hn::And(shifted, hn::Set(DU(), 3)));
  }
  return out;
}
HWY_INLINE uint32_t BoostWord(const BlockLayout& layout, const std::byte* block, int boost,
                              int token) {
  uint32_t word;
  std::memcpy(&word, block + layout.KBoost(boost) + token / 4, sizeof(word));
  return word;
}
// Of a dim that has two more bits, which of those it is; else -1, for whatever byte is there.
HWY_INLINE int BoostOf(const BlockLayout& layout, const SealedBlock& from, int dim) {
  const int index =
      static_cast<int>(from.MetaBlock(layout, dim)[layout.KIndex(dim % layout.channel_dims())]);
  return index < layout.boosted_dims() ? index : -1;
}
HWY_INLINE float ReadFp16(const std::byte* block, uint32_t offset) {
  Fp16 value;
  std::memcpy(&value.bits, block + offset, sizeof(value.bits));
  return oscar::ToFloat(value);
}
HWY_INLINE const float* NormsOf(const BlockLayout& layout, const SealedBlock& from) {
  return reinterpret_cast<const float*>(from.Norms(layout));
}

// Keys that are not rows as a float tile. `pairs` is scratch of D / 2 x 64 words.
inline HWY_NOINLINE void FloatKeys(const BlockLayout& layout, const SealedBlock& from,
                                   int32_t* pairs, float* k) {
  const int dims = layout.head_dim();
  UnpackKeys(layout, from.block, pairs);
  if (layout.k_form() == SideForm::kCodebook) {
    const hn::Repartition<int8_t, DI> d8;
    alignas(16) int8_t levels[16];
    for (int c = 0; c < 16; ++c) {
      levels[c] = static_cast<int8_t>(ByteLevel(layout.k_bits(), c % (1 << layout.k_bits())));
    }
    const auto table = hn::LoadDup128(d8, levels);
    F16x factor[4];
    const F16x unit = Set(CodebookFactor(layout.k_bits(), dims, 1.0f));
    for (int i = 0; i < 4; ++i) {
      const std::byte* norms = from.block + layout.KRowNorm(i * 16);
      factor[i] = Mul(LoadFp16(reinterpret_cast<const uint16_t*>(norms)), unit);
    }
    for (int w = 0; w < dims / 2; ++w) {
      for (int i = 0; i < 4; ++i) {
        const I16x codes = LoadInt(pairs + w * kPageTokens + i * 16);
        I16x even, odd;
        for (int part = 0; part < kParts; ++part) {
          const VI words =
              hn::BitCast(DI(), hn::TableLookupBytes(table, hn::BitCast(d8, codes.v[part])));
          even.v[part] = hn::ShiftRight<24>(hn::ShiftLeft<24>(words));
          odd.v[part] = hn::ShiftRight<24>(hn::ShiftLeft<8>(words));
        }
        Store(Mul(ToFloat(even), factor[i]), k + 2 * w * kPageTokens + i * 16);
        Store(Mul(ToFloat(odd), factor[i]), k + (2 * w + 1) * kPageTokens + i * 16);
      }
    }
    return;
  }
  const float* const norms = NormsOf(layout, from);
  const int group_tokens = std::min(layout.group_tokens(), kPageTokens);
  const I16x low = SetInt(0xffff);
  for (int d = 0; d < dims; ++d) {
    const std::byte* const meta = from.MetaBlock(layout, d);
    const int at = d % layout.channel_dims();
    const int boost = layout.k_form() == SideForm::kMixed ? BoostOf(layout, from, d) : -1;
    for (int t = 0; t < kPageTokens; t += 16) {
      const I16x words = LoadInt(pairs + d / 2 * kPageTokens + t);
      I16x codes;
      for (int part = 0; part < kParts; ++part) {
        codes.v[part] =
            d % 2 == 0 ? hn::And(words.v[part], low.v[part]) : hn::ShiftRight<16>(words.v[part]);
      }
      if (boost >= 0) {
        codes = Add(codes, Shl<2>(ExpandBoost(BoostWord(layout, from.block, boost, t))));
      }
      const F16x scale = Set(ReadFp16(meta, layout.KChannelScale(t / group_tokens, at)));
      const F16x min = Set(ReadFp16(meta, layout.KChannelMin(t / group_tokens, at)));
      F16x x = MulAdd(ToFloat(codes), scale, min);
      if (norms != nullptr) x = Mul(x, Load(norms + t));
      Store(x, k + d * kPageTokens + t);
    }
  }
}

// The codes of V as 16-bit integers.
inline void UnpackValues(const BlockLayout& layout, const std::byte* block, int32_t* v) {
  const auto unpack = [](int bits) {
    return bits == 2 ? &UnpackSide<2> : bits == 3 ? &UnpackSide<3> : &UnpackSide<4>;
  };
  const int dims = layout.head_dim();
  unpack(layout.v_bits())(block + layout.v_codes_offset(), block + layout.v_high_offset(),
                          dims / 16, kPageTokens / 2, dims, v);
}

// The metadata of V, and that of K where it is rows.
inline void ReadMeta(const BlockLayout& layout, const std::byte* block, const TileMeta& meta) {
  for (int g = 0; g < layout.num_groups(); ++g) {
    for (int t = 0; t < kPageTokens; t += 16) {
      const auto read = [&](uint32_t offset) HWY_ATTR {
        return LoadFp16(reinterpret_cast<const uint16_t*>(block + offset));
      };
      const int at = g * kPageTokens + t;
      Store(read(layout.VScale(t, g)), meta.v_scale + at);
      Store(read(layout.VMin(t, g)), meta.v_min + at);
      if (!layout.is_rows()) continue;
      Store(read(layout.KScale(t, g)), meta.k_scale + at);
      Store(read(layout.KMin(t, g)), meta.k_min + at);
    }
  }
}

// Four words of each of the rows 0, 4, 8 and 12, one row a 128-bit block.
HWY_INLINE I16x LoadFourRows(const int32_t* p, size_t stride) {
  const auto row = [&](size_t r) HWY_ATTR {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + r * stride));
  };
  I16x out;
#if HWY_TARGET == HWY_AVX2
  for (size_t i = 0; i < 2; ++i) {
    out.v[i] = VI{_mm256_inserti128_si256(_mm256_castsi128_si256(row(i * 8)), row(i * 8 + 4), 1)};
  }
#else
  __m512i all = _mm512_inserti32x4(_mm512_castsi128_si512(row(0)), row(4), 1);
  all = _mm512_inserti32x4(all, row(8), 2);
  out.v[0] = VI{_mm512_inserti32x4(all, row(12), 3)};
#endif
  return out;
}

// rows [64][words] -> out [words][64]; words a multiple of 4.
HWY_INLINE void TransposeWords(const int32_t* rows, int words, int32_t* out) {
  const hn::Repartition<int64_t, DI> d64;
  const auto stride = static_cast<size_t>(words);
  for (int t = 0; t < kPageTokens; t += 16) {
    for (int w = 0; w < words; w += 4) {
      const int32_t* p = rows + static_cast<size_t>(t) * stride + w;
      I16x r[4], column[4];
      for (size_t i = 0; i < 4; ++i) r[i] = LoadFourRows(p + i * stride, stride);
      for (int i = 0; i < kParts; ++i) {
        // Words 0 and 1, then 2 and 3, of rows (0, 1) and (2, 3) in each block.
        const auto low01 = hn::BitCast(d64, hn::InterleaveLower(DI(), r[0].v[i], r[1].v[i]));
        const auto low23 = hn::BitCast(d64, hn::InterleaveLower(DI(), r[2].v[i], r[3].v[i]));
        const auto high01 = hn::BitCast(d64, hn::InterleaveUpper(DI(), r[0].v[i], r[1].v[i]));
        const auto high23 = hn::BitCast(d64, hn::InterleaveUpper(DI(), r[2].v[i], r[3].v[i]));
        column[0].v[i] = hn::BitCast(DI(), hn::InterleaveLower(d64, low01, low23));
        column[1].v[i] = hn::BitCast(DI(), hn::InterleaveUpper(d64, low01, low23));
        column[2].v[i] = hn::BitCast(DI(), hn::InterleaveLower(d64, high01, high23));
        column[3].v[i] = hn::BitCast(DI(), hn::InterleaveUpper(d64, high01, high23));
      }
      for (int i = 0; i < 4; ++i) StoreInt(column[i], out + (w + i) * kPageTokens + t);
    }
  }
}

// BF16 rows [64, D] as pair tiles of BF16.
inline HWY_NOINLINE void PairRows(const Bf16* k_rows, const Bf16* v_rows, int dims, int32_t* k,
                                  int32_t* v) {
  TransposeWords(reinterpret_cast<const int32_t*>(k_rows), dims / 2, k);
  const auto load = [](const Bf16* p, int part) HWY_ATTR {
    return hn::PromoteTo(DU(), hn::LoadU(DH(), &p->bits + part * kWidth));
  };
  for (int t = 0; t < kPageTokens; t += 2) {
    for (int d = 0; d < dims; d += 16) {
      const Bf16* p = v_rows + t * dims + d;
      I16x words;
      for (int i = 0; i < kParts; ++i) {
        words.v[i] = hn::BitCast(DI(), hn::Or(load(p, i), hn::ShiftLeft<16>(load(p + dims, i))));
      }
      StoreInt(words, v + t / 2 * dims + d);
    }
  }
}

// The same as float tiles. `pairs` is scratch of D / 2 x 64 words.
inline HWY_NOINLINE void FloatRows(const Bf16* k_rows, const Bf16* v_rows, int dims, int32_t* pairs,
                                   float* k, float* v) {
  TransposeWords(reinterpret_cast<const int32_t*>(k_rows), dims / 2, pairs);
  const I16x upper = SetInt(static_cast<int32_t>(0xffff0000u));
  for (int w = 0; w < dims / 2; ++w) {
    for (int t = 0; t < kPageTokens; t += 16) {
      const I16x words = LoadInt(pairs + w * kPageTokens + t);
      Store(BitsToFloat(Shl<16>(words)), k + 2 * w * kPageTokens + t);
      Store(BitsToFloat(And(words, upper)), k + (2 * w + 1) * kPageTokens + t);
    }
  }
  for (int i = 0; i < kPageTokens * dims; i += 16) Store(LoadBf16(v_rows + i), v + i);
}

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OSCAR_SIMD_TARGET

#endif  // per-target include guard
