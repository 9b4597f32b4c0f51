// The GEMMs of prefill attention on tiles: BF16 rows by TDPBF16PS, packed pages by TDPBSUD and
// TDPBUUD. Included once per target.
//
//   q k^T   C[row, token] += A[row, dims] B[dims, 16 tokens]      four tiles of tokens
//   p v     C[row, dim]   += A[row, tokens] B[tokens, 16 dims]    D / 16 tiles of dims
//
// A tile has 16 query rows. BF16: A holds 32 numbers of a row, and the pair tiles of
// attention_tiles-inl.h are right operands as they are. Codes: A holds 64 numbers of 16 bits as two
// planes of bytes, n = 256 hi + lo, hi signed and lo not, in the order in which codes unpack
// (attention_codes-inl.h); both sums are exact, so a page gives the bits that it gives anywhere.
//
// Sums go through memory to vectors, which scale them. All tiles of a block are stored before the
// first is read: one by one, each would wait for the one before.
//
// `Tiles` is AmxTiles or its emulation (amx_tiles-inl.h).
#if defined(OSCAR_SIMD_ATTENTION_PREFILL_AMX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OSCAR_SIMD_ATTENTION_PREFILL_AMX_INL_H_
#undef OSCAR_SIMD_ATTENTION_PREFILL_AMX_INL_H_
#else
#define OSCAR_SIMD_ATTENTION_PREFILL_AMX_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "simd/amx_tiles-inl.h"
#include "simd/attention_prefill_vectors-inl.h"
#include "simd/attention_rounding-inl.h"
#include "simd/attention_scratch-inl.h"

#if HWY_TARGET == HWY_AVX3
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {

inline constexpr int kTileSize = 16 * 16;  // sums of a tile
inline constexpr int kOperandDims = 64;    // codes that a right operand sums over

// Rows [first, end), 16 at a time, from q to o: logits and values on tiles, softmax and the rest on
// vectors. Rows of a tile that are not among them are whatever memory holds; nobody reads what
// becomes of them. For some 130 ns after any tile instruction a Xeon multiplies 512 bits at half
// the rate, so what counts is to change seldom and to keep sums in L1: more rows at once, or tiles
// of one block between the vectors of another, are slower.
template <typename Stages>
HWY_INLINE void RunStages(const Stages& stages, int first, int end) {
  const int begin = first / kTileRows * kTileRows;
  stages.LogitTiles(begin);
  for (int row = begin; row < end; row += kTileRows) {
    const int from = std::max(row, first), to = std::min(row + kTileRows, end);
    stages.Weigh(from, to);
    stages.ValueTiles(row);
    if (row + kTileRows < end && Stages::kLogitsAhead) stages.LogitTiles(row + kTileRows);
    stages.Outputs(from, to);
    if (row + kTileRows < end && !Stages::kLogitsAhead) stages.LogitTiles(row + kTileRows);
  }
}

template <typename Tiles>
HWY_INLINE void ZeroSums() {
  Tiles::template Zero<0>();
  Tiles::template Zero<1>();
  Tiles::template Zero<2>();
  Tiles::template Zero<3>();
}
// Four tiles that lie `bytes` apart.
template <typename Tiles>
HWY_INLINE void StoreSums(void* to, size_t bytes, size_t stride) {
  auto* const p = static_cast<char*>(to);
  Tiles::template Store<0>(p, stride);
  Tiles::template Store<1>(p + bytes, stride);
  Tiles::template Store<2>(p + 2 * bytes, stride);
  Tiles::template Store<3>(p + 3 * bytes, stride);
}

// ---- BF16 rows ----

// Tile kA, pairs of a summed index, times four tiles of 16 columns.
template <typename Tiles, int kA>
HWY_INLINE void PairProducts(const int32_t* right, size_t stride) {
  Tiles::template Load<6>(right, stride);
  Tiles::template DotBf16<0, kA, 6>();
  Tiles::template Load<7>(right + 16, stride);
  Tiles::template DotBf16<1, kA, 7>();
  Tiles::template Load<6>(right + 32, stride);
  Tiles::template DotBf16<2, kA, 6>();
  Tiles::template Load<7>(right + 48, stride);
  Tiles::template DotBf16<3, kA, 7>();
}

// mask(rows): of logits; clear(rows): of weights.
template <typename Tiles, typename Mask, typename Clear>
struct RowStages {
  static constexpr bool kLogitsAhead = true;  // with the values of the block before

  int dims;
  const Scratch& s;
  const Mask& mask;
  const Clear& clear;

  HWY_INLINE void LogitTiles(int row) const {
    const uint16_t* q = s.q_bf16 + row * dims;
    ZeroSums<Tiles>();
    for (int d = 0; d < dims; d += 32) {
      Tiles::template Load<4>(q + d, static_cast<size_t>(dims) * 2);
      PairProducts<Tiles, 4>(s.k_pairs + d / 2 * kPageTokens, kPageTokens * 4);
    }
    StoreSums<Tiles>(s.p + row * kPageTokens, 64, kPageTokens * 4);
  }
  HWY_INLINE void Weigh(int first, int end) const {
    mask(first, end);
    Softmax<Weights::kPairs>(s, first, end, 0);
    clear(first, end);
  }
  // 64 tokens in two halves, 64 dims at a time.
  HWY_INLINE void ValueTiles(int row) const {
    const auto stride = static_cast<size_t>(dims) * 4;
    const uint16_t* weights = s.weights + row * kPageTokens;
    Tiles::template Load<4>(weights, kPageTokens * 2);
    Tiles::template Load<5>(weights + 32, kPageTokens * 2);
    for (int d = 0; d < dims; d += 64) {
      ZeroSums<Tiles>();
      PairProducts<Tiles, 4>(s.v_pairs + d, stride);
      PairProducts<Tiles, 5>(s.v_pairs + 16 * dims + d, stride);
      StoreSums<Tiles>(s.sums + d * kTileRows, kTileSize * 4, 64);
    }
  }
  // o = alpha o + p v.
  HWY_INLINE void Outputs(int first, int end) const {
    for (int r = first; r < end; ++r) {
      const F16x alpha = Set(s.alpha[r]);
      float* const o = s.o + r * dims;
      const float* sum = reinterpret_cast<const float*>(s.sums) + r % kTileRows * 16;
      for (int d = 0; d < dims; d += 16, sum += kTileSize) {
        Store(MulAdd(Load(o + d), alpha, Load(sum)), o + d);
      }
    }
  }
};

// ---- packed pages ----

// Codes as right operands, [depth / 64][columns][16 rows][16 lanes][4]. `columns` tiles of 16 lanes
// have `depth` codes per lane: tokens and dims of K, dims and tokens of V. kHalves: groups of 32,
// each in a separate operand whose other half is zero, [depth / 32][columns].
template <int kBits, bool kHalves>
HWY_NOINLINE void UnpackOperands(const std::byte* codes, const std::byte* high, int columns,
                                 int depth, uint8_t* out) {
  constexpr int kLowBits = kBits == 3 ? 2 : kBits;
  constexpr int kPerVector = 8 / kLowBits;  // rows of four codes
  const __m512i mask = _mm512_set1_epi32(((1 << kLowBits) - 1) * 0x01010101);
  const int rows = depth / 4, vectors = rows / kPerVector;
  if constexpr (kHalves) {
    std::memset(out, 0, static_cast<size_t>(depth / 32 * columns) * kTileBytes);
  }
  for (int column = 0; column < columns; ++column) {
    for (int i = 0; i < vectors; ++i) {
      const int vector = column * vectors + i;
      const __m512i words = _mm512_loadu_si512(codes + vector * 64);
      [[maybe_unused]] __m512i tops;
      if constexpr (kBits == 3) tops = _mm512_loadu_si512(high + vector / 2 * 64);
      for (int p = 0; p < kPerVector; ++p) {
        __m512i bytes =
            _mm512_and_si512(_mm512_srl_epi32(words, _mm_cvtsi32_si128(p * kLowBits)), mask);
        if constexpr (kBits == 3) {
          const __m512i bit =
              _mm512_and_si512(_mm512_srl_epi32(tops, _mm_cvtsi32_si128(vector % 2 * 4 + p)),
                               _mm512_set1_epi32(0x01010101));
          bytes = _mm512_or_si512(bytes, _mm512_slli_epi32(bit, 2));
        }
        const int row = i * kPerVector + p;
        const int operand = (kHalves ? row / 8 : row / 16) * columns + column;
        _mm512_storeu_si512(out + operand * kTileBytes + row % 16 * 64, bytes);
      }
    }
  }
}

inline void UnpackOperandsOf(int bits, bool halves, const std::byte* codes, const std::byte* high,
                             int columns, int depth, int32_t* out) {
  const auto unpack = [&]<int kBits>() HWY_ATTR {
    auto* const bytes = reinterpret_cast<uint8_t*>(out);
    if (halves) {
      UnpackOperands<kBits, true>(codes, high, columns, depth, bytes);
    } else {
      UnpackOperands<kBits, false>(codes, high, columns, depth, bytes);
    }
  };
  switch (bits) {
    case 2:
      return unpack.template operator()<2>();
    case 3:
      return unpack.template operator()<3>();
    default:
      return unpack.template operator()<4>();
  }
}

// The codes of K and V in place of pair tiles.
inline void UnpackKeyOperands(const BlockLayout& layout, const std::byte* block, int32_t* k) {
  UnpackOperandsOf(layout.k_bits(), layout.group_dims() < kOperandDims, block,
                   block + layout.k_high_offset(), kPageTokens / 16, layout.head_dim(), k);
}
inline void UnpackValueOperands(const BlockLayout& layout, const std::byte* block, int32_t* v) {
  UnpackOperandsOf(layout.v_bits(), false, block + layout.v_codes_offset(),
                   block + layout.v_high_offset(), layout.head_dim() / 16, kPageTokens, v);
}

// The planes of 16 rows in tiles 4 and 5 times two right operands.
template <typename Tiles>
HWY_INLINE void PlaneProducts(const uint8_t* right) {
  Tiles::template Load<6>(right, 64);
  Tiles::template Load<7>(right + kTileBytes, 64);
  Tiles::template Dot<0, 4, 6>();
  Tiles::template Dot<1, 4, 7>();
  Tiles::template DotUnsigned<2, 5, 6>();
  Tiles::template DotUnsigned<3, 5, 7>();
}

// Sums go in pairs of columns: of both their high planes, then of both low ones. 256 hi + lo.
HWY_INLINE F16x PlanesToFloat(const int32_t* sums) {
  return ToFloat(Add(Shl<8>(LoadInt(sums)), LoadInt(sums + 2 * kTileSize)));
}
constexpr int PlanesAt(int column) { return (column / 2 * 4 + column % 2) * kTileSize; }

// The float tile of keys that are not rows, [D][64], as pair tiles of BF16 numbers and of what they
// leave, in BF16, too: to 2^-17 of a key.
inline HWY_NOINLINE void SplitKeys(const float* k, int dims, int32_t* high, int32_t* low) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
  const auto pair_of = [&](__m512i even, __m512i odd) HWY_ATTR {
    return _mm512_or_si512(_mm512_srli_epi32(even, 16), _mm512_and_si512(odd, upper));
  };
  const auto rest_of = [&](__m512 x) HWY_ATTR {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512 rest = _mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_and_si512(bits, upper)));
    return _mm512_add_epi32(_mm512_castps_si512(rest), _mm512_set1_epi32(0x8000));
  };
  for (int d = 0; d < dims; d += 2, k += 2 * kPageTokens) {
    for (int t = 0; t < kPageTokens; t += 16) {
      const __m512 even = _mm512_loadu_ps(k + t), odd = _mm512_loadu_ps(k + kPageTokens + t);
      const int at = d / 2 * kPageTokens + t;
      _mm512_storeu_si512(high + at, pair_of(_mm512_castps_si512(even), _mm512_castps_si512(odd)));
      _mm512_storeu_si512(low + at, pair_of(rest_of(even), rest_of(odd)));
    }
  }
}

// `needed`: rows that want a remainder, or null. kSplit: keys that are not rows are two BF16
// numbers each, as q is; else they are floats.
template <typename Tiles, bool kSplit, typename Mask>
struct CodeStages {
  static constexpr bool kLogitsAhead = false;  // both want the same sums
  static constexpr int kColumns = kPageTokens / 16;

  const BlockLayout& layout;
  const Scratch& s;
  const bool* needed;
  const Mask& mask;
  const uint8_t* order = (layout.v_bits() == 4 ? kPackedOrder<4> : kPackedOrder<2>).data();
  int dims = layout.head_dim();
  int groups = layout.num_groups();

  HWY_INLINE void LogitTiles(int row) const {
    if (!layout.is_rows()) {
      if constexpr (kSplit) {
        SplitLogits(row);
      } else {
        PlainLogits<false>(dims, s, row, row + kTileRows);
      }
      return;
    }
    for (int g = 0; g < groups; ++g) {
      KeyTiles(s.rounded, row, g);
      KeyLogits<QueryPart::kRounded>(row, row + kTileRows, g);
    }
  }
  // All but what both parts leave of each other.
  HWY_INLINE void SplitLogits(int row) const {
    constexpr size_t kStride = kPageTokens * 4;
    const auto q_stride = static_cast<size_t>(dims) * 2;
    ZeroSums<Tiles>();
    for (int d = 0; d < dims; d += 32) {
      Tiles::template Load<4>(s.q_bf16 + row * dims + d, q_stride);
      Tiles::template Load<5>(s.rest.codes + row * dims + d, q_stride);
      PairProducts<Tiles, 4>(s.k_pairs + d / 2 * kPageTokens, kStride);
      PairProducts<Tiles, 5>(s.k_pairs + d / 2 * kPageTokens, kStride);
      PairProducts<Tiles, 4>(s.k_rest() + d / 2 * kPageTokens, kStride);
    }
    StoreSums<Tiles>(s.p + row * kPageTokens, 64, kStride);
  }
  HWY_INLINE void KeyTiles(const RowCodes& q, int row, int g) const {
    const int width = layout.group_dims(), steps = std::max(1, width / kOperandDims);
    const auto stride = static_cast<size_t>(dims) * 2;
    const auto* left = reinterpret_cast<const uint8_t*>(q.codes + row * dims) +
                       g * width / kOperandDims * kOperandDims;
    const auto* right =
        reinterpret_cast<const uint8_t*>(s.k_pairs) + g * steps * kColumns * kTileBytes;
    for (int t = 0; t < kColumns; t += 2) {
      ZeroSums<Tiles>();
      for (int k = 0; k < steps; ++k) {
        Tiles::template Load<4>(left + k * kOperandDims, stride);
        Tiles::template Load<5>(left + dims + k * kOperandDims, stride);
        PlaneProducts<Tiles>(right + (k * kColumns + t) * kTileBytes);
      }
      StoreSums<Tiles>(s.sums + PlanesAt(t), kTileSize * 4, 64);
    }
  }
  // Logits in base 2 as PackedLogits has them, or what a remainder adds. Of a tile.
  template <QueryPart kPart>
  HWY_INLINE void KeyLogits(int first, int end, int g) const {
    constexpr bool kRest = kPart == QueryPart::kRemainder;
    const RowCodes& q = kRest ? s.rest : s.rounded;
    F16x scale[kColumns], min[kColumns];
    OSCAR_UNROLL
    for (int t = 0; t < kColumns; ++t) {
      scale[t] = Load(s.meta.k_scale + g * kPageTokens + t * 16);
      min[t] = Load(s.meta.k_min + g * kPageTokens + t * 16);
    }
    for (int r = first; r < end; ++r) {
      if (kRest && !needed[r]) continue;
      const int at = r * groups + g;
      const F16x centre = Set(q.centre[at]), sum = Set(q.sum[at]), step = Set(q.step[at]);
      const int32_t* sums = s.sums + r % kTileRows * 16;
      OSCAR_UNROLL
      for (int t = 0; t < kColumns; ++t) {
        const F16x dot = Add(PlanesToFloat(sums + PlanesAt(t)), centre);
        const F16x value = MulAdd(dot, scale[t], Mul(min[t], sum));
        float* const out = s.p + r * kPageTokens + t * 16;
        const F16x before = g == 0 && !kRest ? Set(0.0f) : Load(out);
        Store(MulAdd(value, step, before), out);
      }
    }
  }
  HWY_INLINE void Weigh(int first, int end) const {
    if (needed != nullptr && std::any_of(needed + first, needed + end, [](bool x) { return x; })) {
      for (int g = 0; g < groups; ++g) {
        KeyTiles(s.rest, first / kTileRows * kTileRows, g);
        KeyLogits<QueryPart::kRemainder>(first, end, g);
      }
    }
    mask(first, end);
    Softmax<Weights::kPlanes>(s, first, end, groups, order);
  }
  HWY_INLINE void ValueTiles(int row) const {
    const auto* right = reinterpret_cast<const uint8_t*>(s.v_pairs);
    const int columns = layout.group_dims() / 16;
    for (int g = 0; g < groups; ++g) {
      const auto* left =
          reinterpret_cast<const uint8_t*>(s.weights + (g * kMaxRows + row) * kPageTokens);
      Tiles::template Load<4>(left, 2 * kPageTokens);
      Tiles::template Load<5>(left + kPageTokens, 2 * kPageTokens);
      for (int c = g * columns; c < (g + 1) * columns; c += 2) {
        ZeroSums<Tiles>();
        PlaneProducts<Tiles>(right + c * kTileBytes);
        StoreSums<Tiles>(s.sums + PlanesAt(c), kTileSize * 4, 64);
      }
    }
  }
  // o = alpha o + sum (p_t s_t) code_t + sum p_t min_t.
  HWY_INLINE void Outputs(int first, int end) const {
    const int columns = layout.group_dims() / 16;
    for (int r = first; r < end; ++r) {
      const F16x alpha = Set(s.alpha[r]);
      const int32_t* sums = s.sums + r % kTileRows * 16;
      float* o = s.o + r * dims;
      for (int g = 0; g < groups; ++g) {
        const F16x step = Set(s.weight_step[g * kMaxRows + r]);
        const F16x min = Set(s.weight_min[g * kMaxRows + r]);
        for (int c = 0; c < columns; c += 2, sums += 4 * kTileSize, o += 32) {
          const F16x even = MulAdd(PlanesToFloat(sums), step, min);
          const F16x odd = MulAdd(PlanesToFloat(sums + kTileSize), step, min);
          Store(MulAdd(Load(o), alpha, even), o);
          Store(MulAdd(Load(o + 16), alpha, odd), o + 16);
        }
      }
    }
  }
};

// Codes on tiles, BF16 rows as `Vectors` has them.
template <typename Tiles, typename Vectors>
struct CodeTilePath : Vectors {
  static void Begin(int rows) { Tiles::Configure(std::min(rows, kTileRows)); }
  static void End() { Tiles::Release(); }

  template <QueryPart kPart>
  static void PrepareQuery(const float* q, const BlockLayout& layout, float factor, int row,
                           const Scratch& s) {
    QueryToInt16<kPart, true>(q, layout, factor, row, s);
  }
  static void PrepareKeys(const BlockLayout& layout, const std::byte* block, const Scratch& s) {
    UnpackKeyOperands(layout, block, s.k_pairs);
  }
  static void PrepareValues(const BlockLayout& layout, const std::byte* block, const Scratch& s) {
    UnpackValueOperands(layout, block, s.v_pairs);
  }
  template <typename Mask>
  static HWY_NOINLINE void ReadCodes(const BlockLayout& layout, const Scratch& s,
                                     const bool* needed, int first, int end, const Mask& mask) {
    RunStages(CodeStages<Tiles, false, Mask>{layout, s, needed, mask}, first, end);
  }
};

// BF16 rows on tiles, too, and keys that are not rows as two BF16 numbers.
template <typename Tiles>
struct TilePath : CodeTilePath<Tiles, VectorPath<PairOp::kVnni, /*kBf16=*/true>> {
  // q [D], of row `row`, is in place; what its rounded form leaves.
  static void PrepareFloatQuery(int dims, int row, const Scratch& s) {
    for (int d = row * dims; d < (row + 1) * dims; d += 16) {
      const auto* rounded = reinterpret_cast<const Bf16*>(s.q_bf16) + d;
      StoreBf16(Sub(Load(s.q + d), LoadBf16(rounded)), reinterpret_cast<Bf16*>(s.rest.codes) + d);
    }
  }
  static void PrepareFloatKeys(int dims, const Scratch& s) {
    SplitKeys(s.k, dims, s.k_pairs, s.k_rest());
  }
  template <typename Mask, typename Clear>
  static HWY_NOINLINE void ReadRows(int dims, const Scratch& s, int first, int end,
                                    const Mask& mask, const Clear& clear) {
    RunStages(RowStages<Tiles, Mask, Clear>{dims, s, mask, clear}, first, end);
  }
  template <typename Mask>
  static HWY_NOINLINE void ReadCodes(const BlockLayout& layout, const Scratch& s,
                                     const bool* needed, int first, int end, const Mask& mask) {
    RunStages(CodeStages<Tiles, true, Mask>{layout, s, needed, mask}, first, end);
  }
};

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_AVX3

#endif  // per-target include guard
