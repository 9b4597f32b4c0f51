#include "run/results.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <type_traits>
#include <utility>

#include "base/json.h"
#include "base/progress.h"

namespace oscar {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

// Characters of all task columns of the terminal's table; beyond it tasks are rows.
constexpr size_t kMaxTaskColumns = 120;
constexpr uint64_t kBootstrapSeed = 1;

template <typename T>
ordered_json OrNull(const std::optional<T>& value) {
  return value.has_value() ? ordered_json(*value) : ordered_json();
}

std::optional<double> NumberOrNone(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_number()) return std::nullopt;
  return found->get<double>();
}

// None where the type does not hold it: 1e300, or -1 of an unsigned one.
template <typename T>
std::optional<T> WholeNumber(const json& value) {
  if (!value.is_number_integer()) return std::nullopt;
  if (value.is_number_unsigned()) {
    const auto number = value.get<uint64_t>();
    return std::in_range<T>(number) ? std::optional(static_cast<T>(number)) : std::nullopt;
  }
  const auto number = value.get<int64_t>();
  return std::in_range<T>(number) ? std::optional(static_cast<T>(number)) : std::nullopt;
}

// A field of the expected type, or the default: results.json may be of an older version.
template <typename T>
T Field(const json& object, const char* key, T fallback) {
  if (!object.is_object()) return fallback;
  const auto found = object.find(key);
  if (found == object.end()) return fallback;
  if constexpr (std::is_same_v<T, std::string>) {
    return found->is_string() ? found->get<T>() : fallback;
  } else if constexpr (std::is_same_v<T, bool>) {
    return found->is_boolean() ? found->get<T>() : fallback;
  } else if constexpr (std::is_floating_point_v<T>) {
    return found->is_number() ? found->get<T>() : fallback;
  } else {
    return WholeNumber<T>(*found).value_or(fallback);
  }
}

std::optional<double> Mean(const std::vector<double>& values) {
  if (values.empty()) return std::nullopt;
  double sum = 0;
  for (double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

std::optional<double> Deviation(const std::vector<double>& values) {
  if (values.size() < 2) return std::nullopt;
  const double mean = *Mean(values);
  double sum = 0;
  for (double value : values) sum += (value - mean) * (value - mean);
  return std::sqrt(sum / static_cast<double>(values.size() - 1));
}

}  // namespace

ScoreInterval WilsonInterval(double percent, double items) {
  if (!(items > 0) || !(percent >= 0) || !(percent <= 100)) return {};
  constexpr double kZ = 1.959964;
  const double p = percent / 100, z2 = kZ * kZ / items;
  const double middle = (p + z2 / 2) / (1 + z2);
  const double half = kZ * std::sqrt(p * (1 - p) / items + z2 / (4 * items)) / (1 + z2);
  return {std::max(100 * (middle - half), 0.0), std::min(100 * (middle + half), 100.0)};
}

namespace {

// One score of every task that has it, in percent.
struct TaskScores {
  std::vector<double> values;
  double inverse_items = 0;  // sum of 1 / items

  // A mean of T tasks is as sure as one share of T^2 / inverse_items items.
  ScoreInterval IntervalOfMean() const {
    const auto tasks = static_cast<double>(values.size());
    return values.empty() ? ScoreInterval()
                          : WilsonInterval(*Mean(values), tasks * tasks / inverse_items);
  }
};

TaskScores ScoresOf(const MethodScore& method, std::optional<double> TaskScore::*score,
                    const std::vector<std::string>& without) {
  TaskScores out;
  for (const auto& [name, task] : method.tasks) {
    if (std::find(without.begin(), without.end(), name) != without.end()) continue;
    const std::optional<double>& value = task.*score;
    if (!value.has_value()) continue;
    out.values.push_back(*value);
    out.inverse_items += 1.0 / static_cast<double>(std::max<int64_t>(task.items, 1));
  }
  return out;
}

// A star where some of it was never measured.
std::string Percent(const std::optional<double>& value, const std::optional<double>& deviation,
                    int64_t failed) {
  if (!value.has_value()) return "-";
  const char* mark = failed > 0 ? "*" : "";
  return deviation.has_value() ? fmt::format("{:.1f}±{:.1f}{}", *value, *deviation, mark)
                               : fmt::format("{:.1f}{}", *value, mark);
}

std::string CsvCell(const std::string& text) {
  if (text.find_first_of(",\"\n") == std::string::npos) return text;
  std::string out = "\"";
  for (char c : text) out += c == '"' ? std::string("\"\"") : std::string(1, c);
  return out + "\"";
}

// Tasks without a reference show what their answers scored.
std::string TaskCell(const MethodScore& method, const std::string& name) {
  const auto found = method.tasks.find(name);
  const TaskScore score = found == method.tasks.end() ? TaskScore{} : found->second;
  const bool use_answer = !score.strict.has_value();
  return Percent(use_answer ? score.answer : score.strict,
                 use_answer ? score.answer_sd : score.strict_sd, score.failed);
}

// "-1.2 [-2.0, -0.4]"
std::string DifferenceText(const PairedScore& paired) {
  return fmt::format("{:+.1f} [{:+.1f}, {:+.1f}]", paired.difference, paired.low, paired.high);
}

// One row per method: items lost and won against BF16, and what that is as a difference.
std::string PairedTable(const EvalResults& results, size_t width) {
  std::string out;
  for (const MethodScore& method : results.methods) {
    const auto mean = method.paired.find(kPairedMean);
    if (mean == method.paired.end()) continue;
    if (out.empty()) {
      out = fmt::format("\n{:<{}} {:>6} {:>5} {:>5} {:>9}  {}\n", "against bf16", width, "items",
                        "lost", "won", "p", "points, 95 % interval; tasks beyond it");
    }
    const PairedScore& paired = mean->second;
    out += fmt::format("{:<{}} {:>6} {:>5} {:>5} {:>9.2g}  {}", method.label, width, paired.items,
                       paired.lost, paired.won, paired.p, DifferenceText(paired));
    for (const auto& [task, score] : method.paired) {
      if (task == kPairedMean || (score.low <= 0 && score.high >= 0)) continue;
      out += fmt::format("; {} {}", task, DifferenceText(score));
    }
    out += "\n";
  }
  return out;
}

std::string ReferenceCsv(const std::optional<ReferenceScore>& score) {
  if (!score.has_value()) return ",,";
  return fmt::format("{},{:.6f},{}", score->tokens, score->nll,
                     score->kl.has_value() ? fmt::format("{:.6f}", *score->kl) : "");
}

// "0.0079 0.213": KL and nll, KL only where it is known.
std::string ReferenceText(const std::optional<ReferenceScore>& score) {
  if (!score.has_value()) return "-";
  return (score->kl.has_value() ? fmt::format("{:.4f}", *score->kl) : std::string("-")) +
         fmt::format(" {:.4f}", score->nll);
}

// What the reference's tokens cost: a row per method, or per task where those are many.
std::string ReferenceTable(const EvalResults& results, const std::vector<std::string>& names,
                           size_t width, size_t task_width, bool is_tall) {
  if (std::ranges::none_of(results.methods,
                           [](const MethodScore& m) { return m.MeanReference().has_value(); })) {
    return {};
  }
  constexpr size_t kCell = 14;
  const auto cell = [&](const MethodScore& method, const std::string& name) {
    const auto found = method.tasks.find(name);
    return ReferenceText(found == method.tasks.end() ? std::nullopt : found->second.reference);
  };
  const auto column = [&](const std::string& name) { return std::max(kCell, name.size()); };
  std::string out =
      "\nreference tokens, nats per token: KL to bf16, then nll (of the reference itself)\n";
  if (is_tall) {
    out += fmt::format("{:<{}}", "task", task_width);
    for (const MethodScore& method : results.methods) {
      out += fmt::format(" {:>{}}", method.label, column(method.label));
    }
    for (const std::string& name : names) {
      out += fmt::format("\n{:<{}}", name, task_width);
      for (const MethodScore& method : results.methods) {
        out += fmt::format(" {:>{}}", cell(method, name), column(method.label));
      }
    }
    return out + "\n";
  }
  out += fmt::format("{:<{}} {:>{}} {:>{}}", "method", width, "mean", kCell, "long", kCell);
  for (const std::string& name : names) out += fmt::format(" {:>{}}", name, column(name));
  for (const MethodScore& method : results.methods) {
    out += fmt::format("\n{:<{}} {:>{}} {:>{}}", method.label, width,
                       ReferenceText(method.MeanReference()), kCell,
                       ReferenceText(method.MeanReference(results.short_tasks)), kCell);
    for (const std::string& name : names) {
      out += fmt::format(" {:>{}}", cell(method, name), column(name));
    }
  }
  return out + "\n";
}

ordered_json ReferenceToJson(const ReferenceScore& score) {
  return {{"tokens", score.tokens}, {"nll", score.nll}, {"kl_to_bf16", OrNull(score.kl)}};
}

std::optional<ReferenceScore> ReferenceFromJson(const json& object) {
  const auto found = object.find("reference");
  if (found == object.end() || !found->is_object()) return std::nullopt;
  return ReferenceScore{Field<int64_t>(*found, "tokens", 0), Field(*found, "nll", 0.0),
                        NumberOrNone(*found, "kl_to_bf16")};
}

ordered_json TaskToJson(const TaskScore& score, bool is_remote) {
  ordered_json out = {
      {"items", score.items},
      {"failed", score.failed},
      {"strict", OrNull(score.strict)},
      {"answer", OrNull(score.answer)},
      {"strict_sd", OrNull(score.strict_sd)},
      {"answer_sd", OrNull(score.answer_sd)},
      {"bits_per_element", is_remote ? ordered_json() : ordered_json(score.bits)},
      {"mean_tokens", score.mean_tokens},
      {"cache_bytes", is_remote ? ordered_json() : ordered_json(score.cache_bytes)}};
  if (score.reference.has_value()) out["reference"] = ReferenceToJson(*score.reference);
  return out;
}

ordered_json MethodToJson(const MethodScore& method, const std::vector<std::string>& short_tasks) {
  ordered_json out = {{"method", method.label},
                      {"description", method.description},
                      {"simulated", nullptr},
                      {"history_bits", nullptr}};
  if (!method.is_remote) {
    out["simulated"] = method.simulated;
    out["history_bits"] = method.history_bits;
  }
  if (!method.base.empty()) out["base"] = method.base;
  if (!method.swept.empty()) out["swept"] = method.swept;
  for (const auto& [length, bits] : method.stored_bits) {
    out["stored_bits"][std::to_string(length)] = bits;
  }
  out["mean_strict"] = OrNull(method.MeanStrict());
  out["mean_strict_without_short"] = OrNull(method.MeanStrict(short_tasks));
  out["mean_answer"] = OrNull(method.MeanAnswer());
  if (const auto reference = method.MeanReference()) {
    out["reference"] = ReferenceToJson(*reference);
  }
  if (const auto reference = method.MeanReference(short_tasks)) {
    out["reference_without_short"] = ReferenceToJson(*reference);
  }
  out["cache_bytes"] = method.is_remote ? ordered_json() : ordered_json(method.CacheBytes());
  if (method.text.has_value()) {
    out["text"] = {{"nll", method.text->nll},
                   {"perplexity", method.text->perplexity},
                   {"tokens", method.text->tokens},
                   {"kl_to_bf16", method.text->kl},
                   {"top1_agreement", method.text->top1},
                   {"compared", method.text->compared}};
  }
  for (const auto& [name, score] : method.tasks) {
    out["tasks"][name] = TaskToJson(score, method.is_remote);
  }
  for (const auto& [name, paired] : method.paired) {
    out["against_bf16"][name] = {{"items", paired.items},
                                 {"lost", paired.lost},
                                 {"won", paired.won},
                                 {"mcnemar_p", paired.p},
                                 {"difference", paired.difference},
                                 {"low_95", paired.low},
                                 {"high_95", paired.high}};
  }
  for (const auto& [k, v] : method.layer_errors) out["layer_errors"].push_back({k, v});
  return out;
}

MethodScore MethodFromJson(const json& object) {
  MethodScore out;
  out.label = Field<std::string>(object, "method", "");
  out.description = Field<std::string>(object, "description", "");
  out.base = Field<std::string>(object, "base", "");
  if (const json swept = object.value("swept", json::object()); swept.is_object()) {
    for (const auto& [axis, value] : swept.items()) {
      if (value.is_string()) out.swept[axis] = value.get<std::string>();
    }
  }
  out.simulated = Field(object, "simulated", false);
  out.is_remote = object.contains("simulated") && object["simulated"].is_null();
  out.history_bits = Field(object, "history_bits", 0.0);
  if (const json bits = object.value("stored_bits", json::object()); bits.is_object()) {
    for (const auto& [length, value] : bits.items()) {
      if (value.is_number()) out.stored_bits[std::atoll(length.c_str())] = value.get<double>();
    }
  }
  if (const json text = object.value("text", json()); text.is_object()) {
    out.text = TextMetrics{Field(text, "nll", 0.0),           Field(text, "perplexity", 0.0),
                           Field(text, "kl_to_bf16", 0.0),    Field(text, "top1_agreement", 0.0),
                           Field<int64_t>(text, "tokens", 0), Field<int64_t>(text, "compared", 0)};
  }
  if (const json tasks = object.value("tasks", json::object()); tasks.is_object()) {
    for (const auto& [name, task] : tasks.items()) {
      if (!task.is_object()) continue;
      TaskScore& score = out.tasks[name];
      score.items = Field<int64_t>(task, "items", 0);
      score.failed = Field<int64_t>(task, "failed", 0);
      score.strict = NumberOrNone(task, "strict");
      score.answer = NumberOrNone(task, "answer");
      score.strict_sd = NumberOrNone(task, "strict_sd");
      score.answer_sd = NumberOrNone(task, "answer_sd");
      score.bits = Field(task, "bits_per_element", 0.0);
      score.cache_bytes = Field<uint64_t>(task, "cache_bytes", 0);
      score.mean_tokens = Field(task, "mean_tokens", 0.0);
      score.reference = ReferenceFromJson(task);
    }
  }
  if (const json paired = object.value("against_bf16", json::object()); paired.is_object()) {
    for (const auto& [name, score] : paired.items()) {
      if (!score.is_object()) continue;
      out.paired[name] = {Field<int64_t>(score, "items", 0), Field<int64_t>(score, "lost", 0),
                          Field<int64_t>(score, "won", 0),   Field(score, "mcnemar_p", 1.0),
                          Field(score, "difference", 0.0),   Field(score, "low_95", 0.0),
                          Field(score, "high_95", 0.0)};
    }
  }
  if (const json layers = object.value("layer_errors", json::array()); layers.is_array()) {
    for (const json& pair : layers) {
      if (pair.is_array() && pair.size() == 2 && pair[0].is_number() && pair[1].is_number()) {
        out.layer_errors.emplace_back(pair[0].get<double>(), pair[1].get<double>());
      }
    }
  }
  return out;
}

}  // namespace

std::string ToJsonLine(const ItemRecord& r) {
  ordered_json out = {{"settings", r.settings},
                      {"method", r.method},
                      {"task", r.task},
                      {"id", r.id},
                      {"repeat", r.repeat},
                      {"strict", OrNull(r.strict)},
                      {"answer", OrNull(r.answer)},
                      {"first_wrong", r.first_wrong},
                      {"prompt_tokens", r.prompt_tokens},
                      {"output_tokens", r.output_tokens},
                      {"bits", r.bits},
                      {"cache_bytes", r.cache_bytes},
                      {"output", r.output}};
  for (const TokenMargin& m : r.margins) {
    out["margins"].push_back({m.token, std::round(m.margin * 1e4) / 1e4});
  }
  if (r.reference.has_value()) out["reference"] = ReferenceToJson(*r.reference);
  if (!r.bucket.empty()) out["bucket"] = r.bucket;
  return out.dump(-1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

Result<ItemRecord> ParseItemRecord(std::string_view line) {
  OSCAR_ASSIGN_OR_RETURN(const json object, ParseJson(line, "item record"));
  if (!object.is_object() || !object.contains("method") || !object.contains("id")) {
    return Unexpected(InvalidArgument("not an item record"));
  }
  ItemRecord r;
  r.settings = Field<std::string>(object, "settings", "");
  r.method = Field<std::string>(object, "method", "");
  r.task = Field<std::string>(object, "task", "");
  r.id = Field<std::string>(object, "id", "");
  r.repeat = Field(object, "repeat", 0);
  if (const auto strict = object.find("strict"); strict != object.end() && strict->is_boolean()) {
    r.strict = strict->get<bool>();
  }
  r.answer = NumberOrNone(object, "answer");
  r.first_wrong = Field<int64_t>(object, "first_wrong", -1);
  r.prompt_tokens = Field<int64_t>(object, "prompt_tokens", 0);
  r.output_tokens = Field<int64_t>(object, "output_tokens", 0);
  r.bits = Field(object, "bits", 0.0);
  r.cache_bytes = Field<uint64_t>(object, "cache_bytes", 0);
  if (const json margins = object.value("margins", json::array()); margins.is_array()) {
    for (const json& pair : margins) {
      if (!pair.is_array() || pair.size() != 2 || !pair[1].is_number()) continue;
      const auto token = WholeNumber<int64_t>(pair[0]);
      if (token.has_value()) r.margins.push_back({*token, pair[1].get<double>()});
    }
  }
  r.reference = ReferenceFromJson(object);
  r.bucket = Field<std::string>(object, "bucket", "");
  r.output = Field<std::string>(object, "output", "");
  return r;
}

namespace {

// Sums over tokens: a token weighs the same in whichever item.
void AddReference(const ReferenceScore& item, std::optional<ReferenceScore>& sum) {
  const auto tokens = static_cast<double>(item.tokens);
  if (!sum.has_value()) sum = ReferenceScore{0, 0.0, 0.0};
  sum->tokens += item.tokens;
  sum->nll += item.nll * tokens;
  if (item.kl.has_value() && sum->kl.has_value()) {
    *sum->kl += *item.kl * tokens;
  } else {
    sum->kl.reset();
  }
}

}  // namespace

TaskScore ScoreTask(const std::vector<const ItemRecord*>& records) {
  TaskScore out;
  std::set<std::string> ids;
  // By repeat and bucket.
  std::map<int, std::map<std::string, std::vector<double>>> strict, answer;
  for (const ItemRecord* record : records) {
    ids.insert(record->id);
    if (record->strict.has_value()) {
      strict[record->repeat][record->bucket].push_back(*record->strict ? 100.0 : 0.0);
    }
    if (record->answer.has_value()) {
      answer[record->repeat][record->bucket].push_back(*record->answer * 100.0);
    }
    if (record->failed) {
      ++out.failed;
      continue;
    }
    if (record->reference.has_value()) AddReference(*record->reference, out.reference);
    out.bits += record->bits;
    out.mean_tokens += static_cast<double>(record->prompt_tokens + record->output_tokens);
    out.cache_bytes = std::max(out.cache_bytes, record->cache_bytes);
  }
  out.items = static_cast<int64_t>(ids.size());
  if (const auto done = static_cast<double>(records.size()) - static_cast<double>(out.failed);
      done > 0) {
    out.bits /= done;
    out.mean_tokens /= done;
  }
  if (out.reference.has_value()) {
    const auto tokens = static_cast<double>(std::max<int64_t>(out.reference->tokens, 1));
    out.reference->nll /= tokens;
    if (out.reference->kl.has_value()) *out.reference->kl /= tokens;
  }
  const auto over_repeats = [](const auto& by_repeat) {
    std::vector<double> means;
    for (const auto& [repeat, buckets] : by_repeat) {
      std::vector<double> of_buckets;
      for (const auto& [bucket, values] : buckets) of_buckets.push_back(*Mean(values));
      means.push_back(*Mean(of_buckets));
    }
    return means;
  };
  const std::vector<double> strict_means = over_repeats(strict), answers = over_repeats(answer);
  out.strict = Mean(strict_means), out.strict_sd = Deviation(strict_means);
  out.answer = Mean(answers), out.answer_sd = Deviation(answers);
  return out;
}

std::map<std::string, PairedScore> PairWith(
    const std::map<std::string, std::vector<const ItemRecord*>>& baseline,
    const std::map<std::string, std::vector<const ItemRecord*>>& method,
    const std::vector<std::string>& short_tasks) {
  std::map<std::string, PairedItems> items;
  for (const auto& [task, records] : method) {
    const auto found = baseline.find(task);
    if (found == baseline.end()) continue;
    std::map<std::pair<std::string, int>, bool> right;
    for (const ItemRecord* record : found->second) {
      if (record->strict.has_value()) right[{record->id, record->repeat}] = *record->strict;
    }
    for (const ItemRecord* record : records) {
      const auto other = right.find({record->id, record->repeat});
      if (!record->strict.has_value() || other == right.end()) continue;
      items[task].baseline.push_back(other->second);
      items[task].method.push_back(*record->strict);
    }
  }
  std::map<std::string, PairedScore> out;
  std::map<std::string, PairedItems> long_items;
  for (const auto& [task, list] : items) {
    out[task] = ComparePaired({{task, list}}, kBootstrapSeed);
    if (std::ranges::find(short_tasks, task) == short_tasks.end()) long_items[task] = list;
  }
  if (!items.empty()) {
    out[kPairedMean] = ComparePaired(long_items.empty() ? items : long_items, kBootstrapSeed);
  }
  return out;
}

std::optional<double> MethodScore::MeanStrict(const std::vector<std::string>& without) const {
  return Mean(ScoresOf(*this, &TaskScore::strict, without).values);
}

std::optional<double> MethodScore::MeanAnswer() const {
  return Mean(ScoresOf(*this, &TaskScore::answer, {}).values);
}

ScoreInterval MethodScore::StrictInterval(const std::vector<std::string>& without) const {
  return ScoresOf(*this, &TaskScore::strict, without).IntervalOfMean();
}

ScoreInterval MethodScore::AnswerInterval() const {
  return ScoresOf(*this, &TaskScore::answer, {}).IntervalOfMean();
}

std::optional<ReferenceScore> MethodScore::MeanReference(
    const std::vector<std::string>& without) const {
  std::vector<double> nll, kl;
  int64_t tokens = 0;
  for (const auto& [name, task] : tasks) {
    if (std::ranges::find(without, name) != without.end() || !task.reference.has_value()) continue;
    tokens += task.reference->tokens;
    nll.push_back(task.reference->nll);
    if (task.reference->kl.has_value()) kl.push_back(*task.reference->kl);
  }
  if (nll.empty()) return std::nullopt;
  return ReferenceScore{tokens, *Mean(nll), kl.size() == nll.size() ? Mean(kl) : std::nullopt};
}

double MethodScore::MeanBits() const {
  std::vector<double> values;
  for (const auto& [name, score] : tasks) values.push_back(score.bits);
  return Mean(values).value_or(0.0);
}

uint64_t MethodScore::CacheBytes() const {
  uint64_t most = 0;
  for (const auto& [name, score] : tasks) most = std::max(most, score.cache_bytes);
  return most;
}

int64_t MethodScore::Failed() const {
  int64_t failed = 0;
  for (const auto& [name, score] : tasks) failed += score.failed;
  return failed;
}

std::vector<std::string> TaskNames(const EvalResults& results) {
  std::set<std::string> unique;
  for (const MethodScore& method : results.methods) {
    for (const auto& [name, score] : method.tasks) unique.insert(name);
  }
  const auto key = [](const std::string& name) {
    const size_t at = name.rfind('@');
    int64_t length = -1;
    if (at != std::string::npos) {
      const auto [stop, error] =
          std::from_chars(name.data() + at + 1, name.data() + name.size(), length);
      if (error != std::errc() || stop != name.data() + name.size()) length = -1;
    }
    return std::tuple(length < 0 ? name : name.substr(0, at), length);
  };
  std::vector<std::string> names(unique.begin(), unique.end());
  std::stable_sort(names.begin(), names.end(),
                   [&](const std::string& a, const std::string& b) { return key(a) < key(b); });
  return names;
}

std::string ResultsToJson(const EvalResults& results) {
  ordered_json out = {
      {"format", "oscar-eval-1"}, {"model", results.model}, {"prefill", results.prefill}};
  for (const auto& [key, value] : results.settings) out["settings"][key] = value;
  out["short_tasks"] = results.short_tasks;
  out["warnings"] = results.warnings;
  for (const MethodScore& method : results.methods) {
    out["methods"].push_back(MethodToJson(method, results.short_tasks));
  }
  for (const SweepAxis& axis : results.sweep) {
    out["sweep"].push_back({{"name", axis.name}, {"values", axis.values}});
  }
  if (!results.spectra.empty()) out["query_spectra"] = results.spectra;
  return out.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

Result<EvalResults> ResultsFromJson(std::string_view text, std::string_view what) {
  OSCAR_ASSIGN_OR_RETURN(const json object, ParseJson(text, what));
  if (Field<std::string>(object, "format", "") != "oscar-eval-1") {
    return Unexpected(InvalidArgument(
        fmt::format("{}: not results of oscar eval (\"format\" is not oscar-eval-1)", what)));
  }
  EvalResults out;
  out.model = Field<std::string>(object, "model", "");
  out.prefill = Field<std::string>(object, "prefill", "");
  const auto strings = [&](const char* key) {
    std::vector<std::string> list;
    const json values = object.value(key, json::array());
    for (const json& value : values) {
      if (value.is_string()) list.push_back(value.get<std::string>());
    }
    return list;
  };
  out.short_tasks = strings("short_tasks");
  out.warnings = strings("warnings");
  if (const json settings = object.value("settings", json::object()); settings.is_object()) {
    for (const auto& [key, value] : settings.items()) {
      if (value.is_string()) out.settings.emplace_back(key, value.get<std::string>());
    }
  }
  for (const json& axis : object.value("sweep", json::array())) {
    if (!axis.is_object()) continue;
    SweepAxis& read = out.sweep.emplace_back(SweepAxis{Field<std::string>(axis, "name", ""), {}});
    for (const json& value : axis.value("values", json::array())) {
      if (value.is_string()) read.values.push_back(value.get<std::string>());
    }
  }
  const json methods = object.value("methods", json::array());
  for (const json& method : methods) {
    if (method.is_object()) out.methods.push_back(MethodFromJson(method));
  }
  for (const json& layer : object.value("query_spectra", json::array())) {
    std::vector<double>& values = out.spectra.emplace_back();
    for (const json& value : layer) {
      if (value.is_number()) values.push_back(value.get<double>());
    }
  }
  return out;
}

std::string ResultsToCsv(const EvalResults& results) {
  std::string out =
      "method,real_or_simulated,task,items,strict,strict_sd,answer,answer_sd,bits_per_element,"
      "bits_at_128k,cache_bytes,mean_tokens,failed,reference_tokens,reference_nll,reference_kl\n";
  const auto number = [](const std::optional<double>& value) {
    return value.has_value() ? fmt::format("{:.4f}", *value) : std::string();
  };
  for (const MethodScore& method : results.methods) {
    const auto long_bits = method.stored_bits.find(131072);
    for (const auto& [name, score] : method.tasks) {
      out += fmt::format(
          "{},{},{},{},{},{},{},{},{},{},{},{:.1f},{},{}\n", CsvCell(method.label),
          method.is_remote   ? ""
          : method.simulated ? "simulated"
                             : "real",
          CsvCell(name), score.items, number(score.strict), number(score.strict_sd),
          number(score.answer), number(score.answer_sd),
          method.is_remote ? "" : fmt::format("{:.4f}", score.bits),
          long_bits == method.stored_bits.end() ? "" : fmt::format("{:.4f}", long_bits->second),
          method.is_remote ? "" : std::to_string(score.cache_bytes), score.mean_tokens,
          score.failed, ReferenceCsv(score.reference));
    }
  }
  return out;
}

std::string ResultsToTable(const EvalResults& results) {
  const std::vector<std::string> names = TaskNames(results);
  size_t width = 12, names_width = 0, task_width = 4;
  for (const MethodScore& method : results.methods) width = std::max(width, method.label.size());
  for (const std::string& name : names) {
    names_width += 1 + std::max<size_t>(6, name.size());
    task_width = std::max(task_width, name.size());
  }
  const bool is_tall = names_width > kMaxTaskColumns;
  std::string out = fmt::format("prefill: {}; strict scores in percent", results.prefill);
  if (!results.short_tasks.empty()) {
    out += fmt::format("; \"long\" leaves out {}", fmt::format("{}", results.short_tasks[0]));
    for (size_t i = 1; i < results.short_tasks.size(); ++i) out += ", " + results.short_tasks[i];
  }
  out +=
      fmt::format("\n{:<{}} {:>6} {:>6} {:>6} {:>6} {:>7} {:>7} {:>8} {:>6} {:>9}", "method", width,
                  "mean", "long", "answer", "128K", "history", "ppl", "KL", "top1", "cache");
  for (const std::string& name : names) {
    if (!is_tall) out += fmt::format(" {:>{}}", name, std::max<size_t>(6, name.size()));
  }
  out += "\n";
  int64_t failed = 0;
  for (const MethodScore& method : results.methods) {
    const auto long_bits = method.stored_bits.find(131072);
    failed += method.Failed();
    out += fmt::format(
        "{:<{}} {:>6} {:>6} {:>6} {:>6} {:>7} {:>7} {:>8} {:>6} {:>9}", method.label, width,
        Percent(method.MeanStrict(), {}, method.Failed()),
        Percent(method.MeanStrict(results.short_tasks), {}, method.Failed()),
        Percent(method.MeanAnswer(), {}, method.Failed()),
        long_bits == method.stored_bits.end() ? "-" : fmt::format("{:.2f}", long_bits->second),
        method.history_bits > 0 ? fmt::format("{:.2f}", method.history_bits) : "-",
        method.text.has_value() ? fmt::format("{:.3f}", method.text->perplexity) : "-",
        method.text.has_value() && method.text->compared > 0
            ? fmt::format("{:.4f}", method.text->kl)
            : "-",
        method.text.has_value() && method.text->compared > 0
            ? fmt::format("{:.1f}", 100 * method.text->top1)
            : "-",
        method.CacheBytes() > 0 ? FormatBytes(method.CacheBytes()) : "-");
    for (const std::string& name : names) {
      if (is_tall) break;
      out += fmt::format(" {:>{}}", TaskCell(method, name), std::max<size_t>(6, name.size()));
    }
    out += method.simulated ? "  (simulated)\n" : "\n";
  }
  if (is_tall) {
    // One row a task where one row a method would not fit a screen.
    out += fmt::format("\n{:<{}}", "task", task_width);
    for (const MethodScore& method : results.methods) {
      out += fmt::format(" {:>{}}", method.label, std::max<size_t>(9, method.label.size()));
    }
    for (const std::string& name : names) {
      out += fmt::format("\n{:<{}}", name, task_width);
      for (const MethodScore& method : results.methods) {
        out += fmt::format(" {:>{}}", TaskCell(method, name),
                           std::max<size_t>(9, method.label.size()));
      }
    }
    out += "\n";
  }
  out += PairedTable(results, width);
  out += ReferenceTable(results, names, width, task_width, names.size() * 15 > kMaxTaskColumns);
  if (failed > 0) {
    out +=
        fmt::format("* {} outputs are missing and count as wrong; the warnings say why\n", failed);
  }
  return out;
}

}  // namespace oscar
