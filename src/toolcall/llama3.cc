// {"name": "f", "parameters": {...}} as the first thing of an answer, or behind <|python_tag|>
// anywhere; several joined by ";". Built-in tools: <|python_tag|>f.call(query="..."). Llama 3.1 to
// 3.3. A JSON answer that is no call of a tool of the request stays text.
#include <algorithm>
#include <array>

#include "toolcall/call_reader.h"
#include "toolcall/json_scanner.h"

namespace oscar {
namespace {

constexpr std::string_view kTag = "<|python_tag|>", kBrace = "{", kCall = ".call(";
constexpr std::array<std::string_view, 5> kKeys = {"name", "parameters", "arguments", "type", "id"};

class Llama3Reader final : public CallReader {
 public:
  using CallReader::CallReader;
  std::vector<std::string_view> markers() const override { return {kTag}; }
  std::vector<std::string_view> start_markers() const override { return {kBrace}; }
  void Start(std::string_view marker) override {
    has_tag_ = marker == kTag;
    cursor_.Start(has_tag_ ? marker.size() : 0);
    step_ = Step::kOpen;
    calls_.clear();
  }
  State Read(std::string_view text, bool at_end, CallBlock* block) override {
    const Match match = Advance(text);
    if (match == Match::kMore && !at_end) return State::kMore;
    if (calls_.empty()) return match == Match::kNo ? State::kBroken : State::kMore;
    block->size = whole_end_;
    block->calls = std::move(calls_);
    return State::kDone;
  }

 private:
  using Match = TextCursor::Match;
  enum class Step : uint8_t { kOpen, kJson, kName, kArguments, kBetween, kNext };

  // Never kYes: a list of calls ends where something else follows.
  Match Advance(std::string_view text) {
    while (true) {
      switch (step_) {
        case Step::kOpen:
          cursor_.SkipSpace(text);
          if (cursor_.at() == text.size()) return Match::kMore;
          begin_ = cursor_.at();
          if (text[begin_] == '{') {
            scanner_.Start(begin_);
            step_ = Step::kJson;
          } else if (has_tag_ && calls_.empty()) {
            step_ = Step::kName;
          } else {
            return Match::kNo;
          }
          break;
        case Step::kJson: {
          const JsonScanner::State state = scanner_.Scan(text);
          const auto is_key = [](const std::string& key) {
            return std::ranges::find(kKeys, key) != kKeys.end();
          };
          if (!std::ranges::all_of(scanner_.keys(), is_key)) return Match::kNo;
          if (state == JsonScanner::State::kMore) return Match::kMore;
          if (state == JsonScanner::State::kBroken) return Match::kNo;
          ReadCall call;
          if (!ReadJsonCall(text.substr(begin_, scanner_.end() - begin_), tools_, &call)) {
            return Match::kNo;
          }
          Add(std::move(call), scanner_.end());
          break;
        }
        case Step::kName: {
          const Match match = cursor_.Name(text, ".", tools_, &name_);
          if (match != Match::kYes) return match;
          step_ = Step::kArguments;
          quote_ = 0;
          begin_ = 0;
          break;
        }
        case Step::kArguments: {
          const Match match = Arguments(text);
          if (match != Match::kYes) return match;
          break;
        }
        case Step::kBetween: {
          cursor_.SkipSpace(text);
          const Match match = cursor_.Take(text, ";");
          if (match != Match::kYes) return match;
          step_ = Step::kNext;
          break;
        }
        case Step::kNext: {
          cursor_.SkipSpace(text);
          const Match match = cursor_.Take(text, kTag);  // may be repeated
          if (match == Match::kMore) return match;
          step_ = Step::kOpen;
          break;
        }
      }
    }
  }

  void Add(ReadCall call, size_t end) {
    calls_.push_back(std::move(call));
    cursor_.Start(end);
    whole_end_ = end;
    step_ = Step::kBetween;
  }

  // From the dot on: .call(key="value", key=1)
  Match Arguments(std::string_view text) {
    if (begin_ == 0) {
      const Match match = cursor_.Take(text, kCall);
      if (match != Match::kYes) return match;
      begin_ = scanned_ = cursor_.at();
    }
    // The closing parenthesis outside of quotes.
    for (; scanned_ < text.size(); ++scanned_) {
      const char c = text[scanned_];
      if (quote_ != 0) {
        if (c == '\\') {
          if (scanned_ + 1 == text.size()) return Match::kMore;
          ++scanned_;
        } else if (c == quote_) {
          quote_ = 0;
        }
      } else if (c == '"' || c == '\'') {
        quote_ = c;
      } else if (c == ')') {
        RawArguments arguments;
        if (!Keywords(text.substr(begin_, scanned_ - begin_), &arguments)) return Match::kNo;
        Add({name_, arguments.Take(), ""}, scanned_ + 1);
        return Match::kYes;
      } else if (c == '\n') {
        return Match::kNo;
      }
    }
    return Match::kMore;
  }

  bool Keywords(std::string_view list, RawArguments* out) const {
    size_t at = 0;
    const auto skip = [&] { at = std::min(list.find_first_not_of(" \t", at), list.size()); };
    for (skip(); at < list.size();) {
      const size_t equals = list.find('=', at);
      if (equals == std::string_view::npos) return false;
      std::string_view key = list.substr(at, equals - at);
      while (key.ends_with(' ')) key.remove_suffix(1);
      const auto is_letter = [](char c) {
        return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') ||
               (c >= 'A' && c <= 'Z');
      };
      if (key.empty() || !std::ranges::all_of(key, is_letter)) return false;
      at = equals + 1;
      skip();
      if (at == list.size()) return false;
      std::string value;
      if (const char quote = list[at]; quote == '"' || quote == '\'') {
        for (++at; at < list.size() && list[at] != quote; ++at) {
          if (list[at] == '\\' && at + 1 < list.size()) {
            const char next = list[++at];
            if (next != quote && next != '\\' && next != 'n' && next != 't') value += '\\';
            value += next == 'n' ? '\n' : next == 't' ? '\t' : next;
          } else {
            value += list[at];
          }
        }
        if (at == list.size()) return false;
        ++at;
      } else {
        const size_t end = std::min(list.find(',', at), list.size());
        value = list.substr(at, end - at);
        at = end;
      }
      out->Add(tools_, name_, key, value);
      skip();
      if (at == list.size()) return true;
      if (list[at] != ',') return false;
      ++at;
      skip();
    }
    return true;
  }

  Step step_ = Step::kOpen;
  bool has_tag_ = false;
  char quote_ = 0;
  TextCursor cursor_;
  JsonScanner scanner_;
  size_t begin_ = 0, scanned_ = 0, whole_end_ = 0;
  std::string name_;
  std::vector<ReadCall> calls_;
};

}  // namespace

std::unique_ptr<CallReader> MakeLlama3Reader(const ToolSet& tools) {
  return std::make_unique<Llama3Reader>(tools);
}

}  // namespace oscar
