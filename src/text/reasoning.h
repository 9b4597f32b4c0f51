// Separates a model's reasoning from its answer while both are generated. One object a stream; not
// for sharing between threads.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace oscar {

struct ReasoningFormat {
  std::string open = "<think>";
  std::string close = "</think>";
};

class ReasoningSplitter {
 public:
  struct Output {
    std::string reasoning;
    std::string content;
  };

  // `starts_inside`: the prompt has opened the block (ChatPrompt::EndsWith). A model that
  // opens it once more is understood.
  ReasoningSplitter(ReasoningFormat format, bool starts_inside);

  // Text may be cut anywhere, in the middle of a tag as well: what may yet become a tag, or
  // whitespace beside one, is held back. Reasoning counts only at the start of the answer; a tag
  // further on is content.
  Output Push(std::string_view text);
  Output Finish();

  bool in_reasoning() const { return state_ == State::kReasoning; }
  // Reasoning has ended, or there is none: what follows is content.
  bool is_over() const { return state_ == State::kAfter || state_ == State::kContent; }

 private:
  enum class State : uint8_t { kStart, kReasoning, kAfter, kContent };
  void Step(bool at_end, Output* out);

  ReasoningFormat format_;
  bool starts_inside_;
  State state_ = State::kStart;
  bool reasoning_seen_ = false;  // something but whitespace has been given out
  std::string held_;
};

}  // namespace oscar
