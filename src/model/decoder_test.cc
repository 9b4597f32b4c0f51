// The decoder over the reference's operations against outputs of transformers (tests/data/golden),
// and over the CPU's against the reference on models that no checkpoint here has.
#include "model/decoder.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "arch/rope.h"
#include "base/file.h"
#include "base/json.h"
#include "io/safetensors.h"
#include "model/load.h"
#include "reference/reference_backend.h"
#include "simd/block_writer.h"

namespace oscar {
namespace {

std::unique_ptr<KvPlan> Bf16Plan(const ModelSpec& spec) {
  KvPlanOptions options;
  options.method = "bf16";
  auto plan = KvPlan::Make(spec, options, simd::WriteBlocks);
  EXPECT_TRUE(plan.has_value()) << plan.error().ToString();
  return std::move(*plan);
}

// Logits of every position of a prompt, read in chunks.
std::vector<float> LogitsOf(Model& model, PagePool& pool, std::span<const int32_t> tokens,
                            size_t chunk = 64) {
  SequenceCache cache(model.kv().cache(), pool);
  const auto vocab = static_cast<size_t>(model.spec().vocab_size);
  std::vector<float> logits(tokens.size() * vocab);
  for (size_t at = 0; at < tokens.size(); at += chunk) {
    const size_t count = std::min(chunk, tokens.size() - at);
    const ForwardItem item{&cache, tokens.subspan(at, count), true, static_cast<int>(count)};
    const Status status =
        model.Forward({&item, 1}, std::span(logits).subspan(at * vocab, count * vocab));
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
  return logits;
}

class ReferenceTest : public testing::Test {
 protected:
  void SetUp() override {
    auto config = ReadModelConfig(OSCAR_DEMO_MODEL);
    ASSERT_TRUE(config.has_value()) << config.error().ToString();
    auto source = OpenCheckpointWeights(OSCAR_DEMO_MODEL);
    ASSERT_TRUE(source.has_value()) << source.error().ToString();
    const ModelSpec spec = *MakeModelSpec(*config);
    plan_ = Bf16Plan(spec);
    auto backend = MakeReferenceBackend(spec, **source, *plan_, threads_);
    ASSERT_TRUE(backend.has_value()) << backend.error().ToString();
    model_ = std::move(*Decoder::Make(std::move(*backend)));
    auto text = ReadFile(OSCAR_TEST_DATA "/golden/golden.json", 1 << 20);
    golden_ = *ParseJson(*text, "golden.json");
    auto tensors = SafetensorsFile::Open(OSCAR_TEST_DATA "/golden/golden.safetensors");
    ASSERT_TRUE(tensors.has_value());
    tensors_ = std::make_unique<SafetensorsFile>(std::move(*tensors));
  }
  ThreadPool threads_{1};
  PagePool pool_{uint64_t{1} << 28};
  std::unique_ptr<KvPlan> plan_;
  std::unique_ptr<Decoder> model_;
  nlohmann::json golden_;
  std::unique_ptr<SafetensorsFile> tensors_;
};

TEST_F(ReferenceTest, LogitsMatchTransformers) {
  const auto vocab = static_cast<size_t>(model_->spec().vocab_size);
  for (size_t i = 0; i < golden_["texts"].size(); ++i) {
    const auto ids = golden_["texts"][i]["ids"].get<std::vector<int32_t>>();
    const std::vector<float> expected =
        *ToFloatVector(*tensors_->Get("logits_" + std::to_string(i)));
    const std::vector<float> logits = LogitsOf(*model_, pool_, ids);
    float worst = 0.0f;
    for (size_t j = 0; j < expected.size(); ++j) {
      worst = std::max(worst, std::fabs(expected[j] - logits[logits.size() - 4 * vocab + j]));
    }
    EXPECT_LE(worst, 1e-3f) << "text " << i;
  }
}

TEST_F(ReferenceTest, Layer3MatchesTransformers) {
  auto ids = golden_["layer3_ids"].get<std::vector<int32_t>>();
  ids.resize(150);  // as many rows are stored: the first do not depend on the rest
  std::vector<float> q = *ToFloatVector(*tensors_->Get("layer3_q_prerope"));
  std::vector<float> k = *ToFloatVector(*tensors_->Get("layer3_k_prerope"));
  const std::vector<float> v = *ToFloatVector(*tensors_->Get("layer3_v"));
  // The tap sees heads after RoPE, the goldens are from before it.
  const ModelSpec& spec = model_->spec();
  const AttentionSpec& attention = spec.attention();
  const RopeTable rope(spec.rope_theta, spec.rope_scaling, attention.rotary_dims);
  const auto half = static_cast<size_t>(rope.half()), dim = 2 * half;
  std::vector<float> cos(half), sin(half);
  for (auto* side : {&q, &k}) {
    const auto width = static_cast<size_t>(side == &q ? attention.q_width() : attention.kv_width());
    for (size_t at = 0; at < side->size(); at += dim) {
      rope.Fill(static_cast<int64_t>(at / width), cos, sin);
      float* head = side->data() + at;
      for (size_t d = 0; d < half; ++d) {
        const float a = head[d], b = head[d + half];
        head[d] = a * cos[d] - b * sin[d];
        head[d + half] = b * cos[d] + a * sin[d];
      }
    }
  }
  float worst = 0.0f;
  size_t row = 0;
  ASSERT_TRUE(model_
                  ->SetTap([&](int layer, size_t, auto got_q, auto got_k, auto got_v) {
                    if (layer != 3) return;
                    const auto compare = [&](std::span<const float> got,
                                             const std::vector<float>& all, int width) {
                      for (size_t d = 0; d < got.size(); ++d) {
                        const float expected = all[row * static_cast<size_t>(width) + d];
                        worst = std::max(worst, std::fabs(got[d] - expected));
                      }
                    };
                    compare(got_q, q, attention.q_width());
                    compare(got_k, k, attention.kv_width());
                    compare(got_v, v, attention.kv_width());
                    row += got_k.size() / static_cast<size_t>(attention.kv_width());
                  })
                  .ok());
  LogitsOf(*model_, pool_, ids);
  EXPECT_EQ(row, 150u);
  EXPECT_LE(worst, 1e-3f);
}

ModelConfig SmallConfig() {
  ModelConfig config;
  config.model_type = "qwen3";
  config.vocab_size = 97;
  config.hidden_size = 96;
  config.intermediate_size = 160;
  config.num_layers = 4;
  config.num_attention_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = config.rotary_dim = 64;
  config.rms_norm_eps = 1e-6;
  config.rope_theta = 1e4;
  config.max_position_embeddings = 4096;
  return config;
}

// Random weights that are BF16 numbers, so that packing rounds nothing.
class Bf16Weights : public WeightSource {
 public:
  Status LoadRows(const std::string& name, std::span<const int64_t> shape, WeightRows rows,
                  std::span<float> out) const override {
    OSCAR_RETURN_IF_ERROR(inner_->LoadRows(name, shape, rows, out));
    for (float& x : out) x = ToFloat(ToBf16(x));
    return {};
  }
  Status LoadBf16Rows(const std::string& name, std::span<const int64_t> shape, WeightRows rows,
                      std::span<Bf16> out) const override {
    return inner_->LoadBf16Rows(name, shape, rows, out);
  }
  bool Has(const std::string& name) const override { return inner_->Has(name); }
  uint64_t Fingerprint() const override { return 1; }

 private:
  std::unique_ptr<WeightSource> inner_ = MakeRandomWeights(5);
};

// The CPU's fp32 arithmetic against the reference that rounds the cache as the CPU does; then that
// reading by layers, and a quantised cache, work on the same spec.
void ExpectAsReference(const ModelSpec& spec) {
  const Bf16Weights source;
  ThreadPool threads(2);
  PagePool pool(uint64_t{1} << 26);
  const auto plan = Bf16Plan(spec);
  ReferenceOptions rounded;
  rounded.bf16_cache = true;
  auto backend = MakeReferenceBackend(spec, source, *plan, threads, rounded);
  ASSERT_TRUE(backend.has_value()) << backend.error().ToString();
  const auto reference = *Decoder::Make(std::move(*backend));
  BackendOptions portable;
  portable.portable = true;
  const auto cpu = *LoadModel(Device::kCpu, spec, source, *plan, threads, portable);
  std::vector<int32_t> tokens(300);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>((i * i + 7 * i) % 97);
  const std::vector<float> expected = LogitsOf(*reference, pool, tokens);
  const std::vector<float> got = LogitsOf(*cpu, pool, tokens, 100);
  double error = 0.0, energy = 0.0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += (got[i] - expected[i]) * (got[i] - expected[i]);
    energy += expected[i] * expected[i];
  }
  EXPECT_LE(std::sqrt(error / energy), 1e-3);

  KvPlanOptions options;
  options.sink = options.recent = 64;
  options.prefill_cell = 64;
  auto int2 = KvPlan::Make(spec, options, simd::WriteBlocks);
  ASSERT_TRUE(int2.has_value()) << int2.error().ToString();
  EXPECT_EQ((*int2)->cache().open.num_layers(), spec.num_kv_layers());
  const auto model = *LoadModel(Device::kCpu, spec, source, **int2, threads, portable);
  PagePool sealing_pool(uint64_t{1} << 26, (*int2)->host_sealer());
  const auto vocab = static_cast<size_t>(spec.vocab_size);
  const std::vector<float> chunked = LogitsOf(*model, sealing_pool, tokens);
  SequenceCache cache(model->kv().cache(), sealing_pool);
  std::vector<float> last(vocab);
  for (size_t at = 0; at < tokens.size(); at += 64) {
    auto read = model->StartCell(
        cache, std::span(tokens).subspan(at).first(std::min<size_t>(64, tokens.size() - at)));
    ASSERT_TRUE(read.has_value()) << read.error().ToString();
    for (bool done = false; !done;) {
      const auto more = model->ContinueCell(**read, 37, last);
      ASSERT_TRUE(more.has_value());
      done = *more;
    }
    EXPECT_TRUE(
        std::equal(last.begin(), last.end(),
                   chunked.begin() +
                       static_cast<ptrdiff_t>((static_cast<size_t>(cache.length()) - 1) * vocab)));
  }
  EXPECT_GT(cache.Usage().sealed_pages, 0u);
}

TEST(Decoder, RotatesPartOfAHead) {
  ModelSpec spec = *MakeModelSpec(SmallConfig());
  ExpectAsReference(spec);
  for (LayerSpec& layer : spec.layers) std::get<AttentionSpec>(layer.mixer).rotary_dims = 32;
  ExpectAsReference(spec);
}

TEST(Decoder, LayersWithoutAttentionHaveNoPages) {
  ModelSpec spec = *MakeModelSpec(SmallConfig());
  int slot = 0;
  for (int i = 0; i < spec.num_layers(); ++i) {
    LayerSpec& layer = spec.layers[static_cast<size_t>(i)];
    if (i == 1 || i == 3) layer.mixer = std::monostate();
    layer.kv_slot = layer.attention() != nullptr ? slot++ : -1;
  }
  ASSERT_EQ(spec.kv_layers(), (std::vector<int>{0, 2}));
  ExpectAsReference(spec);
}

}  // namespace
}  // namespace oscar
