// CacheConfig: what all sequences of a model share. Data alone: who seals pages is the pool's to
// know (cache/page_pool.h). Immutable while any sequence lives.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cache/page_layout.h"
#include "oscar/status.h"

namespace oscar {

// Pages that hold `tokens` tokens.
constexpr int64_t PagesOf(int64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

struct CacheConfig {
  PageLayout open;    // BF16, CPU or tensor-core order
  PageLayout sealed;  // as the method stores history
  int sink = 64;      // tokens; a multiple of 64
  int recent = 256;   // tokens; a multiple of 64
  int cell = 4096;    // prompt tokens seen exactly together; a multiple of 64
  // Consecutive pages that are sealed together: 1, or more where a method's groups run along tokens
  // for longer than a page. 0: nothing is ever sealed (a BF16 cache).
  int pages_together = 0;
  // What a sequence keeps beside its keys and values, of one size whatever its length: the
  // recurrent states of all layers that have one. No bytes: the model has none.
  PageLayout state = PageLayout::OfBytes(0);
  // The most tokens that a layer without blocks in sealed pages sees, the query's own among them;
  // 0: there is none. At most `recent`, so that whatever such a layer still sees is open.
  int64_t window = 0;

  bool has_state() const { return state.bytes() > 0; }
  bool seals() const { return pages_together > 0; }
  // The same where nothing is sealed: every page stands alone.
  int page_run() const { return std::max(1, pages_together); }
  // The first position that a token at `length` sees in layers with a window.
  int64_t WindowStart(int64_t length) const { return std::max<int64_t>(0, length - window + 1); }
  // The first of the pages that `page` is sealed with. REQUIRES: page is not of the sink.
  int64_t FirstOfRun(int64_t page) const { return page - (page - sink / kPageTokens) % page_run(); }
  Status Validate() const;
};

}  // namespace oscar
