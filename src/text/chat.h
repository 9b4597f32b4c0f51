// From the messages of a chat request to the tokens of a prompt. The template comes from the model;
// the messages, tools and keyword arguments from the request, so their text never turns into
// special tokens. Immutable after loading; share one between threads.
#pragma once

#include <filesystem>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/status.h"
#include "text/tokenizer.h"
#include "text/tokenizer_config.h"

namespace oscar {

// Messages as in OpenAI's API, checked and brought into the form that chat templates read: known
// roles ("developer" is "system"), contents that are strings or lists of text parts, arguments of
// tool calls as objects where they hold one, no null fields. Only an assistant's content may be
// missing. Errors name the field, "messages[2].content"; parts other than text are kUnimplemented.
inline constexpr size_t kMaxMessages = size_t{1} << 20;
Result<nlohmann::ordered_json> NormalizeMessages(const nlohmann::ordered_json& messages,
                                                 size_t max_messages = kMaxMessages);

// What a template is rendered with.
struct TemplateInput {
  // Required: a list of messages as in OpenAI's API. The pointers must outlive the call; null
  // means absent.
  const nlohmann::ordered_json* messages = nullptr;
  const nlohmann::ordered_json* tools = nullptr;
  const nlohmann::ordered_json* documents = nullptr;
  // More variables for the template, such as enable_thinking: an object.
  const nlohmann::ordered_json* template_arguments = nullptr;
  bool add_generation_prompt = true;
  // End the prompt inside the last message, for the model to continue it. Excludes a generation
  // prompt.
  bool continue_final_message = false;
  // For strftime_now, seconds since 1970 UTC; absent: now, in local time.
  std::optional<int64_t> now;
};

// A rendered prompt.
struct ChatPrompt {
  std::vector<TextSegment> segments;

  std::string Text() const;
  // Whether the template has written `tag` last, whitespace aside: what is generated is then inside
  // of what the tag opens.
  bool EndsWith(std::string_view tag) const;
};

class ChatTemplate {
 public:
  // kNotFound where the configuration has no template.
  static Result<ChatTemplate> Create(const TokenizerConfig& config);
  static Result<ChatTemplate> Load(const std::filesystem::path& folder);
  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;
  ~ChatTemplate();

  // Errors of the request carry the name of the field at fault (Status::param).
  Result<ChatPrompt> Render(const TemplateInput& input) const;
  // Nothing is added to the prompt: a template that wants a begin token writes it.
  Result<std::vector<TokenId>> Encode(const TemplateInput& input, const Tokenizer& tokenizer) const;

  // Whether the source of the template, or of one of several, has `text`.
  bool Mentions(std::string_view text) const;
  // Whether the template renders lists of content parts itself; otherwise text parts are joined by
  // newlines.
  bool supports_parts() const;

 private:
  struct Rep;
  explicit ChatTemplate(std::unique_ptr<const Rep> rep);
  std::unique_ptr<const Rep> rep_;
};

}  // namespace oscar
