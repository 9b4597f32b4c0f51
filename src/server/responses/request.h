// Requests of OpenAI's Responses API: JSON bodies in, a chat request and what the response repeats
// out. docs/server.md says of every field whether it is used, ignored or refused. Pure functions,
// safe from any thread.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "openai/api_error.h"
#include "openai/request.h"
#include "responses/response_store.h"

namespace oscar::server {

struct ResponsesRequest {
  ChatRequest chat;  // the whole conversation
  std::shared_ptr<const StoredResponse> previous;
  std::string input;  // the request's own items, a JSON list, with ids
  size_t input_items = 0;
  // Members of the response that repeat the request, as JSON text: "\"tools\":[],\"store\":true".
  std::string echo;
  bool store = true;
  // The oldest turns may be left out where the conversation is too long for the context.
  bool truncate = false;
};

// `chat` without what precedes its user message `turn`, counted from 0; its system messages stay.
// At most as many turns as it has user messages.
ChatRequest WithoutTurns(const ChatRequest& chat, size_t turn);
size_t CountTurns(const ChatRequest& chat);

// `response_id` is the id of the response to come: its items get ids from it. `find` looks up what
// the caller has stored.
ApiResult<ResponsesRequest> ParseResponsesRequest(
    std::string_view body, const RequestLimits& limits, std::string_view response_id,
    const std::function<std::shared_ptr<const StoredResponse>(std::string_view id)>& find);

}  // namespace oscar::server
