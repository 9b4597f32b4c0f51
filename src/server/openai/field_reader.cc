#include "openai/field_reader.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/log.h"

namespace oscar::server {
namespace {

// Integers come as integers; 16.0 is accepted for what it is, 16.5 is not.
std::optional<int64_t> AsInteger(const nlohmann::ordered_json& value) {
  if (value.is_number_unsigned()) {
    const auto number = value.get<uint64_t>();
    if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
    return static_cast<int64_t>(number);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_number_float()) {
    const double number = value.get<double>();
    if (std::floor(number) == number && std::fabs(number) < 0x1p53) {
      return static_cast<int64_t>(number);
    }
  }
  return std::nullopt;
}

}  // namespace

std::string_view JsonTypeName(const nlohmann::ordered_json& value) {
  switch (value.type()) {
    case nlohmann::ordered_json::value_t::null:
      return "null";
    case nlohmann::ordered_json::value_t::object:
      return "an object";
    case nlohmann::ordered_json::value_t::array:
      return "a list";
    case nlohmann::ordered_json::value_t::string:
      return "a string";
    case nlohmann::ordered_json::value_t::boolean:
      return "a boolean";
    default:
      return "a number";
  }
}

ApiResult<FieldReader> ReadRequestBody(std::string_view body, int max_json_depth,
                                       size_t max_json_values) {
  auto members = SplitJsonObject(body, "request body", max_json_depth);
  // A template would show a client's number as another one.
  if (const Status status = CheckIntegersFit(body, "request body");
      members.has_value() && !status.ok()) {
    members = Unexpected(status);
  }
  if (members.has_value()) return FieldReader(std::move(*members), max_json_values);
  const bool is_json = members.error().code() == StatusCode::kInvalidArgument;
  return tl::unexpected(
      MakeApiError(400, "invalid_json",
                   is_json ? "request body: must be a JSON object" : members.error().message()));
}

const FieldReader::Json* FieldReader::Find(std::string_view name) {
  known_.emplace(name);
  if (object_ == nullptr) return Parsed(name);
  const auto at = object_->find(std::string(name));
  if (at == object_->end() || at->is_null()) return nullptr;
  return &*at;
}

const FieldReader::Json* FieldReader::Parsed(std::string_view name) {
  auto at = parsed_.find(name);
  if (at == parsed_.end()) {
    // Of two members of one name the last counts.
    const auto member = std::find_if(members_.rbegin(), members_.rend(),
                                     [&](const JsonMember& one) { return one.name == name; });
    if (member == members_.rend()) return nullptr;
    const size_t cost = JsonCost(member->value);
    if (cost > cost_left_) {
      FailValue(name, fmt::format("holds too many values; {} more fit into the request (a string, "
                                  "list or object counts eight)",
                                  cost_left_));
      return nullptr;
    }
    cost_left_ -= cost;
    const std::string what = fmt::format("request body: '{}'", ParamOf(name));
    auto value = ParseOrderedJson(member->value, what);
    if (!value.has_value()) {
      Fail(MakeApiError(400, "invalid_json", value.error().message()));
      return nullptr;
    }
    at = parsed_.emplace(std::string(name), std::move(*value)).first;
  }
  return at->second.is_null() ? nullptr : &at->second;
}

void FieldReader::Fail(ApiError error) {
  if (!error_.has_value()) error_ = std::move(error);
}

void FieldReader::FailValue(std::string_view name, std::string message) {
  const std::string param = ParamOf(name);
  Fail(InvalidValue(param, fmt::format("'{}' {}", param, message)));
}

void FieldReader::Bool(std::string_view name, bool* out) {
  const Json* value = Find(name);
  if (value == nullptr) return;
  if (!value->is_boolean()) {
    return FailValue(name, fmt::format("must be true or false, not {}", JsonTypeName(*value)));
  }
  *out = value->get<bool>();
}

void FieldReader::Int(std::string_view name, int64_t low, int64_t high, int64_t* out) {
  const Json* value = Find(name);
  if (value == nullptr) return;
  if (!value->is_number()) {
    return FailValue(name, fmt::format("must be an integer, not {}", JsonTypeName(*value)));
  }
  const std::optional<int64_t> number = AsInteger(*value);
  if (!number.has_value() || *number < low || *number > high) {
    return FailValue(name, fmt::format("must be an integer between {} and {}", low, high));
  }
  *out = *number;
}

void FieldReader::Int(std::string_view name, int64_t low, int64_t high,
                      std::optional<int64_t>* out) {
  if (Find(name) == nullptr) return;
  int64_t number = 0;
  Int(name, low, high, &number);
  *out = number;
}

void FieldReader::Float(std::string_view name, double low, double high, float* out) {
  const Json* value = Find(name);
  if (value == nullptr) return;
  if (!value->is_number()) {
    return FailValue(name, fmt::format("must be a number, not {}", JsonTypeName(*value)));
  }
  const double number = value->get<double>();
  if (!(number >= low && number <= high)) {
    return FailValue(name, fmt::format("must be between {} and {}", low, high));
  }
  *out = static_cast<float>(number);
}

void FieldReader::String(std::string_view name, size_t max_bytes, std::string* out) {
  const Json* value = Find(name);
  if (value == nullptr) return;
  if (!value->is_string()) {
    return FailValue(name, fmt::format("must be a string, not {}", JsonTypeName(*value)));
  }
  const auto& text = value->get_ref<const std::string&>();
  if (text.size() > max_bytes) {
    return FailValue(name, fmt::format("has {} bytes; the limit is {}", text.size(), max_bytes));
  }
  *out = text;
}

void FieldReader::Strings(std::string_view name, size_t max_count, size_t max_bytes,
                          std::vector<std::string>* out) {
  const Json* value = Find(name);
  if (value == nullptr) return;
  if (!value->is_string() && !value->is_array()) {
    return FailValue(
        name, fmt::format("must be a string or a list of strings, not {}", JsonTypeName(*value)));
  }
  if (value->is_array() && value->size() > max_count) {
    return FailValue(name,
                     fmt::format("has {} entries; the limit is {}", value->size(), max_count));
  }
  const Json list = value->is_array() ? *value : Json::array({*value});
  if (list.size() > max_count) {
    return FailValue(name, fmt::format("has {} entries; the limit is {}", list.size(), max_count));
  }
  for (const Json& item : list) {
    if (!item.is_string()) {
      return FailValue(name, fmt::format("must hold strings, not {}", JsonTypeName(item)));
    }
    const auto& text = item.get_ref<const std::string&>();
    if (text.empty()) return FailValue(name, "must not hold an empty string");
    if (text.size() > max_bytes) {
      return FailValue(
          name, fmt::format("holds a string of {} bytes; the limit is {}", text.size(), max_bytes));
    }
    out->push_back(text);
  }
}

void FieldReader::TokenIds(std::string_view name, size_t max_count, std::vector<int32_t>* out) {
  const Json* value = Find(name);
  if (value == nullptr) return;
  if (!value->is_array()) {
    return FailValue(name,
                     fmt::format("must be a list of token ids, not {}", JsonTypeName(*value)));
  }
  if (value->size() > max_count) {
    return FailValue(name,
                     fmt::format("has {} entries; the limit is {}", value->size(), max_count));
  }
  for (const Json& item : *value) {
    const std::optional<int64_t> id = item.is_number() ? AsInteger(item) : std::nullopt;
    if (!id.has_value() || *id < 0 || *id > std::numeric_limits<int32_t>::max()) {
      return FailValue(name, "must hold token ids");
    }
    out->push_back(static_cast<int32_t>(*id));
  }
}

void FieldReader::Unsupported(std::string_view name, const std::vector<Json>& harmless) {
  const Json* value = Find(name);
  if (value == nullptr || std::find(harmless.begin(), harmless.end(), *value) != harmless.end()) {
    return;
  }
  Fail(UnsupportedParameter(ParamOf(name),
                            fmt::format("'{}' is not supported by this server", ParamOf(name))));
}

std::vector<std::string> FieldReader::Unknown() const {
  std::vector<std::string> names;
  if (object_ != nullptr) {
    for (const auto& [name, value] : object_->items()) {
      if (!known_.contains(name)) names.push_back(name);
    }
  }
  for (const JsonMember& member : members_) {
    if (!known_.contains(member.name)) names.push_back(member.name);
  }
  return names;
}

void FieldReader::LogUnknown() const {
  if (GetLogLevel() > LogLevel::kDebug) return;
  for (const std::string& name : Unknown()) {
    // Names come from outside: quoted and bounded as JSON strings are.
    LogDebug("request: field {} is unknown and ignored",
             Json(name.substr(0, 64)).dump(-1, ' ', true, Json::error_handler_t::replace));
  }
}

}  // namespace oscar::server
