#include "cache/page_sealer.h"

#include <atomic>

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
  const auto rows = static_cast<size_t>(kPageTokens * from.head_dim());
  int saturated = 0;
  for (size_t i = 0; i < open.size(); ++i) {
    for (size_t head = 0; head < static_cast<size_t>(config_.sealed.kv_heads()); ++head) {
      const std::byte* block = open[i] + head * from.block_bytes();
      const auto* k = reinterpret_cast<const Bf16*>(block + from.k_codes_offset());
      const auto* v = reinterpret_cast<const Bf16*>(block + from.v_codes_offset());
      const BlockPlace& to = config_.sealed.blocks(layer)[head];
      std::byte* const target = sealed[i] + to.offset - config_.sealed.BlockOffset(layer, 0);
      saturated += encoder_(to.layout, rules_[static_cast<size_t>(layer)][head], {k, rows},
                            {v, rows}, {target, to.layout.block_bytes()});
    }
  }
  return saturated;
}

}  // namespace oscar
