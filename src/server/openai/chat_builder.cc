#include "openai/chat_builder.h"

#include <utility>

namespace oscar::server {
namespace {

using Json = nlohmann::ordered_json;

bool HasRole(const Json& messages, const char* role) {
  return !messages.empty() && messages.back().at("role") == role;
}

void AppendText(std::string_view text, Json* field) {
  auto& into = field->get_ref<std::string&>();
  if (!into.empty()) into += '\n';
  into += text;
}

}  // namespace

void ChatBuilder::Join(Json content, Json* into) {
  const auto parts = [](Json&& value) {
    if (value.is_array()) return std::move(value);
    Json list = Json::array();
    list.push_back({{"type", "text"}, {"text", std::move(value)}});
    return list;
  };
  Json joined = parts(std::move(*into));
  for (Json& part : parts(std::move(content))) joined.push_back(std::move(part));
  *into = std::move(joined);
}

void ChatBuilder::System(Json content) {
  if (messages_.size() == 1 && HasRole(messages_, "system")) {
    return Join(std::move(content), &messages_.back()["content"]);
  }
  messages_.push_back({{"role", "system"}, {"content", std::move(content)}});
}

void ChatBuilder::User(Json content) {
  if (join_users_ && HasRole(messages_, "user")) {
    return Join(std::move(content), &messages_.back()["content"]);
  }
  messages_.push_back({{"role", "user"}, {"content", std::move(content)}});
}

ChatBuilder::Json& ChatBuilder::Assistant() {
  if (!HasRole(messages_, "assistant")) {
    messages_.push_back({{"role", "assistant"}, {"content", ""}});
  }
  return messages_.back();
}

void ChatBuilder::AssistantText(std::string_view text) {
  AppendText(text, &Assistant()["content"]);
}

void ChatBuilder::Reasoning(std::string_view text) {
  Json& message = Assistant();
  if (!message.contains("reasoning_content")) message["reasoning_content"] = "";
  AppendText(text, &message["reasoning_content"]);
}

void ChatBuilder::Call(const std::string& id, const std::string& name, Json arguments) {
  Json& message = Assistant();
  if (!message.contains("tool_calls")) message["tool_calls"] = Json::array();
  message["tool_calls"].push_back(
      {{"id", id},
       {"type", "function"},
       {"function", {{"name", name}, {"arguments", std::move(arguments)}}}});
  calls_[id] = name;
}

bool ChatBuilder::Result(const std::string& id, Json content) {
  const auto call = calls_.find(id);
  if (call == calls_.end()) return false;
  messages_.push_back({{"role", "tool"},
                       {"tool_call_id", id},
                       {"name", call->second},
                       {"content", std::move(content)}});
  return true;
}

bool ChatBuilder::ends_with_text() const {
  return HasRole(messages_, "assistant") && !messages_.back().contains("tool_calls");
}

}  // namespace oscar::server
