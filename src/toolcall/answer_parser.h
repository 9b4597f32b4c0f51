// AnswerParser: what of a model's text is said, what is reasoned, which tools are called. Text may
// be cut anywhere: the result, joined, is the same. One object per answer; not shared.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/tool_call.h"
#include "text/reasoning.h"
#include "toolcall/format.h"
#include "toolcall/tool_set.h"

namespace oscar {

// How an answer is written.
struct AnswerSyntax {
  // Where set, what the model marks as reasoning is kept apart from the answer.
  std::optional<ReasoningFormat> reasoning;
  bool starts_in_reasoning = false;  // the prompt has opened it
  // The answer is a sequence of harmony messages. Their channels say what is reasoning, kept apart
  // where `reasoning` is set; its tags mean nothing then.
  bool harmony = false;
  // Calls are looked for where both are set.
  CallFormat calls = CallFormat::kNone;
  std::shared_ptr<const ToolSet> tools;
  bool parallel_calls = true;  // else the answer ends with its first call

  bool has_calls() const { return calls != CallFormat::kNone && tools != nullptr; }
};

// What a parser makes of a piece of an answer.
struct ParsedPiece {
  std::string content, reasoning;
  std::vector<ToolCallDelta> tool_calls;
};

class AnswerParser {
 public:
  virtual ~AnswerParser() = default;
  // Both append to `out`.
  virtual void Push(std::string_view text, ParsedPiece* out) = 0;
  // `is_cut`: the answer was ended from outside, by a limit, and not by the model.
  virtual void Finish(bool is_cut, ParsedPiece* out) = 0;
  virtual bool in_reasoning() const { return false; }
  // One call was allowed and is out: nothing more will be.
  virtual bool ended() const { return false; }
};

// Null where all text is content.
std::unique_ptr<AnswerParser> MakeAnswerParser(const AnswerSyntax& syntax);
// Marks that the parser must see even where special tokens are left out of the text.
std::vector<std::string_view> MarkersOf(const AnswerSyntax& syntax);

}  // namespace oscar
