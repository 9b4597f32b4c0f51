#include "text/jinja/value.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "text/jinja/callable.h"
#include "text/unicode.h"

namespace oscar::jinja {
namespace {

constexpr size_t kIndexFrom = 16;

int DepthOf(const Value& value) {
  if (value.IsList()) return value.list().depth;
  if (value.IsDict()) return value.dict().depth;
  return 0;
}

Status TooDeep() {
  return InvalidArgument(fmt::format("values nest deeper than {} levels", kMaxValueDepth));
}

void AppendRepr(const Value& value, std::string* out);

void AppendStringRepr(std::string_view text, std::string* out) {
  const char quote =
      text.find('\'') != std::string_view::npos && text.find('"') == std::string_view::npos ? '"'
                                                                                            : '\'';
  out->push_back(quote);
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = DecodeUtf8(text, at);
    const char32_t c = step.code_point;
    if (c == static_cast<char32_t>(quote) || c == '\\') {
      out->push_back('\\');
      out->push_back(static_cast<char>(c));
    } else if (c == '\n') {
      out->append("\\n");
    } else if (c == '\r') {
      out->append("\\r");
    } else if (c == '\t') {
      out->append("\\t");
    } else if (IsPrintable(c)) {
      out->append(text.substr(at, step.length));
    } else if (c < 0x100) {
      out->append(fmt::format("\\x{:02x}", static_cast<uint32_t>(c)));
    } else if (c < 0x10000) {
      out->append(fmt::format("\\u{:04x}", static_cast<uint32_t>(c)));
    } else {
      out->append(fmt::format("\\U{:08x}", static_cast<uint32_t>(c)));
    }
    at += step.length;
  }
  out->push_back(quote);
}

void AppendRepr(const Value& value, std::string* out) {
  switch (value.kind()) {
    case Kind::kUndefined:
      out->append("Undefined");
      return;
    case Kind::kNone:
      out->append("None");
      return;
    case Kind::kBool:
      out->append(value.boolean() ? "True" : "False");
      return;
    case Kind::kInt:
      out->append(std::to_string(value.integer()));
      return;
    case Kind::kFloat:
      out->append(FloatRepr(value.number()));
      return;
    case Kind::kString:
      AppendStringRepr(value.str(), out);
      return;
    case Kind::kList: {
      const List& list = value.list();
      out->push_back(list.is_tuple ? '(' : '[');
      for (size_t i = 0; i < list.items.size(); ++i) {
        if (i > 0) out->append(", ");
        AppendRepr(list.items[i], out);
      }
      if (list.is_tuple && list.items.size() == 1) out->push_back(',');
      out->push_back(list.is_tuple ? ')' : ']');
      return;
    }
    case Kind::kDict: {
      out->push_back('{');
      bool first = true;
      for (const auto& [key, item] : value.dict().items) {
        if (!std::exchange(first, false)) out->append(", ");
        AppendRepr(key, out);
        out->append(": ");
        AppendRepr(item, out);
      }
      out->push_back('}');
      return;
    }
    case Kind::kNamespace:
      out->append("<Namespace>");
      return;
    case Kind::kLoop:
      out->append(
          fmt::format("<LoopContext {}/{}>", value.loop().index0 + 1, value.loop().items->size()));
      return;
    case Kind::kCallable:
      out->append(fmt::format("<function {}>", value.callable().name));
      return;
  }
}

void AppendJsonString(std::string_view text, bool ensure_ascii, std::string* out) {
  out->push_back('"');
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = DecodeUtf8(text, at);
    const char32_t c = step.code_point;
    switch (c) {
      case '"':
        out->append("\\\"");
        break;
      case '\\':
        out->append("\\\\");
        break;
      case '\n':
        out->append("\\n");
        break;
      case '\r':
        out->append("\\r");
        break;
      case '\t':
        out->append("\\t");
        break;
      case '\f':
        out->append("\\f");
        break;
      case '\b':
        out->append("\\b");
        break;
      default:
        if (c < 0x20 || (ensure_ascii && c >= 0x7F && c < 0x10000)) {
          // Python leaves DEL alone even when it escapes everything beyond ASCII.
          if (c == 0x7F) {
            out->push_back('\x7F');
          } else {
            out->append(fmt::format("\\u{:04x}", static_cast<uint32_t>(c)));
          }
        } else if (ensure_ascii && c >= 0x10000) {
          const uint32_t offset = static_cast<uint32_t>(c) - 0x10000;
          out->append(fmt::format("\\u{:04x}\\u{:04x}", 0xD800 + (offset >> 10),
                                  0xDC00 + (offset & 0x3FF)));
        } else {
          out->append(text.substr(at, step.length));
        }
    }
    at += step.length;
  }
  out->push_back('"');
}

std::string JsonNumber(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return FloatRepr(value);
}

Result<std::string> JsonKey(const Value& key) {
  switch (key.kind()) {
    case Kind::kString:
      return key.str();
    case Kind::kNone:
      return std::string("null");
    case Kind::kBool:
      return std::string(key.boolean() ? "true" : "false");
    case Kind::kInt:
      return std::to_string(key.integer());
    case Kind::kFloat:
      return JsonNumber(key.number());
    default:
      return Unexpected(InvalidArgument(fmt::format(
          "JSON keys must be strings, numbers, booleans or none, not {}", TypeName(key))));
  }
}

void NewLine(const JsonStyle& style, int level, std::string* out) {
  if (style.indent < 0) return;
  out->push_back('\n');
  out->append(static_cast<size_t>(style.indent) * static_cast<size_t>(level), ' ');
}

Status AppendJson(const Value& value, const JsonStyle& style, int level, std::string* out) {
  switch (value.kind()) {
    case Kind::kNone:
      out->append("null");
      return {};
    case Kind::kBool:
      out->append(value.boolean() ? "true" : "false");
      return {};
    case Kind::kInt:
      out->append(std::to_string(value.integer()));
      return {};
    case Kind::kFloat:
      out->append(JsonNumber(value.number()));
      return {};
    case Kind::kString:
      AppendJsonString(value.str(), style.ensure_ascii, out);
      return {};
    case Kind::kList: {
      const auto& items = value.list().items;
      out->push_back('[');
      for (size_t i = 0; i < items.size(); ++i) {
        if (i > 0) out->append(style.item_separator);
        NewLine(style, level + 1, out);
        OSCAR_RETURN_IF_ERROR(AppendJson(items[i], style, level + 1, out));
      }
      if (!items.empty()) NewLine(style, level, out);
      out->push_back(']');
      return {};
    }
    case Kind::kDict: {
      std::vector<std::pair<std::string, const Value*>> items;
      for (const auto& [key, item] : value.dict().items) {
        OSCAR_ASSIGN_OR_RETURN(std::string text, JsonKey(key));
        items.emplace_back(std::move(text), &item);
      }
      if (style.sort_keys) {
        std::stable_sort(items.begin(), items.end(),
                         [](const auto& a, const auto& b) { return a.first < b.first; });
      }
      out->push_back('{');
      for (size_t i = 0; i < items.size(); ++i) {
        if (i > 0) out->append(style.item_separator);
        NewLine(style, level + 1, out);
        AppendJsonString(items[i].first, style.ensure_ascii, out);
        out->append(style.key_separator);
        OSCAR_RETURN_IF_ERROR(AppendJson(*items[i].second, style, level + 1, out));
      }
      if (!items.empty()) NewLine(style, level, out);
      out->push_back('}');
      return {};
    }
    default:
      return InvalidArgument(fmt::format("{} cannot be written as JSON", TypeName(value)));
  }
}

}  // namespace

const Value* Dict::Find(std::string_view key) const {
  if (!index.empty()) {
    const auto it = index.find(key);
    return it == index.end() ? nullptr : &items[it->second].second;
  }
  for (const auto& [candidate, value] : items) {
    if (candidate.IsString() && candidate.str() == key) return &value;
  }
  return nullptr;
}

const Value* Dict::Find(const Value& key) const {
  if (key.IsString()) return Find(std::string_view(key.str()));
  for (const auto& [candidate, value] : items) {
    if (!candidate.IsString() && Equal(candidate, key)) return &value;
  }
  return nullptr;
}

Result<Value> MakeList(std::vector<Value> items, bool is_tuple) {
  auto list = std::make_shared<List>();
  for (const Value& item : items) list->depth = std::max(list->depth, DepthOf(item) + 1);
  if (list->depth > kMaxValueDepth) return Unexpected(TooDeep());
  list->items = std::move(items);
  list->is_tuple = is_tuple;
  return Value(std::shared_ptr<const List>(std::move(list)));
}

Result<Value> MakeDict(std::vector<std::pair<Value, Value>> items) {
  auto dict = std::make_shared<Dict>();
  std::unordered_map<std::string_view, size_t> seen;  // of the strings in `dict`
  for (auto& item : items) {
    Value& key = item.first;
    Value& value = item.second;
    if (key.IsList() || key.IsDict()) {
      return Unexpected(
          InvalidArgument(fmt::format("{} cannot be the key of a dictionary", TypeName(key))));
    }
    dict->depth = std::max(dict->depth, DepthOf(value) + 1);
    size_t at = dict->items.size();
    if (key.IsString()) {
      const auto [it, inserted] = seen.try_emplace(key.str(), at);
      if (!inserted) at = it->second;
    } else {
      for (size_t i = 0; i < dict->items.size(); ++i) {
        const Value& other = dict->items[i].first;
        if (!other.IsString() && Equal(other, key)) at = i;
      }
    }
    if (at < dict->items.size()) {
      dict->items[at].second = std::move(value);
    } else {
      dict->items.emplace_back(std::move(key), std::move(value));
    }
  }
  if (dict->depth > kMaxValueDepth) return Unexpected(TooDeep());
  if (dict->items.size() >= kIndexFrom) dict->index = std::move(seen);
  return Value(std::shared_ptr<const Dict>(std::move(dict)));
}

Result<Value> FromJson(const nlohmann::ordered_json& json, bool is_input) {
  switch (json.type()) {
    case nlohmann::ordered_json::value_t::boolean:
      return Value(json.get<bool>());
    case nlohmann::ordered_json::value_t::number_integer:
      return Value(json.get<int64_t>());
    case nlohmann::ordered_json::value_t::number_unsigned:
      if (json.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
        return Unexpected(InvalidArgument(
            fmt::format("integer {} is too large for a template", json.get<uint64_t>())));
      }
      return Value(json.get<int64_t>());
    case nlohmann::ordered_json::value_t::number_float:
      return Value(json.get<double>());
    case nlohmann::ordered_json::value_t::string: {
      const auto& text = json.get_ref<const std::string&>();
      if (!IsValidUtf8(text)) return Unexpected(InvalidArgument("a string is not valid UTF-8"));
      return Value::Text(text, is_input);
    }
    case nlohmann::ordered_json::value_t::array: {
      std::vector<Value> items;
      items.reserve(json.size());
      for (const auto& item : json) {
        OSCAR_ASSIGN_OR_RETURN(Value value, FromJson(item, is_input));
        items.push_back(std::move(value));
      }
      return MakeList(std::move(items));
    }
    case nlohmann::ordered_json::value_t::object: {
      std::vector<std::pair<Value, Value>> items;
      items.reserve(json.size());
      for (const auto& [key, item] : json.items()) {
        OSCAR_ASSIGN_OR_RETURN(Value value, FromJson(item, is_input));
        items.emplace_back(Value::Text(key, is_input), std::move(value));
      }
      return MakeDict(std::move(items));
    }
    default:
      return Value();
  }
}

std::string_view TypeName(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined:
      return "undefined";
    case Kind::kNone:
      return "none";
    case Kind::kBool:
      return "bool";
    case Kind::kInt:
      return "int";
    case Kind::kFloat:
      return "float";
    case Kind::kString:
      return "str";
    case Kind::kList:
      return value.list().is_tuple ? "tuple" : "list";
    case Kind::kDict:
      return "dict";
    case Kind::kNamespace:
      return "namespace";
    case Kind::kLoop:
      return "loop";
    case Kind::kCallable:
      return "function";
  }
  return "";
}

bool IsTrue(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined:
    case Kind::kNone:
      return false;
    case Kind::kBool:
    case Kind::kInt:
      return value.integer() != 0;
    case Kind::kFloat:
      return value.number() != 0.0;
    case Kind::kString:
      return !value.text().empty();
    case Kind::kList:
      return !value.list().items.empty();
    case Kind::kDict:
      return !value.dict().items.empty();
    default:
      return true;
  }
}

bool Equal(const Value& a, const Value& b) {
  if (a.IsInteger() && b.IsInteger()) return a.integer() == b.integer();
  if (a.IsNumber() && b.IsNumber()) return a.number() == b.number();
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Kind::kUndefined:
    case Kind::kNone:
      return true;
    case Kind::kString:
      return a.str() == b.str();
    case Kind::kList: {
      const List& x = a.list();
      const List& y = b.list();
      return x.is_tuple == y.is_tuple &&
             std::equal(x.items.begin(), x.items.end(), y.items.begin(), y.items.end(), Equal);
    }
    case Kind::kDict: {
      const Dict& x = a.dict();
      const Dict& y = b.dict();
      if (x.items.size() != y.items.size()) return false;
      for (const auto& [key, value] : x.items) {
        const Value* other = y.Find(key);
        if (other == nullptr || !Equal(value, *other)) return false;
      }
      return true;
    }
    case Kind::kNamespace:
      return a.space() == b.space();
    case Kind::kLoop:
      return &a.loop() == &b.loop();
    case Kind::kCallable:
      return &a.callable() == &b.callable();
    default:
      return false;
  }
}

Result<int> Compare(const Value& a, const Value& b) {
  const auto order = [](const auto& x, const auto& y) { return x < y ? -1 : (y < x ? 1 : 0); };
  if (a.IsInteger() && b.IsInteger()) return order(a.integer(), b.integer());
  if (a.IsNumber() && b.IsNumber()) return order(a.number(), b.number());
  if (a.IsString() && b.IsString()) return order(a.str(), b.str());
  if (a.IsList() && b.IsList() && a.list().is_tuple == b.list().is_tuple) {
    const auto& x = a.list().items;
    const auto& y = b.list().items;
    for (size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
      if (!Equal(x[i], y[i])) return Compare(x[i], y[i]);
    }
    return order(x.size(), y.size());
  }
  return Unexpected(
      InvalidArgument(fmt::format("{} and {} have no order", TypeName(a), TypeName(b))));
}

std::string FloatRepr(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  std::string text = fmt::format("{}", value);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

std::string Repr(const Value& value) {
  std::string out;
  AppendRepr(value, &out);
  return out;
}

bool HasInput(const Value& value) {
  switch (value.kind()) {
    case Kind::kString:
      return value.text().HasInput();
    case Kind::kList:
      return std::any_of(value.list().items.begin(), value.list().items.end(), HasInput);
    case Kind::kDict:
      return std::any_of(
          value.dict().items.begin(), value.dict().items.end(),
          [](const auto& item) { return HasInput(item.first) || HasInput(item.second); });
    default:
      return false;
  }
}

MarkedText ToText(const Value& value) {
  if (value.IsString()) return value.text();
  if (value.IsUndefined()) return {};
  return {Repr(value), HasInput(value)};
}

Result<std::string> ToJson(const Value& value, const JsonStyle& style) {
  std::string out;
  OSCAR_RETURN_IF_ERROR(AppendJson(value, style, 0, &out));
  return out;
}

}  // namespace oscar::jinja
