// On the demo model: scores are those of plain generation, runs repeat and resume.
#include "run/evaluation.h"

#include <gtest/gtest.h>

#include <fstream>

#include "base/file.h"
#include "engine/generator.h"
#include "engine/prompt_reader.h"
#include "measure/import_prompt.h"
#include "run/eval_items.h"
#include "run/sequence_runner.h"
#include "tasks/prompts.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;

ModelOptions Options(const std::string& kv, int cell = 64) {
  ModelOptions options;
  options.model = OSCAR_DEMO_MODEL;
  options.kv = kv;
  options.prefill_cell = cell;
  options.kv_memory = uint64_t{1} << 29;
  options.num_threads = 2;
  options.device = Device::kCpu;  // some tests look into pages
  return options;
}

std::vector<int32_t> Prompt(size_t count, uint32_t seed) {
  std::vector<int32_t> tokens(count);
  for (size_t i = 0; i < count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    tokens[i] = static_cast<int32_t>((seed >> 8) % 8000);
  }
  return tokens;
}

// What Generator gives is the oracle: it takes one sequence at a time.
TEST(SequenceRunner, BatchesScoreAsSingleGenerations) {
  auto model = LoadedModel::Load(Options("oscar+"));
  ASSERT_TRUE(model.has_value()) << model.error().ToString();
  std::vector<SequenceTask> tasks;
  std::vector<std::vector<int32_t>> expected;
  for (uint32_t i = 0; i < 3; ++i) {
    SequenceTask task;
    task.prompt = Prompt(420 + 50 * i, i + 1);
    task.max_tokens = 12;
    GenerateRequest request;
    request.prompt = task.prompt;
    request.sampling.temperature = 0;
    request.max_tokens = 12;
    Generator generator((*model)->model(), (*model)->pool());
    const auto result = generator.Generate(request);
    ASSERT_TRUE(result.has_value());
    expected.push_back(result->tokens);
    task.reference = result->tokens;
    if (i == 1) task.reference[5] = (task.reference[5] + 1) % 8000;  // off the path at token 5
    tasks.push_back(std::move(task));
  }
  SequenceRunner runner(**model, {-1});
  std::vector<SequenceOutcome> outcomes(tasks.size());
  ASSERT_TRUE(runner
                  .Run(tasks,
                       [&](size_t index, const SequenceOutcome& outcome) {
                         outcomes[index] = outcome;
                         return Status();
                       })
                  .ok());
  for (size_t i = 0; i < tasks.size(); ++i) {
    EXPECT_EQ(outcomes[i].output, expected[i]) << i;
    EXPECT_EQ(outcomes[i].strict, i != 1) << i;
    EXPECT_EQ(outcomes[i].first_wrong, i == 1 ? 5 : -1) << i;
    EXPECT_GT(outcomes[i].cache_bytes, 0u);
  }
}

// With cells of one page a prompt's tokens see what generated ones see, and windows that end at the
// token do not depend on how the tokens came.
TEST(TokenWindows, AreAFunctionOfPositionsAlone) {
  const std::vector<int32_t> prompt = Prompt(330, 5);
  const auto vocab = size_t{8192};
  for (const char* kv : {"quarot", "turboquant", "kivi-sink", "oscar+"}) {
    ModelOptions options = Options(kv, 64);
    options.token_windows = true;
    if (std::string(kv) == "oscar+") options.recent = 128;
    auto model = LoadedModel::Load(options);
    ASSERT_TRUE(model.has_value()) << model.error().ToString();
    const auto read = [&](size_t chunk, bool is_prompt, size_t from) {
      SequenceCache cache((*model)->kv().cache(), (*model)->pool());
      std::vector<float> all;
      for (size_t at = 0; at < prompt.size();) {
        const size_t count =
            is_prompt || at < from ? std::min({chunk, 64 - at % 64, prompt.size() - at}) : 1;
        const ForwardItem item{&cache, std::span(prompt).subspan(at, count), is_prompt || at < from,
                               static_cast<int>(count)};
        std::vector<float> logits(count * vocab);
        EXPECT_TRUE((*model)->model().Forward({&item, 1}, logits).ok());
        all.insert(all.end(), logits.begin(), logits.end());
        at += count;
      }
      return all;
    };
    const std::vector<float> whole = read(64, true, 0);
    EXPECT_EQ(read(13, true, 0), whole) << kv;
    EXPECT_EQ(read(64, false, 130), whole) << kv;  // the rest as if generated
    // And they differ from windows that end at pages where those hold more.
    options.token_windows = false;
    model = LoadedModel::Load(options);
    ASSERT_TRUE(model.has_value());
    const std::vector<float> paged = read(64, true, 0);
    const size_t last = (prompt.size() - 1) * vocab;
    EXPECT_FALSE(std::equal(paged.begin() + static_cast<std::ptrdiff_t>(last), paged.end(),
                            whole.begin() + static_cast<std::ptrdiff_t>(last)))
        << kv;
  }
}

TEST(TokenWindows, RefuseWhatCannotBeShown) {
  ModelOptions options = Options("kivi-sink", 64);
  options.token_windows = true;
  options.recent = 64;
  const auto narrow = LoadedModel::Plan(options);
  ASSERT_FALSE(narrow.has_value());
  EXPECT_NE(narrow.error().message().find("128 tokens together"), std::string::npos)
      << narrow.error().ToString();
  options.recent.reset();
  options.device = Device::kCuda;
  const auto device = LoadedModel::Plan(options);
  ASSERT_FALSE(device.has_value());
  EXPECT_NE(device.error().message().find("--device cpu"), std::string::npos);
}

// A prompt handed over must be what the method would have read in one cell, up to one rounding.
TEST(SequenceRunner, SharedPromptsAreAsOwnOnes) {
  auto plain = LoadedModel::Load(Options("bf16", 4096));
  ASSERT_TRUE(plain.has_value());
  const std::vector<int32_t> prompt = Prompt(700, 9);
  SequenceRunner reader(**plain, {-1});
  const auto shared = reader.ReadPrompts(std::vector<std::vector<int32_t>>{prompt}, 1 << 20);
  ASSERT_TRUE(shared.has_value());
  for (const char* kv : {"bf16", "quarot", "oscar+"}) {
    auto model = LoadedModel::Load(Options(kv, 4096));
    ASSERT_TRUE(model.has_value());
    SequenceCache own((*model)->kv().cache(), (*model)->pool());
    std::vector<float> logits((*model)->spec().vocab_size);
    for (size_t at = 0; at < prompt.size(); at += 350) {
      const ForwardItem item{&own, std::span(prompt).subspan(at, 350), true, at > 0 ? 1 : 0};
      ASSERT_TRUE((*model)
                      ->model()
                      .Forward({&item, 1}, at > 0 ? std::span<float>(logits) : std::span<float>())
                      .ok());
    }
    SequenceCache imported((*model)->kv().cache(), (*model)->pool());
    const ModelSpec& spec = (*model)->spec();
    ASSERT_TRUE(ImportPrompt((*shared)[0].cache, (*model)->kv(), spec.num_kv_layers(),
                             spec.attention().num_kv_heads, spec.attention().head_dim,
                             (*model)->threads(), imported)
                    .ok());
    ASSERT_EQ(imported.length(), own.length());
    double difference = 0, energy = 0;
    for (int64_t t = 640; t < 700; ++t) {  // open in both
      for (int d = 0; d < spec.attention().head_dim; ++d) {
        const double a = ToFloat(own.KRow(1, 1, t)[d]), b = ToFloat(imported.KRow(1, 1, t)[d]);
        const double c = ToFloat(own.VRow(1, 1, t)[d]), e = ToFloat(imported.VRow(1, 1, t)[d]);
        difference += (a - b) * (a - b) + (c - e) * (c - e);
        energy += a * a + c * c;
      }
    }
    EXPECT_LT(difference, 2e-4 * energy) << kv;  // BF16 noise, far from any rotation's
  }
}

class EvaluationTest : public testing::Test {
 protected:
  void SetUp() override {
    directory_ =
        fs::temp_directory_path() / ("oscar_evaluation_test_" + std::to_string(::getpid()) + "_" +
                                     testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::create_directories(directory_);
  }
  void TearDown() override { fs::remove_all(directory_); }
  EvalOptions Sample(const std::string& out) const {
    EvalOptions options;
    options.model = Options("bf16");
    options.methods = *ParseMethods({"bf16", "quarot"}, {});
    options.suite = *ReadSuite(OSCAR_DEMO_MODEL "/eval", {2, {"sort", "sum"}});
    options.out = directory_ / out;
    options.show_progress = false;
    return options;
  }
  fs::path directory_;
};

TEST_F(EvaluationTest, RepeatsResumesAndShares) {
  const auto first = Evaluate(Sample("a"));
  ASSERT_TRUE(first.has_value()) << first.error().ToString();
  const std::string json = ResultsToJson(*first);
  EXPECT_EQ(ResultsToJson(*Evaluate(Sample("b"))), json);  // twice the same
  ASSERT_EQ(first->methods.size(), 2u);
  EXPECT_GT(*first->methods[0].MeanStrict(), *first->methods[1].MeanStrict());
  EXPECT_EQ(first->short_tasks, std::vector<std::string>{"sort"});

  // A run cut off in the middle of a line goes on to the same numbers, measuring only the rest.
  const std::string lines = *ReadFile(directory_ / "a/items.jsonl", 1 << 20);
  size_t kept = 0;
  for (int i = 0; i < 5; ++i) kept = lines.find('\n', kept) + 1;
  fs::create_directories(directory_ / "c");
  std::ofstream(directory_ / "c/items.jsonl") << lines.substr(0, kept + 30);
  fs::copy_file(directory_ / "a/reference.jsonl", directory_ / "c/reference.jsonl");
  EXPECT_EQ(ResultsToJson(*Evaluate(Sample("c"))), json);
  const std::string resumed = *ReadFile(directory_ / "c/items.jsonl", 1 << 20);
  EXPECT_EQ(resumed.substr(0, kept), lines.substr(0, kept));
  EXPECT_EQ(std::count(resumed.begin(), resumed.end(), '\n'), 9);  // 8 items and the torn line

  // Other settings do not take old records.
  EvalOptions shared = Sample("a");
  shared.prefill = EvalPrefill::kExact;
  const auto exact = Evaluate(shared);
  ASSERT_TRUE(exact.has_value()) << exact.error().ToString();
  EXPECT_NE(exact->prefill, first->prefill);
  EXPECT_EQ(*exact->methods[0].MeanStrict(), *first->methods[0].MeanStrict());  // bf16 is bf16
  const std::string both = *ReadFile(directory_ / "a/items.jsonl", 1 << 20);
  EXPECT_EQ(std::count(both.begin(), both.end(), '\n'), 16);
}

// Against the model fed one token at a time, and all of its vocabulary. Items that go wrong are
// read to the end of their reference, too, and a lost file of distributions is made again.
TEST_F(EvaluationTest, ReferencesAreScoredToTheirEnd) {
  EvalOptions options = Sample("a");
  options.methods = *ParseMethods({"quarot", "bf16"}, {});  // BF16 is measured first all the same
  options.suite = *ReadSuite(OSCAR_DEMO_MODEL "/eval", {2, {"sum"}});
  options.windows = EvalWindows::kPages;
  const auto results = Evaluate(options);
  ASSERT_TRUE(results.has_value()) << results.error().ToString();
  auto plain = LoadedModel::Load(Options("bf16")), method = LoadedModel::Load(Options("quarot"));
  const auto encoder = PromptEncoder::Load((*plain)->directory());
  const int32_t end = (*plain)->config().eos_token_ids.front();
  const auto logits_of = [](LoadedModel& model, const std::vector<int32_t>& prompt,
                            const std::vector<int32_t>& reference) {
    SequenceCache cache(model.kv().cache(), model.pool());
    PromptReader reader(model.model(), cache, prompt, 1);
    EXPECT_TRUE(reader.ReadAll().ok());
    std::vector<std::vector<float>> rows = {reader.TakeLogits()};
    for (const int32_t& token : std::span(reference).first(reference.size() - 1)) {
      const ForwardItem item{&cache, {&token, 1}, /*is_prompt=*/false, 1};
      rows.emplace_back(rows.front().size());
      EXPECT_TRUE(model.model().Forward({&item, 1}, rows.back()).ok());
    }
    return rows;
  };
  bool has_wrong = false;
  for (const EvalTask& task : options.suite.tasks) {
    double kl = 0, nll = 0, plain_nll = 0, tokens = 0;
    for (const EvalItem& item : task.items) {
      auto reference = *encoder->tokenizer().Encode(item.reference, {.parse_special = true});
      reference.push_back(end);
      const std::vector<int32_t> prompt = encoder->Encode(task, item, 4096, 14336)->tokens;
      const auto expected = logits_of(**plain, prompt, reference);
      const auto seen = logits_of(**method, prompt, reference);
      for (size_t i = 0; i < reference.size(); ++i) {
        const auto token = static_cast<size_t>(reference[i]);
        double p_sum = 0, q_sum = 0;
        for (size_t t = 0; t < expected[i].size(); ++t) {
          p_sum += std::exp(double{expected[i][t]}), q_sum += std::exp(double{seen[i][t]});
        }
        for (size_t t = 0; t < expected[i].size(); ++t) {
          const double log_p = expected[i][t] - std::log(p_sum);
          kl += std::exp(log_p) * (log_p - (seen[i][t] - std::log(q_sum)));
        }
        nll += std::log(q_sum) - seen[i][token];
        plain_nll += std::log(p_sum) - expected[i][token];
        has_wrong = has_wrong || std::ranges::max_element(seen[i]) - seen[i].begin() !=
                                     static_cast<std::ptrdiff_t>(token);
        tokens += 1;
      }
    }
    const ReferenceScore quarot = *results->methods[0].tasks.at(task.name).reference;
    const ReferenceScore bf16 = *results->methods[1].tasks.at(task.name).reference;
    EXPECT_EQ(quarot.tokens, static_cast<int64_t>(tokens));
    EXPECT_NEAR(quarot.nll, nll / tokens, 1e-5) << task.name;
    EXPECT_NEAR(bf16.nll, plain_nll / tokens, 1e-5) << task.name;
    EXPECT_NEAR(*quarot.kl, kl / tokens, 2e-5 + 1e-3 * kl / tokens) << task.name;
    EXPECT_EQ(bf16.kl, 0.0);
  }
  EXPECT_TRUE(has_wrong);  // or nothing was read beyond the output
  // Outputs that end at the first wrong token change nothing about their references.
  EvalOptions strict = options;
  strict.want_answers = false;
  const auto again = Evaluate(strict);
  ASSERT_TRUE(again.has_value()) << again.error().ToString();
  EXPECT_EQ(again->methods[0].tasks.at("sum").reference,
            results->methods[0].tasks.at("sum").reference);
  fs::remove(directory_ / "a/reference.jsonl");
  fs::remove(directory_ / "a/items.jsonl");
  options.methods = *ParseMethods({"quarot"}, {});
  EXPECT_FALSE(Evaluate(options)->methods[0].tasks.at("sum").reference->kl.has_value());
  options.methods = *ParseMethods({"quarot", "bf16"}, {});
  EXPECT_EQ(ResultsToJson(*Evaluate(options)), ResultsToJson(*results));
}

TEST_F(EvaluationTest, SpectraThatWereCutOffAreMeasuredAgain) {
  EvalOptions options = Sample("a");
  options.methods = *ParseMethods({"bf16"}, {});
  options.suite = *ReadSuite(OSCAR_DEMO_MODEL "/eval", {1, {"sort"}});
  options.prose = OSCAR_DEMO_MODEL "/eval/heldout_prose.json";
  options.prose_windows = 1;
  options.prose_tokens = 512;
  const auto whole = Evaluate(options);
  ASSERT_TRUE(whole.has_value()) << whole.error().ToString();
  ASSERT_EQ(whole->spectra.size(), 8u);
  const std::string lines = *ReadFile(directory_ / "a/items.jsonl", 1 << 20);
  const size_t third = lines.find(R"("id":"3")", lines.find("(model)"));
  ASSERT_NE(third, std::string::npos);
  std::ofstream(directory_ / "a/items.jsonl") << lines.substr(0, lines.rfind('\n', third) + 1);
  const auto again = Evaluate(options);
  ASSERT_TRUE(again.has_value()) << again.error().ToString();
  EXPECT_EQ(again->spectra, whole->spectra);
}

// What was measured on other weights or with another template is measured again.
TEST_F(EvaluationTest, OtherModelsDoNotTakeOldRecords) {
  const fs::path model = directory_ / "model";
  fs::create_directories(model);
  for (const auto& entry : fs::directory_iterator(OSCAR_DEMO_MODEL)) {
    fs::create_symlink(entry.path(), model / entry.path().filename());
  }
  EvalOptions options = Sample("a");
  options.model.model = model;
  options.methods = *ParseMethods({"bf16"}, {});
  options.suite = *ReadSuite(OSCAR_DEMO_MODEL "/eval", {1, {"sort"}});
  const auto items = [&] {
    const auto results = Evaluate(options);
    EXPECT_TRUE(results.has_value()) << results.error().ToString();
    const std::string lines = *ReadFile(directory_ / "a/items.jsonl", 1 << 20);
    return std::count(lines.begin(), lines.end(), '\n');
  };
  EXPECT_EQ(items(), 1);
  EXPECT_EQ(items(), 1);
  options.model.weights = WeightFormat::kFp8;
  EXPECT_EQ(items(), 2);
  std::ofstream(model / "chat_template.jinja") << "{{ messages[0].content }}";
  EXPECT_EQ(items(), 3);
  options.model.portable = true;
  EXPECT_EQ(items(), 4);
  EXPECT_EQ(items(), 4);
  const auto results = Evaluate(options);
  const std::pair<std::string, std::string> weights{"weights", "fp8"};
  EXPECT_EQ(std::count(results->settings.begin(), results->settings.end(), weights), 1);
  const auto is_portable = [](const auto& setting) {
    return setting.first == "arithmetic" && setting.second.starts_with("portable");
  };
  EXPECT_EQ(std::ranges::count_if(results->settings, is_portable), 1);
}

// The first cell shared and the rest read by the method: as the method alone, up to one rounding.
TEST_F(EvaluationTest, SharedCellsGoOnAsOwnOnes) {
  auto plain = LoadedModel::Load(Options("bf16", 256));
  auto model = LoadedModel::Load(Options("quarot", 256));
  ASSERT_TRUE(plain.has_value() && model.has_value());
  const std::vector<int32_t> prompt = Prompt(600, 4);
  SequenceRunner reader(**plain, {-1});
  const auto shared = reader.ReadPrompts(std::vector<std::vector<int32_t>>{prompt}, 256);
  ASSERT_TRUE(shared.has_value());
  EXPECT_EQ((*shared)[0].cache.length(), 256);
  EXPECT_TRUE((*shared)[0].logits.empty());
  SequenceTask own;
  own.prompt = prompt;
  own.max_tokens = 8;
  SequenceTask with = own;
  with.shared = &(*shared)[0];
  std::vector<SequenceOutcome> outcomes(2);
  SequenceRunner runner(**model, {-1});
  ASSERT_TRUE(runner
                  .Run(std::vector<SequenceTask>{own, with},
                       [&](size_t index, const SequenceOutcome& outcome) {
                         outcomes[index] = outcome;
                         return Status();
                       })
                  .ok());
  EXPECT_EQ(outcomes[0].tokens, outcomes[1].tokens);
  EXPECT_EQ(outcomes[0].output.front(), outcomes[1].output.front());
}

std::string WindowsOf(const EvalResults& results) {
  for (const auto& [name, value] : results.settings) {
    if (name == "windows") return value;
  }
  return {};
}

// In cells of one page a method is measured with the window of its paper, unless that is what pages
// hold anyway; else as it is stored. The scores are those of the windows that are named.
TEST_F(EvaluationTest, WindowsAreThePublishedOnesInCellsOfAPage) {
  EvalOptions options = Sample("auto");
  options.methods = *ParseMethods({"bf16", "quarot", "kivi", "oscar+@none"}, {});
  options.suite = *ReadSuite(OSCAR_DEMO_MODEL "/eval", {1, {"sum"}});
  const auto by_cell = Evaluate(options);
  ASSERT_TRUE(by_cell.has_value()) << by_cell.error().ToString();
  EXPECT_EQ(WindowsOf(*by_cell), "end at the token for quarot, kivi; at pages else");
  EXPECT_TRUE(by_cell->methods[1].simulated);
  EXPECT_FALSE(by_cell->methods[3].simulated);
  EXPECT_NE(by_cell->methods[1].description.find("end at the token"), std::string::npos);
  // The items of --windows tokens, and not those of pages.
  const auto lines = [&] {
    const std::string text = *ReadFile(directory_ / "auto/items.jsonl", 1 << 20);
    return std::count(text.begin(), text.end(), '\n');
  };
  EXPECT_EQ(lines(), 4);
  options.windows = EvalWindows::kTokens;
  options.methods = *ParseMethods({"bf16", "quarot", "kivi"}, {});
  ASSERT_TRUE(Evaluate(options).has_value());
  EXPECT_EQ(lines(), 4);
  options.windows = EvalWindows::kPages;
  const auto paged = Evaluate(options);
  ASSERT_TRUE(paged.has_value());
  EXPECT_EQ(lines(), 6);
  EXPECT_EQ(WindowsOf(*paged), "end at pages");
  EXPECT_FALSE(paged->methods[1].simulated);
  options.windows = EvalWindows::kAuto;
  options.methods = *ParseMethods({"quarot"}, {});
  options.model.prefill_cell = 128;
  EXPECT_EQ(WindowsOf(*Evaluate(options)), "end at pages");
  // Portable runs are the same on devices that have pages only.
  options.model.prefill_cell = 64;
  options.model.portable = true;
  EXPECT_EQ(WindowsOf(*Evaluate(options)), "end at pages");
  options.model.portable = false;
  // A window shorter than the tokens quantised together cannot end at the token.
  options.methods = *ParseMethods({"kivi-sink"}, {});
  options.model.recent = 64;
  const auto narrow = Evaluate(options);
  ASSERT_TRUE(narrow.has_value()) << narrow.error().ToString();
  EXPECT_EQ(WindowsOf(*narrow), "end at pages");
}

// Options of the methods under test do not reach the BF16 model beside them.
TEST_F(EvaluationTest, GroupsAndClipsAreTheMethodsOwn) {
  EvalOptions options = Sample("groups");
  options.model.group_dims = 64;
  options.prefill = EvalPrefill::kExact;
  options.suite = *ReadSuite(OSCAR_DEMO_MODEL "/eval", {1, {"sort"}});
  const auto results = Evaluate(options);
  ASSERT_TRUE(results.has_value()) << results.error().ToString();
  EXPECT_DOUBLE_EQ(results->methods[1].history_bits, 2.5);
}

TEST_F(EvaluationTest, SamplesRepeatBySeed) {
  EvalOptions options = Sample("sampled");
  options.methods.resize(1);
  options.suite = *ReadSuite(OSCAR_DEMO_MODEL "/eval", {1, {"sort"}});
  const auto hot = [](SamplingOptions base) {
    base.temperature = 1.5f;
    return base;
  };
  ASSERT_TRUE(SetSampling(options.suite, hot, 4).ok());
  const auto first = Evaluate(options);
  ASSERT_TRUE(first.has_value()) << first.error().ToString();
  ASSERT_TRUE(first->methods[0].tasks.at("sort").answer_sd.has_value());
  EvalOptions again = options;
  again.out = directory_ / "again";
  EXPECT_EQ(ResultsToJson(*Evaluate(again)), ResultsToJson(*first));
}

// One item too long for the context is that item's loss, not the run's.
TEST_F(EvaluationTest, ItemsBeyondTheContextCountAsWrong) {
  EvalOptions options = Sample("long");
  options.methods = *ParseMethods({"bf16"}, {});
  options.suite = *ReadSuite(OSCAR_DEMO_MODEL "/eval", {2, {"sort"}});
  const auto all = Evaluate(options);
  ASSERT_TRUE(all.has_value()) << all.error().ToString();
  EXPECT_EQ(*all->methods[0].tasks.at("sort").strict, 100);
  EvalItem& item = options.suite.tasks[0].items[1];
  for (int i = 0; i < 600; ++i) item.prompt += " more";
  options.model.max_context = 512;
  options.out = directory_ / "short";
  const auto some = Evaluate(options);
  ASSERT_TRUE(some.has_value()) << some.error().ToString();
  const TaskScore& score = some->methods[0].tasks.at("sort");
  EXPECT_EQ(score.items, 2);
  EXPECT_EQ(score.failed, 1);
  EXPECT_EQ(*score.strict, 50);
  EXPECT_EQ(*score.answer, 50);
  ASSERT_EQ(some->warnings.size(), 1u);
  EXPECT_NE(some->warnings[0].find(item.id), std::string::npos) << some->warnings[0];
  // A text that its task allows to be cut is cut to what fits.
  options.suite.tasks[0].max_input = 512;
  const auto cut = Evaluate(options);
  ASSERT_TRUE(cut.has_value()) << cut.error().ToString();
  EXPECT_EQ(cut->methods[0].Failed(), 0);
  EXPECT_TRUE(cut->warnings.empty());
  // Nothing that fits is an error.
  options.suite.tasks[0].max_input = 0;
  options.suite.tasks[0].items.erase(options.suite.tasks[0].items.begin());
  const auto none = Evaluate(options);
  ASSERT_FALSE(none.has_value());
  EXPECT_EQ(none.error().code(), StatusCode::kOutOfRange);
}

TEST_F(EvaluationTest, RefusesWhatCannotBe) {
  EvalOptions options = Sample("x");
  const auto as_it_is = [](SamplingOptions base) { return base; };
  const Status greedy = SetSampling(options.suite, as_it_is, 3);
  EXPECT_NE(greedy.message().find("--temperature"), std::string::npos);
  const auto hot = [](SamplingOptions base) {
    base.temperature = 0.7f;
    return base;
  };
  EXPECT_TRUE(SetSampling(options.suite, hot, 3).ok());
  EXPECT_EQ(options.suite.tasks[0].repeats, 3);
  EXPECT_FALSE(ParseMethods({"nonsense"}, {}).has_value());
  EXPECT_FALSE(ParseMethods({"bf16", "bf16"}, {}).has_value());
  EXPECT_FALSE(ParseMethods({"oscar+:"}, {}).has_value());
  EXPECT_FALSE(ParseMethods({"oscar+:2.5x"}, {}).has_value());
  const auto bits = ParseMethods({"bf16", "oscar+", "oscar+:2.5@none"}, {}, {3.25});
  ASSERT_TRUE(bits.has_value());
  EXPECT_FALSE((*bits)[0].bits.has_value());
  EXPECT_EQ((*bits)[1].bits, 3.25);
  EXPECT_EQ((*bits)[2].bits, 2.5);
  // Several bits are a method each, of those that take bits and have none.
  const auto sweep =
      ParseMethods({"bf16", "oscar+@none", "oscar+:2.5", "quarot"}, {}, {2.25, 2.31});
  ASSERT_TRUE(sweep.has_value());
  std::string labels;
  for (const EvalMethod& m : *sweep) {
    labels += m.label + (m.bits.has_value() ? "=" + std::to_string(*m.bits) : "") + " ";
  }
  EXPECT_EQ(labels,
            "bf16 oscar+:2.25@none=2.250000 oscar+:2.31@none=2.310000 oscar+:2.5=2.500000 quarot ");
  EXPECT_FALSE(ParseMethods({"oscar+", "oscar+:2.5"}, {}, {2.5, 3.0}).has_value());
  const auto methods = ParseMethods({"bf16", "oscar+", "oscar+@none", "oscar@r2"}, "r1");
  ASSERT_TRUE(methods.has_value());
  EXPECT_TRUE((*methods)[0].rotation.empty());
  EXPECT_EQ((*methods)[1].rotation, "r1");
  EXPECT_EQ((*methods)[2].rotation, "none");
  EXPECT_EQ((*methods)[3].rotation, "r2");
}

}  // namespace
}  // namespace oscar
