// PortableAttention: attention in the CPU's order of sums, so that both devices give the same bits
// (simd/attention.h's PrefillAttention with fp32 products). A page is one softmax tile, pages are
// taken in position order, every sum is one chain. For evaluation and tests, not for speed. Holds
// only numbers; create it once a shape and device.
#pragma once

#include <cstdint>
#include <span>

#include "cuda/attention/cache_view.h"
#include "cuda/attention/prefill_params.h"
#include "oscar/status.h"

namespace oscar::cuda {

struct PortableArguments {
  CacheView cache;
  const SequenceView* sequences = nullptr;  // [batch], device
  // [batch], device; null: one query a sequence, its newest token, at row = its index.
  const PrefillChunk* chunks = nullptr;
  const float* q = nullptr;  // [rows, q_stride], device: q heads first, rotated
  int64_t q_stride = 0;      // elements
  float* out = nullptr;      // [rows, q_heads, D], device
  float softmax_scale = 0.0f;
  int batch = 0;
  int max_query_tokens = 1;          // of any chunk
  std::span<const HeadBlock> heads;  // host; of the layer, where heads differ in bits
  const float* sinks = nullptr;      // [q_heads], device, natural, where the shape has them
};

class PortableAttention {
 public:
  // mixed: heads differ in bits.
  static Result<PortableAttention> Create(const AttentionShape& shape, bool mixed = false);
  // Asynchronous.
  Status Launch(const PortableArguments& args, Stream stream) const;

 private:
  PortableAttention() = default;
  AttentionShape shape_;
  const void* kernel_ = nullptr;
  bool mixed_ = false;
  int shared_bytes_ = 0;
  int tokens_ = 0;  // of queries, a block
};

}  // namespace oscar::cuda
