#include "text/bpe.h"

#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <limits>
#include <mutex>

#include "base/check.h"
#include "text/unicode.h"

namespace oscar {
namespace {

constexpr uint32_t kNoRank = std::numeric_limits<uint32_t>::max();
// Below this many bytes a scan for the best pair beats a heap (measured: break-even near 50).
constexpr size_t kShortWord = 48;
constexpr size_t kMaxVocabularyBytes = size_t{1} << 28;

uint64_t PairKey(TokenId left, TokenId right) {
  return (static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32) | static_cast<uint32_t>(right);
}

// splitmix64's finaliser: the keys are dense integers, the slots must not be.
uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

}  // namespace

Status Vocabulary::Add(TokenId id, std::string_view bytes, bool findable) {
  if (id < 0 || id > kMaxTokenId) {
    return OutOfRange(fmt::format("token id {} is outside 0..{}", id, kMaxTokenId));
  }
  const auto slot = static_cast<size_t>(id);
  if (slot >= entries_.size()) entries_.resize(slot + 1);
  Entry& entry = entries_[slot];
  if (entry.present) {
    return DataLoss(fmt::format("token id {} is given twice", id));
  }
  if (bytes_.size() + bytes.size() > kMaxVocabularyBytes) {
    return OutOfRange(fmt::format("vocabulary exceeds {} bytes", kMaxVocabularyBytes));
  }
  entry = {static_cast<uint32_t>(bytes_.size()), static_cast<uint32_t>(bytes.size()), true,
           findable};
  bytes_.append(bytes);
  return {};
}

void Vocabulary::BuildIndex() {
  index_.assign(std::bit_ceil(entries_.size() * 2 + 2), kNoToken);
  const size_t mask = index_.size() - 1;
  for (size_t id = 0; id < entries_.size(); ++id) {
    if (!entries_[id].present || !entries_[id].findable) continue;
    const std::string_view bytes = Bytes(static_cast<TokenId>(id));
    size_t slot = std::hash<std::string_view>{}(bytes)&mask;
    while (index_[slot] != kNoToken) slot = (slot + 1) & mask;
    index_[slot] = static_cast<TokenId>(id);
  }
}

TokenId Vocabulary::Find(std::string_view bytes) const {
  if (index_.empty()) return kNoToken;
  const size_t mask = index_.size() - 1;
  size_t slot = std::hash<std::string_view>{}(bytes)&mask;
  while (index_[slot] != kNoToken && Bytes(index_[slot]) != bytes) slot = (slot + 1) & mask;
  return index_[slot];
}

std::string_view Vocabulary::Bytes(TokenId id) const {
  if (!Contains(id)) return {};
  const Entry& entry = entries_[static_cast<size_t>(id)];
  return std::string_view(bytes_).substr(entry.begin, entry.length);
}

// Direct-mapped and of fixed size: a new word overwrites whatever had its slot, so hostile text can
// cost hits but never memory. A slot is one cache line.
class BpeModel::WordCache {
 public:
  static constexpr size_t kMaxWordBytes = 26;
  static constexpr size_t kMaxIds = 7;

  bool Find(std::string_view word, uint64_t hash, std::vector<TokenId>* ids) {
    const std::lock_guard lock(LockOf(hash));
    const Slot& slot = SlotOf(hash);
    if (slot.hash != hash || slot.length != word.size() ||
        std::memcmp(slot.word.data(), word.data(), word.size()) != 0) {
      return false;
    }
    ids->insert(ids->end(), slot.ids.begin(), slot.ids.begin() + slot.count);
    return true;
  }

  void Insert(std::string_view word, uint64_t hash, const TokenId* ids, size_t count) {
    if (word.size() > kMaxWordBytes || count > kMaxIds) return;
    const std::lock_guard lock(LockOf(hash));
    Slot& slot = SlotOf(hash);
    slot.hash = hash;
    slot.length = static_cast<uint8_t>(word.size());
    slot.count = static_cast<uint8_t>(count);
    std::memcpy(slot.word.data(), word.data(), word.size());
    std::copy_n(ids, count, slot.ids.begin());
  }

 private:
  struct Slot {
    uint64_t hash = 0;
    uint8_t length = 0;
    uint8_t count = 0;
    std::array<char, kMaxWordBytes> word{};
    std::array<TokenId, kMaxIds> ids{};
  };
  static_assert(sizeof(Slot) == 64);
  static constexpr size_t kSlots = size_t{1} << 15;  // 2 MiB
  static constexpr size_t kLocks = 64;

  Slot& SlotOf(uint64_t hash) { return slots_[hash & (kSlots - 1)]; }
  std::mutex& LockOf(uint64_t hash) { return locks_[hash & (kLocks - 1)]; }

  std::vector<Slot> slots_ = std::vector<Slot>(kSlots);
  std::array<std::mutex, kLocks> locks_;
};

BpeModel::BpeModel() = default;
BpeModel::BpeModel(BpeModel&&) noexcept = default;
BpeModel& BpeModel::operator=(BpeModel&&) noexcept = default;
BpeModel::~BpeModel() = default;

Result<BpeModel> BpeModel::Build(Vocabulary vocabulary,
                                 const std::vector<std::pair<TokenId, TokenId>>& merges,
                                 bool ignore_merges) {
  BpeModel model;
  model.vocabulary_ = std::move(vocabulary);
  model.ignore_merges_ = ignore_merges;
  for (int byte = 0; byte < 256; ++byte) {
    const char symbol = static_cast<char>(byte);
    const TokenId id = model.vocabulary_.Find({&symbol, 1});
    if (id == kNoToken) {
      return Unexpected(Unimplemented(fmt::format(
          "vocabulary has no token for byte 0x{:02X}; a byte-level vocabulary needs all 256",
          byte)));
    }
    model.byte_ids_[static_cast<size_t>(byte)] = id;
  }
  OSCAR_RETURN_IF_ERROR(model.AddMerges(merges));
  return model;
}

Result<BpeModel> BpeModel::BuildFromCharacters(
    Vocabulary vocabulary, const std::vector<std::pair<TokenId, TokenId>>& merges,
    bool ignore_merges, const std::array<TokenId, 256>& byte_ids) {
  BpeModel model;
  model.vocabulary_ = std::move(vocabulary);
  model.ignore_merges_ = ignore_merges;
  model.from_characters_ = true;
  model.byte_ids_ = byte_ids;
  OSCAR_RETURN_IF_ERROR(model.AddMerges(merges));
  return model;
}

Status BpeModel::AddMerges(const std::vector<std::pair<TokenId, TokenId>>& merges) {
  if (merges.size() >= kNoRank) return OutOfRange("too many merges");
  merges_.resize(std::bit_ceil(merges.size() * 2 + 2));
  const size_t mask = merges_.size() - 1;
  std::string joined;
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const auto [left, right] = merges[rank];
    joined.assign(vocabulary_.Bytes(left)).append(vocabulary_.Bytes(right));
    const TokenId result = vocabulary_.Find(joined);
    if (result == kNoToken) {
      return DataLoss(
          fmt::format("merge {} joins tokens {} and {}, but their union is not in the vocabulary",
                      rank, left, right));
    }
    const uint64_t pair = PairKey(left, right);
    size_t slot = Mix(pair) & mask;
    while (merges_[slot].result != kNoToken && merges_[slot].pair != pair) {
      slot = (slot + 1) & mask;
    }
    merges_[slot] = {pair, static_cast<uint32_t>(rank), result};  // a repeat overrides
  }
  cache_ = std::make_unique<WordCache>();
  return {};
}

void BpeModel::Symbols(std::string_view word, std::vector<TokenId>* symbols) const {
  if (!from_characters_) {
    for (const char c : word) symbols->push_back(byte_ids_[static_cast<uint8_t>(c)]);
    return;
  }
  for (size_t at = 0; at < word.size();) {
    const size_t length = std::max<size_t>(DecodeUtf8(word, at).length, 1);
    const std::string_view character = word.substr(at, length);
    if (const TokenId id = vocabulary_.Find(character); id != kNoToken) {
      symbols->push_back(id);
    } else {
      for (const char c : character) symbols->push_back(byte_ids_[static_cast<uint8_t>(c)]);
    }
    at += length;
  }
}

const BpeModel::Merge* BpeModel::FindMerge(TokenId left, TokenId right) const {
  const uint64_t pair = PairKey(left, right);
  const size_t mask = merges_.size() - 1;
  size_t slot = Mix(pair) & mask;
  while (merges_[slot].result != kNoToken) {
    if (merges_[slot].pair == pair) return &merges_[slot];
    slot = (slot + 1) & mask;
  }
  return nullptr;
}

void BpeModel::EncodeWord(std::string_view word, std::vector<TokenId>* ids) const {
  if (word.empty()) return;
  if (word.size() == 1 && !from_characters_) {
    ids->push_back(byte_ids_[static_cast<uint8_t>(word[0])]);
    return;
  }
  if (ignore_merges_) {
    if (const TokenId id = vocabulary_.Find(word); id != kNoToken) {
      ids->push_back(id);
      return;
    }
  }
  const bool is_cached = word.size() <= WordCache::kMaxWordBytes;
  const uint64_t hash = is_cached ? std::hash<std::string_view>{}(word) : 0;
  if (is_cached && cache_->Find(word, hash, ids)) return;
  std::vector<TokenId> symbols;
  symbols.reserve(word.size());
  Symbols(word, &symbols);
  if (symbols.size() > kShortWord) {
    MergeLong(symbols, ids);
    return;
  }
  const size_t first = ids->size();
  MergeShort(symbols, ids);
  if (!is_cached) return;
  cache_->Insert(word, hash, ids->data() + first, ids->size() - first);
}

void BpeModel::MergeShort(std::span<const TokenId> word, std::vector<TokenId>* ids) const {
  OSCAR_DCHECK(word.size() <= kShortWord);
  std::array<TokenId, kShortWord> symbols;
  std::array<uint32_t, kShortWord> ranks;  // of the pair that starts here
  std::array<TokenId, kShortWord> results;
  size_t count = word.size();
  std::ranges::copy(word, symbols.begin());
  const auto rank_pair = [&](size_t i) {
    const Merge* merge = i + 1 < count ? FindMerge(symbols[i], symbols[i + 1]) : nullptr;
    ranks[i] = merge != nullptr ? merge->rank : kNoRank;
    results[i] = merge != nullptr ? merge->result : kNoToken;
  };
  for (size_t i = 0; i < count; ++i) rank_pair(i);
  while (count > 1) {
    const size_t best = static_cast<size_t>(
        std::min_element(ranks.begin(), ranks.begin() + static_cast<ptrdiff_t>(count)) -
        ranks.begin());
    if (ranks[best] == kNoRank) break;
    symbols[best] = results[best];
    const auto tail = static_cast<ptrdiff_t>(best) + 1;
    const auto end = static_cast<ptrdiff_t>(count);
    std::copy(symbols.begin() + tail + 1, symbols.begin() + end, symbols.begin() + tail);
    std::copy(ranks.begin() + tail + 1, ranks.begin() + end, ranks.begin() + tail);
    std::copy(results.begin() + tail + 1, results.begin() + end, results.begin() + tail);
    --count;
    rank_pair(best);
    if (best > 0) rank_pair(best - 1);
  }
  ids->insert(ids->end(), symbols.begin(), symbols.begin() + static_cast<ptrdiff_t>(count));
}

void BpeModel::MergeLong(std::span<const TokenId> word, std::vector<TokenId>* ids) const {
  const auto count = static_cast<uint32_t>(word.size());
  struct Symbol {
    TokenId id;
    uint32_t previous, next;  // count and above: none
    uint32_t rank;            // of the pair that starts here; kNoRank: none, or the symbol is gone
  };
  std::vector<Symbol> symbols(count);
  // Lowest rank first, leftmost among equals: one integer orders both.
  const auto entry = [](uint32_t rank, uint32_t at) { return (uint64_t{rank} << 32) | at; };
  std::vector<uint64_t> heap;
  heap.reserve(count);
  for (uint32_t i = 0; i < count; ++i) {
    symbols[i] = {word[i], i == 0 ? kNoRank : i - 1, i + 1, kNoRank};
  }
  for (uint32_t i = 0; i + 1 < count; ++i) {
    if (const Merge* merge = FindMerge(symbols[i].id, symbols[i + 1].id)) {
      symbols[i].rank = merge->rank;
      heap.push_back(entry(merge->rank, i));
    }
  }
  std::make_heap(heap.begin(), heap.end(), std::greater<>());
  const auto rank_pair = [&](uint32_t at) {
    const uint32_t next = symbols[at].next;
    const Merge* merge = next < count ? FindMerge(symbols[at].id, symbols[next].id) : nullptr;
    symbols[at].rank = merge != nullptr ? merge->rank : kNoRank;
    if (merge == nullptr) return;
    heap.push_back(entry(merge->rank, at));
    std::push_heap(heap.begin(), heap.end(), std::greater<>());
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const auto rank = static_cast<uint32_t>(heap.back() >> 32);
    const auto at = static_cast<uint32_t>(heap.back());
    heap.pop_back();
    Symbol& left = symbols[at];
    if (left.rank != rank) continue;  // the pair has changed since it was queued
    Symbol& right = symbols[left.next];
    left.id = FindMerge(left.id, right.id)->result;
    right.rank = kNoRank;
    left.next = right.next;
    if (left.next < count) symbols[left.next].previous = at;
    rank_pair(at);
    if (left.previous < count) rank_pair(left.previous);
  }
  for (uint32_t i = 0; i < count; i = symbols[i].next) ids->push_back(symbols[i].id);
}

}  // namespace oscar
