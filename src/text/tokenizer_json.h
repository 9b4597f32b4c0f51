// Reads a tokenizer.json into the parts of a tokenizer. Every key of the file is known or refused.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/status.h"
#include "text/bpe.h"
#include "text/pretokenizer.h"
#include "text/sentence_piece.h"
#include "text/tokenizer.h"

namespace oscar {

struct TokenizerParts {
  BpeModel model;
  std::optional<PreTokenizer> pre_tokenizer;  // of byte-level vocabularies
  std::optional<SpaceRules> spaces;           // of SentencePiece's
  bool normalize_nfc = false;
  std::vector<AddedToken> added_tokens;
  // Ids that the post-processor puts around one sequence.
  std::vector<TokenId> prefix_ids;
  std::vector<TokenId> suffix_ids;
};

Result<TokenizerParts> ParseTokenizerJson(std::string_view json, std::string_view name);

}  // namespace oscar
