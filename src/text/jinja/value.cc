#include "text/jinja/value.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "text/jinja/callable.h"
#include "text/unicode.h"

namespace oscar::jinja {
namespace {

constexpr size_t kIndexFrom = 16;

// A node costs about as much as a few expressions, a byte of it far less.
constexpr size_t kStepsPerNode = 8;
constexpr size_t kBytesPerStep = 64;        // compared or copied
constexpr size_t kWrittenBytesPerStep = 4;  // decoded, looked up and perhaps escaped
constexpr size_t kSettleBytes = 64 << 10;   // written between two looks at the budget
constexpr size_t kSettleSteps = 1024;

Status TooDeep() {
  return InvalidArgument(fmt::format("values nest deeper than {} levels", kMaxValueDepth));
}

// Values that are equal without looking inside; strings too.
bool EqualLeaves(const Value& a, const Value& b) {
  if (a.IsInteger() && b.IsInteger()) return a.integer() == b.integer();
  if (a.IsNumber() && b.IsNumber()) return a.number() == b.number();
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Kind::kUndefined:
    case Kind::kNone:
      return true;
    case Kind::kString:
      return a.str() == b.str();
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

// Text as it grows under a budget: whoever appends settles at every node, and within long strings.
class Writer {
 public:
  explicit Writer(Meter& meter) : meter_(meter) {}

  std::string& out() { return out_; }
  std::string Take() { return std::move(out_); }
  void Escape(char letter, uint32_t code, size_t digits) {
    std::array<char, 10> text = {'\\', letter};
    for (size_t i = 0; i < digits; ++i) {
      text[2 + i] = "0123456789abcdef"[(code >> (4 * (digits - 1 - i))) & 0xF];
    }
    out_.append(text.data(), 2 + digits);
  }
  bool Due() const { return steps_ >= kSettleSteps || out_.size() - settled_ >= kSettleBytes; }
  Status Charge(size_t steps) {
    steps_ += steps;
    return Due() ? Settle() : Status();
  }
  Status Settle() {
    const size_t grown = out_.size() - std::exchange(settled_, out_.size());
    OSCAR_RETURN_IF_ERROR(
        meter_.ChargeSteps(std::exchange(steps_, 0) + grown / kWrittenBytesPerStep));
    return meter_.ChargeBytes(grown);
  }

 private:
  Meter& meter_;
  std::string out_;
  size_t settled_ = 0;  // bytes of `out_` that are paid for
  size_t steps_ = 0;    // to be paid
};

Status AppendStringRepr(std::string_view text, Writer* writer) {
  std::string* const out = &writer->out();
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
      writer->Escape('x', c, 2);
    } else if (c < 0x10000) {
      writer->Escape('u', c, 4);
    } else {
      writer->Escape('U', c, 8);
    }
    at += step.length;
    if (writer->Due()) OSCAR_RETURN_IF_ERROR(writer->Settle());
  }
  out->push_back(quote);
  return {};
}

Status AppendRepr(const Value& value, Writer* writer) {
  OSCAR_RETURN_IF_ERROR(writer->Charge(kStepsPerNode));
  std::string* const out = &writer->out();
  switch (value.kind()) {
    case Kind::kUndefined:
      out->append("Undefined");
      return {};
    case Kind::kNone:
      out->append("None");
      return {};
    case Kind::kBool:
      out->append(value.boolean() ? "True" : "False");
      return {};
    case Kind::kInt:
      out->append(std::to_string(value.integer()));
      return {};
    case Kind::kFloat:
      out->append(FloatRepr(value.number()));
      return {};
    case Kind::kString:
      return AppendStringRepr(value.str(), writer);
    case Kind::kList: {
      const List& list = value.list();
      out->push_back(list.is_tuple ? '(' : '[');
      for (size_t i = 0; i < list.items.size(); ++i) {
        if (i > 0) out->append(", ");
        OSCAR_RETURN_IF_ERROR(AppendRepr(list.items[i], writer));
      }
      if (list.is_tuple && list.items.size() == 1) out->push_back(',');
      out->push_back(list.is_tuple ? ')' : ']');
      return {};
    }
    case Kind::kDict: {
      out->push_back('{');
      bool first = true;
      for (const auto& [key, item] : value.dict().items) {
        if (!std::exchange(first, false)) out->append(", ");
        OSCAR_RETURN_IF_ERROR(AppendRepr(key, writer));
        out->append(": ");
        OSCAR_RETURN_IF_ERROR(AppendRepr(item, writer));
      }
      out->push_back('}');
      return {};
    }
    case Kind::kNamespace:
      out->append("<Namespace>");
      return {};
    case Kind::kLoop:
      out->append(
          fmt::format("<LoopContext {}/{}>", value.loop().index0 + 1, value.loop().items->size()));
      return {};
    case Kind::kCallable:
      out->append(fmt::format("<function {}>", value.callable().name));
      return {};
  }
  return {};
}

Status AppendJsonString(std::string_view text, bool ensure_ascii, Writer* writer) {
  std::string* const out = &writer->out();
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
            writer->Escape('u', c, 4);
          }
        } else if (ensure_ascii && c >= 0x10000) {
          const uint32_t offset = static_cast<uint32_t>(c) - 0x10000;
          writer->Escape('u', 0xD800 + (offset >> 10), 4);
          writer->Escape('u', 0xDC00 + (offset & 0x3FF), 4);
        } else {
          out->append(text.substr(at, step.length));
        }
    }
    at += step.length;
    if (writer->Due()) OSCAR_RETURN_IF_ERROR(writer->Settle());
  }
  out->push_back('"');
  return {};
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

Status AppendJson(const Value& value, const JsonStyle& style, int level, Writer* writer) {
  OSCAR_RETURN_IF_ERROR(writer->Charge(kStepsPerNode));
  std::string* const out = &writer->out();
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
      return AppendJsonString(value.str(), style.ensure_ascii, writer);
    case Kind::kList: {
      const auto& items = value.list().items;
      out->push_back('[');
      for (size_t i = 0; i < items.size(); ++i) {
        if (i > 0) out->append(style.item_separator);
        NewLine(style, level + 1, out);
        OSCAR_RETURN_IF_ERROR(AppendJson(items[i], style, level + 1, writer));
      }
      if (!items.empty()) NewLine(style, level, out);
      out->push_back(']');
      return {};
    }
    case Kind::kDict: {
      const size_t keys = value.dict().items.size() * (style.sort_keys ? 2 : 1);
      OSCAR_RETURN_IF_ERROR(writer->Charge(keys * kStepsPerNode));
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
        OSCAR_RETURN_IF_ERROR(AppendJsonString(items[i].first, style.ensure_ascii, writer));
        out->append(style.key_separator);
        OSCAR_RETURN_IF_ERROR(AppendJson(*items[i].second, style, level + 1, writer));
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
    if (!candidate.IsString() && EqualLeaves(candidate, key)) return &value;
  }
  return nullptr;
}

int DepthOf(const Value& value) {
  switch (value.kind()) {
    case Kind::kList:
      return value.list().depth;
    case Kind::kDict:
      return value.dict().depth;
    case Kind::kLoop:
      return value.loop().depth;
    case Kind::kCallable:
      return value.callable().type == Callable::Type::kMethod ? DepthOf(value.callable().self) + 1
                                                              : 0;
    default:
      return 0;
  }
}

Result<Value> MakeList(std::vector<Value> items, bool is_tuple) {
  auto list = std::make_shared<List>();
  for (const Value& item : items) {
    list->depth = std::max(list->depth, DepthOf(item) + 1);
    list->has_input |= HasInput(item);
  }
  if (list->depth > kMaxValueDepth) return Unexpected(TooDeep());
  list->items = std::move(items);
  list->is_tuple = is_tuple;
  return Value(std::shared_ptr<const List>(std::move(list)));
}

size_t Dict::FindCost(const Value& key) const {
  constexpr size_t kKeysPerStep = 8;
  const size_t hashed = key.IsString() ? key.str().size() / kBytesPerStep : 0;
  return hashed + (key.IsString() && !index.empty() ? 0 : items.size() / kKeysPerStep);
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
    dict->depth = std::max({dict->depth, DepthOf(key) + 1, DepthOf(value) + 1});
    dict->has_input |= HasInput(key) || HasInput(value);
    size_t at = dict->items.size();
    if (key.IsString()) {
      const auto [it, inserted] = seen.try_emplace(key.str(), at);
      if (!inserted) at = it->second;
    } else {
      for (size_t i = 0; i < dict->items.size(); ++i) {
        const Value& other = dict->items[i].first;
        if (!other.IsString() && EqualLeaves(other, key)) at = i;
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

Result<bool> Equal(Meter& meter, const Value& a, const Value& b) {
  OSCAR_RETURN_IF_ERROR(meter.ChargeSteps(kStepsPerNode));
  if (a.kind() != b.kind()) return EqualLeaves(a, b);
  switch (a.kind()) {
    case Kind::kString:
      if (&a.text() == &b.text()) return true;
      if (a.str().size() == b.str().size()) {
        OSCAR_RETURN_IF_ERROR(meter.ChargeSteps(a.str().size() / kBytesPerStep));
      }
      return EqualLeaves(a, b);
    case Kind::kList: {
      const List& x = a.list();
      const List& y = b.list();
      if (&x == &y) return true;  // as in Python, which asks for identity first
      if (x.is_tuple != y.is_tuple || x.items.size() != y.items.size()) return false;
      for (size_t i = 0; i < x.items.size(); ++i) {
        OSCAR_ASSIGN_OR_RETURN(const bool same, Equal(meter, x.items[i], y.items[i]));
        if (!same) return false;
      }
      return true;
    }
    case Kind::kDict: {
      const Dict& x = a.dict();
      const Dict& y = b.dict();
      if (&x == &y) return true;
      if (x.items.size() != y.items.size()) return false;
      for (const auto& [key, value] : x.items) {
        OSCAR_RETURN_IF_ERROR(meter.ChargeSteps(y.FindCost(key)));
        const Value* other = y.Find(key);
        if (other == nullptr) return false;
        OSCAR_ASSIGN_OR_RETURN(const bool same, Equal(meter, value, *other));
        if (!same) return false;
      }
      return true;
    }
    default:
      return EqualLeaves(a, b);
  }
}

Result<int> Compare(Meter& meter, const Value& a, const Value& b) {
  OSCAR_RETURN_IF_ERROR(meter.ChargeSteps(kStepsPerNode));
  const auto order = [](const auto& x, const auto& y) { return x < y ? -1 : (y < x ? 1 : 0); };
  if (a.IsInteger() && b.IsInteger()) return order(a.integer(), b.integer());
  if (a.IsNumber() && b.IsNumber()) return order(a.number(), b.number());
  if (a.IsString() && b.IsString()) {
    if (&a.text() == &b.text()) return 0;
    const size_t common = std::min(a.str().size(), b.str().size());
    OSCAR_RETURN_IF_ERROR(meter.ChargeSteps(common / kBytesPerStep));
    const int sign = a.str().compare(b.str());
    return order(sign, 0);
  }
  if (a.IsList() && b.IsList() && a.list().is_tuple == b.list().is_tuple) {
    const auto& x = a.list().items;
    const auto& y = b.list().items;
    for (size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
      OSCAR_ASSIGN_OR_RETURN(const bool same, Equal(meter, x[i], y[i]));
      if (!same) return Compare(meter, x[i], y[i]);
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

Result<std::string> Repr(Meter& meter, const Value& value) {
  Writer writer(meter);
  OSCAR_RETURN_IF_ERROR(AppendRepr(value, &writer));
  OSCAR_RETURN_IF_ERROR(writer.Settle());
  return writer.Take();
}

bool HasInput(const Value& value) {
  switch (value.kind()) {
    case Kind::kString:
      return value.text().HasInput();
    case Kind::kList:
      return value.list().has_input;
    case Kind::kDict:
      return value.dict().has_input;
    default:
      return false;
  }
}

Result<MarkedText> ToText(Meter& meter, const Value& value) {
  if (value.IsUndefined()) return MarkedText();
  if (value.IsString()) {
    OSCAR_RETURN_IF_ERROR(meter.ChargeBytes(value.text().size()));
    return value.text();
  }
  OSCAR_ASSIGN_OR_RETURN(std::string text, Repr(meter, value));
  return MarkedText(std::move(text), HasInput(value));
}

Result<std::string> ToJson(Meter& meter, const Value& value, const JsonStyle& style) {
  Writer writer(meter);
  OSCAR_RETURN_IF_ERROR(AppendJson(value, style, 0, &writer));
  OSCAR_RETURN_IF_ERROR(writer.Settle());
  return writer.Take();
}

}  // namespace oscar::jinja
