// What launcher and prefill kernels agree on. Host and device.
#pragma once

#include <cstdint>

#include "cuda/attention/cache_view.h"

namespace oscar::cuda {

// One sequence's chunk: its queries are the last `query_tokens` positions of the view, whose
// recent tokens include the chunk.
struct alignas(8) PrefillChunk {
  int32_t query_begin;   // row of q and out
  int32_t query_tokens;  // 0: padding
};

struct PrefillKernelParams {
  CacheView cache;
  const SequenceView* sequences;  // [batch]
  const PrefillChunk* chunks;     // [batch]
  const uint16_t* q;              // [rows, q_heads, D] BF16
  void* out;                      // [rows, q_heads, D] BF16 or fp32
  float scale_log2;
  int32_t num_q_heads, num_kv_heads;
  int32_t history_block_bytes;
  int32_t group_steps_log2;  // log2(group dims / 16)
  int32_t raw_slots_log2;    // Hopper: of the raw blocks of quantised tiles
  bool out_fp32;
  bool precise;  // P against BF16 V: two BF16 numbers, not one
};

// Of layers whose heads differ in bits; history_block_bytes means nothing.
struct MixedPrefillParams : PrefillKernelParams {
  HeadBlock heads[kMaxMixedHeads];
};

// Of layers whose keys are not rows; group_steps_log2 is V's.
struct FormPrefillParams : PrefillKernelParams {
  explicit FormPrefillParams(const PrefillKernelParams& common, const FormBlocks& blocks)
      : PrefillKernelParams(common), form(blocks) {}
  FormBlocks form;
};

// Tiles of `pages` pages; a tile never spans two regions, so the last of a region may be short.
struct PrefillTile {
  int64_t position;  // of its first token
  int valid;         // tokens
  int region;        // 0 sink, 1 history, 2 recent
  int page;          // index of its first page in the region
};
struct PrefillTiles {
  SequenceView view;
  int pages;
  int sink_tiles, history_tiles;

  OSCAR_HD PrefillTiles(const SequenceView& sequence, int tile_pages)
      : view(sequence),
        pages(tile_pages),
        sink_tiles(Count(sequence.sink_tokens)),
        history_tiles((sequence.history_pages + tile_pages - 1) / tile_pages) {}
  OSCAR_HD int Count(int tokens) const {
    return (tokens + pages * kPageTokens - 1) / (pages * kPageTokens);
  }
  // Tiles that hold a position <= last.
  OSCAR_HD int UpTo(int64_t last) const {
    const int64_t tokens = last + 1;
    const int64_t recent_begin =
        view.sink_tokens + static_cast<int64_t>(view.history_pages) * kPageTokens;
    if (tokens > recent_begin) {
      return sink_tiles + history_tiles + Count(static_cast<int>(tokens - recent_begin));
    }
    if (tokens > view.sink_tokens) {
      return sink_tiles + Count(static_cast<int>(tokens - view.sink_tokens));
    }
    return Count(static_cast<int>(tokens));
  }
  OSCAR_HD PrefillTile operator[](int index) const {
    const int size = pages * kPageTokens;
    PrefillTile tile;
    int tokens;
    if (index < sink_tiles) {
      tile.region = 0;
      tile.position = 0;
      tokens = view.sink_tokens;
    } else if (index < sink_tiles + history_tiles) {
      tile.region = 1;
      index -= sink_tiles;
      tile.position = view.sink_tokens;
      tokens = view.history_pages * kPageTokens;
    } else {
      tile.region = 2;
      index -= sink_tiles + history_tiles;
      tile.position = view.sink_tokens + static_cast<int64_t>(view.history_pages) * kPageTokens;
      tokens = view.recent_tokens;
    }
    tile.page = index * pages;
    tile.position += static_cast<int64_t>(index) * size;
    tokens -= index * size;
    tile.valid = tokens < size ? tokens : size;
    return tile;
  }
};

// Tiles from the first on that queries at `first_query` and later see of a sliding window; of
// `window` 0 all. No history begins behind the first position that is seen.
struct WindowTiles : PrefillTiles {
  int skipped;

  OSCAR_HD WindowTiles(const SequenceView& sequence, int tile_pages, int64_t first_query,
                       int window)
      : PrefillTiles(sequence, tile_pages), skipped(0) {
    if (window == 0 || first_query < window) return;
    skipped = PrefillTiles::UpTo(first_query - window + 1) - 1;
  }
  OSCAR_HD int UpTo(int64_t last) const { return PrefillTiles::UpTo(last) - skipped; }
  OSCAR_HD PrefillTile operator[](int index) const {
    return PrefillTiles::operator[](index + skipped);
  }
};

// The one head dim whose Hopper kernels have a form that rounds P once; others are always precise,
// which saves compiling a form nobody has timed.
inline constexpr int kFastPrefillDim = 128;

// Query rows per block. Hopper: two consumer warpgroups. Generic: four warps.
inline constexpr int kPrefillRows = 128;
inline constexpr int kGenericRows = 64, kGenericThreads = 128;

}  // namespace oscar::cuda
