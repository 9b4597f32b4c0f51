// Every model family on a tiny checkpoint with all of its features on: against transformers
// (tools/make_model_goldens.py), the CPU against the reference on other shapes, and what is wrong
// with a checkpoint, by name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "base/mxfp4.h"
#include "engine/engine_test_util.h"
#include "engine/page_budget.h"
#include "engine/tiny_model.h"

namespace oscar {
namespace {

using ::testing::HasSubstr;

class FamilyTest : public testing::TestWithParam<const char*> {
 protected:
  const Golden golden_{GetParam()};
  const TinyCheckpoint checkpoint_{ConfigOf(GetParam())};
};

TEST_P(FamilyTest, ReferenceMatchesTransformers) {
  TinyModel tiny(checkpoint_.path(), TinyModel::Bf16(), 1, {}, /*is_reference=*/true);
  ASSERT_TRUE(tiny.status.ok()) << tiny.status.ToString();
  const auto [largest, rms] = golden_.Errors(tiny.Logits(golden_.ids));
  EXPECT_LE(largest, 2e-3);
  std::vector<int32_t> expected = golden_.greedy;
  expected.resize(golden_.Certain(2e-3, 2e-5));
  EXPECT_GE(expected.size(), 16u);
  EXPECT_EQ(tiny.Greedy(golden_.ids, static_cast<int64_t>(expected.size())), expected);
}

TEST_P(FamilyTest, CpuMatchesTransformers) {
  for (const bool portable : {false, true}) {
    BackendOptions options;
    options.portable = portable;
    TinyModel tiny(checkpoint_.path(), TinyModel::Bf16(), 2, options);
    ASSERT_TRUE(tiny.status.ok()) << tiny.status.ToString();
    ExpectTransformers(golden_, tiny, std::string(GetParam()) + (portable ? " portable" : ""));
  }
}

// Cut anywhere, on any number of threads: the same bits.
TEST_P(FamilyTest, ChunksAndThreadsChangeNoBit) {
  const std::vector<int32_t> ids = SomeIds(150);
  for (const bool portable : {false, true}) {
    BackendOptions options;
    options.portable = portable;
    TinyModel one(checkpoint_.path(), SmallWindows(), 1, options);
    ASSERT_TRUE(one.status.ok()) << one.status.ToString();
    const std::vector<float> expected = one.Logits(ids);
    TinyModel three(checkpoint_.path(), SmallWindows(), 3, options);
    for (const int chunk : {1, 7, 64, 149}) EXPECT_EQ(three.Logits(ids, chunk), expected) << chunk;
  }
}

// Through the engine: batched with others, preempted, from the prefix cache, forked.
TEST_P(FamilyTest, SchedulingChangesNoAnswer) {
  TinyModel reference(checkpoint_.path(), SmallWindows());
  ASSERT_TRUE(reference.status.ok()) << reference.status.ToString();
  const CacheConfig& config = reference.plan->cache();
  const uint64_t tight =
      PeakBytes(config, 201, 301) + 2 * config.open.bytes() + 2 * config.state.bytes();
  constexpr int64_t kAnswer = 90;
  // Whether two requests meet in the tight pool is a matter of timing, so rounds go on until they
  // did.
  constexpr int kRounds = 2, kMostRounds = 40;
  for (const uint64_t budget : {uint64_t{1} << 28, tight}) {
    TinyModel tiny(checkpoint_.path(), SmallWindows(), 2, {}, false, budget);
    EngineServiceOptions options;
    options.step_tokens = 100;
    options.deterministic = true;
    auto service = MakeEngineService(*tiny.model, *tiny.pool, tiny.threads, options);
    std::vector<EngineRequest> requests;
    for (uint64_t i = 0; i < 6; ++i) {
      EngineRequest request;
      request.prompt = SomeIds(i < 5 ? 40 + 10 * i : 200, i);
      request.max_tokens = kAnswer;
      request.sampling.temperature = 0.0f;
      requests.push_back(request);
    }
    // Shares all of one prompt, then goes on differently.
    requests.push_back(requests[5]);
    requests.back().prompt.push_back(9);
    std::vector<std::vector<int32_t>> expected;
    for (const EngineRequest& request : requests) {
      expected.push_back(reference.Greedy(request.prompt, kAnswer));
    }
    const auto enough = [&](int rounds) {
      return rounds >= kRounds && (budget != tight || service->Stats().preemptions > 0);
    };
    int rounds = 0;  // the second is answered from the prefix cache
    for (; rounds < kMostRounds && !enough(rounds); ++rounds) {
      std::vector<std::unique_ptr<RequestHandle>> handles;
      for (const EngineRequest& request : requests) handles.push_back(*service->Submit(request));
      int64_t cached = 0;
      for (size_t i = 0; i < requests.size(); ++i) {
        const Answer answer = Collect(*handles[i]);
        EXPECT_TRUE(answer.finished) << answer.status.ToString();
        cached += answer.cached_tokens;
        EXPECT_EQ(answer.tokens, expected[i])
            << "request " << i << " of round " << rounds << ", budget " << budget << ", "
            << answer.cached_tokens << " cached";
      }
      if (rounds == 1 && budget != tight) {
        EXPECT_GT(cached, 0);
      }
    }
    EXPECT_TRUE(enough(rounds)) << "no preemption in " << rounds << " rounds";
  }
}

INSTANTIATE_TEST_SUITE_P(Families, FamilyTest,
                         testing::Values("qwen2", "mistral", "qwen3_moe", "qwen3_moe_fp8",
                                         "glm4_moe", "glm4_moe_fp8", "minimax_m2", "minimax_m2_fp8",
                                         "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_fp8", "qwen3_next",
                                         "gpt_oss", "gpt_oss_mxfp4"),
                         [](const auto& item) { return std::string(item.param); });

// --- Shapes that no golden has ------------------------------------------------------------------

class ShapeTest : public testing::TestWithParam<TinyShape> {};

// The median over positions: where a token nearly goes to other experts, rounding decides.
TEST_P(ShapeTest, CpuMatchesReference) {
  const TinyCheckpoint checkpoint(ConfigFor(GetParam()));
  TinyModel reference(checkpoint.path(), TinyModel::Bf16(), 1, {}, /*is_reference=*/true);
  ASSERT_TRUE(reference.status.ok()) << reference.status.ToString();
  BackendOptions portable;
  portable.portable = true;
  TinyModel cpu(checkpoint.path()), exact(checkpoint.path(), TinyModel::Bf16(), 2, portable);
  ASSERT_TRUE(cpu.status.ok()) << cpu.status.ToString();
  const std::vector<int32_t> ids = SomeIds(40);
  const std::vector<float> expected = reference.Logits(ids);
  const auto vocab = static_cast<size_t>(cpu.spec.vocab_size);
  for (TinyModel* model : {&cpu, &exact}) {
    const std::vector<float> logits = model->Logits(ids);
    std::vector<double> rms;
    for (size_t at = 0; at < logits.size(); at += vocab) {
      double squares = 0.0;
      for (size_t j = at; j < at + vocab; ++j) {
        squares += std::pow(static_cast<double>(logits[j]) - expected[j], 2);
      }
      rms.push_back(std::sqrt(squares / static_cast<double>(vocab)));
    }
    std::ranges::sort(rms);
    EXPECT_LE(rms[rms.size() / 2], BudgetOf("bf16").rms);
    EXPECT_LE(rms[rms.size() * 3 / 4], BudgetOf("bf16").gap);
  }
  // Decode reads the routed experts and no others.
  const ExpertTraffic before = cpu.model->backend().expert_traffic();
  Generator generator(*cpu.model, *cpu.pool);
  ASSERT_TRUE(generator.Prefill(ids, 1, [](int64_t, std::span<const float>) {}).ok());
  const ExpertTraffic prompt = cpu.model->backend().expert_traffic();
  ASSERT_TRUE(generator.Step(7).has_value());
  const ExpertTraffic after = cpu.model->backend().expert_traffic();
  const uint64_t layers = after.layers - prompt.layers;
  EXPECT_GT(prompt.layers, before.layers);
  EXPECT_EQ(after.experts - prompt.experts, layers * static_cast<uint64_t>(GetParam().chosen));
  const uint64_t per_expert = (after.bytes - prompt.bytes) / (after.experts - prompt.experts);
  EXPECT_EQ(
      cpu.model->weight_bytes() - cpu.model->weight_bytes_per_step(),
      (cpu.spec.tied_head ? 0
                          : static_cast<uint64_t>(cpu.spec.vocab_size) *
                                static_cast<uint64_t>(cpu.spec.hidden) * 2) +
          layers * static_cast<uint64_t>(GetParam().experts - GetParam().chosen) * per_expert);
}

INSTANTIATE_TEST_SUITE_P(Shapes, ShapeTest, testing::ValuesIn(kTinyShapes), NameOfShape);

// --- What checkpoints may hold, and what is wrong with them
// -----------------------------------------

// Per-expert tensors of `tensors`, joined as transformers 5 holds them.
void Fuse(TinyTensors* tensors) {
  TinyTensors out;
  struct Part {
    const char* name;
    const char* fused;
  };
  for (auto& [name, tensor] : *tensors) {
    const size_t at = name.find(".experts.");
    if (at == std::string::npos) {
      std::string renamed = name;  // MiniMax's as the others'
      if (const size_t moe = name.find("block_sparse_moe"); moe != std::string::npos) {
        renamed.replace(moe, std::strlen("block_sparse_moe"), "mlp");
      }
      out[renamed] = std::move(tensor);
    }
  }
  for (const Part& part : {Part{"gate_proj", "gate_up_proj"}, Part{"down_proj", "down_proj"},
                           Part{"w1", "gate_up_proj"}, Part{"w2", "down_proj"}}) {
    for (const char* suffix : {".weight", ".weight_scale_inv", ".weight_scale"}) {
      const std::string tail = std::string(".") + part.name + suffix;
      for (const auto& [name, first] : *tensors) {
        const size_t at = name.find(".experts.0.");
        if (at == std::string::npos || !name.ends_with(tail) ||
            name.size() != at + 10 + tail.size())
          continue;
        TinyTensor all{first.dtype, first.shape, {}};
        int64_t experts = 0;
        const bool has_up = std::string(part.fused) == "gate_up_proj";
        for (;; ++experts) {
          const std::string prefix = name.substr(0, at + 9) + std::to_string(experts) + ".";
          const auto gate = tensors->find(prefix + part.name + suffix);
          if (gate == tensors->end()) break;
          all.bytes += gate->second.bytes;
          const std::string up = std::string(part.name) == "w1" ? "w3" : "up_proj";
          if (has_up) all.bytes += tensors->at(prefix + up + suffix).bytes;
        }
        all.shape = {experts, first.shape[0] * (has_up ? 2 : 1), first.shape[1]};
        std::string base = name.substr(0, at);
        if (const size_t moe = base.find("block_sparse_moe"); moe != std::string::npos) {
          base.replace(moe, std::strlen("block_sparse_moe"), "mlp");
        }
        out[base + ".experts." + part.fused + std::string(suffix).substr(7)] = std::move(all);
      }
    }
  }
  *tensors = std::move(out);
}

TEST(FamilyCheckpoints, FusedExpertsAreTheSameModel) {
  const std::vector<int32_t> ids = SomeIds(20);
  for (const char* name :
       {"qwen3_moe", "glm4_moe", "glm4_moe_fp8", "minimax_m2", "qwen3_5_moe", "qwen3_next"}) {
    const TinyCheckpoint split(ConfigOf(name)), fused(ConfigOf(name), Fuse);
    TinyModel first(split.path()), second(fused.path());
    ASSERT_TRUE(second.status.ok()) << second.status.ToString();
    EXPECT_EQ(first.Logits(ids), second.Logits(ids)) << name;
    EXPECT_EQ(first.model->weight_bytes(), second.model->weight_bytes());
  }
}

// Blocks of 128 rows that begin in the gates and end in the ups have no place of their own.
TEST(FamilyCheckpoints, FusedBlocksMustNotStraddle) {
  const TinyCheckpoint fused(ConfigOf("minimax_m2_fp8"), [](TinyTensors* tensors) {
    Fuse(tensors);
    for (auto& [name, tensor] : *tensors) {
      if (!name.ends_with("experts.gate_up_proj_scale_inv")) continue;
      tensor.shape[1] = 1;
      tensor.bytes.resize(tensor.bytes.size() / 2);
    }
  });
  TinyModel tiny(fused.path());
  EXPECT_EQ(tiny.status.code(), StatusCode::kDataLoss);
  EXPECT_THAT(tiny.status.message(), HasSubstr("gate_up_proj_scale_inv"));
}

TEST(FamilyCheckpoints, Fp8ExpertsStayFp8) {
  for (const char* name : {"qwen3_moe", "glm4_moe", "minimax_m2"}) {
    const TinyCheckpoint bf16(ConfigOf(name)), fp8(ConfigOf(std::string(name) + "_fp8"));
    TinyModel first(bf16.path()), second(fp8.path());
    ASSERT_TRUE(second.status.ok()) << second.status.ToString();
    uint64_t weights = 0;
    const TensorTable table(first.spec);
    for (const TensorDecl& tensor : table.tensors()) {
      if (tensor.expert >= 0) weights += tensor.num_elements();
    }
    // A byte less for each, but for padding and scales.
    const uint64_t saved = first.model->weight_bytes() - second.model->weight_bytes();
    EXPECT_GT(saved, weights * 8 / 10) << name;
  }
}

// The same numbers as BF16, input-major as a re-export has them.
void MultiplyOutMxfp4(TinyTensors* tensors) {
  TinyTensors out;
  for (auto& [name, tensor] : *tensors) {
    if (name.ends_with("_scales")) continue;
    if (!name.ends_with("_blocks")) {
      out[name] = std::move(tensor);
      continue;
    }
    const std::string base = name.substr(0, name.size() - std::strlen("_blocks"));
    const std::string& scales = tensors->at(base + "_scales").bytes;
    const auto experts = tensor.shape[0], outputs = tensor.shape[1], inputs = tensor.shape[2] * 32;
    TinyTensor plain{"BF16", {experts, inputs, outputs}, {}};
    plain.bytes.resize(static_cast<size_t>(experts * outputs * inputs) * sizeof(Bf16));
    for (int64_t i = 0; i < experts * outputs * inputs; ++i) {
      const int64_t row = i / inputs, to = (row / outputs * inputs + i % inputs) * outputs;
      const auto two = static_cast<uint8_t>(tensor.bytes[static_cast<size_t>(i / 2)]);
      const Bf16 value = Mxfp4ToBf16(static_cast<uint8_t>(two >> (i % 2 * 4) & 15),
                                     static_cast<uint8_t>(scales[static_cast<size_t>(i / 32)]));
      std::memcpy(plain.bytes.data() + static_cast<size_t>(to + row % outputs) * sizeof(Bf16),
                  &value, sizeof(value));
    }
    out[base] = std::move(plain);
  }
  *tensors = std::move(out);
}

// Bit for bit, in a quarter of the memory.
TEST(FamilyCheckpoints, Mxfp4IsItsValues) {
  const std::vector<int32_t> ids = SomeIds(40);
  const TinyCheckpoint packed(ConfigOf("gpt_oss_mxfp4"));
  const TinyCheckpoint plain(ConfigOf("gpt_oss_mxfp4"), MultiplyOutMxfp4);
  for (const bool portable : {false, true}) {
    BackendOptions options;
    options.portable = portable;
    TinyModel first(packed.path(), TinyModel::Bf16(), 2, options);
    TinyModel second(plain.path(), TinyModel::Bf16(), 2, options);
    ASSERT_TRUE(first.status.ok()) << first.status.ToString();
    ASSERT_TRUE(second.status.ok()) << second.status.ToString();
    EXPECT_EQ(first.Logits(ids), second.Logits(ids));
    uint64_t weights = 0;
    const TensorTable table(first.spec);
    for (const TensorDecl& tensor : table.tensors()) {
      if (tensor.expert >= 0 && tensor.kind == TensorKind::kMatrix)
        weights += tensor.num_elements();
    }
    // 2 bytes against 17 / 32, widths here being whole panels.
    EXPECT_EQ(second.model->weight_bytes() - first.model->weight_bytes(), weights * 47 / 32);
    // What a pass read of its experts is told as it lies.
    const ExpertTraffic a = first.model->backend().expert_traffic();
    const ExpertTraffic b = second.model->backend().expert_traffic();
    EXPECT_EQ(a.experts, b.experts);
    EXPECT_EQ(a.bytes * 64, b.bytes * 17);
  }
}

TEST(FamilyCheckpoints, FaultsAreNamed) { ExpectNamedFaults(Device::kCpu); }

}  // namespace
}  // namespace oscar
