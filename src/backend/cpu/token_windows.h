// TokenWindows: pages as they would be stored, for evaluation with windows that end at the token
// (KvPlan::token_window). Before each pass the page in which the window ends and those that are
// stored with it, and the page in which the sink ends, are quantised into scratch memory; attention
// reads each of their rows from there or from the open page. One thread.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "backend/batch.h"
#include "backend/kv_plan.h"
#include "base/thread_pool.h"
#include "simd/attention.h"

namespace oscar {

class TokenWindows {
 public:
  explicit TokenWindows(const KvPlan& plan) : plan_(plan) {}

  // Of the items' sequences in one slot of the cache; their rows of this pass are written.
  void Show(int slot, std::span<const ForwardItem> items, ThreadPool& threads);
  // Of an item of the last Show.
  simd::TokenWindow WindowOf(size_t item) const {
    const View& view = views_[item];
    return {view.pages.data(), static_cast<int64_t>(view.pages.size()), plan_.token_sink(),
            plan_.token_window(), view.stride};
  }

 private:
  struct View {
    std::vector<std::byte> open, sealed;
    size_t stride = 0;                    // bytes between two sealed pages
    std::vector<const std::byte*> pages;  // by position, null where a page has one form
  };

  const KvPlan& plan_;
  std::vector<View> views_;
};

}  // namespace oscar
