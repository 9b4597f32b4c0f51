// DecodeAttention: one query token a sequence against its cache, one launch for a whole batch and
// layer. Holds only numbers (which kernel, how many blocks, how much shared memory); create it once
// a shape and device, outside graph capture, and launch it from one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cuda/attention/cache_view.h"
#include "cuda/attention/mixed_split.h"
#include "oscar/status.h"

namespace oscar::cuda {

// Query heads on one KV head, at most.
inline constexpr int kMaxGroupSize = 16;

struct DecodeArguments {
  CacheView cache;
  const SequenceView* sequences = nullptr;  // [batch], device
  const Bf16* q = nullptr;                  // [batch, q_heads, D], device, rotated, 16-byte aligned
  void* out = nullptr;                      // [batch, q_heads, D], device; rows of padding are kept
  bool out_fp32 = false;                    // else BF16
  float softmax_scale = 0.0f;
  int batch = 0;
  // workspace_bytes() of device memory, zeroed once; every launch leaves it ready for the next.
  // Launches that may overlap need one each.
  void* workspace = nullptr;
  std::span<const HeadBlock> heads;  // host; of the layer, where heads differ in bits
  const float* sinks = nullptr;      // [q_heads], device, times log2(e), where the shape has them
  // Launch with programmatic dependence: blocks may start while the predecessor drains, which may
  // write q and the windows, but neither lengths nor tables nor history.
  bool overlap_predecessor = false;
};

class DecodeAttention {
 public:
  // `max_window_tokens`: the most BF16 tokens (sink and recent) a sequence may have. `layers`:
  // those it will be launched for, where heads differ in bits; else empty. Fails where the current
  // device has no kernel for the shape or too little shared memory.
  static Result<DecodeAttention> Create(const AttentionShape& shape, int max_batch,
                                        int max_window_tokens,
                                        std::span<const HeadBlocks> layers = {});

  size_t workspace_bytes() const;
  // Asynchronous; allocates nothing and waits for nothing, so it may be captured in a graph.
  Status Launch(const DecodeArguments& args, Stream stream) const;

  int blocks() const { return blocks_; }
  int stages() const { return stages_; }
  // Splits of the history depend on its length alone (and the device), where heads differ in bits
  // on their map, too.
  int NumSplits(int history_pages) const;
  MixedSplit SplitOf(const HeadBlocks& heads) const;

 private:
  DecodeAttention() = default;
  AttentionShape shape_;
  const void* kernel_ = nullptr;
  int max_batch_ = 0;
  int blocks_ = 0;
  int stages_ = 0;
  int heads_ = 0;  // query heads a block handles
  int head_blocks_ = 1;
  int max_splits_ = 1;
  int split_pages_ = 1;
  bool mixed_ = false;
  int target_splits_ = 1;  // of a sequence, all heads, where heads differ in bits
  int stage_bytes_ = 0;
  int warps_ = 1;
  int threads_ = 0;
  int slots_ = 1;
  int shared_bytes_ = 0;
};

}  // namespace oscar::cuda
