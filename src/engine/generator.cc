#include "engine/generator.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>

#include "base/check.h"
#include "base/progress.h"
#include "engine/page_budget.h"
#include "engine/prompt_reader.h"

namespace oscar {
namespace {

Status CheckPrompt(std::span<const int32_t> tokens, int vocab_size) {
  if (tokens.empty()) return InvalidArgument("the prompt is empty");
  for (int32_t token : tokens) {
    if (token < 0 || token >= vocab_size) {
      return InvalidArgument(
          fmt::format("token id {} is outside the vocabulary of {}", token, vocab_size));
    }
  }
  return {};
}

}  // namespace

Generator::Generator(Model& model, PagePool& pool, int64_t max_context, int chunk)
    : model_(model),
      pool_(pool),
      max_context_(max_context > 0 ? max_context : model.spec().max_positions),
      chunk_(chunk > 0 ? std::min(chunk, model.max_batch_tokens()) : model.max_batch_tokens()),
      cache_(model.kv().cache(), pool),
      pass_(model) {}

void Generator::Reset() {
  cache_.Trim(0);
  tokens_.clear();
}

int64_t Generator::ReusePrefix(std::span<const int32_t> prompt, int64_t num_logits) {
  const auto limit = std::min(tokens_.size(), prompt.size());
  size_t common = 0;
  while (common < limit && tokens_[common] == prompt[common]) ++common;
  // Tokens whose logits are wanted have to be computed.
  const auto computed = static_cast<int64_t>(prompt.size()) - num_logits;
  const int64_t kept = cache_.Trim(std::min(static_cast<int64_t>(common), computed));
  tokens_.resize(static_cast<size_t>(kept));
  return kept;
}

Status Generator::Exhausted(int64_t prompt, int64_t total) const {
  const auto peak = [&](const CacheConfig& config) {
    return PeakBytes(config, cache_.length(), cache_.sealed_end(), prompt, total,
                     Reading::kByChunk);
  };
  // While a prompt is read its current cell is held in BF16, so that is what must fit; where the
  // smallest cells would not fit either, they are no advice.
  CacheConfig small_cells = model_.kv().cache();
  small_cells.cell = kPageTokens;
  const bool cells_help = prompt > cache_.length() && peak(small_cells) <= pool_.budget();
  return ResourceExhausted(fmt::format(
      "the KV cache budget of {} is too small for {} tokens, which take up to {}; raise "
      "--kv-memory{}",
      FormatBytes(pool_.budget()), total, FormatBytes(peak(model_.kv().cache())),
      cells_help ? " or lower --prefill-cell" : ""));
}

Status Generator::Run(std::span<const int32_t> prompt, int64_t num_logits,
                      const OnLogits& on_logits) {
  const auto total = static_cast<int64_t>(prompt.size());
  // Known before the first pass: nobody should read most of a prompt to learn that it cannot fit.
  if (PeakBytes(model_.kv().cache(), cache_.length(), cache_.sealed_end(), total, total,
                Reading::kByChunk) > pool_.budget()) {
    return Exhausted(total, total);
  }
  Progress progress("reading the prompt", static_cast<uint64_t>(total - cache_.length()), "tokens");
  const auto read = [&](int64_t end, int64_t logits) -> Status {
    PromptReader reader(model_, cache_, prompt.first(static_cast<size_t>(end)), logits, chunk_);
    while (!reader.done()) {
      if (cancelled_.load(std::memory_order_relaxed)) return {StatusCode::kCancelled, "cancelled"};
      Status status = reader.ReadChunk();
      if (status.code() == StatusCode::kResourceExhausted && DropSnapshots()) continue;
      if (status.code() == StatusCode::kResourceExhausted) return Exhausted(total, total);
      OSCAR_RETURN_IF_ERROR(status);
      tokens_.insert(tokens_.end(), reader.chunk().begin(), reader.chunk().end());
      progress.Add(reader.chunk().size());
      if (on_logits && !reader.logits().empty()) {
        const size_t rows = reader.logits().size() / static_cast<size_t>(model_.spec().vocab_size);
        on_logits(cache_.length() - static_cast<int64_t>(rows), reader.logits());
      }
    }
    logits_ = reader.TakeLogits();
    return {};
  };
  // A state cannot lose tokens: one is kept where the next prompt may differ, before the answer.
  const int64_t whole = (total - 1) / kPageTokens * kPageTokens;
  if (cache_.config().has_state() && whole > cache_.length()) {
    OSCAR_RETURN_IF_ERROR(read(whole, std::max<int64_t>(0, num_logits - (total - whole))));
    DropSnapshots();
    cache_.KeepSnapshot();
  }
  return read(total, num_logits);
}

bool Generator::DropSnapshots() {
  if (cache_.snapshots().empty()) return false;
  cache_.ForgetSnapshots(cache_.length());
  return true;
}

Status Generator::Prefill(std::span<const int32_t> prompt, int64_t num_logits,
                          const OnLogits& on_logits) {
  OSCAR_RETURN_IF_ERROR(CheckPrompt(prompt, model_.spec().vocab_size));
  if (static_cast<int64_t>(prompt.size()) > max_context_) {
    return OutOfRange(
        fmt::format("the prompt has {} tokens, the context holds {}", prompt.size(), max_context_));
  }
  ReusePrefix(prompt, num_logits);
  return Run(prompt, num_logits, on_logits);
}

Result<std::span<const float>> Generator::Step(int32_t token) {
  if (cache_.length() >= max_context_) {
    return Unexpected(OutOfRange(fmt::format("the context of {} tokens is full", max_context_)));
  }
  OSCAR_RETURN_IF_ERROR(Append(token, std::nullopt));
  tokens_.push_back(token);
  return pass_.logits(0);
}

Status Generator::Append(int32_t token, const std::optional<SampleParams>& sample) {
  const ForwardItem item{&cache_, {&token, 1}, /*is_prompt=*/false, /*num_logits=*/1};
  Status status = pass_.Run({&item, 1}, {&sample, 1});
  if (status.code() == StatusCode::kResourceExhausted && DropSnapshots()) {
    status = pass_.Run({&item, 1}, {&sample, 1});
  }
  return status.code() == StatusCode::kResourceExhausted
             ? Exhausted(cache_.length(), cache_.length() + 1)
             : status;
}

Result<int32_t> Generator::StepAndSample(int32_t token, bool goes_on,
                                         std::span<const int32_t> masked, Sampler& sampler) {
  if (!pass_.in_flight()) {
    const bool on_device = model_.max_samples() > 0 && masked.empty();
    OSCAR_RETURN_IF_ERROR(Append(token, on_device ? sampler.NextSample() : std::nullopt));
  }
  if (pass_.in_flight()) {
    const PassRunner::Ahead next{0, sampler.NextSample(1).value_or(SampleParams{})};
    const bool ahead = goes_on && cache_.length() < max_context_;
    OSCAR_RETURN_IF_ERROR(pass_.Land({&next, ahead ? 1u : 0u}));
    if (pass_.id(0) == PassRunner::kRecompute) {
      OSCAR_RETURN_IF_ERROR(pass_.Drain());
      OSCAR_RETURN_IF_ERROR(Append(token, std::nullopt));
    }
  }
  tokens_.push_back(token);
  const int32_t sampled = pass_.Sample(0, sampler, masked);
  if (sampled < 0) return Unexpected(NotFinite(static_cast<int64_t>(tokens_.size())));
  return sampled;
}

Result<GenerateResult> Generator::Generate(const GenerateRequest& request,
                                           const OnToken& on_token) {
  cancelled_.store(false, std::memory_order_relaxed);
  const int vocab_size = model_.spec().vocab_size;
  OSCAR_RETURN_IF_ERROR(CheckPrompt(request.prompt, vocab_size));
  OSCAR_RETURN_IF_ERROR(request.sampling.Validate(vocab_size));
  GenerateResult result;
  result.prompt_tokens = static_cast<int64_t>(request.prompt.size());
  // One position must be left for the first generated token.
  if (result.prompt_tokens >= max_context_) {
    return Unexpected(
        OutOfRange(
            fmt::format("the prompt has {} tokens, the context holds {}: shorten it, or raise "
                        "--max-model-len where the model allows",
                        result.prompt_tokens, max_context_))
            .WithParam("prompt"));
  }
  const int64_t room = max_context_ - result.prompt_tokens;
  const int64_t limit = request.max_tokens > 0 ? std::min(request.max_tokens, room) : room;

  auto start = std::chrono::steady_clock::now();
  result.reused_tokens = ReusePrefix(request.prompt, /*num_logits=*/1);
  const Status prefill = Run(request.prompt, /*num_logits=*/1, {});
  result.prefill_seconds = SecondsSince(start);
  if (prefill.code() == StatusCode::kCancelled) {
    result.reason = FinishReason::kCancelled;
    result.cache = cache_.Usage();
    return result;
  }
  OSCAR_RETURN_IF_ERROR(prefill);

  Sampler sampler(request.sampling);
  sampler.ObservePrompt(request.prompt);
  result.seed = sampler.seed();
  start = std::chrono::steady_clock::now();
  result.reason = FinishReason::kLength;
  // What must not be the token after so many.
  const auto masked = [&](int64_t count) {
    return count < request.min_tokens ? std::span<const int32_t>(request.stop_tokens)
                                      : std::span<const int32_t>();
  };
  int32_t token = sampler.Sample(logits_, masked(0));
  if (token < 0) return Unexpected(NotFinite(result.prompt_tokens));
  while (true) {
    result.tokens.push_back(token);
    const bool go_on = !on_token || on_token(token);
    if (std::find(request.stop_tokens.begin(), request.stop_tokens.end(), token) !=
        request.stop_tokens.end()) {
      result.reason = FinishReason::kStop;
      break;
    }
    if (!go_on || cancelled_.load(std::memory_order_relaxed)) {
      result.reason = FinishReason::kCancelled;
      break;
    }
    // The last token is not needed in the cache to end here.
    const auto count = static_cast<int64_t>(result.tokens.size());
    if (count == limit) break;
    const bool goes_on = count + 1 < limit && masked(count + 1).empty();
    const auto next = StepAndSample(token, goes_on, masked(count), sampler);
    if (!next.has_value()) {
      result.reason = FinishReason::kFailed;
      result.status = next.error();
      break;
    }
    token = *next;
  }
  const Status dropped = pass_.Drain();  // a pass for a token that is not wanted after all
  if (result.status.ok()) OSCAR_RETURN_IF_ERROR(dropped);
  result.decode_seconds = SecondsSince(start);
  result.cache = cache_.Usage();
  return result;
}

}  // namespace oscar
