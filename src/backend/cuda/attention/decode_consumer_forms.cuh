// The decode kernel's consumer warps for keys that are not rows: groups along tokens (with more
// bits for some dims, or token norms), and codebooks. Windows and values are DecodeConsumer's.
// Device only; decode_attention.cuh describes the whole.
//
//   channels   logit = n_t (sum_d (q_d s_d) code + sum_d q_d m_d)
//              s_d and m_d are those of the token group: q_d s_d is made once per group of a page,
//              as a sum of two BF16 (2^-17 of each term), and the mins are one number per query.
//   mixed      the same; the upper two bits of the boosted dims are one more k-step per 16 of them,
//              whose queries (4 q_d s_d) go through shared memory, because a dim's place among them
//              is data.
//   codebook   logit = factor_t sum_d q_d B[code], B a whole number that BF16 holds.
//
// The query is read from shared memory for every group; it would take 16 registers. D 128 with up
// to four query heads is DecodeConsumerPackedForms.
//
// Codes are whole numbers in BF16: 128 + code 2^p is one LOP3, and one HFMA2 makes code of it, both
// exact. No subnormals as in DecodeConsumer: where one dim towers over the others, as channels do
// that these methods are made for, the sum keeps all of its bits.
#pragma once

#include <bit>

#include "cuda/attention/decode_consumer.cuh"
#include "quant/turboquant.h"

namespace oscar::cuda {

// Keys are not rows; which form, bits and groups of tokens they have is data, as V's bits are.
template <int kDimV, int kGroupV, int kHeadsV>
struct FormDecodeTraits : DecodeTraits<BlockKind::kInt4, kDimV, kGroupV, kHeadsV> {
  using Params = FormDecodeParams;
  static constexpr bool kForms = true;
  // Consumer warps, and registers a thread, as many as leave no spills to speak of.
  static constexpr bool kFewGroups = kDimV / kGroupV <= 2;
  static constexpr int kWarps = kHeadsV > 4 ? 6 : kFewGroups ? 12 : 10;
  static constexpr int kRegisters = kHeadsV > 4 ? 255 : kFewGroups ? 128 : 168;
  static constexpr int kThreads = (kWarps + 2) * 32;

  OSCAR_HD static constexpr int Rank(int warp, int first_warp) {
    return warp < first_warp ? warp - first_warp + kWarps : warp - first_warp;
  }
  OSCAR_HD static int StageBytes(const Params& p) { return p.stage_bytes; }
};

// Four bytes, from code `first` on, of the levels as BF16: their low bytes, or the high ones.
constexpr uint32_t LevelBytes(int bits, int first, bool high) {
  uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i) {
    const auto level = static_cast<float>(ByteLevel(bits, first + i));
    bytes |= (std::bit_cast<uint32_t>(level) >> (high ? 24 : 16) & 0xffu) << (8 * i);
  }
  return bytes;
}

template <typename T>
class DecodeConsumerForms : DecodeConsumer<T> {
 public:
  __device__ DecodeConsumerForms(const typename T::Params& p, uint8_t* shared,
                                 const DecodeShared<T>& at, int warp, int lane)
      : DecodeConsumer<T>(p, shared, at, warp, lane) {}

  __device__ __forceinline__ void Run() {
    this->ForEachItem([&](const DecodeItem& item, const uint8_t* q,
                          int rank) __attribute__((always_inline)) {
      const bool pages = item.kind == kItemPages;
      if (pages) {
        // Columns of heads that are not there repeat the first one; nobody reads them.
        q_row_ = q + (row_ < item.heads ? row_ : 0) * (T::kDim * 2) + quad_ * 4;
        factor_[0][0] = factor_[0][1] = this->p_.scale_log2;
      } else {
        this->LoadQ(item, q, false);
      }
      this->Reset();
      if (pages) {
        for (int i = rank; i < item.count; i += T::kWarps) Page(item.first + i);
      } else {
        for (int i = rank; i < item.count; i += T::kWarps)
          this->Unit(this->ValidRows(item, item.first + i), 0);
      }
      this->WaitForState();
      ForKind(
          Form().layout.v_kind(), [&]<BlockKind kV>() __attribute__((always_inline)) {
            this->template WriteState<SideWords<kV>>(item, rank, pages);
          });
    });
  }

 private:
  using Base = DecodeConsumer<T>;
  using Words = typename Base::Words;
  using Base::lane_, Base::quad_, Base::row_, Base::shared_, Base::factor_;
  static_assert(T::kNB == 1);

  __device__ __forceinline__ const FormBlocks& Form() const { return this->p_.form; }

  // Page `index` of the history.
  __device__ __forceinline__ void Page(int index) {
    this->WaitStage();
    this->LoadId();
    uint8_t* block = shared_ + this->StageOffset();
    const BlockLayout& layout = Form().layout;
    float s[4][T::kNB][4];
    if (layout.k_form() == SideForm::kCodebook) {
      uint32_t q[T::kSteps][2];
#pragma unroll
      for (int step = 0; step < T::kSteps; ++step) {
        q[step][0] = QueryPair(step, 0);
        q[step][1] = QueryPair(step, 1);
      }
      ForKind(
          layout.k_kind(), [&]<BlockKind kK>() __attribute__((always_inline)) {
            Words words;
            LevelTiles<SideWords<kK>, 0>(s, words, q, block);
          });
    } else if (layout.k_form() == SideForm::kMixed) {
      ChannelPage<SideWords<BlockKind::kInt2>, true>(s, block, index);
    } else {
      ForKind(
          layout.k_kind(), [&]<BlockKind kK>() __attribute__((always_inline)) {
            ChannelPage<SideWords<kK>, false>(s, block, index);
          });
    }
    const uint8_t* v_metas = block + layout.v_meta_offset();
    this->Reference(s, v_metas);
    ForKind(
        layout.v_kind(), [&]<BlockKind kV>() __attribute__((always_inline)) {
          Words words;
          this->template ValueTiles<SideWords<kV>, 0>(s, words, block + layout.v_codes_offset(),
                                                      v_metas);
        });
    this->ReleaseStage();
  }

  // ---- operands ----

  // Dims 16 step + 8 j + 2 quad_ + {0, 1} of this lane's head.
  __device__ __forceinline__ uint32_t QueryPair(int step, int j) const {
    return *reinterpret_cast<const uint32_t*>(q_row_ + step * 32 + j * 16);
  }

  // Both halves of `x`, whole numbers 2^kAt times those wanted and below 2^7, as BF16.
  template <int kAt>
  __device__ static __forceinline__ uint32_t WholeBf16(uint32_t x) {
    constexpr float kDown = 1.0f / (1 << kAt);
    const uint32_t biased = x | 0x43004300u;  // 128 +
    const __nv_bfloat162 value =
        __hfma2(*reinterpret_cast<const __nv_bfloat162*>(&biased), __float2bfloat162_rn(kDown),
                __float2bfloat162_rn(-128.0f * kDown));
    return *reinterpret_cast<const uint32_t*>(&value);
  }
  // Position of the codes that Pick() leaves.
  template <typename S, int kStep>
  static constexpr int kPickedAt = S::kLowBits*(kStep % S::kPerWord % (S::kPerWord / 2));

  // The place of a tile's k-step among those of its sub-block; its words are loaded where they
  // begin.
  template <int kTile, int kStep>
  static constexpr int kWordStepOf = kTile* T::kSubSteps + kStep % T::kSubSteps;
  template <typename S, int kTile, int kStep>
  __device__ __forceinline__ void Load(Words& x, const uint8_t* codes) const {
    constexpr int kSub = kStep / T::kSubSteps, kBytes = Base::template kSubBytes<S>;
    Base::template LoadWords<S, kWordStepOf<kTile, kStep>>(
        x, codes + kSub * kBytes, codes + Base::template kHighAt<S> + kSub * (kBytes / 2), lane_);
  }

  template <typename S, int kStep>
  __device__ static __forceinline__ uint32_t Codes(uint32_t word, uint32_t shifted, uint32_t high) {
    constexpr int kAt = kPickedAt<S, kStep>;
    const uint32_t x = Base::template Pick<S, kStep>(word, shifted, high);
    // BF16 has seven bits below 128.
    if constexpr (kAt + S::kBits > 7) return WholeBf16<kAt - 4>(x >> 4);
    return WholeBf16<kAt>(x);
  }
  template <typename S, int kStep>
  __device__ static __forceinline__ uint32_t Levels(uint32_t word, uint32_t shifted,
                                                    uint32_t high) {
    uint32_t x = Base::template Pick<S, kStep>(word, shifted, high) >> kPickedAt<S, kStep>;
    // Of four bits the upper eight levels are looked up; the others are those mirrored.
    constexpr int kBits = S::kBits, kFirst = kBits == 4 ? 8 : 0,
                  kNext = kBits == 2 ? 0 : kFirst + 4;
    uint32_t sign = 0;
    if constexpr (kBits == 4) {
      const uint32_t lower = ~x & 0x00080008u;
      x = (x ^ (lower - (lower >> 3))) & 0x00070007u;
      sign = lower << 12;
    }
    const uint32_t selector = x | x >> 8;  // nibbles 0 and 2
    const uint32_t low = __byte_perm(LevelBytes(kBits, kFirst, false),
                                     LevelBytes(kBits, kNext, false), selector & 0x0707u);
    const uint32_t top = __byte_perm(LevelBytes(kBits, kFirst, true),
                                     LevelBytes(kBits, kNext, true), selector & 0x0707u);
    return __byte_perm(low, top, 0x6240) | sign;
  }

  // ---- codebook ----

  template <typename S, int kTile, int kStep>
  __device__ __forceinline__ void LevelSteps(float (&c)[4], Words& x,
                                             const uint32_t (&q)[T::kSteps][2],
                                             const uint8_t* codes) const {
    if constexpr (kStep < T::kSteps) {
      constexpr int kWordStep = kWordStepOf<kTile, kStep>;
      Load<S, kTile, kStep>(x, codes);
      const uint32_t a0 = Levels<S, kWordStep>(x.w.x, x.shifted.x, x.high.x),
                     a1 = Levels<S, kWordStep>(x.w.z, x.shifted.z, x.high.z),
                     a2 = Levels<S, kWordStep>(x.w.y, x.shifted.y, x.high.y),
                     a3 = Levels<S, kWordStep>(x.w.w, x.shifted.w, x.high.w);
      MmaBf16(c, a0, a1, a2, a3, q[kStep][0], q[kStep][1]);
      LevelSteps<S, kTile, kStep + 1>(c, x, q, codes);
    }
  }
  template <typename S, int kTile>
  __device__ __forceinline__ void LevelTiles(float (&s)[4][T::kNB][4], Words& x,
                                             const uint32_t (&q)[T::kSteps][2],
                                             const uint8_t* block) const {
    if constexpr (kTile < 4) {
      float c[4] = {};
      LevelSteps<S, kTile, 0>(c, x, q, block);
      const auto* norms =
          reinterpret_cast<const __half*>(block + Form().layout.KRowNorm(kTile * 16 + row_));
      const float unit = CodebookFactor(S::kBits, T::kDim, 1.0f);
      Scale(s[kTile][0], c, __half2float(norms[0]) * unit, __half2float(norms[8]) * unit);
      LevelTiles<S, kTile + 1>(s, x, q, block);
    }
  }
  __device__ static __forceinline__ void Scale(float (&s)[4], const float (&c)[4], float first,
                                               float second) {
    s[0] = c[0] * first;
    s[1] = c[1] * first;
    s[2] = c[2] * second;
    s[3] = c[3] * second;
  }

  // ---- channels ----

  // Queries times the scales of a token group.
  struct Folded {
    uint32_t part[2][T::kSteps][2];
    float base[2];  // what mins add, of columns 2 quad_ + {0, 1}
  };
  // Two numbers as a sum of two BF16.
  struct Parts {
    uint32_t part[2];
  };
  __device__ static __forceinline__ Parts PartsOf(float x, float y) {
    const uint32_t high = PackBf16(x, y);
    const uint32_t low = PackBf16(x - Bf16Low(high), y - Bf16High(high));
    return {{high, low}};
  }

  template <typename S, bool kBoosts>
  __device__ __forceinline__ void ChannelPage(float (&s)[4][T::kNB][4], uint8_t* block, int index) {
    Words words;
    Folded f;
    Fold<kBoosts>(f, block, index, 0);
    ChannelTile<S, kBoosts, 0>(s, words, f, block);
    ChannelTile<S, kBoosts, 1>(s, words, f, block);
    if (Form().layout.group_tokens() == 32) Fold<kBoosts>(f, block, index, 1);
    ChannelTile<S, kBoosts, 2>(s, words, f, block);
    ChannelTile<S, kBoosts, 3>(s, words, f, block);
  }

  template <bool kBoosts>
  __device__ __forceinline__ void Fold(Folded& f, uint8_t* block, int index, int group) const {
    const FormBlocks& form = Form();
    const int boosted = form.layout.boosted_dims();
    float* const boosts = reinterpret_cast<float*>(block + form.copied_bytes());
    if constexpr (kBoosts) {
      __syncwarp();
      for (int i = lane_; i < FormBlocks::kScratchHeads * boosted; i += 32) boosts[i] = 0.0f;
      __syncwarp();
    }
    // Of this lane's first dim, in either half of the dims.
    const int lane_dim = group * T::kDim + quad_ * 2;
    const uint8_t* const metas[2] = {form.ChannelMeta(block, index, 0) + lane_dim * 4,
                                     form.ChannelMeta(block, index, 1) + lane_dim * 4};
    [[maybe_unused]] const uint8_t* indices[2] = {};
    if constexpr (kBoosts) {
      indices[0] = form.ChannelIndex(block, index, 0) + quad_ * 2;
      indices[1] = form.ChannelIndex(block, index, 1) + quad_ * 2;
    }
    float base = 0.0f;
#pragma unroll
    for (int step = 0; step < T::kSteps; ++step) {
      const int half = step < T::kSteps / 2 ? 0 : 1;
      const int first = step % (T::kSteps / 2) * 16;  // dim of the half
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint2 pairs = *reinterpret_cast<const uint2*>(metas[half] + (first + j * 8) * 4);
        const float2 a = HalfPair(pairs.x), b = HalfPair(pairs.y);
        const uint32_t query = QueryPair(step, j);
        const float q0 = Bf16Low(query), q1 = Bf16High(query);
        const float f0 = q0 * a.x, f1 = q1 * b.x;
        base = fmaf(q0, a.y, fmaf(q1, b.y, base));
        const Parts parts = PartsOf(f0, f1);
        f.part[0][step][j] = parts.part[0];
        f.part[1][step][j] = parts.part[1];
        if constexpr (kBoosts) {
          const uchar2 place = *reinterpret_cast<const uchar2*>(indices[half] + first + j * 8);
          // Two dims of one place are two terms: pages are not trusted to have none.
          if (place.x < boosted) atomicAdd(boosts + row_ * boosted + place.x, 4.0f * f0);
          if (place.y < boosted) atomicAdd(boosts + row_ * boosted + place.y, 4.0f * f1);
        }
      }
    }
    if constexpr (kBoosts) __syncwarp();
    base += __shfl_xor_sync(~0u, base, 1);
    base += __shfl_xor_sync(~0u, base, 2);
    f.base[0] = __shfl_sync(~0u, base, quad_ * 8);
    f.base[1] = __shfl_sync(~0u, base, quad_ * 8 + 4);
  }

  template <typename S, int kTile, int kStep>
  __device__ __forceinline__ void ChannelSteps(float (&c)[4], Words& x, const Folded& f,
                                               const uint8_t* codes) const {
    if constexpr (kStep < T::kSteps) {
      constexpr int kWordStep = kWordStepOf<kTile, kStep>;
      Load<S, kTile, kStep>(x, codes);
      const uint32_t a0 = Codes<S, kWordStep>(x.w.x, x.shifted.x, x.high.x),
                     a1 = Codes<S, kWordStep>(x.w.z, x.shifted.z, x.high.z),
                     a2 = Codes<S, kWordStep>(x.w.y, x.shifted.y, x.high.y),
                     a3 = Codes<S, kWordStep>(x.w.w, x.shifted.w, x.high.w);
      MmaBf16(c, a0, a1, a2, a3, f.part[0][kStep][0], f.part[0][kStep][1]);
      MmaBf16(c, a0, a1, a2, a3, f.part[1][kStep][0], f.part[1][kStep][1]);
      ChannelSteps<S, kTile, kStep + 1>(c, x, f, codes);
    }
  }
  template <typename S, bool kBoosts, int kTile>
  __device__ __forceinline__ void ChannelTile(float (&s)[4][T::kNB][4], Words& x, const Folded& f,
                                              const uint8_t* block) const {
    float c[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) c[j] = f.base[j & 1];
    ChannelSteps<S, kTile, 0>(c, x, f, block);
    if constexpr (kBoosts) BoostedSteps(c, block, kTile);
    float first = 1.0f, second = 1.0f;
    if (const uint8_t* norms = Form().Norms(block)) {
      first = *reinterpret_cast<const float*>(norms + (kTile * 16 + row_) * 4);
      second = *reinterpret_cast<const float*>(norms + (kTile * 16 + row_ + 8) * 4);
    }
    Scale(s[kTile][0], c, first, second);
  }

  // The upper two bits of boosted dims. Plane p has those of token t at bits 2 (t mod 16) of word
  // t / 16: of a fragment's rows row_ and row_ + 8 they are 16 bits apart.
  __device__ __forceinline__ void BoostedSteps(float (&c)[4], const uint8_t* block,
                                               int tile) const {
    const FormBlocks& form = Form();
    const int boosted = form.layout.boosted_dims();
    const auto* boosts = reinterpret_cast<const float*>(block + form.copied_bytes());
    const uint8_t* const planes = block + form.layout.KBoost(0) + tile * 4;
#pragma unroll 1
    for (int first = 0; first < boosted; first += 16) {
      uint32_t a[4], b[2][2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int plane = first + j * 8 + quad_ * 2;
        a[2 * j] = a[2 * j + 1] = b[0][j] = b[1][j] = 0u;
        if (plane >= boosted) continue;  // planes are whole eights
        const uint8_t* bits = planes + plane * BlockLayout::kBoostBytes;
        const uint32_t even = *reinterpret_cast<const uint32_t*>(bits) >> (2 * row_),
                       odd = *reinterpret_cast<const uint32_t*>(bits + BlockLayout::kBoostBytes) >>
                             (2 * row_);
        a[2 * j] = WholeBf16<0>(__byte_perm(even, odd, 0x5410) & 0x00030003u);
        a[2 * j + 1] = WholeBf16<0>(__byte_perm(even, odd, 0x7632) & 0x00030003u);
        const float2 x = *reinterpret_cast<const float2*>(boosts + row_ * boosted + plane);
        const Parts parts = PartsOf(x.x, x.y);
        b[0][j] = parts.part[0];
        b[1][j] = parts.part[1];
      }
      MmaBf16(c, a[0], a[1], a[2], a[3], b[0][0], b[0][1]);
      MmaBf16(c, a[0], a[1], a[2], a[3], b[1][0], b[1][1]);
    }
  }

  const uint8_t* q_row_ = nullptr;  // of this lane's head, from its first pair on
};

}  // namespace oscar::cuda
