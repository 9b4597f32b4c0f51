// Turns a stream of token ids into text while it is generated: never half a character, never a
// byte that is not UTF-8. One object a stream; not for sharing between threads. What Push and
// Finish return, joined, equals Tokenizer::Decode of all the ids, with the leading space that
// Decode takes away where SentencePiece has put one: a stream continues a prompt.
#pragma once

#include <string>
#include <string_view>

#include "text/tokenizer.h"

namespace oscar {

// Reassembles UTF-8 from arbitrary pieces.
class Utf8Stream {
 public:
  // Appends the characters that `bytes` completes to `out`; holds back at most 3 bytes.
  void Push(std::string_view bytes, std::string* out);
  // The stream ends: an incomplete character becomes U+FFFD.
  void Finish(std::string* out);

 private:
  std::string held_;
};

class Detokenizer {
 public:
  // The tokenizer must outlive this object.
  Detokenizer(const Tokenizer& tokenizer, bool skip_special)
      : tokenizer_(&tokenizer), skip_special_(skip_special) {}

  // Text that this token completes; empty while a character is incomplete. Ids that are no tokens
  // and, with skip_special, special tokens give none.
  std::string Push(TokenId id);
  std::string Finish();

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_;
  Utf8Stream stream_;
};

}  // namespace oscar
