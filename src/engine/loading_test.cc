// What loading a model takes besides its weights, and that reading them in parts changes nothing.
#include <fmt/core.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "engine/demo_fixture.h"
#include "rotation/rotation.h"

namespace oscar {
namespace {

ModelConfig Config(bool tied) {
  ModelConfig config = *ReadModelConfig(OSCAR_DEMO_MODEL);
  config.tie_word_embeddings = tied;
  config.attention_bias = true;
  return config;
}
ModelSpec MakeSpec(bool tied) { return *MakeModelSpec(Config(tied)); }

// One permutation a KV head, each another.
Rotation Permutations(const ModelSpec& spec) {
  Rotation rotation;
  const AttentionSpec& attention = spec.attention();
  rotation.head_dim = attention.head_dim;
  const auto dim = static_cast<size_t>(attention.head_dim),
             heads = static_cast<size_t>(attention.num_kv_heads);
  SideRotation side;
  side.num_heads = attention.num_kv_heads;
  side.matrices.resize(heads * dim * dim);
  side.eigenvalues.assign(heads * dim, 1.0f);
  side.clip.assign(heads, 1.0f);
  for (size_t h = 0; h < heads; ++h) {
    for (size_t i = 0; i < dim; ++i) side.matrices[(h * dim + i) * dim + (i + h + 1) % dim] = 1.0f;
  }
  for (const int layer : spec.kv_layers()) rotation.layers[layer] = {side, side};
  return rotation;
}

std::unique_ptr<KvPlan> MakePlan(const ModelSpec& spec, const std::string& method) {
  KvPlanOptions options = DemoModel::Method(method == "calibrated" ? "oscar+" : method);
  if (method == "calibrated") options.rotation = Permutations(spec);
  auto plan = KvPlan::Make(spec, options, simd::WriteBlocks);
  EXPECT_TRUE(plan.has_value()) << plan.error().ToString();
  return std::move(*plan);
}

class LoadingInParts : public testing::TestWithParam<const char*> {};

TEST_P(LoadingInParts, GivesTheSameBits) {
  ModelConfig config = Config(/*tied=*/false);
  config.num_layers = 2;
  config.vocab_size = 1001;
  const ModelSpec spec = *MakeModelSpec(config);
  ASSERT_GT(spec.attention().num_kv_heads, 1);
  ASSERT_TRUE(spec.attention().qkv_bias);
  const auto plan = MakePlan(spec, GetParam());
  const auto tokens = SomeTokens(40, spec.vocab_size);
  std::vector<float> expected;
  for (const bool quantized : {false, true}) {
    auto source = MakeRandomWeights(7);
    if (quantized) source = QuantizeWeights(std::move(source), spec);
    for (const size_t bytes : {size_t{1} << 30, size_t{1}, size_t{300} << 10}) {
      for (const int num_threads : {1, 3}) {
        ThreadPool threads(num_threads);
        PagePool pool(uint64_t{1} << 28, plan->host_sealer());
        BackendOptions options;
        options.staging_bytes = bytes;
        auto model = LoadModel(Device::kCpu, spec, *source, *plan, threads, options);
        ASSERT_TRUE(model.has_value()) << model.error().ToString();
        const std::vector<float> logits = LogitsOf(**model, pool, tokens, 2);
        if (bytes == size_t{1} << 30 && num_threads == 1) {
          EXPECT_NE(logits, expected);  // quantised weights are others
          expected = logits;
        }
        EXPECT_EQ(logits, expected) << bytes << " bytes, " << num_threads << " threads";
      }
    }
  }
}

// A config that promises more than any memory holds is told apart from the checkpoint before room
// is made for it.
TEST(Loading, ChecksShapesBeforeItAllocates) {
  for (const bool tied : {false, true}) {
    ModelSpec spec = MakeSpec(tied);
    const auto plan = MakePlan(spec, "bf16");
    const auto source = OpenCheckpointWeights(OSCAR_DEMO_MODEL);
    ASSERT_TRUE(source.has_value());
    spec.vocab_size = 1 << 24;
    spec.hidden = 1 << 20;
    ThreadPool threads(1);
    const auto model = LoadModel(Device::kCpu, spec, **source, *plan, threads);
    ASSERT_FALSE(model.has_value());
    EXPECT_NE(model.error().message().find("expected [16777216, 1048576]"), std::string::npos)
        << model.error().ToString();
  }
}

INSTANTIATE_TEST_SUITE_P(All, LoadingInParts,
                         testing::Values("bf16", "quarot", "oscar+", "calibrated"),
                         [](const auto& test) {
                           const std::string name = test.param;
                           return name == "oscar+" ? std::string("oscar_plus") : name;
                         });

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
// Sanitizers keep freed memory and shadows of all of it.
#else

// A checkpoint of zeros, which takes no room on the disk: its data is a hole.
class ZeroCheckpoint {
 public:
  ZeroCheckpoint(const ModelSpec& spec, std::string_view dtype)
      : path_(std::filesystem::path(testing::TempDir()) /
              fmt::format("oscar_zero_checkpoint_{}", ::getpid())) {
    element_ = dtype == "F32" ? 4 : 2;
    const TensorTable table(spec);
    for (const TensorDecl& tensor : table.tensors()) Add(dtype, tensor.name, tensor.shape);
    header_.back() = '}';
    std::filesystem::create_directories(path_);
    const auto file = path_ / "model.safetensors";
    const uint64_t length = header_.size();
    std::ofstream(file, std::ios::binary)
        .write(reinterpret_cast<const char*>(&length), sizeof(length))
        .write(header_.data(), static_cast<std::streamsize>(length));
    std::filesystem::resize_file(file, sizeof(length) + length + data_bytes_);
  }
  ~ZeroCheckpoint() { std::filesystem::remove_all(path_); }
  ZeroCheckpoint(const ZeroCheckpoint&) = delete;
  ZeroCheckpoint& operator=(const ZeroCheckpoint&) = delete;

  std::string path() const { return path_.string(); }
  uint64_t elements() const { return data_bytes_ / element_; }

 private:
  void Add(std::string_view dtype, const std::string& name, const std::vector<int64_t>& shape) {
    uint64_t bytes = element_;
    for (const int64_t n : shape) bytes *= static_cast<uint64_t>(n);
    header_ += fmt::format(R"("{}":{{"dtype":"{}","shape":[{}{}],"data_offsets":[{},{}]}},)", name,
                           dtype, shape[0], shape.size() == 2 ? fmt::format(",{}", shape[1]) : "",
                           data_bytes_, data_bytes_ + bytes);
    data_bytes_ += bytes;
  }

  std::filesystem::path path_;
  std::string header_ = "{";
  uint64_t element_ = 2, data_bytes_ = 0;
};

uint64_t ResidentBytes() {
  uint64_t size = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> size >> resident;
  return resident * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

// By how much the resident memory of a process of its own grows at most while it loads.
uint64_t PeakGrowth(const ModelSpec& spec, const std::string& path, const std::string& method,
                    const char* gemm, int num_threads) {
  std::array<int, 2> ends{};
  EXPECT_EQ(::pipe(ends.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    uint64_t growth = 0;
    ::setenv("OSCAR_GEMM", gemm, 1);
    {
      ThreadPool threads(num_threads);
      const auto plan = MakePlan(spec, method);
      const uint64_t before = ResidentBytes();
      const auto source = OpenCheckpointWeights(path);
      if (source.has_value() &&
          LoadModel(Device::kCpu, spec, **source, *plan, threads).has_value()) {
        rusage usage{};
        ::getrusage(RUSAGE_SELF, &usage);
        growth = static_cast<uint64_t>(usage.ru_maxrss) * 1024 - before;
      }
    }
    ::_exit(::write(ends[1], &growth, sizeof(growth)) == sizeof(growth) ? 0 : 1);
  }
  ::close(ends[1]);
  uint64_t growth = 0;
  EXPECT_EQ(::read(ends[0], &growth, sizeof(growth)), static_cast<ssize_t>(sizeof(growth)));
  ::close(ends[0]);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return growth;
}

// The bar is 1.15 for a process; what is loaded here is so small that a copy of any large matrix,
// of the file's pages or of what rotating values takes would be above this one.
void ExpectLittleMoreThanWeights(const ModelConfig& config, std::string_view dtype,
                                 const std::string& method, const char* gemm, int num_threads) {
  const ModelSpec spec = *MakeModelSpec(config);
  const ZeroCheckpoint checkpoint(spec, dtype);
  const double weights = static_cast<double>(checkpoint.elements()) * sizeof(Bf16);
  const uint64_t growth = PeakGrowth(spec, checkpoint.path(), method, gemm, num_threads);
  const double ratio = static_cast<double>(growth) / weights;
  std::printf("%s %s %s, %d threads: %.3f of %.0f MB\n", std::string(dtype).c_str(), method.c_str(),
              gemm, num_threads, ratio, weights / 1e6);
  EXPECT_GE(ratio, 0.99);
  EXPECT_LE(ratio, 1.07) << dtype << " " << method << " " << gemm;
}

// Values and outputs are half of the weights.
ModelConfig ValueConfig() {
  ModelConfig config = Config(/*tied=*/true);
  config.hidden_size = 1024;
  config.num_attention_heads = config.num_kv_heads = 16;
  config.head_dim = config.rotary_dim = 128;
  config.intermediate_size = 256;
  config.vocab_size = 256;
  config.num_layers = 6;
  return config;
}

TEST(LoadingMemory, IsTheWeightsUnderEveryMethod) {
  for (const char* method : {"bf16", "quarot", "oscar+"}) {
    ExpectLittleMoreThanWeights(ValueConfig(), "BF16", method, "fma", 1);
  }
  ModelConfig config = ValueConfig();
  config.num_layers = 5;
  // Dense rotations are slower, the more the wider.
  config.num_attention_heads = config.num_kv_heads = 32;
  config.head_dim = config.rotary_dim = 64;
  ExpectLittleMoreThanWeights(config, "BF16", "calibrated", "fma", 1);
}

TEST(LoadingMemory, IsTheWeightsInEveryPackedForm) {
  for (const char* gemm : {"bf16", "amx"}) {
    ExpectLittleMoreThanWeights(ValueConfig(), "BF16", "oscar+", gemm, 2);
  }
}

TEST(LoadingMemory, IsTheWeightsFromEveryType) {
  for (const char* dtype : {"F16", "F32"}) {
    ExpectLittleMoreThanWeights(ValueConfig(), dtype, "oscar+", "fma", 1);
  }
}

TEST(LoadingMemory, IsTheWeightsWhereTheyAreTheVocabulary) {
  for (const bool tied : {true, false}) {
    ModelConfig config = Config(tied);
    config.num_layers = 1;
    config.hidden_size = 1024;
    config.vocab_size = tied ? 50000 : 25000;
    ExpectLittleMoreThanWeights(config, "BF16", "oscar+", "fma", 1);
  }
}

// Matrices that fill half a huge page at their end, and ones below the size of any.
TEST(LoadingMemory, IsTheWeightsInOddShapes) {
  ModelConfig config = ValueConfig();
  config.num_layers = 9;
  config.hidden_size = 1040;
  config.intermediate_size = 2100;
  config.num_kv_heads = 2;
  ExpectLittleMoreThanWeights(config, "BF16", "oscar+", "fma", 1);
}

#endif

}  // namespace
}  // namespace oscar
