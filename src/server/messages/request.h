// Requests of Anthropic's Messages API: JSON bodies in, chat requests out. docs/server.md says of
// every field whether it is used, ignored or refused. Pure functions, safe from any thread.
#pragma once

#include <string_view>

#include "openai/api_error.h"
#include "openai/request.h"

namespace oscar::server {

ApiResult<ChatRequest> ParseMessagesRequest(std::string_view body, const RequestLimits& limits);
// What is to be counted: the same without what only generation needs.
ApiResult<ChatRequest> ParseCountTokensRequest(std::string_view body, const RequestLimits& limits);

}  // namespace oscar::server
