// A BPE tokenizer, byte-level or of characters with byte fallback, read from a tokenizer.json, with
// ids equal to those of the Hugging Face library that wrote the file. Immutable after loading;
// share one by const reference between threads. Whatever a file asks for and this class does not do
// is refused at load, by name.
//
// Text comes in segments that are trusted (written by the chat template) or not (written by a
// user). Special tokens are recognised in trusted bytes only, so "<|im_end|>" in a message is ten
// ordinary characters and cannot end the turn; the words around a boundary are still cut and
// merged as if the text were one.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/status.h"
#include "text/bpe.h"

namespace oscar {

struct TextSegment {
  std::string text;
  bool trusted = false;  // written by a template: may hold special tokens
};

struct AddedToken {
  TokenId id = kNoToken;
  std::string content;
  bool special = false;      // a control token; others are plain text with their own id
  bool normalized = false;   // matched after normalisation instead of before
  bool single_word = false;  // only between non-word characters
  bool lstrip = false;       // takes the whitespace before it along
  bool rstrip = false;
};

struct EncodeOptions {
  // Recognise special tokens in a plain string. Segments carry their own trust.
  bool parse_special = false;
  // Add what the file's post-processor adds around one sequence (Llama 3: the begin token).
  bool add_special = false;
};

class Tokenizer {
 public:
  static constexpr size_t kMaxTextBytes = size_t{1} << 28;

  // `path` is a tokenizer.json or the folder that holds one.
  static Result<Tokenizer> Load(const std::filesystem::path& path);
  // `name` stands for the source in errors.
  static Result<Tokenizer> FromJson(std::string_view json, std::string_view name);
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  // Fails on ill-formed UTF-8 and on text over kMaxTextBytes.
  Result<std::vector<TokenId>> Encode(std::string_view text,
                                      const EncodeOptions& options = {}) const;
  Result<std::vector<TokenId>> Encode(std::span<const TextSegment> segments,
                                      const EncodeOptions& options = {}) const;

  // Text of the ids; bytes that form no character become U+FFFD, unknown ids nothing. The space
  // that SentencePiece puts before a text is taken away again.
  std::string Decode(std::span<const TokenId> ids, bool skip_special) const;
  // The exact bytes of a token: perhaps a part of a character. Empty for unknown ids.
  std::string_view TokenBytes(TokenId id) const;
  // Token with this content: an added token, or a vocabulary entry with these bytes.
  std::optional<TokenId> FindToken(std::string_view content) const;

  bool IsSpecial(TokenId id) const;
  bool IsToken(TokenId id) const;
  // One more than the largest id; ids may have holes, and models pad beyond it.
  int vocab_size() const;
  std::span<const AddedToken> added_tokens() const;

 private:
  struct Rep;
  explicit Tokenizer(std::unique_ptr<const Rep> rep);
  std::unique_ptr<const Rep> rep_;
};

}  // namespace oscar
