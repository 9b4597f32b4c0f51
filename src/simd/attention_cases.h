// The conformance cases of attention (cache/attention_reference.h) as pages and prompts. For tests.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/rng.h"
#include "base/thread_pool.h"
#include "cache/attention_reference.h"
#include "simd/attention.h"

namespace oscar::simd {

// A case's inputs as a sequence of pages. Cases put their windows anywhere; here they become whole
// open pages except for the last, so tokens are laid out anew: sink, pages, recent, in order.
struct PagedCase {
  AttentionLayer layer{.open = BlockLayout(BlockKind::kBf16, CodeOrder::kCpu, 64, 64),
                       .sealed = {}};
  std::vector<BlockPlace> places;  // what layer.sealed points to
  std::vector<std::vector<std::byte>> storage;
  std::vector<const std::byte*> pages;
  std::vector<uint8_t> is_sealed;
  int64_t num_tokens = 0;

  SequencePages view() const { return {pages.data(), is_sealed.data()}; }
};

inline constexpr size_t kOpenOffset = 192, kSealedOffset = 64;  // as if other layers came first

inline void AppendOpenPages(const AttentionCase& c, const std::vector<Bf16>& k,
                            const std::vector<Bf16>& v, int tokens, PagedCase& out) {
  const BlockLayout& open = out.layer.open;
  const auto dims = static_cast<size_t>(c.head_dim);
  for (int first = 0; first < tokens; first += kPageTokens) {
    const auto count = static_cast<size_t>(std::min(kPageTokens, tokens - first));
    // Rows that hold no token are NaN: reading one into a result would show.
    std::vector<std::byte> page(kOpenOffset + open.block_bytes() * static_cast<size_t>(c.kv_heads),
                                std::byte{0xff});
    for (int h = 0; h < c.kv_heads; ++h) {
      const size_t source = (static_cast<size_t>(h * tokens + first)) * dims;
      std::byte* block = page.data() + kOpenOffset + static_cast<size_t>(h) * open.block_bytes();
      std::memcpy(block, k.data() + source, count * dims * sizeof(Bf16));
      std::memcpy(block + open.v_codes_offset(), v.data() + source, count * dims * sizeof(Bf16));
    }
    out.storage.push_back(std::move(page));
    out.is_sealed.push_back(0);
    out.num_tokens += static_cast<int64_t>(count);
  }
}

inline PagedCase MakePages(const AttentionCase& c, const AttentionInputs& in) {
  PagedCase out{
      .layer = {.q_heads = c.q_heads(),
                .kv_heads = c.kv_heads,
                .softmax_scale = in.softmax_scale,
                .open = BlockLayout(BlockKind::kBf16, CodeOrder::kCpu, c.head_dim, c.head_dim),
                .sealed = {},
                .open_offset = kOpenOffset,
                .norm_offset = 0,
                .has_norms = !in.norms.empty(),
                .sink_pages = (c.sink_tokens + kPageTokens - 1) / kPageTokens},
      .places = {},
      .storage = {},
      .pages = {},
      .is_sealed = {}};
  AppendOpenPages(c, in.sink_k, in.sink_v, c.sink_tokens, out);
  const size_t block = in.layout.block_bytes();
  for (int h = 0; h < c.kv_heads; ++h) {
    out.places.push_back({in.layout, kSealedOffset + static_cast<size_t>(h) * block});
  }
  out.layer.sealed = out.places;
  const size_t norm_bytes = in.norms.empty() ? 0 : BlockLayout::kNormBytes;
  out.layer.norm_offset = kSealedOffset + block * static_cast<size_t>(c.kv_heads);
  for (int p = 0; p < c.num_pages; ++p) {
    std::vector<std::byte> page(out.layer.norm_offset + norm_bytes);
    if (norm_bytes > 0) {
      std::memcpy(page.data() + out.layer.norm_offset, in.norms.data() + p * kPageTokens,
                  norm_bytes);
    }
    for (int h = 0; h < c.kv_heads; ++h) {
      std::memcpy(page.data() + kSealedOffset + static_cast<size_t>(h) * block,
                  in.blocks.data() + static_cast<size_t>(h * c.num_pages + p) * block, block);
    }
    out.storage.push_back(std::move(page));
    out.is_sealed.push_back(1);
    out.num_tokens += kPageTokens;
  }
  AppendOpenPages(c, in.recent_k, in.recent_v, c.recent_tokens, out);
  for (const auto& page : out.storage) out.pages.push_back(page.data());
  return out;
}

// Windows before the last page are whole pages in a real cache.
inline AttentionCase WholePages(AttentionCase c) {
  c.sink_tokens =
      c.num_pages + c.recent_tokens > 0 ? (c.sink_tokens + 63) / 64 * 64 : c.sink_tokens;
  return c;
}

// Relative L2 where q (and P, at prefill) are rounded to BF16 against BF16 pages.
inline constexpr double kBf16 = 5e-3, kBf16Sharp = 5e-2;
// And where q and P have 15 bits, at prefill over packed pages.
inline constexpr double kPacked = 6e-4;

// A prompt's tokens over sealed and open pages, each seeing what lies before it.
struct Prompt {
  AttentionCase c;
  AttentionInputs in{.layout = BlockLayout(BlockKind::kBf16, CodeOrder::kCpu, 64, 64)};
  PagedCase paged;
  std::vector<float> q;  // [tokens, q_heads, D]
  int first = 0, count = 0;

  Prompt(const AttentionCase& shape, int tokens, uint64_t seed = 1) : c(WholePages(shape)) {
    in = MakeAttentionInputs(c, CodeOrder::kCpu, seed);
    paged = MakePages(c, in);
    count = tokens;
    first = static_cast<int>(paged.num_tokens) - tokens;
    // The case's query, turned a little for each token.
    const Philox rng(5, seed);
    q.resize(static_cast<size_t>(tokens) * in.q.size());
    for (size_t i = 0; i < q.size(); ++i) {
      q[i] = 0.8f * in.q[i % in.q.size()] + 0.6f * rng.Normal(i);
    }
  }
  std::vector<double> Reference() const {
    const auto dims = static_cast<size_t>(c.head_dim);
    std::vector<DenseKv> dense;
    for (int h = 0; h < c.kv_heads; ++h) dense.push_back(DecodeKvHead(c, in, h));
    std::vector<double> expected(q.size());
    for (size_t row = 0; row < expected.size() / dims; ++row) {
      const size_t token = row / static_cast<size_t>(c.q_heads());
      const size_t head = row % static_cast<size_t>(c.q_heads());
      const DenseKv& kv = dense[head / static_cast<size_t>(c.queries_per_kv)];
      ReferenceAttention({q.data() + row * dims, dims}, kv.k, kv.v,
                         first + static_cast<int>(token) + 1, in.softmax_scale,
                         {expected.data() + row * dims, dims});
    }
    return expected;
  }
  std::vector<float> Run(ThreadPool& pool, const std::vector<int>& chunks) const {
    AttentionWorkspace workspace;
    const size_t stride = in.q.size();
    std::vector<float> out(q.size());
    int at = 0;
    for (const int chunk : chunks) {
      const size_t offset = static_cast<size_t>(at) * stride;
      const PrefillQuery query{paged.view(), first + at,          chunk, q.data() + offset,
                               stride,       out.data() + offset, stride};
      PrefillAttention(pool, workspace, paged.layer, {&query, 1});
      at += chunk;
    }
    return out;
  }
};

}  // namespace oscar::simd
