// What others see of the scheduler: counts, bytes by kind, and the pages of every sequence.
#include <unordered_set>

#include "engine/scheduler.h"

namespace oscar {
namespace {

constexpr size_t kMaxBranchesShown = 64;

}  // namespace

void Scheduler::CountInto(EngineStats* stats) const {
  stats->running = static_cast<int64_t>(running_.size());
  stats->waiting = static_cast<int64_t>(waiting_.size());
  stats->kv_budget_bytes = pool_.budget();
  stats->kv_bytes = pool_.bytes_in_use();
  stats->prompt_tokens = counts_.prompt_tokens;
  stats->cached_prompt_tokens = counts_.cached_prompt_tokens;
  stats->generated_tokens = counts_.generated_tokens;
  stats->prefix_queries = counts_.prefix_queries;
  stats->prefix_hits = counts_.prefix_hits;
  stats->evictions = index_.evictions();
  stats->preemptions = counts_.preemptions;
  stats->cancelled = counts_.cancelled;
  stats->steps = counts_.steps;
  stats->cells_by_layer = counts_.cells_by_layer;
  stats->batch_tokens = counts_.batch_tokens;
  stats->open_page_bytes = config_.open.bytes();
  stats->sealed_page_bytes = config_.seals() ? config_.sealed.bytes() : 0;
  stats->state_bytes_each = config_.state.bytes();
}

void Scheduler::MeasureInto(EngineStats* stats) const {
  std::unordered_set<const std::byte*> seen;
  stats->sink_bytes = stats->quantized_bytes = stats->recent_bytes = stats->prefix_bytes = 0;
  stats->open_pages = stats->sealed_pages = 0;
  stats->state_bytes = stats->snapshot_bytes = 0;
  const auto count = [&](const PageRef& page, int64_t index, bool sealed) {
    if (!seen.insert(page.data()).second) return false;
    const uint64_t bytes = page.layout().bytes();
    ++(sealed ? stats->sealed_pages : stats->open_pages);
    if (index < config_.sink / kPageTokens) {
      stats->sink_bytes += bytes;
    } else {
      (sealed ? stats->quantized_bytes : stats->recent_bytes) += bytes;
    }
    return true;
  };
  double bits = 0.0, tokens = 0.0;
  for (const auto& sequence : running_) {
    const SequenceCache& cache = sequence->cache;
    for (int64_t j = 0; j < cache.num_pages(); ++j) count(cache.page(j), j, cache.is_sealed(j));
    if (cache.state() && seen.insert(cache.state().data()).second) {
      stats->state_bytes += config_.state.bytes();
    }
    if (sequence->read != nullptr) stats->recent_bytes += sequence->read->bytes();
    const CacheUsage usage = cache.Usage();
    bits += usage.bits_per_element * static_cast<double>(usage.tokens);
    tokens += static_cast<double>(usage.tokens);
  }
  stats->bits_per_element = tokens > 0 ? bits / tokens : 0.0;
  index_.ForEachPage([&](const PageRef& page, int64_t index, bool sealed) {
    if (count(page, index, sealed)) stats->prefix_bytes += page.layout().bytes();
  });
  const auto count_snapshot = [&](const PageRef& state) {
    if (seen.insert(state.data()).second) stats->snapshot_bytes += config_.state.bytes();
  };
  for (const auto& sequence : running_) {
    for (const auto& kept : sequence->cache.snapshots()) count_snapshot(kept.state);
  }
  index_.ForEachSnapshot(count_snapshot);
}

std::vector<SequenceInfo> Scheduler::Describe() const {
  std::vector<SequenceInfo> infos;
  const auto describe = [&](const Sequence& sequence, bool running) {
    SequenceInfo& info = infos.emplace_back();
    info.request_id = sequence.request.id;
    info.cache_salt = sequence.request.cache_salt;
    info.running = running;
    info.usage = sequence.cache.Usage();
    for (int64_t j = 0; j < sequence.cache.num_pages(); ++j) {
      const char kind = j < config_.sink / kPageTokens ? 's'
                        : sequence.cache.is_sealed(j)  ? 'q'
                                                       : 'r';
      const bool shared = sequence.cache.page(j).shared();
      info.pages.push_back(shared ? static_cast<char>(kind - 'a' + 'A') : kind);
    }
  };
  for (const auto& sequence : running_) describe(*sequence, true);
  for (const auto& sequence : waiting_) describe(*sequence, false);
  for (PrefixIndex::Branch& branch : index_.UnusedBranches(kMaxBranchesShown)) {
    SequenceInfo& info = infos.emplace_back();
    info.cache_salt = std::move(branch.salt);
    info.usage = branch.usage;
    info.pages = std::move(branch.pages);
  }
  return infos;
}

}  // namespace oscar
