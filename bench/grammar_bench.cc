// What masks cost: filling those of 32 sequences and telling them of their tokens, one after
// another on one core. OSCAR_TOKENIZER is a folder with a tokenizer.json (the demo model's where
// unset), and OSCAR_VOCAB the model's vocabulary where it is larger.
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "base/rng.h"
#include "grammar/compiler.h"

namespace oscar {
namespace {

constexpr size_t kBatch = 32;

const struct {
  const char* name;
  GrammarSpec spec;
} kCases[] = {
    {"object", {GrammarSpec::Kind::kJsonObject, "", {}}},
    {"person",
     {GrammarSpec::Kind::kJsonSchema,
      R"({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"},
          "tags": {"type": "array", "items": {"type": "string"}}}, "required": ["name", "age"]})",
      {}}},
    {"list",
     {GrammarSpec::Kind::kJsonSchema,
      R"({"$defs": {"n": {"type": "object", "properties": {"value": {"type": "number"}, "next":
          {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}}, "required": ["value", "next"]}},
          "$ref": "#/$defs/n"})",
      {}}},
    {"lengths",
     {GrammarSpec::Kind::kJsonSchema,
      R"({"type": "array", "items": {"type": "string", "minLength": 5, "maxLength": 20}})",
      {}}},
    {"regex", {GrammarSpec::Kind::kRegex, "([a-z]+ )*[0-9]{4}-[0-9]{2}", {}}},
    {"choice", {GrammarSpec::Kind::kChoice, "", {"yes", "no", "maybe"}}},
};

struct Sequence {
  std::unique_ptr<GrammarMatcher> matcher;
  std::vector<uint32_t> mask;
};

void BM_Masks(benchmark::State& state) {
  const char* folder = std::getenv("OSCAR_TOKENIZER");
  const auto tokenizer = Tokenizer::Load(folder != nullptr ? folder : OSCAR_DEMO_MODEL);
  if (!tokenizer.has_value()) return state.SkipWithError(tokenizer.error().message().c_str());
  const char* larger = std::getenv("OSCAR_VOCAB");
  const int vocab = larger != nullptr ? std::atoi(larger) : tokenizer->vocab_size();
  const int32_t stop = tokenizer->FindToken("<|im_end|>").value_or(0);
  GrammarCompiler compiler(
      {GrammarVocabularyOf(*tokenizer, vocab, std::vector<int32_t>{stop}), {}, ""});
  const auto& chosen = kCases[state.range(0)];
  const auto grammar = compiler.Compile(chosen.spec);
  if (!grammar.has_value()) return state.SkipWithError(grammar.error().message().c_str());
  state.SetLabel(chosen.name);
  std::vector<Sequence> sequences(kBatch);
  for (Sequence& sequence : sequences) {
    sequence.matcher = (*grammar)->NewMatcher();
    sequence.mask.resize((static_cast<size_t>(vocab) + 31) / 32);
  }
  const Philox rng(1, 2);
  uint64_t step = 0;
  for (auto _ : state) {
    for (Sequence& sequence : sequences) {
      if (!sequence.matcher->Fill(sequence.mask).ok()) state.SkipWithError("no token may follow");
    }
    state.PauseTiming();
    // Any token that is allowed; those are not what is timed.
    std::vector<int32_t> tokens;
    for (const Sequence& sequence : sequences) {
      const auto from = static_cast<int32_t>(rng.Below(step++, static_cast<uint32_t>(vocab)));
      int32_t token = from;
      while ((sequence.mask[static_cast<size_t>(token) / 32] >> (token % 32) & 1) == 0) {
        token = (token + 1) % vocab;
      }
      tokens.push_back(token);
    }
    state.ResumeTiming();
    for (size_t i = 0; i < kBatch; ++i) {
      if (!sequences[i].matcher->Accept(tokens[i])) state.SkipWithError("a token was refused");
    }
    state.PauseTiming();
    for (Sequence& sequence : sequences) {
      if (sequence.matcher->finished()) sequence.matcher = (*grammar)->NewMatcher();
    }
    state.ResumeTiming();
  }
  state.counters["us_per_token"] = benchmark::Counter(
      static_cast<double>(kBatch) * 1e-6,
      benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}
BENCHMARK(BM_Masks)->DenseRange(0, std::size(kCases) - 1)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace oscar

BENCHMARK_MAIN();
