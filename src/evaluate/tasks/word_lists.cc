#include "tasks/word_lists.h"

#include <algorithm>
#include <vector>

namespace oscar {
namespace {

std::vector<std::string_view> Lines(std::string_view text) {
  std::vector<std::string_view> out;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    while (!line.empty() && (line.back() == '\r' || line.back() == ' ')) line.remove_suffix(1);
    if (!line.empty()) out.push_back(line);
  }
  return out;
}

}  // namespace

std::span<const std::string_view> Nouns() {
  static const std::vector<std::string_view> kList = Lines(NounText());
  return kList;
}

std::span<const std::string_view> Adjectives() {
  static const std::vector<std::string_view> kList = Lines(AdjectiveText());
  return kList;
}

std::span<const std::string_view> Verbs() {
  static const std::vector<std::string_view> kList = Lines(VerbText());
  return kList;
}

}  // namespace oscar
