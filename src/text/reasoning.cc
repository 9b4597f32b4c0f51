#include "text/reasoning.h"

#include <algorithm>
#include <utility>

namespace oscar {
namespace {

constexpr std::string_view kSpace = " \t\r\n";

// Bytes at the end of `text` that begin `tag` but do not complete it.
size_t PartialTag(std::string_view text, std::string_view tag) {
  for (size_t length = std::min(text.size(), tag.size() - 1); length > 0; --length) {
    if (text.ends_with(tag.substr(0, length))) return length;
  }
  return 0;
}

}  // namespace

ReasoningSplitter::ReasoningSplitter(ReasoningFormat format, bool starts_inside)
    : format_(std::move(format)), starts_inside_(starts_inside) {}

ReasoningSplitter::Output ReasoningSplitter::Push(std::string_view text) {
  Output out;
  held_.append(text);
  Step(false, &out);
  return out;
}

ReasoningSplitter::Output ReasoningSplitter::Finish() {
  Output out;
  Step(true, &out);
  return out;
}

void ReasoningSplitter::Step(bool at_end, Output* out) {
  if (state_ == State::kStart) {
    const size_t begin = std::min(held_.find_first_not_of(kSpace), held_.size());
    const std::string_view rest = std::string_view(held_).substr(begin);
    if (rest.starts_with(format_.open)) {
      held_.erase(0, begin + format_.open.size());
      state_ = State::kReasoning;
    } else if (!at_end && std::string_view(format_.open).starts_with(rest)) {
      return;  // may yet become the tag
    } else {
      state_ = starts_inside_ ? State::kReasoning : State::kContent;
    }
  }
  if (state_ == State::kReasoning) {
    const size_t close = held_.find(format_.close);
    size_t end = close;
    if (close == std::string::npos) {
      end = at_end ? held_.size() : held_.size() - PartialTag(held_, format_.close);
    }
    // Whitespace at either end of the reasoning is not part of it.
    size_t begin = 0;
    if (!reasoning_seen_) begin = std::min(held_.find_first_not_of(kSpace), end);
    const std::string_view body = std::string_view(held_).substr(begin, end - begin);
    const size_t last = body.find_last_not_of(kSpace);
    const size_t kept = last == std::string_view::npos ? 0 : last + 1;
    out->reasoning.append(body.substr(0, kept));
    reasoning_seen_ |= kept > 0;
    if (close == std::string::npos) {
      held_.erase(0, at_end ? held_.size() : begin + kept);
      return;
    }
    held_.erase(0, close + format_.close.size());
    state_ = State::kAfter;
  }
  if (state_ == State::kAfter) {
    held_.erase(0, std::min(held_.find_first_not_of(kSpace), held_.size()));
    if (held_.empty()) return;
    state_ = State::kContent;
  }
  out->content.append(held_);
  held_.clear();
}

}  // namespace oscar
