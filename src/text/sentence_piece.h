// SentencePiece's treatment of spaces, as tokenizer.json files of Llama 2, Mistral and their kin
// state it. Files write a space inside tokens as U+2581; here it is a space everywhere, and a
// U+2581 of a text, which those files cannot tell from one, becomes a space.
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/status.h"
#include "text/bpe.h"

namespace oscar {

struct SpaceRules {
  // Where a space is put before a text: the normaliser's before every stretch between added tokens,
  // the pre-tokenizer's where there is none yet.
  enum class Prefix : uint8_t { kNone, kFirst, kAlways };
  bool by_normalizer = false;
  Prefix prefix = Prefix::kNone;
  bool splits = false;  // words begin at spaces
  int stripped = 0;     // leading spaces that decoding takes away

  // What the normaliser does. `marks`: one per byte, kept in step; or null.
  void Normalize(std::string* text, std::vector<bool>* marks) const;
  // What the pre-tokenizer does; `at_start`: of the whole text.
  void AddPrefix(std::string* text, bool at_start) const;
};

// From the values of "normalizer", "pre_tokenizer" and "decoder".
Result<SpaceRules> ReadSpaceRules(const nlohmann::json& normalizer,
                                  const nlohmann::json& pre_tokenizer,
                                  const nlohmann::json& decoder);
// U+2581 to spaces.
std::string MarksToSpaces(std::string_view text);
// The byte of a token "<0x0A>"; -1 for any other.
int ByteOfToken(std::string_view text);

}  // namespace oscar
