#include "cache/sequence_cache.h"

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/check.h"

namespace oscar {

Status CacheConfig::Validate() const {
  for (const auto& [name, value] : {std::pair{"sink", sink}, {"recent", recent}}) {
    if (value < 0 || value % kPageTokens != 0) {
      return InvalidArgument(fmt::format("{} window of {} tokens: must be a multiple of {}", name,
                                         value, kPageTokens));
    }
  }
  if (cell <= 0 || cell % kPageTokens != 0) {
    return InvalidArgument(fmt::format(
        "prefill cell of {} tokens: must be a positive multiple of {}", cell, kPageTokens));
  }
  return {};
}

Status SequenceCache::Reserve(int64_t num_tokens) {
  const int64_t end = length_ + num_tokens;
  const int64_t pages_needed = (end + kPageTokens - 1) / kPageTokens;
  // A shared, partly filled last page is copied before the first write to it.
  const int64_t last = length_ / kPageTokens;
  PageRef copy;
  if (num_tokens > 0 && length_ % kPageTokens != 0) {
    Entry& entry = pages_[static_cast<size_t>(last)];
    OSCAR_CHECK(!entry.sealed, "a partly filled page cannot be sealed");
    if (entry.page.shared()) {
      OSCAR_ASSIGN_OR_RETURN(copy, pool_->Allocate(config_->open));
      std::memcpy(copy.data(), entry.page.data(), config_->open.bytes());
    }
  }
  std::vector<PageRef> fresh;
  while (num_pages() + static_cast<int64_t>(fresh.size()) < pages_needed) {
    OSCAR_ASSIGN_OR_RETURN(PageRef page, pool_->Allocate(config_->open));
    fresh.push_back(std::move(page));
  }
  if (copy) pages_[static_cast<size_t>(last)].page = std::move(copy);
  for (PageRef& page : fresh) pages_.push_back({std::move(page), false});
  return {};
}

Bf16* SequenceCache::KRow(int layer, int head, int64_t position) const {
  const Entry& entry = pages_[static_cast<size_t>(position / kPageTokens)];
  OSCAR_DCHECK(!entry.sealed);
  auto* block = reinterpret_cast<Bf16*>(entry.page.Block(layer, head).data());
  return block + position % kPageTokens * config_->open.layout(layer).head_dim();
}

Bf16* SequenceCache::VRow(int layer, int head, int64_t position) const {
  return KRow(layer, head, position) + kPageTokens * config_->open.layout(layer).head_dim();
}

void SequenceCache::Advance(int64_t num_tokens) {
  length_ += num_tokens;
  OSCAR_CHECK(length_ <= num_pages() * kPageTokens);
}

Status SequenceCache::SealBefore(int64_t position, ThreadPool& threads) {
  if (config_->sealer == nullptr) return {};
  const int64_t first = config_->sink / kPageTokens;
  next_to_seal_ = std::max(next_to_seal_, first);
  for (; (next_to_seal_ + 1) * kPageTokens <= position; ++next_to_seal_) {
    if (is_sealed(next_to_seal_)) continue;
    OSCAR_RETURN_IF_ERROR(SealPage(next_to_seal_, threads));
  }
  return {};
}

Status SequenceCache::SealPage(int64_t index, ThreadPool& threads) {
  Entry& entry = pages_[static_cast<size_t>(index)];
  const PageShape& open = config_->open;
  const PageShape& sealed = config_->sealed;

  // Normally the sealed page is allocated beside the open one. In a full pool the open page's own
  // bytes make room: it is sealed into scratch memory first and given back.
  std::vector<std::byte> scratch;
  Result<PageRef> target = pool_->Allocate(sealed);
  if (!target.has_value()) {
    if (entry.page.shared()) return target.error();
    scratch.resize(sealed.bytes());
  }
  std::byte* base = target.has_value() ? target->data() : scratch.data();
  std::atomic<uint64_t> saturated{0};
  const int heads = open.kv_heads();
  threads.ParallelFor(int64_t{open.num_layers()} * heads, [&](int64_t unit, int) {
    const int layer = static_cast<int>(unit / heads), head = static_cast<int>(unit % heads);
    const auto rows = static_cast<size_t>(kPageTokens * open.layout(layer).head_dim());
    const auto* k = reinterpret_cast<const Bf16*>(entry.page.Block(layer, head).data());
    const int clamped = config_->sealer->Seal(
        layer, head, {k, rows}, {k + rows, rows},
        {base + sealed.BlockOffset(layer, head), sealed.layout(layer).block_bytes()});
    saturated.fetch_add(static_cast<uint64_t>(clamped), std::memory_order_relaxed);
  });
  saturated_ += saturated.load();
  entry.page.Reset();
  if (!target.has_value()) {
    target = pool_->Allocate(sealed);
    OSCAR_CHECK(target.has_value(), "a sealed page must fit where its open page was");
    std::memcpy(target->data(), scratch.data(), scratch.size());
  }
  entry.page = std::move(*target);
  entry.sealed = true;
  return {};
}

SequenceCache SequenceCache::Fork() const {
  SequenceCache fork(*config_, *pool_);
  fork.pages_.reserve(pages_.size());
  for (const Entry& entry : pages_) fork.pages_.push_back({entry.page.Share(), entry.sealed});
  fork.length_ = length_;
  fork.next_to_seal_ = next_to_seal_;
  fork.saturated_ = saturated_;
  return fork;
}

int64_t SequenceCache::Trim(int64_t length) {
  length = std::clamp<int64_t>(length, 0, length_);
  if (length % kPageTokens != 0 && is_sealed(length / kPageTokens)) {
    length = length / kPageTokens * kPageTokens;
  }
  pages_.resize(static_cast<size_t>((length + kPageTokens - 1) / kPageTokens));
  length_ = length;
  next_to_seal_ = std::min(next_to_seal_, num_pages());
  return length;
}

CacheUsage SequenceCache::Usage() const {
  CacheUsage usage;
  usage.tokens = static_cast<uint64_t>(length_);
  usage.saturated = saturated_;
  const double elements_per_token = static_cast<double>(config_->open.elements()) / kPageTokens;
  double bits = 0.0;
  for (int64_t i = 0; i < num_pages(); ++i) {
    const size_t bytes = page(i).shape().bytes();
    usage.bytes += bytes;
    usage.shared_pages += page(i).shared() ? 1 : 0;
    if (is_sealed(i)) {
      ++usage.sealed_pages;
      bits += 8.0 * static_cast<double>(bytes);
    } else {
      ++usage.open_pages;
      const int64_t held = std::clamp<int64_t>(length_ - i * kPageTokens, 0, kPageTokens);
      bits += 16.0 * elements_per_token * static_cast<double>(held);
    }
  }
  usage.bf16_bytes = static_cast<uint64_t>(2.0 * elements_per_token * static_cast<double>(length_));
  if (length_ > 0) bits /= elements_per_token * static_cast<double>(length_);
  usage.bits_per_element = bits;
  return usage;
}

uint64_t SequenceCache::BytesFor(const CacheConfig& config, int64_t num_tokens) {
  const int64_t pages = (num_tokens + kPageTokens - 1) / kPageTokens;
  int64_t sealed = 0;
  if (config.sealer != nullptr) {
    sealed = std::max<int64_t>(
        0, (num_tokens - config.recent) / kPageTokens - config.sink / kPageTokens);
  }
  return static_cast<uint64_t>(sealed) * config.sealed.bytes() +
         static_cast<uint64_t>(pages - sealed) * config.open.bytes();
}

int RuleSealer::Seal(int layer, int head, std::span<const Bf16> k, std::span<const Bf16> v,
                     std::span<std::byte> block) const {
  const PageRules& rules = rules_[static_cast<size_t>(layer)][static_cast<size_t>(head)];
  return encoder_(shape_->layout(layer), rules, k, v, block);
}

}  // namespace oscar
