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

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/status.h"

namespace oscar {

struct EvalItem {
  std::string id;
  std::string prompt;     // the user's message
  std::string answer;     // exact, after stripping
  std::string reference;  // empty where only the answer counts
  int64_t max_tokens = 0;
};

struct EvalTask {
  std::string name;
  std::vector<EvalItem> items;
};

struct EvalSuite {
  std::vector<EvalTask> tasks;        // by name
  std::vector<std::string> warnings;  // "file:line: why it was left out"
  uint64_t content_hash = 0;          // of prompts, answers and references
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
  int64_t limit = 0;               // items a task; 0: all
  std::vector<std::string> tasks;  // names; empty: all
};

// kNotFound where the directory has no task file; kInvalidArgument for an unknown task name.
Result<EvalSuite> ReadSuite(const std::filesystem::path& directory, const SuiteOptions& options);

// What follows the last </think>, stripped of white space at both ends.
std::string_view FinalAnswer(std::string_view output);

}  // namespace oscar
