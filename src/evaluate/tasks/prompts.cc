#include "tasks/prompts.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>

namespace oscar {
namespace {

// Halves that are put together may be tokenized anew into a few more, so a cut is repeated.
constexpr int kMaxCuts = 8;

}  // namespace

Result<PromptEncoder> PromptEncoder::Load(const std::filesystem::path& model) {
  OSCAR_ASSIGN_OR_RETURN(Tokenizer tokenizer, Tokenizer::Load(model));
  PromptEncoder out(std::move(tokenizer));
  Result<ChatTemplate> chat = ChatTemplate::Load(model);
  if (chat.has_value()) {
    out.chat_ = std::move(*chat);
  } else if (chat.error().code() != StatusCode::kNotFound) {
    return Unexpected(chat.error());
  }
  return out;
}

Result<EncodedPrompt> PromptEncoder::Encode(const EvalTask& task, const EvalItem& item,
                                            int64_t output, int64_t context) const {
  EncodedPrompt out;
  out.text = item.prompt;
  if (task.max_input <= 0) {
    OSCAR_ASSIGN_OR_RETURN(out.tokens, EncodeWhole(item, out.text));
    return out;
  }
  OSCAR_ASSIGN_OR_RETURN(const std::vector<TokenId> tokens, tokenizer_.Encode(item.prompt));
  const std::span<const TokenId> all(tokens);
  int64_t limit = std::min<int64_t>(task.max_input, static_cast<int64_t>(tokens.size()));
  for (int cut = 0; cut < kMaxCuts; ++cut) {
    if (limit < static_cast<int64_t>(tokens.size())) {
      const auto half = static_cast<size_t>(limit / 2);
      out.text = tokenizer_.Decode(all.first(half), /*skip_special=*/false) +
                 tokenizer_.Decode(all.last(half), /*skip_special=*/false);
      out.kept = limit;
    }
    OSCAR_ASSIGN_OR_RETURN(out.tokens, EncodeWhole(item, out.text));
    const int64_t excess =
        context > 0 ? static_cast<int64_t>(out.tokens.size()) + output - context : 0;
    if (excess <= 0 || limit <= excess + 1) break;
    limit -= excess + excess % 2;  // both halves lose the same
  }
  return out;
}

Result<std::vector<int32_t>> PromptEncoder::EncodeWhole(const EvalItem& item,
                                                        const std::string& text) const {
  std::vector<int32_t> out;
  if (chat_.has_value() && item.use_template) {
    nlohmann::ordered_json messages = nlohmann::ordered_json::array();
    if (!item.system.empty()) messages.push_back({{"role", "system"}, {"content", item.system}});
    messages.push_back({{"role", "user"}, {"content", text}});
    TemplateInput input;
    input.messages = &messages;
    input.now = 0;  // templates that print the date print the same one every time
    OSCAR_ASSIGN_OR_RETURN(out, chat_->Encode(input, tokenizer_));
  } else {
    const std::string whole = item.system.empty() ? text : item.system + "\n\n" + text;
    OSCAR_ASSIGN_OR_RETURN(out, tokenizer_.Encode(whole, {.add_special = true}));
  }
  if (!item.prefix.empty()) {
    OSCAR_ASSIGN_OR_RETURN(const std::vector<TokenId> prefix, tokenizer_.Encode(item.prefix));
    out.insert(out.end(), prefix.begin(), prefix.end());
  }
  return out;
}

}  // namespace oscar
