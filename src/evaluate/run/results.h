// What an evaluation found: one record a finished item, and the tables made of them. Records are
// appended to items.jsonl as they come, so that an interrupted run resumes where it stopped; a
// record counts only under the settings it was made with. Plain values; one thread.
#pragma once

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "measure/text_metrics.h"
#include "oscar/status.h"
#include "run/paired.h"

namespace oscar {

// Of an item's output, kept in its record.
inline constexpr size_t kMaxOutputChars = 200;

// How nearly a token of the reference was missed, or was hit: its logit less the largest of the
// others. Negative: missed.
struct TokenMargin {
  int64_t token = 0;  // index into the reference
  double margin = 0;
  friend bool operator==(const TokenMargin&, const TokenMargin&) = default;
};
// Margins kept an item: those nearest to zero. Another device parts from this one at one of them.
inline constexpr size_t kMaxMargins = 8;

// How probable the reference was, token after token, whatever the model would have said itself.
// Means over its tokens, in nats.
struct ReferenceScore {
  int64_t tokens = 0;
  double nll = 0;
  std::optional<double> kl = {};  // KL(bf16 || method), as in TokenDistribution; none without BF16
  friend bool operator==(const ReferenceScore&, const ReferenceScore&) = default;
};

struct ItemRecord {
  std::string settings;  // hash of everything that decides the outcome, less the item
  std::string method;    // the label: "oscar+", "oscar+@rotation"
  std::string task;
  std::string id;
  int repeat = 0;
  std::optional<bool> strict;  // none: the item has no reference
  std::optional<double> answer;
  int64_t first_wrong = -1;  // index of the first output token off the reference
  // Of the tokens up to there, the smallest first, at most kMaxMargins.
  std::vector<TokenMargin> margins;
  std::optional<ReferenceScore> reference;  // none where there is none, or outputs are sampled
  int64_t prompt_tokens = 0;
  int64_t output_tokens = 0;
  double bits = 0;           // stored bits per element, at the item's final length
  uint64_t cache_bytes = 0;  // at the end, when the prompt's pages are sealed
  std::string bucket;        // see EvalItem
  std::string output;        // the final answer, cut to kMaxOutputChars
  // No output came: a request failed for good, or the item does not fit the context. Counts as
  // wrong; never written, so that the next run tries again.
  bool failed = false;
};

std::string ToJsonLine(const ItemRecord& record);
Result<ItemRecord> ParseItemRecord(std::string_view line);

// (method, task, id, repeat)
using ItemKey = std::tuple<std::string, std::string, std::string, int>;
inline ItemKey KeyOf(const ItemRecord& r) { return {r.method, r.task, r.id, r.repeat}; }

struct TaskScore {
  int64_t items = 0;                             // distinct items
  std::optional<double> strict, answer;          // percent, mean over repeats
  std::optional<double> strict_sd, answer_sd;    // over repeats; none for one repeat
  double bits = 0;                               // mean over items
  uint64_t cache_bytes = 0;                      // the most of any item
  double mean_tokens = 0;                        // in the cache at the end
  int64_t failed = 0;                            // outputs that never came; they count as wrong
  std::optional<ReferenceScore> reference = {};  // of all items' tokens; KL where all have it
};

// In percent; NaN where there is none.
struct ScoreInterval {
  double low = NAN, high = NAN;
};
// The 95 % interval of a share of `items` by Wilson's score (1927). Unlike one made of the standard
// error, it is not empty where all or none are right.
ScoreInterval WilsonInterval(double percent, double items);

// What a sweep varies, and the values in the order they were given.
struct SweepAxis {
  std::string name;
  std::vector<std::string> values;
  friend bool operator==(const SweepAxis&, const SweepAxis&) = default;
};

struct MethodScore {
  std::string label;
  // Of a sweep: the label without its point, and the point, value by axis; else empty.
  std::string base = {};
  std::map<std::string, std::string> swept = {};
  std::string description;  // "oscar+ (Hadamard rotation), real pages, 2.25 history bits"
  bool simulated = false;
  bool is_remote = false;  // a server's: what its cache takes is not known
  double history_bits = 0;
  std::map<int64_t, double> stored_bits;  // context length -> bits, by formula
  std::map<std::string, TaskScore> tasks;
  std::optional<TextMetrics> text;
  // Strict scores against the BF16 cache, by task and over all long ones ("long"; over all where
  // none is); empty where BF16 was not measured. BF16 itself has none.
  std::map<std::string, PairedScore> paired;
  std::vector<std::pair<double, double>> layer_errors;  // (K logits, V), relative; may be empty

  // Means of tasks; none where no task has the score.
  std::optional<double> MeanStrict(const std::vector<std::string>& without = {}) const;
  std::optional<double> MeanAnswer() const;
  // Wilson intervals of those means: where another sample of as many items might have put them.
  // Exact for scores of 0 and 1, wider than need be for parts of a score.
  ScoreInterval StrictInterval(const std::vector<std::string>& without = {}) const;
  ScoreInterval AnswerInterval() const;
  // The same means of the reference's tokens; `tokens` is their sum. None where no task has it.
  std::optional<ReferenceScore> MeanReference(const std::vector<std::string>& without = {}) const;
  double MeanBits() const;
  uint64_t CacheBytes() const;
  int64_t Failed() const;
};

struct EvalResults {
  std::string model;
  std::string prefill;  // "cell 64", "exact, one prefill shared by all methods"
  std::vector<std::pair<std::string, std::string>> settings;  // for the reader
  std::vector<std::string> warnings;
  std::vector<MethodScore> methods;
  std::vector<SweepAxis> sweep;  // that methods are points of; may be empty
  // [layers][D] of the query second moment over their mean, largest first; may be empty.
  std::vector<std::vector<double>> spectra;
  // Tasks too short for a window of some method to fill: they never reach INT2 there.
  std::vector<std::string> short_tasks;
};

// Failed records count as wrong, and not for bits, tokens and bytes.
TaskScore ScoreTask(const std::vector<const ItemRecord*>& records);

// The key of MethodScore::paired that stands for the mean of tasks.
inline constexpr char kPairedMean[] = "long";
// Fills `paired` of one method. Both maps are records by task; items without a strict score are
// left out.
std::map<std::string, PairedScore> PairWith(
    const std::map<std::string, std::vector<const ItemRecord*>>& baseline,
    const std::map<std::string, std::vector<const ItemRecord*>>& method,
    const std::vector<std::string>& short_tasks);

// All tasks of all methods, lengths by their value: "vt@4096" before "vt@16384".
std::vector<std::string> TaskNames(const EvalResults& results);

std::string ResultsToJson(const EvalResults& results);
Result<EvalResults> ResultsFromJson(std::string_view text, std::string_view what);
std::string ResultsToCsv(const EvalResults& results);
// For the terminal.
std::string ResultsToTable(const EvalResults& results);

}  // namespace oscar
