// CpuExperts: routed experts on the host's processor. Tokens are grouped by expert, so that each
// expert that a pass touches is read once, and one that it does not touch is not read. One thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "arch/router.h"
#include "backend/backend.h"
#include "base/thread_pool.h"
#include "cpu/cpu_weights.h"
#include "simd/aligned_buffer.h"
#include "simd/gemm.h"

namespace oscar {

class CpuExperts {
 public:
  // x [rows, hidden], normed; what the experts make of it is added to `stream`, likewise.
  void Run(const ExpertsSpec& spec, const CpuWeights::Experts& weights, const float* x,
           size_t num_rows, size_t hidden, float* stream, ThreadPool& threads);
  const ExpertTraffic& traffic() const { return traffic_; }

 private:
  void Route(const ExpertsSpec& spec, const CpuWeights::Experts& weights, const float* x,
             size_t num_rows, size_t hidden, ThreadPool& threads);

  ExpertTraffic traffic_;
  std::vector<ExpertChoice> choices_;  // [rows, experts per token], the best first
  // Choices in the order of their experts: the row of each, and where each choice went.
  std::vector<int32_t> rows_, places_, own_rows_;
  std::vector<simd::GemmGroup> groups_;
  simd::AlignedBuffer<float> scores_, gate_up_, gated_, outputs_;
  simd::GroupedGemmWorkspace gemm_;
};

}  // namespace oscar
