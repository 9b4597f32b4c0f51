// How the scheduler samples: on the device where it can, masks of constraints, logprobs.
#include <algorithm>
#include <utility>

#include "engine/scheduler.h"
#include "engine/token_mask.h"

namespace oscar {

// The sample after `ahead` more tokens, where the device can do it without us.
std::optional<SampleParams> Scheduler::DeviceSample(const Sequence& sequence, int64_t ahead) const {
  const EngineRequest& request = sequence.request;
  const bool may_stop = sequence.generated() + ahead >= request.min_tokens;
  // Beside a cell that is read by layers all logits come back: that is a pass of its own.
  if (model_.max_samples() == 0 || cell_ != nullptr || request.want_logprobs ||
      sequence.samples_here || (!may_stop && !request.stop_tokens.empty()) ||
      request.rules != nullptr) {
    return std::nullopt;
  }
  auto sample = sequence.sampler.NextSample(static_cast<uint64_t>(ahead));
  if (sample.has_value() && sequence.constraint != nullptr) sample->mask = sequence.mask.data();
  return sample;
}

// A constraint that fails is told of when its token would have been sampled.
void Scheduler::FillMask(Sequence& sequence) const {
  if (std::exchange(sequence.mask_filled, true)) return;
  sequence.mask_status = sequence.constraint->Fill(sequence.mask);
  if (!sequence.mask_status.ok()) std::ranges::fill(sequence.mask, ~uint32_t{0});
}

// Tells the constraint, if there is one, of a token that was sampled. Where the mask is still the
// one it was sampled by, and could not be filled, that is the error.
Status Scheduler::Constrained(Sequence& sequence, int32_t token) {
  if (sequence.constraint == nullptr) return {};
  if (sequence.constrained == sequence.generated()) OSCAR_RETURN_IF_ERROR(sequence.mask_status);
  sequence.Constrain(token);
  return sequence.constraint_status;
}

// The masks of a pass that has been launched on the tokens `ids` of the one before it.
void Scheduler::FillMasksAfter(std::span<const PassRunner::Ahead> ahead,
                               std::span<const int32_t> ids) const {
  threads_.ParallelFor(static_cast<int64_t>(ahead.size()), [&](int64_t i, int) {
    const size_t row = ahead[static_cast<size_t>(i)].row;
    Sequence& sequence = *flight_[row].sequence;
    // Without a token, or with its last one, a sequence leaves the pass.
    if (sequence.constraint == nullptr || ids[row] < 0 || !sequence.mask_status.ok()) return;
    sequence.Constrain(ids[row]);
    if (sequence.constraint_status.ok() && !sequence.constraint->finished()) FillMask(sequence);
  });
}

void Scheduler::TakePromptLogprobs(const Work& work, std::span<const float> logits) {
  Sequence& sequence = *work.sequence;
  const auto vocab = static_cast<size_t>(model_.spec().vocab_size);
  // Row r belongs to position first + r and speaks of the token after it.
  const int64_t first = sequence.cache.length() - work.num_logits;
  const auto known = static_cast<int64_t>(sequence.prompt_logprobs.size());
  const int64_t end = std::min(sequence.cache.length(), sequence.prompt_size() - 1);
  if (known >= end) return;
  sequence.prompt_logprobs.resize(static_cast<size_t>(end));
  threads_.ParallelFor(end - known, [&](int64_t i, int) {
    const int64_t position = known + i;
    const auto row = logits.subspan(static_cast<size_t>(position - first) * vocab, vocab);
    GeneratedToken& entry = sequence.prompt_logprobs[static_cast<size_t>(position)];
    entry.token = sequence.tokens[static_cast<size_t>(position + 1)];
    entry.logprob = LogProbability(row, entry.token);
    const float own = row[static_cast<size_t>(entry.token)];
    entry.rank = 1 + static_cast<int32_t>(
                         std::ranges::count_if(row, [own](float other) { return other > own; }));
    if (sequence.request.top_logprobs > 0) {
      entry.top = TopLogprobs(row, sequence.request.top_logprobs);
    }
  });
}

void Scheduler::SampleToken(Sequence& sequence, size_t row, GeneratedToken* sampled) {
  const EngineRequest& request = sequence.request;
  sequence.samples_here = false;
  std::vector<int32_t> masked;
  if (!MaskTokens(request, std::span(sequence.tokens).subspan(request.prompt.size()),
                  model_.spec().vocab_size, &masked)) {
    sampled->token = kNoTokenLeft;
    return;
  }
  const uint32_t* allowed = nullptr;
  // One that the device sampled has used its mask.
  if (sequence.constraint != nullptr && pass_.id(row) == SampleParams::kUndecided) {
    FillMask(sequence);
    allowed = sequence.mask.data();
  }
  sampled->token = pass_.Sample(row, sequence.sampler, masked, allowed);
  if (sampled->token < 0 || !request.want_logprobs) return;
  const auto logits = pass_.logits(row).last(static_cast<size_t>(model_.spec().vocab_size));
  sampled->logprob = LogProbability(logits, sampled->token);
  if (request.top_logprobs > 0) sampled->top = TopLogprobs(logits, request.top_logprobs);
}

}  // namespace oscar
