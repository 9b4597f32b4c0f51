// Methods of strings, lists and dictionaries, and the global functions.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <ctime>

#include "text/jinja/builtins.h"
#include "text/jinja/callable.h"
#include "text/jinja/interpreter.h"
#include "text/unicode.h"

namespace oscar::jinja {
namespace {

constexpr int64_t kMaxRange = 100'000;  // the sandbox's own limit

constexpr size_t kCopiedBytesPerStep = 64;

bool Contains(std::initializer_list<std::string_view> names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

size_t PreviousCharacter(std::string_view text, size_t end) {
  size_t at = end - 1;
  while (at > 0 && (static_cast<uint8_t>(text[at]) & 0xC0) == 0x80) --at;
  return at;
}

// An argument that must be a string, or absent (then `fallback`).
Result<std::string> StringArgument(Interpreter& in, const std::optional<Value>& value,
                                   std::string_view function, std::string fallback = "") {
  if (!value.has_value()) return fallback;
  if (!value->IsString()) {
    return Unexpected(
        in.Error(fmt::format("{} needs a string, not {}", function, TypeName(*value))));
  }
  OSCAR_RETURN_IF_ERROR(in.ChargeSteps(value->str().size() / kCopiedBytesPerStep));
  return value->str();
}

Result<int64_t> IntArgument(Interpreter& in, const std::optional<Value>& value,
                            std::string_view function, int64_t fallback) {
  if (!value.has_value()) return fallback;
  if (!value->IsInteger()) {
    return Unexpected(
        in.Error(fmt::format("{} needs an integer, not {}", function, TypeName(*value))));
  }
  return value->integer();
}

// Pieces of a split on whitespace, at most `limit` cuts (-1: no limit).
std::vector<MarkedText> SplitOnSpace(const MarkedText& text, int64_t limit, bool from_right) {
  const std::string_view source = text.text();
  std::vector<MarkedText> pieces;
  const auto is_space = [&](size_t at) { return IsPythonSpace(DecodeUtf8(source, at).code_point); };
  if (!from_right) {
    size_t at = 0;
    while (true) {
      while (at < source.size() && is_space(at)) at += DecodeUtf8(source, at).length;
      if (at >= source.size()) break;
      if (limit >= 0 && static_cast<int64_t>(pieces.size()) >= limit) {
        const MarkedText rest = text.Slice(at, source.size());
        pieces.push_back(Strip(rest, std::nullopt, false, true));
        return pieces;
      }
      const size_t begin = at;
      while (at < source.size() && !is_space(at)) at += DecodeUtf8(source, at).length;
      pieces.push_back(text.Slice(begin, at));
    }
    return pieces;
  }
  size_t end = source.size();
  while (true) {
    while (end > 0 && is_space(PreviousCharacter(source, end))) {
      end = PreviousCharacter(source, end);
    }
    if (end == 0) break;
    if (limit >= 0 && static_cast<int64_t>(pieces.size()) >= limit) {
      pieces.push_back(Strip(text.Slice(0, end), std::nullopt, true, false));
      break;
    }
    size_t begin = end;
    while (begin > 0 && !is_space(PreviousCharacter(source, begin))) {
      begin = PreviousCharacter(source, begin);
    }
    pieces.push_back(text.Slice(begin, end));
    end = begin;
  }
  std::reverse(pieces.begin(), pieces.end());
  return pieces;
}

std::vector<MarkedText> SplitOn(const MarkedText& text, std::string_view separator, int64_t limit,
                                bool from_right) {
  const std::string_view source = text.text();
  std::vector<MarkedText> pieces;
  if (!from_right) {
    size_t begin = 0;
    while (limit < 0 || static_cast<int64_t>(pieces.size()) < limit) {
      const size_t found = FindText(source, separator, begin);
      if (found == std::string_view::npos) break;
      pieces.push_back(text.Slice(begin, found));
      begin = found + separator.size();
    }
    pieces.push_back(text.Slice(begin, source.size()));
    return pieces;
  }
  size_t end = source.size();
  while (limit < 0 || static_cast<int64_t>(pieces.size()) < limit) {
    const size_t found = end < separator.size() ? std::string_view::npos
                                                : source.rfind(separator, end - separator.size());
    if (found == std::string_view::npos) break;
    pieces.push_back(text.Slice(found + separator.size(), end));
    end = found;
  }
  pieces.push_back(text.Slice(0, end));
  std::reverse(pieces.begin(), pieces.end());
  return pieces;
}

Result<Value> ListOfTexts(Interpreter& in, std::vector<MarkedText> pieces, bool is_tuple = false) {
  std::vector<Value> items;
  items.reserve(pieces.size());
  for (MarkedText& piece : pieces) {
    OSCAR_RETURN_IF_ERROR(in.ChargeBytes(piece.size() + sizeof(MarkedText)));
    items.emplace_back(std::move(piece));
  }
  return in.NewList(std::move(items), is_tuple);
}

Result<Value> Split(Interpreter& in, const MarkedText& text, std::string_view name,
                    const Arguments& arguments) {
  OSCAR_ASSIGN_OR_RETURN(const auto args, BindArguments(arguments, name, {"sep", "maxsplit"}));
  OSCAR_ASSIGN_OR_RETURN(const int64_t limit, IntArgument(in, args[1], name, -1));
  const bool from_right = name == "rsplit";
  if (!args[0].has_value() || args[0]->IsNone()) {
    OSCAR_RETURN_IF_ERROR(in.ChargeSteps(text.size() / kReadBytesPerStep));
    return ListOfTexts(in, SplitOnSpace(text, limit, from_right));
  }
  OSCAR_ASSIGN_OR_RETURN(const std::string separator, StringArgument(in, args[0], name));
  if (separator.empty()) return Unexpected(in.Error("split needs a separator that is not empty"));
  return ListOfTexts(in, SplitOn(text, separator, limit, from_right));
}

Result<Value> SplitLines(Interpreter& in, const MarkedText& text) {
  const std::string_view source = text.text();
  std::vector<MarkedText> lines;
  size_t begin = 0;
  for (size_t at = 0; at < source.size();) {
    const Utf8Step step = DecodeUtf8(source, at);
    const char32_t c = step.code_point;
    const bool breaks = (c >= '\n' && c <= '\r') || (c >= 0x1C && c <= 0x1E) || c == 0x85 ||
                        c == 0x2028 || c == 0x2029;
    if (!breaks) {
      at += step.length;
      continue;
    }
    lines.push_back(text.Slice(begin, at));
    at += step.length;
    if (c == '\r' && at < source.size() && source[at] == '\n') ++at;
    begin = at;
  }
  if (begin < source.size()) lines.push_back(text.Slice(begin, source.size()));
  return ListOfTexts(in, std::move(lines));
}

Result<Value> Partition(Interpreter& in, const MarkedText& text, const Arguments& arguments,
                        bool from_right) {
  OSCAR_ASSIGN_OR_RETURN(const auto args, BindArguments(arguments, "partition", {"sep"}, 1));
  OSCAR_ASSIGN_OR_RETURN(const std::string separator, StringArgument(in, args[0], "partition"));
  if (separator.empty()) return Unexpected(in.Error("partition needs a separator"));
  const size_t at = from_right ? text.text().rfind(separator) : FindText(text.text(), separator);
  std::vector<MarkedText> parts(3);
  if (at == std::string::npos) {
    parts[from_right ? 2 : 0] = text;
  } else {
    parts[0] = text.Slice(0, at);
    parts[1] = text.Slice(at, at + separator.size());
    parts[2] = text.Slice(at + separator.size(), text.size());
  }
  return ListOfTexts(in, std::move(parts), true);
}

// startswith and endswith: one string or a tuple of them, from a start position if given.
Result<Value> StartsOrEnds(Interpreter& in, const MarkedText& text, std::string_view name,
                           const Arguments& arguments) {
  OSCAR_ASSIGN_OR_RETURN(const auto args, BindArguments(arguments, name, {"prefix", "start"}, 1));
  OSCAR_ASSIGN_OR_RETURN(const int64_t start, IntArgument(in, args[1], name, 0));
  std::string_view source = text.text();
  if (start != 0) {
    const auto offsets = CodePointOffsets(source);
    const auto length = static_cast<int64_t>(offsets.size()) - 1;
    if (start > length) return Value(false);
    const int64_t from = start < 0 ? std::max<int64_t>(start + length, 0) : start;
    source = source.substr(offsets[static_cast<size_t>(from)]);
  }
  std::vector<Value> candidates = {*args[0]};
  if (args[0]->IsList() && args[0]->list().is_tuple) candidates = args[0]->list().items;
  for (const Value& candidate : candidates) {
    if (!candidate.IsString()) {
      return Unexpected(
          in.Error(fmt::format("{} needs a string, not {}", name, TypeName(candidate))));
    }
    const std::string& affix = candidate.str();
    OSCAR_RETURN_IF_ERROR(
        in.ChargeSteps(1 + std::min(affix.size(), source.size()) / kCopiedBytesPerStep));
    if (name == "startswith" ? source.starts_with(affix) : source.ends_with(affix)) {
      return Value(true);
    }
  }
  return Value(false);
}

Result<Value> Find(Interpreter& in, const MarkedText& text, std::string_view name,
                   const Arguments& arguments) {
  OSCAR_ASSIGN_OR_RETURN(const auto args, BindArguments(arguments, name, {"sub"}, 1));
  OSCAR_ASSIGN_OR_RETURN(const std::string sub, StringArgument(in, args[0], name));
  OSCAR_RETURN_IF_ERROR(in.ChargeSteps(text.size() / 16));
  const bool from_right = name == "rfind" || name == "rindex";
  const size_t at = from_right ? text.text().rfind(sub) : FindText(text.text(), sub);
  if (at == std::string::npos) {
    if (name == "find" || name == "rfind") return Value(int64_t{-1});
    return Unexpected(in.Error("substring not found"));
  }
  return Value(static_cast<int64_t>(CountCodePoints(std::string_view(text.text()).substr(0, at))));
}

// Python's str.title: a letter after a non-letter is upper, every other one lower.
MarkedText TitleCase(const MarkedText& text) {
  bool after_letter = false;
  return ChangeCase(text, [&](char32_t c, size_t) {
    const bool is_letter = IsAlphabetic(c);
    const char32_t mapped = after_letter ? ToLower(c) : ToUpper(c);
    after_letter = is_letter;
    return mapped;
  });
}

// Whether the text is not empty and `holds` for every character.
template <typename Predicate>
bool AllCharacters(std::string_view text, Predicate holds) {
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = DecodeUtf8(text, at);
    if (!holds(step.code_point)) return false;
    at += step.length;
  }
  return !text.empty();
}

Result<Value> CallStringMethod(Interpreter& in, const MarkedText& text, std::string_view name,
                               const Arguments& arguments) {
  OSCAR_RETURN_IF_ERROR(in.ChargeSteps(text.size() / kCopiedBytesPerStep));
  const auto no_arguments = [&]() -> Status {
    if (arguments.positional.empty() && arguments.keywords.empty()) return {};
    return in.Error(fmt::format("{} takes no arguments", name));
  };
  if (name == "strip" || name == "lstrip" || name == "rstrip") {
    OSCAR_ASSIGN_OR_RETURN(const auto args, BindArguments(arguments, name, {"chars"}));
    std::string characters;
    const bool any_space = !args[0].has_value() || args[0]->IsNone();
    if (!any_space) {
      OSCAR_ASSIGN_OR_RETURN(characters, StringArgument(in, args[0], name));
      OSCAR_RETURN_IF_ERROR(in.ChargeSteps(characters.size()));
    }
    MarkedText stripped =
        Strip(text, any_space ? std::nullopt : std::optional<std::string_view>(characters),
              name != "rstrip", name != "lstrip");
    OSCAR_RETURN_IF_ERROR(in.ChargeSteps((text.size() - stripped.size()) / kReadBytesPerStep));
    return in.NewText(std::move(stripped));
  }
  if (Contains({"rsplit", "rpartition", "rfind", "rindex"}, name)) {
    // Searches from the right compare the whole of what they look for at every place.
    size_t sought = 0;
    for (const Value& value : arguments.positional) {
      if (value.IsString()) sought = std::max(sought, value.text().size());
    }
    for (const auto& [key, value] : arguments.keywords) {
      if (value.IsString()) sought = std::max(sought, value.text().size());
    }
    OSCAR_RETURN_IF_ERROR(
        in.ChargeSteps(text.size() / kReadBytesPerStep * (sought / kCopiedBytesPerStep)));
  }
  if (name == "split" || name == "rsplit") return Split(in, text, name, arguments);
  if (name == "splitlines") {
    OSCAR_RETURN_IF_ERROR(no_arguments());
    OSCAR_RETURN_IF_ERROR(in.ChargeSteps(text.size() / kReadBytesPerStep));
    return SplitLines(in, text);
  }
  if (name == "partition" || name == "rpartition") {
    return Partition(in, text, arguments, name == "rpartition");
  }
  if (name == "startswith" || name == "endswith") return StartsOrEnds(in, text, name, arguments);
  if (Contains({"find", "rfind", "index", "rindex"}, name)) return Find(in, text, name, arguments);
  if (name == "count") {
    OSCAR_ASSIGN_OR_RETURN(const auto args, BindArguments(arguments, name, {"sub"}, 1));
    OSCAR_ASSIGN_OR_RETURN(const std::string sub, StringArgument(in, args[0], name));
    if (sub.empty()) return Value(static_cast<int64_t>(CountCodePoints(text.text())) + 1);
    int64_t count = 0;
    for (size_t at = FindText(text.text(), sub); at != std::string::npos;
         at = FindText(text.text(), sub, at + sub.size())) {
      ++count;
    }
    return Value(count);
  }
  if (name == "replace") {
    OSCAR_ASSIGN_OR_RETURN(const auto args,
                           BindArguments(arguments, name, {"old", "new", "count"}, 2));
    OSCAR_ASSIGN_OR_RETURN(const std::string old, StringArgument(in, args[0], name));
    if (!args[1]->IsString()) return Unexpected(in.Error("replace needs strings"));
    OSCAR_ASSIGN_OR_RETURN(const int64_t count, IntArgument(in, args[2], name, -1));
    // Worst case: one replacement a character, checked before anything is built.
    OSCAR_RETURN_IF_ERROR(
        in.ChargeBytes(text.size() + (text.size() / std::max<size_t>(old.size(), 1) + 1) *
                                         args[1]->text().size()));
    return in.NewText(Replace(text, old, args[1]->text(), count));
  }
  if (name == "removeprefix" || name == "removesuffix") {
    OSCAR_ASSIGN_OR_RETURN(const auto args, BindArguments(arguments, name, {"affix"}, 1));
    OSCAR_ASSIGN_OR_RETURN(const std::string affix, StringArgument(in, args[0], name));
    if (name == "removeprefix") {
      return in.NewText(text.text().starts_with(affix) ? text.Slice(affix.size(), text.size())
                                                       : text);
    }
    return in.NewText(text.text().ends_with(affix) ? text.Slice(0, text.size() - affix.size())
                                                   : text);
  }
  if (name == "join") {
    OSCAR_ASSIGN_OR_RETURN(const auto args, BindArguments(arguments, name, {"iterable"}, 1));
    OSCAR_ASSIGN_OR_RETURN(const auto items, in.Iterate(*args[0]));
    MarkedText joined;
    for (size_t i = 0; i < items.size(); ++i) {
      if (!items[i].IsString()) {
        return Unexpected(
            in.Error(fmt::format("join needs strings; item {} is {}", i, TypeName(items[i]))));
      }
      OSCAR_RETURN_IF_ERROR(in.ChargeBytes(text.size() + items[i].text().size()));
      if (i > 0) joined.Append(text);
      joined.Append(items[i].text());
    }
    return Value(std::move(joined));
  }
  OSCAR_RETURN_IF_ERROR(no_arguments());
  OSCAR_RETURN_IF_ERROR(in.ChargeSteps(text.size() / kReadBytesPerStep));
  if (name == "upper") return in.NewText(Upper(text));
  if (name == "lower") return in.NewText(Lower(text));
  if (name == "capitalize") return in.NewText(Capitalize(text));
  if (name == "title") return in.NewText(TitleCase(text));
  const std::string_view source = text.text();
  const auto is_digit = [](char32_t c) { return c >= '0' && c <= '9'; };
  if (name == "isdigit") return Value(AllCharacters(source, is_digit));
  if (name == "isalpha") return Value(AllCharacters(source, IsAlphabetic));
  if (name == "isalnum") {
    return Value(AllCharacters(source, [&](char32_t c) { return IsAlphabetic(c) || is_digit(c); }));
  }
  if (name == "isspace") return Value(AllCharacters(source, IsPythonSpace));
  if (name == "isupper" || name == "islower") {
    bool any = false, other = false;
    (void)AllCharacters(source, [&](char32_t c) {
      any |= name == "isupper" ? IsUpper(c) : IsLower(c);
      other |= name == "isupper" ? IsLower(c) : IsUpper(c);
      return true;
    });
    return Value(any && !other);
  }
  return Unexpected(in.Error(fmt::format("string method \"{}\" is not supported", name)));
}

Result<Value> CallDictMethod(Interpreter& in, const Value& self, std::string_view name,
                             const Arguments& arguments) {
  const Dict& dict = self.dict();
  if (name == "get") {
    OSCAR_ASSIGN_OR_RETURN(const auto args, BindArguments(arguments, name, {"key", "default"}, 1));
    OSCAR_ASSIGN_OR_RETURN(const Value* found, in.FindKey(dict, *args[0]));
    return found != nullptr ? *found : args[1].value_or(Value());
  }
  OSCAR_RETURN_IF_ERROR(BindArguments(arguments, name, {}).has_value()
                            ? Status()
                            : in.Error(fmt::format("{} takes no arguments", name)));
  if (name == "copy") return self;
  std::vector<Value> out;
  out.reserve(dict.items.size());
  for (const auto& [key, value] : dict.items) {
    if (name == "keys") {
      out.push_back(key);
    } else if (name == "values") {
      out.push_back(value);
    } else if (name == "items") {
      OSCAR_ASSIGN_OR_RETURN(Value pair, in.NewList({key, value}, true));
      out.push_back(std::move(pair));
    } else {
      break;
    }
  }
  if (!Contains({"keys", "values", "items"}, name)) {
    return Unexpected(in.Error(fmt::format("dict.{} is not allowed: values do not change", name)));
  }
  return in.NewList(std::move(out));
}

Result<Value> CallListMethod(Interpreter& in, const Value& self, std::string_view name,
                             const Arguments& arguments) {
  if (name != "index" && name != "count") {
    return Unexpected(in.Error(fmt::format("list.{} is not allowed: values do not change", name)));
  }
  OSCAR_ASSIGN_OR_RETURN(const auto args, BindArguments(arguments, name, {"value"}, 1));
  const auto& items = self.list().items;
  int64_t count = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    OSCAR_ASSIGN_OR_RETURN(const bool same, Equal(in, items[i], *args[0]));
    if (!same) continue;
    if (name == "index") return Value(static_cast<int64_t>(i));
    ++count;
  }
  if (name == "index") return Unexpected(in.Error("the value is not in the list"));
  return Value(count);
}

Result<Value> CallLoopMethod(Interpreter& in, LoopState& loop, std::string_view name,
                             const Arguments& arguments) {
  if (name == "cycle") {
    if (arguments.positional.empty()) return Unexpected(in.Error("cycle needs arguments"));
    return arguments.positional[loop.index0 % arguments.positional.size()];
  }
  // The values are remembered as text, so that a loop cannot come to own itself.
  OSCAR_ASSIGN_OR_RETURN(const Value values, in.NewList(arguments.positional, true));
  OSCAR_ASSIGN_OR_RETURN(MarkedText shown, ToText(in, values));
  const Value text(std::move(shown));
  OSCAR_ASSIGN_OR_RETURN(const bool same, Equal(in, loop.changed_value, text));
  const bool changed = !loop.has_changed_value || !same;
  loop.has_changed_value = true;
  loop.changed_value = text;
  return Value(changed);
}

Result<Value> StrftimeNow(Interpreter& in, const Arguments& arguments) {
  OSCAR_ASSIGN_OR_RETURN(const auto args, BindArguments(arguments, "strftime_now", {"format"}, 1));
  OSCAR_ASSIGN_OR_RETURN(const std::string format, StringArgument(in, args[0], "strftime_now"));
  if (format.size() > 256) return Unexpected(in.Error("the date format is too long"));
  std::tm parts{};
  if (const auto now = in.options().now) {
    const auto seconds = static_cast<std::time_t>(*now);
    gmtime_r(&seconds, &parts);
  } else {
    const std::time_t seconds = std::time(nullptr);
    localtime_r(&seconds, &parts);
  }
  std::array<char, 4096> buffer;
  // The leading space tells an empty result from a failure.
  const size_t size = std::strftime(buffer.data(), buffer.size(), (" " + format).c_str(), &parts);
  if (size == 0) return Unexpected(in.Error("the date is too long"));
  std::string text(buffer.data() + 1, size - 1);
  return Value::Text(ReplaceInvalidUtf8(text));
}

Result<Value> Range(Interpreter& in, const Arguments& arguments) {
  if (arguments.positional.empty() || arguments.positional.size() > 3 ||
      !arguments.keywords.empty()) {
    return Unexpected(in.Error("range takes one to three integers"));
  }
  std::vector<int64_t> bounds;
  for (const Value& value : arguments.positional) {
    if (!value.IsInteger()) return Unexpected(in.Error("range takes one to three integers"));
    bounds.push_back(value.integer());
  }
  const int64_t start = bounds.size() == 1 ? 0 : bounds[0];
  const int64_t stop = bounds.size() == 1 ? bounds[0] : bounds[1];
  const int64_t step = bounds.size() == 3 ? bounds[2] : 1;
  if (step == 0) return Unexpected(in.Error("range cannot have step 0"));
  std::vector<Value> items;
  for (int64_t at = start; step > 0 ? at < stop : at > stop;) {
    if (static_cast<int64_t>(items.size()) >= kMaxRange) {
      return Unexpected(in.Error(fmt::format("a range has at most {} elements", kMaxRange)));
    }
    items.emplace_back(at);
    if (__builtin_add_overflow(at, step, &at)) break;
  }
  return in.NewList(std::move(items));
}

}  // namespace

bool HasMethod(const Value& self, std::string_view name) {
  switch (self.kind()) {
    case Kind::kString:
      return Contains(
          {"strip",        "lstrip",     "rstrip",     "split",      "rsplit",   "splitlines",
           "partition",    "rpartition", "startswith", "endswith",   "find",     "rfind",
           "index",        "rindex",     "count",      "replace",    "join",     "removeprefix",
           "removesuffix", "upper",      "lower",      "capitalize", "title",    "isdigit",
           "isalpha",      "isalnum",    "isspace",    "isupper",    "islower",  "format",
           "encode",       "swapcase",   "zfill",      "center",     "ljust",    "rjust",
           "casefold",     "expandtabs", "isnumeric",  "isdecimal",  "translate"},
          name);
    case Kind::kDict:
      return Contains({"get", "keys", "values", "items", "copy", "pop", "popitem", "update",
                       "setdefault", "clear", "fromkeys"},
                      name);
    case Kind::kList:
      return Contains({"index", "count"}, name) ||
             (!self.list().is_tuple && Contains({"append", "extend", "insert", "pop", "remove",
                                                 "clear", "sort", "reverse", "copy"},
                                                name));
    case Kind::kLoop:
      return name == "cycle" || name == "changed";
    default:
      return false;
  }
}

Result<Value> CallMethod(Interpreter& in, const Value& self, std::string_view name,
                         const Arguments& arguments) {
  Result<Value> result = Unexpected(Internal("a method of nothing"));
  switch (self.kind()) {
    case Kind::kString:
      result = CallStringMethod(in, self.text(), name, arguments);
      break;
    case Kind::kDict:
      result = CallDictMethod(in, self, name, arguments);
      break;
    case Kind::kList:
      result = CallListMethod(in, self, name, arguments);
      break;
    case Kind::kLoop:
      result = CallLoopMethod(in, self.loop(), name, arguments);
      break;
    default:
      break;
  }
  return result;
}

bool HasFunction(std::string_view name) {
  return Contains({"range", "namespace", "dict", "raise_exception", "strftime_now"}, name);
}

Result<Value> CallFunction(Interpreter& in, std::string_view name, const Arguments& arguments) {
  if (name == "range") return Range(in, arguments);
  if (name == "strftime_now") return StrftimeNow(in, arguments);
  if (name == "raise_exception") {
    OSCAR_ASSIGN_OR_RETURN(const auto args, BindArguments(arguments, name, {"message"}, 1));
    OSCAR_ASSIGN_OR_RETURN(const MarkedText message, ToText(in, *args[0]));
    return Unexpected(in.Error(message.text()));
  }
  std::vector<std::pair<Value, Value>> items;
  if (arguments.positional.size() > 1) {
    return Unexpected(in.Error(fmt::format("{} takes one positional argument", name)));
  }
  if (!arguments.positional.empty()) {
    if (!arguments.positional[0].IsDict()) {
      return Unexpected(in.Error(fmt::format("{} takes a dict", name)));
    }
    items = arguments.positional[0].dict().items;
  }
  for (const auto& [key, value] : arguments.keywords) items.emplace_back(Value::Text(key), value);
  if (name == "dict") return in.NewDict(std::move(items));
  OSCAR_RETURN_IF_ERROR(in.ChargeBytes(items.size() * 2 * sizeof(Value)));
  Namespace* space = in.NewNamespace();
  for (auto& [key, value] : items) {
    if (!key.IsString()) return Unexpected(in.Error("attributes of a namespace are strings"));
    const std::string& name_of_key = key.str();
    const auto existing = std::find_if(
        space->attributes.begin(), space->attributes.end(),
        [&name_of_key](const auto& attribute) { return attribute.first == name_of_key; });
    if (existing != space->attributes.end()) {
      existing->second = std::move(value);
    } else {
      space->attributes.emplace_back(key.str(), std::move(value));
    }
  }
  return Value(space);
}

}  // namespace oscar::jinja
