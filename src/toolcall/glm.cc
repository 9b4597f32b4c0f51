// <tool_call>f\n<arg_key>p</arg_key>\n<arg_value>value</arg_value>\n</tool_call>: GLM-4.5 and 4.6;
// GLM-4.7 writes the same without newlines. Values are verbatim. Only the end tag shows that no
// argument is missing.
#include "toolcall/call_reader.h"

namespace oscar {
namespace {

constexpr std::string_view kBegin = "<tool_call>", kEnd = "</tool_call>";
constexpr std::string_view kKeyBegin = "<arg_key>", kKeyEnd = "</arg_key>";
constexpr std::string_view kValueBegin = "<arg_value>", kValueEnd = "</arg_value>";
constexpr size_t kMaxKeyBytes = 256;

class GlmReader final : public CallReader {
 public:
  using CallReader::CallReader;
  std::vector<std::string_view> markers() const override { return {kBegin}; }
  void Start(std::string_view marker) override {
    cursor_.Start(marker.size());
    step_ = Step::kName;
    arguments_.Take();
  }
  State Read(std::string_view text, bool, CallBlock* block) override {
    while (true) {
      std::string_view found;
      Match match = Match::kNo;
      switch (step_) {
        case Step::kName:
          cursor_.SkipSpace(text);
          match = cursor_.Name(text, "< \t\r\n", tools_, &name_);
          if (match == Match::kYes) step_ = Step::kNext;
          break;
        case Step::kNext:
          cursor_.SkipSpace(text);
          match = cursor_.Take(text, kKeyBegin);
          if (match == Match::kYes) {
            step_ = Step::kKey;
          } else if (const Match end = cursor_.Take(text, kEnd); end != Match::kNo) {
            if (end == Match::kMore) return State::kMore;
            block->size = cursor_.at();
            block->calls.push_back({name_, arguments_.Take(), ""});
            return State::kDone;
          }
          break;
        case Step::kKey:
          match = cursor_.Until(text, kKeyEnd, kMaxKeyBytes, &found);
          if (match != Match::kYes) break;
          key_ = found;
          cursor_.Take(text, kKeyEnd);
          step_ = Step::kOpenValue;
          break;
        case Step::kOpenValue:
          cursor_.SkipSpace(text);
          match = cursor_.Take(text, kValueBegin);
          if (match == Match::kYes) step_ = Step::kValue;
          break;
        case Step::kValue:
          match = cursor_.Until(text, kValueEnd, text.size(), &found);
          if (match != Match::kYes) break;
          arguments_.Add(tools_, name_, key_, found);
          cursor_.Take(text, kValueEnd);
          step_ = Step::kNext;
          break;
      }
      if (match == Match::kMore) return State::kMore;
      if (match == Match::kNo) return State::kBroken;
    }
  }

 private:
  using Match = TextCursor::Match;
  enum class Step : uint8_t { kName, kNext, kKey, kOpenValue, kValue };
  Step step_ = Step::kName;
  TextCursor cursor_;
  std::string name_, key_;
  RawArguments arguments_;
};

}  // namespace

std::unique_ptr<CallReader> MakeGlmReader(const ToolSet& tools) {
  return std::make_unique<GlmReader>(tools);
}

}  // namespace oscar
