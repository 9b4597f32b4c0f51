// A decoder's weights as the CPU multiplies them: matrices packed in panels of BF16 (experts that
// are FP8 or MXFP4 on disk stay so), norms, biases and routers in fp32. Immutable after loading.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "base/half.h"
#include "simd/gemm.h"
#include "weights/source.h"

namespace oscar {

struct CpuWeights {
  struct Linear {
    simd::PackedMatrix matrix;
    std::vector<float> bias;  // or none
  };
  struct Experts {
    std::vector<float> router;       // [experts, hidden]
    std::vector<float> choice_bias;  // [experts], or none
    std::vector<simd::PackedMatrix> gate_up, down;
    // [experts], [experts, 2 intermediate], [experts, hidden], or none.
    std::vector<float> logit_bias, gate_up_bias, down_bias;
  };
  struct Layer {
    std::array<Linear, kLayerMatrices.size()> linears;  // by LayerMatrix
    Experts experts;
    std::vector<float> attention_norm, feed_forward_norm, q_norm, k_norm;
    std::vector<float> shared_share;  // [hidden], or none
    // Of linear attention: the convolution by age, [conv_kernel, channels], oldest first;
    // exp(A_log) and dt_bias of the heads; the norm of what they give.
    std::vector<float> conv, decay_rate, step_bias, state_norm;
    std::vector<float> sinks;  // [heads], or none

    const Linear& linear(LayerMatrix matrix) const { return linears[static_cast<size_t>(matrix)]; }
    const std::vector<float>& norm(Role role) const {
      return role == Role::kAttentionNorm ? attention_norm : feed_forward_norm;
    }
  };

  std::vector<Bf16> embedding;  // empty where the head is tied: rows come from `head`
  simd::PackedMatrix head;      // [vocab, hidden]
  std::vector<float> final_norm;
  std::vector<Layer> layers;
  uint64_t bytes = 0;                  // of matrices
  uint64_t unrouted_expert_bytes = 0;  // of these, experts that one token does not go to
};

// V's rotation is folded into the projections around it; into the first alone where gates stand in
// front of the second.
Result<CpuWeights> LoadCpuWeights(const ModelSpec& spec, const WeightSource& source,
                                  const KvPlan& plan, simd::GemmPath path, size_t staging_bytes,
                                  ThreadPool& threads);

}  // namespace oscar
