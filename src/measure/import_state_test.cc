// Prompts of models with a recurrent state, imported into caches of other plans.
#include <gtest/gtest.h>

#include <cmath>

#include "engine/tiny_model.h"
#include "measure/import_prompt.h"

namespace oscar {
namespace {

std::vector<float> Step(TinyModel& tiny, SequenceCache& cache, int32_t token) {
  std::vector<float> logits(static_cast<size_t>(tiny.spec.vocab_size));
  const ForwardItem item{&cache, {&token, 1}, /*is_prompt=*/false, 1};
  EXPECT_TRUE(tiny.model->Forward({&item, 1}, logits).ok());
  return logits;
}

TEST(ImportPrompt, BringsTheState) {
  const TinyCheckpoint checkpoint(ConfigOf("qwen3_5_moe"));
  TinyModel exact(checkpoint.path());
  const std::vector<int32_t> ids = SomeIds(120);
  SequenceCache prefix(exact.plan->cache(), *exact.pool);
  const ForwardItem item{&prefix, ids, /*is_prompt=*/true, 0};
  ASSERT_TRUE(exact.model->Forward({&item, 1}, {}).ok());
  for (const char* method : {"bf16", "oscar+"}) {
    KvPlanOptions kv = SmallWindows();  // nothing of 120 tokens is sealed
    kv.method = method;
    if (kv.method == "bf16") kv.recent.reset();
    TinyModel tiny(checkpoint.path(), kv);
    ASSERT_TRUE(tiny.status.ok()) << tiny.status.ToString();
    SequenceCache imported(tiny.plan->cache(), *tiny.pool);
    ASSERT_TRUE(ImportPrompt(prefix, *tiny.plan, tiny.spec.num_kv_layers(),
                             tiny.spec.attention().num_kv_heads, tiny.spec.attention().head_dim,
                             tiny.threads, imported)
                    .ok());
    SequenceCache own = prefix.Fork();
    const std::vector<float> expected = Step(exact, own, 7), logits = Step(tiny, imported, 7);
    double largest = 0.0;
    for (size_t i = 0; i < logits.size(); ++i) {
      largest = std::max(largest, std::fabs(static_cast<double>(logits[i]) - expected[i]));
    }
    if (kv.method == "bf16") {
      EXPECT_EQ(largest, 0.0);
    } else {
      EXPECT_LE(largest, BudgetOf("bf16").gap);  // rotated rows are rounded once more
    }
  }
}

}  // namespace
}  // namespace oscar
