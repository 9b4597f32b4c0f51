#include "toolcall/call_parser.h"

#include <algorithm>
#include <random>
#include <utility>

#include "base/check.h"

namespace oscar {
namespace {

constexpr std::string_view kSpace = " \t\r\n";
constexpr size_t kShortId = 9, kLongId = 24;

std::string RandomId(size_t size) {
  constexpr std::string_view kLetters =
      "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
  thread_local std::random_device device;
  std::string id;
  while (id.size() < size) id += kLetters[device() % kLetters.size()];
  return id;
}

bool IsShortId(std::string_view id) {
  return id.size() == kShortId && std::ranges::all_of(id, [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
         });
}

std::unique_ptr<CallReader> MakeReader(CallFormat format, const ToolSet& tools) {
  switch (format) {
    case CallFormat::kHermes:
      return MakeHermesReader(tools);
    case CallFormat::kQwen3Coder:
      return MakeQwen3CoderReader(tools);
    case CallFormat::kLlama3:
      return MakeLlama3Reader(tools);
    case CallFormat::kGlm:
      return MakeGlmReader(tools);
    case CallFormat::kMiniMax:
      return MakeMiniMaxReader(tools);
    case CallFormat::kMistral:
    case CallFormat::kMistralList:
      return MakeMistralReader(tools);
    case CallFormat::kNone:
    case CallFormat::kHarmony:  // HarmonyParser
      break;
  }
  OSCAR_CHECK(false);
}

}  // namespace

CallCounter::CallCounter(const AnswerSyntax& syntax)
    : parallel_(syntax.parallel_calls),
      short_ids_(syntax.calls == CallFormat::kMistral || syntax.calls == CallFormat::kMistralList) {
}

void CallCounter::Give(ReadCall call, ParsedPiece* out) {
  if (ended()) return;
  const auto is_taken = [&](const std::string& id) {
    return std::ranges::find(ids_, id) != ids_.end();
  };
  // The model's own id where its template would take it back.
  std::string id = short_ids_ && IsShortId(call.id) ? call.id : std::string();
  while (id.empty() || is_taken(id)) {
    id = short_ids_ ? RandomId(kShortId) : "call_" + RandomId(kLongId);
  }
  ids_.push_back(id);
  out->tool_calls.push_back(
      {count_++, std::move(id), std::move(call.name), std::move(call.arguments)});
}

CallParser::CallParser(const AnswerSyntax& syntax)
    : tools_(syntax.tools), reader_(MakeReader(syntax.calls, *tools_)), counter_(syntax) {}

void CallParser::Push(std::string_view text, ParsedPiece* out) {
  held_.append(text);
  Step(false, out);
}

void CallParser::Finish(bool, ParsedPiece* out) { Step(true, out); }

// The first `size` bytes of what is held are content.
void CallParser::Say(size_t size, ParsedPiece* out) {
  std::string_view text = std::string_view(held_).substr(0, size);
  if (after_call_) text.remove_prefix(std::min(text.find_first_not_of(kSpace), text.size()));
  if (const size_t last = text.find_last_not_of(kSpace); last != std::string_view::npos) {
    out->content += std::exchange(space_, {});
    out->content += text.substr(0, last + 1);
    text.remove_prefix(last + 1);
    said_ = has_content_ = true;
    after_call_ = false;
  }
  if (!after_call_) space_ += text;
  held_.erase(0, size);
  searched_ -= std::min(searched_, size);
}

void CallParser::Step(bool at_end, ParsedPiece* out) {
  while (!ended()) {
    if (marker_size_ == 0 && !FindCall(at_end, out)) break;
    CallBlock block;
    const CallReader::State state = reader_->Read(held_, at_end, &block);
    if (state == CallReader::State::kMore && !at_end) return;
    if (state == CallReader::State::kDone) {
      for (ReadCall& call : block.calls) counter_.Give(std::move(call), out);
      held_.erase(0, block.size);
      if (!has_content_) space_.clear();  // else it separates what is said before from what follows
      said_ = after_call_ = true;
    } else {  // broken, or the answer ends inside it
      Say(state == CallReader::State::kMore ? held_.size() : marker_size_, out);
    }
    marker_size_ = searched_ = 0;
  }
  if (at_end) {
    if (!ended() && !after_call_) out->content += space_;
    space_.clear();
    held_.clear();
  }
}

// Says what is before the next marker. False where there is none yet.
bool CallParser::FindCall(bool at_end, ParsedPiece* out) {
  const std::string_view text = held_;
  size_t first = std::string_view::npos, held = 0;
  std::string_view marker;
  const auto consider = [&](std::string_view candidate, size_t at) {
    if (at < first) {
      first = at;
      marker = candidate;
    }
  };
  for (const std::string_view candidate : reader_->markers()) {
    consider(candidate, text.find(candidate, searched_));
    for (size_t size = std::min(text.size(), candidate.size() - 1); size > held; --size) {
      if (text.ends_with(candidate.substr(0, size))) {
        held = size;
        break;
      }
    }
  }
  if (!said_) {
    const size_t begin = std::min(text.find_first_not_of(kSpace), text.size());
    for (const std::string_view candidate : reader_->start_markers()) {
      if (text.substr(begin).starts_with(candidate)) consider(candidate, begin);
    }
  }
  if (first == std::string_view::npos) {
    Say(at_end ? text.size() : text.size() - held, out);
    return false;
  }
  Say(first, out);
  marker_size_ = marker.size();
  reader_->Start(marker);
  return true;
}

}  // namespace oscar
