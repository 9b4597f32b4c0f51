#include "responses/items.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <map>
#include <utility>

#include "base/json.h"
#include "openai/field_reader.h"

namespace oscar::server {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxIdBytes = 256;
constexpr size_t kMaxNameBytes = 256;
constexpr std::string_view kResponsePrefix = "resp_";

ApiError BadItem(const std::string& where, std::string_view message) {
  return InvalidValue(where, fmt::format("'{}' {}", where, message));
}

// Names of the client in messages: short, and without what a terminal would obey.
std::string Shown(const std::string& name) {
  return Json(name.substr(0, 64)).dump(-1, ' ', true, Json::error_handler_t::replace);
}

std::optional<ApiError> CheckString(const Json& item, const char* name, size_t max_bytes,
                                    const std::string& where) {
  const auto at = item.find(name);
  const std::string place = fmt::format("{}.{}", where, name);
  if (at == item.end() || at->is_null()) return MissingParameter(place);
  if (!at->is_string()) {
    return BadItem(place, fmt::format("must be a string, not {}", JsonTypeName(*at)));
  }
  if (at->get_ref<const std::string&>().size() > max_bytes) {
    return BadItem(place, fmt::format("has more than {} bytes", max_bytes));
  }
  return std::nullopt;
}

// A list of parts that are all text, of the given types.
std::optional<ApiError> CheckParts(const Json& parts, const std::string& where,
                                   std::initializer_list<std::string_view> types) {
  for (size_t i = 0; i < parts.size(); ++i) {
    const Json& part = parts[i];
    const std::string place = fmt::format("{}[{}]", where, i);
    if (!part.is_object()) return BadItem(place, "must be an object");
    if (auto error = CheckString(part, "type", kMaxNameBytes, place)) return error;
    const auto& type = part.at("type").get_ref<const std::string&>();
    if (std::find(types.begin(), types.end(), type) == types.end()) {
      return UnsupportedParameter(
          place + ".type",
          fmt::format("'{}': content of type {} is not supported", place, Shown(type)));
    }
    const char* text = type == "refusal" ? "refusal" : "text";
    if (auto error = CheckString(part, text, SIZE_MAX, place)) return error;
  }
  return std::nullopt;
}

std::optional<ApiError> ReadMessage(Json* item, const std::string& where) {
  if (auto error = CheckString(*item, "role", kMaxNameBytes, where)) return error;
  const auto& role = item->at("role").get_ref<const std::string&>();
  const bool assistant = role == "assistant";
  if (!assistant && role != "user" && role != "system" && role != "developer") {
    return BadItem(where + ".role", "must be user, assistant, system or developer");
  }
  const auto content = item->find("content");
  if (content == item->end() || content->is_null()) return MissingParameter(where + ".content");
  if (content->is_string()) {
    Json part = {{"type", assistant ? "output_text" : "input_text"}, {"text", *content}};
    if (assistant) part["annotations"] = Json::array();
    *content = Json::array({std::move(part)});
  } else if (!content->is_array()) {
    return BadItem(where + ".content", "must be a string or a list of parts");
  } else if (auto error = CheckParts(*content, where + ".content",
                                     {"input_text", "output_text", "text", "refusal"})) {
    return error;
  }
  if (!item->contains("status")) (*item)["status"] = "completed";
  return std::nullopt;
}

std::optional<ApiError> ReadReasoning(const Json& item, const std::string& where) {
  for (const char* name : {"summary", "content"}) {
    const auto at = item.find(name);
    if (at == item.end() || at->is_null()) continue;
    const std::string place = fmt::format("{}.{}", where, name);
    if (!at->is_array()) return BadItem(place, "must be a list");
    if (auto error = CheckParts(*at, place, {"summary_text", "reasoning_text", "text"})) {
      return error;
    }
  }
  return std::nullopt;
}

std::optional<ApiError> ReadCallOutput(const Json& item, const std::string& where) {
  if (auto error = CheckString(item, "call_id", kMaxIdBytes, where)) return error;
  const auto output = item.find("output");
  if (output == item.end() || output->is_null()) return MissingParameter(where + ".output");
  if (output->is_string()) return std::nullopt;
  if (!output->is_array()) return BadItem(where + ".output", "must be a string or a list of parts");
  return CheckParts(*output, where + ".output", {"input_text", "output_text", "text"});
}

struct ItemKind {
  std::string_view type, prefix;
};
constexpr std::array<ItemKind, 4> kKinds = {{{"message", "msg"},
                                             {"function_call", "fc"},
                                             {"function_call_output", "fco"},
                                             {"reasoning", "rs"}}};

class InputReader {
 public:
  InputReader(std::string_view response_id, const FindResponse& find, ItemBudget* budget)
      : response_id_(response_id), find_(find), budget_(*budget) {}

  std::optional<ApiError> Read(Json* item, const std::string& where, size_t place);

 private:
  std::optional<ApiError> Resolve(Json* item, const std::string& where);
  const Json* StoredItems(const StoredResponse& response, bool of_input);
  std::optional<Json> Referred(const std::string& id);

  const std::string_view response_id_;
  const FindResponse& find_;
  ItemBudget& budget_;
  // Lists that references have led to: each is parsed once.
  std::map<std::pair<std::string, bool>, Json> lists_;
};

const Json* InputReader::StoredItems(const StoredResponse& response, bool of_input) {
  const std::pair key(response.id, of_input);
  if (const auto at = lists_.find(key); at != lists_.end()) return &at->second;
  const std::string_view text = of_input ? response.input : response.output();
  const size_t cost = JsonCost(text);
  if (cost > budget_.cost) return nullptr;
  budget_.cost -= cost;
  auto items = ParseOrderedJson(text, "stored items");
  if (!items.has_value()) return nullptr;
  return &lists_.emplace(key, std::move(*items)).first->second;
}

// An item of an earlier response, by the place that its id names.
std::optional<Json> InputReader::Referred(const std::string& id) {
  const size_t hex = id.find('_');
  const size_t place = id.rfind('_');
  if (hex == std::string::npos || place <= hex + 1) return std::nullopt;
  const auto response =
      find_(fmt::format("{}{}", kResponsePrefix, id.substr(hex + 1, place - hex - 1)));
  if (response == nullptr) return std::nullopt;
  const bool of_input = id.compare(place + 1, 1, "i") == 0;
  const char* const begin = id.data() + place + (of_input ? 2 : 1);
  size_t number = 0;
  const auto [end, error] = std::from_chars(begin, id.data() + id.size(), number);
  if (error != std::errc() || end != id.data() + id.size()) return std::nullopt;
  const Json* items = StoredItems(*response, of_input);
  if (items == nullptr || number >= items->size()) return std::nullopt;
  const Json& item = (*items)[number];
  if (!item.contains("id") || item.at("id") != id) return std::nullopt;
  const std::string text = item.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > budget_.bytes) return std::nullopt;
  budget_.bytes -= text.size();
  return item;
}

std::optional<ApiError> InputReader::Resolve(Json* item, const std::string& where) {
  if (auto error = CheckString(*item, "id", kMaxIdBytes, where)) return error;
  const auto id = item->at("id").get<std::string>();
  auto found = Referred(id);
  if (!found.has_value()) {
    ApiError error = MakeApiError(
        404, "item_not_found",
        fmt::format("'{}': the item {} is not stored, or too large together with the others", where,
                    Shown(id)));
    error.param = where + ".id";
    return error;
  }
  *item = std::move(*found);
  return std::nullopt;
}

std::optional<ApiError> InputReader::Read(Json* item, const std::string& where, size_t place) {
  if (!item->is_object()) return BadItem(where, "must be an object");
  for (auto it = item->begin(); it != item->end();) {
    it = it->is_null() ? item->erase(it) : std::next(it);
  }
  if (!item->contains("type")) {
    (*item)["type"] =
        item->contains("role") || !item->contains("id") ? "message" : "item_reference";
  }
  if (auto error = CheckString(*item, "type", kMaxNameBytes, where)) return error;
  if (item->at("type") == "item_reference") return Resolve(item, where);
  if (item->contains("id")) {
    if (auto error = CheckString(*item, "id", kMaxIdBytes, where)) return error;
  }
  const auto type = item->at("type").get<std::string>();
  const auto kind = std::ranges::find(kKinds, type, &ItemKind::type);
  if (kind == kKinds.end()) {
    return UnsupportedParameter(
        where + ".type",
        fmt::format("'{}': items of type {} are not supported", where, Shown(type)));
  }
  std::optional<ApiError> error;
  if (type == "message") {
    error = ReadMessage(item, where);
  } else if (type == "reasoning") {
    error = ReadReasoning(*item, where);
  } else if (type == "function_call_output") {
    error = ReadCallOutput(*item, where);
  } else {
    error = CheckString(*item, "call_id", kMaxIdBytes, where);
    if (!error) error = CheckString(*item, "name", kMaxNameBytes, where);
    if (!error) error = CheckString(*item, "arguments", SIZE_MAX, where);
  }
  if (error) return error;
  if (!item->contains("id")) {
    (*item)["id"] =
        fmt::format("{}_{}_i{}", kind->prefix, response_id_.substr(kResponsePrefix.size()), place);
  }
  return std::nullopt;
}

std::string TextOf(const Json& part) {
  return part.at(part.at("type") == "refusal" ? "refusal" : "text").get<std::string>();
}

// One text as a string, several as the parts that templates know.
Json ChatContent(const Json& content) {
  if (content.is_string()) return content;
  if (content.size() == 1) return TextOf(content.front());
  if (content.empty()) return "";
  Json parts = Json::array();
  for (const Json& part : content) parts.push_back({{"type", "text"}, {"text", TextOf(part)}});
  return parts;
}

std::string Joined(const Json& parts) {
  std::string text;
  for (const Json& part : parts) {
    if (!text.empty()) text += '\n';
    text += TextOf(part);
  }
  return text;
}

}  // namespace

std::string OutputItemId(std::string_view prefix, std::string_view response_id, size_t place) {
  return fmt::format("{}_{}_{}", prefix, response_id.substr(kResponsePrefix.size()), place);
}

ApiResult<Json> ReadInputItems(const Json& input, std::string_view response_id,
                               const FindResponse& find, size_t max_items, ItemBudget* budget) {
  Json items = Json::array();
  if (input.is_string()) {
    items.push_back({{"role", "user"}, {"content", input}});
  } else if (input.is_array()) {
    if (input.size() > max_items) {
      return tl::unexpected(
          BadItem("input", fmt::format("has {} items; the limit is {}", input.size(), max_items)));
    }
    items = input;
  } else {
    return tl::unexpected(BadItem(
        "input", fmt::format("must be a string or a list of items, not {}", JsonTypeName(input))));
  }
  InputReader reader(response_id, find, budget);
  for (size_t i = 0; i < items.size(); ++i) {
    if (auto error = reader.Read(&items[i], fmt::format("input[{}]", i), i)) {
      return tl::unexpected(std::move(*error));
    }
  }
  return items;
}

std::optional<ApiError> AddItems(const Json& items, std::string_view where, ChatBuilder* chat) {
  for (size_t i = 0; i < items.size(); ++i) {
    const Json& item = items[i];
    const auto& type = item.at("type").get_ref<const std::string&>();
    if (type == "message") {
      const auto& role = item.at("role").get_ref<const std::string&>();
      if (role == "assistant") {
        chat->AssistantText(Joined(item.at("content")));
      } else if (role == "user") {
        chat->User(ChatContent(item.at("content")));
      } else {
        chat->System(ChatContent(item.at("content")));
      }
    } else if (type == "reasoning") {
      const auto content = item.find("content");
      const bool has_content = content != item.end() && !content->empty();
      const std::string text = has_content                ? Joined(*content)
                               : item.contains("summary") ? Joined(item.at("summary"))
                                                          : "";
      if (!text.empty()) chat->Reasoning(text);
    } else if (type == "function_call") {
      chat->Call(item.at("call_id"), item.at("name"), item.at("arguments"));
    } else if (!chat->Result(item.at("call_id"), ChatContent(item.at("output")))) {
      const std::string place = fmt::format("{}[{}].call_id", where, i);
      return BadItem(place, fmt::format("is {}, and no function_call before it has that id",
                                        Shown(item.at("call_id").get<std::string>())));
    }
  }
  return std::nullopt;
}

}  // namespace oscar::server
