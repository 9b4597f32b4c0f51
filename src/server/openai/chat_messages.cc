#include "openai/chat_messages.h"

#include <nlohmann/json.hpp>

#include "text/chat.h"

namespace oscar::server {

ApiResult<nlohmann::ordered_json> ParseMessages(const nlohmann::ordered_json& messages,
                                                size_t max_messages) {
  auto normalized = NormalizeMessages(messages, max_messages);
  if (normalized.has_value()) return std::move(*normalized);
  const Status& error = normalized.error();
  return tl::unexpected(error.code() == StatusCode::kUnimplemented
                            ? UnsupportedParameter(error.param(), error.message())
                            : InvalidValue(error.param(), error.message()));
}

}  // namespace oscar::server
