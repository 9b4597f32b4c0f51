#include "messages/request.h"

#include <fmt/core.h>

#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

#include "openai/chat_builder.h"
#include "openai/field_reader.h"

namespace oscar::server {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array<FieldName, 3> kNames = {{{"stop", "stop_sequences"},
                                              {"response_format", "output_config.format"},
                                              {"reasoning_effort", "output_config.effort"}}};
// Fields that a chat has under the same name, this server's own among them.
constexpr const char* kSameFields[] = {"model",
                                       "max_tokens",
                                       "temperature",
                                       "top_p",
                                       "top_k",
                                       "stream",
                                       "seed",
                                       "min_p",
                                       "frequency_penalty",
                                       "presence_penalty",
                                       "repetition_penalty",
                                       "logit_bias",
                                       "stop_token_ids",
                                       "ignore_eos",
                                       "min_tokens",
                                       "chat_template_kwargs",
                                       "request_id",
                                       "cache_salt",
                                       "priority",
                                       "bad_words",
                                       "allowed_token_ids",
                                       "structured_outputs"};

std::string Quoted(const Json& value) {
  const std::string text = value.is_string()
                               ? value.get<std::string>()
                               : value.dump(-1, ' ', false, Json::error_handler_t::replace);
  return Json(text.substr(0, 64)).dump(-1, ' ', true, Json::error_handler_t::replace);
}

ApiError BadBlock(const std::string& where, std::string_view message) {
  return InvalidValue(where, fmt::format("'{}' {}", where, message));
}

std::optional<ApiError> CheckString(const Json& block, const char* name, const std::string& where) {
  const auto at = block.find(name);
  const std::string place = fmt::format("{}.{}", where, name);
  if (at == block.end() || at->is_null()) return MissingParameter(place);
  if (!at->is_string()) {
    return BadBlock(place, fmt::format("must be a string, not {}", JsonTypeName(*at)));
  }
  return std::nullopt;
}

std::optional<ApiError> CheckBlock(const Json& block, const std::string& where) {
  if (!block.is_object()) return BadBlock(where, "must be an object");
  return CheckString(block, "type", where);
}

ApiError UnsupportedBlock(const Json& block, const std::string& where) {
  return UnsupportedParameter(
      where + ".type", fmt::format("'{}': content blocks of type {} are not supported", where,
                                   Quoted(block.at("type"))));
}

// A string, or blocks that are all text, as the content of a chat message: one text as a string,
// several as parts.
ApiResult<Json> TextContent(const Json& content, const std::string& where) {
  if (content.is_string()) return content;
  if (!content.is_array()) {
    return tl::unexpected(BadBlock(where, "must be a string or a list of content blocks"));
  }
  Json parts = Json::array();
  for (size_t i = 0; i < content.size(); ++i) {
    const std::string place = fmt::format("{}[{}]", where, i);
    const Json& block = content[i];
    if (auto error = CheckBlock(block, place)) return tl::unexpected(std::move(*error));
    if (block.at("type") != "text") return tl::unexpected(UnsupportedBlock(block, place));
    if (auto error = CheckString(block, "text", place)) return tl::unexpected(std::move(*error));
    parts.push_back({{"type", "text"}, {"text", block.at("text")}});
  }
  if (parts.empty()) return Json("");
  if (parts.size() == 1) return parts.front().at("text");
  return parts;
}

std::optional<ApiError> AddToolResult(const Json& block, const std::string& where,
                                      ChatBuilder* chat) {
  if (auto error = CheckString(block, "tool_use_id", where)) return error;
  const auto content = block.find("content");
  const bool has_content = content != block.end() && !content->is_null();
  auto text = TextContent(has_content ? *content : Json(""), where + ".content");
  if (!text.has_value()) return text.error();
  // An empty result would not say that something went wrong.
  if (*text == "" && block.value("is_error", Json()) == true) *text = "error";
  const auto id = block.at("tool_use_id").get<std::string>();
  if (chat->Result(id, std::move(*text))) return std::nullopt;
  return BadBlock(where + ".tool_use_id",
                  fmt::format("is {}, and no tool_use block before it has that id", Quoted(id)));
}

std::optional<ApiError> AddUserBlocks(const Json& blocks, const std::string& where,
                                      ChatBuilder* chat) {
  Json texts = Json::array();
  const auto flush = [&] {
    if (texts.empty()) return;
    chat->User(texts.size() == 1 ? texts.front().at("text") : texts);
    texts = Json::array();
  };
  for (size_t i = 0; i < blocks.size(); ++i) {
    const Json& block = blocks[i];
    const std::string place = fmt::format("{}[{}]", where, i);
    if (auto error = CheckBlock(block, place)) return error;
    if (block.at("type") == "text") {
      if (auto error = CheckString(block, "text", place)) return error;
      texts.push_back({{"type", "text"}, {"text", block.at("text")}});
    } else if (block.at("type") == "tool_result") {
      flush();
      if (auto error = AddToolResult(block, place, chat)) return error;
    } else {
      return UnsupportedBlock(block, place);
    }
  }
  flush();
  return std::nullopt;
}

std::optional<ApiError> AddAssistantBlocks(const Json& blocks, const std::string& where,
                                           ChatBuilder* chat) {
  for (size_t i = 0; i < blocks.size(); ++i) {
    const Json& block = blocks[i];
    const std::string place = fmt::format("{}[{}]", where, i);
    if (auto error = CheckBlock(block, place)) return error;
    const auto& type = block.at("type").get_ref<const std::string&>();
    if (type == "text") {
      if (auto error = CheckString(block, "text", place)) return error;
      chat->AssistantText(block.at("text").get_ref<const std::string&>());
    } else if (type == "thinking") {
      if (auto error = CheckString(block, "thinking", place)) return error;
      chat->Reasoning(block.at("thinking").get_ref<const std::string&>());
    } else if (type == "tool_use") {
      if (auto error = CheckString(block, "id", place)) return error;
      if (auto error = CheckString(block, "name", place)) return error;
      const auto input = block.find("input");
      if (input == block.end() || !input->is_object()) {
        return BadBlock(place + ".input", "must be an object");
      }
      chat->Call(block.at("id"), block.at("name"), *input);
    } else if (type != "redacted_thinking") {  // which nobody here can read
      return UnsupportedBlock(block, place);
    }
  }
  return std::nullopt;
}

std::optional<ApiError> AddMessage(const Json& message, const std::string& where,
                                   ChatBuilder* chat) {
  if (!message.is_object()) return BadBlock(where, "must be an object");
  if (auto error = CheckString(message, "role", where)) return error;
  const auto content = message.find("content");
  const std::string place = where + ".content";
  if (content == message.end() || content->is_null()) return MissingParameter(place);
  if (!content->is_string() && !content->is_array()) {
    return BadBlock(place, "must be a string or a list of content blocks");
  }
  const auto& role = message.at("role").get_ref<const std::string&>();
  if (role == "user") {
    if (content->is_array()) return AddUserBlocks(*content, place, chat);
    chat->User(*content);
  } else if (role == "assistant") {
    if (content->is_array()) return AddAssistantBlocks(*content, place, chat);
    chat->AssistantText(content->get_ref<const std::string&>());
  } else if (role == "system") {
    auto text = TextContent(*content, place);
    if (!text.has_value()) return text.error();
    chat->System(std::move(*text));
  } else {
    return BadBlock(where + ".role", "must be user, assistant or system");
  }
  return std::nullopt;
}

void ReadConversation(FieldReader& fields, const RequestLimits& limits, Json* out) {
  ChatBuilder chat(/*join_users=*/true);
  if (const Json* system = fields.Find("system"); system != nullptr) {
    auto text = TextContent(*system, "system");
    if (!text.has_value()) return fields.Fail(text.error());
    if (*text != "") chat.System(std::move(*text));
  }
  const Json* messages = fields.Find("messages");
  if (messages == nullptr) return fields.Fail(MissingParameter("messages"));
  if (!messages->is_array()) return fields.FailValue("messages", "must be a list");
  if (messages->empty()) return fields.FailValue("messages", "must not be empty");
  if (messages->size() > limits.max_messages) {
    return fields.FailValue("messages", fmt::format("has {} entries; the limit is {}",
                                                    messages->size(), limits.max_messages));
  }
  for (size_t i = 0; i < messages->size(); ++i) {
    if (auto error = AddMessage((*messages)[i], fmt::format("messages[{}]", i), &chat)) {
      return fields.Fail(std::move(*error));
    }
  }
  // An answer that the client has begun.
  if (chat.ends_with_text()) (*out)["continue_final_message"] = true;
  (*out)["messages"] = chat.Take();
}

void ReadTools(FieldReader& fields, Json* out) {
  const Json* tools = fields.Find("tools");
  if (tools == nullptr) return;
  if (!tools->is_array()) return fields.FailValue("tools", "must be a list");
  Json functions = Json::array();
  for (size_t i = 0; i < tools->size(); ++i) {
    const Json& tool = (*tools)[i];
    const std::string where = fmt::format("tools[{}]", i);
    if (!tool.is_object()) return fields.FailValue(where, "must be an object");
    const Json type = tool.value("type", Json());
    if (!type.is_null() && type != "custom") {
      return fields.Fail(UnsupportedParameter(
          where + ".type", fmt::format("'{}': tools of type {} are not supported; tools with a "
                                       "name and an input_schema are",
                                       where, Quoted(type))));
    }
    const auto name = tool.find("name");
    if (name == tool.end() || !name->is_string() || name->get_ref<const std::string&>().empty()) {
      return fields.FailValue(where + ".name", "must be a string that is not empty");
    }
    const auto schema = tool.find("input_schema");
    if (schema == tool.end() || !schema->is_object()) {
      return fields.FailValue(where + ".input_schema", "must be an object");
    }
    Json function = {{"name", *name}};
    if (tool.contains("description") && !tool.at("description").is_null()) {
      function["description"] = tool.at("description");
    }
    function["parameters"] = *schema;
    if (tool.contains("strict") && !tool.at("strict").is_null()) {
      function["strict"] = tool.at("strict");
    }
    functions.push_back({{"type", "function"}, {"function", std::move(function)}});
  }
  if (!functions.empty()) (*out)["tools"] = std::move(functions);
}

void ReadToolChoice(FieldReader& fields, Json* out) {
  const Json* choice = fields.Find("tool_choice");
  if (choice == nullptr) return;
  if (!choice->is_object()) return fields.FailValue("tool_choice", "must be an object");
  const Json type = choice->value("type", Json());
  if (type == "auto" || type == "none") {
    (*out)["tool_choice"] = type;
  } else if (type == "any") {
    (*out)["tool_choice"] = "required";
  } else if (type == "tool") {
    (*out)["tool_choice"] = {{"type", "function"},
                             {"function", {{"name", choice->value("name", Json())}}}};
  } else {
    return fields.FailValue("tool_choice", "must have a 'type' of auto, any, tool or none");
  }
  FieldReader more(*choice, "tool_choice.");
  bool one_at_a_time = false;
  more.Bool("disable_parallel_tool_use", &one_at_a_time);
  if (!more.ok()) return fields.Fail(more.error());
  if (one_at_a_time) (*out)["parallel_tool_calls"] = false;
}

// What templates know a model's reasoning by, unless the request says so itself.
void ReadThinking(FieldReader& fields, Json* out) {
  const Json* thinking = fields.Find("thinking");
  if (thinking == nullptr) return;
  if (!thinking->is_object()) return fields.FailValue("thinking", "must be an object");
  const Json type = thinking->value("type", Json());
  const bool is_on = type == "enabled";
  if (!is_on && type != "disabled" && type != "adaptive" && type != "between_tools") {
    return fields.FailValue("thinking", "must have a 'type' of enabled, disabled or adaptive");
  }
  FieldReader more(*thinking, "thinking.");
  int64_t budget = 0;
  more.Int("budget_tokens", 1, int64_t{1} << 31, &budget);
  if (!more.ok()) return fields.Fail(more.error());
  if (!is_on && type != "disabled") return;
  Json& kwargs = (*out)["chat_template_kwargs"];
  if (kwargs.is_null()) kwargs = Json::object();
  if (kwargs.is_object() && !kwargs.contains("enable_thinking")) kwargs["enable_thinking"] = is_on;
}

void ReadOutputConfig(FieldReader& fields, Json* out) {
  const Json* config = fields.Find("output_config");
  if (config == nullptr) return;
  if (!config->is_object()) return fields.FailValue("output_config", "must be an object");
  if (const Json effort = config->value("effort", Json()); !effort.is_null()) {
    (*out)["reasoning_effort"] = effort;
  }
  const Json format = config->value("format", Json());
  if (format.is_null()) return;
  if (!format.is_object() || format.value("type", Json()) != "json_schema") {
    return fields.FailValue("output_config.format", "must have the 'type' json_schema");
  }
  (*out)["response_format"] = {
      {"type", "json_schema"},
      {"json_schema",
       {{"name", "output"}, {"schema", format.value("schema", Json())}, {"strict", true}}}};
}

ApiResult<ChatRequest> Parse(std::string_view body, const RequestLimits& limits, bool generates) {
  auto read = ReadRequestBody(body, limits.max_json_depth, limits.max_json_values);
  if (!read.has_value()) return tl::unexpected(read.error());
  FieldReader& fields = *read;
  Json chat = Json::object();
  for (const char* name : kSameFields) {
    if (const Json* value = fields.Find(name); value != nullptr) chat[name] = *value;
  }
  if (const Json* stop = fields.Find("stop_sequences"); stop != nullptr) {
    if (!stop->is_array()) fields.FailValue("stop_sequences", "must be a list of strings");
    chat["stop"] = *stop;
  }
  if (generates && !chat.contains("max_tokens")) fields.Fail(MissingParameter("max_tokens"));
  ReadConversation(fields, limits, &chat);
  ReadTools(fields, &chat);
  ReadToolChoice(fields, &chat);
  ReadThinking(fields, &chat);
  ReadOutputConfig(fields, &chat);
  for (const char* name : {"metadata", "cache_control", "context_management", "diagnostics",
                           "inference_geo", "user_profile_id", "workspace_id"}) {
    fields.Ignore(name);
  }
  // Clients that are told so, in these words, send the whole conversation instead.
  if (fields.Find("thread") != nullptr) {
    ApiError error = UnsupportedParameter("thread", "'thread' is not supported by this server");
    error.code = "thread_unsupported_request";
    fields.Fail(std::move(error));
  }
  fields.Unsupported("container");
  fields.Unsupported("mcp_servers", {Json::array()});
  fields.Unsupported("service_tier", {"auto", "standard_only"});
  fields.Unsupported("speed", {"standard"});
  if (!fields.ok()) return tl::unexpected(fields.error());
  fields.LogUnknown();
  auto request = ParseTranslatedChat(chat, limits, kNames);
  if (request.has_value()) request->params.may_cut_max_tokens = true;
  return request;
}

}  // namespace

ApiResult<ChatRequest> ParseMessagesRequest(std::string_view body, const RequestLimits& limits) {
  return Parse(body, limits, /*generates=*/true);
}

ApiResult<ChatRequest> ParseCountTokensRequest(std::string_view body, const RequestLimits& limits) {
  return Parse(body, limits, /*generates=*/false);
}

}  // namespace oscar::server
