#include "messages/model_list.h"

#include <fmt/chrono.h>
#include <fmt/core.h>

#include <ctime>
#include <nlohmann/json.hpp>
#include <utility>

namespace oscar::server {
namespace {

using Json = nlohmann::ordered_json;

std::string Dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Json CardJson(const ModelCard& card) {
  const std::tm created = fmt::gmtime(static_cast<std::time_t>(card.created));
  return {{"type", "model"},
          {"id", card.id},
          {"display_name", card.id},
          {"created_at", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", created)},
          {"lifecycle", "active"},
          {"max_input_tokens", card.max_model_len},
          {"max_tokens", card.max_model_len}};
}

}  // namespace

std::string MessagesModelBody(const ModelCard& card) { return Dump(CardJson(card)); }

std::string MessagesModelListBody(const std::vector<ModelCard>& cards) {
  Json data = Json::array();
  for (const ModelCard& card : cards) data.push_back(CardJson(card));
  return Dump({{"data", std::move(data)},
               {"has_more", false},
               {"first_id", cards.front().id},
               {"last_id", cards.back().id}});
}

}  // namespace oscar::server
