#include "run/eval_items.h"

#include <fmt/core.h>
#include <xxhash.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <set>
#include <utility>

namespace oscar {

uint64_t HashText(std::string_view text, uint64_t seed) {
  return XXH3_64bits_withSeed(text.data(), text.size(), seed);
}

Status SetSampling(EvalSuite& suite,
                   const std::function<SamplingOptions(SamplingOptions)>& overrides, int repeats) {
  for (EvalTask& task : suite.tasks) {
    SamplingOptions base;
    base.temperature = 0;
    const SamplingOptions wanted = overrides(task.sampling.value_or(base));
    const bool is_greedy = wanted.temperature == 0;
    if (is_greedy && repeats > 1) {
      return InvalidArgument(fmt::format(
          "--repeats without --temperature: greedy outputs of {} are the same every time; add "
          "--temperature to sample them",
          task.name));
    }
    // Penalties change greedy outputs too.
    const bool is_plain = is_greedy && wanted.repetition_penalty == 1 &&
                          wanted.presence_penalty == 0 && wanted.frequency_penalty == 0;
    OSCAR_RETURN_IF_ERROR(wanted.Validate(std::numeric_limits<int>::max()));
    task.sampling = is_plain ? std::nullopt : std::optional(wanted);
    task.repeats = is_greedy ? 1 : repeats > 0 ? repeats : task.repeats;
  }
  return {};
}

std::string DescribeSampling(const EvalSuite& suite) {
  std::set<std::string> kinds;
  for (const EvalTask& task : suite.tasks) {
    std::string text = "greedy";
    if (task.sampling.has_value()) {
      const SamplingOptions& s = *task.sampling;
      if (s.temperature > 0) {
        text = fmt::format("sampled {} times at temperature {}, top-p {}, top-k {}", task.repeats,
                           s.temperature, s.top_p, s.top_k);
      }
      if (s.min_p > 0) text += fmt::format(", min-p {}", s.min_p);
      if (s.repetition_penalty != 1) {
        text += fmt::format(", repetition penalty {}", s.repetition_penalty);
      }
      if (s.presence_penalty != 0) text += fmt::format(", presence penalty {}", s.presence_penalty);
      if (s.frequency_penalty != 0) {
        text += fmt::format(", frequency penalty {}", s.frequency_penalty);
      }
    }
    kinds.insert(std::move(text));
  }
  std::string out;
  for (const std::string& kind : kinds) out += (out.empty() ? "" : "; ") + kind;
  return out;
}

ItemRecord FailedRecord(const EvalTask& task, const EvalItem& item, int repeat) {
  ItemRecord record;
  record.task = task.name;
  record.id = item.id;
  record.repeat = repeat;
  record.bucket = item.bucket;
  record.answer = 0;
  record.failed = true;
  return record;
}

std::string ListSome(const std::vector<std::string>& list) {
  constexpr size_t kMost = 5;
  std::string out;
  for (size_t i = 0; i < std::min(list.size(), kMost); ++i) out += (i > 0 ? ", " : "") + list[i];
  return list.size() <= kMost ? out : fmt::format("{} and {} more", out, list.size() - kMost);
}

uint64_t HashItem(const EvalTask& task, const EvalItem& item) {
  uint64_t hash = HashText(item.prompt, 1 + static_cast<uint64_t>(task.scorer));
  hash = HashText(item.reference, hash);
  hash = HashText(item.answer, hash) + static_cast<uint64_t>(item.max_tokens);
  for (const std::string* text : {&item.system, &item.prefix, &item.tests, &item.tests_prompt}) {
    if (!text->empty()) hash = HashText(*text, hash);
  }
  for (const std::string& text : item.answers) hash = HashText(text, hash);
  if (task.max_input > 0) hash += static_cast<uint64_t>(task.max_input) << 32;
  if (task.sampling.has_value()) {
    const SamplingOptions& s = *task.sampling;
    hash = HashText(fmt::format("{} {} {} {} {} {} {}", s.temperature, s.top_p, s.top_k, s.min_p,
                                s.repetition_penalty, s.presence_penalty, s.frequency_penalty),
                    hash);
  }
  return hash;
}

}  // namespace oscar
