// PassPlanner: turns the items of a pass into what kernels read: rows, positions, views of the page
// tables. Puts them together in pinned memory and sends them to the device in one copy. Owns the
// pinned memory; tables, pages and device memory are the caller's. One thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <span>
#include <vector>

#include "cuda/attention/cache_view.h"
#include "cuda/attention/prefill_attention.h"
#include "cuda/kv/page_tables.h"
#include "model/model.h"
#include "oscar/status.h"

namespace oscar::cuda {

// Rows that a captured step may have.
inline constexpr int kBuckets[] = {1,  2,  4,   8,   12,  16,  24,  32,  40,  48,  56,  64,
                                   80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512};
// The smallest that holds `rows`, or the largest where none does.
constexpr int BucketFor(int rows) {
  for (const int bucket : kBuckets) {
    if (bucket >= rows) return bucket;
  }
  return kBuckets[std::size(kBuckets) - 1];
}
static_assert(BucketFor(1) == 1 && BucketFor(9) == 12 && BucketFor(4096) == 512);

// What a pass computes, and where its inputs lie on the device. The first `decodes` rows are
// generated tokens, the rest are prompt chunks in order.
struct Pass {
  int rows = 0, decodes = 0, chunks = 0, longest_chunk = 0;
  const int32_t *tokens = nullptr, *positions = nullptr, *table_rows = nullptr;
  const SequenceView *decode_views = nullptr, *chunk_views = nullptr;
  const PrefillChunk* chunk_rows = nullptr;
  const int32_t* logit_rows = nullptr;
};

// The caller's view of a pass: which row of the logits each of its rows is.
struct PlannedPass {
  Pass pass;
  size_t num_logits = 0;
  bool captured = false;          // rows are padded to a bucket
  std::vector<int32_t> logit_of;  // captured passes: row of the logits, by item
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

  // After the caches have room for the items. Passes of generated tokens alone that fit a bucket of
  // at most `largest_bucket` are planned for a captured step. Queued seals and table updates are
  // sent before the inputs. `moves`: of the pool.
  Result<PlannedPass> Plan(std::span<const ForwardItem> items, int largest_bucket, uint64_t moves);
  // Rows that touch nothing, to capture a step with.
  Result<Pass> Padding(int rows);

 private:
  // Inputs of a pass as one block of bytes, the same on host and device.
  struct Layout {
    size_t tokens, positions, table_rows, decode_views, chunk_views, chunk_rows, logit_rows, bytes;
    Layout(size_t rows, size_t decodes, size_t chunks, size_t logits);
  };

  PassPlanner() = default;
  Pass PassAt(const Layout& at) const;
  Status Send(const Layout& at);

  PageTables* tables_ = nullptr;
  DevicePages* pages_ = nullptr;
  Stream stream_ = nullptr;
  std::byte* inputs_ = nullptr;
  std::byte* staging_ = nullptr;  // pinned
  void* sent_ = nullptr;          // event
};

}  // namespace oscar::cuda
