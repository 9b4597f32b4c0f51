// PassPlanner: turns the items of a pass into what kernels read: rows, positions, views of the page
// tables. Puts them together in pinned memory and sends them to the device in one copy. Owns the
// pinned memory; tables, pages and device memory are the caller's. One thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/batch.h"
#include "cuda/attention/cache_view.h"
#include "cuda/attention/prefill_attention.h"
#include "cuda/kv/page_tables.h"
#include "cuda/linear_attention/linear_attention.h"
#include "oscar/status.h"

namespace oscar::cuda {

// What a pass computes, and where its inputs lie on the device. The first `decodes` rows are
// generated tokens, the rest are prompt chunks in order.
struct Pass {
  int rows = 0, decodes = 0, chunks = 0, longest_chunk = 0;
  const int32_t *tokens = nullptr, *positions = nullptr, *table_rows = nullptr;
  const SequenceView *decode_views = nullptr, *chunk_views = nullptr;
  const PrefillChunk* chunk_rows = nullptr;
  // Places of recurrent states (DevicePages::IdOf), of each decode row (-1: padding) and chunk.
  const int32_t *decode_states = nullptr, *chunk_states = nullptr;
  // The chunks' rows in tiles, where sequences have states: of all chunks, on the host as well, and
  // which are a chunk's.
  std::span<const StateTile> tiles;
  const StateTile* state_tiles = nullptr;
  const TileRange* tile_ranges = nullptr;
  const int32_t* logit_rows = nullptr;  // null: all rows, a recorded step
};

class PassPlanner {
 public:
  // Of a pass of that many tokens, whatever their kinds.
  static size_t InputBytes(int max_batch_tokens);
  // `inputs` [InputBytes] on the device.
  static Result<std::unique_ptr<PassPlanner>> Create(int max_batch_tokens, PageTables& tables,
                                                     DevicePages& pages, std::byte* inputs,
                                                     Stream stream);
  ~PassPlanner();

  // After the caches have room for the items. `padded` > 0: generated tokens alone, as a recorded
  // step of that many rows takes them. Queued seals and table updates are sent before the inputs.
  Result<Pass> Plan(std::span<const ForwardItem> items, int padded);
  // Rows that touch nothing, to record a step with.
  Result<Pass> Padding(int rows);

 private:
  // Inputs of a pass as one block of bytes, the same on host and device.
  struct Layout {
    size_t tokens, positions, table_rows, decode_views, chunk_views, chunk_rows;
    size_t decode_states, chunk_states, state_tiles, tile_ranges, logit_rows, bytes;
    Layout(size_t rows, size_t decodes, size_t chunks, size_t tiles, size_t logits);
  };

  PassPlanner() = default;
  void AddTiles(const ForwardItem& item, int row, int chunk, std::vector<TileRange>& ranges);
  Pass PassAt(const Layout& at) const;
  Status Send(const Layout& at);

  PageTables* tables_ = nullptr;
  DevicePages* pages_ = nullptr;
  Stream stream_ = nullptr;
  std::byte* inputs_ = nullptr;
  std::byte* staging_ = nullptr;  // pinned
  void* sent_ = nullptr;          // event
  std::vector<StateTile> tiles_;
};

}  // namespace oscar::cuda
