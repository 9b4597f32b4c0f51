// GrammarSpec: what an answer has to look like, as a client says it, and the checks that need no
// compiler. Plain data; safe from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "oscar/status.h"

namespace oscar {

struct GrammarSpec {
  enum class Kind : uint8_t {
    kJsonObject,  // any JSON object
    kJsonSchema,  // `text`: JSON Schema
    kRegex,       // `text`: the whole answer matches
    kChoice,      // one of `choices`
    kGrammar,     // `text`: EBNF as llama.cpp writes it (GBNF); the rule "root" is the answer
    // Calls of tools, as xgrammar's structural tag; never a client's own. In the first all but the
    // frames is JSON, in the second values are text, too.
    kJsonCalls,
    kTextCalls,
  };
  Kind kind = Kind::kJsonObject;
  std::string text;
  std::vector<std::string> choices;

  bool is_calls() const { return kind == Kind::kJsonCalls || kind == Kind::kTextCalls; }
  // Equal for specs that ask for the same.
  std::string Key() const;
};

// Bounds of a spec, in bytes of its text and entries of its choices. What is within them is
// compiled within the limits of GrammarLimits, or refused.
inline constexpr size_t kMaxGrammarBytes = size_t{256} << 10;
inline constexpr size_t kMaxRegexBytes = size_t{8} << 10;
inline constexpr size_t kMaxChoices = 4096;
// Levels of JSON in a schema, and of parentheses and brackets in a regex or grammar.
inline constexpr int kMaxSchemaDepth = 48;
inline constexpr int kMaxParentheses = 64;
// At most this much whitespace between the parts of JSON: enough for a line break and the
// indentation of seven levels. Without a bound a model can write spaces for ever.
inline constexpr int kMaxJsonWhitespace = 16;

// kInvalidArgument where the spec is malformed, over a bound, or asks for what masks do not hold an
// answer to: a keyword of JSON Schema that would be ignored is refused by name.
Status CheckGrammarSpec(const GrammarSpec& spec);

// The grammar of a choice: one of these strings and nothing else.
std::string ChoiceGrammar(const std::vector<std::string>& choices);

}  // namespace oscar
