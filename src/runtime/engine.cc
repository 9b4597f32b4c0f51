#include "oscar/engine.h"

#include <fmt/core.h>

#include <atomic>
#include <mutex>
#include <random>
#include <utility>

#include "runtime/hosted_model.h"

namespace oscar {
namespace {

using std::chrono::milliseconds;

uint64_t SystemSeed() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

class RunningAnswer : public Answer {
 public:
  RunningAnswer(std::unique_ptr<RequestHandle> handle, const Tokenizer& tokenizer,
                AnswerFormat format, uint64_t seed, int64_t prompt_tokens)
      : handle_(std::move(handle)), assembler_(tokenizer, std::move(format)), seed_(seed) {
    usage_.prompt_tokens = prompt_tokens;
  }

  AnswerEvent Next(milliseconds timeout) override {
    if (last_.is_last()) return last_;
    EngineEvent event = handle_->Next(timeout);
    AnswerEvent out;
    AnswerPiece piece;
    switch (event.kind) {
      case EngineEvent::Kind::kTimeout:
        return out;
      case EngineEvent::Kind::kStarted: {
        out.kind = AnswerEvent::Kind::kStarted;
        const std::lock_guard lock(mutex_);
        usage_.cached_tokens = event.cached_tokens;
        return out;
      }
      case EngineEvent::Kind::kToken:
        out.kind = AnswerEvent::Kind::kText;
        out.token_ids.push_back(event.token.token);
        if (assembler_.OnToken(event.token.token, &piece)) {
          handle_->Cancel();  // a stop string has ended it; the engine knows none
          Finish(&out);
        }
        break;
      case EngineEvent::Kind::kFinished:
        assembler_.OnFinish(event.reason, &piece);
        Finish(&out);
        break;
      case EngineEvent::Kind::kFailed:
        assembler_.OnFinish(FinishReason::kFailed, &piece);
        Finish(&out);
        out.kind = AnswerEvent::Kind::kFailed;
        out.status = std::move(event.status);
        break;
    }
    if (out.is_last()) last_ = out;
    last_.token_ids.clear();
    out.content = std::move(piece.content);
    out.reasoning = std::move(piece.reasoning);
    out.tool_calls = std::move(piece.tool_calls);
    const std::lock_guard lock(mutex_);
    usage_.completion_tokens = assembler_.num_tokens();
    usage_.reasoning_tokens = assembler_.reasoning_tokens().value_or(0);
    return out;
  }

  void Cancel() override { handle_->Cancel(); }

  AnswerUsage usage() const override {
    const std::lock_guard lock(mutex_);
    return usage_;
  }
  uint64_t seed() const override { return seed_; }

 private:
  void Finish(AnswerEvent* out) const {
    out->kind = AnswerEvent::Kind::kFinished;
    out->finish_reason = assembler_.finish_reason();
    out->stop_string = assembler_.stop_string();
    out->stop_token = assembler_.stop_token();
  }

  const std::unique_ptr<RequestHandle> handle_;
  AnswerAssembler assembler_;
  const uint64_t seed_;
  AnswerEvent last_;  // what Next repeats once the answer has ended
  mutable std::mutex mutex_;
  AnswerUsage usage_;  // guarded by mutex_
};

class HostedEngine : public Engine {
 public:
  explicit HostedEngine(std::unique_ptr<HostedModel> host) : host_(std::move(host)) {}

  Result<std::unique_ptr<Answer>> Complete(std::string_view prompt,
                                           const CompletionOptions& options) override {
    OSCAR_ASSIGN_OR_RETURN(Prompt encoded, host_->dialogue().Encode(prompt));
    return Submit(std::move(encoded), options);
  }

  Result<std::unique_ptr<Answer>> Chat(std::string_view messages_json,
                                       const CompletionOptions& options) override {
    OSCAR_ASSIGN_OR_RETURN(Prompt prompt, host_->dialogue().RenderJson(messages_json, options));
    return Submit(std::move(prompt), options);
  }

  EngineReport report() const override {
    const EngineStats stats = host_->engine().Stats();
    EngineReport report;
    report.running = stats.running;
    report.waiting = stats.waiting;
    report.kv_bytes = stats.kv_bytes;
    report.kv_budget_bytes = stats.kv_budget_bytes;
    report.bits_per_element = stats.bits_per_element;
    report.prompt_tokens = stats.prompt_tokens;
    report.cached_prompt_tokens = stats.cached_prompt_tokens;
    report.generated_tokens = stats.generated_tokens;
    report.steps = stats.steps;
    return report;
  }

  Status health() const override { return host_->engine().Health(); }
  int64_t max_context() const override { return host_->engine().max_context(); }
  SamplingOptions default_sampling() const override {
    return host_->dialogue().defaults().sampling;
  }
  int64_t default_max_tokens() const override { return host_->dialogue().defaults().max_tokens; }

 private:
  Result<std::unique_ptr<Answer>> Submit(Prompt prompt, const CompletionOptions& options) {
    OSCAR_ASSIGN_OR_RETURN(AnswerPlan plan, host_->dialogue().PlanFor(prompt, options));
    const auto prompt_tokens = static_cast<int64_t>(prompt.tokens.size());
    EngineRequest request;
    request.id = fmt::format("answer-{}", next_id_.fetch_add(1));
    request.prompt = std::move(prompt.tokens);
    request.sampling = std::move(plan.sampling);
    if (!request.sampling.seed.has_value()) request.sampling.seed = SystemSeed();
    const uint64_t seed = *request.sampling.seed;
    request.max_tokens = plan.max_tokens;
    request.may_shorten = plan.limit_is_default;
    request.min_tokens = options.min_tokens;
    request.stop_tokens = std::move(plan.stop_tokens);
    OSCAR_ASSIGN_OR_RETURN(auto handle, host_->engine().Submit(std::move(request)));
    return std::make_unique<RunningAnswer>(std::move(handle), host_->dialogue().tokenizer(),
                                           std::move(plan.format), seed, prompt_tokens);
  }

  std::unique_ptr<HostedModel> host_;
  std::atomic<uint64_t> next_id_{0};
};

}  // namespace

Result<std::unique_ptr<Engine>> Engine::Load(const EngineOptions& options) {
  if (options.max_running < 1 || options.max_waiting < 0) {
    return Unexpected(InvalidArgument(
        fmt::format("max_running is {} and max_waiting is {}; at least 1 and 0 are needed",
                    options.max_running, options.max_waiting)));
  }
  EngineServiceOptions service;
  service.max_running = options.max_running;
  service.max_waiting = options.max_waiting;
  service.prefix_cache = options.prefix_cache;
  service.deterministic = options.deterministic;
  OSCAR_ASSIGN_OR_RETURN(auto host, HostedModel::Prepare(options.model, {}, service));
  OSCAR_RETURN_IF_ERROR(host->Load());
  return std::make_unique<HostedEngine>(std::move(host));
}

}  // namespace oscar
