// SequenceCache: the keys and values of one sequence as a list of 64-token pages by position; page
// j holds positions [64 j, 64 j + 64). A page is open (BF16 rows, written token by token) or sealed
// (quantised once, whole, never touched again). The geometry of docs/cache-format.md section 6:
//
//   [0, sink) stays open · sealed pages · the newest tokens open
//
// Rows are written rotated, as BF16; sealing only quantises. One owner thread; workers may read and
// write the bytes between calls.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/half.h"
#include "base/thread_pool.h"
#include "cache/cache_config.h"
#include "cache/page_pool.h"
#include "oscar/status.h"

namespace oscar {

// What a device keeps for a sequence (where its page table lies there). Owned by the sequence's
// cache, moves and dies with it.
class CacheAttachment {
 public:
  virtual ~CacheAttachment() = default;
};

struct CacheUsage {
  uint64_t tokens = 0;
  uint64_t open_pages = 0, sealed_pages = 0, shared_pages = 0;
  uint64_t bytes = 0;        // of all pages and states, shared ones counted whole
  uint64_t state_bytes = 0;  // of these, the recurrent state and its snapshots
  uint64_t bf16_bytes = 0;   // what the same tokens take in BF16, exactly
  // Stored bits per K/V element: bits of sealed pages whole and of open rows that hold a token.
  double bits_per_element = 0.0;
  uint64_t saturated = 0;  // values clamped while sealing
};

// What appending tokens asks of the pool, in bytes; sealing comes before the new pages.
struct AppendCost {
  int64_t seal_peak = 0;  // the most that sealing needs beyond what is in use now
  int64_t seal_net = 0;   // what is in use afterwards, less what is now; mostly negative
  int64_t reserve = 0;    // open pages, copies of a shared last page or state included
};

// The largest length <= `length` at which layers with a window find open what they see; `is_sealed`
// says it of page indices.
template <typename IsSealed>
int64_t LengthWithWindow(const CacheConfig& config, int64_t length, const IsSealed& is_sealed) {
  if (config.window == 0) return length;
  for (int64_t j = PagesOf(length) - 1;
       j >= 0 && (j + 1) * kPageTokens > config.WindowStart(length); --j) {
    if (is_sealed(j)) length = j * kPageTokens;
  }
  return length;
}

class SequenceCache {
 public:
  struct StoredPage {
    PageRef page;
    bool sealed = false;
  };

  // REQUIRES: a pool with a sealer, where the configuration seals.
  SequenceCache(const CacheConfig& config, PagePool& pool);
  // A sequence of `length` tokens on pages that exist already (shared with whoever holds them);
  // exactly as many as the tokens need. Pages of the sink and a partly used last page are open;
  // pages that are sealed together are all sealed or all open, and so are those that layers with a
  // window still see. `state`: after the last token, where the configuration has states.
  static SequenceCache FromPages(const CacheConfig& config, PagePool& pool,
                                 std::vector<StoredPage> pages, int64_t length, PageRef state = {});
  SequenceCache(SequenceCache&&) = default;
  SequenceCache& operator=(SequenceCache&&) = default;

  int64_t length() const { return length_; }
  int64_t num_pages() const { return static_cast<int64_t>(pages_.size()); }
  const PageRef& page(int64_t index) const { return pages_[static_cast<size_t>(index)]; }
  bool is_sealed(int64_t index) const { return sealed_[static_cast<size_t>(index)] != 0; }
  // The same as kernels take it: [num_pages] addresses and flags, kept up to date as pages change,
  // so that a step does nothing that grows with the context. Valid until the next change.
  const std::byte* const* page_table() const { return table_.data(); }
  const uint8_t* sealed_flags() const { return sealed_.data(); }
  const CacheConfig& config() const { return *config_; }
  // A sealed page's block with what a reader needs of others. CPU order only.
  SealedBlock SealedBlockOf(int layer, int head, int64_t page) const;
  PagePool& pool() const { return *pool_; }

  // For models whose page tables lie elsewhere: what they keep here, and the first page whose entry
  // may have changed since they last asked, so that a step sends only what is new.
  CacheAttachment* attachment() const { return attachment_.get(); }
  void Attach(std::unique_ptr<CacheAttachment> attachment) { attachment_ = std::move(attachment); }
  int64_t TakeChanged() { return std::exchange(changed_from_, num_pages()); }
  // Seals open pages that lie before a sealed one (which a prefix hit may leave), for readers that
  // need the history in one piece. Looks at every page.
  Status SealGaps(ThreadPool& threads);

  // The recurrent state after the last token, which the next ones change in place; empty before the
  // first Reserve, and where the configuration has none. All of it is zero before the first token.
  const PageRef& state() const { return state_; }
  // Snapshots of it, oldest first. What is kept is the state itself: the next token changes a copy.
  struct StateSnapshot {
    int64_t length = 0;  // tokens seen
    PageRef state;
  };
  void KeepSnapshot();
  const std::vector<StateSnapshot>& snapshots() const { return snapshots_; }
  // Drops those of at most `length` tokens.
  void ForgetSnapshots(int64_t length);

  // Takes over the state of a sequence of as many tokens, from whatever memory it lies in; one of
  // the same size. REQUIRES: after Reserve; not where it is shared.
  Status ImportState(const SequenceCache& from);

  // Makes room for positions [length, length + num_tokens): allocates open pages, and gives the
  // sequence its own copy of a partly filled page, and of a state, that it shares. On
  // kResourceExhausted nothing has changed.
  Status Reserve(int64_t num_tokens);
  // Where the row of a position lies, in an open page or a sealed one of BF16; [D] numbers each.
  // Positions below length + the last Reserve. CPU order only.
  Bf16* KRow(int layer, int head, int64_t position) const;
  Bf16* VRow(int layer, int head, int64_t position) const;
  // The rows of the next `num_tokens` positions have been written.
  void Advance(int64_t num_tokens);

  // Seals what the geometry asks for. While a prompt is being read: everything older than `recent`
  // tokens before the cell that the next token falls into. Once it generates: full pages as soon as
  // the newest part holds recent + 64 tokens (+ 64 pages_together). Answers depend on positions
  // alone.
  Status SealForPrompt(ThreadPool& threads) {
    return SealBefore(length_ / config_->cell * config_->cell - config_->recent, threads);
  }
  Status SealForGeneration(ThreadPool& threads) {
    return SealBefore(length_ - config_->recent, threads);
  }

  // What SealForPrompt or SealForGeneration and then Reserve(num_tokens) need. Never too little,
  // whatever else the same pass does, unless a page becomes shared in between.
  AppendCost CostOf(int64_t num_tokens, bool is_prompt) const;
  // The first page after the sink that is still open.
  int64_t sealed_end() const;
  // The same for a fresh sequence that sealed everything it could before `position` (which may be
  // negative); the number of sink pages where nothing is sealed.
  static int64_t SealedEndAt(const CacheConfig& config, int64_t position);

  // A second sequence with the same tokens; pages that hold some are shared. The partly filled last
  // page is copied by whichever of the two writes first.
  SequenceCache Fork() const;
  // Keeps the first `length` tokens. Pages that were sealed together cannot lose part of their
  // tokens, so the length is lowered to the start of the first, and to where layers with a window
  // find open what they see; a state cannot go back at all, so it is lowered to the newest
  // snapshot, or to nothing. Returns the length kept. Gives back reserved pages, too.
  int64_t Trim(int64_t length);

  CacheUsage Usage() const;
  // Pages that `num_tokens` tokens of a fresh sequence hold while generating, and its state, in
  // bytes; what admission counts.
  static uint64_t BytesFor(const CacheConfig& config, int64_t num_tokens);

 private:
  friend class LayeredAppend;
  std::byte* RowBlock(int layer, int head, int64_t position) const {
    const PageRef& at = page(position / kPageTokens);
    OSCAR_DCHECK(at.layout().Holds(layer) && at.layout().block(layer, head).is_bf16());
    return at.Block(layer, head).data();
  }
  void Append(PageRef page, bool sealed);
  void Replace(int64_t index, PageRef page, bool sealed);
  int64_t TrimmedLength(int64_t length) const;  // what pages allow
  Status SealBefore(int64_t position, ThreadPool& threads);
  Status SealPages(int64_t first, int64_t count, ThreadPool& threads);
  bool NeedsState(int64_t num_tokens) const {
    return config_->has_state() && num_tokens > 0 && (!state_ || state_.shared());
  }

  const CacheConfig* config_;
  PagePool* pool_;
  std::vector<PageRef> pages_;
  std::vector<const std::byte*> table_;  // parallel to pages_
  std::vector<uint8_t> sealed_;          // parallel to pages_
  int64_t length_ = 0;
  int64_t next_to_seal_ = 0;  // pages before it (from the sink on) are sealed
  int64_t changed_from_ = 0;
  PageRef state_;
  std::vector<StateSnapshot> snapshots_;
  std::unique_ptr<CacheAttachment> attachment_;
  uint64_t saturated_ = 0;
};

}  // namespace oscar
