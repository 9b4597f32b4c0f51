#include "grammar/schema_rewrite.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <utility>

#include "grammar/string_formats.h"

namespace oscar {
namespace {

using Json = nlohmann::ordered_json;

struct Keywords {
  const char* type;
  std::array<std::string_view, 7> names;
};
constexpr std::array<Keywords, 4> kOfTypes = {{
    {"object",
     {"properties", "required", "additionalProperties", "patternProperties", "minProperties",
      "maxProperties", "unevaluatedProperties"}},
    {"array", {"items", "prefixItems", "minItems", "maxItems"}},
    {"string", {"minLength", "maxLength", "pattern", "format"}},
    {"number", {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}},
}};

void AddType(Json* schema) {
  for (const char* other : {"type", "$ref", "const", "enum", "anyOf", "oneOf", "allOf"}) {
    if (schema->contains(other)) return;
  }
  Json types = Json::array();
  for (const Keywords& keywords : kOfTypes) {
    bool found = false;
    for (const std::string_view name : keywords.names) {
      found |= !name.empty() && schema->contains(name);
    }
    if (found) types.push_back(keywords.type);
  }
  if (types.size() == 1) (*schema)["type"] = types[0];
  if (types.size() > 1) (*schema)["type"] = std::move(types);
}

void AddRequired(Json* schema) {
  const auto required = schema->find("required");
  if (required == schema->end() || !required->is_array()) return;
  const Json names = *required;
  Json other = schema->value("additionalProperties", Json::object());
  if (other.is_boolean()) other = Json::object();  // false: CheckGrammarSpec has refused it
  Json& properties = (*schema)["properties"];
  if (!properties.is_object()) properties = Json::object();
  for (const Json& name : names) {
    if (!name.is_string()) continue;
    const auto& text = name.get_ref<const std::string&>();
    if (!properties.contains(text)) properties[text] = other;
  }
}

void RewriteNames(Json* schema) {
  const auto properties = schema->find("properties");
  const auto is_plain = [](const std::string& name) {
    return std::ranges::all_of(
        name, [](unsigned char c) { return c >= 0x20 && c < 0x7f && c != '"' && c != '\\'; });
  };
  bool all_plain = true;
  if (properties != schema->end() && properties->is_object()) {
    for (const auto& [name, value] : properties->items()) all_plain = all_plain && is_plain(name);
  }
  if (!all_plain) {
    schema->erase("unevaluatedProperties");
    (*schema)["additionalProperties"] = false;
  }
  const auto patterns = schema->find("patternProperties");
  if (patterns == schema->end() || !patterns->is_object()) return;
  Json rewritten = Json::object();
  for (auto& [pattern, value] : patterns->items()) rewritten[RewritePattern(pattern)] = value;
  *patterns = std::move(rewritten);
}

void RewriteString(Json* schema, std::string_view never) {
  if (const auto pattern = schema->find("pattern");
      pattern != schema->end() && pattern->is_string()) {
    *pattern = RewritePattern(pattern->get_ref<const std::string&>());
    return;
  }
  if (const auto format = schema->find("format"); format != schema->end()) {
    const std::string name = format->is_string() ? format->get<std::string>() : "";
    if (const auto shape = FormatPattern(name); shape.has_value()) {
      schema->erase("format");
      (*schema)["pattern"] = fmt::format("^({})$", *shape);
    } else if (name == "iri-reference") {
      *format = "uri-reference";
    } else if (!IsKnownFormat(name)) {
      schema->erase("format");
    }
    if (IsKnownFormat(name)) return;
  }
  const auto length = [&](const char* name) -> int64_t {
    const auto value = schema->find(name);
    return value != schema->end() && value->is_number_integer() ? value->get<int64_t>() : -1;
  };
  const int64_t least = std::max<int64_t>(length("minLength"), 0), most = length("maxLength");
  if (least == 0 && most < 0) return;
  if (std::max(least, most) > kMaxPatternLength || (most >= 0 && most < least)) return;
  schema->erase("minLength");
  schema->erase("maxLength");
  (*schema)["pattern"] = fmt::format("^[^\\x00-\\x1f{}]{{{},{}}}$", never, least,
                                     most >= 0 ? std::to_string(most) : "");
}

// The code point that begins at `at` of valid UTF-8, and how many bytes it has.
std::pair<uint32_t, size_t> CodePointAt(std::string_view text, size_t at) {
  const auto lead = static_cast<unsigned char>(text[at]);
  const size_t size = lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  uint32_t code = size == 1 ? lead : lead & (0x7fu >> size);
  for (size_t i = 1; i < size && at + i < text.size(); ++i) {
    code = (code << 6) | (static_cast<unsigned char>(text[at + i]) & 0x3f);
  }
  return {code, size};
}

}  // namespace

std::string RewritePattern(std::string_view pattern) {
  std::string out;
  bool in_class = false, may_repeat = false;  // `may_repeat`: behind an atom
  for (size_t at = 0; at < pattern.size();) {
    const auto [code, size] = CodePointAt(pattern, at);
    const char c = code < 0x80 ? pattern[at] : 'x';
    const bool opens_group = pattern.substr(at, 2) == "(?" && !in_class;
    if (code >= 0x80) {
      out += fmt::format("\\u{{{:X}}}", code);
    } else if (c == '\\' && at + 1 < pattern.size() &&
               static_cast<unsigned char>(pattern[at + 1]) >= 0x80) {
      ++at;  // it means the character itself
      continue;
    } else if (c == '\\' || opens_group) {  // with what follows
      out += pattern.substr(at, 2);
      may_repeat = c == '\\';
      at += 2;
      continue;
    } else if (c == '?' && !in_class) {
      if (may_repeat) out += "{0,1}";
    } else {
      out += c;
    }
    at += size;
    if (in_class) {
      in_class = c != ']';
      may_repeat = !in_class;
    } else if (c == '[') {
      in_class = true;
      // A bracket that is the first of its class is one of its characters.
      const bool inverts = pattern.substr(at, 1) == "^";
      if (pattern.substr(at + (inverts ? 1 : 0), 1) == "]") {
        out += inverts ? "^\\]" : "\\]";
        at += inverts ? 2 : 1;
      }
    } else {
      may_repeat = std::string_view("*+?}(|^").find(c) == std::string_view::npos;
    }
  }
  return out;
}

void RewriteSchema(Json* schema, std::string_view never) {
  if (!schema->is_object()) return;
  AddType(schema);
  AddRequired(schema);
  if (schema->contains("properties") || schema->contains("patternProperties")) RewriteNames(schema);
  const Json type = schema->value("type", Json());
  const bool is_string = type == "string" ||
                         (type.is_array() && std::ranges::find(type, Json("string")) != type.end());
  if (is_string && !schema->contains("enum") && !schema->contains("const"))
    RewriteString(schema, never);
  for (const char* name : {"properties", "patternProperties", "$defs", "definitions"}) {
    if (const auto inner = schema->find(name); inner != schema->end() && inner->is_object()) {
      for (auto& member : inner->items()) RewriteSchema(&member.value(), never);
    }
  }
  for (const char* name : {"anyOf", "oneOf", "allOf", "prefixItems", "items"}) {
    if (const auto inner = schema->find(name); inner != schema->end() && inner->is_array()) {
      for (Json& one : *inner) RewriteSchema(&one, never);
    }
  }
  for (const char* name : {"items", "additionalProperties", "unevaluatedProperties"}) {
    if (const auto inner = schema->find(name); inner != schema->end())
      RewriteSchema(&*inner, never);
  }
}

}  // namespace oscar
