#include "cache/page_sealer.h"

#include <array>
#include <atomic>
#include <cstring>

namespace oscar {

uint64_t HostPageSealer::SealPages(std::span<const std::byte* const> open,
                                   std::span<std::byte* const> sealed, ThreadPool& threads) const {
  std::atomic<uint64_t> saturated{0};
  threads.ParallelFor(config_.open.num_layers(), [&](int64_t unit, int) {
    const int layer = static_cast<int>(unit);
    if (!config_.sealed.Holds(layer)) return;
    std::vector<const std::byte*> from;
    std::vector<std::byte*> to;
    for (size_t i = 0; i < open.size(); ++i) {
      from.push_back(open[i] + config_.open.BlockOffset(layer, 0));
      to.push_back(sealed[i] + config_.sealed.BlockOffset(layer, 0));
    }
    saturated.fetch_add(static_cast<uint64_t>(Seal(layer, from, to)), std::memory_order_relaxed);
  });
  return saturated.load();
}

int RuleSealer::Seal(int layer, std::span<const std::byte* const> open,
                     std::span<std::byte* const> sealed) const {
  const BlockLayout& from = config_.open.block(layer, 0);
  const PageLayout& shape = config_.sealed;
  const auto heads = static_cast<size_t>(shape.kv_heads());
  const auto rows_of = [&](size_t page, size_t head, uint32_t side) {
    return reinterpret_cast<const Bf16*>(open[page] + head * from.block_bytes() + side);
  };
  std::vector<float> norms;
  if (shape.has_norms(layer)) {
    const size_t at = shape.NormOffset(layer) - shape.BlockOffset(layer, 0);
    std::vector<const Bf16*> rows(heads);
    norms.resize(open.size() * kPageTokens);
    for (size_t page = 0; page < open.size(); ++page) {
      for (size_t head = 0; head < heads; ++head) {
        rows[head] = rows_of(page, head, from.k_codes_offset());
      }
      const std::span<float> part(norms.data() + page * kPageTokens, kPageTokens);
      TokenNorms(rows, from.head_dim(), part);
      std::memcpy(sealed[page] + at, part.data(), part.size_bytes());
    }
  }
  int saturated = 0;
  for (size_t head = 0; head < heads; ++head) {
    const BlockPlace& to = shape.blocks(layer)[head];
    // Layers that stay BF16, say, are sealed page by page whatever the others need.
    const auto together = static_cast<size_t>(to.layout.pages_together());
    for (size_t first = 0; first < open.size(); first += together) {
      std::array<const Bf16*, kMaxPagesTogether> k, v;
      std::array<std::byte*, kMaxPagesTogether> blocks;
      for (size_t i = 0; i < together; ++i) {
        k[i] = rows_of(first + i, head, from.k_codes_offset());
        v[i] = rows_of(first + i, head, from.v_codes_offset());
        blocks[i] = sealed[first + i] + to.offset - shape.BlockOffset(layer, 0);
      }
      saturated += encoder_(to.layout, rules_[static_cast<size_t>(layer)][head],
                            {{k.data(), together},
                             {v.data(), together},
                             {blocks.data(), together},
                             norms.empty() ? nullptr : norms.data() + first * kPageTokens});
    }
  }
  return saturated;
}

}  // namespace oscar
