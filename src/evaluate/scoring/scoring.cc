#include "scoring/scoring.h"

#include <algorithm>

#include "scoring/code_scores.h"
#include "scoring/math_answer.h"
#include "scoring/text_scores.h"

namespace oscar {
namespace {

// The first match of (?i)Answer\s*:\s*([A-D]), the published pattern.
std::string ChosenLetter(std::string_view text) {
  std::string upper(text);
  std::transform(upper.begin(), upper.end(), upper.begin(), [](char c) {
    return c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
  });
  constexpr std::string_view kLead = "ANSWER";
  const auto skip_space = [&](size_t at) {
    while (at < upper.size() && IsSpace(upper[at])) ++at;
    return at;
  };
  for (size_t at = upper.find(kLead); at != std::string::npos; at = upper.find(kLead, at + 1)) {
    size_t next = skip_space(at + kLead.size());
    if (next >= upper.size() || upper[next] != ':') continue;
    next = skip_space(next + 1);
    if (next < upper.size() && upper[next] >= 'A' && upper[next] <= 'D') {
      return std::string(1, upper[next]);
    }
  }
  return {};
}

// What follows the last </think> as it is: in LongBench's scores of lines, indentation counts.
std::string_view WithoutReasoning(std::string_view output) {
  constexpr std::string_view kClose = "</think>";
  const size_t close = output.rfind(kClose);
  return close == std::string_view::npos ? output : output.substr(close + kClose.size());
}

std::string_view FirstLine(std::string_view text) {
  while (!text.empty() && text.front() == '\n') text.remove_prefix(1);
  return text.substr(0, text.find('\n'));
}

// From the first line that is not blank, with its indentation.
std::string_view WithoutBlankLines(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  const size_t line = first == std::string_view::npos ? first : text.rfind('\n', first);
  return line == std::string_view::npos ? text : text.substr(line + 1);
}

template <typename Score>
double BestOf(const EvalItem& item, const Score& score) {
  double best = 0;
  for (const std::string& reference : item.answers) best = std::max(best, score(reference));
  return best;
}

}  // namespace

std::string ReadAnswer(Scorer scorer, std::string_view output) {
  const std::string_view text = FinalAnswer(output);
  switch (scorer) {
    case Scorer::kMath:
      return FindMathAnswer(text).value_or("");
    case Scorer::kNumber:
      return FindNumberAnswer(text).value_or("");
    case Scorer::kChoice:
      return ChosenLetter(text);
    case Scorer::kHumanEval:
      return FirstPythonBlock(text);
    case Scorer::kLiveCode:
      return LastCodeBlock(text);
    default:
      return std::string(text);
  }
}

Result<double> ScoreOutput(Scorer scorer, const EvalItem& item, std::string_view output) {
  const std::string_view text = FinalAnswer(output), whole = WithoutReasoning(output);
  switch (scorer) {
    case Scorer::kExact:
      return text == FinalAnswer(item.answer) ? 1.0 : 0.0;
    case Scorer::kContainsAll:
      return ContainsAll(text, item.answers);
    case Scorer::kContainsAny:
      return BestOf(item,
                    [&](const std::string& r) { return ContainsAll(text, std::span(&r, 1)); });
    case Scorer::kMath:
    case Scorer::kNumber:
      return IsSameMathAnswer(ReadAnswer(scorer, output), item.answer) ? 1.0 : 0.0;
    case Scorer::kChoice:
      return ReadAnswer(scorer, output) == item.answer ? 1.0 : 0.0;
    case Scorer::kHumanEval:
      return HumanEvalScore(item, WithoutBlankLines(whole));
    case Scorer::kLiveCode:
      return LiveCodeScore(item, text);
    case Scorer::kTokenF1:
      return BestOf(item, [&](const std::string& r) { return TokenF1(text, r); });
    case Scorer::kTokenF1FirstLine:
      return BestOf(item, [&](const std::string& r) { return TokenF1(FirstLine(whole), r); });
    case Scorer::kRougeL:
      return BestOf(item, [&](const std::string& r) { return RougeL(text, r); });
    case Scorer::kRougeLFirstLine:
      return BestOf(item, [&](const std::string& r) { return RougeL(FirstLine(whole), r); });
    case Scorer::kClass:
      return BestOf(item, [&](const std::string& r) {
        return ClassScore(FirstLine(whole), r, item.classes);
      });
    case Scorer::kNumbersNamed:
      return BestOf(item, [&](const std::string& r) { return NumberScore(text, r); });
    case Scorer::kCodeSimilarity:
      return BestOf(item, [&](const std::string& r) { return CodeSimilarity(whole, r); });
  }
  return 0.0;
}

}  // namespace oscar
