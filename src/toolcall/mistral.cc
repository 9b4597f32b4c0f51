// [TOOL_CALLS][{"name": "f", "arguments": {...}, "id": "123456789"}, ...]: Mistral Nemo.
// [TOOL_CALLS]f[CALL_ID]123456789[ARGS]{...}, one marker per call: Mistral Small 3.2; without
// [CALL_ID]: Ministral 3. The markers are special tokens.
#include <algorithm>

#include "toolcall/call_reader.h"
#include "toolcall/json_scanner.h"

namespace oscar {
namespace {

constexpr std::string_view kBegin = "[TOOL_CALLS]", kCallId = "[CALL_ID]", kArgs = "[ARGS]";
constexpr size_t kMaxIdBytes = 64;

class MistralReader final : public CallReader {
 public:
  using CallReader::CallReader;
  std::vector<std::string_view> markers() const override { return {kBegin}; }
  void Start(std::string_view marker) override {
    cursor_.Start(marker.size());
    step_ = Step::kOpen;
    call_ = {};
    calls_.clear();
  }
  State Read(std::string_view text, bool at_end, CallBlock* block) override {
    const Match match = Advance(text);
    if (match == Match::kMore && !at_end) return State::kMore;
    if (calls_.empty()) return match == Match::kNo ? State::kBroken : State::kMore;
    // The list may lack its end; anything else behind a whole call is text.
    block->size = match == Match::kYes ? cursor_.at() : whole_end_;
    block->calls = std::move(calls_);
    return State::kDone;
  }

 private:
  using Match = TextCursor::Match;
  enum class Step : uint8_t { kOpen, kName, kAfterName, kId, kObject, kJson, kBetween };

  Match Advance(std::string_view text) {
    while (true) {
      std::string_view found;
      Match match = Match::kNo;
      switch (step_) {
        case Step::kOpen:
          cursor_.SkipSpace(text);
          match = cursor_.Take(text, "[");
          if (match == Match::kMore) break;
          is_list_ = match == Match::kYes;
          step_ = is_list_ ? Step::kObject : Step::kName;
          match = Match::kYes;
          break;
        case Step::kName:
          match = cursor_.Name(text, "[", tools_, &call_.name);
          if (match == Match::kYes) step_ = Step::kAfterName;
          break;
        case Step::kAfterName:
          match = cursor_.Take(text, kArgs);
          if (match == Match::kYes) {
            step_ = Step::kObject;
          } else if (const Match id = cursor_.Take(text, kCallId); id != Match::kNo) {
            match = id;
            if (id == Match::kYes) step_ = Step::kId;
          }
          break;
        case Step::kId:
          match = cursor_.Until(text, kArgs, kMaxIdBytes, &found);
          if (match != Match::kYes) break;
          call_.id = found;
          cursor_.Take(text, kArgs);
          step_ = Step::kObject;
          break;
        case Step::kObject:
          cursor_.SkipSpace(text);
          begin_ = cursor_.at();
          if (begin_ == text.size()) return Match::kMore;
          scanner_.Start(begin_);
          step_ = Step::kJson;
          match = Match::kYes;
          break;
        case Step::kJson: {
          const JsonScanner::State state = scanner_.Scan(text);
          if (state == JsonScanner::State::kMore) return Match::kMore;
          if (state == JsonScanner::State::kBroken) return Match::kNo;
          const std::string_view json = text.substr(begin_, scanner_.end() - begin_);
          if (is_list_) {
            call_ = {};
            if (!ReadJsonCall(json, tools_, &call_)) return Match::kNo;
          } else {
            if (!IsJsonObject(json)) return Match::kNo;
            call_.arguments = json;
          }
          calls_.push_back(std::move(call_));
          cursor_.Start(scanner_.end());
          whole_end_ = cursor_.at();
          if (!is_list_) return Match::kYes;
          step_ = Step::kBetween;
          match = Match::kYes;
          break;
        }
        case Step::kBetween:
          cursor_.SkipSpace(text);
          if (cursor_.Take(text, "]") == Match::kYes) return Match::kYes;
          match = cursor_.Take(text, ",");
          if (match == Match::kYes) step_ = Step::kObject;
          break;
      }
      if (match != Match::kYes) return match;
    }
  }

  Step step_ = Step::kOpen;
  bool is_list_ = false;
  TextCursor cursor_;
  JsonScanner scanner_;
  size_t begin_ = 0, whole_end_ = 0;
  ReadCall call_;
  std::vector<ReadCall> calls_;
};

}  // namespace

std::unique_ptr<CallReader> MakeMistralReader(const ToolSet& tools) {
  return std::make_unique<MistralReader>(tools);
}

}  // namespace oscar
