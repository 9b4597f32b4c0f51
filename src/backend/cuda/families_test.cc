// Every model family on the GPU: tiny checkpoints against transformers, and portable passes against
// the CPU's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cuda/cuda_fixture.h"
#include "engine/engine_test_util.h"
#include "engine/loaded_model.h"
#include "engine/page_budget.h"
#include "engine/tiny_model.h"

namespace oscar {
namespace {

// On the GPU, with few recorded steps: emulators take their time.
struct TinyGpu : TinyModel {
  explicit TinyGpu(const std::string& directory, const KvPlanOptions& kv = Bf16(),
                   BackendOptions options = Sized(128, 2))
      : TinyModel(directory, kv, 2, options, /*is_reference=*/false, uint64_t{1} << 26,
                  Device::kCuda) {}
};

BackendOptions Portable() {
  BackendOptions options = Sized(128, 2);
  options.portable = true;
  return options;
}

// RMS of every row's differences, ascending.
std::vector<double> SortedErrors(const std::vector<float>& logits,
                                 const std::vector<float>& expected, size_t vocab) {
  std::vector<double> rms;
  for (size_t at = 0; at < logits.size(); at += vocab) {
    double squares = 0.0;
    for (size_t j = at; j < at + vocab; ++j) {
      squares += std::pow(static_cast<double>(logits[j]) - expected[j], 2);
    }
    rms.push_back(std::sqrt(squares / static_cast<double>(vocab)));
  }
  std::ranges::sort(rms);
  return rms;
}

class GpuFamilyTest : public testing::TestWithParam<const char*> {
 protected:
  const Golden golden_{GetParam()};
  const TinyCheckpoint checkpoint_{ConfigOf(GetParam())};
};

TEST_P(GpuFamilyTest, MatchesTransformers) {
  TinyGpu tiny(checkpoint_.path());
  ASSERT_TRUE(tiny.status.ok()) << tiny.status.ToString();
  ExpectTransformers(golden_, tiny, GetParam());
}

// Prompts and generated tokens over sealed pages: the CPU's bits.
TEST_P(GpuFamilyTest, PortableIsTheCpus) {
  KvPlanOptions kv = SmallWindows();
  kv.prefill_cell = 64;
  TinyGpu gpu(checkpoint_.path(), kv, Portable());
  ASSERT_TRUE(gpu.status.ok()) << gpu.status.ToString();
  TinyModel cpu(checkpoint_.path(), kv, 2, Portable());
  const std::vector<int32_t> ids = SomeIds(210);
  EXPECT_EQ(gpu.Logits(ids), cpu.Logits(ids));
  EXPECT_EQ(gpu.Greedy(ids, 3), cpu.Greedy(ids, 3));
}

// What calibration sees of it.
TEST_P(GpuFamilyTest, TapIsTheCpus) {
  const std::vector<int32_t> ids = SomeIds(30);
  TinyGpu gpu(checkpoint_.path());
  TinyModel cpu(checkpoint_.path());
  ASSERT_TRUE(gpu.status.ok()) << gpu.status.ToString();
  const std::vector<float> mine = TappedRows(*gpu.model, *gpu.pool, ids);
  const std::vector<float> theirs = TappedRows(*cpu.model, *cpu.pool, ids);
  ASSERT_EQ(mine.size(), theirs.size());
  // Of the first layer with attention, which little rounding came before.
  const AttentionSpec& attention = cpu.spec.attention();
  const size_t first =
      ids.size() * static_cast<size_t>(attention.q_width() + 2 * attention.kv_width());
  double squares = 0.0, error = 0.0;
  for (size_t i = 0; i < first; ++i) {
    squares += std::pow(static_cast<double>(theirs[i]), 2);
    error += std::pow(static_cast<double>(mine[i]) - theirs[i], 2);
  }
  EXPECT_LE(std::sqrt(error / squares), cpu.spec.num_state_layers() > 0 ? 0.03 : 0.01);
  TinyGpu portable(checkpoint_.path(), TinyModel::Bf16(), Portable());
  TinyModel exact(checkpoint_.path(), TinyModel::Bf16(), 2, Portable());
  EXPECT_EQ(TappedRows(*portable.model, *portable.pool, ids),
            TappedRows(*exact.model, *exact.pool, ids));
}

INSTANTIATE_TEST_SUITE_P(Families, GpuFamilyTest,
                         testing::Values("qwen2", "mistral", "qwen3_moe", "qwen3_moe_fp8",
                                         "glm4_moe", "glm4_moe_fp8", "minimax_m2", "minimax_m2_fp8",
                                         "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_fp8", "qwen3_next",
                                         "gpt_oss", "gpt_oss_mxfp4"),
                         [](const auto& item) { return std::string(item.param); });

// --- Random weights -----------------------------------------------------------------------------

// Stored as the config says, and sampled on the device: the CPU's model.
TEST(GpuRandomWeights, AreStoredAsTheConfigSays) {
  for (const char* name : {"qwen3_moe_fp8", "gpt_oss_mxfp4"}) {
    SCOPED_TRACE(name);
    const TinyCheckpoint checkpoint(ConfigOf(name));
    std::vector<float> logits[2];
    for (const Device device : {Device::kCpu, Device::kCuda}) {
      ModelOptions options;
      options.model = checkpoint.path();
      options.random_weights = true;
      options.device = device;
      options.kv = "bf16";
      options.kv_memory = uint64_t{1} << 24;
      options.chunk = 128;
      options.max_sequences = 2;
      options.num_threads = 2;
      const auto loaded = LoadedModel::Load(options);
      ASSERT_TRUE(loaded.has_value()) << loaded.error().ToString();
      Generator generator((*loaded)->model(), (*loaded)->pool());
      const Status read =
          generator.Prefill(SomeIds(40), 40, [&](int64_t, std::span<const float> part) {
            auto& to = logits[device == Device::kCuda ? 1 : 0];
            to.insert(to.end(), part.begin(), part.end());
          });
      ASSERT_TRUE(read.ok()) << read.ToString();
    }
    ASSERT_EQ(logits[0].size(), logits[1].size());
    const size_t vocab = logits[0].size() / 40;
    std::vector<double> distances;  // of a row: other experts may be chosen where two are close
    for (size_t row = 0; row < 40; ++row) {
      double squares = 0.0, error = 0.0;
      for (size_t i = row * vocab; i < (row + 1) * vocab; ++i) {
        squares += std::pow(double{logits[0][i]}, 2);
        error += std::pow(double{logits[1][i]} - logits[0][i], 2);
      }
      distances.push_back(std::sqrt(error / squares));
    }
    std::ranges::nth_element(distances, distances.begin() + 20);
    EXPECT_LE(distances[20], 0.03);
  }
}

// --- Batches ------------------------------------------------------------------------------------

class GpuBatchTest : public testing::TestWithParam<const char*> {};

// One kernel for any number of rows: prompts cut anywhere and sequences beside others give the bits
// that they give alone.
TEST_P(GpuBatchTest, InvariantBatchesDoNotShow) {
  const TinyCheckpoint checkpoint(ConfigOf(GetParam()));
  BackendOptions options = Sized(128, 4);
  options.batch_invariant = true;
  TinyGpu tiny(checkpoint.path(), SmallWindows(), options);
  ASSERT_TRUE(tiny.status.ok()) << tiny.status.ToString();
  const std::vector<int32_t> ids = SomeIds(90);
  const std::vector<float> whole = tiny.Logits(ids);
  EXPECT_EQ(tiny.Logits(ids, 7), whole);
  EXPECT_EQ(tiny.Logits(ids, 64), whole);
  const auto vocab = static_cast<size_t>(tiny.spec.vocab_size);
  // Three sequences, two of which generate while one reads, in one pass.
  const size_t lengths[] = {30, 41, 50};
  const auto make = [&](size_t i) {
    SequenceCache cache(tiny.plan->cache(), *tiny.pool);
    const std::vector<int32_t> prompt = SomeIds(lengths[i], i);
    const ForwardItem item{&cache, prompt, true, 0};
    EXPECT_TRUE(tiny.model->Forward({&item, 1}, {}).ok());
    return cache;
  };
  const std::vector<int32_t> next = SomeIds(20, 77);
  const auto item_of = [&](SequenceCache& cache, size_t i) {
    return ForwardItem{&cache, std::span(next).first(i == 2 ? 20 : 1), i == 2, 1};
  };
  std::vector<SequenceCache> caches;
  for (size_t i = 0; i < 3; ++i) caches.push_back(make(i));
  std::vector<ForwardItem> items;
  for (size_t i = 0; i < 3; ++i) items.push_back(item_of(caches[i], i));
  std::vector<float> together(3 * vocab), alone(vocab);
  ASSERT_TRUE(tiny.model->Forward(items, together).ok());
  for (size_t i = 0; i < 3; ++i) {
    SequenceCache cache = make(i);
    const ForwardItem item = item_of(cache, i);
    ASSERT_TRUE(tiny.model->Forward({&item, 1}, alone).ok());
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(),
                           together.begin() + static_cast<ptrdiff_t>(i * vocab)))
        << i;
  }
}

// Prompts with so many rows per expert that other kernels have them, where a device has those.
TEST_P(GpuBatchTest, ManyRowsPerExpertAreAsFew) {
  const TinyCheckpoint checkpoint(ConfigOf(GetParam()));
  BackendOptions options = Sized(256, 2);
  TinyGpu many(checkpoint.path(), TinyModel::Bf16(), options);
  options.batch_invariant = true;
  TinyGpu few(checkpoint.path(), TinyModel::Bf16(), options);
  ASSERT_TRUE(many.status.ok()) << many.status.ToString();
  const ExpertsSpec& experts = *many.spec.layer(many.spec.num_layers() - 1).experts();
  ASSERT_GE(256 * experts.experts_per_token / experts.num_experts, 60);
  const std::vector<int32_t> ids = SomeIds(256);
  const auto rms = SortedErrors(many.Logits(ids, 256), few.Logits(ids, 256),
                                static_cast<size_t>(many.spec.vocab_size));
  EXPECT_LE(rms[rms.size() / 2], BudgetOf("bf16").rms);
  EXPECT_LE(rms[rms.size() * 3 / 4], BudgetOf("bf16").gap);
}

INSTANTIATE_TEST_SUITE_P(Experts, GpuBatchTest,
                         testing::Values("qwen3_moe", "qwen3_moe_fp8", "minimax_m2",
                                         "minimax_m2_fp8", "gpt_oss", "gpt_oss_mxfp4"),
                         [](const auto& item) { return std::string(item.param); });

// --- Sliding windows ----------------------------------------------------------------------------

// Sealed pages, of BF16 as well, hold nothing of layers with a window; prompts cut anywhere and
// prefixes that are continued give the bits that they give alone.
class GpuWindowTest : public testing::TestWithParam<const char*> {
 protected:
  static KvPlanOptions Kv() {
    KvPlanOptions kv;
    const bool has_map = GetParam() == std::string_view("map");
    kv.method = has_map ? "oscar+" : GetParam();
    kv.prefill_cell = 64;
    if (kv.method != "bf16") kv.recent = 64;
    if (has_map) {
      // Of the one layer that sees all: two bits more for its heads' sides together.
      kv.sensitivities = SensitivityMap{{{0.2, 0.1}, {1.0, 0.5}}};
      kv.bits = 3.0;
    }
    return kv;
  }
};

TEST_P(GpuWindowTest, CutsAndPrefixesDoNotShow) {
  const TinyCheckpoint checkpoint(ConfigOf("gpt_oss_mxfp4"));
  BackendOptions options = Sized(128, 2);
  options.batch_invariant = true;
  TinyGpu gpu(checkpoint.path(), Kv(), options);
  ASSERT_TRUE(gpu.status.ok()) << gpu.status.ToString();
  const std::vector<int32_t> ids = SomeIds(330);
  const std::vector<float> whole = gpu.Logits(ids);
  EXPECT_EQ(gpu.Logits(ids, 50), whole);
  // On from the middle of another text.
  const auto vocab = static_cast<size_t>(gpu.spec.vocab_size);
  Generator generator(*gpu.model, *gpu.pool);
  std::vector<int32_t> other(ids.begin(), ids.begin() + 300);
  for (const int32_t id : SomeIds(40, 9)) other.push_back(id);
  std::vector<float> last;
  const auto keep = [&](int64_t, std::span<const float> part) {
    last.assign(part.begin(), part.end());
  };
  ASSERT_TRUE(generator.Prefill(other, 1, keep).ok());
  EXPECT_GT(generator.cache().Usage().sealed_pages, 1u);
  ASSERT_TRUE(generator.Prefill(ids, 1, keep).ok());
  EXPECT_TRUE(std::equal(last.begin(), last.end(), whole.end() - static_cast<ptrdiff_t>(vocab)));
  // Against the CPU: prompts and generated tokens over sealed pages.
  TinyGpu exact(checkpoint.path(), Kv(), Portable());
  TinyModel cpu(checkpoint.path(), Kv(), 2, Portable());
  ASSERT_TRUE(exact.status.ok()) << exact.status.ToString();
  EXPECT_EQ(exact.Logits(ids), cpu.Logits(ids));
  EXPECT_EQ(exact.Greedy(ids, 4), cpu.Greedy(ids, 4));
  TinyModel fast(checkpoint.path(), Kv());
  const std::vector<float> expected = fast.Logits(ids);
  double squares = 0.0;
  for (size_t i = 0; i < whole.size(); ++i) {
    squares += std::pow(static_cast<double>(whole[i]) - expected[i], 2);
  }
  // A token that nearly goes to other experts may differ by more.
  EXPECT_LE(std::sqrt(squares / static_cast<double>(whole.size())), 2 * BudgetOf("bf16").rms);
}

INSTANTIATE_TEST_SUITE_P(Methods, GpuWindowTest, testing::Values("bf16", "oscar+", "int4", "map"),
                         [](const auto& item) {
                           std::string name = item.param;
                           std::erase(name, '+');
                           return name;
                         });

// A service with little memory gives way and begins again, and a next turn computes what is new.
TEST(GpuWindows, PreemptionDoesNotShow) {
  const TinyCheckpoint checkpoint(ConfigOf("gpt_oss_mxfp4"));
  BackendOptions options = Sized(128, 4);
  options.batch_invariant = true;
  std::vector<std::vector<int32_t>> expected;
  for (const bool tight : {false, true}) {
    uint64_t budget = uint64_t{1} << 26;
    if (tight) {
      const TinyModel plan(checkpoint.path(), SmallWindows());
      const CacheConfig& config = plan.plan->cache();
      budget = PeakBytes(config, 60, 150) + 2 * config.open.bytes();
    }
    TinyModel gpu(checkpoint.path(), SmallWindows(), 2, options, /*is_reference=*/false, budget,
                  Device::kCuda);
    ASSERT_TRUE(gpu.status.ok()) << gpu.status.ToString();
    EngineServiceOptions service_options;
    service_options.deterministic = true;
    auto service = MakeEngineService(*gpu.model, *gpu.pool, gpu.threads, service_options);
    const auto submit = [&](std::vector<int32_t> prompt, int64_t tokens) {
      EngineRequest request;
      request.prompt = std::move(prompt);
      request.max_tokens = tokens;
      request.sampling.temperature = 0.0f;
      return *service->Submit(std::move(request));
    };
    std::vector<std::unique_ptr<RequestHandle>> handles;
    // More than the headroom that admission counts.
    for (uint64_t i = 0; i < 3; ++i) handles.push_back(submit(SomeIds(40 + 10 * i, i), 90));
    for (size_t i = 0; i < handles.size(); ++i) {
      const Answer answer = Collect(*handles[i]);
      EXPECT_TRUE(answer.finished) << answer.status.ToString();
      if (!tight) {
        expected.push_back(answer.tokens);
      } else {
        EXPECT_EQ(answer.tokens, expected[i]) << i;
      }
    }
    EXPECT_EQ(service->Stats().preemptions > 0, tight);
    if (tight) continue;
    EngineServiceOptions reusing;
    service.reset();
    service = MakeEngineService(*gpu.model, *gpu.pool, gpu.threads, reusing);
    const Answer first = Collect(*submit(SomeIds(150, 8), 30));
    std::vector<int32_t> turn = SomeIds(150, 8);
    turn.insert(turn.end(), first.tokens.begin(), first.tokens.end());
    for (const int32_t id : SomeIds(20, 3)) turn.push_back(id);
    const Answer next = Collect(*submit(turn, 3));
    EXPECT_TRUE(next.finished) << next.status.ToString();
    EXPECT_EQ(next.cached_tokens, 150 + 30 - 1);
  }
}

// --- Shapes that no golden has ------------------------------------------------------------------

class GpuShapeTest : public testing::TestWithParam<TinyShape> {};

TEST_P(GpuShapeTest, MatchesTheCpu) {
  const TinyShape& shape = GetParam();
  const TinyCheckpoint checkpoint(ConfigFor(shape));
  TinyGpu exact(checkpoint.path(), TinyModel::Bf16(), Portable());
  if (!exact.status.ok()) {
    EXPECT_EQ(exact.status.code(), StatusCode::kUnimplemented);
    if (!CheckDeviceFeatures(Device::kCuda, exact.spec).ok()) return;
    // A shared part of a width that is no multiple of 4.
    EXPECT_THAT(exact.status.message(), ::testing::HasSubstr("intermediate size"));
    EXPECT_NE(shape.shared * shape.width % 4, 0);
    return;
  }
  TinyModel cpu(checkpoint.path(), TinyModel::Bf16(), 2, Portable());
  const std::vector<int32_t> ids = SomeIds(40);
  const std::vector<float> expected = cpu.Logits(ids);
  EXPECT_EQ(exact.Logits(ids), expected);
  TinyGpu gpu(checkpoint.path());
  ASSERT_TRUE(gpu.status.ok()) << gpu.status.ToString();
  const std::vector<float> logits = gpu.Logits(ids);
  const auto vocab = static_cast<size_t>(gpu.spec.vocab_size);
  const std::vector<double> rms = SortedErrors(logits, expected, vocab);
  // Where a token nearly goes to other experts, rounding decides.
  EXPECT_LE(rms[rms.size() / 2], BudgetOf("bf16").rms);
  EXPECT_LE(rms[rms.size() * 3 / 4], BudgetOf("bf16").gap);
  // Decode reads the routed experts and no others; padded rows of recorded steps read none.
  const ExpertTraffic before = gpu.model->backend().expert_traffic();
  Generator generator(*gpu.model, *gpu.pool);
  ASSERT_TRUE(generator.Prefill(ids, 1, [](int64_t, std::span<const float>) {}).ok());
  const ExpertTraffic prompt = gpu.model->backend().expert_traffic();
  ASSERT_TRUE(generator.Step(7).has_value());
  const ExpertTraffic after = gpu.model->backend().expert_traffic();
  const uint64_t layers = after.layers - prompt.layers;
  EXPECT_GT(layers, 0u);
  EXPECT_EQ(prompt.layers - before.layers, layers);
  EXPECT_EQ(after.experts - prompt.experts, layers * static_cast<uint64_t>(shape.chosen));
  const uint64_t each = (after.bytes - prompt.bytes) / (after.experts - prompt.experts);
  EXPECT_EQ(gpu.model->weight_bytes() - gpu.model->weight_bytes_per_step(),
            (gpu.spec.tied_head ? 0
                                : static_cast<uint64_t>(gpu.spec.vocab_size) *
                                      static_cast<uint64_t>(gpu.spec.hidden) * 2) +
                layers * static_cast<uint64_t>(shape.experts - shape.chosen) * each);
}

INSTANTIATE_TEST_SUITE_P(Shapes, GpuShapeTest, testing::ValuesIn(kTinyShapes), NameOfShape);

TEST(GpuFamilies, FaultsAreNamed) { ExpectNamedFaults(Device::kCuda); }

// What a GPU has no kernels for is said by name.
TEST(GpuFamilies, SinksOfOtherHeadDimsAreRefused) {
  const TinyCheckpoint checkpoint(ConfigFor({"gpt_oss", 64, 8, 1, 128, 16, 4, 40, 1, 1, 0}));
  TinyGpu gpu(checkpoint.path());
  EXPECT_EQ(gpu.status.code(), StatusCode::kUnimplemented);
  EXPECT_THAT(gpu.status.message(), ::testing::HasSubstr("head dim 64 alone"));
}

// MXFP4 experts stay so: 17 bytes for 64 of BF16, padding of odd widths apart.
TEST(GpuFamilies, Mxfp4ExpertsStayMxfp4) {
  const TinyCheckpoint bf16(ConfigOf("gpt_oss")), mxfp4(ConfigOf("gpt_oss_mxfp4"));
  TinyGpu first(bf16.path()), second(mxfp4.path());
  ASSERT_TRUE(second.status.ok()) << second.status.ToString();
  const auto bytes_of = [](TinyGpu& tiny) {
    EXPECT_FALSE(tiny.Logits(SomeIds(9)).empty());
    const ExpertTraffic traffic = tiny.model->backend().expert_traffic();
    return static_cast<double>(traffic.bytes) / static_cast<double>(traffic.experts);
  };
  // Rows as short as these have room for 16 scales and use 2 to 4.
  EXPECT_NEAR(bytes_of(second) / bytes_of(first), 17.0 / 64.0, 0.07);
}

// `--weights fp8` on a BF16 re-export: experts in FP8 with biases and clamped gates.
TEST(GpuFamilies, Fp8ExpertsHaveBiases) {
  const TinyCheckpoint checkpoint(ConfigOf("gpt_oss"));
  const ModelSpec spec = *MakeModelSpec(*ReadModelConfig(checkpoint.path()));
  const auto source = QuantizeWeights(*OpenCheckpointWeights(checkpoint.path()), spec);
  const std::vector<int32_t> ids = SomeIds(40);
  const auto logits_of = [&](Model& model, PagePool& pool) {
    std::vector<float> logits;
    Generator generator(model, pool);
    EXPECT_TRUE(generator
                    .Prefill(ids, static_cast<int64_t>(ids.size()),
                             [&](int64_t, std::span<const float> part) {
                               logits.insert(logits.end(), part.begin(), part.end());
                             })
                    .ok());
    return logits;
  };
  GpuModel exact(spec, *source, TinyModel::Bf16(), Portable());
  CpuModelOf cpu(spec, *source, TinyModel::Bf16(), Portable());
  const std::vector<float> expected = logits_of(*cpu.model, cpu.pool);
  EXPECT_EQ(logits_of(*exact.model, *exact.pool), expected);
  GpuModel gpu(spec, *source, TinyModel::Bf16(), Sized(128, 2));
  const std::vector<float> logits = logits_of(*gpu.model, *gpu.pool);
  ASSERT_EQ(logits.size(), expected.size());
  const auto vocab = static_cast<size_t>(spec.vocab_size);
  std::vector<double> rms;
  for (size_t at = 0; at < logits.size(); at += vocab) {
    double squares = 0.0;
    for (size_t i = at; i < at + vocab; ++i) {
      squares += std::pow(static_cast<double>(logits[i]) - expected[i], 2);
    }
    rms.push_back(std::sqrt(squares / static_cast<double>(vocab)));
  }
  std::ranges::sort(rms);
  // Where a token nearly goes to other experts, rounding decides.
  EXPECT_LE(rms[rms.size() / 2], BudgetOf("bf16").rms);
}

// FP8 experts stay FP8: their bytes, padding of odd widths apart, are half of BF16's.
TEST(GpuFamilies, Fp8ExpertsStayFp8) {
  const TinyCheckpoint bf16(ConfigOf("minimax_m2")), fp8(ConfigOf("minimax_m2_fp8"));
  TinyGpu first(bf16.path()), second(fp8.path());
  ASSERT_TRUE(second.status.ok()) << second.status.ToString();
  const auto bytes_of = [](TinyGpu& tiny) {
    EXPECT_FALSE(tiny.Logits(SomeIds(9)).empty());
    const ExpertTraffic traffic = tiny.model->backend().expert_traffic();
    return static_cast<double>(traffic.bytes) / static_cast<double>(traffic.experts);
  };
  EXPECT_NEAR(bytes_of(second) / bytes_of(first), 0.5, 0.03);
}

}  // namespace
}  // namespace oscar
