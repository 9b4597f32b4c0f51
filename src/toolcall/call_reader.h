// CallReader: reads the calls of one format, from their begin marker on, in text that arrives in
// pieces. What a reader decides depends on the bytes up to where it decides and on nothing else, so
// the result is the same however the text is cut. Internal to this module; CallParser drives it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "toolcall/tool_set.h"

namespace oscar {

struct ReadCall {
  std::string name;
  std::string arguments;  // the text of a JSON object
  std::string id;         // that the model gave; empty: none
};

// Several calls that one marker opens.
struct CallBlock {
  size_t size = 0;  // bytes of the text, from the marker's first
  std::vector<ReadCall> calls;
};

class CallReader {
 public:
  enum class State : uint8_t { kMore, kBroken, kDone };

  explicit CallReader(const ToolSet& tools) : tools_(tools) {}
  virtual ~CallReader() = default;

  // Where a call may begin.
  virtual std::vector<std::string_view> markers() const = 0;
  // Where one may begin before anything but whitespace is said.
  virtual std::vector<std::string_view> start_markers() const { return {}; }
  // A new attempt, at a text that begins with `marker`.
  virtual void Start(std::string_view marker) = 0;
  // `text` only grows during an attempt. At the end kMore says that the text ended too early.
  // kDone has at least one call.
  virtual State Read(std::string_view text, bool at_end, CallBlock* block) = 0;

 protected:
  const ToolSet& tools_;
};

// A place in growing text. Its functions say kMore where the text so far does not decide.
class TextCursor {
 public:
  enum class Match : uint8_t { kMore, kNo, kYes };

  void Start(size_t at) { at_ = searched_ = at; }
  size_t at() const { return at_; }
  void SkipSpace(std::string_view text) {
    while (at_ < text.size() && std::string_view(" \t\r\n").find(text[at_]) != std::string::npos) {
      ++at_;
    }
    searched_ = at_;
  }
  // Goes behind `literal` where it is next.
  Match Take(std::string_view text, std::string_view literal) {
    const std::string_view rest = text.substr(at_);
    if (rest.starts_with(literal)) {
      Start(at_ + literal.size());
      return Match::kYes;
    }
    return literal.starts_with(rest) ? Match::kMore : Match::kNo;
  }
  // Goes to `end` where it is found and gives what is before it; more than `limit` bytes of that is
  // kNo. Never searches a byte twice.
  Match Until(std::string_view text, std::string_view end, size_t limit, std::string_view* before) {
    const size_t found = text.find(end, searched_);
    if (found == std::string_view::npos) {
      if (text.size() > at_ + limit + end.size()) return Match::kNo;
      searched_ = std::max(at_, text.size() - std::min(text.size(), end.size() - 1));
      return Match::kMore;
    }
    if (found > at_ + limit) return Match::kNo;
    *before = text.substr(at_, found - at_);
    Start(found);
    return Match::kYes;
  }
  // The name of a tool, up to a byte of `ends`. kNo as soon as no tool is called so.
  Match Name(std::string_view text, std::string_view ends, const ToolSet& tools,
             std::string* name) {
    const std::string_view rest = text.substr(at_);
    const size_t size = rest.find_first_of(ends);
    const std::string_view seen = rest.substr(0, size);
    if (size == std::string_view::npos) return tools.HasPrefix(seen) ? Match::kMore : Match::kNo;
    if (!tools.Has(seen)) return Match::kNo;
    *name = seen;
    Start(at_ + size);
    return Match::kYes;
  }

 private:
  size_t at_ = 0, searched_ = 0;
};

// Parameters of which a key is known and a value was read as raw text.
class RawArguments {
 public:
  void Add(const ToolSet& tools, std::string_view tool, std::string_view key, std::string_view raw);
  std::string Take();

 private:
  std::string text_;
};

// Reads {"name": ..., "arguments": {...}} ("parameters" is the same). False where that is no call:
// no JSON, no tool of that name, arguments that are no object. Arguments that are missing or null
// are {}; a string that holds an object stands for it.
bool ReadJsonCall(std::string_view json, const ToolSet& tools, ReadCall* call);
// Whether `text` is a JSON object.
bool IsJsonObject(std::string_view text);

std::unique_ptr<CallReader> MakeHermesReader(const ToolSet& tools);
std::unique_ptr<CallReader> MakeQwen3CoderReader(const ToolSet& tools);
std::unique_ptr<CallReader> MakeLlama3Reader(const ToolSet& tools);
std::unique_ptr<CallReader> MakeGlmReader(const ToolSet& tools);
std::unique_ptr<CallReader> MakeMiniMaxReader(const ToolSet& tools);
std::unique_ptr<CallReader> MakeMistralReader(const ToolSet& tools);

}  // namespace oscar
