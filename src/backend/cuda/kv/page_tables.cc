#include "cuda/kv/page_tables.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/check.h"
#include "cuda/device/cuda_status.h"

namespace oscar::cuda {
namespace {

int Pages(int64_t tokens) { return static_cast<int>((tokens + kPageTokens - 1) / kPageTokens); }

}  // namespace

PageTables::Shape PageTables::ShapeFor(const CacheConfig& config, int rows, int64_t max_context,
                                       int max_batch_tokens) {
  Shape shape;
  shape.rows = rows;
  shape.history_stride = Pages(max_context) + 1;
  if (!config.seals()) {
    shape.ring_pages = Pages(max_batch_tokens) + 2;
  } else {
    shape.sink_pages = config.sink / kPageTokens;
    shape.ring_pages = Pages(int64_t{config.cell} + config.recent) + 2 + config.page_run();
  }
  shape.ring_pages = std::min(shape.ring_pages, Pages(max_context) + 3);
  shape.window_stride = shape.sink_pages + shape.ring_pages;
  return shape;
}

Result<std::unique_ptr<PageTables>> PageTables::Create(const CacheConfig& config,
                                                       const Shape& shape, int32_t* device,
                                                       TableUpdate* updates, DevicePages& pages,
                                                       Stream stream) {
  std::unique_ptr<PageTables> tables(new PageTables);
  tables->config_ = &config;
  tables->shape_ = shape;
  tables->device_ = device;
  tables->pages_ = &pages;
  tables->stream_ = stream;
  tables->holders_.assign(static_cast<size_t>(shape.rows), nullptr);
  void* memory = nullptr;
  OSCAR_RETURN_IF_ERROR(
      CudaStatus(cudaMallocHost(&memory, kStaged * sizeof(TableUpdate)), "pinned memory"));
  tables->staging_ = static_cast<TableUpdate*>(memory);
  tables->device_staging_ = updates;
  cudaEvent_t event = nullptr;
  OSCAR_RETURN_IF_ERROR(
      CudaStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event"));
  tables->sent_ = event;
  // Entries nobody has written must still name a page inside the arena.
  OSCAR_RETURN_IF_ERROR(
      CudaStatus(cudaMemsetAsync(device, 0, shape.bytes(), stream), "clearing the page tables"));
  return tables;
}

PageTables::~PageTables() {
  cudaFreeHost(staging_);
  if (sent_ != nullptr) cudaEventDestroy(static_cast<cudaEvent_t>(sent_));
}

void PageTables::BeginPass() {
  ++pass_;
  if (updates_.empty()) return;
  updates_.clear();
  for (Row* row : holders_) {
    if (row != nullptr) row->stale = true;
  }
}

Status PageTables::Seat(Row& row) {
  size_t best = holders_.size();
  for (size_t i = 0; i < holders_.size(); ++i) {
    if (holders_[i] == nullptr) {
      best = i;
      break;
    }
    if (holders_[i]->pass == pass_) continue;
    if (best == holders_.size() || holders_[i]->pass < holders_[best]->pass) best = i;
  }
  if (best == holders_.size()) {
    return ResourceExhausted(fmt::format("more than {} sequences in one pass", holders_.size()));
  }
  if (holders_[best] != nullptr) holders_[best]->row = -1;
  holders_[best] = &row;
  row.row = static_cast<int>(best);
  return {};
}

Result<SequenceView> PageTables::Enter(SequenceCache& cache, int64_t num_tokens) {
  if (cache.attachment() == nullptr) cache.Attach(std::make_unique<Row>(*this));
  Row& row = static_cast<Row&>(*cache.attachment());
  int64_t from = cache.TakeChanged();
  if (row.row < 0) {
    OSCAR_RETURN_IF_ERROR(Seat(row));
    from = 0;
  }
  const uint64_t moves = cache.pool().moves();
  if (row.moves != moves || row.stale) from = 0;
  row.moves = moves;
  row.stale = false;
  row.pass = pass_;

  const int64_t end = cache.length() + num_tokens, num_pages = cache.num_pages();
  const bool plain = !config_->seals();
  const int64_t history_row = int64_t{row.row} * shape_.history_stride;
  const int64_t window_row =
      int64_t{shape_.rows} * shape_.history_stride + int64_t{row.row} * shape_.window_stride;
  const auto update = [&](int64_t index, int32_t id) {
    updates_.push_back({static_cast<int32_t>(index), id});
  };
  if (num_pages > shape_.history_stride) {
    return Unexpected(OutOfRange(fmt::format("a sequence of {} tokens, the page tables hold {}",
                                             end, (shape_.history_stride - 1) * kPageTokens)));
  }
  for (int64_t j = from; j < num_pages; ++j) {
    const int32_t id = pages_->IdOf(cache.page(j).data());
    if (cache.is_sealed(j)) {
      update(history_row + j - shape_.sink_pages, id);
      continue;
    }
    if (plain) update(history_row + j, id);
    if (j < shape_.sink_pages) {
      update(window_row + j, id);
    } else if (j >= num_pages - shape_.ring_pages) {
      update(window_row + shape_.sink_pages + j % shape_.ring_pages, id);
    }
  }
  SequenceView view;
  view.table_row = row.row;
  if (plain) {
    view.history_pages = static_cast<int32_t>(cache.length() / kPageTokens);
  } else {
    view.sink_tokens = static_cast<int32_t>(std::min<int64_t>(end, config_->sink));
    if (end > config_->sink) {
      view.history_pages = static_cast<int32_t>(cache.sealed_end() - shape_.sink_pages);
    }
  }
  const int64_t before = view.sink_tokens + int64_t{view.history_pages} * kPageTokens;
  view.recent_tokens = static_cast<int32_t>(end - before);
  OSCAR_CHECK(
      view.recent_tokens >= 0 &&
          Pages(end) - view.sink_tokens / kPageTokens - view.history_pages <= shape_.ring_pages,
      "{} tokens in BF16 at length {}", view.recent_tokens, end);
  return view;
}

Status PageTables::Send() {
  auto* event = static_cast<cudaEvent_t>(sent_);
  for (size_t at = 0; at < updates_.size(); at += kStaged) {
    const size_t count = std::min(kStaged, updates_.size() - at);
    OSCAR_RETURN_IF_ERROR(CudaStatus(cudaEventSynchronize(event), "waiting for table updates"));
    std::copy_n(updates_.begin() + static_cast<ptrdiff_t>(at), count, staging_);
    OSCAR_RETURN_IF_ERROR(
        CudaStatus(cudaMemcpyAsync(device_staging_, staging_, count * sizeof(TableUpdate),
                                   cudaMemcpyHostToDevice, stream_),
                   "sending table updates"));
    OSCAR_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(event, stream_), "recording an event"));
    OSCAR_RETURN_IF_ERROR(
        LaunchScatter(device_staging_, static_cast<int>(count), device_, stream_));
  }
  updates_.clear();
  return {};
}

CacheView PageTables::view() const {
  CacheView view;
  view.history_page_stride = view.window_page_stride = DevicePages::kUnit;
  view.history_table = device_;
  view.window_table = device_ + int64_t{shape_.rows} * shape_.history_stride;
  view.history_table_stride = shape_.history_stride;
  view.window_table_stride = shape_.window_stride;
  view.sink_pages = shape_.sink_pages;
  view.ring_pages = shape_.ring_pages;
  return view;
}

}  // namespace oscar::cuda
