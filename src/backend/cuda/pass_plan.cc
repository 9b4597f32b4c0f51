#include "cuda/pass_plan.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>

#include "cuda/device/cuda_status.h"

namespace oscar::cuda {

PassPlanner::Layout::Layout(size_t rows, size_t decodes, size_t chunks, size_t tiles,
                            size_t logits) {
  size_t at = 0;
  const auto take = [&](size_t size) {
    const size_t here = at;
    at += (size + 15) / 16 * 16;
    return here;
  };
  tokens = take(rows * sizeof(int32_t));
  positions = take(rows * sizeof(int32_t));
  table_rows = take(rows * sizeof(int32_t));
  decode_views = take(decodes * sizeof(SequenceView));
  chunk_views = take(chunks * sizeof(SequenceView));
  chunk_rows = take(chunks * sizeof(PrefillChunk));
  decode_states = take(decodes * sizeof(int32_t));
  chunk_states = take(chunks * sizeof(int32_t));
  state_tiles = take(tiles * sizeof(StateTile));
  tile_ranges = take(chunks * sizeof(TileRange));
  logit_rows = take(logits * sizeof(int32_t));
  bytes = at;
}

size_t PassPlanner::InputBytes(int max_batch_tokens) {
  const auto rows = static_cast<size_t>(max_batch_tokens);
  return Layout(rows, rows, rows, rows, rows).bytes;
}

Result<std::unique_ptr<PassPlanner>> PassPlanner::Create(int max_batch_tokens, PageTables& tables,
                                                         DevicePages& pages, std::byte* inputs,
                                                         Stream stream) {
  std::unique_ptr<PassPlanner> planner(new PassPlanner);
  planner->tables_ = &tables;
  planner->pages_ = &pages;
  planner->inputs_ = inputs;
  planner->stream_ = stream;
  void* pinned = nullptr;
  OSCAR_RETURN_IF_ERROR(
      CudaStatus(cudaMallocHost(&pinned, InputBytes(max_batch_tokens)), "pinned memory"));
  planner->staging_ = static_cast<std::byte*>(pinned);
  cudaEvent_t sent = nullptr;
  OSCAR_RETURN_IF_ERROR(
      CudaStatus(cudaEventCreateWithFlags(&sent, cudaEventDisableTiming), "creating an event"));
  planner->sent_ = sent;
  return planner;
}

PassPlanner::~PassPlanner() {
  cudaFreeHost(staging_);
  if (sent_ != nullptr) cudaEventDestroy(static_cast<cudaEvent_t>(sent_));
}

Pass PassPlanner::PassAt(const Layout& at) const {
  Pass pass;
  pass.tokens = reinterpret_cast<const int32_t*>(inputs_ + at.tokens);
  pass.positions = reinterpret_cast<const int32_t*>(inputs_ + at.positions);
  pass.table_rows = reinterpret_cast<const int32_t*>(inputs_ + at.table_rows);
  pass.decode_views = reinterpret_cast<const SequenceView*>(inputs_ + at.decode_views);
  pass.chunk_views = reinterpret_cast<const SequenceView*>(inputs_ + at.chunk_views);
  pass.chunk_rows = reinterpret_cast<const PrefillChunk*>(inputs_ + at.chunk_rows);
  pass.decode_states = reinterpret_cast<const int32_t*>(inputs_ + at.decode_states);
  pass.chunk_states = reinterpret_cast<const int32_t*>(inputs_ + at.chunk_states);
  pass.state_tiles = reinterpret_cast<const StateTile*>(inputs_ + at.state_tiles);
  pass.tile_ranges = reinterpret_cast<const TileRange*>(inputs_ + at.tile_ranges);
  pass.logit_rows = reinterpret_cast<const int32_t*>(inputs_ + at.logit_rows);
  return pass;
}

Status PassPlanner::Send(const Layout& at) {
  OSCAR_RETURN_IF_ERROR(
      CudaStatus(cudaMemcpyAsync(inputs_, staging_, at.bytes, cudaMemcpyHostToDevice, stream_),
                 "sending a step's inputs"));
  return CudaStatus(cudaEventRecord(static_cast<cudaEvent_t>(sent_), stream_),
                    "recording an event");
}

Result<Pass> PassPlanner::Padding(int rows) {
  const auto count = static_cast<size_t>(rows);
  const Layout at(count, count, 0, 0, 0);
  OSCAR_RETURN_IF_ERROR(CudaStatus(cudaEventSynchronize(static_cast<cudaEvent_t>(sent_)),
                                   "waiting for a step's inputs"));
  std::memset(staging_, 0, at.bytes);
  std::fill_n(reinterpret_cast<int32_t*>(staging_ + at.positions), count, -1);
  std::fill_n(reinterpret_cast<int32_t*>(staging_ + at.decode_states), count, -1);
  OSCAR_RETURN_IF_ERROR(Send(at));
  Pass pass = PassAt(at);
  pass.rows = pass.decodes = rows;
  pass.logit_rows = nullptr;
  return pass;
}

// Tiles end at multiples of their size among positions, wherever the prompt was cut.
void PassPlanner::AddTiles(const ForwardItem& item, int row, int chunk,
                           std::vector<TileRange>& ranges) {
  TileRange range{static_cast<int32_t>(tiles_.size()), 0};
  const int64_t begin = item.cache->length();
  const int64_t end = begin + static_cast<int64_t>(item.tokens.size());
  for (int64_t at = begin; at < end; ++range.count) {
    const int64_t next = std::min(end, (at / kStateTileTokens + 1) * kStateTileTokens);
    tiles_.push_back(
        {static_cast<int32_t>(row + at - begin), static_cast<int32_t>(next - at), chunk});
    at = next;
  }
  ranges.push_back(range);
}

Result<Pass> PassPlanner::Plan(std::span<const ForwardItem> items, int padded) {
  const BatchRows batch(items);
  const bool recorded = padded > 0;
  const auto rows = static_cast<size_t>(batch.rows), decodes = static_cast<size_t>(batch.decodes);
  size_t chunks = 0;
  std::vector<TileRange> ranges;  // by chunk
  tiles_.clear();
  for (size_t i = 0; i < items.size(); ++i) {
    if (!items[i].is_prompt) continue;
    if (items[i].cache->state())
      AddTiles(items[i], batch.first[i], static_cast<int>(chunks), ranges);
    ++chunks;
  }
  const size_t all = recorded ? static_cast<size_t>(padded) : rows;
  const Layout at =
      recorded ? Layout(all, all, 0, 0, 0)
               : Layout(rows, decodes, chunks, tiles_.size(), static_cast<size_t>(batch.logits));
  OSCAR_RETURN_IF_ERROR(CudaStatus(cudaEventSynchronize(static_cast<cudaEvent_t>(sent_)),
                                   "waiting for a step's inputs"));
  auto* tokens = reinterpret_cast<int32_t*>(staging_ + at.tokens);
  auto* positions = reinterpret_cast<int32_t*>(staging_ + at.positions);
  auto* table_rows = reinterpret_cast<int32_t*>(staging_ + at.table_rows);
  auto* decode_views = reinterpret_cast<SequenceView*>(staging_ + at.decode_views);
  auto* chunk_views = reinterpret_cast<SequenceView*>(staging_ + at.chunk_views);
  auto* chunk_rows = reinterpret_cast<PrefillChunk*>(staging_ + at.chunk_rows);
  auto* decode_states = reinterpret_cast<int32_t*>(staging_ + at.decode_states);
  auto* chunk_states = reinterpret_cast<int32_t*>(staging_ + at.chunk_states);
  auto* logit_rows = reinterpret_cast<int32_t*>(staging_ + at.logit_rows);
  std::ranges::copy(tiles_, reinterpret_cast<StateTile*>(staging_ + at.state_tiles));
  std::ranges::copy(ranges, reinterpret_cast<TileRange*>(staging_ + at.tile_ranges));

  tables_->BeginPass();
  size_t next_chunk = 0, next_logit = 0;
  int longest = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    const ForwardItem& item = items[i];
    const auto count = static_cast<int64_t>(item.tokens.size());
    OSCAR_ASSIGN_OR_RETURN(const SequenceView view, tables_->Enter(*item.cache, count));
    const auto row = static_cast<size_t>(batch.first[i]);
    const PageRef& state = item.cache->state();
    (item.is_prompt ? chunk_states[next_chunk] : decode_states[row]) =
        state ? pages_->IdOf(state.data()) : -1;
    if (item.is_prompt) {
      chunk_views[next_chunk] = view;
      chunk_rows[next_chunk++] = {static_cast<int32_t>(row), static_cast<int32_t>(count)};
      longest = std::max(longest, static_cast<int>(count));
    } else {
      decode_views[row] = view;
    }
    for (size_t t = 0; t < item.tokens.size(); ++t) {
      tokens[row + t] = item.tokens[t];
      positions[row + t] = static_cast<int32_t>(item.cache->length() + static_cast<int64_t>(t));
      table_rows[row + t] = view.table_row;
    }
    if (recorded) continue;
    const size_t end = row + item.tokens.size();
    for (size_t r = end - static_cast<size_t>(item.num_logits); r < end; ++r) {
      logit_rows[next_logit++] = static_cast<int32_t>(r);
    }
  }
  for (size_t i = rows; i < all; ++i) {
    tokens[i] = table_rows[i] = 0;
    positions[i] = decode_states[i] = -1;
    decode_views[i] = {};
  }
  OSCAR_RETURN_IF_ERROR(pages_->Flush());
  OSCAR_RETURN_IF_ERROR(tables_->Send());
  OSCAR_RETURN_IF_ERROR(Send(at));
  Pass pass = PassAt(at);
  pass.longest_chunk = longest;
  pass.tiles = tiles_;
  pass.rows = static_cast<int>(all);
  pass.decodes = recorded ? padded : batch.decodes;
  pass.chunks = static_cast<int>(chunks);
  if (recorded) pass.logit_rows = nullptr;
  return pass;
}

}  // namespace oscar::cuda
