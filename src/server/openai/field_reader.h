// FieldReader: typed access to the fields of one JSON object of a request. Keeps the first error,
// with the name of the field at fault; null is the same as absent; fields nobody asked for can be
// listed. For .cc files that parse requests.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "openai/api_error.h"

namespace oscar::server {

class FieldReader {
 public:
  using Json = nlohmann::ordered_json;

  // `prefix` is put before names in errors ("stream_options."). `object` must be an object.
  explicit FieldReader(const Json& object, std::string prefix = "")
      : object_(&object), prefix_(std::move(prefix)) {}
  // Of a whole body: a member is parsed when it is asked for, and those that nobody asks for never
  // take memory. All that are parsed cost `max_cost` at most (JsonCost).
  FieldReader(std::vector<JsonMember> members, size_t max_cost)
      : members_(std::move(members)), cost_left_(max_cost) {}

  // The value, or null where absent or JSON null. Marks the field as known.
  const Json* Find(std::string_view name);

  // Each leaves `out` alone where the field is absent, and records an error of type or range.
  void Bool(std::string_view name, bool* out);
  void Int(std::string_view name, int64_t low, int64_t high, int64_t* out);
  void Int(std::string_view name, int64_t low, int64_t high, std::optional<int64_t>* out);
  void Float(std::string_view name, double low, double high, float* out);
  void String(std::string_view name, size_t max_bytes, std::string* out);
  // A string or a list of them.
  void Strings(std::string_view name, size_t max_count, size_t max_bytes,
               std::vector<std::string>* out);
  void TokenIds(std::string_view name, size_t max_count, std::vector<int32_t>* out);

  // Fields of the API that are not served: 400 unless absent or equal to a harmless default.
  void Unsupported(std::string_view name, const std::vector<Json>& harmless = {});
  // Known, and without effect.
  void Ignore(std::string_view name) { known_.emplace(name); }

  void Fail(ApiError error);
  void FailValue(std::string_view name, std::string message);
  bool ok() const { return !error_.has_value(); }
  const ApiError& error() const { return *error_; }
  std::string ParamOf(std::string_view name) const { return prefix_ + std::string(name); }
  // Field names that nothing above asked for.
  std::vector<std::string> Unknown() const;
  // One debug line for each of them.
  void LogUnknown() const;

 private:
  const Json* Parsed(std::string_view name);

  const Json* object_ = nullptr;  // null: members_
  std::vector<JsonMember> members_;
  std::map<std::string, Json, std::less<>> parsed_;
  size_t cost_left_ = 0;
  std::string prefix_;
  std::set<std::string, std::less<>> known_;
  std::optional<ApiError> error_;
};

// A request body as far as it takes to know its members: a JSON object within these bounds.
ApiResult<FieldReader> ReadRequestBody(std::string_view body, int max_json_depth,
                                       size_t max_json_values);

// "a number", "a string", ... for messages.
std::string_view JsonTypeName(const nlohmann::ordered_json& value);

}  // namespace oscar::server
