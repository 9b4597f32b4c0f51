// PageTables: where each sequence's pages are, on the device, in the form attention takes
// (cuda/cache_view.h): a history and a window table with one row a sequence. A sequence gets a row
// when it first takes part in a pass and keeps it while it lives, unless rows run out: then the one
// unused for longest gives way and is sent again when it comes back. Only entries that changed are
// sent.
//
// Open pages before the first new token of a BF16 cache count as history, so that long contexts are
// split over the device; the window then holds the newest page and the pass's own.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cache/sequence_cache.h"
#include "cuda/attention/cache_view.h"
#include "cuda/kv/device_pages.h"
#include "cuda/step_kernels.h"

namespace oscar::cuda {

class PageTables {
 public:
  struct Shape {
    int rows = 0, history_stride = 0, window_stride = 0, sink_pages = 0, ring_pages = 0;
    size_t bytes() const {
      return static_cast<size_t>(rows) * static_cast<size_t>(history_stride + window_stride) *
             sizeof(int32_t);
    }
  };
  static Shape ShapeFor(const CacheConfig& config, int rows, int64_t max_context,
                        int max_batch_tokens);

  static constexpr size_t kStaged = 1 << 15;  // updates sent at once
  // `device` [shape.bytes()] and `updates` [kStaged] are device memory of the caller.
  static Result<std::unique_ptr<PageTables>> Create(const CacheConfig& config, const Shape& shape,
                                                    int32_t* device, TableUpdate* updates,
                                                    DevicePages& pages, Stream stream);
  ~PageTables();

  // Rows must not give way while a pass is being put together. Where the last one never was, what
  // it would have sent is sent anew.
  void BeginPass();
  // The view of `cache` when `num_tokens` more are in it, its pages' entries queued for sending.
  // After Reserve.
  Result<SequenceView> Enter(SequenceCache& cache, int64_t num_tokens);
  Status Send();

  // Tables and strides; the caller adds the pools of a layer.
  CacheView view() const;

 private:
  class Row : public CacheAttachment {
   public:
    explicit Row(PageTables& tables) : tables_(tables) {}
    ~Row() override {
      if (row >= 0) tables_.holders_[static_cast<size_t>(row)] = nullptr;
    }
    int row = -1;
    uint64_t pass = 0;   // last used
    uint64_t moves = 0;  // of the pool, when last sent
    bool stale = false;  // all of it is to be sent

   private:
    PageTables& tables_;
  };

  PageTables() = default;
  Status Seat(Row& row);

  const CacheConfig* config_ = nullptr;
  Shape shape_;
  int32_t* device_ = nullptr;  // history rows, then window rows
  DevicePages* pages_ = nullptr;
  Stream stream_ = nullptr;
  std::vector<Row*> holders_;
  uint64_t pass_ = 0;
  std::vector<TableUpdate> updates_;
  TableUpdate* staging_ = nullptr;         // pinned
  TableUpdate* device_staging_ = nullptr;  // its twin, the caller's
  void* sent_ = nullptr;                   // event
};

}  // namespace oscar::cuda
