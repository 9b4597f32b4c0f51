#include "text/pretokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/core.h>
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <utility>

#include "text/unicode.h"

namespace oscar {
namespace {

constexpr int kMaxTreeDepth = 8;
constexpr size_t kMaxPatternBytes = 4096;
// Steps of one match before it is given up. The patterns in use need a few steps a byte of the
// match; a run of whitespace needs about two a byte.
constexpr uint32_t kMatchLimit = 100'000'000;
constexpr uint32_t kHeapLimitKib = 64 * 1024;

constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// White_Space, spelled out: PCRE2's own \s also takes U+180E, which stopped being a space in
// Unicode 6.3.
constexpr std::string_view kSpaceInClass = R"(\t-\r\x{85}\p{Z})";

// Letters, numbers and marks of Unicode 15 and 16, for class brackets. The libraries that ids must
// agree with know them (Oniguruma's tables are of Unicode 16); Debian 12's PCRE2 is of Unicode 14
// and would take them for symbols. A newer PCRE2 has them anyway.
constexpr std::string_view kNewLetters =
    R"(\x{1C89}-\x{1C8A}\x{A7CB}-\x{A7CD}\x{A7DA}-\x{A7DC}\x{105C0}-\x{105F3})"
    R"(\x{10D4A}-\x{10D65}\x{10D6F}-\x{10D85}\x{10EC2}-\x{10EC4}\x{1123F}-\x{11240})"
    R"(\x{11380}-\x{11389}\x{1138B}\x{1138E}\x{11390}-\x{113B5}\x{113B7}\x{113D1}\x{113D3})"
    R"(\x{11BC0}-\x{11BE0}\x{11F02}\x{11F04}-\x{11F10}\x{11F12}-\x{11F33}\x{1342F})"
    R"(\x{13441}-\x{13446}\x{13460}-\x{143FA}\x{16100}-\x{1611D}\x{16D40}-\x{16D6C})"
    R"(\x{18CFF}\x{1B132}\x{1B155}\x{1DF25}-\x{1DF2A}\x{1E030}-\x{1E06D}\x{1E4D0}-\x{1E4EB})"
    R"(\x{1E5D0}-\x{1E5ED}\x{1E5F0}\x{2B739}\x{2EBF0}-\x{2EE5D}\x{31350}-\x{323AF})";
constexpr std::string_view kNewNumbers =
    R"(\x{10D40}-\x{10D49}\x{116D0}-\x{116E3}\x{11BF0}-\x{11BF9}\x{11F50}-\x{11F59})"
    R"(\x{16130}-\x{16139}\x{16D70}-\x{16D79}\x{1CCF0}-\x{1CCF9}\x{1D2C0}-\x{1D2D3})"
    R"(\x{1E4F0}-\x{1E4F9}\x{1E5F1}-\x{1E5FA})";
constexpr std::string_view kNewMarks =
    R"(\x{897}\x{CF3}\x{ECE}\x{10D69}-\x{10D6D}\x{10EFC}-\x{10EFF}\x{11241})"
    R"(\x{113B8}-\x{113C0}\x{113C2}\x{113C5}\x{113C7}-\x{113CA}\x{113CC}-\x{113D0}\x{113D2})"
    R"(\x{113E1}-\x{113E2}\x{11F00}-\x{11F01}\x{11F03}\x{11F34}-\x{11F3A})"
    R"(\x{11F3E}-\x{11F42}\x{11F5A}\x{13440}\x{13447}-\x{13455}\x{1611E}-\x{1612F}\x{1E08F})"
    R"(\x{1E4EC}-\x{1E4EF}\x{1E5EE}-\x{1E5EF})";

// What a property of this name lacks; empty for those that are taken as PCRE2 has them.
std::string_view NewerMembers(std::string_view property) {
  return property == "L"   ? kNewLetters
         : property == "N" ? kNewNumbers
         : property == "M" ? kNewMarks
                           : std::string_view();
}

Status Refuse(std::string_view what, std::string_view why) {
  return Unimplemented(fmt::format("pattern construct {} is not supported: {}", what, why));
}

struct FreeMatchData {
  void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
};
struct FreeMatchContext {
  void operator()(pcre2_match_context* context) const { pcre2_match_context_free(context); }
};

const char* TypeName(const nlohmann::json& node) { return node.type_name(); }

Status CheckKeys(const nlohmann::json& node, std::string_view where,
                 std::initializer_list<std::string_view> known) {
  for (const auto& [key, value] : node.items()) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      return Unimplemented(
          fmt::format("{}: \"{}\" is not a setting this version knows", where, key));
    }
  }
  return {};
}

Result<std::string> StringField(const nlohmann::json& node, const char* key,
                                std::string_view where) {
  const auto it = node.find(key);
  if (it == node.end() || !it->is_string()) {
    return Unexpected(DataLoss(fmt::format("{}: \"{}\" must be a string", where, key)));
  }
  return it->get<std::string>();
}

Result<bool> BoolField(const nlohmann::json& node, const char* key, bool fallback,
                       std::string_view where) {
  const auto it = node.find(key);
  if (it == node.end()) return fallback;
  if (!it->is_boolean()) {
    return Unexpected(DataLoss(
        fmt::format("{}: \"{}\" must be true or false, not {}", where, key, TypeName(*it))));
  }
  return it->get<bool>();
}

}  // namespace

Result<std::string> TranslatePattern(std::string_view pattern) {
  if (pattern.size() > kMaxPatternBytes) {
    return Unexpected(OutOfRange(
        fmt::format("pattern of {} bytes; the limit is {}", pattern.size(), kMaxPatternBytes)));
  }
  std::string out;
  bool in_class = false;
  bool after_interval = false;  // the last item was a {n,m} quantifier
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    const bool was_interval = std::exchange(after_interval, false);
    if (c == '\\') {
      if (++i == pattern.size()) return Unexpected(DataLoss("pattern ends in a backslash"));
      const char escaped = pattern[i];
      switch (escaped) {
        case 's':
          out += in_class ? std::string(kSpaceInClass) : fmt::format("[{}]", kSpaceInClass);
          break;
        case 'S':
          if (in_class) return Unexpected(Refuse("\\S inside [ ]", "it has no translation"));
          out += fmt::format("[^{}]", kSpaceInClass);
          break;
        case 'p':
        case 'P':
        case 'x': {
          const size_t close = pattern.find('}', i);
          if (i + 1 >= pattern.size() || pattern[i + 1] != '{' || close == std::string_view::npos) {
            return Unexpected(Refuse(fmt::format("\\{} without {{ }}", escaped), "ambiguous"));
          }
          const std::string_view item = pattern.substr(i - 1, close - i + 2);  // "\\p{L}"
          const std::string_view newer =
              escaped == 'x' ? std::string_view() : NewerMembers(item.substr(3, item.size() - 4));
          if (newer.empty() || (in_class && escaped == 'P')) {
            out += item;
          } else if (in_class) {
            out.append(item).append(newer);
          } else {
            out += fmt::format("[{}\\p{}{}]", escaped == 'P' ? "^" : "", item.substr(2), newer);
          }
          i = close;
          break;
        }
        case 'd':
        case 'r':
        case 'n':
        case 't':
        case 'f':
        case 'v':
          // \v is one character to Oniguruma and a class to PCRE2.
          out += escaped == 'v' ? std::string("\\x0B") : std::string{'\\', escaped};
          break;
        default:
          if ((escaped >= 'a' && escaped <= 'z') || (escaped >= 'A' && escaped <= 'Z') ||
              (escaped >= '0' && escaped <= '9')) {
            return Unexpected(
                Refuse(fmt::format("\\{}", escaped),
                       "only \\s \\S \\d \\p{..} \\P{..} \\x \\r \\n \\t \\f \\v are"));
          }
          out += {'\\', escaped};
      }
      continue;
    }
    if (in_class) {
      if (c == '[') return Unexpected(Refuse("[ inside [ ]", "set operations differ"));
      if (c == '&' && pattern.substr(i).starts_with("&&")) {
        return Unexpected(Refuse("&& inside [ ]", "set operations differ"));
      }
      if (c == ']') in_class = false;
      out += c;
      continue;
    }
    switch (c) {
      case '[':
        in_class = true;
        out += c;
        if (i + 1 < pattern.size() && pattern[i + 1] == '^') out += pattern[++i];
        if (i + 1 < pattern.size() && pattern[i + 1] == ']') {
          return Unexpected(Refuse("] first in [ ]", "write \\]"));
        }
        break;
      case '^':
      case '$':
        return Unexpected(Refuse(std::string(1, c), "line anchors differ"));
      case '(':
        out += c;
        if (i + 1 < pattern.size() && pattern[i + 1] == '*') {
          return Unexpected(Refuse("(*", "control verbs are not part of the dialect"));
        }
        if (i + 1 < pattern.size() && pattern[i + 1] == '?') {
          const std::string_view rest = pattern.substr(i + 1);
          bool known = false;
          for (const std::string_view opening :
               {"?:", "?=", "?!", "?<=", "?<!", "?>", "?i:", "?-i:"}) {
            if (!rest.starts_with(opening)) continue;
            out += opening;
            i += opening.size();
            known = true;
            break;
          }
          if (!known) return Unexpected(Refuse(fmt::format("({}", rest.substr(0, 3)), "unknown"));
        }
        break;
      case '{': {
        const size_t close = pattern.find('}', i);
        if (close == std::string_view::npos) return Unexpected(DataLoss("pattern has { without }"));
        out += pattern.substr(i, close - i + 1);
        i = close;
        after_interval = true;
        break;
      }
      case '+':
      case '*':
        // After {n,m} a plus repeats the group in one dialect and makes it possessive in the other.
        if (was_interval) return Unexpected(Refuse(fmt::format("}}{}", c), "quantifiers differ"));
        out += c;
        break;
      default:
        out += c;
    }
  }
  if (in_class) return Unexpected(DataLoss("pattern has [ without ]"));
  return out;
}

struct PreTokenizer::Pattern {
  explicit Pattern(pcre2_code* compiled) : code(compiled) {}
  ~Pattern() { pcre2_code_free(code); }
  Pattern(const Pattern&) = delete;
  Pattern& operator=(const Pattern&) = delete;

  // `literal` patterns are strings, not expressions.
  static Result<std::unique_ptr<Pattern>> Compile(std::string_view pattern, bool literal) {
    std::string translated(pattern);
    if (!literal) {
      OSCAR_ASSIGN_OR_RETURN(translated, TranslatePattern(pattern));
    }
    uint32_t has_jit = 0;
    pcre2_config(PCRE2_CONFIG_JIT, &has_jit);
    int error = 0;
    PCRE2_SIZE offset = 0;
    const uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C |
                             (literal ? PCRE2_LITERAL : PCRE2_NO_AUTO_CAPTURE);
    pcre2_code* code =
        pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                      literal ? options & ~(PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C) : options, &error,
                      &offset, nullptr);
    if (code == nullptr) {
      std::array<PCRE2_UCHAR, 256> message{};
      pcre2_get_error_message(error, message.data(), message.size());
      return Unexpected(
          DataLoss(fmt::format("pattern {:?}: {} at byte {}", pattern,
                               reinterpret_cast<const char*>(message.data()), offset)));
    }
    auto result = std::make_unique<Pattern>(code);
    if (has_jit != 0) pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
    return result;
  }

  pcre2_code* code;
};

PreTokenizer::PreTokenizer() = default;
PreTokenizer::PreTokenizer(PreTokenizer&&) noexcept = default;
PreTokenizer& PreTokenizer::operator=(PreTokenizer&&) noexcept = default;
PreTokenizer::~PreTokenizer() = default;

Result<PreTokenizer> PreTokenizer::FromJson(const nlohmann::json& tree) {
  PreTokenizer result;
  OSCAR_RETURN_IF_ERROR(result.AddNode(tree, 0));
  if (!result.byte_level_) {
    return Unexpected(Unimplemented(
        "pre_tokenizer: only byte-level vocabularies are supported, and this tree has no "
        "\"ByteLevel\" stage"));
  }
  return result;
}

Status PreTokenizer::AddNode(const nlohmann::json& node, int depth) {
  if (depth > kMaxTreeDepth) return DataLoss("pre_tokenizer: nested too deeply");
  if (!node.is_object()) {
    return DataLoss(fmt::format("pre_tokenizer: must be an object, not {}", TypeName(node)));
  }
  const auto type_field = StringField(node, "type", "pre_tokenizer");
  if (!type_field.has_value()) return type_field.error();
  const std::string& type = *type_field;
  if (type == "Sequence") {
    OSCAR_RETURN_IF_ERROR(CheckKeys(node, "pre_tokenizer Sequence", {"type", "pretokenizers"}));
    const auto list = node.find("pretokenizers");
    if (list == node.end() || !list->is_array()) {
      return DataLoss("pre_tokenizer Sequence: \"pretokenizers\" must be a list");
    }
    for (const auto& child : *list) OSCAR_RETURN_IF_ERROR(AddNode(child, depth + 1));
    return {};
  }
  if (byte_level_) {
    return Unimplemented(fmt::format(
        "pre_tokenizer: \"{}\" after \"ByteLevel\" is not supported (it would see mapped bytes)",
        type));
  }
  if (type == "Split") return AddSplit(node);
  if (type == "ByteLevel") return AddByteLevel(node);
  return Unimplemented(fmt::format(
      "pre_tokenizer: type \"{}\" is not supported; known are Sequence, Split and ByteLevel",
      type));
}

Status PreTokenizer::AddSplit(const nlohmann::json& node) {
  OSCAR_RETURN_IF_ERROR(
      CheckKeys(node, "pre_tokenizer Split", {"type", "pattern", "behavior", "invert"}));
  const auto pattern = node.find("pattern");
  if (pattern == node.end() || !pattern->is_object() || pattern->size() != 1) {
    return DataLoss("pre_tokenizer Split: \"pattern\" must be {\"Regex\": ..} or {\"String\": ..}");
  }
  const std::string& kind = pattern->begin().key();
  if ((kind != "Regex" && kind != "String") || !pattern->begin()->is_string()) {
    return DataLoss(fmt::format("pre_tokenizer Split: unknown pattern kind \"{}\"", kind));
  }
  const auto behavior_field = StringField(node, "behavior", "pre_tokenizer Split");
  if (!behavior_field.has_value()) return behavior_field.error();
  const std::string& behavior = *behavior_field;
  Stage stage;
  static constexpr std::array<std::pair<std::string_view, Behavior>, 5> kBehaviors = {
      {{"Removed", Behavior::kRemoved},
       {"Isolated", Behavior::kIsolated},
       {"MergedWithPrevious", Behavior::kMergedWithPrevious},
       {"MergedWithNext", Behavior::kMergedWithNext},
       {"Contiguous", Behavior::kContiguous}}};
  bool known = false;
  for (const auto& [name, value] : kBehaviors) {
    if (name != behavior) continue;
    stage.behavior = value;
    known = true;
  }
  if (!known) {
    return Unimplemented(fmt::format("pre_tokenizer Split: unknown behavior \"{}\"", behavior));
  }
  OSCAR_ASSIGN_OR_RETURN(stage.invert, BoolField(node, "invert", false, "pre_tokenizer Split"));
  auto compiled =
      Pattern::Compile(pattern->begin()->get_ref<const std::string&>(), kind == "String");
  if (!compiled.has_value()) return compiled.error().WithContext("pre_tokenizer Split");
  stage.pattern = std::move(compiled).value();
  stages_.push_back(std::move(stage));
  return {};
}

Status PreTokenizer::AddByteLevel(const nlohmann::json& node) {
  // Trimmed offsets move no ids.
  OSCAR_RETURN_IF_ERROR(CheckKeys(node, "pre_tokenizer ByteLevel",
                                  {"type", "add_prefix_space", "trim_offsets", "use_regex"}));
  OSCAR_ASSIGN_OR_RETURN(const bool prefix,
                         BoolField(node, "add_prefix_space", true, "pre_tokenizer ByteLevel"));
  OSCAR_ASSIGN_OR_RETURN(const bool use_regex,
                         BoolField(node, "use_regex", true, "pre_tokenizer ByteLevel"));
  if (prefix && !stages_.empty()) {
    return Unimplemented(
        "pre_tokenizer ByteLevel: add_prefix_space after a Split would add a space to every word");
  }
  byte_level_ = true;
  add_prefix_space_ = prefix;
  if (use_regex) {
    Stage stage;
    OSCAR_ASSIGN_OR_RETURN(stage.pattern, Pattern::Compile(kGpt2Pattern, false));
    stages_.push_back(std::move(stage));
  }
  return {};
}

namespace {

// A stretch of a piece: a match, or the gap between two.
struct Cut {
  size_t begin;
  size_t end;
  bool is_match;
};

}  // namespace

Status PreTokenizer::Split(std::string* text, std::vector<Word>* words) const {
  if (text->empty()) return {};
  if (add_prefix_space_ && text->front() != ' ') text->insert(text->begin(), ' ');
  const size_t first_word = words->size();
  words->push_back({0, text->size()});
  std::vector<Word> next;
  for (const Stage& stage : stages_) {
    const std::unique_ptr<pcre2_match_data, FreeMatchData> data(
        pcre2_match_data_create(1, nullptr));
    const std::unique_ptr<pcre2_match_context, FreeMatchContext> context(
        pcre2_match_context_create(nullptr));
    if (data == nullptr || context == nullptr) return ResourceExhausted("out of memory in PCRE2");
    pcre2_set_match_limit(context.get(), kMatchLimit);
    pcre2_set_heap_limit(context.get(), kHeapLimitKib);
    next.clear();
    for (size_t index = first_word; index < words->size(); ++index) {
      const Word piece = (*words)[index];
      // The pattern sees the piece alone: look-behind must not reach into the word before it.
      const std::string_view subject =
          std::string_view(*text).substr(piece.begin, piece.end - piece.begin);
      const auto emit = [&](size_t begin, size_t end) {
        if (begin < end) next.push_back({begin, end});
      };
      size_t pending = 0;  // start of what is not emitted yet
      bool last_was_match = false;
      const auto add = [&](Cut cut) {
        if (stage.invert) cut.is_match = !cut.is_match;
        const size_t begin = piece.begin + cut.begin;
        const size_t end = piece.begin + cut.end;
        switch (stage.behavior) {
          case Behavior::kRemoved:
            if (!cut.is_match) emit(begin, end);
            break;
          case Behavior::kIsolated:
            emit(begin, end);
            break;
          case Behavior::kContiguous:
            if (cut.begin != 0 && cut.is_match != last_was_match) {
              emit(piece.begin + pending, begin);
              pending = cut.begin;
            }
            break;
          case Behavior::kMergedWithPrevious:
            // A match joins the gap before it; anything else starts a new word.
            if (!(cut.is_match && !last_was_match)) {
              emit(piece.begin + pending, begin);
              pending = cut.begin;
            }
            break;
          case Behavior::kMergedWithNext:
            // A gap joins the match before it.
            if (!(last_was_match && !cut.is_match)) {
              emit(piece.begin + pending, begin);
              pending = cut.begin;
            }
            break;
        }
        last_was_match = cut.is_match;
      };
      size_t at = 0;
      size_t gap = 0;  // end of the last match
      while (at <= subject.size()) {
        uint32_t options = PCRE2_NO_UTF_CHECK;  // validated once by the caller; else quadratic
        int rc = pcre2_match(stage.pattern->code, reinterpret_cast<PCRE2_SPTR>(subject.data()),
                             subject.size(), at, options, data.get(), context.get());
        if (rc == PCRE2_ERROR_JIT_STACKLIMIT) {
          options |= PCRE2_NO_JIT;  // the interpreter keeps its frames on the heap, within limits
          rc = pcre2_match(stage.pattern->code, reinterpret_cast<PCRE2_SPTR>(subject.data()),
                           subject.size(), at, options, data.get(), context.get());
        }
        if (rc == PCRE2_ERROR_NOMATCH) break;
        if (rc < 0) {
          return ResourceExhausted(fmt::format(
              "pre-tokenizer pattern gave up at byte {} (PCRE2 error {})", piece.begin + at, rc));
        }
        const PCRE2_SIZE* span = pcre2_get_ovector_pointer(data.get());
        const size_t begin = span[0], end = span[1];
        if (gap < begin) add({gap, begin, false});
        if (begin < end) {
          add({begin, end, true});
          gap = at = end;
        } else {
          // An empty match only cuts: step over one character to make progress.
          gap = begin;
          const Utf8Step step = DecodeUtf8(subject, begin);
          if (step.length == 0) break;
          at = begin + step.length;
        }
      }
      if (gap < subject.size()) add({gap, subject.size(), false});
      if (stage.behavior != Behavior::kRemoved && stage.behavior != Behavior::kIsolated) {
        emit(piece.begin + pending, piece.end);
      }
    }
    words->resize(first_word);
    words->insert(words->end(), next.begin(), next.end());
  }
  return {};
}

}  // namespace oscar
