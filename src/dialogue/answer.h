// AnswerAssembler: the tokens of one answer on their way to text: detokenized, searched for stop
// strings, split into reasoning, content and calls of tools, cut into pieces that are safe to show.
// A piece never ends inside a character or inside what may become a stop string. One object per
// answer, used by one thread.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dialogue/stop_matcher.h"
#include "oscar/options.h"
#include "oscar/tool_call.h"
#include "text/detokenizer.h"
#include "text/tokenizer.h"
#include "toolcall/answer_parser.h"

namespace oscar {

struct AnswerFormat {
  std::vector<std::string> stop;
  std::vector<int32_t> stop_token_ids;  // of the request: stop_token() names the one that matched
  std::vector<int32_t> eos_ids;         // of the model, unless the request ignores them
  bool include_stop = false;
  bool skip_special = true;
  int64_t min_tokens = 0;
  AnswerSyntax syntax;
};

// New text of an answer.
struct AnswerPiece {
  std::string content, reasoning;
  std::vector<ToolCallDelta> tool_calls;
  // Tokens, in order, whose text is now complete. After a stop string those beyond it never are.
  size_t tokens = 0;
};

class AnswerAssembler {
 public:
  // `tokenizer` must outlive this object.
  AnswerAssembler(const Tokenizer& tokenizer, AnswerFormat format);

  // Appends to `piece`. True when the answer has ended, by a stop string or by the one call that it
  // may have: no more tokens are wanted.
  bool OnToken(int32_t token, AnswerPiece* piece);
  // A stop token that ends the answer without being part of its text.
  bool IsHiddenStop(int32_t token) const;
  // No more tokens come: flushes. What ended the answer before wins over `reason`.
  void OnFinish(FinishReason reason, AnswerPiece* piece);

  // Once finished.
  FinishReason finish_reason() const { return reason_; }
  // What ended the answer: a stop string, or a stop token of the request.
  const std::optional<std::string>& stop_string() const { return stop_string_; }
  const std::optional<int32_t>& stop_token() const { return stop_token_; }
  int64_t num_tokens() const { return num_tokens_; }
  // Of those, sampled while the model was reasoning; nothing for a model that marks none.
  std::optional<int64_t> reasoning_tokens() const;

 private:
  struct Span {
    size_t begin = 0, end = 0;  // bytes of the decoded stream
  };
  bool IsHidden(int32_t token) const;
  void Give(std::string_view text, AnswerPiece* piece);
  void GiveRest(bool is_cut, AnswerPiece* piece);
  void Release(bool cut, AnswerPiece* piece);
  void Stop(AnswerPiece* piece);
  void Append(ParsedPiece&& from, AnswerPiece* piece);

  AnswerFormat format_;
  const Tokenizer& tokenizer_;
  Detokenizer detokenizer_;
  StopMatcher matcher_;
  std::unique_ptr<AnswerParser> parser_;  // null: all is content
  std::vector<int32_t> markers_;          // special tokens that the parser must see
  std::deque<Span> pending_;              // tokens whose text is not all out
  size_t decoded_ = 0;
  int64_t num_tokens_ = 0, reasoning_tokens_ = 0;
  bool stopped_ = false, has_calls_ = false;
  FinishReason reason_ = FinishReason::kStop;
  std::optional<std::string> stop_string_;
  std::optional<int32_t> stop_token_;
};

}  // namespace oscar
