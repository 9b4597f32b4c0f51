// Byte-pair merging over raw bytes: the vocabulary of a byte-level model and its merge rules; or
// over characters, with tokens for the bytes of those that have none (SentencePiece).
// Immutable after Build apart from a bounded word cache with its own locks; safe from any
// thread. Time is O(n log n) in the bytes of a word, whatever the word.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "oscar/status.h"

namespace oscar {

using TokenId = int32_t;
inline constexpr TokenId kNoToken = -1;
inline constexpr TokenId kMaxTokenId = (1 << 22) - 1;

// Byte strings by id, and back. Ids may have holes.
class Vocabulary {
 public:
  // Fails where the id is out of range or taken by another token.
  Status Add(TokenId id, std::string_view bytes, bool findable);
  // Call once after the last Add and before the first Find.
  void BuildIndex();

  TokenId Find(std::string_view bytes) const;
  bool Contains(TokenId id) const {
    return id >= 0 && static_cast<size_t>(id) < entries_.size() &&
           entries_[static_cast<size_t>(id)].present;
  }
  // Empty for ids that do not exist.
  std::string_view Bytes(TokenId id) const;
  // One more than the largest id.
  int size() const { return static_cast<int>(entries_.size()); }

 private:
  struct Entry {
    uint32_t begin = 0;
    uint32_t length = 0;
    bool present = false;
    bool findable = false;  // reachable by its bytes; tokens outside the byte alphabet are not
  };
  std::string bytes_;
  std::vector<Entry> entries_;
  std::vector<TokenId> index_;  // open addressing, power of two, kNoToken is free
};

class BpeModel {
 public:
  // `merges` holds (left, right) ids by rank; the result of each merge must be in `vocabulary`.
  // `ignore_merges`: a word that is a token stays whole, whatever the merges say.
  static Result<BpeModel> Build(Vocabulary vocabulary,
                                const std::vector<std::pair<TokenId, TokenId>>& merges,
                                bool ignore_merges);
  // Words begin as characters; one that is no token becomes the tokens of its bytes.
  static Result<BpeModel> BuildFromCharacters(
      Vocabulary vocabulary, const std::vector<std::pair<TokenId, TokenId>>& merges,
      bool ignore_merges, const std::array<TokenId, 256>& byte_ids);
  BpeModel(BpeModel&&) noexcept;
  BpeModel& operator=(BpeModel&&) noexcept;
  ~BpeModel();

  void EncodeWord(std::string_view word, std::vector<TokenId>* ids) const;
  const Vocabulary& vocabulary() const { return vocabulary_; }

 private:
  struct Merge {
    uint64_t pair = 0;
    uint32_t rank = 0;
    TokenId result = kNoToken;  // kNoToken: free slot
  };
  class WordCache;
  BpeModel();
  const Merge* FindMerge(TokenId left, TokenId right) const;
  Status AddMerges(const std::vector<std::pair<TokenId, TokenId>>& merges);
  void Symbols(std::string_view word, std::vector<TokenId>* symbols) const;
  void MergeShort(std::span<const TokenId> word, std::vector<TokenId>* ids) const;
  void MergeLong(std::span<const TokenId> word, std::vector<TokenId>* ids) const;

  Vocabulary vocabulary_;
  std::array<TokenId, 256> byte_ids_{};
  std::vector<Merge> merges_;
  bool ignore_merges_ = false;
  bool from_characters_ = false;
  std::unique_ptr<WordCache> cache_;
};

}  // namespace oscar
