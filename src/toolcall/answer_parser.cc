#include "toolcall/answer_parser.h"

#include <utility>

#include "toolcall/call_parser.h"
#include "toolcall/harmony.h"

namespace oscar {
namespace {

// Reasoning between tags, then what is said, with calls in it.
//
// A call inside reasoning is a thought where the reasoning is closed after it, and a call where the
// model ends its answer without closing it: models that are done with thinking forget the tag. That
// is what vLLM does with a whole answer; here a stream is the same, because text from such a call
// on is held back until it is known.
class TaggedParser final : public AnswerParser {
 public:
  explicit TaggedParser(const AnswerSyntax& syntax) : syntax_(syntax) {
    if (syntax.reasoning.has_value()) {
      splitter_.emplace(*syntax.reasoning, syntax.starts_in_reasoning);
    }
    if (!syntax.has_calls()) return;
    calls_.emplace(syntax);
    if (!syntax.reasoning.has_value()) return;
    AnswerSyntax first = syntax;
    first.parallel_calls = false;
    thought_.emplace(first);
  }

  void Push(std::string_view text, ParsedPiece* out) override {
    if (!splitter_.has_value()) return Say(text, out);
    const ReasoningSplitter::Output split = splitter_->Push(text);
    Think(split.reasoning, out);
    if (splitter_->is_over()) CloseReasoning(out);
    Say(split.content, out);
  }

  void Finish(bool is_cut, ParsedPiece* out) override {
    if (splitter_.has_value()) {
      const ReasoningSplitter::Output split = splitter_->Finish();
      Think(split.reasoning, out);
      if (splitter_->in_reasoning() && !is_cut && thought_.has_value()) {
        ParsedPiece rest;
        if (!thought_->ended()) thought_->Finish(false, &rest);
        Release(rest.content.size(), out);
        if (thought_->ended()) Say(std::exchange(held_, {}), out);
      }
      CloseReasoning(out);
      Say(split.content, out);
    }
    if (calls_.has_value()) calls_->Finish(is_cut, out);
  }

  bool in_reasoning() const override { return splitter_.has_value() && splitter_->in_reasoning(); }
  bool ended() const override { return calls_.has_value() && calls_->ended(); }

 private:
  void Say(std::string_view text, ParsedPiece* out) {
    if (calls_.has_value()) {
      calls_->Push(text, out);
    } else {
      out->content += text;
    }
  }
  void Think(std::string_view text, ParsedPiece* out) {
    if (!thought_.has_value()) {
      out->reasoning += text;
      return;
    }
    held_ += text;
    if (thought_->ended()) return;  // behind a call
    ParsedPiece piece;
    thought_->Push(text, &piece);
    Release(piece.content.size(), out);
  }
  // What is held back is no call after all.
  void CloseReasoning(ParsedPiece* out) {
    if (thought_.has_value()) Release(held_.size(), out);
    thought_.reset();
  }
  void Release(size_t size, ParsedPiece* out) {
    out->reasoning.append(held_, 0, size);
    held_.erase(0, size);
  }

  const AnswerSyntax syntax_;
  std::optional<ReasoningSplitter> splitter_;
  std::optional<CallParser> calls_;
  std::optional<CallParser> thought_;  // looks for the first call in the reasoning
  std::string held_;                   // reasoning that may be a call, or follows one
};

}  // namespace

std::unique_ptr<AnswerParser> MakeAnswerParser(const AnswerSyntax& syntax) {
  if (syntax.harmony) return MakeHarmonyParser(syntax);
  if (!syntax.reasoning.has_value() && !syntax.has_calls()) return nullptr;
  return std::make_unique<TaggedParser>(syntax);
}

std::vector<std::string_view> MarkersOf(const AnswerSyntax& syntax) {
  if (syntax.harmony) return HarmonyMarkers();
  std::vector<std::string_view> markers;
  if (syntax.reasoning.has_value()) {
    markers = {syntax.reasoning->open, syntax.reasoning->close};
  }
  if (!syntax.has_calls()) return markers;
  const auto add = [&](std::initializer_list<std::string_view> more) {
    markers.insert(markers.end(), more);
  };
  switch (syntax.calls) {
    case CallFormat::kHermes:
    case CallFormat::kQwen3Coder:
      add({"<tool_call>", "</tool_call>"});
      break;
    case CallFormat::kGlm:
      add({"<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
           "</arg_value>"});
      break;
    case CallFormat::kMiniMax:
      add({"<minimax:tool_call>", "</minimax:tool_call>"});
      break;
    case CallFormat::kLlama3:
      add({"<|python_tag|>"});
      break;
    case CallFormat::kMistral:
    case CallFormat::kMistralList:
      add({"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"});
      break;
    case CallFormat::kNone:
    case CallFormat::kHarmony:
      break;
  }
  return markers;
}

}  // namespace oscar
