// An evaluation suite: tasks of items, each a chat prompt with what should follow. A suite
// directory holds one JSONL file a task; a record is
//
//   {"id", "task", "prompt" | "context" + "question", "answer", "reference", "max_tokens"}
//
// With a context, the user message is the intro, a newline, haystack[start : start + chars] with
// every insert [offset, text] put in at its offset (the text and one space), a newline and the
// question; offsets count Unicode code points of the directory's haystack.txt. `reference` is the
// whole expected output, `answer` what must follow its last </think>.
//
// Plain values. A broken line is left out and named in `warnings`; it never ends a run.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/options.h"
#include "oscar/status.h"

namespace oscar {

// How an output is judged; see scoring.h.
enum class Scorer : uint8_t {
  kExact,             // equal to `answer`
  kContainsAll,       // share of `answers` that occur in it
  kMath,              // the same mathematical answer
  kNumber,            // the same number
  kChoice,            // the letter after "Answer:"
  kHumanEval,         // `tests` pass
  kLiveCode,          // the same, by LiveCodeBench's rules
  kTokenF1,           // the rest: LongBench's scores, the best over `answers`
  kTokenF1FirstLine,  //
  kRougeL,
  kRougeLFirstLine,
  kClass,
  kNumbersNamed,
  kCodeSimilarity,
  kContainsAny,  // one of `answers` occurs in it
};

struct EvalItem {
  std::string id;
  std::string system;     // a system message; empty: none
  std::string prompt;     // the user's message
  std::string prefix;     // begins the assistant's turn
  std::string answer;     // exact, after stripping
  std::string reference;  // empty where only the answer counts
  int64_t max_tokens = 0;
  std::vector<std::string> answers;  // of scorers that take several
  std::vector<std::string> classes;  // kClass
  // kHumanEval: the prompt's code, the tests and the function's name; kLiveCode: tests.json.
  std::string tests_prompt, tests, entry_point;
  int64_t num_tests = 0;
  // Scores are averaged within buckets and then over them; empty: no buckets.
  std::string bucket;
  bool use_template = true;  // false: the prompt is given to the model as it is
};

struct EvalTask {
  std::string name;
  std::vector<EvalItem> items;
  Scorer scorer = Scorer::kExact;
  // As published; the command line overrides both. Unset: greedy.
  std::optional<SamplingOptions> sampling;
  int repeats = 1;
  int64_t max_input = 0;  // longer prompts lose tokens in the middle; 0: no limit
};

struct EvalSuite {
  std::vector<EvalTask> tasks;        // by name
  std::vector<std::string> warnings;  // "file:line: why it was left out"
  // Every task there is, whether or not `SuiteOptions::tasks` takes it.
  std::vector<std::string> names;
};

// UTF-8 text with random access by code point. Immutable.
class CodePointText {
 public:
  // kDataLoss on ill-formed UTF-8.
  static Result<CodePointText> Create(std::string text, std::string_view what);
  size_t size() const { return starts_.size() - 1; }  // code points
  // REQUIRES: first <= last <= size().
  std::string_view Slice(size_t first, size_t last) const {
    return std::string_view(text_).substr(starts_[first], starts_[last] - starts_[first]);
  }

 private:
  std::string text_;
  std::vector<uint32_t> starts_ = {0};  // byte offset of each code point, then the end
};

struct SuiteOptions {
  int64_t limit = 0;                                // items per task; 0: all
  std::vector<std::string> tasks;                   // names; empty: all
  std::map<std::string, int64_t> task_limits = {};  // in place of `limit`

  bool Takes(std::string_view task) const {
    return tasks.empty() || std::find(tasks.begin(), tasks.end(), task) != tasks.end();
  }
  int64_t LimitOf(const std::string& task) const {
    const auto found = task_limits.find(task);
    return found == task_limits.end() ? limit : found->second;
  }
};

// kNotFound where the directory has no task file. Whether every name in `options` is known can be
// seen when all suites are there: JoinSuites.
Result<EvalSuite> ReadSuite(const std::filesystem::path& directory, const SuiteOptions& options);

// One record of `task`; `haystack` may be null where it has no context.
Result<EvalItem> ParseItem(std::string_view line, std::string_view task,
                           const CodePointText* haystack);

// A suite and what it was asked for by: "demo", "tasks/long", "math500=FILE".
struct NamedSuite {
  std::string source;
  EvalSuite suite;
};

// All tasks in one list, names apart: of two suites with a task "sort" they become "a/sort" and
// "b/sort". A task without items is left out with a warning. kInvalidArgument where `options` names
// a task that none has, where the same items are there twice, and where nothing is left.
Result<EvalSuite> JoinSuites(std::vector<NamedSuite> parts, const SuiteOptions& options);

// Calls `parse` with every line of a JSONL file that is not empty, until `limit` of them were taken
// (0: all). A line that `parse` refuses is named in `warnings` with its number.
Status ReadJsonLines(const std::filesystem::path& path, int64_t limit,
                     std::vector<std::string>& warnings,
                     const std::function<Status(std::string_view line, int64_t index)>& parse);

// What follows the last </think>, stripped of white space at both ends.
std::string_view FinalAnswer(std::string_view output);

}  // namespace oscar
