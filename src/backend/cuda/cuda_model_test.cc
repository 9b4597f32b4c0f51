// The model on the GPU against the CPU's, against the goldens, and against itself in other batches.

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>

#include "base/fp8.h"
#include "base/log.h"
#include "base/rng.h"
#include "cuda/cuda_fixture.h"
#include "engine/generator.h"
#include "engine/sampler.h"

namespace oscar {
namespace {

TEST(CudaModel, LogitsMatchTransformersOnABf16Cache) {
  GpuModel gpu(DemoModel::Method("bf16"));
  ExpectGoldenLogits(*gpu.model, *gpu.pool);
}

TEST(CudaModel, GoldenChatsOnABf16Cache) {
  GpuModel gpu(DemoModel::Method("bf16"));
  ExpectGoldenChats(*gpu.model, *gpu.pool);
}

class MethodTest : public testing::TestWithParam<MethodCase> {};

// Prompts with history in every form, then generated tokens across several seals, both fed the
// CPU's choices: the logits must stay together all the way.
TEST_P(MethodTest, FollowsTheCpu) {
  const char* const name = GetParam().name;
  const WeightFormat weights = GetParam().weights;
  const KvPlanOptions method = PlanOf(GetParam());
  DemoModel cpu(method, 8, uint64_t{1} << 30, weights);
  GpuModel gpu(method, Sized(512, 8), weights);
  const Followed f =
      Follow(*cpu.model, cpu.pool, *gpu.model, *gpu.pool, SomeTokens(1900), /*steps=*/200);
  std::printf("%s: max %.4f rms %.5f, %d of 200 greedy ids diverged, at gaps up to %.4f\n", name,
              f.worst_max, f.worst_rms, f.diverged, f.widest_gap);
  EXPECT_LE(f.worst_rms, BudgetOf(name).rms);
  EXPECT_LE(f.widest_gap, BudgetOf(name).gap);
  EXPECT_LE(f.diverged, 6);
  EXPECT_EQ(f.sealed_pages[0], f.sealed_pages[1]);
}

INSTANTIATE_TEST_SUITE_P(
    All, MethodTest,
    testing::Values(MethodCase{"bf16"}, MethodCase{"bf16", WeightFormat::kFp8},
                    MethodCase{"oscar+", WeightFormat::kFp8}, MethodCase{"oscar+"},
                    MethodCase{"oscar+ mixed"},
                    MethodCase{"oscar+ mixed", WeightFormat::kCheckpoint, false, 64},
                    MethodCase{"saw-int4"}, MethodCase{"quarot"},
                    MethodCase{"oscar", WeightFormat::kCheckpoint, true},
                    MethodCase{"oscar+", WeightFormat::kCheckpoint, true},
                    MethodCase{"oscar+", WeightFormat::kFp8, true, 32},
                    MethodCase{"saw-int4", WeightFormat::kCheckpoint, false, 64}));

// The map that the demo model comes with: layers of heads alike beside one whose heads differ.
// Short, so that it may be run on an emulated GPU, too.
TEST(CudaModel, TheDefaultMapFollowsTheCpu) {
  KvPlanOptions method = DefaultMap(/*cell=*/64);
  method.sink = 64;
  method.recent = 64;
  DemoModel cpu(method, 2);
  GpuModel gpu(method, Sized(64, 2));
  EXPECT_FALSE(gpu.plan->cache().sealed.is_uniform());
  const Followed f =
      Follow(*cpu.model, cpu.pool, *gpu.model, *gpu.pool, SomeTokens(320), /*steps=*/3);
  EXPECT_LE(f.worst_rms, BudgetOf("oscar+").rms);
  EXPECT_LE(f.widest_gap, BudgetOf("oscar+").gap);
  EXPECT_EQ(f.sealed_pages[0], f.sealed_pages[1]);
  EXPECT_GE(f.sealed_pages[1], 3);
}

// The 2-bit codes that both write for the same prompt. They part where a number lies within
// rounding of a boundary between codes, more so the deeper the layer.
TEST(CudaModel, CodesAreMostlyTheCpus) {
  constexpr int64_t kTokens = 1500;
  const KvPlanOptions method = DemoModel::Method("oscar+", /*cell=*/64);
  DemoModel cpu(method);
  GpuModel gpu(method, Sized(512, 8));
  const auto prompt = SomeTokens(kTokens);
  Generator on_cpu(*cpu.model, cpu.pool), on_gpu(*gpu.model, *gpu.pool);
  ASSERT_TRUE(on_cpu.Prefill(prompt, 1, {}).ok() && on_gpu.Prefill(prompt, 1, {}).ok());
  const PageLayout &cpu_shape = cpu.plan->cache().sealed, &gpu_shape = gpu.plan->cache().sealed;
  const auto code_at = [](std::span<const std::byte> block, CodePosition at) {
    uint32_t word = 0;
    std::memcpy(&word, block.data() + at.offset, sizeof(word));
    return (word >> at.shift) & 3u;
  };
  std::vector<std::array<int64_t, 2>> diverged(static_cast<size_t>(cpu_shape.num_layers()));
  int64_t codes = 0;
  std::vector<std::byte> from_cpu(cpu_shape.bytes()), from_gpu(gpu_shape.bytes());
  for (int64_t page = 0; page < on_cpu.cache().num_pages(); ++page) {
    ASSERT_EQ(on_cpu.cache().is_sealed(page), on_gpu.cache().is_sealed(page));
    if (!on_cpu.cache().is_sealed(page)) continue;
    ASSERT_TRUE(cpu.pool.Read(on_cpu.cache().page(page), from_cpu).ok());
    ASSERT_TRUE(gpu.pool->Read(on_gpu.cache().page(page), from_gpu).ok());
    for (int layer = 0; layer < cpu_shape.num_layers(); ++layer) {
      const BlockLayout &a = cpu_shape.block(layer, 0), &b = gpu_shape.block(layer, 0);
      for (int head = 0; head < cpu_shape.kv_heads(); ++head) {
        const auto block_a = std::span(from_cpu).subspan(cpu_shape.BlockOffset(layer, head));
        const auto block_b = std::span(from_gpu).subspan(gpu_shape.BlockOffset(layer, head));
        for (int t = 0; t < kPageTokens; ++t) {
          for (int d = 0; d < a.head_dim(); ++d) {
            auto& [k, v] = diverged[static_cast<size_t>(layer)];
            k += code_at(block_a, a.KCode(t, d)) != code_at(block_b, b.KCode(t, d));
            v += code_at(block_a, a.VCode(t, d)) != code_at(block_b, b.VCode(t, d));
          }
        }
      }
    }
    codes += int64_t{cpu_shape.kv_heads()} * kPageTokens * cpu.model->spec().attention().head_dim;
  }
  ASSERT_GT(codes, 0);
  for (size_t layer = 0; layer < diverged.size(); ++layer) {
    const double k = static_cast<double>(diverged[layer][0]) / static_cast<double>(codes);
    const double v = static_cast<double>(diverged[layer][1]) / static_cast<double>(codes);
    std::printf("layer %zu: %.3f %% of K codes and %.3f %% of V codes part\n", layer, 100 * k,
                100 * v);
    EXPECT_LE(k, 0.05) << "layer " << layer;
    EXPECT_LE(v, 0.05) << "layer " << layer;
  }
}

// Three values that fp16 cannot hold are put into a page by hand: sealing counts and warns of them.
TEST(CudaModel, CountsWhatDoesNotFitAPage) {
  std::vector<std::string> warnings;
  SetLogSink([&](LogLevel level, std::string_view text) {
    if (level == LogLevel::kWarning) warnings.emplace_back(text);
  });
  GpuModel gpu(DemoModel::Method("oscar+"), Sized(512, 8));
  Generator generator(*gpu.model, *gpu.pool);
  ASSERT_TRUE(generator.Prefill(SomeTokens(320), 1, {}).ok());
  const PageLayout& shape = gpu.plan->cache().open;
  std::vector<std::byte> page(shape.bytes());
  ASSERT_TRUE(gpu.pool->Read(generator.cache().page(1), page).ok());
  for (const int d : {0, 17, 127}) {
    const Bf16 value = ToBf16(d == 17 ? -1e6f : 1e6f);
    const CodePosition at = shape.block(2, 0).VCode(5, d);
    std::memcpy(page.data() + shape.BlockOffset(2, 1) + at.offset + at.shift / 8, &value,
                sizeof(value));
  }
  ASSERT_TRUE(gpu.pool->Write(generator.cache().page(1), page).ok());
  EXPECT_EQ(*gpu.backend().Saturated(), 0u);
  for (int i = 0; i < 140; ++i) ASSERT_TRUE(generator.Step(100 + i).has_value());
  SetLogSink({});
  EXPECT_GE(generator.cache().Usage().sealed_pages, 2);
  EXPECT_EQ(*gpu.backend().Saturated(), 3u);
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("3 keys or values"), std::string::npos) << warnings[0];
}

TEST(CudaModel, ChunksChangeLittleAndNothingPiles) {
  const auto tokens = SomeTokens(900);
  GpuModel gpu(DemoModel::Method("oscar+", 256), Sized(512, 8));
  const auto expected = LogitsOf(*gpu.model, *gpu.pool, tokens, 30);
  for (int chunk : {7, 64, 100, 255}) {
    const Difference d = Compare(LogitsOf(*gpu.model, *gpu.pool, tokens, 30, chunk), expected);
    EXPECT_LE(d.rms, 3e-2) << "chunk " << chunk;
  }
  EXPECT_EQ(gpu.pool->pages_in_use(), 0);
}

// Several sequences alone and together. With batch-invariant products the bits agree; otherwise ids
// may part only below the gap.
class BatchTest : public testing::TestWithParam<bool> {};
TEST_P(BatchTest, TogetherAsAlone) {
  BackendOptions options = Sized(1024, 32);
  options.batch_invariant = GetParam();
  GpuModel gpu(DemoModel::Method("oscar+", 256), options);
  const auto vocab = static_cast<size_t>(gpu.model->spec().vocab_size);
  std::vector<size_t> lengths;
  for (size_t i = 0; i < 21; ++i) lengths.push_back(40 + 67 * i);
  std::vector<std::vector<float>> alone;
  for (size_t length : lengths) {
    Generator generator(*gpu.model, *gpu.pool);
    const auto tokens = SomeTokens(length);
    ASSERT_TRUE(generator.Prefill(tokens, 1, {}).ok());
    std::vector<float> logits;
    for (int32_t t = 0; t < 5; ++t) {
      const auto step = generator.Step(100 + t);
      ASSERT_TRUE(step.has_value());
      logits.insert(logits.end(), step->begin(), step->end());
    }
    alone.push_back(std::move(logits));
  }
  std::vector<SequenceCache> caches;
  std::vector<std::vector<int32_t>> prompts;
  for (size_t length : lengths) {
    caches.emplace_back(gpu.plan->cache(), *gpu.pool);
    prompts.push_back(SomeTokens(length));
    const int64_t cell = gpu.plan->cache().cell;
    for (size_t at = 0; at < length;) {
      const size_t count = std::min<size_t>(length - at, static_cast<size_t>(cell) - at % 256);
      const ForwardItem item{&caches.back(), std::span(prompts.back()).subspan(at, count), true, 0};
      ASSERT_TRUE(gpu.model->Forward({&item, 1}, {}).ok());
      at += count;
    }
  }
  for (int32_t t = 0; t < 5; ++t) {
    const int32_t token = 100 + t;
    std::vector<ForwardItem> items;
    items.reserve(caches.size());
    for (SequenceCache& cache : caches) items.push_back({&cache, {&token, 1}, false, 1});
    std::vector<float> logits(items.size() * vocab);
    const Status status = gpu.model->Forward(items, logits);
    ASSERT_TRUE(status.ok()) << status.ToString();
    for (size_t i = 0; i < items.size(); ++i) {
      const std::span<const float> together(logits.data() + i * vocab, vocab);
      const std::span<const float> single(alone[i].data() + static_cast<size_t>(t) * vocab, vocab);
      const Difference d = Compare(together, single);
      if (GetParam()) {
        EXPECT_EQ(d.max, 0.0) << "sequence " << i << " step " << t;
      } else {
        EXPECT_LE(d.rms, 5e-2) << "sequence " << i << " step " << t;
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Both, BatchTest, testing::Bool());

TEST(CudaModel, MixedPassesAndForksAreAsSeparateOnes) {
  GpuModel gpu(DemoModel::Method("oscar+", 256), Sized(512, 8));
  const auto vocab = static_cast<size_t>(gpu.model->spec().vocab_size);
  const auto tokens = SomeTokens(700);
  SequenceCache first(gpu.plan->cache(), *gpu.pool);
  std::vector<float> logits(vocab), expected(vocab);
  for (size_t at = 0; at < 700;) {
    const size_t count = std::min<size_t>(700 - at, 256 - at % 256);
    const ForwardItem item{&first, std::span(tokens).subspan(at, count), true, at + count == 700};
    ASSERT_TRUE(
        gpu.model->Forward({&item, 1}, at + count == 700 ? logits : std::span<float>()).ok());
    at += count;
  }
  // A fork takes its own way; the original's pages must not feel it.
  SequenceCache fork = first.Fork();
  const int32_t a = 17, b = 1234;
  const ForwardItem alone{&first, {&a, 1}, false, 1};
  ASSERT_TRUE(gpu.model->Forward({&alone, 1}, expected).ok());
  const int64_t kept = first.Trim(700);
  ASSERT_EQ(kept, 700);
  SequenceCache fresh(gpu.plan->cache(), *gpu.pool);
  const ForwardItem mixed[] = {{&fork, {&b, 1}, false, 1},
                               {&fresh, std::span(tokens).first(200), true, 1},
                               {&first, {&a, 1}, false, 1}};
  std::vector<float> all(3 * vocab);
  const Status status = gpu.model->Forward(mixed, all);
  ASSERT_TRUE(status.ok()) << status.ToString();
  const Difference d = Compare(std::span(all).subspan(2 * vocab, vocab), expected);
  EXPECT_LE(d.rms, 2e-2);
  const auto other = LogitsOf(*gpu.model, *gpu.pool, std::span(tokens).first(200), 1);
  EXPECT_LE(Compare(std::span(all).subspan(vocab, vocab), other).rms, 2e-2);
  EXPECT_GT(Compare(std::span(all).first(vocab), expected).rms,
            0.1);  // another token, another answer
}

// A small arena in which sealed pages of many sequences come and go: what the budget allows must
// fit, whatever the order, and moved pages must still be read.
TEST(CudaModel, FullArenaMovesPages) {
  BackendOptions options = Sized(512, 8);
  GpuModel probe(DemoModel::Method("oscar+", 256), Sized(64, 1));
  options.kv_bytes = 40 * probe.plan->cache().open.bytes();
  GpuModel gpu(DemoModel::Method("oscar+", 256), options);
  const auto tokens = SomeTokens(1500);
  const auto expected = LogitsOf(*gpu.model, *gpu.pool, tokens, 1);
  std::vector<SequenceCache> kept;
  const Philox rng(3, 0);
  uint64_t draw = 0;
  int refused = 0;
  for (int round = 0; round < 60; ++round) {
    kept.emplace_back(gpu.plan->cache(), *gpu.pool);
    const size_t length = 400 + rng.Below(draw++, 900);
    bool full = false;
    for (size_t at = 0; at < length && !full;) {
      const size_t count = std::min<size_t>(length - at, 256 - at % 256);
      const ForwardItem item{&kept.back(), std::span(tokens).subspan(at, count), true, 0};
      const Status status = gpu.model->Forward({&item, 1}, {});
      full = status.code() == StatusCode::kResourceExhausted;
      ASSERT_TRUE(status.ok() || full) << status.ToString();
      at += count;
    }
    // Generates one token, so that history is sealed; then only scattered forks stay.
    if (full) {
      ++refused;
      kept.pop_back();
      if (kept.size() > 1)
        kept.erase(kept.begin() + rng.Below(draw++, static_cast<uint32_t>(kept.size())));
      continue;
    }
    const int32_t token = 5;
    const ForwardItem item{&kept.back(), {&token, 1}, false, 0};
    const Status status = gpu.model->Forward({&item, 1}, {});
    ASSERT_TRUE(status.ok() || status.code() == StatusCode::kResourceExhausted)
        << status.ToString();
  }
  EXPECT_GT(refused, 0);
  kept.clear();
  EXPECT_EQ(gpu.pool->pages_in_use(), 0);
  EXPECT_EQ(LogitsOf(*gpu.model, *gpu.pool, tokens, 1), expected);
}

TEST(CudaModel, SamplesAsTheSamplerDoes) {
  GpuModel gpu(DemoModel::Method("bf16"), Sized(256, 64));
  const auto vocab = static_cast<size_t>(gpu.model->spec().vocab_size);
  const auto tokens = SomeTokens(50);
  int undecided = 0, compared = 0;
  for (const auto& [temperature, top_k, top_p, min_p] : {std::tuple{0.0f, 0, 1.0f, 0.0f},
                                                         {0.6f, 20, 0.95f, 0.0f},
                                                         {0.9f, 40, 1.0f, 0.0f},
                                                         {1.0f, 0, 0.9f, 0.0f},
                                                         {1.0f, 0, 1.0f, 0.0f},
                                                         {1.3f, 200, 0.99f, 0.02f},
                                                         {0.8f, 0, 0.5f, 0.1f}}) {
    for (uint64_t seed = 0; seed < 40; ++seed) {
      SamplingOptions sampling;
      sampling.temperature = temperature;
      sampling.top_k = top_k;
      sampling.top_p = top_p;
      sampling.min_p = min_p;
      sampling.seed = seed;
      Sampler on_host(sampling), on_device(sampling);
      SequenceCache cache(gpu.plan->cache(), *gpu.pool);
      const ForwardItem item{&cache, std::span(tokens).first(10 + seed), true, 1};
      const SampleParams sample = *on_device.NextSample();
      int32_t id = 0;
      const Status status = gpu.model->ForwardAndSample({&item, 1}, {&sample, 1}, {&id, 1});
      ASSERT_TRUE(status.ok()) << status.ToString();
      std::vector<float> logits(vocab);
      ASSERT_TRUE(gpu.model->ReadLogits(0, logits).ok());
      ++compared;
      if (id == SampleParams::kUndecided) {
        ++undecided;
        continue;
      }
      EXPECT_EQ(id, on_host.Sample(logits)) << "temperature " << temperature << " seed " << seed;
    }
  }
  std::printf("%d of %d sampling left to the host\n", undecided, compared);
  EXPECT_LE(undecided, compared / 3);
}

// Greedy and sampled answers with passes launched ahead are those of passes one after another, and
// what is left in the cache is the same.
TEST(CudaModel, RunningAheadChangesNoAnswer) {
  GpuModel gpu(DemoModel::Method("oscar+", 256), Sized(512, 8));
  for (const size_t length : {size_t{30}, size_t{500}, size_t{703}}) {
    for (const float temperature : {0.0f, 0.9f}) {
      GenerateRequest request;
      request.prompt = SomeTokens(length);
      request.sampling.temperature = temperature;
      request.sampling.top_k = 40;
      request.sampling.seed = length;
      request.max_tokens = 150;
      Generator generator(*gpu.model, *gpu.pool);
      const auto ahead = generator.Generate(request);
      ASSERT_TRUE(ahead.has_value()) << ahead.error().ToString();
      EXPECT_EQ(static_cast<size_t>(generator.cache().length()), length + 149);
      // One after another: each token is sampled before the next pass is thought of.
      Sampler sampler(request.sampling);
      sampler.ObservePrompt(request.prompt);
      Generator single(*gpu.model, *gpu.pool);
      std::vector<float> logits;
      ASSERT_TRUE(single
                      .Prefill(request.prompt, 1,
                               [&](int64_t, std::span<const float> x) {
                                 logits.assign(x.begin(), x.end());
                               })
                      .ok());
      std::vector<int32_t> tokens = {sampler.Sample(logits)};
      while (tokens.size() < 150) {
        const auto next = single.Step(tokens.back());
        ASSERT_TRUE(next.has_value());
        tokens.push_back(sampler.Sample(*next));
      }
      EXPECT_EQ(ahead->tokens, tokens) << length << " " << temperature;
      EXPECT_EQ(generator.cache().Usage().sealed_pages, single.cache().Usage().sealed_pages);
    }
  }
}

// Nobody's steps are launched kernel by kernel because of a number between two graphs.
TEST(CudaModel, StepsOfAsManyAsAskedForAreCaptured) {
  for (const auto& [asked, sampled] : {std::pair{100, 112}, {64, 64}, {4096, 512}}) {
    const GpuModel gpu(DemoModel::Method("bf16"), Sized(512, asked));
    EXPECT_EQ(gpu.model->max_samples(), sampled);
  }
}

TEST(CudaModel, Fp8TakesHalfTheBytes) {
  GpuModel plain(DemoModel::Method("bf16"), Sized(64, 4));
  GpuModel quantized(DemoModel::Method("bf16"), Sized(64, 4), WeightFormat::kFp8);
  const ModelSpec& spec = plain.model->spec();
  const auto table = static_cast<uint64_t>(spec.vocab_size) * static_cast<uint64_t>(spec.hidden);
  const uint64_t matrices = plain.model->weight_bytes() - 2 * table;
  EXPECT_GE(quantized.model->weight_bytes(), 2 * table + matrices / 2);
  EXPECT_LE(quantized.model->weight_bytes(), 2 * table + matrices / 2 + matrices / 50);
}

TEST(CudaModel, TapSeesWhatTheCpuSees) {
  DemoModel cpu(DemoModel::Method("bf16"));
  GpuModel gpu(DemoModel::Method("bf16"), Sized(128, 4));
  const auto tokens = SomeTokens(100);
  const std::vector<float> rows[2] = {TappedRows(*cpu.model, cpu.pool, tokens),
                                      TappedRows(*gpu.model, *gpu.pool, tokens)};
  double error = 0, energy = 0;
  ASSERT_EQ(rows[0].size(), rows[1].size());
  for (size_t i = 0; i < rows[0].size(); ++i) {
    error += std::pow(double{rows[0][i]} - rows[1][i], 2);
    energy += std::pow(double{rows[0][i]}, 2);
  }
  EXPECT_LE(std::sqrt(error / energy), 1e-2);
}

// Pages, weights and workspaces are all that is taken, and nothing is taken later.
TEST(CudaModel, MemoryPlanIsWhatIsTaken) {
  constexpr uint64_t kMiB = 1 << 20;
  { const GpuModel first(DemoModel::Method("bf16"), Sized(64, 16)); }  // code is loaded
  const uint64_t before = FindDevice(Device::kCuda)->free_bytes;
  GpuModel gpu(DemoModel::Method("bf16"), Sized(16384, 16));
  const DeviceMemory memory = *gpu.backend().device_memory();
  const uint64_t planned = memory.weights + memory.activations + memory.pages;
  const uint64_t taken = before - FindDevice(Device::kCuda)->free_bytes;
  std::printf("planned %.1f MiB, taken %.1f MiB\n", static_cast<double>(planned) / kMiB,
              static_cast<double>(taken) / kMiB);
  EXPECT_GE(taken + 8 * kMiB, planned);
  EXPECT_LE(taken, planned + 192 * kMiB);  // graphs, and what the driver rounds up
  const auto tokens = SomeTokens(12000);
  uint64_t free_bytes = 0;
  for (const bool tapped : {false, true}) {
    if (tapped) {
      ASSERT_TRUE(gpu.model->SetTap([](int, size_t, auto, auto, auto) {}).ok());
    }
    Generator generator(*gpu.model, *gpu.pool);
    ASSERT_TRUE(generator.Prefill(tokens, 1, {}).ok());
    for (int step = 0; step < 100; ++step) ASSERT_TRUE(generator.Step(5).has_value());
    // The first time the code of prompts is loaded.
    const uint64_t now = FindDevice(Device::kCuda)->free_bytes;
    if (tapped) {
      EXPECT_GE(now + 16 * kMiB, free_bytes);
    }
    free_bytes = now;
  }
}

double EnergyOf(std::span<const float> x) {
  double sum = 0.0;
  for (const float v : x) sum += double{v} * v;
  return std::sqrt(sum / static_cast<double>(x.size()));
}

class ShapeTest : public testing::TestWithParam<ShapeCase> {};

// Architectures and sizes that the demo model does not have: prompts by the library's products,
// steps by the skinny ones, over pages of both kinds.
TEST_P(ShapeTest, FollowsTheCpu) {
  const ShapeCase& c = GetParam();
  const ModelSpec spec = SpecOf(c);
  const WavyWeights source;
  for (const char* method : {"bf16", "oscar+"}) {
    const KvPlanOptions options = DemoModel::Method(method, /*cell=*/256);
    CpuModelOf cpu(spec, source, options);
    GpuModel gpu(spec, source, options, Sized(256, 4));
    const auto prompt = SomeTokens(600, c.vocab);
    const double energy = EnergyOf(LogitsOf(*cpu.model, cpu.pool, prompt, 4));
    const Followed f = Follow(*cpu.model, cpu.pool, *gpu.model, *gpu.pool, prompt, /*steps=*/80);
    std::printf("%s on %s: rms %.4f of %.4f, %d of 80 diverged\n", c.name, method, f.worst_rms,
                energy, f.diverged);
    EXPECT_GT(energy, 0.1);
    // Codes of random rows part more than a model's; a wrong page would show as 1.4.
    EXPECT_LE(f.worst_rms, (std::string_view(method) == "bf16" ? 0.06 : 0.7) * energy);
    EXPECT_EQ(f.sealed_pages[0], f.sealed_pages[1]);
  }
}
INSTANTIATE_TEST_SUITE_P(All, ShapeTest, testing::ValuesIn(kShapeCases),
                         [](const auto& shape) { return std::string(shape.param.name); });

// A checkpoint whose FP8 matrices have a scale for each block of 128 x 128, as published ones do.
class BlockFp8Weights : public RoundedWeights {
 public:
  static constexpr int64_t kSide = 128;
  Status LoadRows(const std::string& name, std::span<const int64_t> shape, WeightRows rows,
                  std::span<float> out) const override {
    if (!IsFp8(name, shape)) return inner_->LoadRows(name, shape, rows, out);
    const auto width = static_cast<size_t>(shape[1]);
    const Matrix matrix = Quantized(name, shape[0], shape[1]);
    const size_t columns = width / kSide;
    for (size_t i = 0; i < out.size(); ++i) {
      const size_t row = static_cast<size_t>(rows.first) + i / width, column = i % width;
      out[i] = F8E4M3ToFloat(matrix.codes[row * width + column]) *
               matrix.scales[row / kSide * columns + column / kSide];
    }
    return {};
  }
  Result<std::optional<Fp8Tiles>> Fp8Of(const std::string& name, int64_t outputs,
                                        int64_t inputs) const override {
    const std::vector<int64_t> shape = {outputs, inputs};
    return IsFp8(name, shape) ? std::optional<Fp8Tiles>({kSide, kSide}) : std::nullopt;
  }
  Status LoadFp8(const std::string& name, int64_t outputs, int64_t inputs, std::span<uint8_t> codes,
                 std::span<float> scales) const override {
    const Matrix matrix = Quantized(name, outputs, inputs);
    std::ranges::copy(matrix.codes, codes.begin());
    std::ranges::copy(matrix.scales, scales.begin());
    return {};
  }
  bool Has(const std::string& name) const override { return inner_->Has(name); }
  uint64_t Fingerprint() const override { return 2; }

 private:
  struct Matrix {
    std::vector<uint8_t> codes;
    std::vector<float> scales;
  };
  static bool IsFp8(const std::string& name, std::span<const int64_t> shape) {
    return shape.size() == 2 && name.find("_proj") != std::string::npos;
  }
  Matrix Quantized(const std::string& name, int64_t outputs, int64_t inputs) const {
    const auto width = static_cast<size_t>(inputs), columns = width / kSide;
    std::vector<float> values(static_cast<size_t>(outputs) * width);
    EXPECT_TRUE(inner_->Load(name, std::vector<int64_t>{outputs, inputs}, values).ok());
    Matrix matrix{std::vector<uint8_t>(values.size()),
                  std::vector<float>(values.size() / (kSide * kSide))};
    const auto scale_of = [&](size_t i) -> float& {
      return matrix.scales[i / width / kSide * columns + i % width / kSide];
    };
    for (size_t i = 0; i < values.size(); ++i) {
      scale_of(i) = std::max(scale_of(i), std::fabs(values[i]) / kF8E4M3Max);
    }
    for (size_t i = 0; i < values.size(); ++i) {
      matrix.codes[i] = ToF8E4M3(values[i] / scale_of(i));
    }
    return matrix;
  }
  std::unique_ptr<WeightSource> inner_ = DemoWeights(DemoSpec(), WeightFormat::kCheckpoint);
};

TEST(CudaModel, Fp8BlocksFollowTheCpu) {
  const BlockFp8Weights source;
  const ModelSpec spec = DemoSpec();
  for (const char* method : {"bf16", "oscar+"}) {
    const KvPlanOptions options = DemoModel::Method(method, /*cell=*/512);
    CpuModelOf cpu(spec, source, options);
    GpuModel gpu(spec, source, options, Sized(512, 8));
    const bool rotates = gpu.plan->v(0).kind != RotationKind::kNone;
    const uint64_t expected = TensorTable(spec).Bytes(TensorTable::Fp8::kAll, rotates);
    EXPECT_GE(gpu.model->weight_bytes() + expected / 50, expected);
    EXPECT_LE(gpu.model->weight_bytes(), expected + expected / 50);
    const Followed f = Follow(*cpu.model, cpu.pool, *gpu.model, *gpu.pool, SomeTokens(1000), 100);
    std::printf("%s: rms %.5f, %d of 100 diverged\n", method, f.worst_rms, f.diverged);
    EXPECT_LE(f.worst_rms, BudgetOf(method).rms);
  }
}

TEST(CudaModel, RandomWeightsAreTheCpus) {
  auto config = *ReadModelConfig(OSCAR_DEMO_MODEL);
  const auto spec = *MakeModelSpec(config);
  const auto source = MakeRandomWeights(7);
  ThreadPool threads(2);
  KvPlanOptions options = DemoModel::Method("bf16");
  auto cpu_plan = *KvPlan::Make(spec, options, simd::WriteBlocks);
  auto cpu = *LoadModel(Device::kCpu, spec, *source, *cpu_plan, threads);
  PagePool cpu_pool(uint64_t{1} << 30);
  options.order = CodeOrder::kTensorCore;
  auto gpu_plan = *KvPlan::Make(spec, options, simd::WriteBlocks);
  BackendOptions sized = Sized(256, 4);
  sized.kv_bytes = uint64_t{1} << 28;
  auto gpu = *LoadModel(Device::kCuda, spec, *source, *gpu_plan, threads, sized);
  PagePool gpu_pool(gpu->backend().page_budget(), *gpu->backend().page_memory());
  const auto tokens = SomeTokens(60);
  const auto expected = LogitsOf(*cpu, cpu_pool, tokens, 2);
  double energy = 0;
  for (float x : expected) energy += double{x} * x;
  energy = std::sqrt(energy / static_cast<double>(expected.size()));
  EXPECT_LE(Compare(LogitsOf(*gpu, gpu_pool, tokens, 2), expected).rms, 3e-2 * energy);
}

}  // namespace
}  // namespace oscar
