// Tokenizer and template endpoints.
#include <nlohmann/json.hpp>
#include <utility>

#include "server/api_server.h"

namespace oscar::server {
namespace {

using Json = nlohmann::ordered_json;

HttpResponse JsonResponse(const Json& json) {
  HttpResponse response;
  response.body = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  return response;
}

}  // namespace

HttpResponse ApiServer::HandleTokenize(const Context& context) {
  const ServedModel& served = *context.model;
  auto request = ParseTokenizeRequest(context.http.body, served.limits);
  if (!request.has_value()) return ErrorResponse(request.error());
  if (auto error = CheckModelName(served, request->model)) return ErrorResponse(*error);
  std::vector<int32_t> tokens;
  if (request->chat.has_value()) {
    auto made = TokenizeChat(served, *request->chat, context.request_id);
    if (!made.has_value()) return ErrorResponse(made.error());
    tokens = std::move(made->tokens);
  } else {
    EncodeOptions options;
    options.parse_special = request->parse_special;
    options.add_special = request->add_special_tokens;
    auto made = served.dialogue->tokenizer().Encode(request->prompt.text, options);
    if (!made.has_value()) return ErrorResponse(FromStatus(made.error(), context.request_id));
    tokens = std::move(*made);
  }
  Json body = {{"tokens", tokens},
               {"count", tokens.size()},
               {"max_model_len", served.engine->max_context()}};
  if (request->return_token_strings) {
    Json texts = Json::array();
    for (const int32_t id : tokens) texts.push_back(served.dialogue->tokenizer().TokenBytes(id));
    body["token_strs"] = std::move(texts);
  }
  return JsonResponse(body);
}

HttpResponse ApiServer::HandleDetokenize(const Context& context) {
  const ServedModel& served = *context.model;
  const auto request = ParseDetokenizeRequest(context.http.body, served.limits);
  if (!request.has_value()) return ErrorResponse(request.error());
  if (auto error = CheckModelName(served, request->model)) return ErrorResponse(*error);
  const std::string text =
      served.dialogue->tokenizer().Decode(request->tokens, /*skip_special=*/false);
  // One shape for both families of clients.
  return JsonResponse({{"prompt", text}, {"content", text}});
}

HttpResponse ApiServer::HandleApplyTemplate(const Context& context) {
  const ServedModel& served = *context.model;
  const auto request = ParseChatRequest(context.http.body, served.limits);
  if (!request.has_value()) return ErrorResponse(request.error());
  if (auto error = CheckModelName(served, request->params.model)) return ErrorResponse(*error);
  auto chat = TokenizeChat(served, *request, context.request_id);
  if (!chat.has_value()) return ErrorResponse(chat.error());
  std::string prompt;
  Json segments = Json::array();
  for (const TextSegment& segment : chat->segments) {
    prompt += segment.text;
    segments.push_back({{"text", segment.text}, {"from_request", !segment.trusted}});
  }
  return JsonResponse({{"prompt", prompt},
                       {"segments", std::move(segments)},
                       {"tokens", chat->tokens},
                       {"count", chat->tokens.size()}});
}

}  // namespace oscar::server
