// English nouns, adjectives and verbs for generated tasks: the lists of the package wonderwords
// (MIT, words/LICENSE), which RULER chooses from. Constant; safe from any thread.
#pragma once

#include <span>
#include <string_view>

namespace oscar {

std::span<const std::string_view> Nouns();
std::span<const std::string_view> Adjectives();
std::span<const std::string_view> Verbs();

// The files, one word a line.
std::string_view NounText();
std::string_view AdjectiveText();
std::string_view VerbText();

}  // namespace oscar
