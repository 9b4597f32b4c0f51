// The messages of a chat request, checked and normalised (NormalizeMessages), with errors as the
// API tells them. A pure function.
#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>

#include "openai/api_error.h"

namespace oscar::server {

ApiResult<nlohmann::ordered_json> ParseMessages(const nlohmann::ordered_json& messages,
                                                size_t max_messages);

}  // namespace oscar::server
