#include "generation/generation.h"

#include <fmt/core.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/log.h"

namespace oscar::server {
namespace {

void Shorten(size_t count, GeneratedToken* token) {
  if (token->top.size() > count) token->top.resize(count);
}

}  // namespace

uint64_t ChoiceSeed(uint64_t seed, uint64_t choice) {
  if (choice == 0) return seed;
  // splitmix64's finaliser over the choice's place in its sequence.
  uint64_t z = seed + choice * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

ApiResult<std::unique_ptr<Generation>> Generation::Start(EngineService& engine,
                                                         const Tokenizer& tokenizer,
                                                         GenerationPlan plan) {
  std::unique_ptr<Generation> generation(new Generation(tokenizer, std::move(plan)));
  const GenerationPlan& p = generation->plan_;
  for (size_t prompt = 0; prompt < p.prompts.size(); ++prompt) {
    for (int64_t k = 0; k < p.choices_per_prompt; ++k) {
      Choice choice;
      choice.prompt = prompt;
      choice.assembler = std::make_unique<ChoiceAssembler>(tokenizer, p.choice);
      choice.timing.submitted = Clock::now();
      EngineRequest request = p.prototype;
      const size_t index = generation->choices_.size();
      request.id = index == 0 ? p.request_id : fmt::format("{}/{}", p.request_id, index);
      request.prompt = p.prompts[prompt].tokens;
      request.sampling.seed = ChoiceSeed(p.seed, static_cast<uint64_t>(k));
      request.want_prompt_logprobs = p.prompt_logprobs;
      if (p.prefill_only) request.max_tokens = 1;
      auto handle = engine.Submit(std::move(request));
      if (!handle.has_value()) return tl::unexpected(FromStatus(handle.error(), p.request_id));
      choice.handle = std::move(*handle);
      generation->choices_.push_back(std::move(choice));
    }
  }
  generation->active_ = generation->choices_.size();
  return generation;
}

Generation::Update Generation::Next() {
  Update update;
  if (active_ == 0) {
    update.kind = Update::Kind::kDone;
    return update;
  }
  for (size_t i = 0; i < choices_.size(); ++i) {
    const size_t index = (cursor_ + i) % choices_.size();
    while (!choices_[index].done) {
      EngineEvent event = choices_[index].handle->Next(std::chrono::milliseconds{0});
      if (event.kind == EngineEvent::Kind::kTimeout) break;
      if (!Take(index, std::move(event), &update)) continue;
      cursor_ = (index + 1) % choices_.size();
      return update;
    }
  }
  update.kind = Update::Kind::kIdle;
  return update;
}

// True when `update` says something.
bool Generation::Take(size_t index, EngineEvent event, Update* update) {
  Choice& choice = choices_[index];
  update->choice = index;
  switch (event.kind) {
    case EngineEvent::Kind::kTimeout:
      return false;
    case EngineEvent::Kind::kStarted:
      // A preempted request starts again; its prompt has been shown by then.
      if (choice.timing.has_started) return false;
      choice.timing.has_started = true;
      choice.timing.started = Clock::now();
      choice.cached_tokens = event.cached_tokens;
      update->kind = Update::Kind::kStarted;
      if (plan_.keep_prompt_logprobs) choice.prompt_logprobs = event.prompt_logprobs;
      for (GeneratedToken& token : event.prompt_logprobs) Shorten(plan_.top_logprobs, &token);
      if (plan_.echo) update->piece = EchoPiece(choice, event);
      return true;
    case EngineEvent::Kind::kToken: {
      const auto now = Clock::now();
      if (!choice.timing.has_token) {
        choice.timing.has_token = true;
        choice.timing.first_token = now;
      } else if (plan_.on_gap) {
        plan_.on_gap(std::chrono::duration<double>(now - choice.timing.last_token).count());
      }
      choice.timing.last_token = now;
      if (plan_.prefill_only) return false;
      ++choice.timing.tokens;
      choice.logprob_sum += static_cast<double>(event.token.logprob);
      Shorten(plan_.top_logprobs, &event.token);
      const bool stopped = choice.assembler->OnToken(event.token, &update->piece);
      if (stopped) {
        choice.handle->Cancel();
        EndChoice(choice);
        update->kind = Update::Kind::kChoiceDone;
        return true;
      }
      if (update->piece.empty() && update->piece.logprobs.empty() &&
          update->piece.token_ids.empty()) {
        return false;
      }
      update->kind = Update::Kind::kPiece;
      return true;
    }
    case EngineEvent::Kind::kFinished:
      choice.assembler->OnFinish(plan_.prefill_only ? FinishReason::kLength : event.reason,
                                 &update->piece);
      EndChoice(choice);
      update->kind = Update::Kind::kChoiceDone;
      return true;
    case EngineEvent::Kind::kFailed:
      if (event.status.code() == StatusCode::kInternal) {
        LogError("request {}: {}", plan_.request_id, event.status.ToString());
      }
      update->kind = Update::Kind::kFailed;
      update->error = FromStatus(event.status, plan_.request_id);
      Cancel();
      return true;
  }
  return false;
}

void Generation::EndChoice(Choice& choice) {
  choice.done = true;
  --active_;
}

void Generation::Cancel() {
  for (Choice& choice : choices_) {
    if (choice.done) continue;
    choice.handle->Cancel();
    EndChoice(choice);
  }
}

ChoicePiece Generation::EchoPiece(const Choice& choice, const EngineEvent& event) const {
  const GenerationPrompt& prompt = plan_.prompts[choice.prompt];
  ChoicePiece piece;
  piece.content = prompt.echo_text;
  if (!plan_.choice.logprobs || prompt.tokens.empty()) return piece;
  LogprobEntry first;
  first.bytes = tokenizer_.TokenBytes(prompt.tokens.front());
  piece.logprobs.push_back(std::move(first));
  for (const GeneratedToken& token : event.prompt_logprobs) {
    piece.logprobs.push_back(MakeLogprobEntry(tokenizer_, token, /*skip_special=*/false));
  }
  return piece;
}

std::vector<std::vector<PromptCandidate>> Generation::prompt_logprobs(size_t choice) const {
  const std::vector<GeneratedToken>& tokens = choices_[choice].prompt_logprobs;
  std::vector<std::vector<PromptCandidate>> out(1);
  for (const GeneratedToken& token : tokens) {
    std::vector<PromptCandidate>& candidates = out.emplace_back();
    candidates.push_back(
        {token.token, token.logprob, token.rank, std::string(tokenizer_.TokenBytes(token.token))});
    for (size_t i = 0; i < std::min(token.top.size(), plan_.prompt_top_logprobs); ++i) {
      const TokenLogprob& other = token.top[i];
      candidates.push_back({other.token, other.logprob, static_cast<int32_t>(i + 1),
                            std::string(tokenizer_.TokenBytes(other.token))});
    }
  }
  return out;
}

std::vector<size_t> Generation::Best(int64_t count) const {
  std::vector<size_t> order(choices_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (count >= plan_.choices_per_prompt) return order;
  const auto mean = [&](size_t index) {
    const Choice& choice = choices_[index];
    return choice.logprob_sum / static_cast<double>(std::max<int64_t>(choice.timing.tokens, 1));
  };
  std::vector<size_t> best;
  for (size_t first = 0; first < order.size();
       first += static_cast<size_t>(plan_.choices_per_prompt)) {
    const auto begin = order.begin() + static_cast<ptrdiff_t>(first);
    std::stable_sort(begin, begin + plan_.choices_per_prompt,
                     [&](size_t a, size_t b) { return mean(a) > mean(b); });
    best.insert(best.end(), begin, begin + count);
  }
  return best;
}

FinishInfo Generation::finish(size_t choice) const {
  const ChoiceAssembler& assembler = *choices_[choice].assembler;
  return {assembler.finish_reason(), assembler.stop_string(), assembler.stop_token()};
}

const std::vector<int32_t>& Generation::prompt_tokens(size_t choice) const {
  return plan_.prompts[choices_[choice].prompt].tokens;
}

Usage Generation::usage() const {
  // A prompt counts once, however many choices it has, and as cached only what its first choice
  // found: the others find what that one left.
  Usage usage;
  for (size_t i = 0; i < choices_.size(); ++i) {
    const Choice& choice = choices_[i];
    usage.completion_tokens += choice.assembler->num_tokens();
    if (const auto reasoning = choice.assembler->reasoning_tokens()) {
      usage.reasoning_tokens = usage.reasoning_tokens.value_or(0) + *reasoning;
    }
    if (i > 0 && choices_[i - 1].prompt == choice.prompt) continue;
    usage.prompt_tokens += static_cast<int64_t>(plan_.prompts[choice.prompt].tokens.size());
    usage.cached_tokens += choice.cached_tokens;
  }
  return usage;
}

}  // namespace oscar::server
