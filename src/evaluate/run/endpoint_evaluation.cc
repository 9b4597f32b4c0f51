#include "run/endpoint_evaluation.h"

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

#include "base/log.h"
#include "base/progress.h"
#include "run/eval_items.h"
#include "run/item_log.h"
#include "scoring/scoring.h"
#include "tasks/prompts.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;

struct Question {
  const EvalTask* task;
  const EvalItem* item;
  int repeat;
};

// Texts beyond their task's limit lose their middle, where the tokenizer is known.
Status CutTexts(const fs::path& tokenizer, int64_t context, EvalSuite& suite,
                std::vector<std::string>& warnings) {
  std::optional<PromptEncoder> encoder;
  for (EvalTask& task : suite.tasks) {
    if (task.max_input <= 0) continue;
    if (tokenizer.empty()) {
      warnings.push_back(fmt::format(
          "{} and perhaps others: texts of more than {} tokens are not cut, since the server's "
          "tokenizer is not known; name a directory that holds it with --model",
          task.name, task.max_input));
      return {};
    }
    if (!encoder.has_value()) {
      OSCAR_ASSIGN_OR_RETURN(encoder, PromptEncoder::Load(tokenizer));
    }
    for (EvalItem& item : task.items) {
      OSCAR_ASSIGN_OR_RETURN(EncodedPrompt prompt,
                             encoder->Encode(task, item, item.max_tokens, context));
      item.prompt = std::move(prompt.text);
    }
  }
  return {};
}

}  // namespace

Result<EvalResults> EvaluateEndpoint(const EvalOptions& options, const EndpointOptions& endpoint) {
  std::error_code error;
  fs::create_directories(options.out, error);
  if (error) {
    return Unexpected(
        Unavailable(fmt::format("{}: cannot be made: {}", options.out.string(), error.message())));
  }
  OSCAR_ASSIGN_OR_RETURN(const Endpoint server, Endpoint::Connect(endpoint));
  const std::string label = server.model();
  EvalSuite suite = options.suite;
  std::vector<std::string> warnings;
  OSCAR_RETURN_IF_ERROR(CutTexts(options.model.model, server.context(), suite, warnings));
  for (const std::string& warning : warnings) LogWarning("{}", warning);
  ItemLog log;
  OSCAR_RETURN_IF_ERROR(log.Open(options.out / "items.jsonl"));
  const auto settings_of = [&](const Question& job) {
    return fmt::format("endpoint {} {:016x} {}", endpoint.url, HashItem(*job.task, *job.item),
                       options.seed);
  };
  const auto key_of = [&](const Question& job) {
    return ItemKey{label, job.task->name, job.item->id, job.repeat};
  };
  std::vector<Question> all, missing;
  for (const EvalTask& task : suite.tasks) {
    for (const EvalItem& item : task.items) {
      for (int repeat = 0; repeat < task.repeats; ++repeat) all.push_back({&task, &item, repeat});
    }
  }
  for (const Question& job : all) {
    if (log.Find(settings_of(job), key_of(job)) == nullptr) missing.push_back(job);
  }
  std::optional<Progress> progress;
  if (options.show_progress) progress.emplace("asking", missing.size(), "items");
  std::mutex mutex;  // the log, the bar, the troubles
  std::vector<std::string> troubles;
  Status fatal;
  std::atomic<size_t> next{0};
  // A server that has gone away is not waited for once an item.
  const int most_in_a_row = 2 * std::max(endpoint.parallel, 4);
  int in_a_row = 0;
  const auto work = [&] {
    for (size_t index = next++; index < missing.size(); index = next++) {
      const Question& job = missing[index];
      uint64_t seed = options.seed + static_cast<uint64_t>(job.repeat) * 1000003u;
      for (char c : job.item->id) seed = seed * 31 + static_cast<unsigned char>(c);
      const Result<EndpointReply> reply = server.Complete(*job.item, job.task->sampling, seed);
      Result<double> score = reply.has_value()
                                 ? ScoreOutput(job.task->scorer, *job.item, reply->text)
                                 : Result<double>(Unexpected(reply.error()));
      const std::lock_guard lock(mutex);
      if (progress.has_value()) progress->Add(1);
      if (!reply.has_value()) {
        troubles.push_back(fmt::format("{}: {}", job.item->id, reply.error().message()));
        in_a_row = reply.error().code() == StatusCode::kUnavailable ? in_a_row + 1 : 0;
        if (in_a_row == most_in_a_row) {
          LogWarning("{} requests in a row had no answer; the rest is not asked", in_a_row);
          next = missing.size();
        }
        continue;
      }
      in_a_row = 0;
      if (!score.has_value()) {
        if (fatal.ok()) fatal = score.error();
        next = missing.size();
        return;
      }
      ItemRecord record;
      record.settings = settings_of(job);
      record.method = label;
      record.task = job.task->name;
      record.id = job.item->id;
      record.repeat = job.repeat;
      record.answer = *score;
      record.prompt_tokens = reply->prompt_tokens;
      record.output_tokens = reply->output_tokens;
      record.bucket = job.item->bucket;
      record.output = ReadAnswer(job.task->scorer, reply->text).substr(0, kMaxOutputChars);
      if (Status status = log.Append(std::move(record)); !status.ok() && fatal.ok()) {
        fatal = std::move(status);
        next = missing.size();
      }
    }
  };
  std::vector<std::thread> workers;
  for (int i = 0; i < std::max(endpoint.parallel, 1); ++i) workers.emplace_back(work);
  for (std::thread& worker : workers) worker.join();
  OSCAR_RETURN_IF_ERROR(fatal);
  MethodScore score;
  score.label = label;
  score.description = "served at " + endpoint.url;
  score.is_remote = true;
  std::map<std::string, std::vector<const ItemRecord*>> records;
  std::vector<ItemRecord> failed;
  failed.reserve(all.size());
  for (const Question& job : all) {
    const ItemRecord* record = log.Find(settings_of(job), key_of(job));
    if (record == nullptr) {
      failed.push_back(FailedRecord(*job.task, *job.item, job.repeat));
      record = &failed.back();
    }
    records[job.task->name].push_back(record);
  }
  if (failed.size() == all.size() && !all.empty()) {
    return Unexpected(Unavailable("no request was answered; the first: " + troubles.front()));
  }
  if (!failed.empty()) {
    warnings.push_back(fmt::format(
        "{} of {} requests have no answer and count as wrong; the same command asks them again: {}",
        failed.size(), all.size(), ListSome(troubles)));
    LogWarning("{}", warnings.back());
  }
  for (const auto& [name, list] : records) score.tasks[name] = ScoreTask(list);
  EvalResults out;
  out.model = label;
  out.prefill = "the server's own";
  out.warnings = suite.warnings;
  out.warnings.insert(out.warnings.end(), warnings.begin(), warnings.end());
  out.settings = {{"endpoint", endpoint.url},
                  {"seed", std::to_string(options.seed)},
                  {"decoding", DescribeSampling(suite)}};
  out.methods.push_back(std::move(score));
  return out;
}

}  // namespace oscar
