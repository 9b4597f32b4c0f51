#include "evaluate/text_scores.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

namespace oscar {
namespace {

constexpr size_t kMaxWords = 2000;
constexpr size_t kMaxCodeLine = 4096;

bool IsSpace(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
bool IsDigit(char c) { return c >= '0' && c <= '9'; }
bool IsPunctuation(char c) {
  return (c >= '!' && c <= '/') || (c >= ':' && c <= '@') || (c >= '[' && c <= '`') ||
         (c >= '{' && c <= '~');
}

std::string Lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return out;
}

std::vector<std::string> Words(std::string_view text) {
  std::vector<std::string> out;
  for (size_t at = 0; at < text.size();) {
    while (at < text.size() && IsSpace(text[at])) ++at;
    size_t end = at;
    while (end < text.size() && !IsSpace(text[end])) ++end;
    if (end > at) out.emplace_back(text.substr(at, end - at));
    at = end;
  }
  return out;
}

std::vector<std::string> AnswerWords(std::string_view text) {
  std::string plain;
  for (char c : Lower(text)) {
    if (!IsPunctuation(c)) plain += c;
  }
  std::vector<std::string> words = Words(plain);
  std::erase_if(words, [](const std::string& w) { return w == "a" || w == "an" || w == "the"; });
  return words;
}

// The rows of the longest-common-subsequence table: [x + 1][y + 1].
template <typename T>
std::vector<std::vector<uint16_t>> CommonTable(const T& x, const T& y) {
  std::vector<std::vector<uint16_t>> table(x.size() + 1, std::vector<uint16_t>(y.size() + 1, 0));
  for (size_t i = 1; i <= x.size(); ++i) {
    for (size_t j = 1; j <= y.size(); ++j) {
      table[i][j] = x[i - 1] == y[j - 1] ? static_cast<uint16_t>(table[i - 1][j - 1] + 1)
                                         : std::max(table[i - 1][j], table[i][j - 1]);
    }
  }
  return table;
}

// The words of one longest common subsequence, chosen among equals as the package does.
void AddCommonWords(const std::vector<std::string>& x, const std::vector<std::string>& y,
                    std::set<std::string>& out) {
  const auto table = CommonTable(x, y);
  for (size_t i = x.size(), j = y.size(); i > 0 && j > 0;) {
    if (x[i - 1] == y[j - 1]) {
      out.insert(x[i - 1]);
      --i, --j;
    } else if (table[i - 1][j] > table[i][j - 1]) {
      --i;
    } else {
      --j;
    }
  }
}

// Sentences end at full stops.
std::vector<std::vector<std::string>> Sentences(std::string_view text, std::set<std::string>& all) {
  std::vector<std::vector<std::string>> out;
  size_t count = 0;
  for (size_t at = 0; at < text.size() && count < kMaxWords;) {
    const size_t end = std::min(text.find('.', at), text.size());
    if (end > at) {
      std::vector<std::string> words = Words(text.substr(at, end - at));
      words.resize(std::min(words.size(), kMaxWords - count));
      count += words.size();
      all.insert(words.begin(), words.end());
      out.push_back(std::move(words));
    }
    at = end + 1;
  }
  return out;
}

std::vector<std::string> Numbers(std::string_view text) {
  std::vector<std::string> out;
  for (size_t at = 0; at < text.size();) {
    size_t end = at;
    while (end < text.size() && IsDigit(text[end])) ++end;
    if (end > at) out.emplace_back(text.substr(at, end - at));
    at = std::max(end, at + 1);
  }
  return out;
}

}  // namespace

double TokenF1(std::string_view prediction, std::string_view reference) {
  const std::vector<std::string> x = AnswerWords(prediction), y = AnswerWords(reference);
  std::map<std::string, int> counts;
  for (const std::string& word : y) ++counts[word];
  int same = 0;
  for (const std::string& word : x) same += counts[word]-- > 0 ? 1 : 0;
  if (same == 0) return 0;
  const double precision = same / static_cast<double>(x.size());
  const double recall = same / static_cast<double>(y.size());
  return 2 * precision * recall / (precision + recall);
}

double RougeL(std::string_view prediction, std::string_view reference) {
  std::set<std::string> predicted_words, reference_words, common;
  const auto predicted = Sentences(prediction, predicted_words);
  const auto expected = Sentences(reference, reference_words);
  if (predicted_words.empty() || reference_words.empty()) return 0;
  for (const auto& sentence : expected) {
    for (const auto& own : predicted) AddCommonWords(sentence, own, common);
  }
  const double recall =
      static_cast<double>(common.size()) / static_cast<double>(reference_words.size());
  const double precision =
      static_cast<double>(common.size()) / static_cast<double>(predicted_words.size());
  return 2 * precision * recall / (precision + recall + 1e-8);
}

double ClassScore(std::string_view prediction, std::string_view reference,
                  std::span<const std::string> classes) {
  std::vector<std::string_view> named;
  for (const std::string& name : classes) {
    if (prediction.find(name) != std::string_view::npos) named.push_back(name);
  }
  // The published loop removes from the list it walks, and so passes over the one after each.
  for (size_t i = 0; i < named.size(); ++i) {
    if (reference.find(named[i]) != std::string_view::npos && named[i] != reference) {
      named.erase(named.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  const bool found = std::find(named.begin(), named.end(), reference) != named.end();
  return found ? 1.0 / static_cast<double>(named.size()) : 0.0;
}

double NumberScore(std::string_view prediction, std::string_view reference) {
  const std::vector<std::string> wanted = Numbers(reference), given = Numbers(prediction);
  if (wanted.empty() || given.empty()) return 0;
  const auto right = std::count(given.begin(), given.end(), wanted.front());
  return static_cast<double>(right) / static_cast<double>(given.size());
}

double CodeSimilarity(std::string_view prediction, std::string_view reference) {
  while (!prediction.empty() && prediction.front() == '\n') prediction.remove_prefix(1);
  std::string_view line;
  for (size_t at = 0; at <= prediction.size();) {
    const size_t end = std::min(prediction.find('\n', at), prediction.size());
    const std::string_view candidate = prediction.substr(at, end - at);
    at = end + 1;
    if (candidate.find('`') == std::string_view::npos &&
        candidate.find('#') == std::string_view::npos &&
        candidate.find("//") == std::string_view::npos) {
      line = candidate;
      break;
    }
  }
  line = line.substr(0, kMaxCodeLine);
  reference = reference.substr(0, kMaxCodeLine);
  if (line.empty() || reference.empty()) return 0;
  const double common = CommonTable(line, reference).back().back();
  const double total = static_cast<double>(line.size() + reference.size());
  return std::round(100 * 2 * common / total) / 100;
}

double ContainsAll(std::string_view prediction, std::span<const std::string> references) {
  if (references.empty()) return 0;
  const std::string text = Lower(prediction);
  const auto found =
      std::count_if(references.begin(), references.end(), [&](const std::string& reference) {
        return text.find(Lower(reference)) != std::string::npos;
      });
  return static_cast<double>(found) / static_cast<double>(references.size());
}

}  // namespace oscar
