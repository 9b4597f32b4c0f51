#include "cli/line_editor.h"

#include <fmt/core.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>
#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <iterator>
#include <utility>

#include "cli/interrupt.h"

namespace oscar::cli {
namespace {

constexpr std::string_view kPasteBegin = "200~", kPasteEnd = "\x1b[201~";
constexpr size_t kMaxSequence = 32, kMaxHistory = 1000;
constexpr int kDefaultColumns = 80;

constexpr char Ctrl(char letter) { return static_cast<char>(letter & 0x1F); }

bool IsContinuation(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

struct Glyph {
  std::string_view shown;
  int columns;
  size_t bytes;  // of the text
};

Glyph GlyphAt(std::string_view text, size_t at) {
  const char byte = text[at];
  if (byte == '\n') return {"\u21B5", 1, 1};
  if (byte == '\t') return {" ", 1, 1};
  utf8proc_int32_t code = -1;
  const auto* from = reinterpret_cast<const utf8proc_uint8_t*>(text.data() + at);
  const utf8proc_ssize_t size =
      utf8proc_iterate(from, static_cast<utf8proc_ssize_t>(text.size() - at), &code);
  if (size <= 0) return {"?", 1, 1};
  const auto bytes = static_cast<size_t>(size);
  const utf8proc_category_t category = utf8proc_category(code);
  if (category == UTF8PROC_CATEGORY_ZL || category == UTF8PROC_CATEGORY_ZP) {
    return {"\u21B5", 1, bytes};
  }
  if (category == UTF8PROC_CATEGORY_CC || category == UTF8PROC_CATEGORY_CF) return {"", 0, bytes};
  return {text.substr(at, bytes), utf8proc_charwidth(code), bytes};
}

}  // namespace

// --- The text ------------------------------------------------------------------------------------

LineBuffer::Event LineBuffer::Feed(std::string_view bytes, size_t* used) {
  *used = 0;
  while (*used < bytes.size()) {
    if (BreaksSequence(bytes[*used])) state_ = State::kText;
    if (state_ == State::kText) {  // a run of plain text goes in at once
      const std::string_view rest = bytes.substr(*used);
      const auto end = std::ranges::find_if(rest, [](char c) {
        return (static_cast<unsigned char>(c) < 0x20 && c != '\t') || c == 0x7F;
      });
      const auto run = static_cast<size_t>(end - rest.begin());
      if (run > 0) {
        Insert(rest.substr(0, run));
        *used += run;
        continue;
      }
    }
    const Event event = Key(bytes[(*used)++]);
    if (event != Event::kNone) return event;
  }
  return Event::kNone;
}

// What no key's sequence holds: Esc was pressed alone, or the sequence was cut short.
bool LineBuffer::BreaksSequence(char byte) const {
  const auto code = static_cast<unsigned char>(byte);
  switch (state_) {
    case State::kEscape:
      return code >= 0x80;
    case State::kSequence:
    case State::kShift3:
      return code < 0x20 || code >= 0x7F;
    default:
      return false;
  }
}

LineBuffer::Event LineBuffer::Key(char byte) {
  switch (state_) {
    case State::kText:
      break;
    case State::kEscape:
      if (byte == 0x1B) return Event::kNone;  // Esc, then a key that begins with one
      sequence_.clear();
      state_ = byte == '[' ? State::kSequence : byte == 'O' ? State::kShift3 : State::kText;
      if (byte == '\r' || byte == '\n') Insert("\n");  // Alt-Enter
      return Event::kNone;
    case State::kSequence:
      sequence_ += byte;
      // Linux's console has another letter after a second bracket: F1 is ESC [ [ A.
      if ((byte >= 0x40 && byte <= 0x7E && sequence_ != "[") || sequence_.size() > kMaxSequence) {
        state_ = State::kText;
        Sequence(sequence_);
      }
      return Event::kNone;
    case State::kShift3:
      state_ = State::kText;
      Sequence({&byte, 1});
      return Event::kNone;
    case State::kPaste:
      paste_ += byte;
      if (paste_.ends_with(kPasteEnd)) EndPaste();
      return Event::kNone;
  }
  switch (byte) {
    case '\r':
    case '\n':
      return Event::kLine;
    case Ctrl('D'):
      if (text_.empty()) return Event::kEnd;
      Erase(cursor_, After(cursor_));
      break;
    case Ctrl('H'):
    case 0x7F:
      Erase(Before(cursor_), cursor_);
      break;
    case Ctrl('W'):
      Erase(WordBefore(cursor_), cursor_);
      break;
    case Ctrl('U'):
      Erase(0, cursor_);
      break;
    case Ctrl('K'):
      Erase(cursor_, text_.size());
      break;
    case Ctrl('A'):
      cursor_ = 0;
      break;
    case Ctrl('E'):
      cursor_ = text_.size();
      break;
    case Ctrl('B'):
      cursor_ = Before(cursor_);
      break;
    case Ctrl('F'):
      cursor_ = After(cursor_);
      break;
    case Ctrl('P'):
      Recall(-1);
      break;
    case Ctrl('N'):
      Recall(1);
      break;
    case 0x1B:
      state_ = State::kEscape;
      break;
    default:  // other control characters mean nothing here
      break;
  }
  return Event::kNone;
}

void LineBuffer::Sequence(std::string_view sequence) {
  if (sequence == kPasteBegin) {
    paste_.clear();
    state_ = State::kPaste;
  } else if (sequence == "A") {
    Recall(-1);
  } else if (sequence == "B") {
    Recall(1);
  } else if (sequence == "C") {
    cursor_ = After(cursor_);
  } else if (sequence == "D") {
    cursor_ = Before(cursor_);
  } else if (sequence == "H" || sequence == "1~" || sequence == "7~") {
    cursor_ = 0;
  } else if (sequence == "F" || sequence == "4~" || sequence == "8~") {
    cursor_ = text_.size();
  } else if (sequence == "3~") {
    Erase(cursor_, After(cursor_));
  }
}

void LineBuffer::EndPaste() {
  state_ = State::kText;
  paste_.resize(paste_.size() - kPasteEnd.size());
  // Terminals send the ends of lines as Enter.
  std::string lines;
  lines.reserve(paste_.size());
  for (size_t i = 0; i < paste_.size(); ++i) {
    if (paste_[i] == '\n' && i > 0 && paste_[i - 1] == '\r') continue;
    lines += paste_[i] == '\r' ? '\n' : paste_[i];
  }
  paste_.clear();
  Insert(lines);
}

void LineBuffer::Insert(std::string_view bytes) {
  first_ = std::min(first_, cursor_);  // it stays at a character
  text_.insert(cursor_, bytes);
  cursor_ += bytes.size();
}

void LineBuffer::Erase(size_t from, size_t to) {
  first_ = std::min(first_, from);
  text_.erase(from, to - from);
  cursor_ = from;
}

size_t LineBuffer::Before(size_t at) const {
  if (at > 0) --at;
  while (at > 0 && IsContinuation(text_[at])) --at;
  return at;
}

size_t LineBuffer::After(size_t at) const {
  if (at < text_.size()) ++at;
  while (at < text_.size() && IsContinuation(text_[at])) ++at;
  return at;
}

size_t LineBuffer::WordBefore(size_t at) const {
  const auto is_space = [&](size_t i) {
    return text_[i] == ' ' || text_[i] == '\t' || text_[i] == '\n';
  };
  while (at > 0 && is_space(at - 1)) --at;
  while (at > 0 && !is_space(at - 1)) --at;
  return at;
}

void LineBuffer::Recall(ptrdiff_t step) {
  const ptrdiff_t wanted = static_cast<ptrdiff_t>(recalled_) + step;
  if (wanted < 0 || wanted > std::ssize(history_)) return;
  if (recalled_ == history_.size()) draft_ = text_;
  recalled_ = static_cast<size_t>(wanted);
  text_ = recalled_ == history_.size() ? draft_ : history_[recalled_];
  cursor_ = text_.size();
  first_ = 0;
}

std::string LineBuffer::Take() {
  std::string line = std::move(text_);
  if (!line.empty() && (history_.empty() || history_.back() != line)) {
    if (history_.size() == kMaxHistory) history_.erase(history_.begin());
    history_.push_back(line);
  }
  Clear();
  return line;
}

void LineBuffer::Clear() {
  text_.clear();
  cursor_ = first_ = 0;
  state_ = State::kText;
  sequence_.clear();
  paste_.clear();
  draft_.clear();
  recalled_ = history_.size();
}

std::string LineBuffer::Render(int columns, int* cursor_column) {
  columns = std::max(columns, 2);
  // As far back as the row reaches when the cursor stands at its end; costs a row, not the text.
  const auto back = [&](int room) {
    size_t at = cursor_;
    while (at > 0) {
      const size_t before = Before(at);
      room -= GlyphAt(text_, before).columns;
      if (room < 0) break;
      at = before;
    }
    return at;
  };
  first_ = std::max(first_, back(columns - 1));
  if (first_ >= cursor_) first_ = back(columns / 2);
  std::string row;
  int column = 0;
  *cursor_column = 0;
  for (size_t at = first_; at < text_.size();) {
    const Glyph glyph = GlyphAt(text_, at);
    if (column + glyph.columns > columns) break;
    row += glyph.shown;
    column += glyph.columns;
    at += glyph.bytes;
    if (at <= cursor_) *cursor_column = column;
  }
  return row;
}

// --- The terminal --------------------------------------------------------------------------------

namespace {

// What handlers need to give the terminal back: set before they are, and not changed meanwhile.
struct termios g_saved, g_own;
int g_out = -1;
std::atomic<bool> g_held{false};  // the terminal is in our mode, or to be put back into it

constexpr std::string_view kPasteOn = "\x1b[?2004h", kPasteOff = "\x1b[?2004l";

// All of it is safe in a signal handler.
void WriteAll(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(g_out, bytes.data(), bytes.size());
    if (count < 0 && errno != EINTR) return;
    if (count > 0) bytes.remove_prefix(static_cast<size_t>(count));
  }
}
bool InForeground() { return ::tcgetpgrp(STDIN_FILENO) == ::getpgrp(); }
void TakeTerminal() {
  ::tcsetattr(STDIN_FILENO, TCSADRAIN, &g_own);
  WriteAll(kPasteOn);
}
void GiveTerminalBack() {
  if (!InForeground()) return;  // not ours to set, and SIGTTOU would stop us
  WriteAll(kPasteOff);
  ::tcsetattr(STDIN_FILENO, TCSADRAIN, &g_saved);
}

// Lets the signal do what it does by default, now.
void RaiseByDefault(int signal) {
  struct sigaction standard {};
  standard.sa_handler = SIG_DFL;
  struct sigaction before {};
  ::sigaction(signal, &standard, &before);
  sigset_t set, blocked;
  ::sigemptyset(&set);
  ::sigaddset(&set, signal);
  ::raise(signal);
  ::pthread_sigmask(SIG_UNBLOCK, &set, &blocked);  // it is delivered here
  ::pthread_sigmask(SIG_SETMASK, &blocked, nullptr);
  ::sigaction(signal, &before, nullptr);  // stopped and continued
}

void OnDeadlySignal(int signal) {
  if (g_held.exchange(false)) GiveTerminalBack();
  RaiseByDefault(signal);
}
void TakeTerminalAgain() {
  if (!g_held.load() || !InForeground()) return;
  TakeTerminal();
  InterruptScope::Wake();  // the row is drawn again
}
void OnStop(int signal) {
  const int error = errno;
  if (g_held.load()) GiveTerminalBack();
  RaiseByDefault(signal);
  TakeTerminalAgain();  // a process that no shell would continue is not stopped at all
  errno = error;
}
// Also after a stop that no handler saw.
void OnContinue(int) {
  const int error = errno;
  TakeTerminalAgain();
  errno = error;
}
void OnResize(int) {
  const int error = errno;
  InterruptScope::Wake();
  errno = error;
}

struct Handler {
  int signal;
  void (*function)(int);
};
constexpr auto kHandlers = [] {
  constexpr std::array kDeadly = {SIGHUP,  SIGQUIT, SIGTERM, SIGABRT, SIGPIPE, SIGALRM, SIGUSR1,
                                  SIGUSR2, SIGXCPU, SIGXFSZ, SIGSEGV, SIGBUS,  SIGILL,  SIGFPE};
  std::array<Handler, kDeadly.size() + 3> out{};
  for (size_t i = 0; i < kDeadly.size(); ++i) out[i] = {kDeadly[i], OnDeadlySignal};
  out[kDeadly.size()] = {SIGTSTP, OnStop};
  out[kDeadly.size() + 1] = {SIGCONT, OnContinue};
  out[kDeadly.size() + 2] = {SIGWINCH, OnResize};
  return out;
}();

// A signal that is ignored, as under nohup, or handled by somebody else stays so.
void ReplaceHandler(int signal, void (*from)(int), void (*to)(int)) {
  struct sigaction action {};
  ::sigaction(signal, nullptr, &action);
  if (action.sa_handler != from) return;
  action = {};
  action.sa_handler = to;
  action.sa_flags = SA_RESTART;
  ::sigaction(signal, &action, nullptr);
}

int Columns() {
  struct winsize size {};
  if (::ioctl(g_out, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return kDefaultColumns;
  return size.ws_col;
}

}  // namespace

int LineEditor::EditingFd() {
  const char* term = std::getenv("TERM");
  if (::isatty(STDIN_FILENO) != 1 || (term != nullptr && std::string_view(term) == "dumb")) {
    return -1;
  }
  if (::isatty(STDOUT_FILENO) == 1) return STDOUT_FILENO;
  return ::isatty(STDERR_FILENO) == 1 ? STDERR_FILENO : -1;
}

LineEditor::LineEditor(int out) {
  g_out = out;
  if (::tcgetattr(STDIN_FILENO, &g_saved) != 0) return;
  g_own = g_saved;
  // Bytes as they come, without echo; ISIG and ICRNL stay as they are.
  g_own.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO | IEXTEN);
  g_own.c_cc[VMIN] = 1;
  g_own.c_cc[VTIME] = 0;
  for (const auto& [signal, function] : kHandlers) ReplaceHandler(signal, SIG_DFL, function);
  g_held.store(true);
  TakeTerminal();
}

LineEditor::~LineEditor() {
  if (!g_held.exchange(false)) return;
  GiveTerminalBack();
  for (const auto& [signal, function] : kHandlers) ReplaceHandler(signal, function, SIG_DFL);
}

void LineEditor::Render(std::string_view prompt) {
  const auto indent = static_cast<int>(prompt.size());
  int cursor = 0;
  // The last column stays free: terminals differ in what a full row does.
  const std::string row = buffer_.Render(Columns() - indent - 1, &cursor);
  const auto right = [](int columns) {
    return columns > 0 ? fmt::format("\r\x1b[{}C", columns) : std::string("\r");
  };
  WriteAll(right(indent) + row + "\x1b[K" + right(indent + cursor));
}

LineEditor::Event LineEditor::Next(std::string_view prompt, std::string* line) {
  std::array<char, 4096> bytes;
  const auto drain = [&] {
    while (::read(InterruptScope::WakeFd(), bytes.data(), bytes.size()) > 0) {
    }
  };
  drain();  // of what came while nobody read
  WriteAll(prompt);
  bool dirty = false;
  while (true) {
    size_t used = 0;
    const LineBuffer::Event event = buffer_.Feed(pending_, &used);
    dirty = dirty || used > 0;
    pending_.erase(0, used);
    if (dirty) Render(prompt);
    dirty = false;
    if (event == LineBuffer::Event::kLine) {
      WriteAll("\n");
      *line = buffer_.Take();
      return Event::kLine;
    }
    if (event == LineBuffer::Event::kEnd) return Event::kEnd;
    std::array<struct pollfd, 2> polled = {
        {{STDIN_FILENO, POLLIN, 0}, {InterruptScope::WakeFd(), POLLIN, 0}}};
    if (::poll(polled.data(), polled.size(), -1) < 0 && errno != EINTR) return Event::kEnd;
    if (polled[1].revents != 0) drain();
    if (InterruptScope::Take()) {
      buffer_.Clear();
      pending_.clear();
      return Event::kInterrupted;
    }
    if (polled[1].revents != 0) {  // continued after a stop, or the terminal has another width
      WriteAll("\r");
      WriteAll(prompt);
      dirty = true;
    }
    if (polled[0].revents == 0) continue;
    const ssize_t count = ::read(STDIN_FILENO, bytes.data(), bytes.size());
    if (count > 0) pending_.append(bytes.data(), static_cast<size_t>(count));
    if (count == 0 || (count < 0 && errno != EINTR)) return Event::kEnd;
  }
}

}  // namespace oscar::cli
