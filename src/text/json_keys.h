// A setting of a tokenizer's file that is not understood must not be passed over: it would change
// which tokens a text becomes. For .cc files, of nlohmann's types.
#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <initializer_list>
#include <string_view>

#include "oscar/status.h"

namespace oscar {

// kDataLoss where it is no object, kUnimplemented for a key that is not `known`. `where` names it.
template <typename Json>
Status CheckKeys(const Json& object, std::string_view where,
                 std::initializer_list<std::string_view> known) {
  if (!object.is_object()) {
    return DataLoss(fmt::format("{} must be an object, not {}", where, object.type_name()));
  }
  for (const auto& [key, value] : object.items()) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      return Unimplemented(
          fmt::format("{}: \"{}\" is not a setting this version knows", where, key));
    }
  }
  return {};
}

}  // namespace oscar
