#include "openai/request.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "openai/chat_messages.h"
#include "openai/field_reader.h"
#include "openai/response_format.h"

namespace oscar::server {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMaxTokens = int64_t{1} << 31;
constexpr size_t kMaxNameBytes = 256;

ApiResult<FieldReader> ReadBody(std::string_view body, const RequestLimits& limits) {
  return ReadRequestBody(body, limits.max_json_depth, limits.max_json_values);
}

void ReadLogitBias(FieldReader& fields, const RequestLimits& limits, SamplingOptions* sampling) {
  const Json* value = fields.Find("logit_bias");
  if (value == nullptr) return;
  if (!value->is_object()) {
    return fields.FailValue("logit_bias", "must be an object from token ids to numbers");
  }
  if (value->size() > limits.max_logit_bias) {
    return fields.FailValue("logit_bias", fmt::format("has {} entries; the limit is {}",
                                                      value->size(), limits.max_logit_bias));
  }
  for (const auto& [key, bias] : value->items()) {
    int32_t token = -1;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), token);
    if (error != std::errc() || end != key.data() + key.size() || token < 0 ||
        token >= limits.vocab_size) {
      return fields.FailValue("logit_bias", "must have token ids of the model as keys");
    }
    const double number = bias.is_number() ? bias.get<double>() : 1e9;
    if (!(number >= -100.0 && number <= 100.0)) {
      return fields.FailValue("logit_bias", "must have numbers between -100 and 100 as values");
    }
    sampling->logit_bias.emplace_back(token, static_cast<float>(number));
  }
}

void ReadStreamOptions(FieldReader& fields, GenerationParams* params) {
  const Json* value = fields.Find("stream_options");
  if (value == nullptr) return;
  if (!value->is_object()) return fields.FailValue("stream_options", "must be an object");
  if (!params->stream) {
    return fields.FailValue("stream_options", "is only allowed together with 'stream': true");
  }
  FieldReader options(*value, "stream_options.");
  options.Bool("include_usage", &params->include_usage);
  options.Bool("continuous_usage_stats", &params->continuous_usage_stats);
  options.Ignore("include_obfuscation");
  if (!options.ok()) fields.Fail(options.error());
}

// Sampling fields and extensions of both endpoints.
void ReadSampling(FieldReader& fields, const RequestLimits& limits, GenerationParams* params) {
  SamplingOptions& sampling = params->sampling;
  sampling = limits.defaults;
  sampling.seed.reset();
  fields.Float("temperature", 0.0, 2.0, &sampling.temperature);
  fields.Float("top_p", 0.0, 1.0, &sampling.top_p);
  if (sampling.top_p <= 0.0f) fields.FailValue("top_p", "must be greater than 0");
  fields.Float("min_p", 0.0, 1.0, &sampling.min_p);
  int64_t top_k = sampling.top_k;
  fields.Int("top_k", -1, SamplingOptions::kMaxTopK, &top_k);
  sampling.top_k = static_cast<int>(std::max<int64_t>(top_k, 0));
  fields.Float("frequency_penalty", -2.0, 2.0, &sampling.frequency_penalty);
  fields.Float("presence_penalty", -2.0, 2.0, &sampling.presence_penalty);
  fields.Float("repetition_penalty", 0.01, 10.0, &sampling.repetition_penalty);
  ReadLogitBias(fields, limits, &sampling);
  fields.Int("seed", std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max(),
             &params->seed);
}

// Fields about which tokens, which of several answers, and when.
void ReadChoosing(FieldReader& fields, const RequestLimits& limits, GenerationParams* params) {
  fields.Int("n", 1, limits.max_n, &params->n);
  std::optional<int64_t> best_of;
  fields.Int("best_of", 1, limits.max_n, &best_of);
  if (best_of.has_value() && *best_of < params->n) {
    fields.FailValue("best_of", "must not be less than 'n'");
  }
  params->best_of = best_of.value_or(0);
  constexpr int64_t kMaxPriority = std::numeric_limits<int32_t>::max();
  fields.Int("priority", -kMaxPriority, kMaxPriority, &params->priority);
  fields.Strings("bad_words", limits.max_bad_words, limits.max_stop_bytes, &params->bad_words);
  fields.TokenIds("allowed_token_ids", static_cast<size_t>(limits.vocab_size),
                  &params->allowed_token_ids);
  if (const Json* ids = fields.Find("allowed_token_ids");
      ids != nullptr && ids->is_array() && ids->empty()) {
    fields.FailValue("allowed_token_ids", "must not be empty");
  }
}

void ReadCommon(FieldReader& fields, const RequestLimits& limits, GenerationParams* params) {
  fields.String("model", kMaxNameBytes, &params->model);
  ReadSampling(fields, limits, params);
  ReadChoosing(fields, limits, params);
  fields.Int("min_tokens", 0, kMaxTokens, &params->min_tokens);
  fields.Strings("stop", limits.max_stops, limits.max_stop_bytes, &params->stop);
  fields.TokenIds("stop_token_ids", 64, &params->stop_token_ids);
  fields.Bool("ignore_eos", &params->ignore_eos);
  fields.Bool("include_stop_str_in_output", &params->include_stop_str_in_output);
  fields.Bool("skip_special_tokens", &params->skip_special_tokens);
  fields.Bool("stream", &params->stream);
  ReadStreamOptions(fields, params);
  if (params->stream && params->choices() > params->n) {
    fields.FailValue("best_of", "above 'n' cannot be combined with 'stream': true");
  }
  fields.Bool("return_token_ids", &params->return_token_ids);
  fields.Int("prompt_logprobs", 0, limits.max_top_logprobs, &params->prompt_logprobs);
  if (params->prompt_logprobs.has_value() && params->stream) {
    fields.FailValue("prompt_logprobs", "cannot be combined with 'stream': true");
  }
  fields.Int("truncate_prompt_tokens", 1, kMaxTokens, &params->truncate_prompt_tokens);
  fields.String("request_id", 128, &params->request_id);
  // It goes into headers and logs.
  if (!std::ranges::all_of(params->request_id,
                           [](unsigned char c) { return c > 0x20 && c < 0x7f; })) {
    fields.FailValue("request_id", "must be printable ASCII without spaces");
  }
  fields.String("cache_salt", kMaxNameBytes, &params->cache_salt);
  ReadConstraint(fields, params);
  for (const char* name : {"user", "metadata", "safety_identifier", "prompt_cache_key",
                           "spaces_between_special_tokens"}) {
    fields.Ignore(name);
  }
  for (const char* name : {"logits_processors", "lora_path", "kv_transfer_params"}) {
    fields.Unsupported(name);
  }
  fields.Unsupported("use_beam_search", {false});
  fields.Unsupported("length_penalty", {1, 1.0});
  fields.Unsupported("store", {false});
  fields.Unsupported("service_tier", {"auto", "default"});
}

Status ValidateSampling(const GenerationParams& params, const RequestLimits& limits) {
  return params.sampling.Validate(limits.vocab_size);
}

std::optional<ApiError> CheckVocabulary(const char* name, const std::vector<int32_t>& ids,
                                        const RequestLimits& limits) {
  for (const int32_t id : ids) {
    if (id >= limits.vocab_size) {
      return InvalidValue(name, fmt::format("'{}' holds {}; the vocabulary ends at {}", name, id,
                                            limits.vocab_size - 1));
    }
  }
  return std::nullopt;
}

// Closes the reading of a request: the first error wins, then the sampler's own checks.
std::optional<ApiError> Conclude(const FieldReader& fields, const GenerationParams& params,
                                 const RequestLimits& limits) {
  if (!fields.ok()) return fields.error();
  if (const Status status = ValidateSampling(params, limits); !status.ok()) {
    return FromStatus(status, params.request_id);
  }
  if (params.max_tokens.has_value() && params.min_tokens > *params.max_tokens) {
    return InvalidValue("min_tokens", "'min_tokens' must not exceed 'max_tokens'");
  }
  if (auto error = CheckVocabulary("stop_token_ids", params.stop_token_ids, limits)) return error;
  if (auto error = CheckVocabulary("allowed_token_ids", params.allowed_token_ids, limits)) {
    return error;
  }
  fields.LogUnknown();
  return std::nullopt;
}

// "none", "auto", "required", or {"type": "function", "function": {"name": ...}}.
void ReadToolChoice(FieldReader& fields, ChatRequest* request) {
  const Json* choice = fields.Find("tool_choice");
  if (choice == nullptr || *choice == "auto") return;
  if (*choice == "none") {
    request->tool_choice = ToolChoice::kNone;
    return;
  }
  if (*choice == "required") {
    request->tool_choice = ToolChoice::kRequired;
    return;
  }
  constexpr const char* kShape =
      "must be \"none\", \"auto\", \"required\" or {\"type\": \"function\", \"function\": "
      "{\"name\": ...}}";
  if (!choice->is_object() || choice->value("type", Json("function")) != "function") {
    return fields.FailValue("tool_choice", kShape);
  }
  const auto function = choice->find("function");
  const auto name =
      function != choice->end() && function->is_object() ? function->find("name") : choice->end();
  if (function == choice->end() || !function->is_object() || name == function->end() ||
      !name->is_string()) {
    return fields.FailValue("tool_choice", kShape);
  }
  request->tool_choice = ToolChoice::kNamed;
  request->tool_name = name->get<std::string>();
}

// What tools must look like is checked where they are used (CheckTools).
void ReadTools(FieldReader& fields, const RequestLimits& limits, ChatRequest* request) {
  ReadToolChoice(fields, request);
  fields.Bool("parallel_tool_calls", &request->parallel_tool_calls);
  const Json* tools = fields.Find("tools");
  if (tools == nullptr) return;
  if (!tools->is_array()) return fields.FailValue("tools", "must be a list");
  if (tools->size() > limits.max_tools) {
    return fields.FailValue(
        "tools", fmt::format("has {} entries; the limit is {}", tools->size(), limits.max_tools));
  }
  for (const Json& tool : *tools) {
    if (!tool.is_object()) return fields.FailValue("tools", "must hold objects");
  }
  if (!tools->empty()) request->tools = std::make_shared<const Json>(*tools);
}

void ReadTemplateFields(FieldReader& fields, ChatRequest* request) {
  const bool has_generation = fields.Find("add_generation_prompt") != nullptr;
  fields.Bool("add_generation_prompt", &request->add_generation_prompt);
  fields.Bool("continue_final_message", &request->continue_final_message);
  if (request->continue_final_message) {
    if (has_generation && request->add_generation_prompt) {
      return fields.FailValue("continue_final_message",
                              "cannot be combined with 'add_generation_prompt': true");
    }
    request->add_generation_prompt = false;
  }
  Json kwargs = Json::object();
  if (const Json* given = fields.Find("chat_template_kwargs"); given != nullptr) {
    if (!given->is_object()) return fields.FailValue("chat_template_kwargs", "must be an object");
    for (const char* reserved :
         {"messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token",
          "eos_token", "chat_template"}) {
      if (given->contains(reserved)) {
        return fields.FailValue("chat_template_kwargs", fmt::format("must not set '{}'", reserved));
      }
    }
    kwargs = *given;
  }
  if (const Json* effort = fields.Find("reasoning_effort"); effort != nullptr) {
    if (!effort->is_string()) return fields.FailValue("reasoning_effort", "must be a string");
    kwargs["reasoning_effort"] = *effort;
  }
  if (!kwargs.empty()) request->template_kwargs = std::make_shared<const Json>(std::move(kwargs));
}

void ReadMessages(FieldReader& fields, const RequestLimits& limits, ChatRequest* request) {
  const Json* messages = fields.Find("messages");
  if (messages == nullptr) return fields.Fail(MissingParameter("messages"));
  auto normalized = ParseMessages(*messages, limits.max_messages);
  if (!normalized.has_value()) return fields.Fail(normalized.error());
  request->messages = std::make_shared<const Json>(std::move(*normalized));
}

void ReadChatLogprobs(FieldReader& fields, const RequestLimits& limits, GenerationParams* params) {
  fields.Bool("logprobs", &params->logprobs);
  fields.Int("top_logprobs", 0, limits.max_top_logprobs, &params->top_logprobs);
  if (params->top_logprobs > 0 && !params->logprobs) {
    fields.FailValue("top_logprobs", "needs 'logprobs': true");
  }
}

void ReadChat(FieldReader& fields, const RequestLimits& limits, ChatRequest* request) {
  ReadMessages(fields, limits, request);
  ReadTools(fields, limits, request);
  ReadTemplateFields(fields, request);
}

ApiResult<ChatRequest> ReadChatRequest(FieldReader& fields, const RequestLimits& limits) {
  ChatRequest request;
  GenerationParams& params = request.params;
  ReadChat(fields, limits, &request);
  ReadCommon(fields, limits, &params);
  ReadChatLogprobs(fields, limits, &params);
  fields.Int("max_tokens", 1, kMaxTokens, &params.max_tokens);
  fields.Int("max_completion_tokens", 1, kMaxTokens, &params.max_tokens);
  for (const char* name : {"functions", "audio", "prediction", "web_search_options", "documents",
                           "chat_template", "suffix"}) {
    fields.Unsupported(name);
  }
  fields.Unsupported("function_call", {"none"});
  fields.Unsupported("modalities", {Json::array({"text"})});
  fields.Unsupported("verbosity", {"medium"});
  fields.Unsupported("echo", {false});
  if (auto error = Conclude(fields, params, limits)) return tl::unexpected(std::move(*error));
  return request;
}

// One prompt: a string or a list of token ids.
bool ReadPrompt(FieldReader& fields, const Json& value, const RequestLimits& limits,
                PromptInput* out) {
  if (value.is_string()) {
    out->text = value.get<std::string>();
    return true;
  }
  out->is_tokens = true;
  out->tokens.reserve(value.size());
  for (const Json& item : value) {
    const bool is_id = item.is_number_integer();
    const int64_t id = is_id ? item.get<int64_t>() : -1;
    if (id < 0 || id >= limits.vocab_size) {
      fields.FailValue("prompt",
                       fmt::format("must hold token ids between 0 and {}", limits.vocab_size - 1));
      return false;
    }
    out->tokens.push_back(static_cast<int32_t>(id));
  }
  return true;
}

void ReadPrompts(FieldReader& fields, const RequestLimits& limits, CompletionRequest* request) {
  const Json* value = fields.Find("prompt");
  if (value == nullptr) return fields.Fail(MissingParameter("prompt"));
  if (!value->is_string() && !value->is_array()) {
    return fields.FailValue(
        "prompt", fmt::format("must be a string, a list of strings, a list of token ids or a list "
                              "of those, not {}",
                              JsonTypeName(*value)));
  }
  const bool single = value->is_string() || (!value->empty() && value->front().is_number());
  if (single) {
    PromptInput prompt;
    if (ReadPrompt(fields, *value, limits, &prompt)) request->prompts.push_back(std::move(prompt));
    return;
  }
  if (value->empty()) return fields.FailValue("prompt", "must not be empty");
  if (value->size() > limits.max_prompts) {
    return fields.FailValue("prompt", fmt::format("has {} entries; the limit is {}", value->size(),
                                                  limits.max_prompts));
  }
  for (const Json& item : *value) {
    if (!item.is_string() && !item.is_array()) {
      return fields.FailValue("prompt", "must hold strings or lists of token ids");
    }
    PromptInput prompt;
    if (!ReadPrompt(fields, item, limits, &prompt)) return;
    request->prompts.push_back(std::move(prompt));
  }
}

}  // namespace

ApiResult<ChatRequest> ParseChatRequest(std::string_view body, const RequestLimits& limits) {
  auto read = ReadBody(body, limits);
  if (!read.has_value()) return tl::unexpected(read.error());
  return ReadChatRequest(*read, limits);
}

ApiResult<ChatRequest> ParseTranslatedChat(const Json& chat, const RequestLimits& limits,
                                           std::span<const FieldName> names) {
  FieldReader fields(chat);
  auto request = ReadChatRequest(fields, limits);
  if (request.has_value()) return request;
  ApiError error = std::move(request.error());
  for (const FieldName& name : names) {
    const std::string quoted = fmt::format("'{}", name.chat);
    if (!error.param.starts_with(name.chat)) continue;
    const char next = error.param.c_str()[name.chat.size()];
    if (next != '\0' && next != '.' && next != '[') continue;
    error.param.replace(0, name.chat.size(), name.own);
    for (size_t at = error.message.find(quoted); at != std::string::npos;
         at = error.message.find(quoted, at + name.own.size())) {
      error.message.replace(at + 1, name.chat.size(), name.own);
    }
    break;
  }
  return tl::unexpected(std::move(error));
}

ApiResult<CompletionRequest> ParseCompletionRequest(std::string_view body,
                                                    const RequestLimits& limits) {
  auto read = ReadBody(body, limits);
  if (!read.has_value()) return tl::unexpected(read.error());
  FieldReader& fields = *read;
  CompletionRequest request;
  GenerationParams& params = request.params;
  ReadPrompts(fields, limits, &request);
  ReadCommon(fields, limits, &params);
  fields.Int("max_tokens", 0, kMaxTokens, &params.max_tokens);
  fields.Bool("echo", &request.echo);
  std::optional<int64_t> logprobs;
  // A boolean is what the chat endpoint takes; some clients send it here and mean "none".
  if (const Json* value = fields.Find("logprobs"); value == nullptr || *value != false) {
    fields.Int("logprobs", 0, limits.max_top_logprobs, &logprobs);
  }
  params.logprobs = logprobs.has_value();
  params.top_logprobs = logprobs.value_or(0);
  fields.Unsupported("suffix", {""});
  const int64_t choices = params.choices() * static_cast<int64_t>(request.prompts.size());
  const int64_t most = std::max(limits.max_choices, limits.max_n);
  if (choices > most) {
    fields.FailValue(params.best_of > params.n ? "best_of" : "n",
                     fmt::format("times {} prompts is {} choices; the limit is {}",
                                 request.prompts.size(), choices, most));
  }
  if (auto error = Conclude(fields, params, limits)) return tl::unexpected(std::move(*error));
  return request;
}

ApiResult<TokenizeRequest> ParseTokenizeRequest(std::string_view body,
                                                const RequestLimits& limits) {
  auto read = ReadBody(body, limits);
  if (!read.has_value()) return tl::unexpected(read.error());
  FieldReader& fields = *read;
  TokenizeRequest request;
  fields.String("model", kMaxNameBytes, &request.model);
  fields.Bool("add_special_tokens", &request.add_special_tokens);
  fields.Bool("add_special", &request.add_special_tokens);
  fields.Bool("parse_special", &request.parse_special);
  fields.Bool("return_token_strs", &request.return_token_strings);
  constexpr size_t kNoLimit = std::numeric_limits<size_t>::max();
  if (fields.Find("messages") != nullptr) {
    request.chat.emplace();
    ReadChat(fields, limits, &*request.chat);
  } else if (fields.Find("prompt") != nullptr) {
    fields.String("prompt", kNoLimit, &request.prompt.text);
  } else if (fields.Find("content") != nullptr) {
    fields.String("content", kNoLimit, &request.prompt.text);
  } else {
    fields.Fail(MissingParameter("prompt"));
  }
  if (!fields.ok()) return tl::unexpected(fields.error());
  return request;
}

ApiResult<DetokenizeRequest> ParseDetokenizeRequest(std::string_view body,
                                                    const RequestLimits& limits) {
  auto read = ReadBody(body, limits);
  if (!read.has_value()) return tl::unexpected(read.error());
  FieldReader& fields = *read;
  DetokenizeRequest request;
  fields.String("model", kMaxNameBytes, &request.model);
  if (fields.Find("tokens") == nullptr) fields.Fail(MissingParameter("tokens"));
  fields.TokenIds("tokens", size_t{1} << 20, &request.tokens);
  if (!fields.ok()) return tl::unexpected(fields.error());
  if (auto error = CheckVocabulary("tokens", request.tokens, limits)) {
    return tl::unexpected(std::move(*error));
  }
  return request;
}

}  // namespace oscar::server
