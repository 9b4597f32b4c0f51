// Causal prefill attention for sm_80 and later, with mma.sync: the same tiles, regions and numerics
// as the Hopper kernel beside it.
//
// Grid       (query heads, query tiles of 64, batch); long tiles first. 4 warps of 16 rows.
// Shared     two stages of one page of K and V in 16-bit numbers (one at D 256), and of raw blocks.
// Bytes      K and V once a query tile and head, from L2 mostly.
// Bound      tensor cores through mma.sync; not tuned. It serves devices without wgmma.
#pragma once

#include <cstdint>

#include "cache/block_layout.h"
#include "cuda/attention/page_expand.cuh"
#include "cuda/attention/page_expand_forms.cuh"
#include "cuda/attention/prefill_params.h"
#include "cuda/attention/sink_params.h"
#include "cuda/device/ptx.cuh"

namespace oscar::cuda {

template <BlockKind kKindV, int kDimV>
struct GenericPrefillTraits {
  using Params = PrefillKernelParams;
  using Tiles = PrefillTiles;
  static constexpr bool kMixed = false;  // heads differ in bits
  // SinkTraits
  static constexpr bool kHasSinks = false, kHasWindow = false;
  static constexpr bool kForms = false;  // keys are not rows
  static constexpr BlockKind kKind = kKindV;
  static constexpr bool kQuantised = kKind != BlockKind::kBf16;
  static constexpr int kDim = kDimV;
  static constexpr int kSteps = kDim / 16;
  static constexpr BlockLayout kLayout{kKind, CodeOrder::kTensorCore, kDim, 32};
  static constexpr int kBits = kLayout.bits();
  static constexpr int kStages = kDim > 128 ? 1 : 2;
  static constexpr BlockLayout kOpenLayout{BlockKind::kBf16, CodeOrder::kTensorCore, kDim, kDim};
  static constexpr int kSideBytes = static_cast<int>(kOpenLayout.code_bytes());
  static constexpr int kRawBytes = kQuantised ? static_cast<int>(kLayout.block_bytes()) : 0;
  static constexpr int kRawOffset = kStages * 2 * kSideBytes;
  static constexpr int kMinimaOffset = kRawOffset + kStages * kRawBytes;
  static constexpr int kMinimaBytes = kPageTokens * 32;  // of a k-step
  static constexpr int kSharedBytes =
      kMinimaOffset + (kQuantised ? kMinimumSteps<kDim> * kMinimaBytes : 0);
};

// Room for the largest blocks; what a head has is data.
template <int kDimV>
struct MixedGenericPrefillTraits : GenericPrefillTraits<BlockKind::kInt4, kDimV> {
  using Params = MixedPrefillParams;
  static constexpr bool kMixed = true;
};

// Keys are not rows; which form, bits and groups of tokens they have is data, as V's are.
template <int kDimV>
struct FormGenericPrefillTraits : GenericPrefillTraits<BlockKind::kInt4, kDimV> {
  using Params = FormPrefillParams;
  using Base = GenericPrefillTraits<BlockKind::kInt4, kDimV>;
  static constexpr bool kForms = true;
  // The largest block and what is brought with it: two planes of channels, or one and its mate's
  // half, and norms of either kind.
  static constexpr int kRawBytes = Base::kRawBytes + 2 * kDimV * 4 + 2 * BlockLayout::kNormBytes;
  static constexpr int kSharedBytes = Base::kRawOffset + Base::kStages * kRawBytes;
};

template <typename T>
class GenericPrefill {
 public:
  __device__ GenericPrefill(const typename T::Params& p, uint8_t* shared,
                            const typename T::Tiles& tiles, int q_head)
      : p_(p),
        shared_(shared),
        base_(SharedAddress(shared)),
        tiles_(tiles),
        q_head_(q_head),
        kv_head_(q_head / (p.num_q_heads / p.num_kv_heads)),
        thread_(static_cast<int>(threadIdx.x)),
        lane_(thread_ % 32),
        row_(thread_ / 32 * 16 + lane_ / 4),
        quad_(lane_ & 3) {}

  __device__ void Run(int first_row, int rows, int64_t first_position) {
    if constexpr (T::kQuantised && !T::kForms) {  // slots of groups that are not there
      for (int i = thread_; i < kMinimumSteps<T::kDim> * T::kMinimaBytes / 16;
           i += kGenericThreads) {
        reinterpret_cast<uint4*>(shared_ + T::kMinimaOffset)[i] = uint4{0, 0, 0, 0};
      }
    }
    LoadQ(first_row, rows);
    const int num_tiles = tiles_.UpTo(first_position + rows - 1);
    Fetch(0);
    for (int j = 0; j < num_tiles; ++j) {
      const PrefillTile tile = tiles_[j];
      asm volatile("cp.async.wait_all;" ::: "memory");
      __syncthreads();  // tile j has landed; everybody is done with tile j - 1
      const bool half = T::kQuantised && tile.region == 1;
      const int stage = j % T::kStages;
      if constexpr (T::kQuantised) {
        if (half) {
          ExpandKeys(stage, 0, tile.page);
          if constexpr (!T::kForms) {
            ExpandMinima<T::kDim>(Raw(stage) + Layout().k_meta_offset(),
                                  KeyOffset(Layout().k_kind()), p_.group_steps_log2,
                                  shared_ + T::kMinimaOffset, T::kMinimaBytes,
                                  thread_ % kPageTokens, thread_ / kPageTokens, 2);
          }
          ExpandValues(stage);
          __syncthreads();
        }
      }
      if (T::kStages > 1 && j + 1 < num_tiles) Fetch(j + 1);
      if (!half) {
        Tile<false>(tile, stage, first_position);
      } else if constexpr (T::kQuantised) {
        Tile<true>(tile, stage, first_position);
      }
      if (T::kStages == 1 && j + 1 < num_tiles) {
        __syncthreads();
        Fetch(j + 1);
      }
    }
    Store(first_row, rows);
  }

 private:
  __device__ void Copy(uint32_t target, const std::byte* source, bool valid) const {
    const int bytes = valid ? 16 : 0;  // the rest is filled with zeros
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                 "r"(bytes)
                 : "memory");
  }
  // Tile j on its way to its stage: raw codes, or the BF16 page with zeros beyond its end.
  __device__ void Fetch(int j) const {
    const PrefillTile tile = tiles_[j];
    const CacheView& cache = p_.cache;
    const int64_t table_row = tiles_.view.table_row;
    const int stage = j % T::kStages;
    if (tile.region == 1) {
      const int64_t id =
          __ldg(cache.history_table + table_row * cache.history_table_stride + tile.page);
      const std::byte* block =
          cache.history_pool + id * cache.history_page_stride + HistoryOffset();
      const uint32_t target = base_ + (T::kQuantised ? T::kRawOffset + stage * T::kRawBytes
                                                     : stage * 2 * T::kSideBytes);
      for (int i = thread_; i < HistoryBytes() / 16; i += kGenericThreads) {
        Copy(target + i * 16, block + i * 16, true);
      }
      if constexpr (T::kForms) FetchForm(tile, target, block);
      return;
    }
    int entry = tile.page;
    if (tile.region == 2) {
      const int begin = tiles_.view.sink_tokens / kPageTokens + tiles_.view.history_pages;
      entry = cache.sink_pages + (begin + tile.page) % cache.ring_pages;
    }
    const int64_t id = __ldg(cache.window_table + table_row * cache.window_table_stride + entry);
    const std::byte* block =
        cache.window_pool + id * cache.window_page_stride + int64_t{kv_head_} * (2 * T::kSideBytes);
    for (int i = thread_; i < 2 * T::kSideBytes / 16; i += kGenericThreads) {
      Copy(base_ + stage * 2 * T::kSideBytes + i * 16, block + i * 16,
           i / 8 % kPageTokens < tile.valid);
    }
  }

  // What keys of a block need from elsewhere: metadata of the page it was sealed with, norms.
  __device__ void FetchForm(const PrefillTile& tile, uint32_t target,
                            const std::byte* block) const {
    const FormBlocks& form = p_.form;
    const CacheView& cache = p_.cache;
    if (form.is_paired()) {
      const int64_t mate =
          __ldg(cache.history_table + int64_t{tiles_.view.table_row} * cache.history_table_stride +
                (tile.page ^ 1));
      const std::byte* meta = cache.history_pool + mate * cache.history_page_stride +
                              HistoryOffset() + form.layout.k_meta_offset();
      for (int i = thread_; i < static_cast<int>(form.mate_bytes()) / 16; i += kGenericThreads) {
        Copy(target + form.mate_at() + i * 16, meta + i * 16, true);
      }
    }
    const std::byte* norms = block - HistoryOffset() + form.norm_offset;
    for (int i = thread_; i < static_cast<int>(form.norm_bytes()) / 16; i += kGenericThreads) {
      Copy(target + form.norms_at() + i * 16, norms + i * 16, true);
    }
  }

  // ---- the head's blocks ----

  __device__ __forceinline__ BlockLayout Layout() const {
    const int group_dims = 16 << p_.group_steps_log2;
    if constexpr (T::kMixed) {
      return p_.heads[kv_head_].Layout(T::kDim, group_dims);
    } else if constexpr (T::kForms) {
      return p_.form.layout;
    } else {
      return {T::kKind, CodeOrder::kTensorCore, T::kDim, group_dims};
    }
  }
  __device__ __forceinline__ int HistoryBytes() const {
    if constexpr (T::kMixed) {
      return static_cast<int>(Layout().block_bytes());
    } else {
      return p_.history_block_bytes;
    }
  }
  __device__ __forceinline__ int64_t HistoryOffset() const {
    if constexpr (T::kMixed) {
      return p_.heads[kv_head_].offset;
    } else {
      return int64_t{kv_head_} * p_.history_block_bytes;
    }
  }
  // Keys of more than two bits take two products.
  __device__ __forceinline__ bool HasTwoParts() const {
    return T::kForms || Layout().k_kind() != BlockKind::kInt2;
  }
  __device__ __forceinline__ const uint8_t* Raw(int stage) const {
    return shared_ + T::kRawOffset + stage * T::kRawBytes;
  }

  // `page`: of the history, where keys are not rows.
  __device__ __forceinline__ void ExpandKeys(int stage, int part, [[maybe_unused]] int page) const {
    const uint32_t target = base_ + static_cast<uint32_t>(stage * 2 * T::kSideBytes);
    const uint8_t* codes = Raw(stage);
    if constexpr (T::kForms) {
      ExpandFormKeys<T::kDim>(p_.form, codes, page, part, target, thread_);
      return;
    }
    const uint8_t* meta = codes + Layout().k_meta_offset();
    const auto expand = [&]<int kBits>(const uint8_t* from) {
      ExpandPage<kBits, T::kDim, true, false>(from, meta, p_.group_steps_log2, target,
                                              BlockLayout::kBf16PlaneBytes, thread_, part);
    };
    if constexpr (T::kMixed) {
      const BlockKind kind = Layout().k_kind();
      if (kind == BlockKind::kInt4) {
        expand.template operator()<4>(codes);
      } else if (kind == BlockKind::kInt3 && part == 0) {
        expand.template operator()<1>(codes + Layout().k_high_offset());
      } else {
        expand.template operator()<2>(codes);
      }
    } else {
      expand.template operator()<T::kBits>(codes);
    }
  }
  __device__ __forceinline__ void ExpandValues(int stage) const {
    const uint32_t target = base_ + static_cast<uint32_t>((stage * 2 + 1) * T::kSideBytes);
    const uint8_t* codes = Raw(stage) + Layout().v_codes_offset();
    const uint8_t* meta = Raw(stage) + Layout().v_meta_offset();
    const auto expand = [&]<int kBits>() {
      ExpandPage<kBits, T::kDim, false, false>(codes, meta, p_.group_steps_log2, target, 0,
                                               thread_);
    };
    if constexpr (T::kMixed || T::kForms) {
      const BlockKind kind = Layout().v_kind();
      if (kind == BlockKind::kInt2) {
        expand.template operator()<2>();
      } else if (kind == BlockKind::kInt3) {
        expand.template operator()<3>();
      } else {
        expand.template operator()<4>();
      }
    } else {
      expand.template operator()<T::kBits>();
    }
  }

  // A operand: rows row_, row_ + 8.
  __device__ void LoadQ(int first_row, int rows) {
    float largest = 0.0f;
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = row_ + (i & 1) * 8;
        uint32_t pair = 0;
        if (row < rows) {
          pair = __ldg(reinterpret_cast<const uint32_t*>(
              p_.q + (int64_t{first_row + row} * p_.num_q_heads + q_head_) * T::kDim + s * 16 +
              (i >> 1) * 8 + quad_ * 2));
        }
        q_[s][i] = pair;
        largest = fmaxf(largest, fmaxf(fabsf(Bf16Low(pair)), fabsf(Bf16High(pair))));
      }
    }
    // As fp16, Q is scaled down by a power of two where it would not fit; one for the warp.
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    }
    const int down = max(static_cast<int>(__float_as_uint(largest) >> 23) - 127 - 7, 0);
    half_down_ = __uint_as_float(static_cast<uint32_t>(127 - down) << 23);
    half_scale_ = p_.scale_log2 * __uint_as_float(static_cast<uint32_t>(127 + down) << 23);
#pragma unroll
    for (int i = 0; i < T::kSteps * 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) o_[i][j] = 0.0f;
    }
    if constexpr (T::kQuantised && !T::kForms) SumQ();
  }
  // Sums of the query over groups, in the slots that meet the keys' minima: pair `quad` and pair
  // 4 + `quad` of a k-step's eight, two pairs a group.
  __device__ void SumQ() {
#pragma unroll
    for (int i = 0; i < kMinimumSteps<T::kDim> * 4; ++i) sums_[i / 4][i % 4] = 0u;
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[i & 1] += (Bf16Low(q_[s][i]) + Bf16High(q_[s][i])) * half_down_;
      }
      const int group = s >> p_.group_steps_log2;
      if (((s + 1) & ((1 << p_.group_steps_log2) - 1)) != 0) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
        const HalfSum halves = SplitToHalf(sum[r]);
#pragma unroll
        for (int i = 0; i < kMinimumSteps<T::kDim> * 2; ++i) {
          if (group == i * 2 + quad_ / 2) {
            sums_[i / 2][i % 2 * 2 + r] = halves.high | halves.low << 16;
          }
        }
        sum[r] = 0.0f;
      }
    }
  }

  template <bool kHalf>
  __device__ static __forceinline__ void Mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    if constexpr (kHalf) {
      MmaFp16(c, a[0], a[1], a[2], a[3], b0, b1);
    } else {
      MmaBf16(c, a[0], a[1], a[2], a[3], b0, b1);
    }
  }

  template <bool kHalf>
  __device__ __forceinline__ void Scores(float (&s)[8][4], int stage) const {
    const uint32_t keys = base_ + static_cast<uint32_t>(stage * 2 * T::kSideBytes);
#pragma unroll
    for (int step = 0; step < T::kSteps; ++step) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = kHalf
                   ? PackHalf(Bf16Low(q_[step][i]) * half_down_, Bf16High(q_[step][i]) * half_down_)
                   : q_[step][i];
      }
#pragma unroll
      for (int n = 0; n < 4;
           ++n) {  // 16 tokens: matrices (tokens, chunk), (tokens, chunk + 1), ...
        const int token = n * 16 + (lane_ & 7) + (lane_ >> 4) * 8;
        const int chunk = step % 4 * 2 + (lane_ >> 3 & 1);
        uint32_t b[4];
        LoadMatrix4(b, keys + step / 4 * BlockLayout::kBf16PlaneBytes +
                           token * BlockLayout::kBf16RowBytes + ((chunk ^ (token & 7)) << 4));
        Mma<kHalf>(s[n * 2], a, b[0], b[1]);
        Mma<kHalf>(s[n * 2 + 1], a, b[2], b[3]);
      }
    }
  }
  // What the groups' minima add to the scores.
  __device__ __forceinline__ void MinimaScores(float (&s)[8][4]) const {
#pragma unroll
    for (int step = 0; step < kMinimumSteps<T::kDim>; ++step) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int token = n * 16 + (lane_ & 7) + (lane_ >> 4) * 8;
        uint32_t b[4];
        LoadMatrix4(b, base_ + static_cast<uint32_t>(
                                   T::kMinimaOffset +
                                   MinimumSlots(token, (lane_ >> 3 & 1) * 2, T::kMinimaBytes) +
                                   step * T::kMinimaBytes));
        Mma<true>(s[n * 2], sums_[step], b[0], b[1]);
        Mma<true>(s[n * 2 + 1], sums_[step], b[2], b[3]);
      }
    }
  }

  template <bool kHalf>
  __device__ __forceinline__ void Tile(const PrefillTile& tile, int stage, int64_t first_position) {
    const uint32_t values = base_ + static_cast<uint32_t>((stage * 2 + 1) * T::kSideBytes);
    const float scale = kHalf ? half_scale_ : p_.scale_log2;
    float s[8][4] = {};  // 64 tokens in tiles of 8
    Scores<kHalf>(s, stage);
    if constexpr (kHalf) {
      if (HasTwoParts()) {  // the low two bits of the codes, where the high ones were
        __syncthreads();
        ExpandKeys(stage, 1, tile.page);
        __syncthreads();
        Scores<true>(s, stage);
      }
      if constexpr (!T::kForms) MinimaScores(s);
    }
    float correction[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t see = first_position + row_ + 8 * r - tile.position + 1;
      const int visible = static_cast<int>(min(int64_t{tile.valid}, see));
      [[maybe_unused]] int64_t begin = 0;  // of what the window shows of the tile
      if constexpr (T::kHasWindow) {
        begin = p_.sliding_window == 0 ? 0 : see - p_.sliding_window;
      }
      float largest = -INFINITY;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (n * 8 + quad_ * 2 + e >= visible) s[n][r * 2 + e] = -INFINITY;
          if constexpr (T::kHasWindow) {
            if (n * 8 + quad_ * 2 + e < begin) s[n][r * 2 + e] = -INFINITY;
          }
          largest = fmaxf(largest, s[n][r * 2 + e]);
        }
      }
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      float next = fmaxf(max_[r], largest * scale);
      if constexpr (T::kHasWindow) {
        if (next == -INFINITY) next = kNothingSeen;  // the window begins behind this tile
      }
      correction[r] = Exp2(max_[r] - next);
      max_[r] = next;
      sum_[r] *= correction[r];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          s[n][r * 2 + e] = Exp2(fmaf(s[n][r * 2 + e], scale, -next));
          sum_[r] += s[n][r * 2 + e];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < T::kSteps * 2; ++i) {
      o_[i][0] *= correction[0];
      o_[i][1] *= correction[0];
      o_[i][2] *= correction[1];
      o_[i][3] *= correction[1];
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // 16 tokens
      uint32_t a[4], rest[4];      // BF16 P is the sum of both
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float even = s[k * 2 + (i >> 1)][(i & 1) * 2],
                    odd = s[k * 2 + (i >> 1)][(i & 1) * 2 + 1];
        a[i] = kHalf ? PackHalf(even, odd) : PackBf16(even, odd);
        rest[i] = PackBf16(even - Bf16Low(a[i]), odd - Bf16High(a[i]));
      }
#pragma unroll
      for (int step = 0; step < T::kSteps; ++step) {  // 16 dims
        uint32_t b[4];
        if constexpr (kHalf) {  // [dims][tokens]: rows are n, as for K
          const int dim = step * 16 + (lane_ & 7) + (lane_ >> 4) * 8;
          const int chunk = k * 2 + (lane_ >> 3 & 1);
          LoadMatrix4(b, values + dim * 128 + ((chunk ^ (dim & 7)) << 4));
        } else {  // [planes][tokens][dims]: rows are k
          const int token = k * 16 + (lane_ & 15), chunk = step % 4 * 2 + (lane_ >> 4);
          LoadMatrix4Transposed(b, values + step / 4 * BlockLayout::kBf16PlaneBytes +
                                       token * BlockLayout::kBf16RowBytes +
                                       ((chunk ^ (token & 7)) << 4));
        }
        Mma<kHalf>(o_[step * 2], a, b[0], b[1]);
        Mma<kHalf>(o_[step * 2 + 1], a, b[2], b[3]);
        if (!kHalf && p_.precise) {
          Mma<false>(o_[step * 2], rest, b[0], b[1]);
          Mma<false>(o_[step * 2 + 1], rest, b[2], b[3]);
        }
      }
    }
  }

  __device__ void Store(int first_row, int rows) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = sum_[r];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      float f = 1.0f / sum;
      if constexpr (T::kHasSinks) f = InverseWithSink(max_[r], sum, __ldg(p_.sinks + q_head_));
      const int row = row_ + 8 * r;
      if (row >= rows) continue;
      const int64_t at =
          (int64_t{first_row + row} * p_.num_q_heads + q_head_) * T::kDim + quad_ * 2;
#pragma unroll
      for (int i = 0; i < T::kDim / 8; ++i) {
        const float a = o_[i][r * 2] * f, b = o_[i][r * 2 + 1] * f;
        if (p_.out_fp32) {
          *reinterpret_cast<float2*>(static_cast<float*>(p_.out) + at + i * 8) = {a, b};
        } else {
          *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p_.out) + at + i * 8) =
              PackBf16(a, b);
        }
      }
    }
  }

  const typename T::Params& p_;
  uint8_t* shared_;
  const uint32_t base_;
  const typename T::Tiles& tiles_;
  const int q_head_, kv_head_, thread_, lane_, row_, quad_;
  uint32_t q_[T::kSteps][4];
  float o_[T::kSteps * 2][4];
  float max_[2] = {-INFINITY, -INFINITY}, sum_[2] = {0.0f, 0.0f};
  uint32_t sums_[kMinimumSteps<T::kDim>][4];
  float half_down_ = 1.0f, half_scale_ = 0.0f;
};

template <typename T>
__global__ void __launch_bounds__(kGenericThreads)
    PrefillAttentionKernel(const __grid_constant__ typename T::Params p) {
  extern __shared__ __align__(128) uint8_t shared[];
  WaitForPredecessor();
  const SequenceView view = p.sequences[blockIdx.z];
  const PrefillChunk chunk = p.chunks[blockIdx.z];
  const int first_query = static_cast<int>(gridDim.y - 1 - blockIdx.y) * kGenericRows;
  if (first_query >= chunk.query_tokens) return;
  const int64_t first_position = view.length() - chunk.query_tokens + first_query;
  const auto tiles = TilesOf<T>(p, view, 1, first_position);
  GenericPrefill<T>(p, shared, tiles, static_cast<int>(blockIdx.x))
      .Run(chunk.query_begin + first_query, min(kGenericRows, chunk.query_tokens - first_query),
           first_position);
}

}  // namespace oscar::cuda
