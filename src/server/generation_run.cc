#include "server/generation_run.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/log.h"

namespace oscar::server {
namespace {

using std::chrono::milliseconds;

// Bytes of a stream that are formatted before they are sent, at most one update over.
constexpr size_t kMaxStepBytes = size_t{32} << 10;

double Seconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

}  // namespace

GenerationRun::GenerationRun(ApiServer& server, const ApiServer::Context& context,
                             std::string endpoint, std::string request_id,
                             const GenerationParams& params, std::unique_ptr<AnswerWriter> writer,
                             std::unique_ptr<Generation> generation)
    : server_(server),
      model_(context.model),
      endpoint_(std::move(endpoint)),
      request_id_(std::move(request_id)),
      key_id_(context.key.id),
      is_stream_(params.stream),
      continuous_usage_(params.continuous_usage_stats),
      prompt_logprobs_(params.prompt_logprobs.has_value()),
      return_token_ids_(params.return_token_ids),
      num_best_(params.n),
      received_(context.received),
      writer_(std::move(writer)),
      generation_(std::move(generation)),
      last_write_(Clock::now()) {
  ++server_.active_;
  if (server_.options_.request_timeout > milliseconds{0}) {
    deadline_ = received_ + server_.options_.request_timeout;
  }
  std::lock_guard lock(server_.runs_mutex_);
  server_.wakes_.emplace(this, context.http.wake);
}

GenerationRun::~GenerationRun() {
  {
    std::lock_guard lock(server_.runs_mutex_);
    server_.wakes_.erase(this);
  }
  if (!recorded_) Gone();
  if (streaming_) --server_.metrics_.streams;
  --server_.active_;
}

AnswerSource::Step GenerationRun::Next(Peer peer) {
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
      writer_->Keep(update.choice, std::move(update.piece));
    }
  }
  return step;
}

HttpResponse GenerationRun::Whole() {
  std::vector<ChoiceResult> choices;
  for (const size_t i : generation_->Best(num_best_)) {
    ChoiceResult& choice = choices.emplace_back();
    choice.index = static_cast<int64_t>(i);
    choice.finish = generation_->finish(i);
    if (return_token_ids_) choice.prompt_token_ids = generation_->prompt_tokens(i);
    if (prompt_logprobs_) choice.prompt_logprobs = generation_->prompt_logprobs(i);
  }
  const std::string reason = choices.front().finish.finish_reason;
  HttpResponse response;
  response.body = writer_->Whole(std::move(choices), generation_->usage());
  response.headers.emplace_back("X-Request-Id", request_id_);
  Record(reason, 200);
  return response;
}

// Nothing has happened. A stream begins with the engine's first word, so that what fails before
// it is an ordinary HTTP error, or when it is time for a ping.
void GenerationRun::Wait(Peer peer, Step* step) {
  if (is_stream_) {
    const auto ping_at = last_write_ + server_.options_.ping_interval;
    if (Clock::now() >= ping_at || peer == Peer::kHalfClosed) {
      const bool begins = !streaming_;
      Begin(step);
      if (!begins) Send(writer_->ping(), step);
    }
    step->again = last_write_ + server_.options_.ping_interval;
  }
  if (deadline_.has_value()) step->again = std::min(step->again, *deadline_);
}

void GenerationRun::Begin(Step* step) {
  if (std::exchange(streaming_, true)) return;
  ++server_.metrics_.streams;
  step->head.emplace();
  step->head->content_type = "text/event-stream; charset=utf-8";
  step->head->headers = {
      {"X-Request-Id", request_id_}, {"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}};
  last_write_ = Clock::now();
  Send(writer_->Begin(generation_->usage(), Continuous()), step);
}

void GenerationRun::Forward(Generation::Update& update, Step* step) {
  Begin(step);
  if (update.kind == Kind::kDone) {
    Send(writer_->End(generation_->usage()), step);
    step->done = true;
    Record(generation_->finish(0).finish_reason, 200);
    return;
  }
  Send(writer_->Piece(update.choice, std::move(update.piece), Continuous()), step);
  if (update.kind != Kind::kChoiceDone) return;
  Send(writer_->ChoiceEnd(update.choice, generation_->finish(update.choice), Continuous()), step);
}

void GenerationRun::Send(std::string_view frame, Step* step) {
  if (frame.empty()) return;
  last_write_ = Clock::now();
  step->bytes += frame;
}

std::optional<Usage> GenerationRun::Continuous() const {
  if (!continuous_usage_) return std::nullopt;
  return generation_->usage();
}

// What ends a request from outside: its deadline, or the server.
std::optional<ApiError> GenerationRun::Interrupted() const {
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

void GenerationRun::Fail(const ApiError& error, Step* step) {
  generation_->Cancel();
  Record("error", error.http_status);
  step->done = true;
  if (streaming_) {
    Send(writer_->Fail(error), step);
    return;
  }
  step->head = ErrorResponse(error);
  step->head->headers.emplace_back("X-Request-Id", request_id_);
}

void GenerationRun::Gone() {
  generation_->Cancel();
  ++server_.metrics_.cancelled;
  Record("cancelled", 499);
}

void GenerationRun::Record(std::string_view finish, int status) {
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
      const double tpot =
          Seconds(timing.last_token - timing.first_token) / static_cast<double>(timing.tokens - 1);
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
      request_id_, endpoint_, status, finish, key_id_.empty() ? "-" : key_id_, usage.prompt_tokens,
      usage.cached_tokens, usage.completion_tokens, first_token * 1e3, per_token * 1e3,
      Seconds(now - received_) * 1e3);
}

}  // namespace oscar::server
