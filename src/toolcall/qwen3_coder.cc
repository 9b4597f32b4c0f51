// <tool_call>\n<function=f>\n<parameter=p>\nvalue\n</parameter>\n</function>\n</tool_call>: Qwen3
// Coder, Qwen3.5. A value is raw text between one newline and another. Seen in the wild and
// understood: no <tool_call> before <function=, a parameter that ends at the next one's line.
#include <algorithm>

#include "toolcall/call_reader.h"

namespace oscar {
namespace {

constexpr std::string_view kBegin = "<tool_call>", kEnd = "</tool_call>";
constexpr std::string_view kFunctionBegin = "<function=", kFunctionEnd = "</function>";
constexpr std::string_view kParameter = "<parameter=", kParameterEnd = "</parameter>";
constexpr std::string_view kNextLine = "\n<parameter=", kFunctionEndLine = "\n</function>";
constexpr size_t kMaxKeyBytes = 256;

class Qwen3CoderReader final : public CallReader {
 public:
  using CallReader::CallReader;
  std::vector<std::string_view> markers() const override { return {kBegin, kFunctionBegin}; }
  void Start(std::string_view marker) override {
    is_bare_ = marker == kFunctionBegin;
    cursor_.Start(marker.size());
    step_ = is_bare_ ? Step::kName : Step::kFunction;
    arguments_.Take();
  }
  State Read(std::string_view text, bool at_end, CallBlock* block) override {
    while (true) {
      std::string_view found;
      Match match = Match::kNo;
      switch (step_) {
        case Step::kFunction:
          cursor_.SkipSpace(text);
          match = cursor_.Take(text, kFunctionBegin);
          if (match == Match::kYes) step_ = Step::kName;
          break;
        case Step::kName:
          match = cursor_.Name(text, ">", tools_, &name_);
          if (match != Match::kYes) break;
          cursor_.Take(text, ">");
          step_ = Step::kNext;
          break;
        case Step::kNext:
          cursor_.SkipSpace(text);
          match = cursor_.Take(text, kParameter);
          if (match == Match::kYes) {
            step_ = Step::kKey;
          } else if (const Match end = cursor_.Take(text, kFunctionEnd); end != Match::kNo) {
            match = end;
            if (end == Match::kYes) {
              function_end_ = cursor_.at();
              step_ = Step::kClose;
            }
          }
          break;
        case Step::kKey:
          match = cursor_.Until(text, ">", kMaxKeyBytes, &found);
          if (match != Match::kYes) break;
          key_ = found;
          cursor_.Take(text, ">");
          value_ = searched_ = cursor_.at();
          step_ = Step::kValue;
          break;
        case Step::kValue:
          match = Value(text);
          break;
        case Step::kClose:
          cursor_.SkipSpace(text);
          match = cursor_.Take(text, kEnd);
          if (match == Match::kMore && !at_end) return State::kMore;
          if (match == Match::kNo && !is_bare_) return State::kBroken;
          block->size = match == Match::kYes || (at_end && !is_bare_)
                            ? std::max(cursor_.at(), match == Match::kMore ? text.size() : 0)
                            : function_end_;
          block->calls.push_back({name_, arguments_.Take(), ""});
          return State::kDone;
      }
      if (match == Match::kMore) return State::kMore;
      if (match == Match::kNo) return State::kBroken;
    }
  }

 private:
  using Match = TextCursor::Match;
  enum class Step : uint8_t { kFunction, kName, kNext, kKey, kValue, kClose };

  // The end that begins first; none of them can begin inside another.
  Match Value(std::string_view text) {
    size_t end = std::string_view::npos, behind = 0;
    for (const std::string_view tag : {kParameterEnd, kNextLine, kFunctionEndLine}) {
      const size_t at = text.find(tag, searched_);
      if (at >= end) continue;
      end = at;
      behind = tag == kParameterEnd ? at + tag.size() : at;
    }
    if (end == std::string_view::npos) {
      searched_ = std::max(value_, text.size() - std::min(text.size(), kParameterEnd.size()));
      return Match::kMore;
    }
    std::string_view raw = text.substr(value_, end - value_);
    if (raw.starts_with('\n')) raw.remove_prefix(1);
    if (raw.ends_with('\n')) raw.remove_suffix(1);
    arguments_.Add(tools_, name_, key_, raw);
    cursor_.Start(behind);
    step_ = Step::kNext;
    return Match::kYes;
  }

  Step step_ = Step::kFunction;
  bool is_bare_ = false;
  TextCursor cursor_;
  std::string name_, key_;
  size_t value_ = 0, searched_ = 0, function_end_ = 0;
  RawArguments arguments_;
};

}  // namespace

std::unique_ptr<CallReader> MakeQwen3CoderReader(const ToolSet& tools) {
  return std::make_unique<Qwen3CoderReader>(tools);
}

}  // namespace oscar
