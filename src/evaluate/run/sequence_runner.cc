#include "run/sequence_runner.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/check.h"
#include "cache/block_layout.h"
#include "engine/prompt_reader.h"
#include "numeric/matrix.h"
#include "simd/vec_ops.h"

namespace oscar {
namespace {

bool Contains(std::span<const int32_t> tokens, int32_t token) {
  return std::find(tokens.begin(), tokens.end(), token) != tokens.end();
}

void RotateHead(const SideTransform& rotation, int kv_head, std::span<float> row) {
  switch (rotation.kind) {
    case RotationKind::kHadamard:
      simd::FastHadamardRow(row);
      break;
    case RotationKind::kCalibrated: {
      std::array<float, kMaxHeadDim> rotated;
      const std::span<float> out(rotated.data(), row.size());
      simd::RotateRow(row, rotation.MatrixOf(kv_head, static_cast<int>(row.size())), out);
      std::copy(out.begin(), out.end(), row.begin());
      break;
    }
    default:
      rotation.Apply(kv_head, row);
  }
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

// A row of a BF16 page, wherever its layout puts it: 8 numbers lie together in every order.
template <typename Copy>
void EachChunk(const BlockLayout& layout, int token, bool is_v, const Copy& copy) {
  for (int d = 0; d < layout.head_dim(); d += 8) {
    copy(static_cast<size_t>(d), (is_v ? layout.VCode(token, d) : layout.KCode(token, d)).offset);
  }
}

}  // namespace

// Pages travel through host memory, so that either cache may lie on a device. Page by page, sealing
// as it goes, so that no more of it is open than a generation holds.
Status ImportPrompt(const SequenceCache& from, const KvPlan& plan, int num_layers, int kv_heads,
                    int head_dim, ThreadPool& threads, SequenceCache& to) {
  OSCAR_CHECK(to.length() == 0);
  const auto dim = static_cast<size_t>(head_dim);
  const PageLayout& source = from.config().open;
  const PageLayout& target = to.config().open;
  std::vector<std::byte> read(source.bytes()), written(target.bytes());
  for (int64_t start = 0; start < from.length(); start += kPageTokens) {
    const int64_t count = std::min<int64_t>(kPageTokens, from.length() - start);
    OSCAR_RETURN_IF_ERROR(to.SealForGeneration(threads));
    OSCAR_RETURN_IF_ERROR(to.Reserve(count));
    OSCAR_RETURN_IF_ERROR(from.pool().Read(from.page(start / kPageTokens), read));
    threads.ParallelFor(num_layers, [&](int64_t unit, int) {
      const int layer = static_cast<int>(unit);
      std::array<float, kMaxHeadDim> buffer;
      std::array<Bf16, kMaxHeadDim> rounded;
      const std::span<float> row(buffer.data(), dim);
      for (int head = 0; head < kv_heads; ++head) {
        const std::byte* in = read.data() + source.BlockOffset(layer, head);
        std::byte* out = written.data() + target.BlockOffset(layer, head);
        for (int token = 0; token < count; ++token) {
          for (const bool is_v : {false, true}) {
            EachChunk(source.block(layer), token, is_v, [&](size_t d, uint32_t at) {
              std::memcpy(rounded.data() + d, in + at, 8 * sizeof(Bf16));
            });
            simd::ToFloatRow(std::span<const Bf16>(rounded.data(), dim), row);
            RotateHead(is_v ? plan.v(layer) : plan.k(layer), head, row);
            simd::ToBf16Row(row, {rounded.data(), dim});
            EachChunk(target.block(layer), token, is_v, [&](size_t d, uint32_t at) {
              std::memcpy(out + at, rounded.data() + d, 8 * sizeof(Bf16));
            });
          }
        }
      }
    });
    OSCAR_RETURN_IF_ERROR(to.pool().Write(to.page(start / kPageTokens), written));
    to.Advance(count);
  }
  return {};
}

struct SequenceRunner::Running {
  size_t index = 0;
  const SequenceTask* task = nullptr;
  SequenceCache cache;
  SequenceOutcome outcome = {};
  std::optional<Sampler> sampler = {};
  int32_t next = -1;  // the token to feed; -1 while the prompt is read
  bool done = false;
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

// Decides what follows from the logits after the last token.
Status SequenceRunner::Take(Running& running, std::span<const float> logits) {
  const SequenceTask& task = *running.task;
  SequenceOutcome& out = running.outcome;
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
    out.strict = out.first_wrong < 0 && out.output.size() == task.reference.size();
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
      const CacheUsage usage = running[i].cache.Usage();
      running[i].outcome.tokens = running[i].cache.length();
      running[i].outcome.cache_bytes = usage.bytes;
      running[i].outcome.saturated = usage.saturated;
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
