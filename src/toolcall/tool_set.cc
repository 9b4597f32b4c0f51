#include "toolcall/tool_set.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "base/json.h"

namespace oscar {
namespace {

using Json = nlohmann::ordered_json;

// Schemas may be nested without end; nobody writes more levels than this of alternatives.
constexpr int kMaxAlternatives = 8;

constexpr size_t kMaxNameBytes = 256;

bool IsNameByte(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
         std::string_view("_-.:/").find(c) != std::string_view::npos;
}

struct WantedTypes {
  bool known = false;  // the schema says something
  bool string = false, integer = false, number = false, boolean = false, object = false,
       array = false, null = false;

  void Add(std::string_view type) {
    known = true;
    string |= type == "string";
    integer |= type == "integer";
    number |= type == "number";
    boolean |= type == "boolean";
    object |= type == "object";
    array |= type == "array";
    null |= type == "null";
  }
  void AddTypeOf(const Json& value) {
    if (value.is_string()) Add("string");
    if (value.is_number_integer()) Add("integer");
    if (value.is_number_float()) Add("number");
    if (value.is_boolean()) Add("boolean");
    if (value.is_object()) Add("object");
    if (value.is_array()) Add("array");
    if (value.is_null()) Add("null");
  }
  bool Allows(const Json& value) const {
    if (!known) return !value.is_string();
    if (value.is_number_integer()) return integer || number;
    if (value.is_number_float()) {
      return number || (integer && std::floor(value.get<double>()) == value.get<double>());
    }
    if (value.is_boolean()) return boolean;
    if (value.is_object()) return object;
    if (value.is_array()) return array;
    return value.is_null() && null;
  }
};

void Collect(const Json& root, const Json& schema, int depth, WantedTypes* out) {
  if (!schema.is_object() || depth > kMaxAlternatives) return;
  if (const auto reference = schema.find("$ref");
      reference != schema.end() && reference->is_string()) {
    const Json* target = ResolveReference(root, reference->get_ref<const std::string&>());
    if (target != nullptr) Collect(root, *target, depth + 1, out);
  }
  if (const auto type = schema.find("type"); type != schema.end()) {
    if (type->is_string()) out->Add(type->get_ref<const std::string&>());
    if (type->is_array()) {
      for (const Json& one : *type) {
        if (one.is_string()) out->Add(one.get_ref<const std::string&>());
      }
    }
  } else if (const auto values = schema.find("enum");
             values != schema.end() && values->is_array()) {
    for (const Json& value : *values) out->AddTypeOf(value);
  } else if (const auto value = schema.find("const"); value != schema.end()) {
    out->AddTypeOf(*value);
  }
  for (const char* key : {"anyOf", "oneOf", "allOf"}) {
    const auto list = schema.find(key);
    if (list == schema.end() || !list->is_array()) continue;
    for (const Json& one : *list) Collect(root, one, depth + 1, out);
  }
  if (schema.value("nullable", Json(false)) == true && out->known) out->null = true;
}

std::string_view Trim(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t\r\n");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t\r\n") + 1 - begin);
}

}  // namespace

std::string JsonString(std::string_view text) {
  return Json(std::string(text)).dump(-1, ' ', false, Json::error_handler_t::replace);
}

const Json* ResolveReference(const Json& root, std::string_view reference) {
  if (!reference.starts_with("#/")) return nullptr;
  reference.remove_prefix(2);
  const Json* at = &root;
  while (true) {
    const size_t end = reference.find('/');
    const auto it = at->is_object() ? at->find(std::string(reference.substr(0, end))) : at->end();
    if (!at->is_object() || it == at->end()) return nullptr;
    at = &*it;
    if (end == std::string_view::npos) return at;
    reference.remove_prefix(end + 1);
  }
}

Status CheckTools(const Json& tools, const ToolLimits& limits) {
  const auto bad = [](const std::string& where, std::string_view why) {
    return InvalidArgument(fmt::format("'{}' {}", where, why)).WithParam(where);
  };
  if (!tools.is_array()) return bad("tools", "must be a list");
  if (tools.size() > limits.max_tools) {
    return bad("tools",
               fmt::format("has {} entries; the limit is {}", tools.size(), limits.max_tools));
  }
  std::set<std::string_view> names;
  size_t bytes = 0;
  for (size_t i = 0; i < tools.size(); ++i) {
    const Json& tool = tools[i];
    std::string where = fmt::format("tools[{}]", i);
    if (!tool.is_object()) return bad(where, "must be an object");
    const auto type = tool.find("type");
    if (type != tool.end() && *type != "function") {
      return bad(where + ".type", "must be \"function\"");
    }
    const auto function = tool.find("function");
    where += ".function";
    if (function == tool.end() || !function->is_object()) return bad(where, "must be an object");
    const auto name = function->find("name");
    if (name == function->end() || !name->is_string()) {
      return bad(where + ".name", "must be a string");
    }
    const std::string_view text = name->get_ref<const std::string&>();
    if (text.empty() || text.size() > kMaxNameBytes || !std::ranges::all_of(text, IsNameByte)) {
      return bad(where + ".name",
                 fmt::format("must be 1 to {} letters, digits and \"_-.:/\"", kMaxNameBytes));
    }
    if (!names.insert(text).second) return bad(where + ".name", "is the name of another tool");
    const auto description = function->find("description");
    if (description != function->end() && !description->is_string() && !description->is_null()) {
      return bad(where + ".description", "must be a string");
    }
    const auto parameters = function->find("parameters");
    if (parameters != function->end() && !parameters->is_null()) {
      where += ".parameters";
      if (!parameters->is_object()) return bad(where, "must be an object");
      if (const auto kind = parameters->find("type");
          kind != parameters->end() && *kind != "object") {
        return bad(where + ".type", "must be \"object\"");
      }
      if (const auto properties = parameters->find("properties");
          properties != parameters->end() && !properties->is_object()) {
        return bad(where + ".properties", "must be an object");
      }
    }
    bytes += tool.dump(-1, ' ', false, Json::error_handler_t::replace).size();
    if (bytes > limits.max_bytes) {
      return bad("tools", fmt::format("has more than {} bytes", limits.max_bytes));
    }
  }
  return {};
}

std::vector<std::string> ToolSet::Names() const {
  std::vector<std::string> names;
  for (const auto& [name, schema] : schemas_) names.push_back(name);
  return names;
}

const Json* ToolSet::Schema(std::string_view name) const {
  const auto it = schemas_.find(name);
  return it != schemas_.end() ? it->second.get() : nullptr;
}

ToolSet::ToolSet(const Json& tools) {
  if (!tools.is_array()) return;
  for (const Json& tool : tools) {
    const auto function = tool.is_object() ? tool.find("function") : tool.end();
    if (!tool.is_object() || function == tool.end() || !function->is_object()) continue;
    const auto name = function->find("name");
    if (name == function->end() || !name->is_string()) continue;
    const auto parameters = function->find("parameters");
    schemas_[name->get<std::string>()] = parameters != function->end() && parameters->is_object()
                                             ? std::make_shared<const Json>(*parameters)
                                             : nullptr;
  }
}

bool ToolSet::HasPrefix(std::string_view text) const {
  const auto it = schemas_.lower_bound(text);
  return it != schemas_.end() && it->first.starts_with(text);
}

std::string ToolSet::ToJson(std::string_view tool, std::string_view parameter,
                            std::string_view raw) const {
  WantedTypes wanted;
  if (const auto it = schemas_.find(tool); it != schemas_.end() && it->second != nullptr) {
    const Json& schema = *it->second;
    const auto properties = schema.is_object() ? schema.find("properties") : schema.end();
    if (schema.is_object() && properties != schema.end() && properties->is_object()) {
      const auto property = properties->find(std::string(parameter));
      if (property != properties->end()) Collect(schema, *property, 0, &wanted);
    }
  }
  std::string_view text = Trim(raw);
  if (text == "True") text = "true";
  if (text == "False") text = "false";
  if (text == "None") text = "null";
  const auto value = ParseOrderedJson(text, "argument");
  // The model's own text: its numbers may have more digits than any type here.
  if (value.has_value() && wanted.Allows(*value)) return std::string(text);
  return JsonString(raw);
}

}  // namespace oscar
