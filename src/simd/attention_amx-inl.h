// INT2 decode on the tiles of AMX-INT8 (TDPBSUD). Included once per target.
//
// An unpacked vector of codes, 16 lanes of 4 bytes, is one row of a tile's right operand as it is:
//
//   keys     C[head plane, token] += A[head plane, 64 dims] B[64 dims, 16 tokens]
//   values   C[head plane, dim]   += A[head plane, 64 tokens] B[64 tokens, 16 dims]
//
// B: row 4 v + p holds position p of vector v (attention_codes-inl.h says which four dims or tokens
// those are); A: the hi and lo planes of q, or of p s, in the same order, rows 2 h and 2 h + 1. 16
// products of tiles make a page of up to eight heads, so what costs is the unpacking, shared by all
// of them.
//
// `Tiles` is AmxTiles or its emulation (amx_tiles-inl.h).
#if defined(OSCAR_SIMD_ATTENTION_AMX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OSCAR_SIMD_ATTENTION_AMX_INL_H_
#undef OSCAR_SIMD_ATTENTION_AMX_INL_H_
#else
#define OSCAR_SIMD_ATTENTION_AMX_INL_H_
#endif

#include "simd/amx_tiles-inl.h"
#include "simd/attention_codes-inl.h"

#if HWY_TARGET == HWY_AVX3
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {

inline constexpr int kMaxTileHeads = 8;  // two planes each: 16 rows
inline constexpr int kTileDims = 64;     // of q in a left operand
inline constexpr int kMaxTileSteps = 8;  // 256 dims in groups of 32, or fewer

// q as left operands: one for each 64 dims; groups of 32 dims have one each, zero in the other
// half.
struct TileQuery {
  alignas(64) uint8_t tiles[kMaxTileSteps][2 * kMaxTileHeads][64];
  float step[kMaxTileHeads][kMaxPageGroups];
  float sums[kMaxTileHeads][kMaxPageGroups];
  float centre[kMaxTileHeads][kMaxPageGroups];
  ScaleLimits limits;
};

HWY_INLINE int TileStepsPerGroup(const BlockLayout& layout) {
  return layout.group_dims() < kTileDims ? 1 : layout.group_dims() / kTileDims;
}

inline void PrepareTileQuery(const float* q, const BlockLayout& layout, float scale, int head,
                             QueryPart part, TileQuery& out) {
  QueryCodes codes;
  PrepareQuery<2>(q, layout, scale, 0, part, codes);
  const int steps = TileStepsPerGroup(layout);
  const int width = layout.group_dims() < kTileDims ? layout.group_dims() : kTileDims;
  for (int g = 0; g < layout.num_groups(); ++g) {
    out.step[head][g] = codes.step[0][g];
    out.sums[head][g] = codes.sums[0][g];
    out.centre[head][g] = codes.centre[0][g];
    const uint16_t limit = codes.limits.bits[g];
    out.limits.bits[g] = head == 0 ? limit : std::min(out.limits.bits[g], limit);
    for (int k = 0; k < steps; ++k) {
      const int first = g * layout.group_dims() + k * kTileDims;
      uint8_t(&rows)[2 * kMaxTileHeads][64] = out.tiles[g * steps + k];
      std::memset(rows[2 * head], 0, 2 * sizeof(rows[0]));
      std::memcpy(rows[2 * head] + first % kTileDims, codes.planes[0].hi + first,
                  static_cast<size_t>(width));
      std::memcpy(rows[2 * head + 1] + first % kTileDims, codes.planes[0].lo + first,
                  static_cast<size_t>(width));
    }
  }
}

// Fetches a later block into L2, a line or a few at a time. Every line waits about 400 cycles in
// one of the 16 buffers of L1, so the 73 of a block have to be asked for evenly: a burst, or lines
// that stay in L1, cost a third of the time of a page from memory.
struct SpreadPrefetch {
  const std::byte* at;
  const std::byte* last;

  HWY_INLINE void Step(int lines) {
    // Without a branch at the end: the last line is asked for again.
    for (int i = 0; i < lines; ++i) {
      __builtin_prefetch(at, 0, 2);
      at = at < last ? at + 64 : at;
    }
  }
};

// `count` vectors of codes -> 4 rows of a right operand each.
HWY_INLINE void UnpackRows(const std::byte* HWY_RESTRICT codes, int count, SpreadPrefetch& prefetch,
                           uint8_t* HWY_RESTRICT out) {
  const __m512i mask = _mm512_set1_epi32(0x03030303);
  for (int v = 0; v < count; ++v) {
    if (v % 4 == 0) prefetch.Step(1);
    const __m512i words = _mm512_loadu_si512(codes + v * 64);
    _mm512_store_si512(out, _mm512_and_si512(words, mask));
    _mm512_store_si512(out + 64, _mm512_and_si512(_mm512_srli_epi32(words, 2), mask));
    _mm512_store_si512(out + 128, _mm512_and_si512(_mm512_srli_epi32(words, 4), mask));
    _mm512_store_si512(out + 192, _mm512_and_si512(_mm512_srli_epi32(words, 6), mask));
    out += 256;
  }
}

// 256 hi + lo of one head's two rows.
HWY_INLINE F16x PlaneSum(const int32_t* rows, int head) {
  const I16x hi = LoadInt(rows + 2 * head * 16), lo = LoadInt(rows + (2 * head + 1) * 16);
  return ToFloat(Add(Shl<8>(hi), lo));
}

using TileLogitBlocks = float[kMaxTileHeads / kMaxBlockHeads][kMaxBlockHeads][kPageTokens];

inline constexpr int kTileSums = 2 * kMaxTileHeads * 16;
// Sums of a page's keys with q: [groups][4 tiles of 16 tokens][2 rows per head][16].
using KeySums = int32_t[kMaxPageGroups * 4 * kTileSums];
// Unpacked codes of a page's keys, [D / 64][4 tiles of tokens], or values, [D / 16] right operands.
using RightOperands = uint8_t[kMaxPageDims / kTileDims * 4 * kTileBytes];

HWY_INLINE void UnpackKeys(const BlockLayout& layout, const std::byte* block,
                           SpreadPrefetch& prefetch, RightOperands& out) {
  const int steps = layout.head_dim() / kTileDims;
  for (int t = 0; t < 4; ++t) {
    for (int k = 0; k < steps; ++k) {
      UnpackRows(block + (t * steps + k) * 4 * 64, 4, prefetch, out + (k * 4 + t) * kTileBytes);
    }
  }
}

template <typename Tiles>
HWY_INLINE void KeyProducts(const BlockLayout& layout, const TileQuery& query,
                            const RightOperands& unpacked, int32_t* sums) {
  const int steps = TileStepsPerGroup(layout);
  for (int g = 0; g < layout.num_groups(); ++g, sums += 4 * kTileSums) {
    Tiles::template Zero<0>();
    Tiles::template Zero<1>();
    Tiles::template Zero<2>();
    Tiles::template Zero<3>();
    for (int k = 0; k < steps; ++k) {
      const int dim = g * layout.group_dims() + k * kTileDims;
      const uint8_t* right = unpacked + static_cast<size_t>(dim / kTileDims) * 4 * kTileBytes;
      Tiles::template Load<4>(query.tiles[g * steps + k], 64);
      Tiles::template Load<6>(right, 64);
      Tiles::template Dot<0, 4, 6>();
      Tiles::template Load<7>(right + kTileBytes, 64);
      Tiles::template Dot<1, 4, 7>();
      Tiles::template Load<6>(right + 2 * kTileBytes, 64);
      Tiles::template Dot<2, 4, 6>();
      Tiles::template Load<7>(right + 3 * kTileBytes, 64);
      Tiles::template Dot<3, 4, 7>();
    }
    Tiles::template Store<0>(sums, 64);
    Tiles::template Store<1>(sums + kTileSums, 64);
    Tiles::template Store<2>(sums + 2 * kTileSums, 64);
    Tiles::template Store<3>(sums + 3 * kTileSums, 64);
  }
}

// Logits in base 2 of a page, or what a remainder adds.
HWY_INLINE void KeyLogits(const BlockLayout& layout, const std::byte* block, int heads,
                          const TileQuery& query, QueryPart part, const int32_t* sums,
                          TileLogitBlocks& logits) {
  for (int g = 0; g < layout.num_groups(); ++g) {
    for (int t = 0; t < 4; ++t, sums += kTileSums) {
      const F16x s = LoadFp16(reinterpret_cast<const uint16_t*>(block + layout.KScale(t * 16, g)));
      const F16x m = LoadFp16(reinterpret_cast<const uint16_t*>(block + layout.KMin(t * 16, g)));
      for (int h = 0; h < heads; ++h) {
        float* out = logits[h / kMaxBlockHeads][h % kMaxBlockHeads] + t * 16;
        const F16x dot = Add(PlaneSum(sums, h), Set(query.centre[h][g]));
        const F16x value = MulAdd(dot, s, Mul(m, Set(query.sums[h][g])));
        const bool begins = g == 0 && part == QueryPart::kRounded;
        Store(MulAdd(value, Set(query.step[h][g]), begins ? Set(0.0f) : Load(out)), out);
      }
    }
  }
}

// What rounding left of q, for a page of which that counts.
template <typename Tiles>
HWY_NOINLINE void AddRemainder(const BlockLayout& layout, const std::byte* block, int heads,
                               const TileQuery& rest, TileLogitBlocks& logits) {
  alignas(64) RightOperands right;
  alignas(64) KeySums sums;
  SpreadPrefetch none{nullptr, nullptr};
  UnpackKeys(layout, block, none, right);
  KeyProducts<Tiles>(layout, rest, right, sums);
  KeyLogits(layout, block, heads, rest, QueryPart::kRemainder, sums, logits);
}

// Tile 5 times tiles 6 and 7, by way of tiles kC and kC + 1; sums: [2][16 rows][16].
template <typename Tiles, int kC>
HWY_INLINE void TileProducts(int32_t* sums) {
  Tiles::template Zero<kC>();
  Tiles::template Zero<kC + 1>();
  Tiles::template Dot<kC, 5, 6>();
  Tiles::template Dot<kC + 1, 5, 7>();
  Tiles::template Store<kC>(sums, 64);
  Tiles::template Store<kC + 1>(sums + kTileSums, 64);
}

// One block of up to four heads through a function for its size.
template <typename Function>
HWY_INLINE auto WithHeads(int heads, const Function& function) {
  switch (heads) {
    case 1:
      return function.template operator()<1>();
    case 2:
      return function.template operator()<2>();
    case 3:
      return function.template operator()<3>();
    default:
      return function.template operator()<4>();
  }
}

// `heads` (up to eight) query heads over a run of `count` sealed pages, after which those up to
// `known` follow; state as in attention_state.h, o: [heads, D].
//
// Stages of three pages alternate, so that tiles work while vectors do, and nobody waits for what
// has just been stored (a tile load cannot be served from a store that is still under way):
//
//   tiles    keys of page + 1                                        values of page
//   vectors            unpack values, softmax of page    unpack keys of page + 2    o
template <typename Tiles>
HWY_NOINLINE void TilePages(const BlockLayout& layout, const std::byte* const* blocks, int count,
                            int known, int last_visible, int heads, const TileQuery& query,
                            Remainder<TileQuery>& remainder, float* m, float* d, float* o) {
  const int dims = layout.head_dim(), groups = layout.num_groups();
  const int head_blocks = (heads + kMaxBlockHeads - 1) / kMaxBlockHeads;
  // A line with every four vectors that are unpacked, the others at as many places as there are.
  const int lines = static_cast<int>(layout.block_bytes() / 64) - dims / 8;
  const int places = 1 + head_blocks + groups * (2 + heads);
  const int lines_a_place = std::max(0, (lines + places - 1) / places);
  alignas(64) RightOperands right_k, right_v;
  alignas(64) uint8_t left[2 * kMaxTileHeads][64];
  alignas(64) int32_t sums[kMaxPageDims / 16][kTileSums];
  alignas(64) TileLogitBlocks p;
  alignas(64) KeySums key_sums[2];  // of even and odd pages
  SpreadPrefetch prefetch{nullptr, nullptr};
  Tiles::Configure(2 * heads);
  UnpackKeys(layout, blocks[0], prefetch, right_k);
  KeyProducts<Tiles>(layout, query, right_k, key_sums[0]);
  if (count > 1) UnpackKeys(layout, blocks[1], prefetch, right_k);
  for (int page = 0; page < count; ++page) {
    const std::byte* block = blocks[page];
    if (page + kTilePagesAhead < known) {
      const std::byte* later = blocks[page + kTilePagesAhead];
      prefetch = {later, later + layout.block_bytes() - 64};
    }
    if (page + 1 < count) KeyProducts<Tiles>(layout, query, right_k, key_sums[(page + 1) % 2]);
    UnpackRows(block + layout.v_codes_offset(), dims / 4, prefetch, right_v);
    KeyLogits(layout, block, heads, query, QueryPart::kRounded, key_sums[page % 2], p);
    if (query.limits.Exceeded(layout, block)) {
      AddRemainder<Tiles>(layout, block, heads, remainder.Get(layout), p);
    }
    prefetch.Step(lines_a_place);
    const int visible = page + 1 == count ? last_visible : kPageTokens;
    float alpha[kMaxTileHeads];
    bool counts = false;
    for (int b = 0; b < head_blocks; ++b) {
      const int first = b * kMaxBlockHeads;
      const bool any =
          WithHeads(std::min(heads - first, kMaxBlockHeads), [&]<int kHeads>() HWY_ATTR {
            float(&factors)[kMaxBlockHeads] =
                *reinterpret_cast<float(*)[kMaxBlockHeads]>(alpha + first);
            if (SoftmaxTiles<kHeads>(p[b], visible, m + first, d + first, factors)) return true;
            // Nothing changes for these heads.
            for (int h = 0; h < kHeads; ++h) {
              factors[h] = 1.0f;
              std::fill_n(p[b][h], kPageTokens, 0.0f);
            }
            return false;
          });
      counts = counts || any;
      prefetch.Step(lines_a_place);
    }
    for (int g = 0; counts && g < groups; ++g) {
      float step[kMaxTileHeads], low[kMaxTileHeads];
      for (int b = 0; b < head_blocks; ++b) {
        const int first = b * kMaxBlockHeads;
        WithHeads(std::min(heads - first, kMaxBlockHeads), [&]<int kHeads>() HWY_ATTR {
          RoundToPlanes<2, kHeads>(
              layout, block, g, p[b],
              [&](int h, int plane) { return left[2 * (first + h) + plane]; }, step + first,
              low + first);
        });
      }
      prefetch.Step(lines_a_place);
      if (g == 0 && page + 2 < count) UnpackKeys(layout, blocks[page + 2], prefetch, right_k);
      const int first = g * layout.group_dims() / 16, tiles = layout.group_dims() / 16;
      Tiles::template Load<5>(left, 64);
      // All products first, then all sums: one by one each would wait for the one before.
      for (int tile = 0; tile < tiles; tile += 2) {
        const uint8_t* operand = right_v + static_cast<size_t>(first + tile) * kTileBytes;
        Tiles::template Load<6>(operand, 64);
        Tiles::template Load<7>(operand + kTileBytes, 64);
        if (tile % 4 == 0) {
          TileProducts<Tiles, 0>(sums[tile]);
        } else {
          TileProducts<Tiles, 2>(sums[tile]);
        }
      }
      prefetch.Step(lines_a_place);
      for (int h = 0; h < heads; ++h) {
        const F16x h_step = Set(step[h]), h_low = Set(low[h]), h_alpha = Set(alpha[h]);
        for (int t = 0; t < tiles; ++t) {
          float* out = o + h * dims + (first + t) * 16;
          Store(MulAdd(Load(out), h_alpha, MulAdd(PlaneSum(sums[t], h), h_step, h_low)), out);
        }
        prefetch.Step(lines_a_place);
      }
    }
    if (!counts && page + 2 < count) UnpackKeys(layout, blocks[page + 2], prefetch, right_k);
  }
  Tiles::Release();
}

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_AVX3

#endif  // per-target include guard
