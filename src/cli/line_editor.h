// Lines typed or pasted into a terminal, read without the kernel's line discipline, which cuts a
// line at 4095 bytes and ends it at every newline of a paste.
//
// LineBuffer is the text being edited: keys in, the picture of one terminal row out; it knows no
// terminal. LineEditor puts one on a terminal: it holds the terminal in its own mode (signals stay
// on) from construction to destruction and gives it back whenever the process stops or dies of a
// signal that can be caught. One LineEditor at a time, one thread.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace oscar::cli {

class LineBuffer {
 public:
  enum class Event { kNone, kLine, kEnd };

  // Takes bytes as they come from the keyboard, up to the first that ends the line (Enter; Ctrl-D
  // on an empty line); `*used` says how many. What is between bracketed-paste marks is text.
  Event Feed(std::string_view bytes, size_t* used);
  // The line that has ended; the next one is empty. Lines can be called back with the cursor keys.
  std::string Take();
  // Forgets the line, and a paste or an escape sequence in the middle.
  void Clear();

  const std::string& text() const { return text_; }
  size_t cursor() const { return cursor_; }

  // The part of the text around the cursor that fits `columns` terminal columns, control
  // characters replaced by something to see; `*cursor_column` is where in it the cursor stands.
  std::string Render(int columns, int* cursor_column);

 private:
  enum class State { kText, kEscape, kSequence, kShift3, kPaste };
  bool BreaksSequence(char byte) const;
  Event Key(char byte);
  void Sequence(std::string_view sequence);
  void Insert(std::string_view bytes);
  void EndPaste();
  void Erase(size_t from, size_t to);
  void Recall(ptrdiff_t step);
  size_t Before(size_t at) const;
  size_t After(size_t at) const;
  size_t WordBefore(size_t at) const;

  std::string text_;
  size_t cursor_ = 0;  // in bytes, at a character
  size_t first_ = 0;   // of what is shown
  State state_ = State::kText;
  std::string sequence_, paste_;
  std::vector<std::string> history_;
  size_t recalled_ = 0;  // in the history; its size: the line being typed, kept in draft_
  std::string draft_;
};

class LineEditor {
 public:
  enum class Event { kLine, kInterrupted, kEnd };

  // Whether standard input is a terminal that can show an editor, and the descriptor to write
  // to; -1 where not.
  static int EditingFd();

  // `out` is EditingFd().
  explicit LineEditor(int out);
  ~LineEditor();
  LineEditor(const LineEditor&) = delete;
  LineEditor& operator=(const LineEditor&) = delete;

  // REQUIRES: an InterruptScope. What was typed ahead counts.
  Event Next(std::string_view prompt, std::string* line);

 private:
  void Render(std::string_view prompt);

  LineBuffer buffer_;
  std::string pending_;  // read, not yet fed
};

}  // namespace oscar::cli
