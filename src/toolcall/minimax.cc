// <minimax:tool_call>\n<invoke name="f">\n<parameter name="p">value</parameter>\n</invoke>\n
// </minimax:tool_call>, with any number of calls inside: MiniMax-M2. Values are verbatim.
#include <algorithm>

#include "toolcall/call_reader.h"

namespace oscar {
namespace {

constexpr std::string_view kBegin = "<minimax:tool_call>", kEnd = "</minimax:tool_call>";
constexpr std::string_view kInvokeBegin = "<invoke name=\"", kInvokeEnd = "</invoke>";
constexpr std::string_view kParameter = "<parameter name=\"", kParameterEnd = "</parameter>";
constexpr std::string_view kNameEnd = "\">";
constexpr size_t kMaxKeyBytes = 256;

class MiniMaxReader final : public CallReader {
 public:
  using CallReader::CallReader;
  std::vector<std::string_view> markers() const override { return {kBegin}; }
  void Start(std::string_view marker) override {
    cursor_.Start(marker.size());
    step_ = Step::kInvoke;
    calls_.clear();
    arguments_.Take();
  }
  State Read(std::string_view text, bool at_end, CallBlock* block) override {
    const Match match = Advance(text);
    if (match == Match::kMore && !at_end) return State::kMore;
    if (calls_.empty()) return match == Match::kNo ? State::kBroken : State::kMore;
    // What follows the last whole call is text, unless it is the end tag or, at the end, its begin.
    block->size = match == Match::kYes || (at_end && step_ == Step::kInvoke && IsCutEnd(text))
                      ? std::max(cursor_.at(), match == Match::kYes ? 0 : text.size())
                      : whole_end_;
    block->calls = std::move(calls_);
    return State::kDone;
  }

 private:
  using Match = TextCursor::Match;
  enum class Step : uint8_t { kInvoke, kName, kNext, kKey, kValue };

  bool IsCutEnd(std::string_view text) const { return kEnd.starts_with(text.substr(cursor_.at())); }
  // kYes: behind the end tag.
  Match Advance(std::string_view text) {
    while (true) {
      std::string_view found;
      Match match = Match::kNo;
      switch (step_) {
        case Step::kInvoke:
          cursor_.SkipSpace(text);
          match = cursor_.Take(text, kInvokeBegin);
          if (match == Match::kYes) {
            step_ = Step::kName;
          } else if (!calls_.empty()) {
            const Match end = cursor_.Take(text, kEnd);
            if (end == Match::kYes) return Match::kYes;
            if (end == Match::kMore) match = Match::kMore;
          }
          break;
        case Step::kName:
          match = cursor_.Name(text, "\"", tools_, &name_);
          if (match != Match::kYes) break;
          match = cursor_.Take(text, kNameEnd);
          if (match == Match::kYes) step_ = Step::kNext;
          if (match == Match::kMore) cursor_.Start(cursor_.at() - name_.size());
          break;
        case Step::kNext:
          cursor_.SkipSpace(text);
          match = cursor_.Take(text, kParameter);
          if (match == Match::kYes) {
            step_ = Step::kKey;
          } else if (const Match end = cursor_.Take(text, kInvokeEnd); end != Match::kNo) {
            match = end;
            if (end == Match::kMore) break;
            calls_.push_back({name_, arguments_.Take(), ""});
            whole_end_ = cursor_.at();
            step_ = Step::kInvoke;
          }
          break;
        case Step::kKey:
          match = cursor_.Until(text, kNameEnd, kMaxKeyBytes, &found);
          if (match != Match::kYes) break;
          key_ = found;
          cursor_.Take(text, kNameEnd);
          step_ = Step::kValue;
          break;
        case Step::kValue:
          match = cursor_.Until(text, kParameterEnd, text.size(), &found);
          if (match != Match::kYes) break;
          arguments_.Add(tools_, name_, key_, found);
          cursor_.Take(text, kParameterEnd);
          step_ = Step::kNext;
          break;
      }
      if (match != Match::kYes) return match;
    }
  }

  Step step_ = Step::kInvoke;
  TextCursor cursor_;
  std::string name_, key_;
  size_t whole_end_ = 0;
  std::vector<ReadCall> calls_;
  RawArguments arguments_;
};

}  // namespace

std::unique_ptr<CallReader> MakeMiniMaxReader(const ToolSet& tools) {
  return std::make_unique<MiniMaxReader>(tools);
}

}  // namespace oscar
