#include "openai/chat_messages.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/json.h"
#include "openai/field_reader.h"

namespace oscar::server {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array<std::string_view, 4> kRoles = {"system", "user", "assistant", "tool"};

tl::unexpected<ApiError> Wrong(std::string param, std::string_view message) {
  std::string text = fmt::format("'{}' {}", param, message);
  return tl::unexpected(InvalidValue(std::move(param), std::move(text)));
}

ApiResult<Json> ReadContent(const Json& content, const std::string& param) {
  if (content.is_string()) return content;
  if (!content.is_array()) {
    return Wrong(param, fmt::format("must be a string or a list of text parts, not {}",
                                    JsonTypeName(content)));
  }
  std::string joined;
  for (size_t i = 0; i < content.size(); ++i) {
    const Json& part = content[i];
    const std::string where = fmt::format("{}[{}]", param, i);
    const auto type = part.is_object() ? part.find("type") : part.end();
    if (!part.is_object() || type == part.end() || !type->is_string()) {
      return Wrong(where, "must be an object with a 'type'");
    }
    if (*type != "text") {
      return tl::unexpected(UnsupportedParameter(
          where, fmt::format("'{}': only parts of type \"text\" are supported", where)));
    }
    const auto text = part.find("text");
    if (text == part.end() || !text->is_string()) return Wrong(where, "must have a 'text' string");
    if (i > 0) joined += '\n';
    joined += text->get_ref<const std::string&>();
  }
  return Json(std::move(joined));
}

ApiResult<Json> ReadToolCalls(const Json& calls, const std::string& param) {
  if (!calls.is_array()) return Wrong(param, "must be a list");
  Json out = calls;
  for (size_t i = 0; i < out.size(); ++i) {
    Json& call = out[i];
    const std::string where = fmt::format("{}[{}]", param, i);
    if (!call.is_object()) return Wrong(where, "must be an object");
    const auto function = call.find("function");
    if (function == call.end()) continue;
    if (!function->is_object()) return Wrong(where + ".function", "must be an object");
    const auto arguments = function->find("arguments");
    if (arguments == function->end() || !arguments->is_string()) continue;
    // Arguments that are no object, or have numbers that would be shown otherwise, stay text.
    const std::string& text = arguments->get_ref<const std::string&>();
    auto parsed = ParseOrderedJson(text, "arguments");
    if (parsed.has_value() && parsed->is_object() && CheckIntegersFit(text, "").ok())
      *arguments = std::move(*parsed);
  }
  return out;
}

ApiResult<Json> ReadMessage(const Json& message, const std::string& param) {
  if (!message.is_object()) {
    return Wrong(param, fmt::format("must be an object, not {}", JsonTypeName(message)));
  }
  Json out = Json::object();
  const auto role = message.find("role");
  if (role == message.end() || role->is_null()) {
    return tl::unexpected(MissingParameter(param + ".role"));
  }
  if (!role->is_string()) return Wrong(param + ".role", "must be a string");
  std::string name = role->get<std::string>();
  if (name == "developer") name = "system";
  if (std::find(kRoles.begin(), kRoles.end(), name) == kRoles.end()) {
    return Wrong(param + ".role", "must be system, developer, user, assistant or tool");
  }
  out["role"] = name;
  const auto calls = message.find("tool_calls");
  const bool has_calls = calls != message.end() && !calls->is_null();
  const auto content = message.find("content");
  if (content == message.end() || content->is_null()) {
    if (name != "assistant") return tl::unexpected(MissingParameter(param + ".content"));
    out["content"] = has_calls ? Json(nullptr) : Json("");
  } else {
    auto text = ReadContent(*content, param + ".content");
    if (!text.has_value()) return tl::unexpected(text.error());
    out["content"] = std::move(*text);
  }
  if (has_calls) {
    auto read = ReadToolCalls(*calls, param + ".tool_calls");
    if (!read.has_value()) return tl::unexpected(read.error());
    out["tool_calls"] = std::move(*read);
  }
  for (const auto& [key, value] : message.items()) {
    if (!out.contains(key) && !value.is_null()) out[key] = value;
  }
  return out;
}

}  // namespace

ApiResult<Json> ParseMessages(const Json& messages, size_t max_messages) {
  if (!messages.is_array()) {
    return Wrong("messages", fmt::format("must be a list, not {}", JsonTypeName(messages)));
  }
  if (messages.empty()) return Wrong("messages", "must not be empty");
  if (messages.size() > max_messages) {
    return Wrong("messages",
                 fmt::format("has {} entries; the limit is {}", messages.size(), max_messages));
  }
  Json out = Json::array();
  for (size_t i = 0; i < messages.size(); ++i) {
    auto message = ReadMessage(messages[i], fmt::format("messages[{}]", i));
    if (!message.has_value()) return tl::unexpected(message.error());
    out.push_back(std::move(*message));
  }
  return out;
}

}  // namespace oscar::server
