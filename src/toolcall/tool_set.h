// ToolSet: the tools of one request, by name. Immutable; share one between threads.
#pragma once

#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/status.h"

namespace oscar {

struct ToolLimits {
  size_t max_tools = 512;
  size_t max_bytes = size_t{1} << 20;  // of all of them as JSON
};
// A list of tools as in OpenAI's API: functions with different names of up to 256 letters, digits
// and "_-.:/", and schemas that are objects. Errors name the field ("tools[2].function").
Status CheckTools(const nlohmann::ordered_json& tools, const ToolLimits& limits = {});

class ToolSet {
 public:
  // `tools` as in OpenAI's API. Entries without a function's name are left out.
  explicit ToolSet(const nlohmann::ordered_json& tools);

  bool empty() const { return schemas_.empty(); }
  bool Has(std::string_view name) const { return schemas_.contains(name); }
  std::vector<std::string> Names() const;
  // "parameters" of a tool; null where it has none.
  const nlohmann::ordered_json* Schema(std::string_view name) const;
  // Whether some name begins with `text`.
  bool HasPrefix(std::string_view text) const;

  // The JSON text of a value that the model wrote without quotes. The schema of the parameter
  // decides: where it wants a string, `raw` is that string; otherwise `raw` is JSON (or Python's
  // True, False, None) where it parses and has a type that is wanted, and a string where not. A
  // parameter without a schema is a string unless its text is JSON of another type.
  std::string ToJson(std::string_view tool, std::string_view parameter, std::string_view raw) const;

 private:
  // "parameters" of each function; null where it has none.
  std::map<std::string, std::shared_ptr<const nlohmann::ordered_json>, std::less<>> schemas_;
};

// What "#/$defs/name" and the like refer to in `root`; null where there is nothing.
const nlohmann::ordered_json* ResolveReference(const nlohmann::ordered_json& root,
                                               std::string_view reference);
// `text` as a JSON string; what is not UTF-8 becomes U+FFFD.
std::string JsonString(std::string_view text);

}  // namespace oscar
