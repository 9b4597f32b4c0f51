#include "text/tokenizer.h"

#include <fmt/core.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "base/file.h"
#include "text/added_tokens.h"
#include "text/tokenizer_json.h"
#include "text/unicode.h"

namespace oscar {
namespace {

constexpr uint64_t kMaxFileBytes = uint64_t{128} << 20;

// Trust of each byte of a text; one flag for all of it where possible.
class TrustMap {
 public:
  TrustMap(bool all, std::vector<bool> marks) : all_(all), marks_(std::move(marks)) {}
  bool Covers(size_t begin, size_t end) const {
    if (marks_.empty()) return all_;
    return std::all_of(marks_.begin() + static_cast<ptrdiff_t>(begin),
                       marks_.begin() + static_cast<ptrdiff_t>(end),
                       [](bool mark) { return mark; });
  }
  TrustMap Slice(size_t begin, size_t end) const {
    if (marks_.empty()) return {all_, {}};
    return {all_,
            {marks_.begin() + static_cast<ptrdiff_t>(begin),
             marks_.begin() + static_cast<ptrdiff_t>(end)}};
  }
  std::vector<bool>* marks() { return marks_.empty() ? nullptr : &marks_; }

 private:
  bool all_;
  std::vector<bool> marks_;  // empty: `all_` holds everywhere
};

// What a text falls into: added tokens and the stretches between them.
struct Piece {
  size_t begin = 0;
  size_t end = 0;
  int token = -1;  // index into the added tokens; -1: text
};

bool StartsWithWord(std::string_view text) {
  const Utf8Step step = DecodeUtf8(text, 0);
  return step.valid && IsWordCharacter(step.code_point);
}

// Start of the last character of text[0, end), end > 0.
size_t PreviousCharacter(std::string_view text, size_t end) {
  size_t at = end - 1;
  while (at > 0 && (static_cast<uint8_t>(text[at]) & 0xC0) == 0x80) --at;
  return at;
}

bool EndsWithWord(std::string_view text) {
  return !text.empty() && StartsWithWord(text.substr(PreviousCharacter(text, text.size())));
}

}  // namespace

void TokenTrie::Insert(std::string_view content, int value) {
  starts_[static_cast<uint8_t>(content.front())] = true;
  uint32_t node = 0;
  for (const char c : content) {
    uint32_t child = Child(node, c);
    if (child == 0) {
      child = static_cast<uint32_t>(nodes_.size());
      nodes_[node].children.emplace_back(c, child);
      nodes_.emplace_back();
    }
    node = child;
  }
  nodes_[node].value = value;
}

struct Tokenizer::Rep {
  explicit Rep(TokenizerParts loaded) : parts(std::move(loaded)) {
    vocab_size = parts.model.vocabulary().size();
    for (size_t i = 0; i < parts.added_tokens.size(); ++i) {
      const AddedToken& token = parts.added_tokens[i];
      const int index = static_cast<int>(i);
      vocab_size = std::max(vocab_size, token.id + 1);
      by_id.emplace(token.id, index);
      by_content.emplace(token.content, index);
      if (token.normalized) {
        std::string content = token.content;
        Normalize(&content, nullptr);
        normalized.Insert(content, index);
      } else {
        exact.Insert(token.content, index);
      }
    }
  }

  std::vector<Piece> FindAdded(std::string_view text, const TrustMap& trust,
                               const TokenTrie& trie) const;
  void Normalize(std::string* text, std::vector<bool>* marks) const {
    if (parts.normalize_nfc) NormalizeNfc(text, marks);
    if (parts.spaces.has_value()) parts.spaces->Normalize(text, marks);
  }
  // `at_start`: of everything that is encoded.
  Status EncodeText(std::string text, TrustMap trust, bool at_start,
                    std::vector<TokenId>* ids) const;
  Status EncodeWords(std::string text, bool at_start, std::vector<TokenId>* ids) const;

  TokenizerParts parts;
  TokenTrie exact;       // matched on the text as given
  TokenTrie normalized;  // matched on normalised text
  std::unordered_map<TokenId, int> by_id;
  std::unordered_map<std::string_view, int> by_content;  // views into parts.added_tokens
  int vocab_size = 0;
};

std::vector<Piece> Tokenizer::Rep::FindAdded(std::string_view text, const TrustMap& trust,
                                             const TokenTrie& trie) const {
  std::vector<Piece> pieces;
  size_t emitted = 0;
  size_t at = 0;
  while (!trie.empty() && at < text.size()) {
    if (!trie.MayStart(text[at])) {
      ++at;
      continue;
    }
    int found = -1;
    size_t length = 0;
    trie.Match(text, at, [&](int index, size_t matched) {
      const AddedToken& token = parts.added_tokens[static_cast<size_t>(index)];
      if (token.special && !trust.Covers(at, at + matched)) return;
      found = index;
      length = matched;
    });
    if (found < 0) {
      ++at;
      continue;
    }
    const AddedToken& token = parts.added_tokens[static_cast<size_t>(found)];
    size_t begin = at;
    size_t end = at + length;
    at = end;
    if (token.single_word &&
        (EndsWithWord(text.substr(0, begin)) || StartsWithWord(text.substr(end)))) {
      continue;
    }
    if (token.lstrip) {
      while (begin > emitted) {
        const size_t previous = PreviousCharacter(text, begin);
        if (previous < emitted || !IsUnicodeSpace(DecodeUtf8(text, previous).code_point)) break;
        begin = previous;
      }
    }
    if (token.rstrip) {
      while (end < text.size()) {
        const Utf8Step step = DecodeUtf8(text, end);
        if (!IsUnicodeSpace(step.code_point)) break;
        end += step.length;
      }
    }
    if (emitted < begin) pieces.push_back({emitted, begin, -1});
    pieces.push_back({begin, end, found});
    // The search goes on behind the token itself, not behind what it strips: a token of white space
    // that stands there is found as well, and text goes on where that one ends.
    emitted = end;
  }
  if (emitted < text.size()) pieces.push_back({emitted, text.size(), -1});
  return pieces;
}

Status Tokenizer::Rep::EncodeWords(std::string text, bool at_start,
                                   std::vector<TokenId>* ids) const {
  std::vector<PreTokenizer::Word> words;
  if (parts.spaces.has_value()) {
    parts.spaces->AddPrefix(&text, at_start);
    size_t begin = 0;
    for (size_t at = 1; parts.spaces->splits && at < text.size(); ++at) {
      if (text[at] != ' ') continue;
      words.push_back({begin, at});
      begin = at;
    }
    if (begin < text.size()) words.push_back({begin, text.size()});
  } else {
    OSCAR_RETURN_IF_ERROR(parts.pre_tokenizer->Split(&text, &words));
  }
  for (const auto& word : words) {
    parts.model.EncodeWord(std::string_view(text).substr(word.begin, word.end - word.begin), ids);
  }
  return {};
}

Status Tokenizer::Rep::EncodeText(std::string text, TrustMap trust, bool at_start,
                                  std::vector<TokenId>* ids) const {
  Normalize(&text, trust.marks());
  if (normalized.empty()) return EncodeWords(std::move(text), at_start, ids);
  for (const Piece& piece : FindAdded(text, trust, normalized)) {
    if (piece.token >= 0) {
      ids->push_back(parts.added_tokens[static_cast<size_t>(piece.token)].id);
    } else {
      OSCAR_RETURN_IF_ERROR(EncodeWords(text.substr(piece.begin, piece.end - piece.begin),
                                        at_start && piece.begin == 0, ids));
    }
  }
  return {};
}

Tokenizer::Tokenizer(std::unique_ptr<const Rep> rep) : rep_(std::move(rep)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Result<Tokenizer> Tokenizer::Load(const std::filesystem::path& path) {
  std::error_code error;
  const auto file = std::filesystem::is_directory(path, error) ? path / "tokenizer.json" : path;
  OSCAR_ASSIGN_OR_RETURN(const std::string json, ReadFile(file, kMaxFileBytes));
  return FromJson(json, file.string());
}

Result<Tokenizer> Tokenizer::FromJson(std::string_view json, std::string_view name) {
  OSCAR_ASSIGN_OR_RETURN(TokenizerParts parts, ParseTokenizerJson(json, name));
  return Tokenizer(std::make_unique<const Rep>(std::move(parts)));
}

Result<std::vector<TokenId>> Tokenizer::Encode(std::string_view text,
                                               const EncodeOptions& options) const {
  const TextSegment segment{std::string(text), options.parse_special};
  return Encode(std::span(&segment, 1), options);
}

Result<std::vector<TokenId>> Tokenizer::Encode(std::span<const TextSegment> segments,
                                               const EncodeOptions& options) const {
  size_t total = 0;
  bool any_trusted = false, any_untrusted = false;
  for (const TextSegment& segment : segments) {
    if (segment.text.size() > kMaxTextBytes - total) {
      return Unexpected(OutOfRange(fmt::format("text is longer than {} bytes", kMaxTextBytes)));
    }
    total += segment.text.size();
    (segment.trusted ? any_trusted : any_untrusted) |= !segment.text.empty();
  }
  std::string text;
  text.reserve(total + 1);
  std::vector<bool> marks;
  for (const TextSegment& segment : segments) {
    text.append(segment.text);
    if (any_trusted && any_untrusted) {
      marks.insert(marks.end(), segment.text.size(), segment.trusted);
    }
  }
  if (const size_t bad = FindInvalidUtf8(text); bad != std::string::npos) {
    return Unexpected(
        InvalidArgument(fmt::format("text is not valid UTF-8 at byte {} of {}", bad, total)));
  }
  const TrustMap trust(any_trusted, std::move(marks));

  std::vector<TokenId> ids;
  ids.reserve(total / 3 + 16);
  if (options.add_special) {
    ids.insert(ids.end(), rep_->parts.prefix_ids.begin(), rep_->parts.prefix_ids.end());
  }
  for (const Piece& piece : rep_->FindAdded(text, trust, rep_->exact)) {
    if (piece.token >= 0) {
      ids.push_back(rep_->parts.added_tokens[static_cast<size_t>(piece.token)].id);
    } else {
      OSCAR_RETURN_IF_ERROR(rep_->EncodeText(text.substr(piece.begin, piece.end - piece.begin),
                                             trust.Slice(piece.begin, piece.end), piece.begin == 0,
                                             &ids));
    }
  }
  if (options.add_special) {
    ids.insert(ids.end(), rep_->parts.suffix_ids.begin(), rep_->parts.suffix_ids.end());
  }
  return ids;
}

std::string Tokenizer::Decode(std::span<const TokenId> ids, bool skip_special) const {
  std::string bytes;
  for (const TokenId id : ids) {
    if (skip_special && IsSpecial(id)) continue;
    bytes.append(TokenBytes(id));
  }
  const int stripped = rep_->parts.spaces.has_value() ? rep_->parts.spaces->stripped : 0;
  for (int i = 0; i < stripped && bytes.starts_with(' '); ++i) bytes.erase(0, 1);
  return ReplaceInvalidUtf8(bytes);
}

std::string_view Tokenizer::TokenBytes(TokenId id) const {
  if (const auto it = rep_->by_id.find(id); it != rep_->by_id.end()) {
    return rep_->parts.added_tokens[static_cast<size_t>(it->second)].content;
  }
  return rep_->parts.model.vocabulary().Bytes(id);
}

std::optional<TokenId> Tokenizer::FindToken(std::string_view content) const {
  if (const auto it = rep_->by_content.find(content); it != rep_->by_content.end()) {
    return rep_->parts.added_tokens[static_cast<size_t>(it->second)].id;
  }
  const TokenId id = rep_->parts.model.vocabulary().Find(content);
  return id == kNoToken ? std::nullopt : std::optional(id);
}

bool Tokenizer::IsSpecial(TokenId id) const {
  const auto it = rep_->by_id.find(id);
  return it != rep_->by_id.end() &&
         rep_->parts.added_tokens[static_cast<size_t>(it->second)].special;
}

bool Tokenizer::IsToken(TokenId id) const {
  return rep_->by_id.contains(id) || rep_->parts.model.vocabulary().Contains(id);
}

int Tokenizer::vocab_size() const { return rep_->vocab_size; }

std::span<const AddedToken> Tokenizer::added_tokens() const { return rep_->parts.added_tokens; }

}  // namespace oscar
