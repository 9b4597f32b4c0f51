#include "toolcall/harmony.h"

#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <utility>

#include "toolcall/call_parser.h"

namespace oscar {
namespace {

constexpr std::string_view kStart = "<|start|>", kChannel = "<|channel|>", kMessage = "<|message|>",
                           kConstrain = "<|constrain|>", kEnd = "<|end|>", kCallEnd = "<|call|>",
                           kReturn = "<|return|>";
constexpr std::string_view kRole = "assistant", kTo = "to=", kFunctions = "functions.";
// No header of a message is longer; what is, is text.
constexpr size_t kMaxHeaderBytes = 512;

bool IsSpace(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }

// Where `text` has the first of `marks` (npos: nowhere), and how many bytes at its end may yet
// become one of them.
struct Found {
  size_t at = std::string_view::npos;
  std::string_view mark;
  size_t partial = 0;
};
Found FindFirst(std::string_view text, size_t from, std::span<const std::string_view> marks) {
  Found found;
  for (const std::string_view mark : marks) {
    if (const size_t at = text.find(mark, from); at < found.at) {
      found.at = at;
      found.mark = mark;
    }
    for (size_t size = std::min(text.size(), mark.size() - 1); size > found.partial; --size) {
      if (text.ends_with(mark.substr(0, size))) found.partial = size;
    }
  }
  return found;
}

std::string_view FirstWord(std::string_view text) {
  const size_t end = text.find_first_of(" \t\r\n<");
  return text.substr(0, end);
}

class HarmonyParser final : public AnswerParser {
 public:
  explicit HarmonyParser(const AnswerSyntax& syntax) : syntax_(syntax), counter_(syntax) {}

  void Push(std::string_view text, ParsedPiece* out) override {
    held_ += text;
    while (!ended() && Step(out)) {
    }
  }

  void Finish(bool is_cut, ParsedPiece* out) override {
    if (ended()) return;
    if (state_ == State::kBody) {
      EndBody(held_, out);
    } else if (state_ == State::kHeader && (!is_cut || held_.find(kTo) != std::string::npos)) {
      // A header without a message; of a cut one only the begin of a call is told.
      Content(raw_ + held_, out);
    } else if (state_ == State::kBetween) {
      Content(held_, out);
    }
    held_.clear();
  }

  bool in_reasoning() const override { return state_ == State::kBody && kind_ == Kind::kReasoning; }
  bool ended() const override { return counter_.ended(); }

 private:
  enum class State : uint8_t { kHeader, kBody, kBetween };
  enum class Kind : uint8_t { kContent, kReasoning, kCall };

  // False where more text is needed.
  bool Step(ParsedPiece* out) {
    switch (state_) {
      case State::kHeader:
        return Header(out);
      case State::kBody:
        return Body(out);
      case State::kBetween:
        return Between(out);
    }
    return false;
  }

  // held_: what follows "<|start|>", or the begin of the answer, where the prompt has written
  // "<|start|>assistant". raw_: the marker that opened the header.
  bool Header(ParsedPiece* out) {
    constexpr std::array kEnds = {kMessage, kStart, kEnd, kCallEnd, kReturn};
    const Found found = FindFirst(held_, 0, kEnds);
    const bool has_end = found.at != std::string_view::npos;
    const std::string_view header = std::string_view(held_).substr(0, found.at);
    const size_t size = has_end ? found.at : held_.size() - found.partial;
    if (!MayBeHeader(header, has_end) || size > kMaxHeaderBytes ||
        (has_end && found.mark != kMessage)) {
      // No header: it is said, with the marker that made it look like one.
      const bool has_channel = is_first_ && held_.starts_with(kChannel);
      Open(Kind::kContent, out);
      Content(std::exchange(raw_, {}), out);
      if (has_channel) {
        Content(kChannel, out);
        held_.erase(0, kChannel.size());
      }
      return true;
    }
    if (!has_end) return false;
    ReadHeader(header);
    raw_ += held_.substr(0, found.at + kMessage.size());
    held_.erase(0, found.at + kMessage.size());
    Open(kind_, out);
    return true;
  }

  // Whether `text` is a header or, where it is not `is_whole`, may become one.
  bool MayBeHeader(std::string_view text, bool is_whole) const {
    // Whether `literal` is next or, at the end of the text, begins.
    const auto is_next = [&](std::string_view literal) {
      return text.starts_with(literal) || (!is_whole && literal.starts_with(text));
    };
    const auto skip_space = [&] {
      while (!text.empty() && IsSpace(text.front())) text.remove_prefix(1);
    };
    if (!is_first_) {
      if (!is_next(kRole)) return false;
      text.remove_prefix(std::min(kRole.size(), text.size()));
    }
    skip_space();
    if (is_next(kTo)) {
      text.remove_prefix(std::min(text.find_first_of(" \t\r\n<"), text.size()));
      skip_space();
    }
    return text.empty() || is_next(kChannel) || is_next(kMessage);
  }

  void ReadHeader(std::string_view header) {
    const size_t at = header.find(kChannel);
    const std::string_view role = header.substr(0, at);
    const std::string_view channel =
        at == std::string_view::npos ? std::string_view() : header.substr(at + kChannel.size());
    name_.clear();
    bool has_recipient = false;
    for (const std::string_view part : {role, channel}) {
      const size_t to = part.find(kTo);
      if (to == std::string_view::npos) continue;
      std::string_view recipient = FirstWord(part.substr(to + kTo.size()));
      if (recipient == "user" || recipient == "assistant" || recipient.empty()) continue;
      has_recipient = true;
      if (recipient.starts_with(kFunctions)) recipient.remove_prefix(kFunctions.size());
      name_ = recipient;
    }
    kind_ = has_recipient                      ? Kind::kCall
            : FirstWord(channel) == "analysis" ? Kind::kReasoning
                                               : Kind::kContent;
    if (kind_ == Kind::kReasoning && !syntax_.reasoning.has_value()) kind_ = Kind::kContent;
  }

  // A message of this kind begins: texts of one kind are joined by a newline.
  void Open(Kind kind, ParsedPiece* out) {
    kind_ = kind;
    state_ = State::kBody;
    is_first_ = false;
    if (kind == Kind::kContent && has_content_) out->content += '\n';
    if (kind == Kind::kReasoning && has_reasoning_) out->reasoning += '\n';
  }

  bool Body(ParsedPiece* out) {
    constexpr std::array kEnds = {kEnd, kCallEnd, kReturn, kStart, kChannel};
    const Found found = FindFirst(held_, searched_, kEnds);
    if (found.at == std::string_view::npos) {
      searched_ = held_.size() - found.partial;
      if (kind_ != Kind::kCall) Give(std::exchange(searched_, 0), out);
      return false;
    }
    searched_ = 0;
    EndBody(std::string_view(held_).substr(0, found.at), out);
    held_.erase(0, found.at);
    state_ = State::kBetween;
    if (found.mark == kEnd || found.mark == kCallEnd || found.mark == kReturn) {
      held_.erase(0, found.mark.size());
    } else if (found.mark == kChannel) {  // the next message without its begin
      state_ = State::kHeader;
      is_first_ = true;
    }
    return true;
  }

  // Between messages nothing is written. Where it is, it is said.
  bool Between(ParsedPiece* out) {
    if (held_.empty()) return false;
    if (held_.starts_with(kStart)) {
      raw_ = kStart;
      held_.erase(0, kStart.size());
      state_ = State::kHeader;
      return true;
    }
    if (kStart.starts_with(held_)) return false;
    raw_.clear();
    if (held_.starts_with(kChannel)) {
      state_ = State::kHeader;
      is_first_ = true;
      return true;
    }
    if (kChannel.starts_with(held_)) return false;
    Open(Kind::kContent, out);
    return true;
  }

  void Give(size_t size, ParsedPiece* out) {
    const std::string_view text = std::string_view(held_).substr(0, size);
    if (kind_ == Kind::kContent) {
      Content(text, out);
    } else {
      out->reasoning += text;
      has_reasoning_ |= !text.empty();
    }
    held_.erase(0, size);
  }

  void Content(std::string_view text, ParsedPiece* out) {
    out->content += text;
    has_content_ |= !text.empty();
  }

  void EndBody(std::string_view body, ParsedPiece* out) {
    const std::string raw = std::exchange(raw_, {});
    if (kind_ == Kind::kReasoning) {
      out->reasoning += body;
      has_reasoning_ |= !body.empty();
    } else if (kind_ == Kind::kContent) {
      Content(body, out);
    } else if (syntax_.has_calls() && syntax_.tools->Has(name_) && IsJsonObject(body)) {
      counter_.Give({name_, std::string(body), ""}, out);
    } else {  // a broken call
      if (has_content_) out->content += '\n';
      Content(raw, out);
      Content(body, out);
    }
  }

  const AnswerSyntax syntax_;
  CallCounter counter_;
  State state_ = State::kHeader;
  Kind kind_ = Kind::kContent;
  bool is_first_ = true;  // no "<|start|>assistant" stands before the header
  bool has_content_ = false, has_reasoning_ = false;
  std::string held_, raw_, name_;
  size_t searched_ = 0;  // of held_, for the end of a body
};

}  // namespace

std::unique_ptr<AnswerParser> MakeHarmonyParser(const AnswerSyntax& syntax) {
  return std::make_unique<HarmonyParser>(syntax);
}

std::vector<std::string_view> HarmonyMarkers() {
  return {kStart, kChannel, kMessage, kConstrain, kEnd, kCallEnd, kReturn};
}

}  // namespace oscar
