// Arguments of a call that are written as tags, one by one: which text of a value is read as a
// value of its schema. Internal to this module, for its .cc files; pure functions.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "oscar/status.h"
#include "toolcall/call_frame.h"
#include "toolcall/tool_set.h"

namespace oscar::server {

struct TagArgument {
  std::string name;
  bool required = false;
  nlohmann::ordered_json value;  // a format of xgrammar's structural tags
};

// The parameters that the schema of `tool` names, in its order, then those that it only requires.
// Others are never written. kInvalidArgument names what cannot be written as tags, and where.
Result<std::vector<TagArgument>> TagArguments(const ToolSet& tools, std::string_view tool,
                                              const ArgumentTags& tags);

}  // namespace oscar::server
