// Anthropic's Messages API.
#include <fmt/core.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "messages/message_writer.h"
#include "messages/request.h"
#include "server/api_server.h"

namespace oscar::server {

HttpResponse ApiServer::HandleMessages(const Context& context) {
  auto request = ParseMessagesRequest(context.http.body, context.model->limits);
  if (!request.has_value()) return ErrorResponse(request.error());
  if (auto error = CheckModelName(*context.model, request->params.model)) {
    return ErrorResponse(*error);
  }
  auto plan = PlanChat(context, *request);
  if (!plan.has_value()) return ErrorResponse(plan.error());
  return Generate(context, "messages", request->params, std::move(*plan),
                  [](const WriterContext& made) {
                    MessageHeader header;
                    header.id = fmt::format("msg_{}", made.request_id);
                    header.model = made.model;
                    header.request_id = made.request_id;
                    header.context_is_limit = made.context_is_limit;
                    return std::make_unique<MessageWriter>(std::move(header));
                  });
}

HttpResponse ApiServer::HandleCountTokens(const Context& context) {
  const auto request = ParseCountTokensRequest(context.http.body, context.model->limits);
  if (!request.has_value()) return ErrorResponse(request.error());
  if (auto error = CheckModelName(*context.model, request->params.model)) {
    return ErrorResponse(*error);
  }
  const auto prompt = TokenizeChat(*context.model, *request, context.request_id);
  if (!prompt.has_value()) return ErrorResponse(prompt.error());
  HttpResponse response;
  response.body = nlohmann::ordered_json{{"input_tokens", prompt->tokens.size()}}.dump();
  return response;
}

}  // namespace oscar::server
