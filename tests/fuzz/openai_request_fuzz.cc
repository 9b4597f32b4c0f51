// Whatever a client sends, the request parsers either refuse it with a complete 4xx error or return
// values within the limits that the handlers rely on.
#include <nlohmann/json.hpp>

#include "fuzz_util.h"
#include "openai/request.h"

namespace {

using oscar::server::ApiError;
using oscar::server::GenerationParams;
using oscar::server::RequestLimits;

void CheckRefusal(const ApiError& error) {
  OSCAR_CHECK(error.http_status == 400, "{}", error.message);
  OSCAR_CHECK(!error.code.empty() && !error.message.empty());
  OSCAR_CHECK(error.message.size() < 4000, "{}", error.message);
  // It must survive the way into a body.
  const std::string body = oscar::server::ErrorBody(error);
  OSCAR_CHECK(nlohmann::json::accept(body), "{}", body);
}

void CheckParams(const GenerationParams& params, const RequestLimits& limits) {
  OSCAR_CHECK(params.sampling.Validate(limits.vocab_size).ok());
  OSCAR_CHECK(params.n >= 1 && params.n <= limits.max_n);
  OSCAR_CHECK(params.choices() >= params.n && params.choices() <= limits.max_n);
  for (const int32_t id : params.allowed_token_ids) OSCAR_CHECK(id >= 0 && id < limits.vocab_size);
  for (const std::string& word : params.bad_words) OSCAR_CHECK(!word.empty());
  OSCAR_CHECK(params.top_logprobs >= 0 && params.top_logprobs <= limits.max_top_logprobs);
  OSCAR_CHECK(params.stop.size() <= limits.max_stops);
  for (const std::string& stop : params.stop) {
    OSCAR_CHECK(!stop.empty() && stop.size() <= limits.max_stop_bytes);
  }
  for (const int32_t id : params.stop_token_ids) OSCAR_CHECK(id >= 0 && id < limits.vocab_size);
  if (params.max_tokens.has_value()) OSCAR_CHECK(*params.max_tokens >= 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace oscar::server;
  const std::string_view body = oscar::FuzzText(data, size);
  RequestLimits limits;
  limits.vocab_size = 1000;
  if (const auto chat = ParseChatRequest(body, limits); chat.has_value()) {
    CheckParams(chat->params, limits);
    OSCAR_CHECK(chat->messages->is_array() && !chat->messages->empty());
    for (const auto& message : *chat->messages) {
      OSCAR_CHECK(message.at("role").is_string());
      const auto& content = message.at("content");
      OSCAR_CHECK(content.is_string() || content.is_null() || content.is_array());
      if (!content.is_array()) continue;
      for (const auto& part : content) OSCAR_CHECK(part.at("text").is_string());
    }
  } else {
    CheckRefusal(chat.error());
  }
  if (const auto completion = ParseCompletionRequest(body, limits); completion.has_value()) {
    CheckParams(completion->params, limits);
    OSCAR_CHECK(!completion->prompts.empty() && completion->prompts.size() <= limits.max_prompts);
    for (const PromptInput& prompt : completion->prompts) {
      for (const int32_t id : prompt.tokens) OSCAR_CHECK(id >= 0 && id < limits.vocab_size);
    }
  } else {
    CheckRefusal(completion.error());
  }
  if (const auto request = ParseTokenizeRequest(body, limits); !request.has_value()) {
    CheckRefusal(request.error());
  }
  if (const auto request = ParseDetokenizeRequest(body, limits); !request.has_value()) {
    CheckRefusal(request.error());
  }
  return 0;
}
