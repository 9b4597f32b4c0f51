#include "cache/page_sealer.h"

#include <atomic>

namespace oscar {

uint64_t HostPageSealer::SealPages(std::span<const std::byte* const> open,
                                   std::span<std::byte* const> sealed, ThreadPool& threads) const {
  std::atomic<uint64_t> saturated{0};
  threads.ParallelFor(config_.open.num_layers(), [&](int64_t unit, int) {
    const int layer = static_cast<int>(unit);
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
  const BlockLayout& layout = config_.sealed.block(layer);
  const auto rows = static_cast<size_t>(kPageTokens * layout.head_dim());
  const size_t open_bytes = 2 * rows * sizeof(Bf16), sealed_bytes = layout.block_bytes();
  int saturated = 0;
  for (size_t i = 0; i < open.size(); ++i) {
    for (size_t head = 0; head < static_cast<size_t>(config_.sealed.kv_heads()); ++head) {
      const auto* k = reinterpret_cast<const Bf16*>(open[i] + head * open_bytes);
      saturated += encoder_(layout, rules_[static_cast<size_t>(layer)][head], {k, rows},
                            {k + rows, rows}, {sealed[i] + head * sealed_bytes, sealed_bytes});
    }
  }
  return saturated;
}

}  // namespace oscar
