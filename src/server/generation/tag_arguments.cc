// A reader makes of a value's text what the schema wants (ToolSet::ToJson): JSON where it parses as
// a wanted type, else a string. Values here are either JSON of types other than string, or text
// that is read as the string it is, so that what is written is what is read.
#include "generation/tag_arguments.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "base/json.h"
#include "grammar/schema_rewrite.h"
#include "grammar/spec.h"
#include "grammar/string_formats.h"

namespace oscar::server {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxKeyBytes = 256;  // what readers take for a key
constexpr int kMaxAlternatives = 8;   // levels of $ref, anyOf and oneOf

// What may stand in a schema of which every value of its type is one.
constexpr std::array<std::string_view, 11> kSaysNothing = {
    "type",     "title",   "description", "default",  "examples", "$comment",
    "nullable", "$schema", "deprecated",  "readOnly", "writeOnly"};

class Values {
 public:
  Values(const ToolSet& tools, std::string_view tool, const Json& root, const ArgumentTags& tags)
      : tools_(tools), tool_(tool), root_(root), tags_(tags) {}

  Result<Json> Of(const std::string& name, const Json& schema);

 private:
  struct Alternatives {
    bool any_string = false;    // every string is one
    bool some_strings = false;  // those of a shape are
    bool some_others = false;   // not every value of a type other than string and null is one
    Json formats = Json::array();
  };
  Status Add(const Json& schema, int depth, Alternatives* out);
  Status AddString(const Json& schema, Alternatives* out);
  Status AddValues(const Json& values, Alternatives* out);
  Status AddOther(Json schema, Alternatives* out);
  Result<const Json*> Resolve(const std::string& reference) const;
  Status CheckInner(const Json& schema) const;
  bool HoldsAnEnd(std::string_view text) const {
    return std::ranges::any_of(tags_.never,
                               [&](std::string_view end) { return text.find(end) != text.npos; });
  }
  Status Refuse(std::string_view why) const {
    return InvalidArgument(
        fmt::format("the parameter '{}' of '{}' {}, which calls in this model's format cannot keep "
                    "to",
                    name_, tool_, why));
  }

  const ToolSet& tools_;
  const std::string_view tool_;
  const Json& root_;
  const ArgumentTags& tags_;
  std::string name_;
};

Json Regex(std::string_view pattern) { return {{"type", "regex"}, {"pattern", pattern}}; }

Json OneOf(Json formats) {
  if (formats.size() == 1) return std::move(formats[0]);
  return {{"type", "or"}, {"elements", std::move(formats)}};
}

// Whether a string that matches may hold '<', with which all ends of values begin. Only what can be
// seen to rule it out counts.
bool MayHoldAnEnd(std::string_view pattern) {
  bool in_class = false;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\') {
      if (++i == pattern.size() ||
          std::string_view("SWDxupPcN").find(pattern[i]) != std::string::npos) {
        return true;
      }
    } else if (c == '<' || (c == '.' && !in_class)) {
      return true;
    } else if (c == '[' && !in_class) {
      in_class = true;
      if (i + 1 < pattern.size() && pattern[i + 1] == '^') return true;
    } else if (c == ']') {
      in_class = false;
    } else if (c == '-' && in_class && i > 0 && i + 1 < pattern.size() && pattern[i + 1] != ']') {
      if (pattern[i - 1] <= '<' && pattern[i + 1] >= '<') return true;
    }
  }
  return false;
}

Result<const Json*> Values::Resolve(const std::string& reference) const {
  const auto found = ResolveReference(root_, reference);
  if (found == nullptr) {
    return Unexpected(Refuse(fmt::format("refers to '{}', which is not there", reference)));
  }
  return found;
}

// A schema is compiled by itself, with the definitions of the whole beside it. Within it, too, no
// string may hold the end of the value: those that the library cannot keep it out of are refused.
Status Values::CheckInner(const Json& schema) const {
  if (schema.is_array()) {
    for (const Json& one : schema) OSCAR_RETURN_IF_ERROR(CheckInner(one));
  }
  if (!schema.is_object()) return {};
  for (const auto& [key, value] : schema.items()) {
    if (value.is_string()) {
      const auto& text = value.get_ref<const std::string&>();
      if (key == "$ref" && !text.starts_with("#/$defs/") && !text.starts_with("#/definitions/")) {
        return Refuse("refers to something else than a definition");
      }
      if (key == "pattern" && MayHoldAnEnd(text))
        return Refuse("has a 'pattern' that may match '<'");
      if (key == "format" && !FormatPattern(text).has_value())
        return Refuse("has a 'format' that is not known");
    }
    if ((key == "minLength" || key == "maxLength") && value.is_number() &&
        value > kMaxPatternLength) {
      return Refuse(fmt::format("has lengths above {} within a list or object", kMaxPatternLength));
    }
    if (key != "const" && key != "enum" && key != "default" && key != "examples") {
      OSCAR_RETURN_IF_ERROR(CheckInner(value));
    }
  }
  return {};
}

Status Values::AddValues(const Json& values, Alternatives* out) {
  Json texts = Json::array();
  for (const Json& value : values) {
    out->some_others |= !value.is_string() && !value.is_null();
    const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
    if (HoldsAnEnd(text)) continue;
    // As it is read: the string "5" beside the number 5 would be the number.
    const auto read = ParseOrderedJson(tools_.ToJson(tool_, name_, text), "value");
    if (read.has_value() && *read == value) {
      texts.push_back({{"type", "const_string"}, {"value", text}});
    }
  }
  if (texts.empty()) return Refuse("has no value that can be written");
  out->formats.push_back(OneOf(std::move(texts)));
  return {};
}

Status Values::AddString(const Json& schema, Alternatives* out) {
  const auto has = [&](const char* key) { return schema.contains(key); };
  const bool has_length = has("minLength") || has("maxLength");
  const int shapes = (has("pattern") ? 1 : 0) + (has("format") ? 1 : 0) + (has_length ? 1 : 0);
  if (shapes > 1) return Refuse("combines 'pattern', 'format' and lengths");
  if (shapes == 0) {
    out->any_string = true;
    return {};
  }
  out->some_strings = true;
  if (has("pattern")) {
    const Json& pattern = schema.at("pattern");
    if (!pattern.is_string()) return Refuse("has a 'pattern' that is no string");
    const auto& text = pattern.get_ref<const std::string&>();
    if (MayHoldAnEnd(text)) return Refuse("has a 'pattern' that may match '<'");
    out->formats.push_back(Regex(text));
  } else if (has("format")) {
    const Json& format = schema.at("format");
    const auto shape = FormatPattern(format.is_string() ? format.get<std::string>() : "");
    if (!shape.has_value()) return Refuse("has a 'format' that is not known");
    out->formats.push_back(Regex(*shape));
  } else {
    const auto length = [&](const char* key) -> std::optional<int64_t> {
      if (!has(key)) return std::nullopt;
      const Json& value = schema.at(key);
      return value.is_number_integer() ? value.get<int64_t>() : -1;
    };
    const auto least = length("minLength"), most = length("maxLength");
    if (least.value_or(0) < 0 || most.value_or(0) < 0 ||
        (most.has_value() && *most < least.value_or(0))) {
      return Refuse("has lengths that no string has");
    }
    // Without the character that ends begin with.
    out->formats.push_back(Regex(fmt::format("[^<]{{{},{}}}", least.value_or(0),
                                             most.has_value() ? std::to_string(*most) : "")));
  }
  return {};
}

Status Values::AddOther(Json schema, Alternatives* out) {
  OSCAR_RETURN_IF_ERROR(CheckInner(schema));
  for (const char* key : {"$defs", "definitions"}) {
    // What is referred to is not followed: all of it must do.
    if (schema.dump().find("\"$ref\"") == std::string::npos) break;
    if (root_.contains(key)) OSCAR_RETURN_IF_ERROR(CheckInner(root_.at(key)));
  }
  for (const auto& [key, value] : schema.items()) {
    out->some_others |= std::ranges::find(kSaysNothing, key) == kSaysNothing.end();
  }
  for (const char* key : {"$defs", "definitions"}) {
    if (root_.contains(key) && !schema.contains(key)) schema[key] = root_.at(key);
  }
  out->formats.push_back({{"type", "json_schema"},
                          {"json_schema", std::move(schema)},
                          {"max_whitespace_cnt", kMaxJsonWhitespace},
                          {"excludes", tags_.never}});
  return {};
}

Status Values::Add(const Json& schema, int depth, Alternatives* out) {
  if (depth > kMaxAlternatives) return Refuse("has too many levels of alternatives");
  if (schema == true || (schema.is_object() && schema.empty())) {
    out->any_string = true;  // and anything else
    return {};
  }
  if (!schema.is_object()) return Refuse("takes no value");
  if (const auto ref = schema.find("$ref"); ref != schema.end()) {
    OSCAR_ASSIGN_OR_RETURN(const Json* target, Resolve(ref->get<std::string>()));
    return Add(*target, depth + 1, out);
  }
  for (const char* key : {"anyOf", "oneOf", "allOf"}) {
    const auto list = schema.find(key);
    if (list == schema.end()) continue;
    for (const Json& one : *list) OSCAR_RETURN_IF_ERROR(Add(one, depth + 1, out));
    if (schema.value("nullable", Json()) == true) return AddOther({{"type", "null"}}, out);
    return {};
  }
  if (const auto values = schema.find("enum"); values != schema.end()) {
    return AddValues(*values, out);
  }
  if (const auto value = schema.find("const"); value != schema.end()) {
    return AddValues(Json::array({*value}), out);
  }
  const auto type = schema.find("type");
  if (type == schema.end()) {
    const bool is_any = std::ranges::all_of(schema.items(), [](const auto& member) {
      return std::ranges::find(kSaysNothing, member.key()) != kSaysNothing.end();
    });
    if (!is_any) return Refuse("has no 'type'");
    out->any_string = true;
    return {};
  }
  Json types = type->is_array() ? *type : Json::array({*type});
  if (schema.value("nullable", Json()) == true) types.push_back("null");
  for (const Json& one : types) {
    if (one == "string") {
      OSCAR_RETURN_IF_ERROR(AddString(schema, out));
      continue;
    }
    Json other = schema;
    other["type"] = one;
    for (const char* key : {"nullable", "minLength", "maxLength", "pattern", "format"}) {
      other.erase(key);  // of strings
    }
    OSCAR_RETURN_IF_ERROR(AddOther(std::move(other), out));
  }
  return {};
}

Result<Json> Values::Of(const std::string& name, const Json& schema) {
  name_ = name;
  Alternatives all;
  OSCAR_RETURN_IF_ERROR(Add(schema, 0, &all));
  // Text that is meant as a string is read as a number where numbers are wanted, too: that must be
  // one of the values as well.
  if ((all.any_string || all.some_strings) && all.some_others) {
    return Unexpected(Refuse("takes strings beside some values of another type"));
  }
  if (!all.any_string) return OneOf(std::move(all.formats));
  return Json{{"type", "any_text"}, {"excludes", tags_.never}};
}

}  // namespace

Result<std::vector<TagArgument>> TagArguments(const ToolSet& tools, std::string_view tool,
                                              const ArgumentTags& tags) {
  std::vector<TagArgument> arguments;
  const Json* schema = tools.Schema(tool);
  if (schema == nullptr) return arguments;
  const auto refuse = [&](std::string_view why) {
    return Unexpected(InvalidArgument(
        fmt::format("the parameters of '{}' {}, which calls in this model's format cannot keep to",
                    tool, why)));
  };
  for (const char* key :
       {"anyOf", "oneOf", "allOf", "$ref", "enum", "const", "minProperties", "maxProperties"}) {
    if (schema->contains(key)) return refuse(fmt::format("have '{}'", key));
  }
  std::set<std::string> required;
  if (const auto names = schema->find("required"); names != schema->end() && names->is_array()) {
    for (const Json& name : *names) {
      if (name.is_string()) required.insert(name.get<std::string>());
    }
  }
  Values values(tools, tool, *schema, tags);
  const auto add = [&](const std::string& name, const Json& value) -> Status {
    const bool is_key =
        !name.empty() && name.size() <= kMaxKeyBytes &&
        std::ranges::all_of(name, [&](unsigned char c) {
          return c >= 0x20 && tags.not_in_keys.find(static_cast<char>(c)) == std::string_view::npos;
        });
    if (!is_key) {
      return InvalidArgument(
          fmt::format("a parameter of '{}' has a name that calls in this model's format cannot "
                      "write: {}",
                      tool, JsonString(name.substr(0, 64))));
    }
    OSCAR_ASSIGN_OR_RETURN(Json format, values.Of(name, value));
    arguments.push_back({name, required.erase(name) > 0, std::move(format)});
    return {};
  };
  if (const auto properties = schema->find("properties"); properties != schema->end()) {
    for (const auto& [name, value] : properties->items()) {
      OSCAR_RETURN_IF_ERROR(add(name, value));
    }
  }
  while (!required.empty()) OSCAR_RETURN_IF_ERROR(add(std::string(*required.begin()), Json(true)));
  return arguments;
}

}  // namespace oscar::server
