#include "scoring/text_scores.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "text/unicode.h"

namespace oscar {
namespace {

constexpr size_t kMaxWords = 2000;
constexpr size_t kMaxCodeLine = 4096;

bool IsDigit(char c) { return c >= '0' && c <= '9'; }
bool IsPunctuation(char c) {
  return (c >= '!' && c <= '/') || (c >= ':' && c <= '@') || (c >= '[' && c <= '`') ||
         (c >= '{' && c <= '~');
}

// Ill-formed bytes become U+FFFD, as where a tokenizer decodes.
std::u32string CodePoints(std::string_view text) {
  std::u32string out;
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = DecodeUtf8(text, at);
    out += step.valid ? step.code_point : kReplacementCharacter;
    at += std::max<size_t>(step.length, 1);
  }
  return out;
}

bool IsCased(char32_t c) { return IsUpper(c) || IsLower(c); }

// Whether a capital sigma at `at` ends a word, so that its lower case is the final form. Accents,
// apostrophes and full stops in between do not count.
bool IsFinalSigma(std::u32string_view text, size_t at) {
  const auto is_passed_over = [](char32_t c) {
    return c == U'\'' || c == U'.' || c == U':' || c == 0x2019 || (c >= 0x300 && c < 0x370);
  };
  size_t before = at, after = at + 1;
  while (before > 0 && is_passed_over(text[before - 1])) --before;
  while (after < text.size() && is_passed_over(text[after])) ++after;
  return before > 0 && IsCased(text[before - 1]) && (after == text.size() || !IsCased(text[after]));
}

// As Python's str.lower: one to one but for the dotted capital I and the final sigma.
std::u32string Lower(std::string_view text) {
  const std::u32string points = CodePoints(text);
  std::u32string out;
  for (size_t i = 0; i < points.size(); ++i) {
    if (points[i] == 0x130) {
      out += U"i\u0307";
    } else if (points[i] == 0x3A3) {
      out += IsFinalSigma(points, i) ? char32_t{0x3C2} : char32_t{0x3C3};
    } else {
      out += ToLower(points[i]);
    }
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

// Words without punctuation (ASCII's, as published) and without articles, which may also stand
// between signs that are no punctuation there, such as dashes.
std::vector<std::u32string> AnswerWords(std::string_view text) {
  std::u32string plain;
  for (const char32_t c : Lower(text)) {
    if (c >= 0x80 || !IsPunctuation(static_cast<char>(c))) plain += c;
  }
  std::vector<std::u32string> words;
  bool is_open = false;  // the last word may go on
  for (size_t at = 0; at < plain.size();) {
    size_t end = at;
    while (end < plain.size() && IsWordCharacter(plain[end])) ++end;
    const std::u32string_view run = std::u32string_view(plain).substr(at, end - at);
    if (run == U"a" || run == U"an" || run == U"the" || (run.empty() && IsPythonSpace(plain[at]))) {
      is_open = false;
    } else {
      if (!is_open) words.emplace_back();
      words.back() += run.empty() ? plain.substr(at, 1) : std::u32string(run);
      is_open = true;
    }
    at = std::max(end, at + 1);
  }
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
      if (!words.empty()) out.push_back(std::move(words));
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
  const std::vector<std::u32string> x = AnswerWords(prediction), y = AnswerWords(reference);
  std::map<std::u32string, int> counts;
  for (const std::u32string& word : y) ++counts[word];
  int same = 0;
  for (const std::u32string& word : x) same += counts[word]-- > 0 ? 1 : 0;
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
  const std::u32string x = CodePoints(line).substr(0, kMaxCodeLine);
  const std::u32string y = CodePoints(reference).substr(0, kMaxCodeLine);
  if (x.empty() || y.empty()) return 0;
  const double common = CommonTable(x, y).back().back();
  // Halves to even, as Python rounds.
  return std::nearbyint(100 * 2 * common / static_cast<double>(x.size() + y.size())) / 100;
}

double ContainsAll(std::string_view prediction, std::span<const std::string> references) {
  if (references.empty()) return 0;
  const std::u32string text = Lower(prediction);
  const auto found =
      std::count_if(references.begin(), references.end(), [&](const std::string& reference) {
        return text.find(Lower(reference)) != std::u32string::npos;
      });
  return static_cast<double>(found) / static_cast<double>(references.size());
}

}  // namespace oscar
