#include "text/chat.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/json.h"
#include "text/jinja/template.h"
#include "text/tool_history.h"
#include "text/unicode.h"

namespace oscar {
namespace {

using nlohmann::ordered_json;

Status BadField(std::string param, std::string_view why) {
  return InvalidArgument(fmt::format("{} {}", param, why)).WithParam(std::move(param));
}

constexpr std::array<std::string_view, 4> kRoles = {"system", "user", "assistant", "tool"};

Status CheckParts(const ordered_json& parts, const std::string& where) {
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto& part = parts[i];
    const std::string place = fmt::format("{}[{}]", where, i);
    const auto type = part.is_object() ? part.find("type") : part.end();
    if (!part.is_object() || type == part.end() || !type->is_string()) {
      return BadField(place, "must be an object with a \"type\"");
    }
    if (*type != "text") {
      return Status(StatusCode::kUnimplemented,
                    fmt::format("{}: only parts of type \"text\" are supported", place))
          .WithParam(place);
    }
    const auto text = part.find("text");
    if (text == part.end() || !text->is_string()) {
      return BadField(place, "must have a \"text\" that is a string");
    }
  }
  return {};
}

std::string JoinParts(const ordered_json& parts) {
  std::string text;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) text.push_back('\n');
    text += parts[i]["text"].get_ref<const std::string&>();
  }
  return text;
}

// Templates want the arguments of a call as an object; clients send them as JSON text.
Status ToolCallsForTemplate(ordered_json* calls, const std::string& where) {
  if (!calls->is_array()) return BadField(where, "must be a list");
  for (size_t i = 0; i < calls->size(); ++i) {
    auto& call = (*calls)[i];
    const std::string place = fmt::format("{}[{}]", where, i);
    if (!call.is_object()) return BadField(place, "must be an object");
    ordered_json* function = &call;
    if (call.contains("function")) function = &call["function"];
    if (!function->is_object() || !function->contains("name") || !(*function)["name"].is_string()) {
      return BadField(place + ".function.name", "must be a string");
    }
    auto& arguments = (*function)["arguments"];  // null where it is missing
    if (arguments.is_null()) arguments = ordered_json::object();
    if (!arguments.is_string()) continue;
    const auto& text = arguments.get_ref<const std::string&>();
    if (text.empty()) {
      arguments = ordered_json::object();
      continue;
    }
    // What is no object, or has numbers that would be shown otherwise, stays the text it was.
    auto parsed = ParseOrderedJson(text, place + ".function.arguments");
    if (parsed.has_value() && parsed->is_object() && CheckIntegersFit(text, "").ok())
      arguments = std::move(parsed).value();
  }
  return {};
}

Status NormalizeMessage(ordered_json& message, const std::string& where) {
  if (!message.is_object()) return BadField(where, "must be an object");
  for (auto it = message.begin(); it != message.end();) {
    it = it->is_null() ? message.erase(it) : std::next(it);
  }
  const auto role = message.find("role");
  if (role == message.end()) return BadField(where + ".role", "is required");
  if (!role->is_string()) return BadField(where + ".role", "must be a string");
  if (*role == "developer") *role = "system";
  if (std::find(kRoles.begin(), kRoles.end(), role->get_ref<const std::string&>()) ==
      kRoles.end()) {
    return BadField(where + ".role", "must be system, developer, user, assistant or tool");
  }
  const auto content = message.find("content");
  if (content == message.end()) {
    if (message["role"] != "assistant") return BadField(where + ".content", "is required");
    message["content"] = "";
  } else if (content->is_array()) {
    OSCAR_RETURN_IF_ERROR(CheckParts(*content, where + ".content"));
  } else if (!content->is_string()) {
    return BadField(where + ".content", "must be a string or a list of text parts");
  }
  for (const char* key : {"reasoning", "reasoning_content"}) {
    const auto it = message.find(key);
    if (it != message.end() && !it->is_string()) {
      return BadField(where + "." + key, "must be a string");
    }
  }
  if (message.contains("reasoning") && !message.contains("reasoning_content")) {
    message["reasoning_content"] = message["reasoning"];
  }
  if (const auto calls = message.find("tool_calls"); calls != message.end()) {
    // Templates ask whether the key is there, so an empty list must not be.
    if (calls->is_array() && calls->empty()) {
      message.erase("tool_calls");
    } else {
      OSCAR_RETURN_IF_ERROR(ToolCallsForTemplate(&*calls, where + ".tool_calls"));
    }
  }
  return {};
}

}  // namespace

Result<ordered_json> NormalizeMessages(const ordered_json& messages, size_t max_messages) {
  if (!messages.is_array()) return Unexpected(BadField("messages", "must be a list"));
  if (messages.empty()) return Unexpected(BadField("messages", "must not be empty"));
  if (messages.size() > max_messages) {
    return Unexpected(BadField(
        "messages", fmt::format("has {} entries; the limit is {}", messages.size(), max_messages)));
  }
  ordered_json out = messages;
  for (size_t i = 0; i < out.size(); ++i) {
    OSCAR_RETURN_IF_ERROR(NormalizeMessage(out[i], fmt::format("messages[{}]", i)));
  }
  return out;
}

struct ChatTemplate::Rep {
  struct Named {
    std::string name, source;
    jinja::Template parsed;
  };
  std::vector<Named> templates;
  ordered_json trusted = ordered_json::object();
  bool supports_parts = false;
  ToolHistoryStyle history;

  ToolHistoryStyle HistoryStyle() const;
  bool Mentions(std::string_view text) const {
    return std::ranges::any_of(templates, [&](const Named& named) {
      return named.source.find(text) != std::string::npos;
    });
  }
  const jinja::Template& Choose(bool has_tools) const {
    for (const Named& named : templates) {
      if (has_tools && named.name == "tool_use") return named.parsed;
    }
    for (const Named& named : templates) {
      if (named.name == "default") return named.parsed;
    }
    return templates.front().parsed;
  }
};

// What the template says of itself, and what it makes of a call.
ToolHistoryStyle ChatTemplate::Rep::HistoryStyle() const {
  ToolHistoryStyle style;
  style.short_ids = Mentions("length != 9");
  style.thinking = Mentions("<|channel|>analysis") && Mentions("message.thinking");
  style.single_calls = style.thinking || Mentions("only supports single tool-calls");
  const auto render = [&](const ordered_json& arguments) {
    const ordered_json call = {{"id", "oscarcall"},
                               {"type", "function"},
                               {"function", {{"name", "probe"}, {"arguments", arguments}}}};
    const ordered_json variables = {
        {"messages",
         {{{"role", "user"}, {"content", "x"}},
          {{"role", "assistant"}, {"content", ""}, {"tool_calls", ordered_json::array({call})}},
          {{"role", "tool"}, {"content", "1"}, {"tool_call_id", "oscarcall"}}}},
        {"tools", nullptr},
        {"documents", nullptr},
        {"add_generation_prompt", true}};
    const auto rendered = Choose(true).Render(variables, trusted);
    return rendered.has_value() ? rendered->text() : std::string();
  };
  const std::string given = render({{"oscar-key", "oscar-value"}});
  if (given.find("oscar-key") == std::string::npos ||
      given.find("'oscar-key'") != std::string::npos) {
    const std::string text = R"({"oscar-key": "oscar-value"})";
    style.text_arguments = render(text).find(text) != std::string::npos;
  }
  return style;
}

ChatTemplate::ChatTemplate(std::unique_ptr<const Rep> rep) : rep_(std::move(rep)) {}
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;
ChatTemplate::~ChatTemplate() = default;

Result<ChatTemplate> ChatTemplate::Load(const std::filesystem::path& folder) {
  OSCAR_ASSIGN_OR_RETURN(const TokenizerConfig config, LoadTokenizerConfig(folder));
  auto created = Create(config);
  if (!created.has_value()) return Unexpected(created.error().WithContext(folder.string()));
  return created;
}

Result<ChatTemplate> ChatTemplate::Create(const TokenizerConfig& config) {
  if (config.chat_templates.empty()) {
    return Unexpected(NotFound(
        "the model has no chat template (neither chat_template.jinja nor \"chat_template\" in "
        "tokenizer_config.json)"));
  }
  auto rep = std::make_unique<Rep>();
  for (const auto& [name, source] : config.chat_templates) {
    auto parsed = jinja::Template::Parse(source);
    if (!parsed.has_value()) {
      return Unexpected(parsed.error().WithContext(fmt::format("chat template \"{}\"", name)));
    }
    rep->templates.push_back({name, source, std::move(parsed).value()});
  }
  for (const auto& [role, text] : config.special_tokens) rep->trusted[role] = text;
  if (!config.additional_special_tokens.empty()) {
    rep->trusted["additional_special_tokens"] = config.additional_special_tokens;
  }
  // Ask the template: one that reads parts prints their text and not the list around it.
  const ordered_json probe = {
      {"messages",
       {{{"role", "user"}, {"content", {{{"type", "text"}, {"text", "oscar-probe"}}}}}}},
      {"tools", nullptr},
      {"documents", nullptr},
      {"add_generation_prompt", true}};
  const auto rendered = rep->Choose(false).Render(probe, rep->trusted);
  rep->supports_parts = rendered.has_value() &&
                        rendered->text().find("oscar-probe") != std::string::npos &&
                        rendered->text().find("'type'") == std::string::npos &&
                        rendered->text().find("\"type\"") == std::string::npos;
  rep->history = rep->HistoryStyle();
  return ChatTemplate(std::move(rep));
}

bool ChatTemplate::Mentions(std::string_view text) const { return rep_->Mentions(text); }
bool ChatTemplate::supports_parts() const { return rep_->supports_parts; }

std::string ChatPrompt::Text() const {
  std::string text;
  for (const TextSegment& segment : segments) text += segment.text;
  return text;
}

bool ChatPrompt::EndsWith(std::string_view tag) const {
  if (segments.empty() || !segments.back().trusted) return false;
  std::string_view tail = segments.back().text;
  tail = tail.substr(0, tail.find_last_not_of(" \t\r\n") + 1);
  return tail.ends_with(tag);
}

Result<ChatPrompt> ChatTemplate::Render(const TemplateInput& input) const {
  if (input.messages == nullptr) return Unexpected(BadField("messages", "is required"));
  if (input.continue_final_message && input.add_generation_prompt) {
    return Unexpected(BadField("continue_final_message", "excludes add_generation_prompt"));
  }
  ordered_json variables = ordered_json::object();
  OSCAR_ASSIGN_OR_RETURN(variables["messages"], NormalizeMessages(*input.messages));
  AdaptToolHistory(rep_->history, &variables["messages"]);
  if (!rep_->supports_parts) {
    for (ordered_json& message : variables["messages"]) {
      ordered_json& content = message["content"];
      if (content.is_array()) content = JoinParts(content);
    }
  }
  for (const auto& [key, value] :
       {std::pair("tools", input.tools), std::pair("documents", input.documents)}) {
    variables[key] = value != nullptr ? *value : ordered_json();
    if (!variables[key].is_null() && !variables[key].is_array()) {
      return Unexpected(BadField(key, "must be a list"));
    }
  }
  const bool has_tools = variables["tools"].is_array() && !variables["tools"].empty();
  if (!has_tools) variables["tools"] = nullptr;
  variables["add_generation_prompt"] = input.add_generation_prompt;
  if (input.template_arguments != nullptr && !input.template_arguments->is_null()) {
    if (!input.template_arguments->is_object()) {
      return Unexpected(BadField("chat_template_kwargs", "must be an object"));
    }
    for (const auto& [key, value] : input.template_arguments->items()) {
      if (variables.contains(key) || rep_->trusted.contains(key)) {
        return Unexpected(
            BadField("chat_template_kwargs." + key, "cannot be set: the name is taken"));
      }
      variables[key] = value;
    }
  }
  jinja::RenderOptions options;
  options.now = input.now;
  auto rendered = rep_->Choose(has_tools).Render(variables, rep_->trusted, options);
  if (!rendered.has_value()) {
    // What a template rejects (raise_exception, a missing field) is the request's fault.
    Status status = rendered.error().WithContext("chat template");
    if (status.code() != StatusCode::kInvalidArgument) return Unexpected(std::move(status));
    return Unexpected(std::move(status).WithParam("messages"));
  }
  jinja::MarkedText text = std::move(rendered).value();
  if (input.continue_final_message) {
    const auto& messages = variables["messages"];
    const bool has_text = !messages.empty() && messages.back()["content"].is_string();
    const std::string_view content =
        has_text ? std::string_view(messages.back()["content"].get_ref<const std::string&>())
                 : std::string_view();
    const size_t begin = content.find_first_not_of(" \t\r\n");
    const size_t end = content.find_last_not_of(" \t\r\n");
    const std::string_view kept =
        begin == std::string_view::npos ? "" : content.substr(begin, end - begin + 1);
    const size_t at = kept.empty() ? std::string::npos : text.text().rfind(kept);
    if (at == std::string::npos) {
      return Unexpected(
          BadField("continue_final_message", "needs a last message whose text the template keeps"));
    }
    text = text.Slice(0, at + kept.size());
  }
  ChatPrompt prompt;
  text.ForEachSegment([&](std::string_view part, bool is_input) {
    prompt.segments.push_back({std::string(part), !is_input});
  });
  return prompt;
}

Result<std::vector<TokenId>> ChatTemplate::Encode(const TemplateInput& input,
                                                  const Tokenizer& tokenizer) const {
  OSCAR_ASSIGN_OR_RETURN(const ChatPrompt prompt, Render(input));
  return tokenizer.Encode(prompt.segments);
}

}  // namespace oscar
