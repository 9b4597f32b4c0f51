#include "responses/request.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "base/json.h"
#include "openai/chat_builder.h"
#include "openai/field_reader.h"
#include "responses/items.h"

namespace oscar::server {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxIdBytes = 256;
constexpr size_t kMaxMetadata = 16, kMaxMetadataKey = 64, kMaxMetadataValue = 512;

// What a chat calls otherwise.
constexpr std::array<FieldName, 4> kNames = {{{"max_completion_tokens", "max_output_tokens"},
                                              {"response_format", "text.format"},
                                              {"verbosity", "text.verbosity"},
                                              {"reasoning_effort", "reasoning.effort"}}};
// Fields that a chat has under the same name, this server's own among them.
constexpr const char* kSameFields[] = {"model",
                                       "temperature",
                                       "top_p",
                                       "top_logprobs",
                                       "stream",
                                       "parallel_tool_calls",
                                       "service_tier",
                                       "seed",
                                       "top_k",
                                       "min_p",
                                       "frequency_penalty",
                                       "presence_penalty",
                                       "repetition_penalty",
                                       "logit_bias",
                                       "stop",
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

std::string Dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string Quoted(const Json& name) {
  const auto text = name.is_string() ? name.get<std::string>().substr(0, 64) : Dump(name);
  return Json(text.substr(0, 64)).dump(-1, ' ', true, Json::error_handler_t::replace);
}

// The request on its way into a chat: its fields, the chat, and what the response will repeat.
class Translator {
 public:
  Translator(FieldReader& fields, const RequestLimits& limits) : fields_(fields), limits_(limits) {
    for (const char* name : kSameFields) {
      if (const Json* value = fields_.Find(name); value != nullptr) chat_[name] = *value;
    }
  }

  void Conversation(std::string_view response_id, const FindResponse& find, ResponsesRequest* out);
  void Tools();
  void Text();
  void Reasoning();
  void Rest(ResponsesRequest* out);
  const Json& chat() const { return chat_; }
  const Json& echo() const { return echo_; }

 private:
  std::optional<ApiError> AddStored(const StoredResponse* last, ItemBudget* budget,
                                    ChatBuilder* chat);
  void ToolChoice();
  void AllowedTools(const Json& choice);
  void Metadata();
  void Include();

  FieldReader& fields_;
  const RequestLimits& limits_;
  Json chat_ = Json::object();
  Json echo_ = Json::object();
};

// The conversation so far, oldest first.
std::optional<ApiError> Translator::AddStored(const StoredResponse* last, ItemBudget* budget,
                                              ChatBuilder* chat) {
  std::vector<const StoredResponse*> chain;
  size_t items = 0;
  for (const StoredResponse* one = last; one != nullptr; one = one->previous.get()) {
    const size_t bytes = one->input.size() + one->output_size;
    items += one->items;
    if (items > limits_.max_messages || bytes > budget->bytes) {
      return InvalidValue(
          "previous_response_id",
          fmt::format("the conversation that 'previous_response_id' continues has more than {} "
                      "items or {} bytes",
                      limits_.max_messages, limits_.max_conversation_bytes));
    }
    budget->bytes -= bytes;
    chain.push_back(one);
  }
  for (auto one = chain.rbegin(); one != chain.rend(); ++one) {
    for (const std::string_view text : {std::string_view((*one)->input), (*one)->output()}) {
      const size_t cost = JsonCost(text);
      if (cost > budget->cost) {
        return InvalidValue("previous_response_id",
                            "the conversation that 'previous_response_id' continues holds too "
                            "many values");
      }
      budget->cost -= cost;
      auto list = ParseOrderedJson(text, "stored items");
      if (!list.has_value()) return FromStatus(Internal(list.error().message()), (*one)->id);
      if (auto error = AddItems(*list, "previous_response_id", chat)) return error;
    }
  }
  return std::nullopt;
}

void Translator::Conversation(std::string_view response_id, const FindResponse& find,
                              ResponsesRequest* out) {
  ChatBuilder chat(/*join_users=*/false);
  ItemBudget budget{limits_.max_conversation_bytes, limits_.max_json_values};
  if (const Json* text = fields_.Find("instructions"); text != nullptr) {
    if (!text->is_string()) return fields_.FailValue("instructions", "must be a string");
    if (!text->get_ref<const std::string&>().empty()) chat.System(*text);
    echo_["instructions"] = *text;
  } else {
    echo_["instructions"] = nullptr;
  }
  std::string previous;
  fields_.String("previous_response_id", kMaxIdBytes, &previous);
  echo_["previous_response_id"] = previous.empty() ? Json(nullptr) : Json(previous);
  if (!fields_.ok()) return;
  if (!previous.empty()) {
    out->previous = find(previous);
    if (out->previous == nullptr) {
      ApiError error =
          MakeApiError(404, "previous_response_not_found",
                       fmt::format("there is no stored response {}", Quoted(previous)));
      error.param = "previous_response_id";
      return fields_.Fail(std::move(error));
    }
    if (auto error = AddStored(out->previous.get(), &budget, &chat)) {
      return fields_.Fail(std::move(*error));
    }
  }
  const Json* input = fields_.Find("input");
  if (input == nullptr) return fields_.Fail(MissingParameter("input"));
  auto items = ReadInputItems(*input, response_id, find, limits_.max_messages, &budget);
  if (!items.has_value()) return fields_.Fail(items.error());
  if (auto error = AddItems(*items, "input", &chat)) return fields_.Fail(std::move(*error));
  if (chat.size() == 0) return fields_.FailValue("input", "must not be empty");
  out->input_items = items->size();
  out->input = Dump(*items);
  chat_["messages"] = chat.Take();
}

void Translator::AllowedTools(const Json& choice) {
  const auto mode = choice.find("mode");
  const auto allowed = choice.find("tools");
  if (mode == choice.end() || (*mode != "auto" && *mode != "required")) {
    return fields_.FailValue("tool_choice", "must have a 'mode' of \"auto\" or \"required\"");
  }
  if (allowed == choice.end() || !allowed->is_array() || allowed->empty()) {
    return fields_.FailValue("tool_choice", "must have a list of 'tools'");
  }
  std::set<std::string> names;
  for (const Json& tool : *allowed) {
    const bool named = tool.is_object() && tool.value("type", Json()) == "function" &&
                       tool.contains("name") && tool.at("name").is_string();
    if (!named) return fields_.FailValue("tool_choice", "must allow functions by their names");
    names.insert(tool.at("name").get<std::string>());
  }
  Json kept = Json::array();
  for (Json& tool : chat_["tools"]) {
    if (names.erase(tool.at("function").at("name").get<std::string>()) > 0) {
      kept.push_back(std::move(tool));
    }
  }
  if (!names.empty()) {
    return fields_.FailValue("tool_choice", fmt::format("allows {}, which is none of the tools",
                                                        Quoted(*names.begin())));
  }
  chat_["tools"] = std::move(kept);
  chat_["tool_choice"] = *mode;
}

void Translator::ToolChoice() {
  const Json* choice = fields_.Find("tool_choice");
  echo_["tool_choice"] = choice == nullptr ? Json("auto") : *choice;
  if (choice == nullptr) return;
  if (choice->is_string()) {
    chat_["tool_choice"] = *choice;
    return;
  }
  if (!choice->is_object()) {
    return fields_.FailValue("tool_choice", "must be a string or an object");
  }
  const Json type = choice->value("type", Json());
  if (type == "allowed_tools") return AllowedTools(*choice);
  if (type != "function") {
    return fields_.Fail(UnsupportedParameter(
        "tool_choice", fmt::format("'tool_choice' of type {} is not supported", Quoted(type))));
  }
  chat_["tool_choice"] = {{"type", "function"},
                          {"function", {{"name", choice->value("name", Json())}}}};
}

void Translator::Tools() {
  const Json* tools = fields_.Find("tools");
  Json shown = Json::array();
  chat_["tools"] = Json::array();
  if (tools != nullptr && !tools->is_array()) return fields_.FailValue("tools", "must be a list");
  for (size_t i = 0; tools != nullptr && i < tools->size(); ++i) {
    const Json& tool = (*tools)[i];
    const std::string where = fmt::format("tools[{}]", i);
    const Json type = tool.is_object() ? tool.value("type", Json()) : Json();
    if (!type.is_string()) return fields_.FailValue(where, "must be an object with a 'type'");
    // Coding agents offer it with every request, for the model to use if it likes. There is none
    // here, so the model is not told of it.
    if (type.get_ref<const std::string&>().starts_with("web_search")) continue;
    if (type != "function") {
      return fields_.Fail(UnsupportedParameter(
          where + ".type", fmt::format("'{}': tools of type {} are not supported; functions are",
                                       where, Quoted(type))));
    }
    const auto name = tool.find("name");
    if (name == tool.end() || !name->is_string() || name->get_ref<const std::string&>().empty()) {
      return fields_.FailValue(where + ".name", "must be a string that is not empty");
    }
    Json function = {{"name", *name}};
    for (const char* field : {"description", "parameters", "strict"}) {
      if (tool.contains(field) && !tool.at(field).is_null()) function[field] = tool.at(field);
    }
    shown.push_back(tool);
    chat_["tools"].push_back({{"type", "function"}, {"function", std::move(function)}});
  }
  echo_["tools"] = std::move(shown);
  ToolChoice();
  if (chat_["tools"].empty()) chat_.erase("tools");
}

void Translator::Text() {
  Json format = {{"type", "text"}};
  echo_["text"] = {{"format", format}};
  const Json* text = fields_.Find("text");
  if (text == nullptr) return;
  if (!text->is_object()) return fields_.FailValue("text", "must be an object");
  if (const auto verbosity = text->find("verbosity");
      verbosity != text->end() && !verbosity->is_null()) {
    chat_["verbosity"] = echo_["text"]["verbosity"] = *verbosity;
  }
  const auto given = text->find("format");
  if (given == text->end() || given->is_null()) return;
  echo_["text"]["format"] = *given;
  // A chat has the schema's fields one level deeper.
  if (given->is_object() && given->value("type", Json()) == "json_schema") {
    Json schema = *given;
    schema.erase("type");
    chat_["response_format"] = {{"type", "json_schema"}, {"json_schema", std::move(schema)}};
  } else {
    chat_["response_format"] = *given;
  }
}

void Translator::Reasoning() {
  echo_["reasoning"] = {{"effort", nullptr}, {"summary", nullptr}};
  const Json* reasoning = fields_.Find("reasoning");
  if (reasoning == nullptr) return;
  if (!reasoning->is_object()) return fields_.FailValue("reasoning", "must be an object");
  echo_["reasoning"] = *reasoning;
  const auto effort = reasoning->find("effort");
  if (effort == reasoning->end() || effort->is_null()) return;
  chat_["reasoning_effort"] = *effort;
  // What templates know a model's reasoning by, unless the request says so itself.
  Json& kwargs = chat_["chat_template_kwargs"];
  if (kwargs.is_null()) kwargs = Json::object();
  if (*effort == "none" && kwargs.is_object() && !kwargs.contains("enable_thinking")) {
    kwargs["enable_thinking"] = false;
  }
}

void Translator::Metadata() {
  const Json* metadata = fields_.Find("metadata");
  echo_["metadata"] = metadata == nullptr ? Json::object() : *metadata;
  if (metadata == nullptr) return;
  bool fits = metadata->is_object() && metadata->size() <= kMaxMetadata;
  for (const auto& [key, value] : metadata->items()) {
    fits = fits && key.size() <= kMaxMetadataKey && value.is_string() &&
           value.get_ref<const std::string&>().size() <= kMaxMetadataValue;
  }
  if (!fits) {
    fields_.FailValue("metadata", fmt::format("must be an object of at most {} strings, keys of {} "
                                              "bytes and values of {} at most",
                                              kMaxMetadata, kMaxMetadataKey, kMaxMetadataValue));
  }
}

void Translator::Include() {
  std::vector<std::string> include;
  fields_.Strings("include", 64, kMaxIdBytes, &include);
  // Whatever else can be included is of items that this server has none of, or a secret form of
  // reasoning that is in the open here.
  if (std::ranges::find(include, "message.output_text.logprobs") != include.end() ||
      (chat_.contains("top_logprobs") && chat_["top_logprobs"] != 0)) {
    chat_["logprobs"] = true;
  }
}

void Translator::Rest(ResponsesRequest* out) {
  Include();
  Metadata();
  fields_.Bool("store", &out->store);
  std::string truncation = "disabled";
  fields_.String("truncation", kMaxIdBytes, &truncation);
  out->truncate = truncation == "auto";
  if (!out->truncate && truncation != "disabled") {
    fields_.FailValue("truncation", "must be auto or disabled");
  }
  if (const Json* options = fields_.Find("stream_options");
      options != nullptr && !options->is_object()) {
    fields_.FailValue("stream_options", "must be an object");
  }
  const Json* limit = fields_.Find("max_output_tokens");
  if (limit != nullptr) chat_["max_completion_tokens"] = *limit;
  echo_["max_output_tokens"] = limit == nullptr ? Json(nullptr) : *limit;
  for (const char* name : {"user", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
                           "prompt_cache_retention", "max_tool_calls", "client_metadata", "image",
                           "access_programs"}) {
    fields_.Ignore(name);
  }
  fields_.Unsupported("background", {false});
  for (const char* name : {"conversation", "prompt", "context_management", "moderation"}) {
    fields_.Unsupported(name);
  }
}

// The value that was asked for, else what the server uses, without the digits that a float has
// beyond its own.
Json NumberOf(FieldReader& fields, const char* name, float used) {
  const Json* given = fields.Find(name);
  return given != nullptr ? *given : Json::parse(fmt::format("{}", used), nullptr, false);
}

}  // namespace

size_t CountTurns(const ChatRequest& chat) {
  return static_cast<size_t>(std::ranges::count_if(
      *chat.messages, [](const Json& message) { return message.at("role") == "user"; }));
}

ChatRequest WithoutTurns(const ChatRequest& chat, size_t turn) {
  Json kept = Json::array();
  size_t users = 0;
  for (const Json& message : *chat.messages) {
    const Json& role = message.at("role");
    if (role == "user") ++users;
    if (users > turn || (role == "system" && users == 0)) kept.push_back(message);
  }
  ChatRequest shorter = chat;
  shorter.messages = std::make_shared<const Json>(std::move(kept));
  return shorter;
}

ApiResult<ResponsesRequest> ParseResponsesRequest(std::string_view body,
                                                  const RequestLimits& limits,
                                                  std::string_view response_id,
                                                  const FindResponse& find) {
  auto read = ReadRequestBody(body, limits.max_json_depth, limits.max_json_values);
  if (!read.has_value()) return tl::unexpected(read.error());
  FieldReader& fields = *read;
  ResponsesRequest request;
  Translator translator(fields, limits);
  translator.Conversation(response_id, find, &request);
  translator.Tools();
  translator.Text();
  translator.Reasoning();
  translator.Rest(&request);
  if (!fields.ok()) return tl::unexpected(fields.error());
  fields.LogUnknown();
  auto parsed = ParseTranslatedChat(translator.chat(), limits, kNames);
  if (!parsed.has_value()) return tl::unexpected(parsed.error());
  request.chat = std::move(*parsed);
  GenerationParams& params = request.chat.params;
  params.may_cut_max_tokens = true;
  params.stream_is_kept = true;
  Json echo = translator.echo();
  const Json* parallel = fields.Find("parallel_tool_calls");
  echo["parallel_tool_calls"] = parallel == nullptr ? Json(true) : *parallel;
  echo["temperature"] = NumberOf(fields, "temperature", params.sampling.temperature);
  echo["top_p"] = NumberOf(fields, "top_p", params.sampling.top_p);
  echo["top_logprobs"] = params.top_logprobs;
  echo["truncation"] = request.truncate ? "auto" : "disabled";
  echo["background"] = false;
  echo["service_tier"] = "default";
  echo["store"] = request.store;
  request.echo = Dump(echo);
  request.echo = request.echo.substr(1, request.echo.size() - 2);
  return request;
}

}  // namespace oscar::server
