// Scores of free text against references, as LongBench publishes them: token F1, ROUGE-L, class
// names, numbers and edit similarity; and RULER's containment. All in [0, 1]. Pure functions; safe
// from any thread.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace oscar {

inline bool IsSpace(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

// F1 over words in lower case without punctuation and articles.
double TokenF1(std::string_view prediction, std::string_view reference);
// F of the longest common subsequences of sentences, over sets of words, as the Python package
// `rouge` computes rouge-l. Very long texts are cut to 2,000 words.
double RougeL(std::string_view prediction, std::string_view reference);
// 1 / n where `reference` is among the n classes that the prediction names, else 0. Names that are
// part of the reference do not count against it.
double ClassScore(std::string_view prediction, std::string_view reference,
                  std::span<const std::string> classes);
// The share of numbers in the prediction that are the reference's ("Paragraph 7" or "7").
double NumberScore(std::string_view prediction, std::string_view reference);
// 2 LCS / (length + length), in code points, of the first line that is neither a comment nor a
// fence, its indentation included; to two digits.
double CodeSimilarity(std::string_view prediction, std::string_view reference);
// The share of references that occur in the prediction, ignoring case.
double ContainsAll(std::string_view prediction, std::span<const std::string> references);

}  // namespace oscar
