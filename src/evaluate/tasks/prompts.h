// An item as a model gets it: the chat template round its message, the prefix of the answer after
// it, and the middle cut out of texts that are longer than their task or the context allows.
// Immutable after Load; safe from any thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "oscar/status.h"
#include "tasks/suite.h"
#include "text/chat.h"
#include "text/tokenizer.h"

namespace oscar {

struct EncodedPrompt {
  std::string text;  // of the user's message, cut
  std::vector<int32_t> tokens;
  // Tokens that the text was cut to; 0: it is whole.
  int64_t kept = 0;
};

class PromptEncoder {
 public:
  // The tokenizer and, where there is one, the chat template of a model's directory.
  static Result<PromptEncoder> Load(const std::filesystem::path& model);

  const Tokenizer& tokenizer() const { return tokenizer_; }
  bool has_template() const { return chat_.has_value(); }

  // A task with `max_input` has its longer texts cut in the middle, to `max_input` tokens before
  // the template as published, or to fewer where prompt and `output` tokens would not fit `context`
  // (0: unknown). Other tasks' texts are never cut; the caller looks at the size.
  Result<EncodedPrompt> Encode(const EvalTask& task, const EvalItem& item, int64_t output,
                               int64_t context) const;

 private:
  explicit PromptEncoder(Tokenizer tokenizer) : tokenizer_(std::move(tokenizer)) {}
  Result<std::vector<int32_t>> EncodeWhole(const EvalItem& item, const std::string& text) const;

  Tokenizer tokenizer_;
  std::optional<ChatTemplate> chat_;
};

}  // namespace oscar
