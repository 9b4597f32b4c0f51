// LayeredAppend: tokens of a prompt's cell, appended to a sequence layer by layer. Prompt tokens
// see their cell exactly, so reading a cell needs its rows in BF16; but a layer's rows are needed
// by that layer alone. Here the rows of one layer at a time lie in BF16, each page is sealed layer
// by layer as soon as all of the cell has been through it, and only what stays open afterwards
// (sink and recent window) gets open pages. The sequence ends in the state it would be in after
// reading the cell at once and sealing what is due before the next token: the same bytes, with a
// fraction of the memory on the way.
//
//   Begin -> for each layer: SetLayer, write rows and attend in position order, SealLayer -> Commit
//
// All pages come from the sequence's pool at Begin and go back if it is dropped before Commit. The
// sequence must outlive it and not change in between. One owner thread; workers may read and write
// the bytes between calls.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cache/sequence_cache.h"

namespace oscar {

// Bytes of one layer of an open page.
inline uint64_t OpenLayerBytes(const CacheConfig& config) { return config.open.LayerBytes(0); }

// Pages that reading [length, end) layer by layer takes beside those the sequence has, by kind; a
// pure function of positions. `sealed_end`: the sequence's, after SealForPrompt; pages behind it
// that are sealed nevertheless are counted as if they were open.
struct LayeredPages {
  int64_t sealed = 0;      // new sealed pages; some replace open ones at Commit
  int64_t open = 0;        // new open pages
  int64_t layer = 0;       // pages of which one layer is held
  int64_t sealed_end = 0;  // afterwards

  LayeredPages(const CacheConfig& config, int64_t length, int64_t sealed_end, int64_t end);
  uint64_t bytes(const CacheConfig& config) const {
    return static_cast<uint64_t>(sealed) * config.sealed.bytes() +
           static_cast<uint64_t>(open) * config.open.bytes() +
           static_cast<uint64_t>(layer) * OpenLayerBytes(config);
  }
};

class LayeredAppend {
 public:
  // What Begin asks of the pool, as SequenceCache::CostOf has it for a chunk.
  static AppendCost CostOf(const SequenceCache& cache, int64_t num_tokens);
  // Seals what is due before the first token and takes the pages. [length, length + num_tokens)
  // lies in one cell. On kResourceExhausted nothing has changed but what was due to be sealed, and
  // a shared, partly filled last page may have become a copy of the sequence's own.
  static Result<std::unique_ptr<LayeredAppend>> Begin(SequenceCache& cache, int64_t num_tokens,
                                                      ThreadPool& threads);

  const SequenceCache& cache() const { return cache_; }
  int64_t num_tokens() const { return num_tokens_; }
  uint64_t bytes() const { return bytes_; }  // of pages beside the sequence's own

  // The layer that the rest speaks of.
  void SetLayer(int layer);
  // Addresses of the layer's blocks (KV head 0) and kinds of all pages, [length + num_tokens].
  const std::byte* const* page_table() const { return table_.data(); }
  const uint8_t* sealed_flags() const { return flags_.data(); }
  // Where the row of a position in [length, length + num_tokens) goes; [D] numbers.
  Bf16* KRow(int head, int64_t position) const;
  Bf16* VRow(int head, int64_t position) const;
  // All rows of the layer are written and have been attended to.
  void SealLayer(ThreadPool& threads);
  // After SealLayer of every layer.
  void Commit();

 private:
  LayeredAppend(SequenceCache& cache, int64_t num_tokens);
  std::byte* OpenBlock(int head, int64_t position) const;

  SequenceCache& cache_;
  const CacheConfig& config_;
  const int64_t num_tokens_;
  int64_t first_seal_ = 0;  // the sequence's sealed end at Begin
  int64_t sealed_end_ = 0;  // and at Commit
  uint64_t bytes_ = 0;
  uint64_t saturated_ = 0;
  int layer_ = 0, layers_sealed_ = 0;
  PageLayout layer_layout_;      // outlives the pages below
  std::vector<PageRef> sealed_;  // pages [first_seal_, sealed_end_); empty: sealed already
  std::vector<PageRef> fresh_;   // pages from the sequence's end on: one layer, or open
  std::vector<const std::byte*> table_;
  std::vector<uint8_t> flags_;
};

}  // namespace oscar
