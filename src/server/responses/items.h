// The items of OpenAI's Responses API: what a conversation is made of there. Checked, given ids,
// and turned into the messages of a chat. For .cc files; pure functions.
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "openai/api_error.h"
#include "openai/chat_builder.h"
#include "responses/response_store.h"

namespace oscar::server {

// A response that the caller may continue; null where there is none.
using FindResponse = std::function<std::shared_ptr<const StoredResponse>(std::string_view id)>;

// "msg_<hex>_3": names its response ("resp_<hex>") and its place in the output, so that a reference
// to it needs no index.
std::string OutputItemId(std::string_view prefix, std::string_view response_id, size_t place);

// What the items that a request takes from the store may add to it; both go down as it is used.
struct ItemBudget {
  size_t bytes = 0;  // of JSON text
  size_t cost = 0;   // JsonCost
};

// `input` of a request, a string or a list, as a list of items: each with a type and an id,
// messages with lists of parts, references replaced by what they refer to.
ApiResult<nlohmann::ordered_json> ReadInputItems(const nlohmann::ordered_json& input,
                                                 std::string_view response_id,
                                                 const FindResponse& find, size_t max_items,
                                                 ItemBudget* budget);

// Items that were checked, as messages; `where` names them in errors ("input").
std::optional<ApiError> AddItems(const nlohmann::ordered_json& items, std::string_view where,
                                 ChatBuilder* chat);

}  // namespace oscar::server
