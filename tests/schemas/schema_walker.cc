// Writes answers that grammars let through, byte by byte: what a model may do, not what one likes
// to. Reads lines of {"kind": NUMBER, "text": ...} (GrammarSpec) and writes, for each, lines of
// {"line": NUMBER, "kind": "done" | "cut" | "refused" | "stuck", "text": ...}, answers as hex.
//
//   schema_walker WALKS STEPS
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/rng.h"
#include "grammar/compiler.h"

namespace oscar {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kStop = 0, kFirstByte = 1, kVocab = 288;

GrammarVocabulary Bytes() {
  GrammarVocabulary vocabulary;
  vocabulary.tokens = {""};
  for (int byte = 0; byte < 256; ++byte) {
    vocabulary.tokens.emplace_back(1, static_cast<char>(byte));
  }
  vocabulary.tokens.resize(kVocab);
  vocabulary.stop_tokens = {kStop};
  return vocabulary;
}

void Tell(int line, const char* kind, const std::string& text) {
  std::cout << Json{{"line", line}, {"kind", kind}, {"text", text}}.dump() << "\n";
}

std::string Hex(const std::string& text) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string out;
  for (const char c : text) {
    out += kDigits[static_cast<unsigned char>(c) >> 4];
    out += kDigits[static_cast<unsigned char>(c) & 15];
  }
  return out;
}

// Any byte that is allowed; more and more often one that may end something.
void Walk(const CompiledGrammar& grammar, int line, uint64_t walk, uint64_t steps) {
  const auto matcher = grammar.NewMatcher();
  const Philox rng(walk * 1'000'003 + static_cast<uint64_t>(line), 5);
  std::vector<uint32_t> mask(kVocab / 32);
  std::string text;
  for (uint64_t step = 0; step < steps; ++step) {
    if (const Status filled = matcher->Fill(mask); !filled.ok()) {
      return Tell(line, "stuck", filled.message());
    }
    const auto is_allowed = [&](int token) { return (mask[token / 32] >> (token % 32) & 1) != 0; };
    std::vector<int> all, ends;
    for (int token = kFirstByte; token < kFirstByte + 256; ++token) {
      if (!is_allowed(token)) continue;
      all.push_back(token);
      if (std::string_view("\"}],").find(static_cast<char>(token - kFirstByte)) !=
          std::string_view::npos) {
        ends.push_back(token);
      }
    }
    const bool wants_end = rng.Below(3 * step, 60) < step || rng.Below(3 * step + 1, 4) == 0;
    if (is_allowed(kStop) && (all.empty() || wants_end)) {
      return Tell(line, matcher->Accept(kStop) ? "done" : "stuck", Hex(text));
    }
    const std::vector<int>& some = wants_end && !ends.empty() ? ends : all;
    if (some.empty()) return Tell(line, "stuck", Hex(text));
    const int token = some[rng.Below(3 * step + 2, static_cast<uint32_t>(some.size()))];
    if (!matcher->Accept(token)) return Tell(line, "stuck", Hex(text));
    text += static_cast<char>(token - kFirstByte);
  }
  Tell(line, "cut", "");
}

int Run(uint64_t walks, uint64_t steps) {
  if (!GrammarCompiler::IsBuiltIn()) {
    std::cout << "built without xgrammar\n";
    return 0;
  }
  GrammarCompiler compiler({Bytes(), {}, ""});
  std::string input;
  for (int line = 0; std::getline(std::cin, input); ++line) {
    const Json json = Json::parse(input);
    GrammarSpec spec;
    spec.kind = static_cast<GrammarSpec::Kind>(json.at("kind").get<int>());
    spec.text = json.at("text").get<std::string>();
    const auto grammar = compiler.Compile(spec);
    if (!grammar.has_value()) {
      Tell(line, "refused", grammar.error().message());
      continue;
    }
    for (uint64_t walk = 0; walk < walks; ++walk) Walk(**grammar, line, walk, steps);
  }
  return 0;
}

}  // namespace
}  // namespace oscar

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  return oscar::Run(std::strtoull(argv[1], nullptr, 10), std::strtoull(argv[2], nullptr, 10));
}
