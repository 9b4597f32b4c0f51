// Models as clients of Anthropic's API read them. Pure functions.
#pragma once

#include <string>
#include <vector>

#include "openai/response.h"

namespace oscar::server {

std::string MessagesModelBody(const ModelCard& card);
std::string MessagesModelListBody(const std::vector<ModelCard>& cards);

}  // namespace oscar::server
