// Values of the template language, with Python's semantics where they show. Strings, lists, tuples
// and dictionaries are immutable and shared; a namespace is the one thing that changes, and the
// interpreter owns it. Shared by pointer because templates pass whole conversations around.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "oscar/status.h"
#include "text/jinja/marked_text.h"

namespace oscar::jinja {

class Value;
struct List;
struct Dict;
struct Namespace;
struct LoopState;
struct Callable;

struct None {};
// A name or attribute that does not exist; `what` says which, for the error on its use.
struct Undefined {
  std::shared_ptr<const std::string> what;
};

enum class Kind : uint8_t {
  kUndefined,
  kNone,
  kBool,
  kInt,
  kFloat,
  kString,
  kList,
  kDict,
  kNamespace,
  kLoop,
  kCallable,
};

class Value {
 public:
  Value() : rep_(None{}) {}
  explicit Value(bool value) : rep_(value) {}
  explicit Value(int64_t value) : rep_(value) {}
  explicit Value(double value) : rep_(value) {}
  explicit Value(MarkedText text) : rep_(std::make_shared<const MarkedText>(std::move(text))) {}
  explicit Value(std::shared_ptr<const List> list) : rep_(std::move(list)) {}
  explicit Value(std::shared_ptr<const Dict> dict) : rep_(std::move(dict)) {}
  explicit Value(Namespace* space) : rep_(space) {}
  explicit Value(std::shared_ptr<LoopState> loop) : rep_(std::move(loop)) {}
  explicit Value(std::shared_ptr<const Callable> callable) : rep_(std::move(callable)) {}
  static Value MakeUndefined(std::string what) {
    Value value;
    value.rep_ = Undefined{std::make_shared<const std::string>(std::move(what))};
    return value;
  }
  static Value Text(std::string text, bool is_input = false) {
    return Value(MarkedText(std::move(text), is_input));
  }

  Kind kind() const { return static_cast<Kind>(rep_.index()); }
  bool IsUndefined() const { return kind() == Kind::kUndefined; }
  bool IsNone() const { return kind() == Kind::kNone; }
  bool IsString() const { return kind() == Kind::kString; }
  bool IsList() const { return kind() == Kind::kList; }
  bool IsDict() const { return kind() == Kind::kDict; }
  // bool counts as a number, as in Python.
  bool IsInteger() const { return kind() == Kind::kInt || kind() == Kind::kBool; }
  bool IsNumber() const { return IsInteger() || kind() == Kind::kFloat; }

  // Each requires the kind it names.
  const std::string& undefined_what() const { return *std::get<Undefined>(rep_).what; }
  bool boolean() const { return std::get<bool>(rep_); }
  int64_t integer() const {
    return kind() == Kind::kBool ? (boolean() ? 1 : 0) : std::get<int64_t>(rep_);
  }
  double number() const {
    return kind() == Kind::kFloat ? std::get<double>(rep_) : static_cast<double>(integer());
  }
  const MarkedText& text() const { return *std::get<std::shared_ptr<const MarkedText>>(rep_); }
  const std::string& str() const { return text().text(); }
  const List& list() const { return *std::get<std::shared_ptr<const List>>(rep_); }
  const std::shared_ptr<const List>& list_ptr() const {
    return std::get<std::shared_ptr<const List>>(rep_);
  }
  const Dict& dict() const { return *std::get<std::shared_ptr<const Dict>>(rep_); }
  Namespace* space() const { return std::get<Namespace*>(rep_); }
  LoopState& loop() const { return *std::get<std::shared_ptr<LoopState>>(rep_); }
  const Callable& callable() const { return *std::get<std::shared_ptr<const Callable>>(rep_); }
  const std::shared_ptr<const Callable>& callable_ptr() const {
    return std::get<std::shared_ptr<const Callable>>(rep_);
  }

 private:
  std::variant<Undefined, None, bool, int64_t, double, std::shared_ptr<const MarkedText>,
               std::shared_ptr<const List>, std::shared_ptr<const Dict>, Namespace*,
               std::shared_ptr<LoopState>, std::shared_ptr<const Callable>>
      rep_;
};

// Containers nest at most this deep, so that walking one cannot exhaust the stack.
inline constexpr int kMaxValueDepth = 128;

struct List {
  std::vector<Value> items;
  bool is_tuple = false;
  bool has_input = false;  // some string in it, however deep, is the request's
  int depth = 1;
};

struct Dict {
  std::vector<std::pair<Value, Value>> items;  // in insertion order, keys distinct
  bool has_input = false;
  int depth = 1;
  // String keys by text, for dictionaries large enough that a scan would be slow.
  std::unordered_map<std::string_view, size_t> index;

  const Value* Find(const Value& key) const;
  const Value* Find(std::string_view key) const;
  size_t FindCost(const Value& key) const;  // steps
};

struct Namespace {
  std::vector<std::pair<std::string, Value>> attributes;
};

struct LoopState {
  std::shared_ptr<const std::vector<Value>> items;
  int depth = 1;
  size_t index0 = 0;
  int depth0 = 0;
  bool has_changed_value = false;
  Value changed_value;
};

// Who pays for walks over values. Containers share their parts, so that sixty assignments describe
// 2^60 nodes: every walk charges for a node when it meets it, and ends when its payer says so.
class Meter {
 public:
  virtual Status ChargeSteps(size_t steps) = 0;
  virtual Status ChargeBytes(size_t bytes) = 0;

 protected:
  ~Meter() = default;
};

// How many containers lie inside each other, counting those that loops and methods hold.
int DepthOf(const Value& value);

// kInvalidArgument where the nesting is too deep.
Result<Value> MakeList(std::vector<Value> items, bool is_tuple = false);
// A repeated key keeps its first place and takes the last value.
Result<Value> MakeDict(std::vector<std::pair<Value, Value>> items);
// Numbers, strings and containers of a request; every string is marked as `is_input`.
Result<Value> FromJson(const nlohmann::ordered_json& json, bool is_input);

std::string_view TypeName(const Value& value);  // Python's name of the type, for messages
bool IsTrue(const Value& value);
bool HasInput(const Value& value);
std::string FloatRepr(double value);

Result<bool> Equal(Meter& meter, const Value& a, const Value& b);
// -1, 0, 1; an error where Python has no order between the two.
Result<int> Compare(Meter& meter, const Value& a, const Value& b);

// str(value) and repr(value), bytes and all charged. Marked as input throughout where any part is.
Result<MarkedText> ToText(Meter& meter, const Value& value);
Result<std::string> Repr(Meter& meter, const Value& value);

struct JsonStyle {
  bool ensure_ascii = false;
  bool sort_keys = false;
  int indent = -1;  // -1: one line
  std::string item_separator = ", ";
  std::string key_separator = ": ";
};
Result<std::string> ToJson(Meter& meter, const Value& value, const JsonStyle& style);

}  // namespace oscar::jinja
