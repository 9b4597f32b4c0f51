// How a format writes calls of tools, for what makes a model write them (masks): `ListOf` stands
// around and between the calls of an answer, `FrameOf` around the arguments of one. What is written
// so is read as those calls again. Pure functions.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "toolcall/format.h"

namespace oscar {

// Arguments that are no JSON object: for each one `open` KEY `after_key` VALUE `close`, where a
// string is written verbatim and any other value as JSON. No VALUE holds one of `never`, which
// would end it, and no KEY has one of `not_in_keys`.
struct ArgumentTags {
  std::string_view open, after_key, close;
  std::vector<std::string_view> never;
  std::string_view not_in_keys;
};

struct CallFrame {
  std::string begin, end;
  std::optional<ArgumentTags> tags;  // unset: the arguments are one JSON object
};
struct CallList {
  std::string_view begin, between, end;
};
// Not for kNone. Markers that are single tokens of the model are spelled as text.
CallFrame FrameOf(CallFormat format, std::string_view tool);
CallList ListOf(CallFormat format);

// The call that an answer must begin with, once its reasoning has ended: tool_choice "required" or
// a function.
struct DemandedCall {
  std::vector<std::string> tools;  // one of these
  bool several = false;            // more calls may follow the first
};

}  // namespace oscar
