// Models with a recurrent state on the GPU: the state lies in the arena beside the pages, and goes
// wherever its sequence goes (engine/hybrids_test.cc has the same of a CPU).
#include <gtest/gtest.h>

#include "cuda/cuda_fixture.h"
#include "engine/engine_test_util.h"
#include "engine/loaded_model.h"
#include "engine/page_budget.h"
#include "engine/tiny_model.h"

namespace oscar {
namespace {

// Sums that show neither batch nor cut.
BackendOptions Invariant() {
  BackendOptions options = Sized(128, 4);
  options.batch_invariant = true;
  return options;
}

struct TinyGpu : TinyModel {
  explicit TinyGpu(const std::string& directory, const KvPlanOptions& kv = SmallWindows(),
                   const BackendOptions& options = Invariant(), uint64_t budget = uint64_t{1} << 26)
      : TinyModel(directory, kv, 2, options, /*is_reference=*/false, budget, Device::kCuda) {}
  // Next tokens of `cache`; logits of the last.
  std::vector<float> Read(SequenceCache& cache, std::span<const int32_t> tokens, bool is_prompt) {
    std::vector<float> logits(static_cast<size_t>(spec.vocab_size));
    const ForwardItem item{&cache, tokens, is_prompt, 1};
    const Status read = model->Forward({&item, 1}, logits);
    EXPECT_TRUE(read.ok()) << read.ToString();
    return logits;
  }
};

// With widths that the kernels for any number of rows take.
std::string AlignedConfig(const std::string& name) {
  auto json = nlohmann::json::parse(ConfigOf(name));
  auto& text = json.contains("text_config") ? json["text_config"] : json;
  text["intermediate_size"] = 96;
  if (text.contains("shared_expert_intermediate_size"))
    text["shared_expert_intermediate_size"] = 64;
  return json.dump();
}

class GpuHybridTest : public testing::TestWithParam<const char*> {
 protected:
  const TinyCheckpoint checkpoint_{AlignedConfig(GetParam())};
};

EngineRequest Greedy(std::vector<int32_t> prompt, int64_t max_tokens) {
  EngineRequest request;
  request.prompt = std::move(prompt);
  request.max_tokens = max_tokens;
  request.sampling.temperature = 0.0f;
  return request;
}

std::vector<int32_t> Joined(std::vector<int32_t> first, const std::vector<int32_t>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// With --batch-invariant prompts go through the recurrent form, whose sums are a token's own.
TEST_P(GpuHybridTest, InvariantBatchesDoNotShow) {
  TinyGpu tiny(checkpoint_.path());
  ASSERT_TRUE(tiny.status.ok()) << tiny.status.ToString();
  const std::vector<int32_t> ids = SomeIds(90);
  const std::vector<float> whole = tiny.Logits(ids);
  EXPECT_EQ(tiny.Logits(ids, 7), whole);
  EXPECT_EQ(tiny.Logits(ids, 64), whole);
}

// Two conversations with one beginning, beside a third, in recorded steps and out of them: each as
// if it were alone. The state is copied when the first of them continues.
TEST_P(GpuHybridTest, ForksAreIndependent) {
  TinyGpu tiny(checkpoint_.path());
  ASSERT_TRUE(tiny.status.ok()) << tiny.status.ToString();
  const std::vector<int32_t> ids = SomeIds(70);
  const auto vocab = static_cast<size_t>(tiny.spec.vocab_size);
  const auto steps = [&](std::vector<SequenceCache*> caches, std::vector<int32_t> tokens) {
    std::vector<float> logits(caches.size() * vocab);
    for (int round = 0; round < 3; ++round) {
      std::vector<ForwardItem> items;
      for (size_t i = 0; i < caches.size(); ++i)
        items.push_back({caches[i], {&tokens[i], 1}, false, 1});
      EXPECT_TRUE(tiny.model->Forward(items, logits).ok());
      for (int32_t& token : tokens) token = 2 + (token * 7 + round) % 150;
    }
    return logits;
  };
  SequenceCache first(tiny.plan->cache(), *tiny.pool), third(tiny.plan->cache(), *tiny.pool);
  tiny.Read(first, ids, true);
  tiny.Read(third, std::span(ids).first(9), true);
  {
    SequenceCache second = first.Fork();
    EXPECT_EQ(first.state().data(), second.state().data());
    const std::vector<float> all = steps({&first, &second, &third}, {11, 99, 5});
    EXPECT_NE(first.state().data(), second.state().data());
    for (const auto& [index, token] : {std::pair<size_t, int32_t>{0, 11}, {1, 99}, {2, 5}}) {
      SequenceCache alone(tiny.plan->cache(), *tiny.pool);
      tiny.Read(alone, std::span(ids).first(index == 2 ? 9 : ids.size()), true);
      const std::vector<float> expected = steps({&alone}, {token});
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(),
                             all.begin() + static_cast<ptrdiff_t>(index * vocab)))
          << index;
    }
  }
  first.Trim(0);
  third.Trim(0);
  EXPECT_EQ(tiny.pool->bytes_in_use(), 0u);
}

TEST_P(GpuHybridTest, TrimGoesBackToASnapshot) {
  TinyGpu tiny(checkpoint_.path());
  ASSERT_TRUE(tiny.status.ok()) << tiny.status.ToString();
  const std::vector<int32_t> ids = SomeIds(60);
  SequenceCache cache(tiny.plan->cache(), *tiny.pool);
  tiny.Read(cache, std::span(ids).first(40), true);
  cache.KeepSnapshot();
  const std::vector<float> expected = tiny.Read(cache, std::span(ids).subspan(40), true);
  EXPECT_EQ(cache.Usage().state_bytes, 2 * tiny.plan->cache().state.bytes());
  EXPECT_EQ(cache.Usage().bytes, tiny.pool->bytes_in_use());
  EXPECT_EQ(cache.Trim(59), 40);
  EXPECT_EQ(tiny.Read(cache, std::span(ids).subspan(40), true), expected);
  EXPECT_EQ(cache.Trim(39), 0);
  EXPECT_EQ(tiny.pool->bytes_in_use(), 0u);
  tiny.Read(cache, std::span(ids).first(40), true);
  EXPECT_EQ(tiny.Read(cache, std::span(ids).subspan(40), true), expected);
}

// A state that the CPU made continues on the GPU, and the bits of portable passes are the CPU's.
TEST_P(GpuHybridTest, StatesAreTheCpus) {
  BackendOptions portable = Sized(128, 2);
  portable.portable = true;
  TinyGpu gpu(checkpoint_.path(), SmallWindows(), portable);
  ASSERT_TRUE(gpu.status.ok()) << gpu.status.ToString();
  TinyModel cpu(checkpoint_.path(), SmallWindows(), 2, portable);
  const std::vector<int32_t> ids = SomeIds(50);
  SequenceCache mine(gpu.plan->cache(), *gpu.pool), theirs(cpu.plan->cache(), *cpu.pool);
  gpu.Read(mine, ids, true);
  std::vector<float> logits(static_cast<size_t>(cpu.spec.vocab_size));
  const ForwardItem item{&theirs, ids, true, 1};
  ASSERT_TRUE(cpu.model->Forward({&item, 1}, logits).ok());
  const size_t bytes = cpu.plan->cache().state.bytes();
  std::vector<std::byte> a(bytes), b(bytes);
  ASSERT_TRUE(gpu.pool->Read(mine.state(), a).ok());
  ASSERT_TRUE(cpu.pool->Read(theirs.state(), b).ok());
  EXPECT_TRUE(a == b);
  const std::vector<float> expected = gpu.Read(mine, std::span(ids).first(3), true);
  SequenceCache other(gpu.plan->cache(), *gpu.pool);
  gpu.Read(other, ids, true);
  ASSERT_TRUE(other.ImportState(theirs).ok());
  EXPECT_EQ(gpu.Read(other, std::span(ids).first(3), true), expected);
}

// Through the engine: in a pool where two requests do not fit beside each other, from snapshots,
// preempted, continued. Each answer is the one that it has alone.
TEST_P(GpuHybridTest, SchedulingChangesNoAnswer) {
  TinyGpu reference(checkpoint_.path());
  ASSERT_TRUE(reference.status.ok()) << reference.status.ToString();
  const CacheConfig& config = reference.plan->cache();
  const uint64_t tight =
      PeakBytes(config, 140, 160) + 2 * config.open.bytes() + 2 * config.state.bytes();
  TinyGpu tiny(checkpoint_.path(), SmallWindows(), Invariant(), tight);
  ASSERT_TRUE(tiny.status.ok()) << tiny.status.ToString();
  EngineServiceOptions options;
  options.step_tokens = 100;
  options.deterministic = true;
  auto service = MakeEngineService(*tiny.model, *tiny.pool, tiny.threads, options);
  std::vector<EngineRequest> requests;
  for (uint64_t i = 0; i < 3; ++i) requests.push_back(Greedy(SomeIds(60 + 40 * i, i), 12));
  requests.push_back(requests[2]);
  requests.back().prompt.push_back(9);
  std::vector<std::vector<int32_t>> expected;
  for (const EngineRequest& request : requests) {
    expected.push_back(reference.Greedy(request.prompt, 12));
  }
  int64_t cached = 0;
  for (int round = 0; round < 2; ++round) {
    std::vector<std::unique_ptr<RequestHandle>> handles;
    for (const EngineRequest& request : requests) handles.push_back(*service->Submit(request));
    for (size_t i = 0; i < requests.size(); ++i) {
      const Answer answer = Collect(*handles[i]);
      EXPECT_TRUE(answer.finished) << answer.status.ToString();
      cached += answer.cached_tokens;
      EXPECT_EQ(answer.tokens, expected[i]) << "request " << i << " of round " << round;
    }
  }
  EXPECT_GT(cached, 0);
  EXPECT_LE(tiny.pool->peak_bytes(), tiny.pool->budget());
}

// The next turn of a chat computes its new tokens and the one that was never computed.
TEST_P(GpuHybridTest, AFollowUpComputesOnlyWhatIsNew) {
  TinyGpu tiny(checkpoint_.path()), other(checkpoint_.path());
  ASSERT_TRUE(tiny.status.ok()) << tiny.status.ToString();
  auto service = MakeEngineService(*tiny.model, *tiny.pool, tiny.threads, {});
  Generator uninterrupted(*other.model, *other.pool);
  std::vector<int32_t> history;
  for (const size_t turn : {size_t{150}, size_t{20}}) {
    const size_t known = history.size();
    history = Joined(history, SomeIds(turn, turn));
    const Answer answer = Collect(**service->Submit(Greedy(history, 8)));
    ASSERT_TRUE(answer.finished) << answer.status.ToString();
    EXPECT_EQ(answer.cached_tokens, known == 0 ? 0 : static_cast<int64_t>(known) - 1);
    GenerateRequest request;
    request.prompt = history;
    request.sampling.temperature = 0.0f;
    request.max_tokens = 8;
    EXPECT_EQ(answer.tokens, uninterrupted.Generate(request)->tokens) << turn;
    history = Joined(history, answer.tokens);
  }
  ASSERT_TRUE(Eventually([&] { return service->Stats().running == 0; }));
  EXPECT_GT(service->Stats().snapshot_bytes, 0u);
}

// The root mean square by which a row of logits differs, the median of all rows: where a token
// nearly goes to other experts, rounding decides.
double MedianDistance(const std::vector<float>& logits, const std::vector<float>& expected,
                      size_t vocab) {
  EXPECT_EQ(logits.size(), expected.size());
  std::vector<double> rms;
  for (size_t at = 0; at < logits.size(); at += vocab) {
    double squares = 0.0;
    for (size_t j = at; j < at + vocab; ++j) {
      squares += std::pow(static_cast<double>(logits[j]) - expected[j], 2);
    }
    rms.push_back(std::sqrt(squares / static_cast<double>(vocab)));
  }
  std::ranges::sort(rms);
  return rms[rms.size() / 2];
}

// Of shape 128 by 128, as published.
std::string PublishedHeads(const std::string& name) {
  auto json = nlohmann::json::parse(AlignedConfig(name));
  auto& text = json.contains("text_config") ? json["text_config"] : json;
  text["linear_key_head_dim"] = text["linear_value_head_dim"] = 128;
  text["linear_num_key_heads"] = 1;
  text["linear_num_value_heads"] = 2;
  return json.dump();
}

// Heads of 128 by 128: prompts go through tensor cores in tiles.
TEST_P(GpuHybridTest, PromptsInTilesAreTheCpus) {
  const TinyCheckpoint checkpoint(PublishedHeads(GetParam()));
  TinyGpu tiles(checkpoint.path(), TinyModel::Bf16(), Sized(256, 2));
  ASSERT_TRUE(tiles.status.ok()) << tiles.status.ToString();
  TinyGpu tokens(checkpoint.path(), TinyModel::Bf16());
  TinyModel cpu(checkpoint.path(), TinyModel::Bf16(), 2);
  const std::vector<int32_t> ids = SomeIds(150);
  const std::vector<float> expected = cpu.Logits(ids);
  const auto distance = [&](const std::vector<float>& logits) {
    return MedianDistance(logits, expected, static_cast<size_t>(cpu.spec.vocab_size));
  };
  const double in_tiles = distance(tiles.Logits(ids)), cut = distance(tiles.Logits(ids, 50)),
               one_by_one = distance(tokens.Logits(ids));
  std::printf("tiles %.4f, cut %.4f, token by token %.4f\n", in_tiles, cut, one_by_one);
  EXPECT_LE(std::max(in_tiles, cut), 2 * BudgetOf("bf16").rms);
  EXPECT_LE(one_by_one, 2 * BudgetOf("bf16").rms);
  // What they leave behind is continued by the recurrent form.
  EXPECT_EQ(tiles.Greedy(ids, 4).size(), 4u);
}

// Two prompts and a generated token in one pass: tiles and states are each sequence's own.
TEST_P(GpuHybridTest, TilesOfSeveralPrompts) {
  const TinyCheckpoint checkpoint(PublishedHeads(GetParam()));
  TinyGpu tiny(checkpoint.path(), SmallWindows(), Sized(256, 2));
  ASSERT_TRUE(tiny.status.ok()) << tiny.status.ToString();
  const auto vocab = static_cast<size_t>(tiny.spec.vocab_size);
  const std::vector<int32_t> first = SomeIds(100, 1), second = SomeIds(70, 2),
                             third = SomeIds(30, 3);
  const auto run = [&](std::span<const size_t> which) {
    std::vector<SequenceCache> caches;
    for (int i = 0; i < 3; ++i) caches.emplace_back(tiny.plan->cache(), *tiny.pool);
    tiny.Read(caches[0], std::span(first).first(30), true);  // continued inside a tile
    tiny.Read(caches[2], std::span(third).first(29), true);
    const ForwardItem items[] = {{&caches[0], std::span(first).subspan(30), true, 1},
                                 {&caches[1], second, true, 1},
                                 {&caches[2], std::span(third).subspan(29), false, 1}};
    std::vector<ForwardItem> chosen;
    for (const size_t i : which) chosen.push_back(items[i]);
    std::vector<float> logits(which.size() * vocab);
    EXPECT_TRUE(tiny.model->Forward(chosen, logits).ok());
    return logits;
  };
  const size_t all[] = {0, 1, 2};
  const std::vector<float> together = run(all);
  for (const size_t i : all) {
    const std::vector<float> alone = run({&i, 1});
    const auto from = together.begin() + static_cast<ptrdiff_t>(i * vocab);
    EXPECT_LE(MedianDistance({from, from + static_cast<ptrdiff_t>(vocab)}, alone, vocab),
              2 * BudgetOf("bf16").rms)
        << i;
  }
}

// Random weights, which a device samples itself: BF16 and FP8, gates beside queries.
TEST_P(GpuHybridTest, RandomWeightsRun) {
  const auto config = ReadModelConfig(checkpoint_.path());
  const ModelSpec spec = *MakeModelSpec(*config);
  for (const bool fp8 : {false, true}) {
    auto source = MakeRandomWeights(7);
    if (fp8) source = QuantizeWeights(std::move(source), spec);
    GpuModel gpu(spec, *source, SmallWindows(), Sized(128, 2));
    Generator generator(*gpu.model, *gpu.pool);
    size_t rows = 0;
    const Status read =
        generator.Prefill(SomeIds(40), 40, [&](int64_t, std::span<const float> logits) {
          rows += logits.size() / static_cast<size_t>(spec.vocab_size);
          EXPECT_TRUE(std::ranges::all_of(logits, [](float x) { return std::isfinite(x); }));
        });
    EXPECT_TRUE(read.ok()) << read.ToString();
    EXPECT_EQ(rows, 40u);
  }
}

// As commands load it: planned with the state, without and with weights, and its arena holds at
// least a sequence's.
TEST_P(GpuHybridTest, LoadsAsCommandsDo) {
  ModelOptions options;
  options.model = checkpoint_.path();
  options.device = Device::kCuda;
  options.kv_memory = uint64_t{1} << 24;
  options.chunk = 128;
  options.max_sequences = 2;
  options.num_threads = 2;
  const auto planned = LoadedModel::Plan(options);
  ASSERT_TRUE(planned.has_value()) << planned.error().ToString();
  const uint64_t state = (*planned)->kv().cache().state.bytes();
  EXPECT_GT(state, 0u);
  EXPECT_EQ((*planned)->memory().state_bytes, state);
  const auto loaded = LoadedModel::Load(options);
  ASSERT_TRUE(loaded.has_value()) << loaded.error().ToString();
  EXPECT_GE((*loaded)->pool().budget(), options.kv_memory);
  Generator generator((*loaded)->model(), (*loaded)->pool());
  GenerateRequest request;
  request.prompt = SomeIds(30);
  request.sampling.temperature = 0.0f;
  request.max_tokens = 3;
  const auto answer = generator.Generate(request);
  ASSERT_TRUE(answer.has_value()) << answer.error().ToString();
  EXPECT_GE((*loaded)->pool().peak_bytes(), state);
  options.kv_memory = state;
  const auto tight = LoadedModel::Plan(options);
  ASSERT_FALSE(tight.has_value());
  EXPECT_NE(tight.error().message().find("recurrent state"), std::string::npos)
      << tight.error().ToString();
}

INSTANTIATE_TEST_SUITE_P(Hybrids, GpuHybridTest, testing::Values("qwen3_5", "qwen3_next"),
                         [](const auto& item) { return std::string(item.param); });

// Calibrated rotations, one per KV head: V's is undone before the gates, by its matrix.
TEST(GpuHybrids, CalibratedRotationsAreUndone) {
  for (const char* name : {"qwen3_5", "qwen3_5_moe", "qwen3_5_moe_fp8"}) {
    const TinyCheckpoint checkpoint(ConfigOf(name));
    const ModelSpec spec = *MakeModelSpec(*ReadModelConfig(checkpoint.path()));
    const int dim = spec.attention().head_dim;
    Rotation rotation;
    rotation.head_dim = dim;
    const Philox rng(3, 0);
    uint64_t next = 0;
    const auto side = [&] {
      SideRotation made;
      made.num_heads = spec.attention().num_kv_heads;
      for (int head = 0; head < made.num_heads; ++head) {
        // A reflection and a shift of dims: orthogonal, and not its own inverse.
        std::vector<double> u(static_cast<size_t>(dim));
        double size = 0.0;
        for (double& x : u) size += std::pow(x = rng.Normal(next++), 2);
        for (int i = 0; i < dim; ++i) {
          for (int j = 0; j < dim; ++j) {
            const int to = (j + 1) % dim;
            made.matrices.push_back(
                static_cast<float>((i == to ? 1.0 : 0.0) - 2.0 * u[static_cast<size_t>(i)] *
                                                               u[static_cast<size_t>(to)] / size));
          }
          made.eigenvalues.push_back(1.0f);
        }
        made.clip.push_back(0.0f);
      }
      return made;
    };
    for (const int layer : spec.kv_layers()) rotation.layers[layer] = {side(), side()};
    KvPlanOptions kv = SmallWindows();
    kv.rotation = rotation;
    BackendOptions portable = Sized(128, 2);
    portable.portable = true;
    const std::vector<int32_t> ids = SomeIds(150);
    {
      TinyGpu gpu(checkpoint.path(), kv, portable);
      ASSERT_TRUE(gpu.status.ok()) << gpu.status.ToString();
      TinyModel cpu(checkpoint.path(), kv, 2, portable);
      EXPECT_EQ(gpu.Logits(ids), cpu.Logits(ids)) << name;
    }
    // As long as nothing is quantised a rotation does not show.
    const std::vector<int32_t> few(ids.begin(), ids.begin() + 50);
    TinyGpu gpu(checkpoint.path(), kv, Sized(128, 2));
    ASSERT_TRUE(gpu.status.ok()) << gpu.status.ToString();
    TinyModel plain(checkpoint.path(), TinyModel::Bf16(), 2);
    EXPECT_LE(
        MedianDistance(gpu.Logits(few), plain.Logits(few), static_cast<size_t>(spec.vocab_size)),
        2 * BudgetOf("bf16").rms)
        << name;
  }
}

}  // namespace
}  // namespace oscar
