// The one door to the JSON parser: depth-limited, no exceptions, errors that name what was parsed
// and where. nlohmann::json is complete only for .cc files that include <nlohmann/json.hpp>; it
// appears in no other header.
#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/status.h"

namespace oscar {

inline constexpr int kMaxJsonDepth = 64;
// Inserting a member into an object that keeps its order compares it with all earlier ones.
inline constexpr size_t kMaxOrderedKeys = 2048;

// `what` names the source in errors ("config.json", "request body"). Duplicate keys: the last wins.
Result<nlohmann::json> ParseJson(std::string_view text, std::string_view what,
                                 int max_depth = kMaxJsonDepth);
// Refuses duplicate keys: for files where two readers must not see two different values.
Result<nlohmann::json> ParseStrictJson(std::string_view text, std::string_view what,
                                       int max_depth = kMaxJsonDepth);
// Keeps the order of object keys, for chat templates and responses. Objects of more than
// kMaxOrderedKeys members are refused.
Result<nlohmann::ordered_json> ParseOrderedJson(std::string_view text, std::string_view what,
                                                int max_depth = kMaxJsonDepth);

// A member of an object; the value is still text.
struct JsonMember {
  std::string name;
  std::string_view value;  // of the text that was split
};
// Checks all of `text`, an object, and finds its members without building any value: for bodies of
// which only some members are of interest. Bounds as ParseOrderedJson; of a name that occurs twice,
// both are there. Text that is JSON but no object is kInvalidArgument.
Result<std::vector<JsonMember>> SplitJsonObject(std::string_view text, std::string_view what,
                                                int max_depth = kMaxJsonDepth);
// About how much memory the document of `text` would take, in units of 16 bytes: a number, true,
// false or null is one unit; a string, list or object, with its own memory, eight.
size_t JsonCost(std::string_view text);

// Refuses JSON text with integers that 64 bits do not hold, which the parsers make floats of: for
// text whose numbers are shown again.
Status CheckIntegersFit(std::string_view text, std::string_view what);

}  // namespace oscar
