// The two generation endpoints: from a parsed request to a plan, and from the engine's events to a
// body or a stream.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <random>
#include <utility>

#include "base/log.h"
#include "openai/response.h"
#include "server/api_server.h"

namespace oscar::server {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Bytes of a stream that are formatted before they are sent, at most one update over.
constexpr size_t kMaxStepBytes = size_t{32} << 10;
constexpr int64_t kDefaultCompletionTokens = 16;

double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

uint64_t SeedFromSystem() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

// The client's own id, from the header or from the body, else the one sampled for it.
std::string RequestIdOf(const HttpRequest& http, const std::string& sampled,
                        const GenerationParams& params) {
  const std::string* header = FindHeader(http.headers, "X-Request-Id");
  const bool from_header = header != nullptr && *header == sampled;
  return from_header || params.request_id.empty() ? sampled : params.request_id;
}

// Fits the wanted number of tokens to the context; `fallback` (0: all that is left) and at least
// `least` of them where the request names none. All three numbers are in the message.
ApiResult<int64_t> FitTokens(std::optional<int64_t> wanted, int64_t fallback, int64_t least,
                             int64_t prompt, int64_t context) {
  const int64_t room = context - prompt;
  const int64_t needed = wanted.value_or(std::max<int64_t>(least, 1));
  if (needed > room) {
    ApiError error = MakeApiError(
        400, "context_length_exceeded",
        fmt::format("the prompt has {} tokens and {} more were asked for, but the context holds {}",
                    prompt, needed, context));
    error.param = "max_tokens";
    return tl::unexpected(std::move(error));
  }
  if (wanted.has_value()) return *wanted;
  return fallback > 0 ? std::min(std::max(fallback, least), room) : room;
}

// An answer is held in memory until all of it is there, unless it is streamed, and then at least
// what it tells of prompts. Refused before anything is computed.
std::optional<ApiError> CheckAnswerSize(const ServedModel& served, const GenerationParams& params,
                                        const GenerationPlan& plan, int64_t max_tokens) {
  const int64_t of_token =
      (params.logprobs ? 1 + params.top_logprobs : 0) + (params.return_token_ids ? 1 : 0);
  const int64_t of_prompt_token = (plan.echo && params.logprobs ? 1 + params.top_logprobs : 0) +
                                  (params.prompt_logprobs ? 1 + *params.prompt_logprobs : 0) +
                                  (params.return_token_ids ? 1 : 0);
  const int64_t longest = plan.prefill_only ? 0 : max_tokens;
  int64_t of_prompts = 0, of_answers = 0;
  for (const GenerationPrompt& prompt : plan.prompts) {
    const auto length = static_cast<int64_t>(prompt.tokens.size());
    of_prompts += params.n * length * of_prompt_token;
    of_answers += params.n * longest * of_token;
  }
  const int64_t limit = served.max_answer_logprobs();
  if (of_prompts + (params.stream ? 0 : of_answers) <= limit) return std::nullopt;
  ApiError error = MakeApiError(
      400, "answer_too_large",
      fmt::format("the answer could name {} tokens with logprobs or ids ({} choices of up to {} "
                  "tokens) and holds {} at most; lower max_tokens, n, the number of prompts or of "
                  "logprobs{}",
                  of_prompts + of_answers, params.n * static_cast<int64_t>(plan.prompts.size()),
                  longest, limit, of_prompts <= limit ? ", or set stream" : ""));
  error.param = "max_tokens";
  return error;
}

}  // namespace

// One request from admission to the log line: the source of its answer.
class GenerationRun final : public AnswerSource {
 public:
  GenerationRun(ApiServer& server, const ApiServer::Context& context, std::string endpoint,
                std::string request_id, ResponseHead head, const GenerationParams& params,
                std::unique_ptr<Generation> generation)
      : server_(server),
        model_(context.model),
        endpoint_(std::move(endpoint)),
        request_id_(std::move(request_id)),
        key_id_(context.key.id),
        head_(std::move(head)),
        is_stream_(params.stream),
        include_usage_(params.include_usage),
        continuous_usage_(params.continuous_usage_stats),
        prompt_logprobs_(params.prompt_logprobs.has_value()),
        received_(context.received),
        generation_(std::move(generation)),
        offsets_(generation_->num_choices(), 0),
        last_write_(Clock::now()) {
    ++server_.active_;
    if (server_.options_.request_timeout > milliseconds{0}) {
      deadline_ = received_ + server_.options_.request_timeout;
    }
    if (!is_stream_) {
      results_.resize(generation_->num_choices());
      for (size_t i = 0; i < results_.size(); ++i) {
        results_[i].index = static_cast<int64_t>(i);
        if (head_.return_token_ids) results_[i].prompt_token_ids = generation_->prompt_tokens(i);
      }
    }
    std::lock_guard lock(server_.runs_mutex_);
    server_.wakes_.emplace(this, context.http.wake);
  }
  ~GenerationRun() override {
    {
      std::lock_guard lock(server_.runs_mutex_);
      server_.wakes_.erase(this);
    }
    if (!recorded_) Gone();
    if (streaming_) --server_.metrics_.streams;
    --server_.active_;
  }
  GenerationRun(const GenerationRun&) = delete;
  GenerationRun& operator=(const GenerationRun&) = delete;

  Step Next(Peer peer) override {
    Step step;
    if (peer == Peer::kGone) {
      if (!recorded_) Gone();
      step.done = true;
      return step;
    }
    while (!step.done && !step.compose && step.bytes.size() < kMaxStepBytes) {
      Generation::Update update = generation_->Next();
      if (auto error = Interrupted()) {
        Fail(*error, &step);
      } else if (update.kind == Kind::kFailed) {
        Fail(update.error, &step);
      } else if (update.kind == Kind::kIdle) {
        Wait(peer, &step);
        break;
      } else if (is_stream_) {
        Forward(update, &step);
      } else if (update.kind == Kind::kDone) {
        step.compose = [this] { return Whole(); };
      } else {
        results_[update.choice].piece.Append(std::move(update.piece));
      }
    }
    return step;
  }

 private:
  using Kind = Generation::Update::Kind;

  HttpResponse Whole() {
    for (size_t i = 0; i < results_.size(); ++i) {
      results_[i].finish = generation_->finish(i);
      if (prompt_logprobs_) results_[i].prompt_logprobs = generation_->prompt_logprobs(i);
    }
    HttpResponse response;
    response.body = ResponseBody(head_, results_, generation_->usage());
    response.headers.emplace_back("X-Request-Id", request_id_);
    Record(results_.front().finish.finish_reason, 200);
    return response;
  }

  // Nothing has happened. A stream begins with the engine's first word, so that what fails before
  // it is an ordinary HTTP error, or when it is time for a ping.
  void Wait(Peer peer, Step* step) {
    if (is_stream_) {
      const auto ping_at = last_write_ + server_.options_.ping_interval;
      if (Clock::now() >= ping_at || peer == Peer::kHalfClosed) {
        const bool begins = !streaming_;
        Begin(step);
        if (!begins) Send(kSsePing, step);
      }
      step->again = last_write_ + server_.options_.ping_interval;
    }
    if (deadline_.has_value()) step->again = std::min(step->again, *deadline_);
  }

  void Begin(Step* step) {
    if (std::exchange(streaming_, true)) return;
    ++server_.metrics_.streams;
    step->head.emplace();
    step->head->content_type = "text/event-stream; charset=utf-8";
    step->head->headers = {
        {"X-Request-Id", request_id_}, {"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}};
    last_write_ = Clock::now();
    if (!head_.chat) return;
    for (size_t i = 0; i < generation_->num_choices(); ++i) {
      Send(SseFrame(RoleChunk(head_, static_cast<int64_t>(i), Continuous())), step);
    }
  }

  void Forward(Generation::Update& update, Step* step) {
    Begin(step);
    if (update.kind == Kind::kDone) {
      if (include_usage_) Send(SseFrame(UsageChunk(head_, generation_->usage())), step);
      Send(kSseDone, step);
      step->done = true;
      Record(generation_->finish(0).finish_reason, 200);
      return;
    }
    const auto index = static_cast<int64_t>(update.choice);
    const bool has_text = !update.piece.empty() ||
                          (head_.logprobs && !update.piece.logprobs.empty()) ||
                          (head_.return_token_ids && !update.piece.token_ids.empty());
    if (has_text) {
      int64_t* const offset = &offsets_[update.choice];
      Send(SseFrame(PieceChunk(head_, index, update.piece, offset, Continuous())), step);
    }
    if (update.kind != Kind::kChoiceDone) return;
    const FinishInfo finish = generation_->finish(update.choice);
    Send(SseFrame(FinishChunk(head_, index, finish, Continuous())), step);
  }

  void Send(std::string_view frame, Step* step) {
    last_write_ = Clock::now();
    step->bytes += frame;
  }

  std::optional<Usage> Continuous() const {
    if (!continuous_usage_) return std::nullopt;
    return generation_->usage();
  }

  // What ends a request from outside: its deadline, or the server.
  std::optional<ApiError> Interrupted() const {
    if (server_.aborting_) {
      return MakeApiError(503, "draining", "the server is shutting down");
    }
    if (deadline_.has_value() && Clock::now() >= *deadline_) {
      return MakeApiError(408, "request_timeout",
                          fmt::format("the request took longer than {} s",
                                      server_.options_.request_timeout.count() / 1000));
    }
    return std::nullopt;
  }

  void Fail(const ApiError& error, Step* step) {
    generation_->Cancel();
    Record("error", error.http_status);
    step->done = true;
    if (streaming_) {
      Send(SseFrame(ErrorBody(error)), step);
      Send(kSseDone, step);
      return;
    }
    step->head = ErrorResponse(error);
    step->head->headers.emplace_back("X-Request-Id", request_id_);
  }

  void Gone() {
    generation_->Cancel();
    ++server_.metrics_.cancelled;
    Record("cancelled", 499);
  }

  void Record(std::string_view finish, int status) {
    recorded_ = true;
    ServerMetrics& metrics = server_.metrics_;
    const auto now = Clock::now();
    metrics.requests.Add({{"endpoint", endpoint_}, {"finish_reason", std::string(finish)}});
    metrics.request_duration.Observe(Seconds(now - received_));
    double first_token = 0.0, per_token = 0.0;  // of the slowest choice
    for (size_t i = 0; i < generation_->num_choices(); ++i) {
      const Generation::Timing& timing = generation_->timing(i);
      if (timing.has_started) metrics.queue.Observe(Seconds(timing.started - timing.submitted));
      if (!timing.has_token) continue;
      const double ttft = Seconds(timing.first_token - received_);
      metrics.time_to_first_token.Observe(ttft);
      if (timing.has_started) metrics.prefill.Observe(Seconds(timing.first_token - timing.started));
      metrics.decode.Observe(Seconds(timing.last_token - timing.first_token));
      if (timing.tokens > 1) {
        const double tpot = Seconds(timing.last_token - timing.first_token) /
                            static_cast<double>(timing.tokens - 1);
        metrics.time_per_output_token.Observe(tpot);
        per_token = std::max(per_token, tpot);
      }
      first_token = std::max(first_token, ttft);
    }
    const Usage usage = generation_->usage();
    metrics.request_prompt_tokens.Observe(static_cast<double>(usage.prompt_tokens));
    metrics.request_generation_tokens.Observe(static_cast<double>(usage.completion_tokens));
    LogInfo(
        "{} {} status={} finish={} key={} prompt={} cached={} completion={} ttft_ms={:.1f} "
        "tpot_ms={:.2f} total_ms={:.1f}",
        request_id_, endpoint_, status, finish, key_id_.empty() ? "-" : key_id_,
        usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, first_token * 1e3,
        per_token * 1e3, Seconds(now - received_) * 1e3);
  }

  ApiServer& server_;
  std::shared_ptr<const ServedModel> model_;
  std::string endpoint_, request_id_, key_id_;
  ResponseHead head_;
  bool is_stream_, include_usage_, continuous_usage_, prompt_logprobs_;
  Clock::time_point received_;
  std::optional<Clock::time_point> deadline_;
  std::unique_ptr<Generation> generation_;
  std::vector<int64_t> offsets_;       // of a stream's choices: text so far
  std::vector<ChoiceResult> results_;  // of a whole answer
  Clock::time_point last_write_;
  bool streaming_ = false;  // the stream's head is out
  bool recorded_ = false;
};

HttpResponse ApiServer::Generate(const Context& context, std::string endpoint,
                                 const GenerationParams& params, GenerationPlan plan) {
  const ServedModel& served = *context.model;
  const bool chat = plan.chat;
  const std::string request_id = RequestIdOf(context.http, context.request_id, params);
  int64_t longest = 0;
  for (GenerationPrompt& prompt : plan.prompts) {
    if (params.truncate_prompt_tokens.has_value() &&
        static_cast<int64_t>(prompt.tokens.size()) > *params.truncate_prompt_tokens) {
      prompt.tokens.erase(prompt.tokens.begin(),
                          prompt.tokens.end() - *params.truncate_prompt_tokens);
    }
    if (prompt.tokens.empty()) {
      return ErrorResponse(InvalidValue(chat ? "messages" : "prompt", "the prompt has no tokens"));
    }
    longest = std::max(longest, static_cast<int64_t>(prompt.tokens.size()));
    if (plan.echo)
      prompt.echo_text = served.dialogue->tokenizer().Decode(prompt.tokens, /*skip_special=*/false);
  }
  plan.prefill_only = params.max_tokens == 0;
  const auto max_tokens =
      FitTokens(plan.prefill_only ? std::optional<int64_t>(1) : params.max_tokens,
                chat ? served.dialogue->defaults().max_tokens : kDefaultCompletionTokens,
                params.min_tokens, longest, served.engine->max_context());
  if (!max_tokens.has_value()) return ErrorResponse(max_tokens.error());
  if (const auto error = CheckAnswerSize(served, params, plan, *max_tokens)) {
    return ErrorResponse(*error);
  }

  plan.request_id = request_id;
  plan.choices_per_prompt = params.n;
  plan.seed = params.seed.has_value() ? static_cast<uint64_t>(*params.seed) : SeedFromSystem();
  LogDebug("{} seed={}", request_id, plan.seed);
  plan.keep_prompt_logprobs = params.prompt_logprobs.has_value();
  plan.prompt_logprobs = (plan.echo && params.logprobs) || plan.keep_prompt_logprobs;
  plan.top_logprobs = static_cast<size_t>(params.top_logprobs);
  plan.prompt_top_logprobs = static_cast<size_t>(params.prompt_logprobs.value_or(0));
  plan.on_gap = [this](double seconds) { metrics_.inter_token.Observe(seconds); };
  CompletionOptions wanted;
  wanted.sampling = params.sampling;
  wanted.max_tokens = *max_tokens;
  wanted.min_tokens = params.min_tokens;
  wanted.stop = params.stop;
  wanted.stop_token_ids = params.stop_token_ids;
  wanted.ignore_eos = params.ignore_eos;
  wanted.include_stop = params.include_stop_str_in_output;
  auto answer = served.dialogue->Plan(wanted);
  if (!answer.has_value()) return ErrorResponse(FromStatus(answer.error(), request_id));
  answer->format.skip_special = params.skip_special_tokens;
  answer->format.reasoning = plan.choice.reasoning;
  answer->format.starts_in_reasoning = plan.choice.starts_in_reasoning;
  static_cast<AnswerFormat&>(plan.choice) = std::move(answer->format);
  plan.choice.logprobs = params.logprobs;
  plan.choice.keep_token_ids = params.return_token_ids;
  EngineRequest& engine = plan.prototype;
  engine.on_event = context.http.wake;
  engine.sampling = std::move(answer->sampling);
  engine.max_tokens = answer->max_tokens;
  engine.may_shorten = !params.max_tokens.has_value();
  engine.min_tokens = params.min_tokens;
  engine.stop_tokens = std::move(answer->stop_tokens);
  engine.want_logprobs = params.logprobs;
  engine.top_logprobs =
      static_cast<int>(std::max(params.top_logprobs, params.prompt_logprobs.value_or(0)));
  engine.cache_salt = params.cache_salt + SaltOf(context.key);

  auto generation =
      Generation::Start(*served.engine, served.dialogue->tokenizer(), std::move(plan));
  if (!generation.has_value()) {
    metrics_.requests.Add({{"endpoint", endpoint}, {"finish_reason", "refused"}});
    LogInfo("{} {} status={} refused: {}", request_id, endpoint, generation.error().http_status,
            generation.error().message);
    return ErrorResponse(generation.error());
  }
  ResponseHead head;
  head.chat = chat;
  head.id = fmt::format("{}-{}", chat ? "chatcmpl" : "cmpl", request_id);
  head.created = static_cast<int64_t>(std::time(nullptr));
  head.model = params.model.empty() ? served.names.front() : params.model;
  head.fingerprint = served.fingerprint;
  head.usage_null = params.include_usage;
  head.logprobs = params.logprobs;
  head.return_token_ids = params.return_token_ids;
  HttpResponse response;
  response.source =
      std::make_unique<GenerationRun>(*this, context, std::move(endpoint), request_id,
                                      std::move(head), params, std::move(*generation));
  return response;
}

ApiResult<Prompt> TokenizeChat(const ServedModel& model, const ChatRequest& request,
                               std::string_view request_id) {
  if (!model.dialogue->has_chat()) {
    return tl::unexpected(
        MakeApiError(400, "no_chat_template",
                     fmt::format("this model has no chat template ({}); use /v1/completions",
                                 model.dialogue->no_chat_reason())));
  }
  TemplateInput input;
  input.messages = request.messages.get();
  input.tools = request.tools.get();
  input.template_arguments = request.template_kwargs.get();
  input.add_generation_prompt = request.add_generation_prompt;
  input.continue_final_message = request.continue_final_message;
  auto prompt = model.dialogue->Render(input);
  if (!prompt.has_value()) {
    // What exceeds a budget here will do so again: the client's error, not a moment's.
    const Status& status = prompt.error();
    ApiError error = status.code() == StatusCode::kResourceExhausted
                         ? MakeApiError(400, "template_budget_exceeded", status.message())
                         : FromStatus(status, request_id);
    if (error.http_status == 400 && error.param.empty()) error.param = "messages";
    return tl::unexpected(std::move(error));
  }
  return std::move(*prompt);
}

HttpResponse ApiServer::HandleChat(const Context& context) {
  const ServedModel& served = *context.model;
  auto request = ParseChatRequest(context.http.body, served.limits);
  if (!request.has_value()) return ErrorResponse(request.error());
  if (auto error = CheckModelName(served, request->params.model)) return ErrorResponse(*error);
  auto chat = TokenizeChat(served, *request, context.request_id);
  if (!chat.has_value()) return ErrorResponse(chat.error());
  GenerationPlan plan;
  plan.chat = true;
  plan.prompts.push_back({std::move(chat->tokens), ""});
  plan.choice.reasoning = chat->reasoning;
  plan.choice.starts_in_reasoning = chat->opens_reasoning;
  return Generate(context, "chat", request->params, std::move(plan));
}

HttpResponse ApiServer::HandleCompletions(const Context& context) {
  const ServedModel& served = *context.model;
  auto request = ParseCompletionRequest(context.http.body, served.limits);
  if (!request.has_value()) return ErrorResponse(request.error());
  if (auto error = CheckModelName(served, request->params.model)) return ErrorResponse(*error);
  GenerationPlan plan;
  plan.echo = request->echo;
  for (PromptInput& input : request->prompts) {
    if (input.is_tokens) {
      plan.prompts.push_back({std::move(input.tokens), ""});
      continue;
    }
    // A raw prompt: whoever writes it writes the special tokens too.
    auto prompt = served.dialogue->Encode(input.text);
    if (!prompt.has_value()) return ErrorResponse(FromStatus(prompt.error(), context.request_id));
    plan.prompts.push_back({std::move(prompt->tokens), ""});
  }
  return Generate(context, "completions", request->params, std::move(plan));
}

}  // namespace oscar::server
