// Methods whose pages are not oscar's, on the GPU: small models of random weights end to end
// against the CPU's, and against themselves in other chunks, batches and arenas. Short prompts, so
// that an emulated GPU runs them, too.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cuda/cuda_fixture.h"
#include "engine/generator.h"

namespace oscar {
namespace {

struct Case {
  const char* name;
  const char* kv;
  int head_dim = 64;
  int layers = 2;
  std::optional<int> recent = {};  // tokens, where the prompts are shorter than the method's window
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

constexpr Case kCases[] = {{"Kivi", "kivi"},
                           {"KiviD128", "kivi", 128},
                           {"KiviD256", "kivi", 256},
                           {"KiviSink", "kivi-sink"},
                           {"KiviSinkD128K3V4", "kivi-sink:k_bits=3:v_bits=4", 128},
                           {"OscarSu", "oscar-su"},
                           {"OscarSuD128", "oscar-su", 128},
                           {"OscarSuG128", "oscar-su:group=128", 128},
                           {"OscarSuHead", "oscar-su:norm=head:group=64"},
                           {"OscarSuPlain", "oscar-su:norm=none:rotation=off:bits=4"},
                           {"OscarSuRows", "oscar-su:k=token"},
                           {"OscarSuRowsK3", "oscar-su:k=token:k_bits=3"},
                           {"Kitty", "kitty"},
                           {"KittyD128", "kitty", 128},
                           {"TurboQuant", "turboquant"},
                           {"TurboQuantD128K4V2", "turboquant:k_bits=4:v_bits=2", 128},
                           {"TurboQuantSkip", "turboquant-skip", 64, 5},
                           {"NaiveSymmetric", "naive-sym"},
                           {"LloydMax", "lloyd-max", 64, 2, 64},
                           {"LloydMaxD128", "lloyd-max", 128, 2, 64}};

ModelSpec SpecOf(const Case& c) {
  ModelConfig config;
  config.model_type = "qwen3";
  config.vocab_size = 515;
  config.hidden_size = 128;
  config.intermediate_size = 192;
  config.num_layers = c.layers;
  config.num_attention_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = config.rotary_dim = c.head_dim;
  config.rms_norm_eps = 1e-5;
  config.rope_theta = 10000.0;
  config.max_position_embeddings = 1024;
  auto spec = MakeModelSpec(config);
  EXPECT_TRUE(spec.has_value()) << spec.error().ToString();
  return std::move(*spec);
}

// Cells of a page: prompts see what generated tokens see.
KvPlanOptions PlanOf(const Case& c) {
  KvPlanOptions options;
  options.method = c.kv;
  options.prefill_cell = 64;
  options.recent = c.recent;
  return options;
}

BackendOptions Small() {
  BackendOptions options = Sized(64, 2);
  options.kv_bytes = uint64_t{1} << 25;
  options.batch_invariant = true;
  return options;
}

double EnergyOf(std::span<const float> x) {
  double sum = 0.0;
  for (const float v : x) sum += double{v} * v;
  return std::sqrt(sum / static_cast<double>(x.size()));
}

class GpuMethodTest : public testing::TestWithParam<Case> {
 protected:
  static constexpr size_t kTokens = 325;
  const ModelSpec spec_ = SpecOf(GetParam());
  const WavyWeights source_;
  const std::vector<int32_t> prompt_ = SomeTokens(kTokens, 515);
};

// Codes of both sides differ only where rounding decides, so whatever a page says is read as the
// CPU reads it: a wrong scale, norm or page would be as large as the logits are.
TEST_P(GpuMethodTest, FollowsTheCpu) {
  const KvPlanOptions options = PlanOf(GetParam());
  CpuModelOf cpu(spec_, source_, options);
  GpuModel gpu(spec_, source_, options, Small());
  const double energy = EnergyOf(LogitsOf(*cpu.model, cpu.pool, prompt_, 4));
  const Followed f = Follow(*cpu.model, cpu.pool, *gpu.model, *gpu.pool, prompt_, /*steps=*/3);
  std::printf("%s: rms %.4f of %.4f\n", GetParam().kv, f.worst_rms, energy);
  EXPECT_GT(energy, 0.1);
  EXPECT_LE(f.worst_rms, 0.15 * energy);
  EXPECT_EQ(f.sealed_pages[0], f.sealed_pages[1]);
  EXPECT_GE(f.sealed_pages[1], 2);
}

// Prompts cut anywhere, and sequences beside others, give the bits that they give alone.
TEST_P(GpuMethodTest, ChunksAndBatchesDoNotShow) {
  GpuModel gpu(spec_, source_, PlanOf(GetParam()), Small());
  const auto vocab = static_cast<size_t>(spec_.vocab_size);
  const std::vector<float> whole = LogitsOf(*gpu.model, *gpu.pool, prompt_, 2);
  EXPECT_EQ(LogitsOf(*gpu.model, *gpu.pool, prompt_, 2, /*chunk=*/37), whole);
  const auto read = [&](size_t length) {
    SequenceCache cache(gpu.plan->cache(), *gpu.pool);
    for (size_t at = 0; at < length; at += 64) {
      const ForwardItem item{
          &cache, std::span(prompt_).subspan(at, std::min<size_t>(64, length - at)), true, 0};
      EXPECT_TRUE(gpu.model->Forward({&item, 1}, {}).ok());
    }
    return cache;
  };
  const size_t lengths[] = {323, 197};
  const int32_t token = 7;
  std::vector<float> together(2 * vocab), alone(vocab);
  SequenceCache first = read(lengths[0]), second = read(lengths[1]);
  const ForwardItem items[] = {{&first, {&token, 1}, false, 1}, {&second, {&token, 1}, false, 1}};
  ASSERT_TRUE(gpu.model->Forward(items, together).ok());
  for (size_t i = 0; i < 2; ++i) {
    SequenceCache cache = read(lengths[i]);
    const ForwardItem item{&cache, {&token, 1}, false, 1};
    ASSERT_TRUE(gpu.model->Forward({&item, 1}, alone).ok());
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(),
                           together.begin() + static_cast<ptrdiff_t>(i * vocab)))
        << i;
  }
}

// In the smallest arena that the prompt fits: there pages are sealed into scratch memory first,
// pairs of them, too.
TEST_P(GpuMethodTest, SealsInAFullArena) {
  const KvPlanOptions options = PlanOf(GetParam());
  std::vector<float> expected, logits;
  const auto read = [&](uint64_t kv_bytes, std::vector<float>& out) {
    BackendOptions backend = Small();
    backend.kv_bytes = kv_bytes;
    GpuModel gpu(spec_, source_, options, backend);
    Generator generator(*gpu.model, *gpu.pool);
    return generator.Prefill(prompt_, 1, [&](int64_t, std::span<const float> row) {
      out.assign(row.begin(), row.end());
    });
  };
  ASSERT_TRUE(read(Small().kv_bytes, expected).ok());
  const auto plan = *KvPlan::Make(spec_, options, simd::WriteBlocks);
  const CacheConfig& config = plan->cache();
  // What is open when the first pages are sealed, and a few more where the last need them.
  Status status = ResourceExhausted("");
  for (int pages = (config.sink + config.recent) / kPageTokens + config.page_run();
       pages < 8 && status.code() == StatusCode::kResourceExhausted; ++pages) {
    status = read(static_cast<uint64_t>(pages) * config.open.bytes(), logits);
  }
  EXPECT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(logits, expected);
}

// Every sum in one order: the CPU's bits, over sealed pages and generated tokens.
TEST_P(GpuMethodTest, PortableIsTheCpus) {
  const KvPlanOptions options = PlanOf(GetParam());
  BackendOptions portable = Small();
  portable.portable = true;
  CpuModelOf cpu(spec_, source_, options, portable);
  GpuModel gpu(spec_, source_, options, portable);
  const Followed f = Follow(*cpu.model, cpu.pool, *gpu.model, *gpu.pool, prompt_, /*steps=*/2);
  EXPECT_EQ(f.worst_max, 0.0);
  EXPECT_EQ(LogitsOf(*gpu.model, *gpu.pool, prompt_, 4),
            LogitsOf(*cpu.model, cpu.pool, prompt_, 4));
}

INSTANTIATE_TEST_SUITE_P(Methods, GpuMethodTest, testing::ValuesIn(kCases),
                         [](const auto& item) { return std::string(item.param.name); });

}  // namespace
}  // namespace oscar
