#include "engine/generator.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>

#include "base/check.h"
#include "base/progress.h"
#include "engine/page_budget.h"
#include "engine/prompt_reader.h"
#include "numeric/matrix.h"

namespace oscar {
namespace {

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Status CheckTokens(std::span<const int32_t> tokens, int vocab_size) {
  for (int32_t token : tokens) {
    if (token < 0 || token >= vocab_size) {
      return InvalidArgument(
          fmt::format("token id {} is outside the vocabulary of {}", token, vocab_size));
    }
  }
  return {};
}

}  // namespace

std::string_view NameOf(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kCancelled:
      return "cancelled";
    case FinishReason::kFailed:
      return "error";
  }
  return "";
}

Generator::Generator(Model& model, PagePool& pool, int64_t max_context, int chunk)
    : model_(model),
      pool_(pool),
      max_context_(max_context > 0 ? max_context : model.spec().max_positions),
      chunk_(chunk > 0 ? std::min(chunk, model.max_batch_tokens()) : model.max_batch_tokens()),
      cache_(model.kv().cache(), pool) {}

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
  PromptReader reader(model_, cache_, prompt, num_logits, chunk_);
  while (!reader.done()) {
    if (cancelled_.load(std::memory_order_relaxed)) return {StatusCode::kCancelled, "cancelled"};
    const Status status = reader.ReadChunk();
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
}

Status Generator::Prefill(std::span<const int32_t> prompt, int64_t num_logits,
                          const OnLogits& on_logits) {
  if (prompt.empty()) return InvalidArgument("the prompt is empty");
  OSCAR_RETURN_IF_ERROR(CheckTokens(prompt, model_.spec().vocab_size));
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
  logits_.resize(static_cast<size_t>(model_.spec().vocab_size));
  const ForwardItem item{&cache_, {&token, 1}, /*is_prompt=*/false, /*num_logits=*/1};
  const Status status = model_.Forward({&item, 1}, logits_);
  if (status.code() == StatusCode::kResourceExhausted) {
    return Unexpected(Exhausted(cache_.length(), cache_.length() + 1));
  }
  OSCAR_RETURN_IF_ERROR(status);
  tokens_.push_back(token);
  return std::span<const float>(logits_);
}

Status Generator::Launch(int32_t token, const TokenDraw& draw) {
  const ForwardItem item{&cache_, {&token, 1}, /*is_prompt=*/false, /*num_logits=*/1};
  return model_.Launch({&item, 1}, {&draw, 1});
}

Status Generator::DropAhead() {
  if (!ahead_) return {};
  ahead_ = false;
  int32_t ignored = 0;
  OSCAR_RETURN_IF_ERROR(model_.Collect({&ignored, 1}));
  cache_.Trim(static_cast<int64_t>(tokens_.size()));
  return {};
}

Result<int32_t> Generator::Draw(std::span<const float> logits, Sampler& sampler) const {
  if (!AllFinite(logits)) return Unexpected(NotFinite(static_cast<int64_t>(tokens_.size())));
  return sampler.Sample(logits);
}

Result<int32_t> Generator::StepAndDraw(int32_t token, bool goes_on, Sampler& sampler) {
  const std::optional<TokenDraw> draw = sampler.NextDraw();
  if (model_.max_draws() == 0 || !draw.has_value()) {
    OSCAR_ASSIGN_OR_RETURN(const auto logits, Step(token));
    return Draw(logits, sampler);
  }
  int32_t drawn = 0;
  bool logits_are_there = true;
  Status status;
  if (model_.CanRunAhead() && draw->IsSureOnDevice()) {
    if (!ahead_) status = Launch(token, *draw);
    if (status.ok()) {
      ahead_ = false;
      // Only where undoing it leaves no trace: a page that is sealed stays sealed.
      const AppendCost cost = cache_.CostOf(1, /*is_prompt=*/false);
      if (goes_on && cache_.length() < max_context_ && cost.seal_peak == 0 && cost.seal_net == 0) {
        const Status launched = Launch(ForwardItem::Drawn(0), *sampler.NextDraw(1));
        if (!launched.ok() && launched.code() != StatusCode::kResourceExhausted) {
          // The one before must not be left under way.
          [[maybe_unused]] const Status ignored = model_.Collect({&drawn, 1});
          return Unexpected(launched);
        }
        ahead_ = launched.ok();
        logits_are_there = !ahead_;
      }
      status = model_.Collect({&drawn, 1});
    }
  } else {
    const ForwardItem item{&cache_, {&token, 1}, /*is_prompt=*/false, /*num_logits=*/1};
    status = model_.ForwardAndDraw({&item, 1}, {&*draw, 1}, {&drawn, 1});
  }
  if (status.code() == StatusCode::kResourceExhausted) {
    return Unexpected(Exhausted(cache_.length(), cache_.length() + 1));
  }
  OSCAR_RETURN_IF_ERROR(status);
  if (drawn >= 0) {
    tokens_.push_back(token);
    sampler.Observe(drawn);
    return drawn;
  }
  if (!logits_are_there) {  // computed again, for its logits
    OSCAR_RETURN_IF_ERROR(DropAhead());
    cache_.Trim(static_cast<int64_t>(tokens_.size()));
    OSCAR_ASSIGN_OR_RETURN(const auto logits, Step(token));
    return Draw(logits, sampler);
  }
  tokens_.push_back(token);
  logits_.resize(static_cast<size_t>(model_.spec().vocab_size));
  OSCAR_RETURN_IF_ERROR(model_.ReadLogits(0, logits_));
  return Draw(logits_, sampler);
}

Result<GenerateResult> Generator::Generate(const GenerateRequest& request,
                                           const OnToken& on_token) {
  cancelled_.store(false, std::memory_order_relaxed);
  const int vocab_size = model_.spec().vocab_size;
  if (request.prompt.empty()) return Unexpected(InvalidArgument("the prompt is empty"));
  OSCAR_RETURN_IF_ERROR(CheckTokens(request.prompt, vocab_size));
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
  OSCAR_ASSIGN_OR_RETURN(int32_t token, Draw(logits_, sampler));
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
    const auto next = StepAndDraw(token, /*goes_on=*/count + 1 < limit, sampler);
    if (!next.has_value()) {
      result.reason = FinishReason::kFailed;
      result.status = next.error();
      break;
    }
    token = *next;
  }
  const Status dropped = DropAhead();
  if (result.status.ok()) OSCAR_RETURN_IF_ERROR(dropped);
  result.decode_seconds = SecondsSince(start);
  result.cache = cache_.Usage();
  return result;
}

}  // namespace oscar
