#include <algorithm>
#include <string>

#include "cuda/attention/output_gate.h"
#include "cuda/device/cuda_status.h"
#include "cuda/device/ptx.cuh"
#include "cuda/kv/head_row.cuh"
#include "cuda/linear_attention/state_math.cuh"

namespace oscar::cuda {
namespace {

constexpr int kWarps = 4;

__device__ __forceinline__ uint16_t Gated(float x, float gate) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(x * SigmoidOf(gate)));
}

// A warp per (row, head); register i is dim lane + 32 i. V was not rotated, or by a Hadamard, which
// is its own inverse.
template <int kDim>
__global__ void __launch_bounds__(kWarps * 32)
    GateKernel(const OutputGateArguments p, bool hadamard, float scale) {
  constexpr int kRegs = kDim / 32;
  const int64_t unit = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t row = unit / p.heads;
  const int head = static_cast<int>(unit % p.heads);
  if (row >= p.rows) return;
  const float* const in = p.attended + unit * kDim;
  const float* const gates = p.gates + row * p.gate_stride + head * kDim;
  float x[kRegs];
#pragma unroll
  for (int i = 0; i < kRegs; ++i) x[i] = in[lane + 32 * i];
  if (hadamard) HadamardButterflies(x, lane, kDim);
  auto* const out = reinterpret_cast<uint16_t*>(p.out) + unit * kDim;
#pragma unroll
  for (int i = 0; i < kRegs; ++i) {
    const float y = hadamard ? x[i] * scale : x[i];
    out[lane + 32 * i] = Gated(y, gates[lane + 32 * i]);
  }
}

// V was rotated by a matrix: a block has up to kTurnRows rows of a head, a thread a dim of them
// all, so that a matrix is read once for as many rows.
constexpr int kTurnRows = 16;

template <int kDim>
__global__ void __launch_bounds__(kDim) TurnAndGateKernel(const OutputGateArguments p) {
  __shared__ float x[kDim][kTurnRows];
  const int head = static_cast<int>(blockIdx.x) % p.heads, dim = static_cast<int>(threadIdx.x);
  const int64_t first = int64_t{blockIdx.x} / p.heads * kTurnRows;
  const int rows = static_cast<int>(min(int64_t{kTurnRows}, p.rows - first));
  const int kv_head = head / (p.heads / p.kv_heads);
  const float* const turn = p.turns + (p.num_turns > 1 ? kv_head : 0) * int64_t{kDim} * kDim + dim;
  for (int r = 0; r < kTurnRows; ++r) {
    x[dim][r] = r < rows ? p.attended[((first + r) * p.heads + head) * kDim + dim] : 0.0f;
  }
  __syncthreads();
  float sum[kTurnRows] = {};
#pragma unroll 4
  for (int i = 0; i < kDim; ++i) {
    const float factor = __ldg(turn + int64_t{i} * kDim);
#pragma unroll
    for (int r = 0; r < kTurnRows; r += 4) {
      const float4 four = *reinterpret_cast<const float4*>(&x[i][r]);
      sum[r] = fmaf(four.x, factor, sum[r]);
      sum[r + 1] = fmaf(four.y, factor, sum[r + 1]);
      sum[r + 2] = fmaf(four.z, factor, sum[r + 2]);
      sum[r + 3] = fmaf(four.w, factor, sum[r + 3]);
    }
  }
#pragma unroll
  for (int r = 0; r < kTurnRows; ++r) {
    if (r >= rows) break;
    const float gate = p.gates[(first + r) * p.gate_stride + head * kDim + dim];
    reinterpret_cast<uint16_t*>(p.out)[((first + r) * p.heads + head) * kDim + dim] =
        Gated(sum[r], gate);
  }
}

}  // namespace

Status LaunchOutputGate(const OutputGateArguments& args, Stream stream) {
  if (args.rows <= 0) return {};
  const Status none = Unimplemented("no output gate for head dim " + std::to_string(args.head_dim));
  return DispatchHeadDim(args.head_dim, none, [&]<int kDim>() {
    if (args.turns != nullptr) {
      const int64_t tiles = (int64_t{args.rows} + kTurnRows - 1) / kTurnRows;
      TurnAndGateKernel<kDim><<<static_cast<unsigned>(tiles * args.heads), kDim, 0, stream>>>(args);
    } else {
      const int64_t units = int64_t{args.rows} * args.heads;
      GateKernel<kDim>
          <<<static_cast<unsigned>((units + kWarps - 1) / kWarps), kWarps * 32, 0, stream>>>(
              args, args.rotation == RotationKind::kHadamard,
              1.0f / sqrtf(static_cast<float>(kDim)));
    }
    return CudaStatus(cudaGetLastError(), "launching the gate of attention");
  });
}

}  // namespace oscar::cuda
