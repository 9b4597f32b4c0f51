// CallParser: finds calls of tools in what a model says. A call is held back until all of it is
// there and right, and then given out whole: only so can a broken one come back as the text it was,
// to the last character. Broken is what does not follow the format, names no tool of the request,
// or has arguments that are no JSON object. Its begin marker is text then, and reading resumes
// behind it; where the answer ends inside a call, the rest is text. Whitespace beside a call
// belongs to it, but for what separates the texts before and after. Internal to this module.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "toolcall/answer_parser.h"
#include "toolcall/call_reader.h"
#include "toolcall/tool_set.h"

namespace oscar {

// Numbers the calls of an answer and gives them ids.
class CallCounter {
 public:
  explicit CallCounter(const AnswerSyntax& syntax);
  void Give(ReadCall call, ParsedPiece* out);
  bool ended() const { return !parallel_ && count_ > 0; }

 private:
  bool parallel_;
  // Ids of nine letters and digits, which is all that some templates take back; else "call_...".
  bool short_ids_;
  size_t count_ = 0;
  std::vector<std::string> ids_;
};

class CallParser final : public AnswerParser {
 public:
  explicit CallParser(const AnswerSyntax& syntax);

  void Push(std::string_view text, ParsedPiece* out) override;
  void Finish(bool is_cut, ParsedPiece* out) override;
  bool ended() const override { return counter_.ended(); }

 private:
  void Step(bool at_end, ParsedPiece* out);
  bool FindCall(bool at_end, ParsedPiece* out);
  void Say(size_t size, ParsedPiece* out);

  const std::shared_ptr<const ToolSet> tools_;
  std::unique_ptr<CallReader> reader_;
  CallCounter counter_;
  std::string held_;   // text from where nothing is decided
  std::string space_;  // whitespace before it, which may turn out to be beside a call
  size_t searched_ = 0;
  size_t marker_size_ = 0;  // of the call that is being read; 0: none
  bool said_ = false;       // something but whitespace
  bool has_content_ = false, after_call_ = false;
};

}  // namespace oscar
