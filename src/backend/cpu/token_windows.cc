#include "cpu/token_windows.h"

#include <algorithm>
#include <cstring>

#include "base/half.h"

namespace oscar {

void TokenWindows::Show(int slot, std::span<const ForwardItem> items, ThreadPool& threads) {
  const CacheConfig& config = plan_.cache();
  const HostPageSealer& sealer = *plan_.host_sealer();
  const int64_t together = config.pages_together, sink = config.sink / kPageTokens;
  const BlockLayout& open = config.open.block(slot, 0);
  const auto heads = static_cast<size_t>(config.open.kv_heads());
  const size_t open_layer = open.block_bytes() * heads;
  const size_t sealed_layer = config.sealed.LayerBytes(slot);
  views_.resize(std::max(views_.size(), items.size()));
  threads.ParallelFor(static_cast<int64_t>(items.size()), [&](int64_t unit, int) {
    const ForwardItem& item = items[static_cast<size_t>(unit)];
    View& view = views_[static_cast<size_t>(unit)];
    view.pages.clear();
    // Prompts see the whole of a cell that is longer than a page as it was written.
    if (item.is_prompt && config.cell > kPageTokens) return;
    const SequenceCache& cache = *item.cache;
    const int64_t end = cache.length() + static_cast<int64_t>(item.tokens.size());
    const int64_t last_old = end - 1 - plan_.token_window();  // that the last token sees stored
    if (last_old < 0) return;
    view.stride = sealed_layer;
    view.open.resize(open_layer);
    view.sealed.resize(static_cast<size_t>(2 * together) * sealed_layer);
    view.pages.resize(static_cast<size_t>(cache.num_pages()));
    // `count` pages from `first` on, which are stored with one another.
    const auto show = [&](int64_t first, int64_t count, std::byte* out) {
      std::vector<const std::byte*> from;
      std::vector<std::byte*> to;
      for (int64_t i = 0; i < together; ++i) {
        const int64_t page = first + std::min(i, count - 1);
        const std::byte* source = cache.page_table()[page] + config.open.BlockOffset(slot, 0);
        const int64_t used = std::min<int64_t>(end - page * kPageTokens, kPageTokens);
        if (used < kPageTokens) {
          // Rows to come are not numbers yet. Only the newest page has some.
          std::memset(view.open.data(), 0, open_layer);
          const auto row_bytes = static_cast<size_t>(open.head_dim()) * sizeof(Bf16);
          for (size_t head = 0; head < heads; ++head) {
            for (const uint32_t side : {open.KRow(0), open.VRow(0)}) {
              const size_t at = head * open.block_bytes() + side;
              std::memcpy(view.open.data() + at, source + at,
                          static_cast<size_t>(used) * row_bytes);
            }
          }
          source = view.open.data();
        }
        from.push_back(source);
        to.push_back(out + static_cast<size_t>(i) * sealed_layer);
        if (i < count) view.pages[static_cast<size_t>(page)] = to.back();
      }
      sealer.Seal(slot, from, to);
    };
    const int64_t last = last_old / kPageTokens;
    if (last >= sink && !cache.is_sealed(last)) {
      show(sink + (last - sink) / together * together, together, view.sealed.data());
    }
    // A sink that ends inside its last page: that page stands for all that it is stored with.
    if (sink > 0 && plan_.token_sink() < config.sink && last_old >= plan_.token_sink()) {
      show(sink - 1, 1, view.sealed.data() + static_cast<size_t>(together) * sealed_layer);
    }
  });
}

}  // namespace oscar
