// Sequences of 1.5K and 6K tokens on INT2 pages: they cross the sink, sealed pages, the recent
// window and (6K) a prefill cell. What is stored are the bytes of some pages, a hash of all of them
// and the greedy continuation. Runs on the FMA path (OSCAR_GEMM=fma), whose arithmetic is the same
// on every processor; OSCAR_UPDATE_GOLDENS=1 writes the files anew.
#include <fmt/core.h>
#include <gtest/gtest.h>
#include <xxhash.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "engine/demo_fixture.h"
#include "simd/dispatch.h"

namespace oscar {
namespace {

struct Outcome {
  uint64_t sealed_pages = 0;
  std::string hash;  // of all sealed pages
  std::vector<int32_t> next;
  std::string bytes;  // of the first and the last sealed page: layers 0 and 7, head 1
};

Outcome Observe(DemoModel& demo, size_t length) {
  Generator generator(*demo.model, demo.pool);
  GenerateRequest request;
  request.prompt = SomeTokens(length);
  request.sampling.temperature = 0.0f;
  request.max_tokens = 16;
  const auto result = generator.Generate(request);
  EXPECT_TRUE(result.has_value()) << result.error().ToString();
  Outcome outcome;
  outcome.next = result->tokens;
  const SequenceCache& cache = generator.cache();
  XXH3_state_t* state = XXH3_createState();
  XXH3_64bits_reset(state);
  int64_t first = -1, last = -1;
  for (int64_t i = 0; i < cache.num_pages(); ++i) {
    if (!cache.is_sealed(i)) continue;
    if (first < 0) first = i;
    last = i;
    ++outcome.sealed_pages;
    XXH3_64bits_update(state, cache.page(i).data(), cache.page(i).layout().bytes());
  }
  outcome.hash = fmt::format("{:016x}", XXH3_64bits_digest(state));
  XXH3_freeState(state);
  for (int64_t page : {first, last}) {
    for (int layer : {0, 7}) {
      const auto block = cache.page(page).Block(layer, 1);
      outcome.bytes.append(reinterpret_cast<const char*>(block.data()), block.size());
    }
  }
  return outcome;
}

class LongGoldenTest : public testing::TestWithParam<size_t> {};

TEST_P(LongGoldenTest, PageBytesAndContinuation) {
  ASSERT_STREQ(std::getenv("OSCAR_GEMM"), "fma");
  const size_t length = GetParam();
  const std::string base = fmt::format(OSCAR_TEST_DATA "/golden/oscar_plus_{}", length);
  DemoModel demo(DemoModel::Method("oscar+"));
  const Outcome outcome = Observe(demo, length);
  if (std::getenv("OSCAR_UPDATE_GOLDENS") != nullptr) {
    const nlohmann::ordered_json saved = {{"sealed_pages", outcome.sealed_pages},
                                          {"xxh3_of_sealed_pages", outcome.hash},
                                          {"greedy_ids", outcome.next}};
    ASSERT_TRUE(WriteFileAtomically(base + ".json", saved.dump(1) + "\n").ok());
    ASSERT_TRUE(WriteFileAtomically(base + ".pages", outcome.bytes).ok());
  }
  const auto golden = *ParseJson(*ReadFile(base + ".json", 1 << 20), base);
  EXPECT_EQ(outcome.sealed_pages, golden["sealed_pages"].get<uint64_t>());
  EXPECT_EQ(outcome.next, golden["greedy_ids"].get<std::vector<int32_t>>());
  EXPECT_TRUE(outcome.bytes == *ReadFile(base + ".pages", 1 << 20)) << "page bytes differ";
  EXPECT_EQ(outcome.hash, golden["xxh3_of_sealed_pages"].get<std::string>());
}

INSTANTIATE_TEST_SUITE_P(Lengths, LongGoldenTest, testing::Values(1500, 6000));

TEST(Targets, InstructionSetsChangeNoBit) {
  DemoModel demo(DemoModel::Method("oscar+"));
  const Outcome expected = Observe(demo, 700);
  for (const simd::Target target : simd::SupportedTargets()) {
    const simd::ScopedTarget scope(target);
    const Outcome outcome = Observe(demo, 700);
    EXPECT_EQ(outcome.next, expected.next) << simd::TargetName(target);
    EXPECT_EQ(outcome.hash, expected.hash) << simd::TargetName(target);
  }
}

}  // namespace
}  // namespace oscar
