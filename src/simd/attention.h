// Attention over a sequence's pages as they lie in the cache: packed codes are never expanded into
// a dense copy. A sequence is a list of 64-token pages by position, each open (BF16 rows) or sealed
// (INT2, INT3, INT4 or BF16, K and V of a KV head by themselves), all in CodeOrder::kCpu; the rows
// of the tokens in flight are already written into open pages.
//
// Sameness: a query's arithmetic is a function of (its position, the page list, q) alone. Pages are
// taken in position order, one page = one softmax tile; decode splits the page list at multiples of
// a fixed number of pages, and splits merge in position order. Threads, batch and chunking change
// no bit.
//
// Thread-safety: the kernels only read pages; a workspace belongs to one caller at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/half.h"
#include "base/thread_pool.h"
#include "cache/page_layout.h"
#include "simd/aligned_buffer.h"

namespace oscar::simd {

// What all sequences of one layer share.
struct AttentionLayer {
  int q_heads = 0;
  int kv_heads = 0;            // divides q_heads
  float softmax_scale = 1.0f;  // multiplies q.k
  BlockLayout open;            // BF16
  // [kv_heads]: the blocks of this layer in a sealed page, any kind, groups of one size.
  std::span<const BlockPlace> sealed;
  size_t open_offset = 0;  // bytes from an open page's start to KV head 0's block of this layer
  size_t sealed_base = 0;  // the offset of `sealed` that pointers to sealed pages point to
  // Token norms over all KV heads, where `has_norms`: as `sealed` counts.
  size_t norm_offset = 0;
  bool has_norms = false;
  int64_t sink_pages = 0;  // pages that are sealed together are counted from here
  // Against BF16 pages, q and P are rounded to BF16 too (VDPBF16PS, TDPBF16PS) where the processor
  // can; fp32 otherwise. Goes with the BF16 paths of gemm.h, which round the same activations.
  bool bf16_products = false;
  // Tokens seen, the query's own among them; 0: all. Pages with some of them are open.
  int64_t window = 0;
  // [q_heads]: logits that take weight and give no value (not scaled); null: there are none.
  const float* sinks = nullptr;

  int head_dim() const { return open.head_dim(); }
  int num_groups() const { return sealed.front().layout.num_groups(); }
  const BlockLayout& Stored(int kv_head) const {
    return sealed[static_cast<size_t>(kv_head)].layout;
  }
  // A KV head's block of the page at `page`.
  const std::byte* Block(const std::byte* page, bool is_sealed, int kv_head) const {
    const auto head = static_cast<size_t>(kv_head);
    return page + (is_sealed ? sealed[head].offset - sealed_base
                             : open_offset + head * open.block_bytes());
  }
  // What a reader needs of sealed page `index` of a sequence.
  SealedBlock Sealed(const std::byte* const* pages, int64_t index, int kv_head) const {
    SealedBlock out{.block = Block(pages[index], /*is_sealed=*/true, kv_head)};
    if (Stored(kv_head).pages_together() > 1) {
      const int64_t first = index - IndexInRun(index);
      out.pair[0] = Block(pages[first], true, kv_head);
      out.pair[1] = Block(pages[first + 1], true, kv_head);
    }
    if (has_norms) out.norms = pages[index] + norm_offset - sealed_base;
    return out;
  }
  // Place of a page among those it is sealed with; a page of the sink comes first.
  int64_t IndexInRun(int64_t index) const {
    return index < sink_pages ? 0 : (index - sink_pages) % kMaxPagesTogether;
  }
  // Every head has a layout, all of the same head dim, groups and order.
  bool IsValid() const;
  // The first position that a query at `position` sees.
  int64_t FirstSeen(int64_t position) const {
    return window == 0 || position < window ? 0 : position - window + 1;
  }
};

// One sequence's pages; the same table serves every layer.
struct SequencePages {
  const std::byte* const* pages = nullptr;  // [>= num_tokens / 64 rounded up], by position
  const uint8_t* is_sealed = nullptr;       // [same]
};

// One generated token: sees positions [0, num_tokens), or those of a window that ends there.
struct DecodeQuery {
  SequencePages sequence;
  int64_t num_tokens = 0;    // > 0; counts the token itself
  const float* q = nullptr;  // [q_heads, head_dim], rotated like K
  float* out = nullptr;      // [q_heads, head_dim]
};

// Windows whose ends are exact to the token: some of the first `count` pages lie here in sealed
// form, too, and a token at position p reads their rows in [sink, p - tokens] from here, all others
// from the page itself.
struct TokenWindow {
  const std::byte* const* pages = nullptr;  // [count]: KV head 0's block of this layer, or null
  int64_t count = 0;
  int64_t sink = 0;
  int64_t tokens = 1;  // >= 1: a token always sees itself as it was written
  size_t stride = 0;   // bytes between pages that are sealed together
};

// A run of consecutive prompt tokens of one sequence: token i, at position first_position + i, sees
// positions [0, first_position + i], or those of a window that ends there.
struct PrefillQuery {
  SequencePages sequence;
  int64_t first_position = 0;
  int num_tokens = 0;
  const float* q = nullptr;  // [num_tokens, q_heads, head_dim], q_stride elements between tokens
  size_t q_stride = 0;
  float* out = nullptr;  // the same shape, out_stride elements between tokens
  size_t out_stride = 0;
  TokenWindow window = {};  // count 0: whole pages are sealed or open
};

class AttentionWorkspace {
 public:
  AlignedBuffer<float> states;   // decode: one (o, m, d) a split
  AlignedBuffer<float> scratch;  // prefill: tiles, one set a thread
};

// The batch may mix lengths. Results agree with attention over the decoded pages to 1e-3 (relative
// L2): against packed pages q and P * scale are rounded to 15 bits, or
// (Target::kAvx512Words, INT2) so that sums over 16 dims or 32 tokens have 16 bits; fp32 elsewhere.
// That last rounding moves a logit by some 4e-5 of its size, so on logits of +-40 one head in eight
// exceeds 1e-3 (docs/lab/2026-11-16-benchmarks.md).
void DecodeAttention(ThreadPool& pool, AttentionWorkspace& workspace, const AttentionLayer& layer,
                     std::span<const DecodeQuery> batch);

// Flash-style: a page is unpacked once per block of query rows into tiles that stay in L1. Integer
// products of 16-bit numbers against packed pages (exact, so the same on every target), fp32 or
// BF16 ones (bf16_products) against BF16 pages. All of them on tiles of AMX where there are some
// (Target::kAmxInt8); with bf16_products keys that are not rows then are two BF16 numbers each, to
// 2^-17, else floats. OSCAR_GEMM=bf16 leaves BF16 numbers to vectors.
void PrefillAttention(ThreadPool& pool, AttentionWorkspace& workspace, const AttentionLayer& layer,
                      std::span<const PrefillQuery> batch);

}  // namespace oscar::simd
