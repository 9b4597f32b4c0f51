// RULER's synthetic tasks at any length, by our own generator: needles in a haystack (eight kinds),
// variable tracking, common words, frequent words, and questions about documents of SQuAD and
// HotpotQA, which users have. Prompts, counts and scoring are those that
// RULER publishes; the random values are ours, and the essays are whatever text is given, so single
// items are not RULER's own. The same seed, length, tokenizer and text give the same items. Free
// functions; safe from any thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "oscar/status.h"
#include "tasks/suite.h"

namespace oscar {

// "niah_single_1" ... "vt", "cwe", "fwe": those that need no data. "qa_1" and "qa_2" are RULER's,
// too.
std::span<const std::string_view> RulerTasks();
bool IsRulerTask(std::string_view name);
// Whether it takes its questions from RulerOptions::documents.
bool RulerTaskNeedsDocuments(std::string_view name);
// Whether the task hides its needles in prose; the others make all of their text themselves.
bool RulerTaskNeedsEssays(std::string_view name);

// Prose for needles: a text file as it is, or a .json file as RULER's own download script writes
// it, an object with the prose as "text". Must be UTF-8; errors name the file.
Result<std::string> ReadHaystack(const std::filesystem::path& path);

struct RulerOptions {
  int64_t length = 4096;  // tokens, prompt and answer together
  int64_t samples = 100;
  uint32_t seed = 42;
  std::string_view essays;  // of the kinds that hide needles in prose
  // Of qa_1: SQuAD's JSON; of qa_2: HotpotQA's.
  std::filesystem::path documents;
  // Tokens of a whole prompt as the model gets it.
  std::function<Result<int64_t>(std::string_view text)> count_tokens;
};

// kOutOfRange where the length is too short for the task.
Result<EvalTask> MakeRulerTask(std::string_view name, const RulerOptions& options);

}  // namespace oscar
