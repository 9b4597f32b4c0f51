// <tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>: Hermes 2 and 3, Qwen2.5, Qwen3. The
// JSON is read by its own rules: a closing tag inside a string ends nothing. An answer that ends
// behind the JSON has a whole call.
#include "toolcall/call_reader.h"
#include "toolcall/json_scanner.h"

namespace oscar {
namespace {

constexpr std::string_view kBegin = "<tool_call>", kEnd = "</tool_call>";

class HermesReader final : public CallReader {
 public:
  using CallReader::CallReader;
  std::vector<std::string_view> markers() const override { return {kBegin}; }
  void Start(std::string_view marker) override {
    cursor_.Start(marker.size());
    step_ = Step::kOpen;
  }
  State Read(std::string_view text, bool at_end, CallBlock* block) override {
    if (step_ == Step::kOpen) {
      cursor_.SkipSpace(text);
      begin_ = cursor_.at();
      if (begin_ == text.size()) return State::kMore;
      scanner_.Start(begin_);
      step_ = Step::kJson;
    }
    if (step_ == Step::kJson) {
      const JsonScanner::State state = scanner_.Scan(text);
      if (state == JsonScanner::State::kBroken) return State::kBroken;
      if (state == JsonScanner::State::kMore) return State::kMore;
      call_ = {};
      if (!ReadJsonCall(text.substr(begin_, scanner_.end() - begin_), tools_, &call_)) {
        return State::kBroken;
      }
      cursor_.Start(scanner_.end());
      step_ = Step::kClose;
    }
    cursor_.SkipSpace(text);
    const auto match = cursor_.Take(text, kEnd);
    if (match == TextCursor::Match::kNo) return State::kBroken;
    if (match == TextCursor::Match::kMore && !at_end) return State::kMore;
    block->size = match == TextCursor::Match::kYes ? cursor_.at() : text.size();
    block->calls.push_back(std::move(call_));
    return State::kDone;
  }

 private:
  enum class Step : uint8_t { kOpen, kJson, kClose };
  Step step_ = Step::kOpen;
  TextCursor cursor_;
  JsonScanner scanner_;
  size_t begin_ = 0;
  ReadCall call_;
};

}  // namespace

std::unique_ptr<CallReader> MakeHermesReader(const ToolSet& tools) {
  return std::make_unique<HermesReader>(tools);
}

}  // namespace oscar
