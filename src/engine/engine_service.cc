// The engine thread and what other threads may touch: an inbox, a few flags and a copy of the
// statistics, each behind its mutex. Everything else belongs to the thread.
#include <fmt/core.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include "base/check.h"
#include "base/log.h"
#include "base/progress.h"
#include "engine/event_channel.h"
#include "engine/page_budget.h"
#include "engine/scheduler.h"
#include "engine/service.h"

namespace oscar {
namespace {

using Clock = std::chrono::steady_clock;

// How often the walk over all pages is done for Stats and Sequences while the engine is busy.
constexpr auto kMeasureInterval = std::chrono::milliseconds(100);
constexpr int kMaxTopLogprobs = 1024;

// What wakes the engine; outlives the service where a handle does.
class Doorbell {
 public:
  void Ring() {
    {
      const std::lock_guard lock(mutex_);
      rung_ = true;
    }
    ready_.notify_one();
  }
  void Wait(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    ready_.wait(lock, stop, [&] { return rung_; });
    rung_ = false;
  }

 private:
  std::mutex mutex_;
  std::condition_variable_any ready_;
  bool rung_ = false;
};

class Handle : public RequestHandle {
 public:
  Handle(std::shared_ptr<EventChannel> channel, std::shared_ptr<Doorbell> bell)
      : channel_(std::move(channel)), bell_(std::move(bell)) {}
  ~Handle() override { Handle::Cancel(); }

  EngineEvent Next(std::chrono::milliseconds timeout) override { return channel_->Next(timeout); }
  void Cancel() override {
    channel_->Cancel();
    bell_->Ring();
  }

 private:
  std::shared_ptr<EventChannel> channel_;
  std::shared_ptr<Doorbell> bell_;
};

Status CheckTokens(std::span<const int32_t> tokens, int vocab_size, const char* param) {
  for (int32_t token : tokens) {
    if (token < 0 || token >= vocab_size) {
      return InvalidArgument(
                 fmt::format("token id {} is outside the vocabulary of {}", token, vocab_size))
          .WithParam(param);
    }
  }
  return {};
}

class Service : public EngineService {
 public:
  Service(Model& model, PagePool& pool, ThreadPool& threads, const EngineServiceOptions& options)
      : options_(options),
        pool_(pool),
        config_(model.kv().cache()),
        by_layer_(model.CanReadByLayer() && config_.seals()),
        vocab_size_(model.spec().vocab_size),
        max_context_(options.max_context > 0
                         ? std::min(options.max_context, model.spec().max_positions)
                         : model.spec().max_positions),
        budget_(pool.budget()),
        places_(options.max_running),
        scheduler_(model, pool, threads, options) {
    scheduler_.CountInto(&stats_);
    thread_ = std::jthread([this](const std::stop_token& stop) { Run(stop); });
  }

  ~Service() override {
    thread_.request_stop();
    thread_.join();
    const Status status = Unavailable("the engine has stopped");
    TakeInbox();
    scheduler_.FailAll(status);
  }

  Result<std::unique_ptr<RequestHandle>> Submit(EngineRequest request) override;

  EngineStats Stats() const override {
    EngineStats stats;
    {
      const std::lock_guard lock(snapshot_mutex_);
      stats = stats_;
    }
    // What was taken from the inbox since the last figures waits too: nothing is lost between them.
    const std::lock_guard lock(inbox_mutex_);
    stats.waiting = std::max<int64_t>(0, in_flight_ - stats.running);
    return stats;
  }
  std::vector<SequenceInfo> Sequences() const override {
    const std::lock_guard lock(snapshot_mutex_);
    return sequences_;
  }
  Status Health() const override {
    const std::lock_guard lock(inbox_mutex_);
    return health_;
  }
  void Drain() override {
    const std::lock_guard lock(inbox_mutex_);
    if (health_.ok()) health_ = Unavailable("the server is shutting down");
    draining_ = true;
  }
  bool Drained() const override {
    const std::lock_guard lock(inbox_mutex_);
    return draining_ && in_flight_ == 0;
  }
  int64_t max_context() const override { return max_context_; }

 private:
  Status Check(const EngineRequest& request) const;
  Result<int64_t> LimitOf(const EngineRequest& request) const;
  void Run(const std::stop_token& stop);
  void TakeInbox();
  void Fail(const Status& status);
  void Publish(bool measure);

  const EngineServiceOptions options_;
  PagePool& pool_;
  const CacheConfig& config_;
  const bool by_layer_;  // prompts may be read layer by layer
  const int vocab_size_;
  const int64_t max_context_;
  const uint64_t budget_;

  mutable std::mutex inbox_mutex_;
  std::vector<std::unique_ptr<Sequence>> inbox_;  // guarded by inbox_mutex_, like the next five
  int64_t waiting_ = 0;                           // inbox and the scheduler's queue
  int64_t places_;                                // of the batch that newcomers find free
  int64_t in_flight_ = 0;                         // requests that have not ended
  bool draining_ = false;
  Status health_;

  mutable std::mutex snapshot_mutex_;
  EngineStats stats_;                    // guarded by snapshot_mutex_
  std::vector<SequenceInfo> sequences_;  // guarded by snapshot_mutex_

  std::shared_ptr<Doorbell> bell_ = std::make_shared<Doorbell>();
  Scheduler scheduler_;  // the engine thread's
  Clock::time_point measured_{};
  std::jthread thread_;
};

Status Service::Check(const EngineRequest& request) const {
  if (request.prompt.empty()) return InvalidArgument("the prompt is empty").WithParam("prompt");
  OSCAR_RETURN_IF_ERROR(CheckTokens(request.prompt, vocab_size_, "prompt"));
  OSCAR_RETURN_IF_ERROR(CheckTokens(request.stop_tokens, vocab_size_, "stop_token_ids"));
  if (request.rules != nullptr) {
    OSCAR_RETURN_IF_ERROR(CheckTokens(request.rules->allowed, vocab_size_, "allowed_token_ids"));
    for (const std::vector<int32_t>& run : request.rules->bad_words) {
      if (run.empty()) {
        return InvalidArgument("bad_words: a run without tokens").WithParam("bad_words");
      }
      OSCAR_RETURN_IF_ERROR(CheckTokens(run, vocab_size_, "bad_words"));
    }
  }
  OSCAR_RETURN_IF_ERROR(request.sampling.Validate(vocab_size_));
  if (request.max_tokens < 0) {
    return InvalidArgument(
               fmt::format("max_tokens is {}, must not be negative", request.max_tokens))
        .WithParam("max_tokens");
  }
  if (request.min_tokens < 0 ||
      (request.max_tokens > 0 && request.min_tokens > request.max_tokens)) {
    return InvalidArgument(fmt::format("min_tokens is {}, must be between 0 and max_tokens ({})",
                                       request.min_tokens, request.max_tokens))
        .WithParam("min_tokens");
  }
  if (request.top_logprobs < 0 || request.top_logprobs > kMaxTopLogprobs) {
    return InvalidArgument(fmt::format("top_logprobs is {}, must be between 0 and {}",
                                       request.top_logprobs, kMaxTopLogprobs))
        .WithParam("top_logprobs");
  }
  return {};
}

// How many tokens the request may generate.
Result<int64_t> Service::LimitOf(const EngineRequest& request) const {
  const auto prompt = static_cast<int64_t>(request.prompt.size());
  if (prompt >= max_context_) {
    return Unexpected(
        OutOfRange(fmt::format("the prompt has {} tokens, the context holds {} and the answer "
                               "needs at least one: shorten it, or raise --max-model-len where "
                               "the model allows",
                               prompt, max_context_))
            .WithParam("prompt"));
  }
  const int64_t room = max_context_ - prompt;
  const int64_t wanted = request.max_tokens > 0 ? std::min(request.max_tokens, room) : room;
  // The last token sampled is never computed.
  int64_t fits = LargestTotal(config_, prompt, prompt + wanted - 1, budget_);
  Reading reading = Reading::kByChunk;
  if (fits < prompt && by_layer_ && !request.want_prompt_logprobs) {
    reading = Reading::kByLayer;
    fits = LargestTotal(config_, prompt, prompt + wanted - 1, budget_, reading);
  }
  if (fits < prompt) {
    CacheConfig small_cells = config_;
    small_cells.cell = kPageTokens;
    const bool cells_help = PeakBytes(small_cells, prompt, prompt, reading) <= budget_;
    return Unexpected(
        OutOfRange(fmt::format("the prompt has {} tokens, whose cache takes {}; all of the cache "
                               "is {}: shorten it{} raise --kv-memory{}",
                               prompt, FormatBytes(PeakBytes(config_, prompt, prompt, reading)),
                               FormatBytes(budget_), cells_help ? "," : " or",
                               cells_help ? " or lower --prefill-cell" : ""))
            .WithParam("prompt"));
  }
  const int64_t limit = fits - prompt + 1;
  if (limit < wanted && request.max_tokens > 0 && !request.may_shorten) {
    return Unexpected(
        OutOfRange(
            fmt::format("{} prompt tokens and max_tokens {} take {} of cache; all of it is "
                        "{}, enough for max_tokens {}: lower it or raise --kv-memory",
                        prompt, request.max_tokens,
                        FormatBytes(PeakBytes(config_, prompt, prompt + wanted - 1, reading)),
                        FormatBytes(budget_), limit))
            .WithParam("max_tokens"));
  }
  return limit;
}

Result<std::unique_ptr<RequestHandle>> Service::Submit(EngineRequest request) {
  OSCAR_RETURN_IF_ERROR(Check(request));
  OSCAR_ASSIGN_OR_RETURN(const int64_t limit, LimitOf(request));
  auto channel = std::make_shared<EventChannel>(limit, std::move(request.on_event));
  auto sequence = std::make_unique<Sequence>(std::move(request), channel, limit, config_, pool_);
  {
    const std::lock_guard lock(inbox_mutex_);
    OSCAR_RETURN_IF_ERROR(health_);
    if (waiting_ >= options_.max_waiting + places_) {
      return Unexpected(ResourceExhausted(
          fmt::format("the queue is full: {} requests wait; try again later", waiting_)));
    }
    inbox_.push_back(std::move(sequence));
    ++waiting_;
    ++in_flight_;
  }
  bell_->Ring();
  return std::make_unique<Handle>(std::move(channel), bell_);
}

void Service::TakeInbox() {
  std::vector<std::unique_ptr<Sequence>> taken;
  {
    const std::lock_guard lock(inbox_mutex_);
    taken.swap(inbox_);
  }
  for (auto& sequence : taken) scheduler_.Enqueue(std::move(sequence));
}

void Service::Fail(const Status& status) {
  LogError("the engine has failed: {}", status.ToString());
  {
    const std::lock_guard lock(inbox_mutex_);
    health_ = Unavailable(fmt::format("the engine has failed: {}", status.message()));
  }
  // After this no request can enter, so those taken now are the last.
  TakeInbox();
  scheduler_.FailAll(status);
}

void Service::Publish(bool measure) {
  EngineStats stats;
  {
    const std::lock_guard lock(snapshot_mutex_);
    stats = stats_;
  }
  scheduler_.CountInto(&stats);
  std::vector<SequenceInfo> sequences;
  if (measure) {
    scheduler_.MeasureInto(&stats);
    sequences = scheduler_.Describe();
    measured_ = Clock::now();
  }
  {
    const std::lock_guard lock(snapshot_mutex_);
    stats_ = stats;
    if (measure) sequences_ = std::move(sequences);
  }
  const std::lock_guard lock(inbox_mutex_);
  const auto arrived = static_cast<int64_t>(inbox_.size());
  waiting_ = stats.waiting + arrived;
  // Where some had to stay outside, for want of memory if not of places, nobody gets in at once.
  places_ = stats.waiting > 0 ? 0 : std::max<int64_t>(0, options_.max_running - stats.running);
  in_flight_ = stats.running + waiting_;
}

void Service::Run(const std::stop_token& stop) {
  try {
    while (!stop.stop_requested()) {
      TakeInbox();
      if (scheduler_.idle()) {
        bell_->Wait(stop);
        continue;
      }
      const Status status = scheduler_.Step();
      if (!status.ok()) Fail(status);
      Publish(scheduler_.idle() || Clock::now() - measured_ >= kMeasureInterval);
    }
  } catch (const std::exception& error) {  // bad_alloc, from a library
    Fail(Internal(error.what()));
    Publish(true);
  }
}

}  // namespace

std::unique_ptr<EngineService> MakeEngineService(Model& model, PagePool& pool, ThreadPool& threads,
                                                 const EngineServiceOptions& options) {
  return std::make_unique<Service>(model, pool, threads, options);
}

}  // namespace oscar
