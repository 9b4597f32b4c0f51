// Schemas as the grammar library keeps to them: what it would pass over is said in words that it
// knows. Every answer of the rewritten schema is one of the schema that was given. Pure functions.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace oscar {

// Of a schema that CheckGrammarSpec lets through:
//   keywords without a "type"        the types that they speak of
//   "required" without a property    the property, as "additionalProperties" has it
//   lengths up to kMaxPatternLength  a pattern: masks of it cost a tenth
//   patterns                         RewritePattern
//   names that JSON escapes, or of   no other names beside them: the library tells those apart by
//   other characters than ASCII      bytes, and would write parts of characters and bare quotes
// Strings of a length then hold none of `never`, plain ASCII characters.
void RewriteSchema(nlohmann::ordered_json* schema, std::string_view never = "");

inline constexpr int kMaxPatternLength = 120;
// A regular expression of the same language: escapes in place of what is not ASCII, "{0,1}" in
// place of "?", which the library takes for less where it follows a repetition, and nothing lazy.
std::string RewritePattern(std::string_view pattern);

}  // namespace oscar
