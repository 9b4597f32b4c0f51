#include "cache/layered_append.h"

#include <algorithm>
#include <atomic>

#include "base/check.h"
#include "cache/page_sealer.h"

namespace oscar {
namespace {

// What SealForPrompt leaves behind at this length: the first page that is open then.
int64_t SealedForPrompt(const SequenceCache& cache) {
  const CacheConfig& config = cache.config();
  const int64_t start = cache.length() / config.cell * config.cell;
  int64_t end =
      std::max(cache.sealed_end(), SequenceCache::SealedEndAt(config, start - config.recent));
  while (end < cache.num_pages() && cache.is_sealed(end)) ++end;
  return end;
}

// Pages of [first, end) that are sealed already: a prefix hit may leave open ones before them.
int64_t SealedAmong(const SequenceCache& cache, int64_t first, int64_t end) {
  int64_t sealed = 0;
  for (int64_t j = first; j < std::min(end, cache.num_pages()); ++j) {
    sealed += cache.is_sealed(j) ? 1 : 0;
  }
  return sealed;
}

}  // namespace

LayeredPages::LayeredPages(const CacheConfig& config, int64_t length, int64_t sealed_before,
                           int64_t end)
    : sealed_end(std::max(sealed_before, SequenceCache::SealedEndAt(config, end - config.recent))) {
  const int64_t had = PagesOf(length), total = PagesOf(end);
  sealed = sealed_end - sealed_before;
  layer = std::max<int64_t>(0, sealed_end - std::max<int64_t>(had, config.sink / kPageTokens));
  open = total - had - layer;
}

AppendCost LayeredAppend::CostOf(const SequenceCache& cache, int64_t num_tokens) {
  const CacheConfig& config = cache.config();
  const int64_t in_page = (kPageTokens - cache.length() % kPageTokens) % kPageTokens;
  AppendCost cost = cache.CostOf(std::min(num_tokens, in_page), /*is_prompt=*/true);
  const int64_t first_seal = SealedForPrompt(cache);
  LayeredPages pages(config, cache.length(), first_seal, cache.length() + num_tokens);
  pages.sealed -= SealedAmong(cache, first_seal, pages.sealed_end);
  cost.reserve += static_cast<int64_t>(pages.bytes(config));
  return cost;
}

LayeredAppend::LayeredAppend(SequenceCache& cache, int64_t num_tokens)
    : cache_(cache),
      config_(cache.config()),
      num_tokens_(num_tokens),
      layer_layout_({config_.open.block(0, 0)}, config_.open.kv_heads()) {
  for (int i = 0; i < config_.open.num_layers(); ++i) {
    OSCAR_CHECK(config_.open.LayerBytes(i) == config_.open.LayerBytes(0));
  }
}

Result<std::unique_ptr<LayeredAppend>> LayeredAppend::Begin(SequenceCache& cache,
                                                            int64_t num_tokens,
                                                            ThreadPool& threads) {
  const CacheConfig& config = cache.config();
  const int64_t end = cache.length() + num_tokens;
  OSCAR_CHECK(num_tokens > 0 && cache.length() / config.cell == (end - 1) / config.cell,
              "a prompt chunk crosses a cell boundary");
  OSCAR_CHECK(!config.has_state(), "a cell that is given up would leave its state half changed");
  OSCAR_RETURN_IF_ERROR(cache.SealForPrompt(threads));
  // Rows that go to the partly filled last page: to a copy of its own where that is shared.
  const int64_t in_page = (kPageTokens - cache.length() % kPageTokens) % kPageTokens;
  OSCAR_RETURN_IF_ERROR(cache.Reserve(std::min(num_tokens, in_page)));

  std::unique_ptr<LayeredAppend> append(new LayeredAppend(cache, num_tokens));
  append->first_seal_ = cache.sealed_end();
  LayeredPages plan(config, cache.length(), append->first_seal_, end);
  plan.sealed -= SealedAmong(cache, append->first_seal_, plan.sealed_end);
  append->sealed_end_ = plan.sealed_end;
  for (int64_t j = append->first_seal_; j < plan.sealed_end; ++j) {
    PageRef& page = append->sealed_.emplace_back();
    if (j < cache.num_pages() && cache.is_sealed(j)) continue;
    OSCAR_ASSIGN_OR_RETURN(page, cache.pool_->Allocate(config.sealed));
  }
  for (int64_t j = cache.num_pages(); j < PagesOf(end); ++j) {
    const bool sealed = j >= config.sink / kPageTokens && j < plan.sealed_end;
    OSCAR_ASSIGN_OR_RETURN(PageRef page,
                           cache.pool_->Allocate(sealed ? append->layer_layout_ : config.open));
    append->fresh_.push_back(std::move(page));
  }
  append->bytes_ = plan.bytes(config);
  append->SetLayer(0);
  return append;
}

void LayeredAppend::SetLayer(int layer) {
  layer_ = layer;
  const int64_t had = cache_.num_pages(), total = had + static_cast<int64_t>(fresh_.size());
  table_.resize(static_cast<size_t>(total));
  flags_.assign(static_cast<size_t>(total), 0);
  for (int64_t j = 0; j < total; ++j) {
    const auto i = static_cast<size_t>(j);
    const PageRef& page = j < had ? cache_.page(j) : fresh_[static_cast<size_t>(j - had)];
    const bool whole = &page.layout() != &layer_layout_;
    table_[i] = page.data() + (whole ? page.layout().BlockOffset(layer, 0) : 0);
    flags_[i] = j < had && cache_.is_sealed(j) ? 1 : 0;
  }
}

std::byte* LayeredAppend::OpenBlock(int head, int64_t position) const {
  const auto page = static_cast<size_t>(position / kPageTokens);
  OSCAR_DCHECK(!flags_[page] && position >= cache_.length());
  // Pages of rows to come are this object's or, the partly filled one, the sequence's own.
  return const_cast<std::byte*>(table_[page]) + layer_layout_.BlockOffset(0, head);
}

Bf16* LayeredAppend::KRow(int head, int64_t position) const {
  const auto token = static_cast<int>(position % kPageTokens);
  return reinterpret_cast<Bf16*>(OpenBlock(head, position) + layer_layout_.block(0, 0).KRow(token));
}

Bf16* LayeredAppend::VRow(int head, int64_t position) const {
  const auto token = static_cast<int>(position % kPageTokens);
  return reinterpret_cast<Bf16*>(OpenBlock(head, position) + layer_layout_.block(0, 0).VRow(token));
}

void LayeredAppend::SealLayer(ThreadPool& threads) {
  OSCAR_CHECK(layer_ == layers_sealed_, "layers are sealed in order");
  ++layers_sealed_;
  if (sealed_.empty() || !config_.sealed.Holds(layer_)) return;
  // Models elsewhere than in host memory do not read by layers.
  const auto& sealer = dynamic_cast<const HostPageSealer&>(*cache_.pool().sealer());
  const auto together = static_cast<size_t>(config_.pages_together);
  std::atomic<uint64_t> saturated{0};
  threads.ParallelFor(static_cast<int64_t>(sealed_.size() / together), [&](int64_t group, int) {
    std::vector<const std::byte*> from;
    std::vector<std::byte*> to;
    const size_t first = static_cast<size_t>(group) * together;
    if (!sealed_[first]) return;  // sealed already, and all of its group
    for (size_t i = first; i < first + together; ++i) {
      from.push_back(table_[static_cast<size_t>(first_seal_) + i]);
      to.push_back(sealed_[i].data() + config_.sealed.BlockOffset(layer_, 0));
    }
    saturated.fetch_add(static_cast<uint64_t>(sealer.Seal(layer_, from, to)),
                        std::memory_order_relaxed);
  });
  saturated_ += saturated.load();
}

void LayeredAppend::Commit() {
  OSCAR_CHECK(layers_sealed_ == config_.open.num_layers());
  const int64_t had = cache_.num_pages();
  for (int64_t j = first_seal_; j < std::min(sealed_end_, had); ++j) {
    PageRef& page = sealed_[static_cast<size_t>(j - first_seal_)];
    if (page) cache_.Replace(j, std::move(page), /*sealed=*/true);
  }
  for (size_t i = 0; i < fresh_.size(); ++i) {
    const int64_t j = had + static_cast<int64_t>(i);
    const bool sealed = &fresh_[i].layout() == &layer_layout_;
    cache_.Append(
        sealed ? std::move(sealed_[static_cast<size_t>(j - first_seal_)]) : std::move(fresh_[i]),
        sealed);
  }
  fresh_.clear();
  sealed_.clear();
  bytes_ = 0;
  cache_.length_ += num_tokens_;
  cache_.next_to_seal_ = std::max(cache_.next_to_seal_, sealed_end_);
  cache_.saturated_ += saturated_;
}

}  // namespace oscar
