#include "grammar/utf8_masks.h"

#include <algorithm>

namespace oscar {
namespace {

using State = Utf8Masks::State;

struct Lead {
  unsigned char byte, low, high;  // what may follow it: low to high
};
// RFC 3629, section 4: the leads whose second byte is not simply 80 to BF.
constexpr std::array<Lead, Utf8Masks::kAnywhere> kLeads = {
    {{0xe0, 0xa0, 0xbf}, {0xed, 0x80, 0x9f}, {0xf0, 0x90, 0xbf}, {0xf4, 0x80, 0x8f}}};

State StateAfter(char c) {
  State state = 0;
  while (state < kLeads.size() && kLeads[state].byte != static_cast<unsigned char>(c)) ++state;
  return state;
}

bool MayFollow(State state, char c) {
  const auto byte = static_cast<unsigned char>(c);
  return state == Utf8Masks::kAnywhere || (byte >= kLeads[state].low && byte <= kLeads[state].high);
}

// Control tokens begin with a byte that no text has (GrammarVocabularyOf).
bool IsText(std::string_view token) { return !token.empty() && token.front() != '\xff'; }

bool IsNeverRight(std::string_view token) {
  for (size_t i = 0; i < token.size(); ++i) {
    const auto byte = static_cast<unsigned char>(token[i]);
    if (byte == 0xc0 || byte == 0xc1 || byte > 0xf4) return true;
    if (i + 1 < token.size() && !MayFollow(StateAfter(token[i]), token[i + 1])) return true;
  }
  return false;
}

}  // namespace

Utf8Masks::Utf8Masks(std::span<const std::string> tokens) {
  for (auto& mask : forbidden_) mask.assign((tokens.size() + 31) / 32, 0);
  after_.assign(tokens.size(), kAnywhere);
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (!IsText(tokens[i])) continue;
    after_[i] = After(tokens[i]);
    const uint32_t bit = uint32_t{1} << (i % 32);
    if (IsNeverRight(tokens[i])) forbidden_[kAnywhere][i / 32] |= bit;
    for (State state = 0; state < kAnywhere; ++state) {
      if (!MayFollow(state, tokens[i].front())) forbidden_[state][i / 32] |= bit;
    }
  }
}

State Utf8Masks::After(std::string_view text) {
  return text.empty() ? kAnywhere : StateAfter(text.back());
}

void Utf8Masks::Apply(State state, std::span<uint32_t> mask) const {
  const auto clear = [&](const std::vector<uint32_t>& forbidden) {
    const size_t words = std::min(mask.size(), forbidden.size());
    for (size_t i = 0; i < words; ++i) mask[i] &= ~forbidden[i];
  };
  clear(forbidden_[kAnywhere]);
  if (state != kAnywhere) clear(forbidden_[state]);
}

}  // namespace oscar
