#include "base/json.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error_text.h"

namespace oscar {
namespace {

// Where the string ends that begins with the quote at `begin`: its closing quote, or the text's
// end.
size_t EndOfString(std::string_view text, size_t begin) {
  for (size_t i = begin + 1; i < text.size(); ++i) {
    if (text[i] == '"') return i;
    if (text[i] == '\\') ++i;
  }
  return text.size();
}

// Refuses text whose document would nest deeper than `max_depth` or have an object with more than
// `max_keys` members (each has one colon outside strings): one walk, made before anything is
// allocated for the document.
Status CheckShape(std::string_view text, std::string_view what, int max_depth, size_t max_keys) {
  std::vector<size_t> keys;  // members so far of each open bracket
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"') {
      i = EndOfString(text, i);
    } else if (c == '[' || c == '{') {
      if (std::cmp_equal(keys.size(), max_depth)) {
        return DataLoss(
            fmt::format("{}: JSON nested deeper than {} levels at byte {}", what, max_depth, i));
      }
      keys.push_back(0);
    } else if (c == ']' || c == '}') {
      if (!keys.empty()) keys.pop_back();
    } else if (c == ':' && !keys.empty() && ++keys.back() > max_keys) {
      return DataLoss(
          fmt::format("{}: a JSON object has more than {} members at byte {}", what, max_keys, i));
    } else if (c == '\0') {  // the parser takes it for the end of the text
      return DataLoss(fmt::format("{}: invalid JSON at byte {}: a zero byte", what, i + 1));
    }
  }
  return {};
}

// The library's message repeats its own name and the byte; what follows the first colon is kept.
Status ParseFailure(std::string_view what, size_t byte, std::string_view message) {
  if (const size_t colon = message.find(": "); colon != std::string_view::npos) {
    message.remove_prefix(colon + 2);
  }
  return DataLoss(
      fmt::format("{}: invalid JSON at byte {}: {}", what, byte, Printable(message, 300)));
}

// Reads a document and keeps nothing but its first error.
class SyntaxChecker final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit SyntaxChecker(std::string_view what) : what_(what) {}
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return true; }
  bool key(string_t&) override { return true; }
  bool end_object() override { return true; }
  bool start_array(size_t) override { return true; }
  bool end_array() override { return true; }
  bool parse_error(size_t byte, const std::string&,
                   const nlohmann::detail::exception& error) override {
    status_ = ParseFailure(what_, byte, error.what());
    return false;
  }
  const Status& status() const { return status_; }

 private:
  std::string_view what_;
  Status status_;
};

template <typename Json>
Result<Json> Parse(std::string_view text, std::string_view what, int max_depth,
                   size_t max_keys = std::numeric_limits<size_t>::max(),
                   const nlohmann::json::parser_callback_t& callback = nullptr) {
  OSCAR_RETURN_IF_ERROR(CheckShape(text, what, max_depth, max_keys));
  try {
    if constexpr (std::is_same_v<Json, nlohmann::json>) {
      return Json::parse(text.begin(), text.end(), callback);
    } else {
      return Json::parse(text.begin(), text.end());
    }
  } catch (const nlohmann::json::parse_error& error) {
    return Unexpected(ParseFailure(what, error.byte, error.what()));
  } catch (const std::exception& error) {
    return Unexpected(
        DataLoss(fmt::format("{}: invalid JSON: {}", what, Printable(error.what(), 300))));
  }
}

}  // namespace

Status CheckIntegersFit(std::string_view text, std::string_view what) {
  constexpr std::string_view kDigits = "0123456789";
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '"') {
      i = EndOfString(text, i);
      continue;
    }
    if (kDigits.find(text[i]) == std::string_view::npos) continue;
    const size_t end = std::min(text.find_first_not_of("0123456789+-.eE", i), text.size());
    const std::string_view number = text.substr(i, end - i);
    uint64_t value = 0;
    const bool is_integer = number.find_first_not_of(kDigits) == std::string_view::npos;
    const bool is_negative = i > 0 && text[i - 1] == '-';
    constexpr uint64_t kLowest = uint64_t{1} << 63;
    if (is_integer &&
        (std::from_chars(number.data(), number.data() + number.size(), value).ec != std::errc() ||
         (is_negative && value > kLowest))) {
      return DataLoss(fmt::format("{}: the integer at byte {} does not fit 64 bits", what, i));
    }
    i = end - 1;
  }
  return {};
}

Result<nlohmann::json> ParseJson(std::string_view text, std::string_view what, int max_depth) {
  return Parse<nlohmann::json>(text, what, max_depth);
}

Result<nlohmann::json> ParseStrictJson(std::string_view text, std::string_view what,
                                       int max_depth) {
  using Event = nlohmann::json::parse_event_t;
  std::vector<std::set<std::string>> open_objects;
  std::string duplicate;
  bool found = false;
  const auto callback = [&](int, Event event, nlohmann::json& parsed) {
    if (event == Event::object_start) {
      open_objects.emplace_back();
    } else if (event == Event::object_end) {
      open_objects.pop_back();
    } else if (event == Event::key && !found) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!open_objects.back().insert(key).second) {
        duplicate = key;
        found = true;
      }
    }
    return true;
  };
  auto parsed =
      Parse<nlohmann::json>(text, what, max_depth, std::numeric_limits<size_t>::max(), callback);
  if (parsed.has_value() && found) {
    return Unexpected(DataLoss(fmt::format("{}: duplicate key {}", what, Quote(duplicate))));
  }
  return parsed;
}

Result<nlohmann::ordered_json> ParseOrderedJson(std::string_view text, std::string_view what,
                                                int max_depth) {
  return Parse<nlohmann::ordered_json>(text, what, max_depth, kMaxOrderedKeys);
}

Result<std::vector<JsonMember>> SplitJsonObject(std::string_view text, std::string_view what,
                                                int max_depth) {
  OSCAR_RETURN_IF_ERROR(CheckShape(text, what, max_depth, kMaxOrderedKeys));
  SyntaxChecker checker(what);
  const bool valid = nlohmann::json::sax_parse(text.begin(), text.end(), &checker);
  OSCAR_RETURN_IF_ERROR(checker.status());
  if (!valid) return Unexpected(DataLoss(fmt::format("{}: invalid JSON", what)));
  constexpr std::string_view kSpace = " \t\r\n";
  const size_t open = text.find_first_of("{[\"-0123456789tfn");  // after a byte order mark, too
  if (text[open] != '{') return Unexpected(InvalidArgument(fmt::format("{}: no object", what)));
  // What follows relies on the text being valid: brackets match, members are name, colon, value.
  std::vector<JsonMember> members;
  size_t at = text.find_first_not_of(kSpace, open + 1);
  while (text[at] != '}') {
    if (text[at] == ',') at = text.find_first_not_of(kSpace, at + 1);
    const size_t name_end = EndOfString(text, at);
    const std::string_view name = text.substr(at, name_end + 1 - at);
    const size_t begin =
        text.find_first_not_of(kSpace, text.find_first_not_of(kSpace, name_end + 1) + 1);
    int depth = 0;
    size_t end = begin;
    for (; depth > 0 || (text[end] != ',' && text[end] != '}'); ++end) {
      const char c = text[end];
      if (c == '"') end = EndOfString(text, end);
      if (c == '[' || c == '{') ++depth;
      if (c == ']' || c == '}') --depth;
    }
    const std::string_view value = text.substr(begin, end - begin);
    members.push_back({nlohmann::json::parse(name.begin(), name.end()).get<std::string>(),
                       value.substr(0, value.find_last_not_of(kSpace) + 1)});
    at = end;
  }
  return members;
}

size_t JsonCost(std::string_view text) {
  constexpr size_t kOwnMemory = 8;
  size_t cost = 0;
  bool in_scalar = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const bool is_scalar = std::string_view("\"[]{},: \t\r\n").find(c) == std::string_view::npos;
    if (is_scalar && !in_scalar) ++cost;
    in_scalar = is_scalar;
    if (c == '"' || c == '[' || c == '{') cost += kOwnMemory;
    if (c == '"') i = EndOfString(text, i);
  }
  return cost;
}

}  // namespace oscar
