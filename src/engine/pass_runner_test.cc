#include "engine/pass_runner.h"

#include "engine/fake_model.h"
#include "engine/generator.h"
#include "engine/prompt_reader.h"

namespace oscar {
namespace {

FakeModel::Options SamplesOnDevice(bool runs_ahead) {
  FakeModel::Options options;
  options.samples = true;
  options.runs_ahead = runs_ahead;
  return options;
}

TEST(PromptReader, ChunksChangeNoLogits) {
  ThreadPool threads(1);
  FakeModel model({}, threads);
  PagePool pool(uint64_t{1} << 30, model.kv().host_sealer());
  const auto prompt = FakeTokens(1, 700);
  std::vector<float> expected;
  for (const int chunk : {0, 1, 37, 64, 300}) {
    SequenceCache cache(model.kv().cache(), pool);
    PromptReader reader(model, cache, prompt, /*num_logits=*/500, chunk);
    std::vector<int32_t> read;
    std::vector<float> logits;
    while (!reader.done()) {
      ASSERT_TRUE(reader.ReadChunk().ok());
      read.insert(read.end(), reader.chunk().begin(), reader.chunk().end());
      logits.insert(logits.end(), reader.logits().begin(), reader.logits().end());
    }
    EXPECT_EQ(read, prompt);
    EXPECT_EQ(logits.size(), 500u * FakeModel::kVocab);
    if (expected.empty()) expected = logits;
    EXPECT_EQ(logits, expected) << chunk;
  }
}

// Rows that the device leaves undecided (one in 23 here) are computed again or read back.
TEST(Generator, RunningAheadChangesNoAnswer) {
  ThreadPool threads(1);
  int ran_ahead = 0;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    GenerateRequest request;
    request.prompt = FakeTokens(seed, 1 + seed * 29 % 400);
    request.sampling.temperature = seed % 2 == 0 ? 0.0f : 0.7f;
    request.sampling.top_k = seed % 5 == 0 ? 0 : 20;
    request.sampling.seed = seed;
    request.max_tokens = 150;
    request.stop_tokens = {static_cast<int32_t>(seed)};
    std::vector<int32_t> answers[2];
    for (const bool ahead : {false, true}) {
      FakeModel model(SamplesOnDevice(ahead), threads);
      PagePool pool(uint64_t{1} << 30, model.kv().host_sealer());
      Generator generator(model, pool);
      for (int turn = 0; turn < 3; ++turn) {
        GenerateRequest next = request;
        next.prompt.insert(next.prompt.end(), answers[ahead].begin(), answers[ahead].end());
        const auto result = generator.Generate(next);
        ASSERT_TRUE(result.has_value() && result->status.ok());
        EXPECT_EQ(model.num_launched(), 0u);
        EXPECT_EQ(generator.cache().length(), static_cast<int64_t>(generator.tokens().size()));
        answers[ahead].insert(answers[ahead].end(), result->tokens.begin(), result->tokens.end());
      }
      EXPECT_LE(model.most_launched, ahead ? 2 : 1);
      ran_ahead += model.most_launched == 2 ? 1 : 0;
    }
    EXPECT_EQ(answers[1], answers[0]) << seed;
  }
  EXPECT_GT(ran_ahead, 10);
}

// What was launched ahead is undone for one sequence, or for all, and is never launched where that
// could not be undone.
TEST(PassRunner, UndoesWhatIsNotWanted) {
  ThreadPool threads(1);
  FakeModel model(SamplesOnDevice(true), threads);
  PagePool pool(uint64_t{1} << 30, model.kv().host_sealer());
  const CacheConfig& config = model.kv().cache();
  std::vector<SequenceCache> caches;
  for (int i = 0; i < 3; ++i) caches.emplace_back(config, pool);
  PassRunner pass(model);
  const std::vector<std::optional<SampleParams>> sampling(3, SampleParams{});
  const std::vector<PassRunner::Ahead> ahead = {{0, {}}, {2, {}}};
  int launched = 0, alone = 0;
  for (int step = 0; step < 500; ++step) {
    int64_t before[3];
    std::vector<ForwardItem> items;
    const int32_t token = step % FakeModel::kVocab;
    for (size_t i = 0; i < 3; ++i) {
      before[i] = caches[i].length();
      items.push_back({&caches[i], {&token, 1}, /*is_prompt=*/false, /*num_logits=*/1});
    }
    ASSERT_TRUE(pass.Run(items, sampling).ok());
    ASSERT_TRUE(pass.in_flight());
    const bool seals = caches[0].CostOf(1, false).seal_net != 0;
    ASSERT_TRUE(pass.Land(ahead).ok());
    EXPECT_EQ(pass.in_flight(), !seals);
    ++(pass.in_flight() ? launched : alone);
    std::vector<size_t> recomputed;
    for (size_t i = 0; i < 3; ++i) {
      const bool again = pass.id(i) == PassRunner::kRecompute;
      if (again) recomputed.push_back(i);
      const int grown = again ? 0 : !seals && i != 1 ? 2 : 1;
      EXPECT_EQ(caches[i].length(), before[i] + grown) << step << " row " << i;
      EXPECT_EQ(pass.logits(i).empty(), pass.id(i) != SampleParams::kUndecided);
    }
    pass.Leave(caches[2]);
    pass.Leave(caches[1]);  // is not in it
    ASSERT_TRUE(pass.Drain().ok());
    EXPECT_FALSE(pass.in_flight() || pass.wanted());
    for (const size_t i : recomputed) {
      ASSERT_TRUE(pass.Run({&items[i], 1}).ok());
      EXPECT_EQ(pass.logits(0).size(), static_cast<size_t>(FakeModel::kVocab));
    }
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(caches[i].length(), before[i] + 1);
  }
  EXPECT_GT(launched, 400);
  EXPECT_GT(alone, 0);
}

}  // namespace
}  // namespace oscar
