#include "grammar/spec.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string_view>

#include "base/json.h"
#include "grammar/string_formats.h"

namespace oscar {
namespace {

using Json = nlohmann::ordered_json;

// Keywords that say what a value must not be, or tie values to each other: no context-free grammar
// of a practical size holds an answer to them.
constexpr std::array<std::string_view, 17> kRefused = {"not",
                                                       "if",
                                                       "then",
                                                       "else",
                                                       "uniqueItems",
                                                       "contains",
                                                       "minContains",
                                                       "maxContains",
                                                       "dependentRequired",
                                                       "dependentSchemas",
                                                       "dependencies",
                                                       "unevaluatedItems",
                                                       "$dynamicRef",
                                                       "$recursiveRef",
                                                       "contentSchema",
                                                       "additionalItems",
                                                       "propertyNames"};
// Those that name other schemas beside which nothing else is looked at.
constexpr std::array<std::string_view, 6> kExclusive = {"$ref",  "const", "enum",
                                                        "anyOf", "oneOf", "allOf"};
// What may stand beside them: it says nothing of the value, or repeats its type.
constexpr std::array<std::string_view, 16> kHarmless = {
    "title", "description", "default",       "examples", "$comment",  "$schema",
    "$id",   "$defs",       "deprecated",    "readOnly", "writeOnly", "definitions",
    "type",  "nullable",    "discriminator", "$anchor"};

bool Holds(std::span<const std::string_view> names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

// Names come from outside and may be of any length; not cut within a character.
std::string Shown(std::string_view text) {
  constexpr size_t kLongest = 160;
  if (text.size() <= kLongest) return std::string(text);
  size_t end = kLongest;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return std::string(text.substr(0, end)) + "...";
}

Status Refuse(std::string_view path, std::string_view what) {
  return InvalidArgument(
      fmt::format("the schema at {} {}", path.empty() ? "/" : Shown(path), what));
}

std::string TypeNameOf(const Json& value) {
  switch (value.type()) {
    case Json::value_t::null:
      return "null";
    case Json::value_t::boolean:
      return "boolean";
    case Json::value_t::string:
      return "string";
    case Json::value_t::array:
      return "array";
    case Json::value_t::object:
      return "object";
    case Json::value_t::number_float:
      return "number";
    default:
      return "integer";
  }
}

// Whether `type` of a schema lets the value through.
bool TypeAdmits(const Json& type, const Json& value) {
  const auto admits = [&](const Json& name) {
    const std::string own = TypeNameOf(value);
    return name == own || (name == "number" && own == "integer");
  };
  return type.is_array() ? std::ranges::any_of(type, admits) : admits(type);
}

// Values whose type is not the schema's would be written though they do not validate.
Status CheckValuesFitType(const Json& schema, std::string_view path) {
  const auto type = schema.find("type");
  if (type == schema.end()) return {};
  if (const auto values = schema.find("enum"); values != schema.end() && values->is_array()) {
    for (const Json& value : *values) {
      if (!TypeAdmits(*type, value))
        return Refuse(path, "lists a value in 'enum' that is not of its 'type'");
    }
  }
  if (const auto value = schema.find("const");
      value != schema.end() && !TypeAdmits(*type, *value)) {
    return Refuse(path, "has a 'const' that is not of its 'type'");
  }
  return {};
}

// Which schema holds for the value of a key must be clear from where the key is written.
Status CheckKeys(const Json& schema, std::string_view path) {
  const auto patterns = schema.find("patternProperties");
  if (patterns != schema.end() && patterns->is_object()) {
    if (patterns->size() > 1) {
      return Refuse(path,
                    "has several 'patternProperties', which structured output does not support");
    }
    for (const char* name : {"properties", "required", "minProperties", "maxProperties"}) {
      if (!schema.contains(name)) continue;
      return Refuse(path, fmt::format("combines 'patternProperties' with '{}', which structured "
                                      "output does not support",
                                      name));
    }
    const Json other = schema.value("additionalProperties", Json(false));
    if (other != false) {
      return Refuse(path,
                    "combines 'patternProperties' with 'additionalProperties', which "
                    "structured output does not support");
    }
  }
  const auto required = schema.find("required");
  if (required == schema.end() || schema.value("additionalProperties", Json()) != false) return {};
  const auto properties = schema.find("properties");
  for (const Json& name : *required) {
    if (!name.is_string()) continue;
    const bool is_there = properties != schema.end() && properties->is_object() &&
                          properties->contains(name.get_ref<const std::string&>());
    if (is_there) continue;
    return Refuse(path, fmt::format("requires '{}', which its 'additionalProperties' rule out",
                                    Shown(name.get_ref<const std::string&>())));
  }
  return {};
}

Status CheckSchema(const Json& schema, const std::string& path);

Status CheckSchemas(const Json& value, const std::string& path) {
  if (value.is_object()) {
    for (const auto& [name, schema] : value.items()) {
      OSCAR_RETURN_IF_ERROR(CheckSchema(schema, fmt::format("{}/{}", path, name)));
    }
  } else if (value.is_array()) {
    for (size_t i = 0; i < value.size(); ++i) {
      OSCAR_RETURN_IF_ERROR(CheckSchema(value[i], fmt::format("{}/{}", path, i)));
    }
  }
  return {};
}

// Depth is bounded by the parser.
Status CheckSchema(const Json& schema, const std::string& path) {
  if (schema.is_boolean()) return {};
  if (!schema.is_object()) return Refuse(path, "must be an object, true or false");
  std::string_view exclusive;
  for (const auto& [name, value] : schema.items()) {
    if (Holds(kRefused, name) && !(name == "uniqueItems" && value == false)) {
      return Refuse(path, fmt::format("uses '{}', which structured output does not support", name));
    }
    if (Holds(kExclusive, name) && exclusive.empty()) exclusive = name;
  }
  if (!exclusive.empty()) {
    for (const auto& [name, value] : schema.items()) {
      if (name == exclusive || Holds(kHarmless, name)) continue;
      return Refuse(path,
                    fmt::format("combines '{}' with '{}', which structured output does not support",
                                exclusive, Shown(name)));
    }
    // Beside these a type would not be looked at.
    if (schema.contains("type") && exclusive != "const" && exclusive != "enum") {
      return Refuse(
          path, fmt::format("combines '{}' with 'type', which structured output does not support",
                            exclusive));
    }
    OSCAR_RETURN_IF_ERROR(CheckValuesFitType(schema, path));
  }
  if (const auto all = schema.find("allOf"); all != schema.end() && all->size() != 1) {
    return Refuse(path,
                  "uses 'allOf' of several schemas, which structured output does not support");
  }
  if (const auto ref = schema.find("$ref"); ref != schema.end()) {
    if (!ref->is_string() || (*ref != "#" && !ref->get<std::string>().starts_with("#/"))) {
      return Refuse(path, "has a '$ref' that does not point into the schema itself (\"#/...\")");
    }
  }
  for (const char* name : {"anyOf", "oneOf", "allOf"}) {
    if (const auto options = schema.find(name); options != schema.end()) {
      if (!options->is_array() || options->empty()) {
        return Refuse(path, fmt::format("has a '{}' that is not a list of schemas", name));
      }
      OSCAR_RETURN_IF_ERROR(CheckSchemas(*options, fmt::format("{}/{}", path, name)));
    }
  }
  for (const char* name :
       {"properties", "patternProperties", "$defs", "definitions", "prefixItems"}) {
    if (const auto inner = schema.find(name); inner != schema.end()) {
      OSCAR_RETURN_IF_ERROR(CheckSchemas(*inner, fmt::format("{}/{}", path, name)));
    }
  }
  for (const char* name : {"items", "additionalProperties", "unevaluatedProperties"}) {
    if (const auto inner = schema.find(name); inner != schema.end()) {
      const std::string at = fmt::format("{}/{}", path, name);
      OSCAR_RETURN_IF_ERROR(inner->is_array() ? CheckSchemas(*inner, at) : CheckSchema(*inner, at));
    }
  }
  OSCAR_RETURN_IF_ERROR(CheckKeys(schema, path));
  if (const auto pattern = schema.find("pattern");
      pattern != schema.end() && pattern->is_string() &&
      pattern->get_ref<const std::string&>().size() > kMaxRegexBytes) {
    return Refuse(path, fmt::format("has a 'pattern' of more than {} bytes", kMaxRegexBytes));
  }
  if (const auto format = schema.find("format");
      format != schema.end() && format->is_string() && IsKnownFormat(format->get<std::string>())) {
    for (const char* name : {"pattern", "minLength", "maxLength"}) {
      if (!schema.contains(name)) continue;
      return Refuse(path, fmt::format("combines 'format' with '{}', which structured output does "
                                      "not support",
                                      name));
    }
  }
  return {};
}

Status CheckSchemaText(const std::string& text) {
  const auto schema = ParseOrderedJson(text, "schema", kMaxSchemaDepth);
  if (!schema.has_value()) return InvalidArgument(schema.error().message());
  if (!schema->is_object()) return InvalidArgument("the schema must be a JSON object");
  return CheckSchema(*schema, "");
}

Status CheckNesting(const std::string& text, std::string_view what) {
  int depth = 0;
  bool escaped = false;
  for (const char c : text) {
    if (escaped) {
      escaped = false;
    } else if (c == '\\') {
      escaped = true;
    } else if (c == '(' || c == '[') {
      if (++depth > kMaxParentheses) {
        return InvalidArgument(
            fmt::format("the {} has more than {} nested parentheses", what, kMaxParentheses));
      }
    } else if ((c == ')' || c == ']') && depth > 0) {
      --depth;
    }
  }
  return {};
}

Status CheckText(const std::string& text, std::string_view what, size_t limit) {
  if (text.empty()) return InvalidArgument(fmt::format("the {} is empty", what));
  if (text.size() > limit) {
    return InvalidArgument(
        fmt::format("the {} has {} bytes; the limit is {}", what, text.size(), limit));
  }
  if (text.find('\0') != std::string::npos) {
    return InvalidArgument(fmt::format("the {} holds a zero byte", what));
  }
  return {};
}

}  // namespace

std::string GrammarSpec::Key() const {
  std::string key = fmt::format("{}:{}", static_cast<int>(kind), text);
  for (const std::string& choice : choices) key += fmt::format("|{}:{}", choice.size(), choice);
  return key;
}

Status CheckGrammarSpec(const GrammarSpec& spec) {
  switch (spec.kind) {
    case GrammarSpec::Kind::kJsonObject:
      return {};
    case GrammarSpec::Kind::kJsonSchema:
      OSCAR_RETURN_IF_ERROR(CheckText(spec.text, "schema", kMaxGrammarBytes));
      return CheckSchemaText(spec.text);
    case GrammarSpec::Kind::kRegex:
      OSCAR_RETURN_IF_ERROR(CheckText(spec.text, "regex", kMaxRegexBytes));
      return CheckNesting(spec.text, "regex");
    case GrammarSpec::Kind::kGrammar:
      OSCAR_RETURN_IF_ERROR(CheckText(spec.text, "grammar", kMaxGrammarBytes));
      return CheckNesting(spec.text, "grammar");
    case GrammarSpec::Kind::kJsonCalls:
    case GrammarSpec::Kind::kTextCalls:
      return CheckText(spec.text, "tool frame", 4 * kMaxGrammarBytes);
    case GrammarSpec::Kind::kChoice:
      break;
  }
  if (spec.choices.empty()) return InvalidArgument("the choice has no entries");
  if (spec.choices.size() > kMaxChoices) {
    return InvalidArgument(fmt::format("the choice has {} entries; the limit is {}",
                                       spec.choices.size(), kMaxChoices));
  }
  size_t bytes = 0;
  for (const std::string& choice : spec.choices) {
    if (choice.empty()) return InvalidArgument("the choice has an empty entry");
    bytes += choice.size();
  }
  if (bytes > kMaxGrammarBytes) {
    return InvalidArgument(
        fmt::format("the choice has {} bytes; the limit is {}", bytes, kMaxGrammarBytes));
  }
  return {};
}

std::string ChoiceGrammar(const std::vector<std::string>& choices) {
  std::string grammar = "root ::= ";
  for (size_t i = 0; i < choices.size(); ++i) {
    grammar += i == 0 ? "\"" : " | \"";
    for (const char c : choices[i]) {
      const auto byte = static_cast<unsigned char>(c);
      if (c == '"' || c == '\\') {
        grammar += '\\';
        grammar += c;
      } else if (byte < 0x20 || byte == 0x7f) {
        grammar += fmt::format("\\x{:02X}", byte);
      } else {
        grammar += c;
      }
    }
    grammar += '"';
  }
  return grammar;
}

}  // namespace oscar
