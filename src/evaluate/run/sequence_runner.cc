#include "run/sequence_runner.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "engine/prompt_reader.h"
#include "measure/import_prompt.h"
#include "numeric/matrix.h"
#include "simd/vec_ops.h"

namespace oscar {
namespace {

bool Contains(std::span<const int32_t> tokens, int32_t token) {
  return std::find(tokens.begin(), tokens.end(), token) != tokens.end();
}

double MarginOf(std::span<const float> logits, int32_t token) {
  float best = -std::numeric_limits<float>::infinity();
  for (size_t i = 0; i < logits.size(); ++i) {
    if (i != static_cast<size_t>(token)) best = std::max(best, logits[i]);
  }
  return double{logits[static_cast<size_t>(token)]} - best;
}

// Keeps the margins nearest to zero, the nearest first.
void AddMargin(TokenMargin margin, std::vector<TokenMargin>& margins) {
  const auto nearer = [](const TokenMargin& a, const TokenMargin& b) {
    return std::fabs(a.margin) < std::fabs(b.margin);
  };
  margins.insert(std::upper_bound(margins.begin(), margins.end(), margin, nearer), margin);
  if (margins.size() > kMaxMargins) margins.pop_back();
}

}  // namespace

struct SequenceRunner::Running {
  size_t index = 0;
  const SequenceTask* task = nullptr;
  SequenceCache cache;
  SequenceOutcome outcome = {};
  std::optional<Sampler> sampler = {};
  int32_t next = -1;  // the token to feed; -1 while the prompt is read
  bool done = false;
  // Where the reference is scored: how many of its tokens are, the cache at the first that was
  // missed, and what they are compared with.
  size_t scored = 0;
  bool following = false;  // the output has ended; the rest of the reference is read
  std::optional<SequenceCache> at_mismatch = {};
  std::vector<TokenDistribution> baseline = {};
};

SequenceRunner::SequenceRunner(LoadedModel& model, std::vector<int32_t> stop_tokens,
                               int max_running)
    : model_(model),
      stop_tokens_(std::move(stop_tokens)),
      max_running_(static_cast<size_t>(std::min(max_running, model.model().max_batch_tokens()))),
      pass_(model.model()) {}

Status SequenceRunner::Start(Running& running) {
  const SequenceTask& task = *running.task;
  if (task.sampling.has_value()) {
    running.sampler.emplace(*task.sampling);
    running.sampler->ObservePrompt(task.prompt);
  }
  if (task.score_reference) {
    OSCAR_CHECK(!task.sampling.has_value() && !task.reference.empty());
    running.outcome.reference.emplace().tokens = static_cast<int64_t>(task.reference.size());
    if (task.baseline != nullptr) {
      OSCAR_ASSIGN_OR_RETURN(running.baseline,
                             DecodeDistributions(*task.baseline, model_.spec().vocab_size));
      if (running.baseline.size() != task.reference.size()) {
        return DataLoss("not the distributions of this reference");
      }
      running.outcome.reference->kl = 0.0;
    }
  }
  if (task.shared == nullptr) return {};
  const ModelSpec& spec = model_.spec();
  if (!model_.kv().cache().seals() && model_.kv().k(0).kind == RotationKind::kNone &&
      task.shared->cache.pool().memory() == model_.pool().memory()) {
    running.cache = task.shared->cache.Fork();
  } else {
    OSCAR_RETURN_IF_ERROR(ImportPrompt(task.shared->cache, model_.kv(), spec.num_kv_layers(),
                                       spec.attention().num_kv_heads, spec.attention().head_dim,
                                       model_.threads(), running.cache));
  }
  return task.shared->logits.empty() ? Status() : Take(running, task.shared->logits);
}

// The next token of the reference against the logits before it.
Status SequenceRunner::ScoreNext(Running& running, std::span<const float> logits) const {
  if (!AllFinite(logits)) return NotFinite(running.cache.length());
  const SequenceTask& task = *running.task;
  ReferenceScore& score = *running.outcome.reference;
  const size_t at = running.scored++;
  const auto count = static_cast<double>(task.reference.size());
  const auto token = static_cast<size_t>(task.reference[at]);
  score.nll += (double{simd::LogSumExp(logits)} - double{logits[token]}) / count;
  if (score.kl.has_value()) *score.kl += Divergence(running.baseline[at], logits) / count;
  if (task.keep_distributions) running.outcome.distributions.push_back(LikelyTokens(logits));
  return {};
}

// The output has ended. What is left of the reference is read from where the output left it.
void SequenceRunner::End(Running& running) {
  const SequenceTask& task = *running.task;
  SequenceOutcome& out = running.outcome;
  out.strict = out.first_wrong < 0 && out.output.size() == task.reference.size();
  const CacheUsage usage = running.cache.Usage();
  out.tokens = running.cache.length();
  out.cache_bytes = usage.bytes;
  out.saturated = usage.saturated;
  if (!task.score_reference || running.scored == task.reference.size()) return;
  running.done = false;
  running.following = true;
  if (running.at_mismatch.has_value()) running.cache = std::move(*running.at_mismatch);
  running.at_mismatch.reset();
  running.next = task.reference[running.scored - 1];
}

// Decides what follows from the logits after the last token.
Status SequenceRunner::Take(Running& running, std::span<const float> logits) {
  const SequenceTask& task = *running.task;
  SequenceOutcome& out = running.outcome;
  if (running.following) {
    OSCAR_RETURN_IF_ERROR(ScoreNext(running, logits));
    running.next = task.reference[running.scored - 1];
    running.done = running.scored == task.reference.size();
    return {};
  }
  const size_t at = out.output.size();
  const bool greedy = !running.sampler.has_value();
  if (greedy && !AllFinite(logits)) return NotFinite(running.cache.length());
  const int32_t token =
      greedy ? static_cast<int32_t>(simd::ArgMax(logits)) : running.sampler->Sample(logits);
  if (token == SampleParams::kNotFinite) return NotFinite(running.cache.length());
  out.output.push_back(token);
  running.next = token;
  if (greedy && out.first_wrong < 0 && at < task.reference.size()) {
    AddMargin({static_cast<int64_t>(at), MarginOf(logits, task.reference[at])}, out.margins);
    if (task.score_reference) OSCAR_RETURN_IF_ERROR(ScoreNext(running, logits));
  }
  if (!task.reference.empty() && out.first_wrong < 0 &&
      (at >= task.reference.size() || token != task.reference[at])) {
    out.first_wrong = static_cast<int64_t>(at);
    if (task.stop_at_mismatch) running.done = true;
  }
  // A reference longer than max_tokens is still followed to its end.
  const bool on_reference = out.first_wrong < 0 && at + 1 < task.reference.size();
  if (Contains(stop_tokens_, token)) running.done = true;
  if (!on_reference && static_cast<int64_t>(out.output.size()) >= task.max_tokens) {
    running.done = true;
  }
  if (!running.done && running.cache.length() >= model_.max_context()) running.done = true;
  if (running.done) {
    End(running);
  } else if (task.score_reference && out.first_wrong == static_cast<int64_t>(at) &&
             running.scored < task.reference.size()) {
    running.at_mismatch = running.cache.Fork();
  }
  return {};
}

Status SequenceRunner::Step(std::vector<Running>& running, size_t& max_running) {
  int64_t room = model_.model().max_batch_tokens();
  std::vector<ForwardItem> items;
  std::vector<size_t> owners;
  for (size_t i = 0; i < running.size(); ++i) {
    if (running[i].next < 0) continue;
    items.push_back({&running[i].cache, {&running[i].next, 1}, /*is_prompt=*/false, 1});
    owners.push_back(i);
    --room;
  }
  for (size_t i = 0; i < running.size() && room > 0; ++i) {
    if (running[i].next >= 0) continue;
    items.push_back(NextChunk(running[i].cache, running[i].task->prompt, room, 1));
    owners.push_back(i);
    room -= static_cast<int64_t>(items.back().tokens.size());
  }
  const Status status = pass_.Run(items);
  if (status.code() == StatusCode::kResourceExhausted && running.size() > 1) {
    // The youngest starts again later, when others have ended.
    max_running = running.size() - 1;
    return {};
  }
  OSCAR_RETURN_IF_ERROR(status);
  for (size_t i = 0; i < items.size(); ++i) {
    Running& owner = running[owners[i]];
    if (items[i].num_logits == 0) continue;
    OSCAR_RETURN_IF_ERROR(Take(owner, pass_.logits(i)));
  }
  return {};
}

Status SequenceRunner::Run(std::span<const SequenceTask> tasks, const OnDone& on_done) {
  std::vector<size_t> waiting(tasks.size());
  for (size_t i = 0; i < tasks.size(); ++i) waiting[i] = tasks.size() - 1 - i;  // last is next
  std::vector<Running> running;
  size_t max_running = max_running_;
  while (!waiting.empty() || !running.empty()) {
    while (running.size() > max_running) {
      waiting.push_back(running.back().index);
      running.pop_back();
    }
    while (running.size() < max_running && !waiting.empty()) {
      Running next{.index = waiting.back(),
                   .task = &tasks[waiting.back()],
                   .cache = SequenceCache(model_.kv().cache(), model_.pool())};
      const Status status = Start(next);
      if (status.code() == StatusCode::kResourceExhausted && !running.empty()) {
        max_running = running.size();
        break;
      }
      OSCAR_RETURN_IF_ERROR(status);
      waiting.pop_back();
      running.push_back(std::move(next));
    }
    if (std::none_of(running.begin(), running.end(), [](const Running& r) { return r.done; })) {
      OSCAR_RETURN_IF_ERROR(Step(running, max_running));
    }
    for (size_t i = 0; i < running.size();) {
      if (!running[i].done) {
        ++i;
        continue;
      }
      OSCAR_RETURN_IF_ERROR(on_done(running[i].index, running[i].outcome));
      running.erase(running.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  return {};
}

Result<std::vector<SharedPrompt>> SequenceRunner::ReadPrompts(
    std::span<const std::vector<int32_t>> prompts, int64_t max_tokens) {
  OSCAR_CHECK(!model_.kv().cache().seals(), "shared prompts need a bf16 plan");
  std::vector<SharedPrompt> out;
  for (const std::vector<int32_t>& prompt : prompts) {
    SharedPrompt shared{SequenceCache(model_.kv().cache(), model_.pool()), {}};
    const size_t total = std::min(prompt.size(), static_cast<size_t>(max_tokens));
    PromptReader reader(model_.model(), shared.cache, std::span(prompt).first(total),
                        /*num_logits=*/total == prompt.size() ? 1 : 0);
    OSCAR_RETURN_IF_ERROR(reader.ReadAll());
    shared.logits = reader.TakeLogits();
    out.push_back(std::move(shared));
  }
  return out;
}

}  // namespace oscar
