#include "cache/sequence_cache.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "cache/page_sealer.h"

namespace oscar {

SequenceCache::SequenceCache(const CacheConfig& config, PagePool& pool)
    : config_(&config), pool_(&pool) {
  OSCAR_CHECK(!config.seals() || pool.sealer() != nullptr, "a pool without a sealer");
}

void SequenceCache::Append(PageRef page, bool sealed) {
  changed_from_ = std::min(changed_from_, num_pages());
  table_.push_back(page.data());
  sealed_.push_back(sealed ? 1 : 0);
  pages_.push_back(std::move(page));
}

void SequenceCache::Replace(int64_t index, PageRef page, bool sealed) {
  const auto i = static_cast<size_t>(index);
  changed_from_ = std::min(changed_from_, index);
  table_[i] = page.data();
  sealed_[i] = sealed ? 1 : 0;
  pages_[i] = std::move(page);
}

Status SequenceCache::Reserve(int64_t num_tokens) {
  const int64_t end = length_ + num_tokens;
  const int64_t pages_needed = PagesOf(end);
  // A shared, partly filled last page is copied before the first write to it.
  const int64_t last = length_ / kPageTokens;
  PageRef copy;
  if (num_tokens > 0 && length_ % kPageTokens != 0) {
    OSCAR_CHECK(!is_sealed(last), "a partly filled page cannot be sealed");
    if (page(last).shared()) {
      OSCAR_ASSIGN_OR_RETURN(copy, pool_->Allocate(config_->open));
      pool_->Copy(copy, page(last));
    }
  }
  PageRef state;
  if (NeedsState(num_tokens)) {
    OSCAR_CHECK(state_ || length_ == 0, "{} tokens without their state", length_);
    OSCAR_ASSIGN_OR_RETURN(state, pool_->Allocate(config_->state));
    if (state_) {
      pool_->Copy(state, state_);
    } else {
      pool_->Clear(state);
    }
  }
  std::vector<PageRef> fresh;
  while (num_pages() + static_cast<int64_t>(fresh.size()) < pages_needed) {
    OSCAR_ASSIGN_OR_RETURN(PageRef ref, pool_->Allocate(config_->open));
    fresh.push_back(std::move(ref));
  }
  if (copy) Replace(last, std::move(copy), /*sealed=*/false);
  for (PageRef& ref : fresh) Append(std::move(ref), /*sealed=*/false);
  if (state) state_ = std::move(state);
  return {};
}

Status SequenceCache::ImportState(const SequenceCache& from) {
  OSCAR_CHECK(state_ && !state_.shared() && from.state_ && from.length_ == length_);
  std::vector<std::byte> bytes(config_->state.bytes());
  OSCAR_RETURN_IF_ERROR(from.pool_->Read(from.state_, bytes));
  return pool_->Write(state_, bytes);
}

void SequenceCache::KeepSnapshot() {
  OSCAR_CHECK(state_ && (snapshots_.empty() || snapshots_.back().length < length_));
  snapshots_.push_back({length_, state_.Share()});
}

void SequenceCache::ForgetSnapshots(int64_t length) {
  std::erase_if(snapshots_, [&](const StateSnapshot& kept) { return kept.length <= length; });
}

Bf16* SequenceCache::KRow(int layer, int head, int64_t position) const {
  const auto token = static_cast<int>(position % kPageTokens);
  return reinterpret_cast<Bf16*>(RowBlock(layer, head, position) +
                                 config_->open.block(layer, 0).KRow(token));
}

Bf16* SequenceCache::VRow(int layer, int head, int64_t position) const {
  const auto token = static_cast<int>(position % kPageTokens);
  return reinterpret_cast<Bf16*>(RowBlock(layer, head, position) +
                                 config_->open.block(layer, 0).VRow(token));
}

SealedBlock SequenceCache::SealedBlockOf(int layer, int head, int64_t page) const {
  OSCAR_CHECK(is_sealed(page));
  const PageLayout& shape = config_->sealed;
  const auto block_of = [&](int64_t index) {
    return table_[static_cast<size_t>(index)] + shape.BlockOffset(layer, head);
  };
  SealedBlock out{.block = block_of(page)};
  if (shape.block(layer, head).pages_together() > 1) {
    const int64_t first = config_->FirstOfRun(page);
    out.pair[0] = block_of(first);
    out.pair[1] = block_of(first + 1);
  }
  if (shape.has_norms(layer)) {
    out.norms = table_[static_cast<size_t>(page)] + shape.NormOffset(layer);
  }
  return out;
}

void SequenceCache::Advance(int64_t num_tokens) {
  length_ += num_tokens;
  OSCAR_CHECK(length_ <= num_pages() * kPageTokens);
}

Status SequenceCache::SealBefore(int64_t position, ThreadPool& threads) {
  if (!config_->seals()) return {};
  const int64_t together = config_->pages_together;
  next_to_seal_ = std::max<int64_t>(next_to_seal_, config_->sink / kPageTokens);
  for (; (next_to_seal_ + together) * kPageTokens <= position; next_to_seal_ += together) {
    if (is_sealed(next_to_seal_)) continue;
    OSCAR_RETURN_IF_ERROR(SealPages(next_to_seal_, together, threads));
  }
  return {};
}

Status SequenceCache::SealGaps(ThreadPool& threads) {
  if (!config_->seals()) return {};
  int64_t last = num_pages() - 1;
  while (last >= 0 && !is_sealed(last)) --last;
  return SealBefore((last + 1) * kPageTokens, threads);
}

Status SequenceCache::SealPages(int64_t first, int64_t count, ThreadPool& threads) {
  const PageLayout& sealed = config_->sealed;
  const std::span<PageRef> sources(pages_.data() + first, static_cast<size_t>(count));

  // Normally sealed pages are allocated beside the open ones. In a full pool the open pages' own
  // bytes make room: they are sealed into scratch memory first and given back.
  std::vector<PageRef> targets;
  std::vector<std::byte> host_scratch;
  std::vector<std::byte*> scratch;
  for (int64_t i = 0; i < count; ++i) {
    Result<PageRef> target = pool_->Allocate(sealed);
    if (!target.has_value()) {
      for (const PageRef& source : sources) {
        if (source.shared()) return target.error();
      }
      targets.clear();
      if (pool_->memory() != nullptr) {
        for (int64_t j = 0; j < count; ++j) scratch.push_back(pool_->memory()->Scratch(j));
      } else {
        host_scratch.resize(static_cast<size_t>(count) * sealed.bytes());
        for (size_t j = 0; j < sources.size(); ++j) {
          scratch.push_back(host_scratch.data() + j * sealed.bytes());
        }
      }
      break;
    }
    targets.push_back(std::move(*target));
  }
  std::vector<const std::byte*> from;
  std::vector<std::byte*> to;
  for (size_t i = 0; i < sources.size(); ++i) {
    from.push_back(sources[i].data());
    to.push_back(!scratch.empty() ? scratch[i] : targets[i].data());
  }
  saturated_ += pool_->sealer()->SealPages(from, to, threads);
  for (PageRef& source : sources) source.Reset();
  for (size_t i = 0; i < sources.size(); ++i) {
    if (i == targets.size()) {
      Result<PageRef> target = pool_->Allocate(sealed);
      OSCAR_CHECK(target.has_value(), "a sealed page must fit where its open page was");
      const std::byte* bytes = scratch[i];
      if (pool_->memory() != nullptr) {
        pool_->memory()->Copy(target->data(), bytes, sealed.bytes());
      } else {
        std::memcpy(target->data(), bytes, sealed.bytes());
      }
      targets.push_back(std::move(*target));
    }
    Replace(first + static_cast<int64_t>(i), std::move(targets[i]), /*sealed=*/true);
  }
  return {};
}

SequenceCache SequenceCache::FromPages(const CacheConfig& config, PagePool& pool,
                                       std::vector<StoredPage> pages, int64_t length,
                                       PageRef state) {
  OSCAR_CHECK(static_cast<int64_t>(pages.size()) == PagesOf(length));
  SequenceCache cache(config, pool);
  const auto sink_pages = static_cast<size_t>(config.sink / kPageTokens);
  for (size_t i = 0; i < pages.size(); ++i) {
    const bool partial = static_cast<int64_t>(i + 1) * kPageTokens > length;
    OSCAR_CHECK(!pages[i].sealed || (i >= sink_pages && !partial));
    cache.Append(std::move(pages[i].page), pages[i].sealed);
  }
  OSCAR_CHECK(static_cast<bool>(state) == (config.has_state() && length > 0));
  cache.length_ = length;
  OSCAR_CHECK(LengthWithWindow(config, length, [&](int64_t j) { return cache.is_sealed(j); }) ==
              length);
  cache.next_to_seal_ = cache.sealed_end();
  cache.state_ = std::move(state);
  return cache;
}

AppendCost SequenceCache::CostOf(int64_t num_tokens, bool is_prompt) const {
  AppendCost cost;
  const auto open_bytes = static_cast<int64_t>(config_->open.bytes());
  const auto sealed_bytes = static_cast<int64_t>(config_->sealed.bytes());
  if (config_->seals()) {
    const int64_t together = config_->pages_together;
    const int64_t from = is_prompt ? length_ / config_->cell * config_->cell : length_;
    const int64_t end = SealedEndAt(*config_, from - config_->recent);
    for (int64_t i = std::max<int64_t>(next_to_seal_, config_->sink / kPageTokens); i < end;
         i += together) {
      if (is_sealed(i)) continue;
      int64_t freed = 0;
      for (int64_t j = i; j < i + together; ++j) freed += page(j).shared() ? 0 : open_bytes;
      // Pages of its own are sealed in place if need be; a shared one needs room beside it.
      const bool in_place = freed == together * open_bytes;
      if (!in_place) {
        cost.seal_peak = std::max(cost.seal_peak, cost.seal_net + together * sealed_bytes);
      }
      cost.seal_net += together * sealed_bytes - freed;
    }
    cost.seal_peak = std::max(cost.seal_peak, cost.seal_net);
  }
  const int64_t pages_needed = PagesOf(length_ + num_tokens);
  cost.reserve = std::max<int64_t>(0, pages_needed - num_pages()) * open_bytes;
  if (num_tokens > 0 && length_ % kPageTokens != 0 && page(length_ / kPageTokens).shared()) {
    cost.reserve += open_bytes;
  }
  if (NeedsState(num_tokens)) cost.reserve += static_cast<int64_t>(config_->state.bytes());
  return cost;
}

int64_t SequenceCache::sealed_end() const {
  int64_t end = std::max<int64_t>(next_to_seal_, config_->sink / kPageTokens);
  while (end < num_pages() && is_sealed(end)) ++end;
  return std::max<int64_t>(std::min(end, num_pages()), config_->sink / kPageTokens);
}

int64_t SequenceCache::SealedEndAt(const CacheConfig& config, int64_t position) {
  const int64_t sink_pages = config.sink / kPageTokens;
  if (!config.seals() || position < 0) return sink_pages;
  const int64_t together = config.pages_together;
  const int64_t groups = std::max<int64_t>(0, position / kPageTokens - sink_pages) / together;
  return sink_pages + groups * together;
}

SequenceCache SequenceCache::Fork() const {
  SequenceCache fork(*config_, *pool_);
  for (int64_t i = 0; i < PagesOf(length_); ++i) fork.Append(page(i).Share(), is_sealed(i));
  fork.length_ = length_;
  fork.next_to_seal_ = next_to_seal_;
  fork.saturated_ = saturated_;
  if (state_) fork.state_ = state_.Share();
  for (const StateSnapshot& kept : snapshots_) {
    fork.snapshots_.push_back({kept.length, kept.state.Share()});
  }
  return fork;
}

int64_t SequenceCache::TrimmedLength(int64_t length) const {
  if (length % kPageTokens != 0 && is_sealed(length / kPageTokens)) {
    length = length / kPageTokens * kPageTokens;
  }
  // Nor can pages that were sealed together part: their bytes depend on the tokens of all of them.
  const int64_t sink_pages = config_->sink / kPageTokens;
  const int64_t together = config_->page_run();
  const int64_t over = std::max<int64_t>(0, PagesOf(length) - sink_pages) % together;
  if (over != 0 && is_sealed(PagesOf(length) - 1)) {
    length = (PagesOf(length) - over) * kPageTokens;
  }
  return LengthWithWindow(*config_, length, [&](int64_t j) { return is_sealed(j); });
}

int64_t SequenceCache::Trim(int64_t length) {
  length = TrimmedLength(std::clamp<int64_t>(length, 0, length_));
  if (config_->has_state() && length != length_) {
    while (length > 0) {
      while (!snapshots_.empty() && snapshots_.back().length > length) snapshots_.pop_back();
      length = snapshots_.empty() ? 0 : snapshots_.back().length;
      if (TrimmedLength(length) == length) break;
      length = TrimmedLength(length);
    }
    if (length > 0) state_ = snapshots_.back().state.Share();
  }
  if (length == 0) {  // also one that was reserved and never used
    snapshots_.clear();
    state_.Reset();
  }
  const auto kept = static_cast<size_t>(PagesOf(length));
  pages_.resize(kept);
  table_.resize(kept);
  sealed_.resize(kept);
  length_ = length;
  next_to_seal_ = std::min(next_to_seal_, num_pages());
  changed_from_ = std::min(changed_from_, num_pages());
  return length;
}

CacheUsage SequenceCache::Usage() const {
  CacheUsage usage;
  usage.tokens = static_cast<uint64_t>(length_);
  usage.saturated = saturated_;
  // Of layers with a window, what is still held counts.
  const double per_open_row = static_cast<double>(config_->open.elements()) / kPageTokens;
  double bits = 0.0, elements = 0.0;
  for (int64_t i = 0; i < num_pages(); ++i) {
    const size_t bytes = page(i).layout().bytes();
    usage.bytes += bytes;
    usage.shared_pages += page(i).shared() ? 1 : 0;
    if (is_sealed(i)) {
      ++usage.sealed_pages;
      bits += 8.0 * static_cast<double>(bytes);
      elements += static_cast<double>(config_->sealed.elements());
    } else {
      ++usage.open_pages;
      const int64_t held = std::clamp<int64_t>(length_ - i * kPageTokens, 0, kPageTokens);
      bits += 16.0 * per_open_row * static_cast<double>(held);
      elements += per_open_row * static_cast<double>(held);
    }
  }
  if (state_) usage.state_bytes = (1 + snapshots_.size()) * config_->state.bytes();
  // The newest snapshot may be the state itself.
  if (!snapshots_.empty() && snapshots_.back().state.data() == state_.data()) {
    usage.state_bytes -= config_->state.bytes();
  }
  usage.bytes += usage.state_bytes;
  usage.bf16_bytes = static_cast<uint64_t>(2.0 * elements);
  usage.bits_per_element = length_ > 0 && elements > 0.0 ? bits / elements : bits;
  return usage;
}

uint64_t SequenceCache::BytesFor(const CacheConfig& config, int64_t num_tokens) {
  const int64_t pages = PagesOf(num_tokens);
  const int64_t sealed =
      SealedEndAt(config, num_tokens - config.recent) - config.sink / kPageTokens;
  return static_cast<uint64_t>(sealed) * config.sealed.bytes() +
         static_cast<uint64_t>(pages - sealed) * config.open.bytes() +
         (pages > 0 ? config.state.bytes() : 0);
}

}  // namespace oscar
