// Published benchmarks from files in their published formats, with their prompts, sampling settings
// and scoring:
//
//   gsm8k          JSONL {question, answer "... #### 18"}
//   math500        JSONL {problem, answer}
//   aime25         JSONL {problem | question, answer}
//   humaneval      JSONL or .gz {task_id, prompt, entry_point, test}
//   gpqa           CSV with Question, Correct Answer, Incorrect Answer 1 to 3
//   mmlu           CSV without a header, question, four choices and the letter; or a directory of
//                  them, one a subject; or JSONL {question, choices, answer 0 to 3}
//   livecodebench  JSONL {question_content, starter_code, public_test_cases, private_test_cases,
//                  metadata, question_id}
//   longbench-e    directory of <set>_e.jsonl {input, context, answers, length, all_classes}
//
// A broken record is left out and named. Free functions; safe from any thread.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/status.h"
#include "tasks/suite.h"

namespace oscar {

std::span<const std::string_view> BenchmarkNames();
bool IsBenchmark(std::string_view name);

// The tasks of one benchmark; `path` is its file or directory. REQUIRES: IsBenchmark(name).
Result<EvalSuite> ReadBenchmark(std::string_view name, const std::filesystem::path& path,
                                const SuiteOptions& options);

// Files of longbench-e that its directory lacks; without one its task is left out.
std::vector<std::string> MissingLongBenchFiles(const std::filesystem::path& directory);

// Records of a CSV file: quotes, doubled quotes and line breaks inside them.
std::vector<std::vector<std::string>> ParseCsv(std::string_view text);

}  // namespace oscar
