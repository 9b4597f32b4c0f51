// Causal prefill attention for Hopper (sm_90a): a chunk of new tokens against the whole sequence,
// every page read in place: BF16 pages go from the copy engine to wgmma untouched, quantised pages
// are expanded to fp16 in shared memory, a tile at a time; there is no dense copy of the prefix.
//
// Grid       (query heads, query tiles of 128, batch); long tiles first. Two consumer warpgroups of
//            64 rows each, and one producer; two for quantised history up to D 128, one per side.
// Shared     Q (32 KiB at D 128, twice for quantised history), two stages of K and of V (128
//            tokens; 64 at D 256), raw blocks of one or two quantised tiles: 224 KiB at most.
// Bytes      K and V once a query tile and head, from L2 mostly.
// Bound      tensor cores (4 D flops a query-key pair; 6 D against BF16 pages, see below), then
//            exponentials. H200: docs/benchmarks.md.
// Length     one file: producers, consumers and the barriers between them are read side by side.
//
// A consumer overlaps its softmax of tile j with the product P V of tile j - 1, and the two
// consumers overlap each other. Quantised V is stored transposed (dims x tokens, as its fragments
// lie), so its product reads B K-major; BF16 V is read MN-major.
//
// P against quantised V is fp16. Against BF16 V it is the sum of two BF16 numbers and takes two
// products, or one number and one product where `precise` is off (2^-9 of each P lost). Both parts
// and the next scores fit into registers where there is one producer (BF16 history); else the next
// scores wait for the product of the low parts.
//
// One file although it is long: producers and consumers share one shared-memory plan and one
// protocol of barriers, which no half of it makes sense without.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cache/block_layout.h"
#include "cuda/attention/page_expand.cuh"
#include "cuda/attention/prefill_params.h"
#include "cuda/attention/sink_params.h"
#include "cuda/attention/wgmma.cuh"
#include "cuda/device/ptx.cuh"

namespace oscar::cuda {

template <BlockKind kKindV, int kDimV>
struct PrefillTraits {
  using Params = PrefillKernelParams;
  using Tiles = PrefillTiles;
  static constexpr bool kMixed = false;  // heads differ in bits
  // SinkTraits
  static constexpr bool kHasSinks = false, kHasWindow = false;
  static constexpr BlockKind kKind = kKindV;
  static constexpr bool kQuantised = kKind != BlockKind::kBf16;
  static constexpr int kDim = kDimV;
  // The group size is data here.
  static constexpr BlockLayout kLayout{kKind, CodeOrder::kTensorCore, kDim, 32};
  static constexpr int kCodeBytes = static_cast<int>(kLayout.code_bytes());
  static constexpr int kBits = kLayout.bits();
  static constexpr int kPlanes = kDim / BlockLayout::kBf16PlaneDims;
  static constexpr int kTilePages = kDim > 128 ? 1 : 2;
  static constexpr int kTokens = kTilePages * kPageTokens;
  static constexpr int kSideBytes = kTokens * kDim * 2;  // K or V of a tile
  static constexpr BlockLayout kOpenLayout{BlockKind::kBf16, CodeOrder::kTensorCore, kDim, kDim};
  static constexpr int kPageSideBytes = static_cast<int>(kOpenLayout.code_bytes());
  static constexpr int kOpenBytes = static_cast<int>(kOpenLayout.block_bytes());
  static constexpr int kStages = kQuantised && kDim > 128 ? 1 : 2;
  static constexpr int kKeyParts = kBits == 4 ? 2 : 1;  // products a quantised tile's K takes
  static constexpr int kQBytes = kPrefillRows * kDim * 2;
  // Expanding a tile of codes takes one warpgroup longer than its MMAs take: K and V have one
  // each. Copying needs a single thread.
  // (At D 256 the consumers' products leave no registers for a second one.)
  static constexpr int kProducers = kQuantised && kDim <= 128 ? 2 : 1;
  static constexpr int kThreads = (kProducers + 2) * 128;
  // Whether both parts of P and the next scores fit into registers.
  static constexpr bool kOverlapsLow = !kQuantised;
  // Of what a launch takes, 168 a thread of three warpgroups and 128 of four.
  static constexpr int kProducerRegisters = kQuantised ? 56 : 40;
  static constexpr int kConsumerRegisters = kProducers == 2 ? 200 : kQuantised ? 224 : 232;

  static constexpr int kQOffset = 0;
  static constexpr int kHalfQOffset = kQOffset + kQBytes;
  static constexpr int kKOffset = kHalfQOffset + (kQuantised ? kQBytes : 0);
  static constexpr int kVOffset = kKOffset + kStages * kSideBytes;
  // Slots of the groups' minima and of the query's sums (page_expand.cuh).
  static constexpr int kMinimaBytes = kQuantised ? kTokens * 32 : 0;  // of a k-step
  static constexpr int kSumBytes = kQuantised ? 64 * 32 : 0;          // of a k-step and consumer
  static constexpr int kMinimaOffset = kVOffset + kStages * kSideBytes;
  static constexpr int kSumsOffset = kMinimaOffset + kStages * kMinimumSteps<kDim> * kMinimaBytes;
  static constexpr int kBarOffset = kSumsOffset + 2 * kMinimumSteps<kDim> * kSumBytes;
  static constexpr int kRawOffset = kBarOffset + 128;
  // Without the raw blocks, 1 << raw_slots_log2 tiles of them; and slack to align by 1024.
  static constexpr int kSharedBytes = kRawOffset + 1024;
};

// Room for the largest blocks; what a head has is data.
template <int kDimV>
struct MixedPrefillTraits : PrefillTraits<BlockKind::kInt4, kDimV> {
  using Params = MixedPrefillParams;
  static constexpr bool kMixed = true;
};

// Products that a quantised tile's K of a head takes.
template <typename T>
__device__ __forceinline__ int KeyPartsOf(const typename T::Params& p, int kv_head) {
  if constexpr (T::kMixed) {
    return p.heads[kv_head].k == BlockKind::kInt2 ? 1 : 2;
  } else {
    return T::kKeyParts;
  }
}
// Fills of K before tile j's first: a quantised tile has `parts` of them.
__device__ __forceinline__ int KeyFills(const PrefillTiles& tiles, int parts, int j) {
  return j + (parts - 1) * min(max(j - tiles.sink_tiles, 0), tiles.history_tiles);
}

// Barriers: K full, V full, K empty, V empty, raw K full, raw V full (two each).
struct PrefillBars {
  uint32_t base;
  __device__ uint32_t KFull(int s) const { return base + s * 8; }
  __device__ uint32_t VFull(int s) const { return base + 16 + s * 8; }
  __device__ uint32_t KEmpty(int s) const { return base + 32 + s * 8; }
  __device__ uint32_t VEmpty(int s) const { return base + 48 + s * 8; }
  __device__ uint32_t RawK(int s) const { return base + 64 + s * 8; }
  __device__ uint32_t RawV(int s) const { return base + 80 + s * 8; }
};

// ---- producer warpgroups ----

// Fills the stages of K, of V, or of both.
template <typename T, bool kFillsK, bool kFillsV>
class PrefillProducer {
 public:
  __device__ PrefillProducer(const typename T::Params& p, uint8_t* shared,
                             const typename T::Tiles& tiles, int kv_head, int num_tiles)
      : p_(p),
        shared_(shared),
        base_(SharedAddress(shared)),
        bars_{base_ + T::kBarOffset},
        tiles_(tiles),
        kv_head_(kv_head),
        num_tiles_(num_tiles),
        thread_(static_cast<int>(threadIdx.x) % 128) {}

  __device__ void Run() {
    if constexpr (T::kQuantised) {
      // BF16 tiles of the sink, quantised ones of the history, BF16 ones of the recent tokens.
      const int begin = min(tiles_.sink_tiles, num_tiles_);
      const int end = min(begin + tiles_.history_tiles, num_tiles_);
      quantised_tiles_ = end - begin;
      if constexpr (kFillsK) {
        constexpr int kBytes = T::kStages * kMinimumSteps<T::kDim> * T::kMinimaBytes;
        for (int i = thread_; i < kBytes / 16; i += 128) {
          reinterpret_cast<uint4*>(Minima(0))[i] = uint4{0, 0, 0, 0};
        }
        NamedSync(1, 128);
      }
      if (begin < end) {
        LoadIds(0);
        FetchRaw(0);
      }
      for (int j = 0; j < begin; ++j) CopyTile(j);
      if (p_.group_steps_log2 == kOneGroupSteps) {
        ExpandTiles<true>(begin, end);
      } else {
        ExpandTiles<false>(begin, end);
      }
      for (int j = end; j < num_tiles_; ++j) CopyTile(j);
    } else {
      for (int j = 0; j < num_tiles_; ++j) CopyTile(j);
    }
  }

 private:
  static constexpr int kOneGroupSteps = T::kDim == 64 ? 2 : T::kDim == 128 ? 3 : 4;

  __device__ __forceinline__ int KeyParts() const { return KeyPartsOf<T>(p_, kv_head_); }
  // ---- the head's blocks: bytes of codes of a side, of metadata of either, of all ----

  __device__ __forceinline__ BlockLayout Layout() const {
    const int group_dims = 16 << p_.group_steps_log2;
    if constexpr (T::kMixed) {
      return p_.heads[kv_head_].Layout(T::kDim, group_dims);
    } else {
      return {T::kKind, CodeOrder::kTensorCore, T::kDim, group_dims};
    }
  }
  __device__ __forceinline__ int CodeBytes(int side) const {
    if constexpr (T::kMixed) {
      return static_cast<int>(side == 0 ? Layout().k_code_bytes() : Layout().v_code_bytes());
    } else {
      return T::kCodeBytes;
    }
  }
  __device__ __forceinline__ int BlockBytes() const {
    if constexpr (T::kMixed) {
      return static_cast<int>(Layout().block_bytes());
    } else {
      return p_.history_block_bytes;
    }
  }
  __device__ __forceinline__ int64_t BlockOffset() const {
    if constexpr (T::kMixed) {
      return p_.heads[kv_head_].offset;
    } else {
      return int64_t{kv_head_} * p_.history_block_bytes;
    }
  }
  __device__ __forceinline__ int MetaBytes() const {
    if constexpr (T::kMixed) {
      return static_cast<int>(Layout().meta_bytes());
    } else {
      constexpr BlockLayout kLayout = T::kLayout;  // device code has no static members' addresses
      return kLayout.MetaBytesOf(p_.history_block_bytes);
    }
  }
  // Where codes and metadata of a side begin.
  __device__ __forceinline__ int CodesAt(int side) const { return side == 0 ? 0 : CodeBytes(0); }
  __device__ __forceinline__ int MetaAt(int side) const {
    if constexpr (T::kMixed) {
      return static_cast<int>(side == 0 ? Layout().k_meta_offset() : Layout().v_meta_offset());
    } else {
      constexpr BlockLayout kLayout = T::kLayout;  // device code has no static members' addresses
      return side == 0 ? static_cast<int>(kLayout.k_meta_offset())
                       : kLayout.VMetaOffsetOf(p_.history_block_bytes);
    }
  }

  __device__ uint32_t RawFull(int slot) const {
    return kFillsK ? bars_.RawK(slot) : bars_.RawV(slot);
  }
  // Of the empty barrier of a stage, before its fill.
  __device__ static uint32_t EmptyParity(int fill) {
    return (static_cast<uint32_t>(fill / T::kStages) & 1u) ^ 1u;
  }

  __device__ void CopyTile(int j) {
    const int stage = j % T::kStages;
    const PrefillTile tile = tiles_[j];
    const std::byte* pages[T::kTilePages];
    const int count = (tile.valid + kPageTokens - 1) / kPageTokens;
#pragma unroll
    for (int i = 0; i < T::kTilePages; ++i) pages[i] = i < count ? Bf16Page(tile, i) : nullptr;
    if constexpr (kFillsK) {
      const int fill = KeyFills(tiles_, KeyParts(), j), k_stage = fill % T::kStages;
      BarrierWait(bars_.KEmpty(k_stage), EmptyParity(fill));
      CopySide(pages, count, 0, T::kKOffset + k_stage * T::kSideBytes, bars_.KFull(k_stage));
    }
    if constexpr (kFillsV) {
      BarrierWait(bars_.VEmpty(stage), EmptyParity(j));
      if (tile.valid == T::kTokens) {
        CopySide(pages, count, T::kPageSideBytes, T::kVOffset + stage * T::kSideBytes,
                 bars_.VFull(stage));
      } else {
        CopyValidRows(pages, tile.valid, T::kVOffset + stage * T::kSideBytes);
        ProxyFence();
        BarrierArrive(bars_.VFull(stage));
      }
    }
  }
  __device__ const std::byte* Bf16Page(const PrefillTile& tile, int i) const {
    const CacheView& cache = p_.cache;
    const int64_t row = tiles_.view.table_row;
    if (tile.region == 1) {  // BF16 history
      const int64_t id =
          __ldg(cache.history_table + row * cache.history_table_stride + tile.page + i);
      return cache.history_pool + id * cache.history_page_stride +
             int64_t{kv_head_} * T::kOpenBytes;
    }
    int entry = tile.page + i;
    if (tile.region == 2) {
      const int begin = tiles_.view.sink_tokens / kPageTokens + tiles_.view.history_pages;
      entry = cache.sink_pages + (begin + tile.page + i) % cache.ring_pages;
    }
    const int64_t id = __ldg(cache.window_table + row * cache.window_table_stride + entry);
    return cache.window_pool + id * cache.window_page_stride + int64_t{kv_head_} * T::kOpenBytes;
  }

  // Plane by plane, so that the tile's rows of one plane are contiguous.
  __device__ void CopySide(const std::byte* const (&pages)[T::kTilePages], int count, int source,
                           int target, uint32_t full) {
    if (thread_ == 0) {
      const StageFill fill(full, static_cast<uint32_t>(count * T::kPageSideBytes), 0);
#pragma unroll
      for (int i = 0; i < T::kTilePages; ++i) {
        if (i >= count) continue;
        for (int plane = 0; plane < T::kPlanes; ++plane) {
          fill.Copy(base_ + target + (plane * T::kTokens + i * kPageTokens) * 128,
                    pages[i] + source + plane * BlockLayout::kBf16PlaneBytes,
                    BlockLayout::kBf16PlaneBytes);
        }
      }
    } else {
      BarrierArrive(full);
    }
  }
  // V of a short tile: rows that do not exist are zero, since 0 * NaN is NaN.
  __device__ void CopyValidRows(const std::byte* const (&pages)[T::kTilePages], int valid,
                                int target) {
    for (int i = thread_; i < T::kPlanes * T::kTokens * 8; i += 128) {
      const int chunk = i % 8, token = i / 8 % T::kTokens, plane = i / 8 / T::kTokens;
      uint4 v{0, 0, 0, 0};
      if (token < valid) {
        const std::byte* page =
            T::kTilePages == 1 || token < kPageTokens ? pages[0] : pages[T::kTilePages - 1];
        v = *reinterpret_cast<const uint4*>(
            page + T::kPageSideBytes +
            (plane * kPageTokens + token % kPageTokens) * BlockLayout::kBf16RowBytes + chunk * 16);
      }
      *reinterpret_cast<uint4*>(shared_ + target + (plane * T::kTokens + token) * 128 +
                                chunk * 16) = v;
    }
  }

  // ---- quantised tiles; t counts from the history's first ----

  __device__ int PagesOf(int t) const {
    return min(T::kTilePages, tiles_.view.history_pages - t * T::kTilePages);
  }
  // Page ids, a tile ahead of their use: waiting for the load would stop the warpgroup.
  __device__ void LoadIds(int t) {
    if (thread_ != 0 || t >= quantised_tiles_) return;
    const CacheView& cache = p_.cache;
    const int32_t* table = cache.history_table +
                           int64_t{tiles_.view.table_row} * cache.history_table_stride +
                           t * T::kTilePages;
#pragma unroll
    for (int i = 0; i < T::kTilePages; ++i) {
      if (i < PagesOf(t)) ids_[i] = __ldg(table + i);
    }
  }
  // Codes and metadata of this producer's side, where they lie in a block.
  __device__ void FetchRaw(int t) {
    if (thread_ != 0 || t >= quantised_tiles_) return;
    const int count = PagesOf(t);
    constexpr int kSides = (kFillsK ? 1 : 0) + (kFillsV ? 1 : 0);
    const int slot = RawSlot(t);
    const int meta_bytes = MetaBytes();
    const int code_bytes = (kFillsK ? CodeBytes(0) : 0) + (kFillsV ? CodeBytes(1) : 0);
    const StageFill fill(RawFull(slot),
                         static_cast<uint32_t>(count * (code_bytes + kSides * meta_bytes)), 0);
#pragma unroll
    for (int i = 0; i < T::kTilePages; ++i) {
      if (i >= count) continue;
      const uint32_t target = base_ + static_cast<uint32_t>(RawBlock(slot, i));
      const std::byte* source =
          p_.cache.history_pool + int64_t{ids_[i]} * p_.cache.history_page_stride + BlockOffset();
#pragma unroll
      for (int side = kFillsK ? 0 : 1; side < (kFillsV ? 2 : 1); ++side) {
        const int codes = CodesAt(side), meta = CodeBytes(0) + CodeBytes(1) + side * meta_bytes;
        fill.Copy(target + codes, source + codes, static_cast<uint32_t>(CodeBytes(side)));
        fill.Copy(target + meta, source + meta, static_cast<uint32_t>(meta_bytes));
      }
    }
    LoadIds(t + 1);
  }

  __device__ uint8_t* Minima(int stage) const {
    return shared_ + T::kMinimaOffset + stage * (kMinimumSteps<T::kDim> * T::kMinimaBytes);
  }
  __device__ int RawSlot(int t) const { return t & ((1 << p_.raw_slots_log2) - 1); }
  __device__ int RawBlock(int slot, int page) const {
    return T::kRawOffset + (slot * T::kTilePages + page) * BlockBytes();
  }

  template <bool kOneGroup>
  __device__ __forceinline__ void ExpandKeys(int pages, int slot, int stage, int part) {
    const int target = T::kKOffset + stage * T::kSideBytes;
#pragma unroll 1
    for (int page = 0; page < pages; ++page) {
      const uint8_t* block = shared_ + RawBlock(slot, page);
      const auto expand = [&]<int kBits>(const uint8_t* codes) {
        ExpandPage<kBits, T::kDim, true, kOneGroup>(codes, block + MetaAt(0), p_.group_steps_log2,
                                                    base_ + target + page * (kPageTokens * 128),
                                                    T::kTokens * 128, thread_, part);
      };
      if constexpr (T::kMixed) {
        const BlockKind kind = Layout().k_kind();
        if (kind == BlockKind::kInt4) {
          expand.template operator()<4>(block);
        } else if (kind == BlockKind::kInt3 && part == 0) {
          expand.template operator()<1>(block + Layout().k_high_offset());
        } else {
          expand.template operator()<2>(block);
        }
      } else {
        expand.template operator()<T::kBits>(block);
      }
    }
    // One thread per token, or two at D 256; the slots of groups that are not there were cleared.
    const int page = thread_ / kPageTokens % T::kTilePages;
    if (part == 0 && page < pages) {
      ExpandMinima<T::kDim>(shared_ + RawBlock(slot, page) + MetaAt(0),
                            KeyOffset(Layout().k_kind()), p_.group_steps_log2,
                            Minima(stage) + page * (kPageTokens * 32), T::kMinimaBytes,
                            thread_ % kPageTokens, thread_ / T::kTokens, 128 / T::kTokens);
    }
    ProxyFence();
  }
  template <bool kOneGroup>
  __device__ __forceinline__ void ExpandValues(int pages, int slot, int stage) {
    const int target = T::kVOffset + stage * T::kSideBytes;
#pragma unroll 1
    for (int page = 0; page < pages; ++page) {
      const uint8_t* block = shared_ + RawBlock(slot, page);
      const auto expand = [&]<int kBits>() {
        ExpandPage<kBits, T::kDim, false, kOneGroup>(
            block + CodesAt(1), block + MetaAt(1), p_.group_steps_log2,
            base_ + target + page * T::kPageSideBytes, T::kTokens * 128, thread_);
      };
      if constexpr (T::kMixed) {
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
    for (int page = pages; page < T::kTilePages; ++page) {
      ClearPage(shared_ + target + page * T::kPageSideBytes);
    }
    ProxyFence();
  }

  // Tiles [begin, end) of the sequence.
  template <bool kOneGroup>
  __device__ void ExpandTiles(int begin, int end) {
    const bool ahead = p_.raw_slots_log2 > 0;
    for (int j = begin; j < end; ++j) {
      const int t = j - begin, slot = RawSlot(t);
      if (ahead) FetchRaw(t + 1);
      BarrierWait(RawFull(slot), static_cast<uint32_t>(t >> p_.raw_slots_log2) & 1u);
      if constexpr (kFillsK) {
#pragma unroll 1
        for (int part = 0; part < KeyParts(); ++part) {
          const int fill = KeyFills(tiles_, KeyParts(), j) + part, stage = fill % T::kStages;
          BarrierWait(bars_.KEmpty(stage), EmptyParity(fill));
          ExpandKeys<kOneGroup>(PagesOf(t), slot, stage, part);
          BarrierArrive(bars_.KFull(stage));
        }
      }
      if constexpr (kFillsV) {
        const int stage = j % T::kStages;
        BarrierWait(bars_.VEmpty(stage), EmptyParity(j));
        ExpandValues<kOneGroup>(PagesOf(t), slot, stage);
        BarrierArrive(bars_.VFull(stage));
      }
      NamedSync(kFillsK ? 1 : 4, 128);  // the raw slot may be filled again
      if (!ahead) FetchRaw(t + 1);
    }
  }
  __device__ void ClearPage(uint8_t* page) const {
    for (int i = thread_; i < T::kPageSideBytes / 16; i += 128) {
      reinterpret_cast<uint4*>(page)[i] = uint4{0, 0, 0, 0};
    }
  }

  const typename T::Params& p_;
  uint8_t* shared_;
  const uint32_t base_;
  const PrefillBars bars_;
  const typename T::Tiles& tiles_;
  const int kv_head_, num_tiles_, thread_;
  int quantised_tiles_ = 0;
  int ids_[T::kTilePages] = {};
};

// ---- consumer warpgroups ----

template <typename T>
class PrefillConsumer {
 public:
  __device__ PrefillConsumer(const typename T::Params& p, uint8_t* shared,
                             const typename T::Tiles& tiles, int group)
      : p_(p),
        shared_(shared),
        base_(SharedAddress(shared)),
        bars_{base_ + T::kBarOffset},
        tiles_(tiles),
        group_(group),
        thread_(static_cast<int>(threadIdx.x) % 128),
        row_(thread_ / 32 * 16 + thread_ % 32 / 4),
        quad_(thread_ & 3) {}

  // first_query: row of the chunk; first_position: its position.
  __device__ void Run(const PrefillChunk& chunk, int first_query, int64_t first_position,
                      int q_head) {
    if constexpr (T::kMixed) {
      key_parts_ = KeyPartsOf<T>(p_, q_head / (p_.num_q_heads / p_.num_kv_heads));
    }
    first_query += group_ * 64;
    first_position += group_ * 64;
    const int rows = min(64, chunk.query_tokens - first_query);
    if (rows <= 0) return;
    LoadQ(chunk.query_begin + first_query, rows, q_head);
    const int num_tiles = tiles_.UpTo(first_position + rows - 1);
#pragma unroll
    for (int i = 0; i < T::kDim / 2; ++i) o_[i] = 0.0f;
    max_[0] = max_[1] = -INFINITY;
    sum_[0] = sum_[1] = 0.0f;

    if constexpr (T::kQuantised) {
      const int sink_end = min(tiles_.sink_tiles, num_tiles);
      const int history_end = min(sink_end + tiles_.history_tiles, num_tiles);
#pragma unroll 1
      for (int region = 0; region < 3; ++region) {
        if (region == 1) {
          if constexpr (T::kMixed) {
            if (KeyParts() == 1) {
              Tiles<true, false, 1>(sink_end, history_end, first_position);
              continue;
            }
          }
          Tiles<true, false>(sink_end, history_end, first_position);
        } else {
          Bf16Tiles(region == 0 ? 0 : history_end, region == 0 ? sink_end : num_tiles,
                    first_position);
        }
      }
    } else {
      Bf16Tiles(0, num_tiles, first_position);
    }
    Store(chunk.query_begin + first_query, rows, q_head);
  }

 private:
  static constexpr int kScores = T::kTokens / 2;

  __device__ __forceinline__ void Bf16Tiles(int begin, int end, int64_t first_position) {
    if (T::kDim != kFastPrefillDim || p_.precise) {
      Tiles<false, true>(begin, end, first_position);
    } else {
      Tiles<false, false>(begin, end, first_position);
    }
  }
  __device__ __forceinline__ void ScaleOutput() {
#pragma unroll
    for (int i = 0; i < T::kDim / 2; i += 4) {
      o_[i] *= correction_[0];
      o_[i + 1] *= correction_[0];
      o_[i + 2] *= correction_[1];
      o_[i + 3] *= correction_[1];
    }
  }
  __device__ __forceinline__ int KeyParts() const {
    if constexpr (T::kMixed) {
      return key_parts_;
    } else {
      return T::kKeyParts;
    }
  }
  // Tiles [begin, end) of one kind. kHalf: quantised, in fp16. kPrecise: P in two parts. kParts:
  // products of quantised K.
  template <bool kHalf, bool kPrecise, int kParts = T::kKeyParts>
  __device__ __forceinline__ void Tiles(int begin, int end, int64_t first_position) {
    if (begin >= end) return;
    constexpr bool kInTurn = kPrecise && !T::kOverlapsLow;
    IssueScores<kHalf, kParts>(begin);
    WgmmaWait<0>();
    ReleaseKeys<kHalf, kParts>(begin);
    Softmax<kHalf>(tiles_[begin], first_position);
    ScaleOutput();
    PackP<kHalf, kPrecise>();
    for (int j = begin + 1; j < end; ++j) {
      if constexpr (kInTurn) {
        IssueValues<kHalf, kPrecise>(j - 1);
        WgmmaWait<1>();  // the low parts have been read: registers for the next scores
        IssueScores<kHalf, kParts>(j);
        WgmmaWait<0>();
      } else {
        IssueScores<kHalf, kParts>(j);
        IssueValues<kHalf, kPrecise>(j - 1);
        WgmmaWait<1>();
      }
      ReleaseKeys<kHalf, kParts>(j);
      Softmax<kHalf>(tiles_[j], first_position);
      WgmmaWait<0>();
      Release(bars_.VEmpty((j - 1) % T::kStages));
      ScaleOutput();
      PackP<kHalf, kPrecise>();
    }
    IssueValues<kHalf, kPrecise>(end - 1);
    WgmmaWait<0>();
    Release(bars_.VEmpty((end - 1) % T::kStages));
  }

  __device__ void Release(uint32_t bar) const {
    if (thread_ % 32 == 0) BarrierArrive(bar);
  }
  // Of the tile's last fill, or of all of them where each has a stage.
  template <bool kHalf, int kParts>
  __device__ __forceinline__ void ReleaseKeys(int j) const {
    const int fill = KeyFills(tiles_, KeyParts(), j);
    constexpr int parts = kHalf ? kParts : 1;
    for (int part = T::kStages == 1 ? parts - 1 : 0; part < parts; ++part) {
      Release(bars_.KEmpty((fill + part) % T::kStages));
    }
  }

  // Q rows of this warpgroup: [planes][64][128 B], swizzled; as fp16 too, scaled down by a power of
  // two if it would not fit.
  __device__ void LoadQ(int first_row, int rows, int q_head) {
    uint8_t* target = shared_ + T::kQOffset + group_ * (64 * T::kDim * 2);
    uint32_t largest = 0;
    for (int i = thread_; i < 64 * T::kDim / 8; i += 128) {
      const int chunk = i % (T::kDim / 8), row = i / (T::kDim / 8);
      uint4 v{0, 0, 0, 0};
      if (row < rows) {
        v = __ldg(reinterpret_cast<const uint4*>(
            p_.q + (int64_t{first_row + row} * p_.num_q_heads + q_head) * T::kDim + chunk * 8));
      }
      const int at = (chunk / 8 * 64 + row) * 128 + ((chunk % 8) ^ (row & 7)) * 16;
      *reinterpret_cast<uint4*>(target + at) = v;
      for (const uint32_t pair : {v.x, v.y, v.z, v.w}) {
        largest = max(largest, max(pair << 16 & 0x7fff0000u, pair & 0x7fff0000u));
      }
    }
    if constexpr (T::kQuantised) {
      // Below 2^8 sums of 256 values fit too; the exponent of the largest value in this warpgroup.
      uint32_t* shared_max = reinterpret_cast<uint32_t*>(shared_ + T::kBarOffset + 96) + group_;
      atomicMax(shared_max, largest);
      NamedSync(2 + group_, 128);
      const int exponent = static_cast<int>(*shared_max >> 23) - 127;
      const int down = max(exponent - 7, 0);
      half_scale_ = p_.scale_log2 * __uint_as_float(static_cast<uint32_t>(127 + down) << 23);
      const float f = __uint_as_float(static_cast<uint32_t>(127 - down) << 23);
      for (int i = thread_; i < 64 * T::kDim / 8; i += 128) {
        const uint4 v = *reinterpret_cast<const uint4*>(target + i * 16);
        const auto convert = [&](uint32_t pair) {
          return PackHalf(Bf16Low(pair) * f, Bf16High(pair) * f);
        };
        *reinterpret_cast<uint4*>(target + (T::kHalfQOffset - T::kQOffset) + i * 16) = {
            convert(v.x), convert(v.y), convert(v.z), convert(v.w)};
      }
      NamedSync(2 + group_, 128);
      SumQ(target + (T::kHalfQOffset - T::kQOffset));
    }
    ProxyFence();
    NamedSync(2 + group_, 128);
  }
  // The query's sums over groups, into the slots that meet those of the keys' minima.
  __device__ void SumQ(const uint8_t* half_q) {
    const int row = thread_ % 64, group_chunks = 2 << p_.group_steps_log2;
    for (int group = thread_ / 64; group < 4 * kMinimumSteps<T::kDim>; group += 2) {
      float sum = 0.0f;
      for (int i = 0; i < group_chunks && (group + 1) * group_chunks <= T::kDim / 8; ++i) {
        const int chunk = group * group_chunks + i;
        const uint4 v = *reinterpret_cast<const uint4*>(half_q + (chunk / 8 * 64 + row) * 128 +
                                                        ((chunk % 8) ^ (row & 7)) * 16);
        for (const uint32_t pair : {v.x, v.y, v.z, v.w}) {
          const float2 x = HalfPair(pair);
          sum += x.x + x.y;
        }
      }
      const HalfSum s = SplitToHalf(sum);
      const uint32_t slots = s.high | s.low << 16;
      *reinterpret_cast<uint2*>(shared_ + T::kSumsOffset +
                                group_ * (kMinimumSteps<T::kDim> * T::kSumBytes) +
                                MinimumSlots(row, group, T::kSumBytes)) = {slots, slots};
    }
  }

  template <bool kHalf, bool kFirst>
  __device__ __forceinline__ void Scores(int stage) {
    const uint64_t q = SwizzledTile(
        base_ + (kHalf ? T::kHalfQOffset : T::kQOffset) + group_ * (64 * T::kDim * 2), 16, 1024);
    const uint64_t k = SwizzledTile(base_ + T::kKOffset + stage * T::kSideBytes, 16, 1024);
    WgmmaFence();
#pragma unroll
    for (int step = 0; step < T::kDim / 16; ++step) {
      const uint64_t a = Advance(q, step / 4 * (64 * 128) + step % 4 * 32);
      const uint64_t b = Advance(k, step / 4 * (T::kTokens * 128) + step % 4 * 32);
      if (kFirst && step == 0) {
        Wgmma<T::kTokens, !kHalf>::First(s_, a, b);
      } else {
        Wgmma<T::kTokens, !kHalf>::Shared(s_, a, b);
      }
    }
  }
  // What the groups' minima add to the scores.
  __device__ __forceinline__ void MinimaScores(int stage) {
    constexpr int kSteps = kMinimumSteps<T::kDim>;
    const uint64_t q = PlainTile(base_ + T::kSumsOffset + group_ * (kSteps * T::kSumBytes));
    const uint64_t k = PlainTile(base_ + T::kMinimaOffset + stage * (kSteps * T::kMinimaBytes));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Wgmma<T::kTokens, false>::Shared(s_, Advance(q, step * T::kSumBytes),
                                       Advance(k, step * T::kMinimaBytes));
    }
  }
  __device__ __forceinline__ void WaitForKeys(int fill) const {
    BarrierWait(bars_.KFull(fill % T::kStages), static_cast<uint32_t>(fill / T::kStages) & 1u);
  }
  template <bool kHalf, int kParts>
  __device__ __forceinline__ void IssueScores(int j) {
    const int fill = KeyFills(tiles_, KeyParts(), j);
    WaitForKeys(fill);
    Scores<kHalf, true>(fill % T::kStages);
    if constexpr (kHalf) MinimaScores(fill % T::kStages);
    WgmmaCommit();
    if constexpr (kHalf && kParts > 1) {
      WgmmaWait<0>();
      if constexpr (T::kStages == 1) Release(bars_.KEmpty(0));  // where the second part comes
      WaitForKeys(fill + 1);
      Scores<kHalf, false>((fill + 1) % T::kStages);
      WgmmaCommit();
    }
  }
  // kPrecise: the low parts are a separate group, before the high ones.
  template <bool kHalf, bool kPrecise>
  __device__ __forceinline__ void IssueValues(int j) {
    const int stage = j % T::kStages;
    BarrierWait(bars_.VFull(stage), static_cast<uint32_t>(j / T::kStages) & 1u);
    const uint32_t v = base_ + T::kVOffset + stage * T::kSideBytes;
    // fp16: [pages][dims][64 tokens], K-major. BF16: [planes][tokens][64 dims], MN-major.
    const uint64_t tile = SwizzledTile(v, kHalf ? 16 : T::kTokens * 128, 1024);
    const auto at = [&](int step) {
      return Advance(tile,
                     kHalf ? step / 4 * T::kPageSideBytes + step % 4 * 32 : step * (16 * 128));
    };
    WgmmaFence();
    if constexpr (kPrecise) {
#pragma unroll
      for (int step = 0; step < T::kTokens / 16; ++step) {
        Wgmma<T::kDim, true>::template Registers<1>(o_, low_fragments_[step], at(step));
      }
      if constexpr (!T::kOverlapsLow) WgmmaCommit();
    }
#pragma unroll
    for (int step = 0; step < T::kTokens / 16; ++step) {
      Wgmma<T::kDim, !kHalf>::template Registers<kHalf ? 0 : 1>(o_, p_fragments_[step], at(step));
    }
    WgmmaCommit();
  }

  // Turns scores into P (in place), updates max and sum, leaves the factor for o in correction_.
  template <bool kHalf>
  __device__ __forceinline__ void Softmax(const PrefillTile& tile, int64_t first_position) {
    const float scale = kHalf ? half_scale_ : p_.scale_log2;
    if (tile.valid < T::kTokens || tile.position + T::kTokens - 1 > first_position) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int64_t see = first_position + row_ + 8 * r - tile.position + 1;
        const int visible = static_cast<int>(min(int64_t{tile.valid}, see));
#pragma unroll
        for (int i = 0; i < kScores / 4; ++i) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (i * 8 + quad_ * 2 + e >= visible) s_[i * 4 + r * 2 + e] = -INFINITY;
          }
        }
      }
    }
    if constexpr (T::kHasWindow) {
      // What the last row of the warpgroup does not see begins before the tile, or in it.
      if (p_.sliding_window > 0 && first_position + 64 - p_.sliding_window > tile.position) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int64_t first = first_position + row_ + 8 * r + 1 - p_.sliding_window;
          const int begin = static_cast<int>(min(first - tile.position, int64_t{T::kTokens}));
#pragma unroll
          for (int i = 0; i < kScores / 4; ++i) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              if (i * 8 + quad_ * 2 + e < begin) s_[i * 4 + r * 2 + e] = -INFINITY;
            }
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = s_[r * 2];
#pragma unroll
      for (int i = 0; i < kScores / 4; ++i) {
        largest = fmaxf(largest, fmaxf(s_[i * 4 + r * 2], s_[i * 4 + r * 2 + 1]));
      }
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      float next = fmaxf(max_[r], largest * scale);
      if constexpr (T::kHasWindow) {
        if (next == -INFINITY) next = kNothingSeen;  // the window begins behind this tile
      }
      correction_[r] = Exp2(max_[r] - next);
      max_[r] = next;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kScores / 4; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s_[i * 4 + r * 2 + e];
          x = Exp2(fmaf(x, scale, -next));
          sum += x;
        }
      }
      sum_[r] = fmaf(sum_[r], correction_[r], sum);
    }
  }
  // Fragments of P: a0: row, k 0; a1: row + 8, k 0; a2: row, k 8; a3.
  __device__ static constexpr int ScoreOf(int step, int i) {
    return (step * 2 + (i >> 1)) * 4 + (i & 1) * 2;
  }
  template <bool kHalf, bool kPrecise>
  __device__ __forceinline__ void PackP() {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      const int at = ScoreOf(i / 4, i % 4);
      const uint32_t p = kHalf ? PackHalf(s_[at], s_[at + 1]) : PackBf16(s_[at], s_[at + 1]);
      p_fragments_[i / 4][i % 4] = p;
      if constexpr (kPrecise) {
        low_fragments_[i / 4][i % 4] = PackBf16(s_[at] - Bf16Low(p), s_[at + 1] - Bf16High(p));
      }
    }
  }

  __device__ void Store(int first_row, int rows, int q_head) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = sum_[r];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      float f = 1.0f / sum;
      if constexpr (T::kHasSinks) f = InverseWithSink(max_[r], sum, __ldg(p_.sinks + q_head));
      const int row = row_ + 8 * r;
      if (row >= rows) continue;
      const int64_t at = (int64_t{first_row + row} * p_.num_q_heads + q_head) * T::kDim + quad_ * 2;
#pragma unroll
      for (int i = 0; i < T::kDim / 8; ++i) {
        const float a = o_[i * 4 + r * 2] * f, b = o_[i * 4 + r * 2 + 1] * f;
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
  const PrefillBars bars_;
  const typename T::Tiles& tiles_;
  const int group_, thread_, row_, quad_;
  float half_scale_ = 0.0f;
  // Of the head's K, where heads differ in bits.
  struct Nothing {};
  [[no_unique_address]] std::conditional_t<T::kMixed, int, Nothing> key_parts_ = {};
  float s_[kScores];
  float o_[T::kDim / 2];
  uint32_t p_fragments_[T::kTokens / 16][4];  // of BF16 P, the high part
  uint32_t low_fragments_[T::kTokens / 16][4];
  float max_[2], sum_[2], correction_[2];
};

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    PrefillAttentionSm90Kernel(const __grid_constant__ typename T::Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t unaligned[];
  uint8_t* shared = unaligned + (1024 - SharedAddress(unaligned) % 1024) % 1024;
  WaitForPredecessor();
  const SequenceView view = p.sequences[blockIdx.z];
  const PrefillChunk chunk = p.chunks[blockIdx.z];
  // Long tiles first.
  const int first_query = static_cast<int>(gridDim.y - 1 - blockIdx.y) * kPrefillRows;
  if (first_query >= chunk.query_tokens) return;
  const auto q_head = static_cast<int>(blockIdx.x);
  const int64_t first_position = view.length() - chunk.query_tokens + first_query;
  const int rows = min(kPrefillRows, chunk.query_tokens - first_query);
  const auto tiles = TilesOf<T>(p, view, T::kTilePages, first_position);
  if (threadIdx.x == 0) {
    const PrefillBars bars{SharedAddress(shared) + T::kBarOffset};
    const uint32_t consumers = rows > 64 ? 8 : 4;
    for (int s = 0; s < 2; ++s) {
      BarrierInit(bars.KFull(s), 128);
      BarrierInit(bars.VFull(s), 128);
      BarrierInit(bars.KEmpty(s), consumers);
      BarrierInit(bars.VEmpty(s), consumers);
      BarrierInit(bars.RawK(s), 1);
      BarrierInit(bars.RawV(s), 1);
    }
    reinterpret_cast<uint32_t*>(shared + T::kBarOffset + 96)[0] = 0;
    reinterpret_cast<uint32_t*>(shared + T::kBarOffset + 96)[1] = 0;
    BarrierInitFence();
  }
  __syncthreads();
  const auto group = static_cast<int>(threadIdx.x) / 128;
  if (group < T::kProducers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(T::kProducerRegisters));
    const int kv_head = q_head / (p.num_q_heads / p.num_kv_heads);
    const int num_tiles = tiles.UpTo(first_position + rows - 1);
    if constexpr (T::kProducers == 1) {
      PrefillProducer<T, true, true>(p, shared, tiles, kv_head, num_tiles).Run();
    } else if (group == 0) {
      PrefillProducer<T, true, false>(p, shared, tiles, kv_head, num_tiles).Run();
    } else {
      PrefillProducer<T, false, true>(p, shared, tiles, kv_head, num_tiles).Run();
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(T::kConsumerRegisters));
    PrefillConsumer<T>(p, shared, tiles, group - T::kProducers)
        .Run(chunk, first_query, first_position, q_head);
  }
#endif
}

}  // namespace oscar::cuda
