#include "backend/kv_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "cache/page_pool.h"
#include "cache/sequence_cache.h"

namespace oscar {
namespace {

ModelSpec Spec(int layers, int kv_heads, int head_dim) {
  ModelSpec spec;
  spec.vocab_size = 100;
  spec.hidden = 64;
  AttentionSpec attention;
  attention.num_heads = 2 * kv_heads;
  attention.num_kv_heads = kv_heads;
  attention.head_dim = attention.rotary_dims = head_dim;
  SetLayers({attention, DenseSpec{128}}, layers, &spec);
  return spec;
}

std::unique_ptr<KvPlan> Plan(const std::string& method, const ModelSpec& spec) {
  KvPlanOptions options;
  options.method = method;
  auto plan = KvPlan::Make(spec, options, EncodeBlocks);
  EXPECT_TRUE(plan.has_value()) << method << ": " << plan.error().ToString();
  return std::move(*plan);
}

// Every row of the table that needs no rotation, and rows with switches.
std::vector<std::string> Methods() {
  std::vector<std::string> names = {"oscar-su:norm=head", "oscar-su:norm=none:group=128",
                                    "oscar-su:k=token",   "oscar-su:bits=3",
                                    "kivi:bits=4",        "turboquant:k_bits=4:v_bits=2"};
  for (const KvMethodInfo& info : KvMethodTable()) {
    if (!info.needs_rotation) names.emplace_back(info.name);
  }
  return names;
}

// What the table says, what a plan says, and what the pages of a sequence take.
TEST(KvPlan, SequencesHoldTheBitsThatTheTableStates) {
  constexpr int kLayers = 5, kHeads = 2, kDim = 64, kTokens = 768;
  const ModelSpec spec = Spec(kLayers, kHeads, kDim);
  for (const std::string& name : Methods()) {
    SCOPED_TRACE(name);
    const auto plan = Plan(name, spec);
    const KvMethod& method = plan->method();
    EXPECT_DOUBLE_EQ(plan->HistoryBits(), method.HistoryBits(kHeads, kDim));

    ThreadPool threads(1);
    PagePool pool(uint64_t{1} << 26, plan->host_sealer());
    SequenceCache cache(plan->cache(), pool);
    while (cache.length() < kTokens) {
      ASSERT_TRUE(cache.Reserve(kPageTokens).ok());
      for (int64_t t = cache.length(); t < cache.length() + kPageTokens; ++t) {
        for (int layer = 0; layer < kLayers; ++layer) {
          for (int h = 0; h < kHeads; ++h) {
            for (int d = 0; d < kDim; ++d) {
              const float x = static_cast<float>((t * 7 + layer * 5 + h * 3 + d) % 23) - 11.0f;
              cache.KRow(layer, h, t)[d] = ToBf16(x);
              cache.VRow(layer, h, t)[d] = ToBf16(-x);
            }
          }
        }
      }
      cache.Advance(kPageTokens);
      ASSERT_TRUE(cache.SealForGeneration(threads).ok());
    }
    const CacheUsage usage = cache.Usage();
    EXPECT_EQ(usage.bytes, plan->StoredBytes(kTokens));
    EXPECT_DOUBLE_EQ(usage.bits_per_element, plan->StoredBits(kTokens));
    EXPECT_EQ(pool.bytes_in_use(), usage.bytes);
    EXPECT_EQ(static_cast<int64_t>(usage.sealed_pages) * kPageTokens,
              method.Split(kTokens).history);
    if (!method.is_quantized) continue;
    EXPECT_GT(usage.sealed_pages, 0u);
    const int skipped = method.skip_first_layers + method.skip_last_layers;
    const TokenSplit split = method.Split(kTokens);
    const double exact = static_cast<double>(kTokens - split.history) / kTokens;
    const double quantized =
        (kLayers - skipped) * method.HistoryBits(kHeads, kDim) + skipped * 16.0;
    EXPECT_NEAR(plan->StoredBits(kTokens), 16.0 * exact + quantized / kLayers * (1.0 - exact),
                1e-9);
  }
}

TEST(KvPlan, StoredBitsCountWindowsAndMetadata) {
  const auto plan = Plan("oscar+", Spec(36, 8, 128));
  EXPECT_NEAR(plan->StoredBits(131072), 2.25 + 13.75 * 320 / 131072, 1e-12);  // 2.2836
  EXPECT_GT(plan->StoredBits(131071), 2.28);
  EXPECT_LT(plan->StoredBits(131071), 2.295);  // one token before a seal
  EXPECT_NEAR(plan->StoredBits(14336), 2.557, 1e-3);
  EXPECT_DOUBLE_EQ(plan->StoredBits(384), (320 * 16 + 64 * 2.25) / 384);
  EXPECT_EQ(plan->StoredBits(300), 16.0);
  EXPECT_EQ(Plan("bf16", Spec(36, 8, 128))->StoredBits(1000), 16.0);
  // A page of 64 tokens of one head of 128 takes 4608 bytes, as docs/cache-format.md states.
  const auto one = Plan("oscar+", Spec(1, 1, 128));
  EXPECT_EQ(one->StoredBytes(384) - one->StoredBytes(320), 4608u);
  EXPECT_EQ(Plan("saw-int4", Spec(1, 1, 128))->StoredBytes(64), 8704u);
}

TEST(KvPlan, SkippedLayersStayExact) {
  EXPECT_DOUBLE_EQ(Plan("turboquant-skip", Spec(36, 8, 128))->StoredBits(6400),
                   (32 * 3.1875 + 4 * 16) / 36);
  // Nothing is left of four layers.
  EXPECT_EQ(Plan("turboquant-skip", Spec(4, 8, 128))->StoredBits(6400), 16.0);
}

// At 14K tokens, as OScaR's tables have them: 3.0156 bits of history, a window of 128.
TEST(KvPlan, OscarSuAt14KTokensHoldsItsBits) {
  const auto plan = Plan("oscar-su", Spec(36, 8, 128));
  EXPECT_DOUBLE_EQ(plan->HistoryBits(), 3.015625);
  EXPECT_NEAR(plan->StoredBits(14336), 3.015625 + (16 - 3.015625) * 128 / 14336, 1e-9);
}

}  // namespace
}  // namespace oscar
