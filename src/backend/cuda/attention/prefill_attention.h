// PrefillAttention: causal attention of a chunk of new tokens against its whole sequence, read from
// the cache's pages in place. The chunk's own K and V must already be in the window pages
// (WriteTokens), its tokens counted in the view. Holds only numbers; create it once a shape and
// device, outside graph capture.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cuda/attention/cache_view.h"
#include "cuda/attention/prefill_params.h"
#include "oscar/status.h"

namespace oscar::cuda {

// How P enters its product with BF16 values. Quantised values take it as fp16 either way.
enum class PrefillPrecision : uint8_t {
  kPrecise,  // as two BF16 numbers: outputs within 1e-3 (relative L2) before they are rounded
  kFast,     // as one, rounded by up to 2^-9: a product in three less, outputs within 4e-3; at head
             // dims other than 128 Hopper is precise all the same
};

struct PrefillArguments {
  CacheView cache;
  const SequenceView* sequences = nullptr;  // [batch], device; recent tokens include the chunk
  const PrefillChunk* chunks = nullptr;     // [batch], device
  const Bf16* q = nullptr;                  // [rows, q_heads, D], device, rotated
  void* out = nullptr;                      // [rows, q_heads, D], device
  bool out_fp32 = false;                    // else BF16
  PrefillPrecision precision = PrefillPrecision::kPrecise;
  float softmax_scale = 0.0f;
  int batch = 0;
  int max_query_tokens = 0;          // of any chunk
  std::span<const HeadBlock> heads;  // host; of the layer, where heads differ in bits
  const float* sinks = nullptr;      // [q_heads], device, times log2(e), where the shape has them
};

// Which kernel family; kBest takes wgmma on compute capability 9.0 and mma.sync elsewhere.
enum class PrefillPath : uint8_t { kBest, kGeneric };

class PrefillAttention {
 public:
  // `layers`: those it will be launched for, where heads differ in bits; else empty.
  static Result<PrefillAttention> Create(const AttentionShape& shape,
                                         PrefillPath path = PrefillPath::kBest,
                                         std::span<const HeadBlocks> layers = {});
  // Asynchronous; may be captured in a graph.
  Status Launch(const PrefillArguments& args, Stream stream) const;

 private:
  PrefillAttention() = default;
  AttentionShape shape_;
  const void* kernel_ = nullptr;
  int shared_bytes_ = 0;
  int raw_slots_log2_ = 0;
  bool mixed_ = false;
  int rows_ = 0;     // queries a block
  int threads_ = 0;  // of a block
};

}  // namespace oscar::cuda
