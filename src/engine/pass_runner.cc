#include "engine/pass_runner.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace oscar {

Status PassRunner::Run(std::span<const ForwardItem> items,
                       std::span<const std::optional<SampleParams>> sampling,
                       const Model::BeforeSample& fill_masks) {
  OSCAR_CHECK(flight_.empty() && (sampling.empty() || sampling.size() == items.size()));
  rows_.clear(), sampling_.clear();
  logits_used_ = 0;
  size_t num_logits = 0;
  bool any_on_device = false, runs_on = model_.CanRunAhead();
  for (size_t i = 0; i < items.size(); ++i) {
    num_logits += static_cast<size_t>(items[i].num_logits);
    const bool on_device = !sampling.empty() && sampling[i].has_value();
    any_on_device = any_on_device || on_device;
    runs_on = runs_on && !items[i].is_prompt && on_device && sampling[i]->IsSureOnDevice();
    if (items[i].num_logits > 0) sampling_.push_back(on_device ? *sampling[i] : SampleParams{});
  }
  // Devices sample from one row of logits an item.
  const bool samples = any_on_device && sampling_.size() == num_logits &&
                       num_logits <= static_cast<size_t>(model_.max_samples());
  if (!samples) {
    for (const ForwardItem& item : items) {
      AddRow(SampleParams::kUndecided, static_cast<size_t>(item.num_logits));
    }
    if (items.empty()) return {};
    return model_.Forward(items, std::span(logits_).first(logits_used_));
  }
  if (runs_on) {
    OSCAR_RETURN_IF_ERROR(model_.Launch(items, sampling_, fill_masks));
    for (const ForwardItem& item : items) flight_.push_back(item.cache);
    return {};
  }
  ids_.resize(sampling_.size());
  OSCAR_RETURN_IF_ERROR(model_.ForwardAndSample(items, sampling_, ids_, fill_masks));
  size_t row = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    if (items[i].num_logits == 0) {
      AddRow(SampleParams::kUndecided, 0);
      continue;
    }
    const bool ours = !sampling[i].has_value() && ids_[row] != SampleParams::kNotFinite;
    OSCAR_RETURN_IF_ERROR(TakeSampled(ours ? SampleParams::kUndecided : ids_[row], row));
    ++row;
  }
  return {};
}

std::span<float> PassRunner::AddRow(int32_t id, size_t num_logits) {
  const size_t count = num_logits * static_cast<size_t>(model_.spec().vocab_size);
  rows_.push_back({id, logits_used_, count});
  logits_used_ += count;
  if (logits_.size() < logits_used_) logits_.resize(logits_used_);
  return std::span(logits_).subspan(logits_used_ - count, count);
}

// Adds what the device came to, with the logits where it was left to us.
Status PassRunner::TakeSampled(int32_t id, size_t sampled_row) {
  const bool undecided = id == SampleParams::kUndecided;
  const std::span<float> logits = AddRow(id, undecided ? 1 : 0);
  return undecided ? model_.ReadLogits(sampled_row, logits) : Status{};
}

Result<bool> PassRunner::ContinueCell(CellRead& read, int64_t row_layers, bool wants_logits) {
  return model_.ContinueCell(read, row_layers,
                             AddRow(SampleParams::kUndecided, wants_logits ? 1 : 0));
}

// Not where anything would be sealed, because a sealed page stays sealed, nor where pages would
// have to be evicted: then the pass is run when it is sure that it is wanted.
Status PassRunner::LaunchAhead(std::span<const Ahead> ahead,
                               const Model::BeforeSample& before_sample) {
  next_.clear(), items_.clear(), sampling_.clear(), tokens_.clear();
  tokens_.reserve(ahead.size());  // items point to them
  uint64_t bytes = 0;
  for (const Ahead& next : ahead) {
    SequenceCache* cache = flight_[next.row];
    OSCAR_CHECK(cache != nullptr);
    const AppendCost cost = cache->CostOf(1, /*is_prompt=*/false);
    const uint64_t free = cache->pool().budget() - cache->pool().bytes_in_use();
    bytes += static_cast<uint64_t>(cost.reserve);
    if (cost.seal_peak != 0 || cost.seal_net != 0 || bytes > free) {
      next_.clear();
      return {};
    }
    next_.push_back(cache);
    sampling_.push_back(next.sample);
    tokens_.push_back(ForwardItem::Sampled(static_cast<int32_t>(next.row)));
    items_.push_back({cache, {&tokens_.back(), 1}, /*is_prompt=*/false, /*num_logits=*/1});
  }
  if (next_.empty()) return {};
  const Status status = model_.Launch(items_, sampling_, before_sample);
  if (!status.ok()) next_.clear();  // nothing has grown
  return status.code() == StatusCode::kResourceExhausted ? Status{} : status;
}

Status PassRunner::Land(std::span<const Ahead> ahead, const FillMasks& fill_masks) {
  OSCAR_CHECK(in_flight());
  ids_.resize(flight_.size());
  std::optional<Status> early;  // masks need the ids before the next sample
  Model::BeforeSample before_sample;
  if (fill_masks) {
    before_sample = [&] {
      early = model_.Collect(ids_);
      if (early->ok()) fill_masks(ids_);
      return *early;
    };
  }
  const Status launched = LaunchAhead(ahead, before_sample);
  // Also after a failure: nothing may be left under way that nobody knows of.
  const Status collected = early.has_value() ? *early : model_.Collect(ids_);
  std::swap(flight_, next_);
  OSCAR_RETURN_IF_ERROR(launched);
  OSCAR_RETURN_IF_ERROR(collected);
  rows_.clear();
  logits_used_ = 0;
  for (size_t row = 0; row < next_.size(); ++row) {
    int32_t id = ids_[row];
    if (next_[row] == nullptr) id = SampleParams::kNotFinite;  // nobody will ask
    if (id == SampleParams::kUndecided && in_flight()) {
      Leave(*next_[row]);
      next_[row]->Trim(next_[row]->length() - 1);
      id = kRecompute;
    }
    OSCAR_RETURN_IF_ERROR(TakeSampled(id, row));
  }
  return {};
}

void PassRunner::Leave(const SequenceCache& cache) {
  const auto found = std::ranges::find(flight_, &cache);
  if (found == flight_.end()) return;
  (*found)->Trim(cache.length() - 1);
  *found = nullptr;
}

bool PassRunner::wanted() const {
  return std::ranges::any_of(flight_, [](const SequenceCache* cache) { return cache != nullptr; });
}

Status PassRunner::Drain() {
  if (!in_flight()) return {};
  ids_.resize(flight_.size());
  Status status = model_.Collect(ids_);
  for (SequenceCache* cache : flight_) {
    if (cache != nullptr) cache->Trim(cache->length() - 1);
  }
  flight_.clear();
  return status;
}

int32_t PassRunner::Sample(size_t row, Sampler& sampler, std::span<const int32_t> masked,
                           const uint32_t* allowed) const {
  const int32_t id = rows_[row].id;
  if (id >= 0) sampler.Observe(id);
  if (id != SampleParams::kUndecided) return id;
  const auto vocab = static_cast<size_t>(model_.spec().vocab_size);
  return sampler.Sample(logits(row).last(vocab), masked, allowed);
}

}  // namespace oscar
