// Built without contraction, as portable_kernels.cu is, whose order of a row's sums it shares.
#include <algorithm>
#include <string>

#include "cuda/device/cuda_status.h"
#include "cuda/device/ptx.cuh"
#include "cuda/kv/head_row.cuh"
#include "cuda/linear_attention/state_math.cuh"
#include "cuda/portable/portable_math.cuh"
#include "cuda/portable/portable_state.h"

namespace oscar::cuda {
namespace {

constexpr int kWarps = 4;

struct Params {
  StateArguments args;
  PortableStateScratch scratch;
  float* out;
};

__device__ __forceinline__ PrefillChunk ChunkOf(const StateArguments& args, int item) {
  return args.chunks != nullptr ? args.chunks[item] : PrefillChunk{item, 1};
}
// Null: padding.
__device__ __forceinline__ float* StateOf(const StateArguments& args, int item) {
  const int place = args.states[item];
  if (place < 0) return nullptr;
  return reinterpret_cast<float*>(args.arena + place * args.place_bytes + args.layer_offset);
}

__device__ __forceinline__ float CpuSigmoid(float x) {
  constexpr float kLog2E = 1.4426950408889634f;
  const float v = x < -87.0f ? -87.0f : x;
  return 1.0f / (1.0f + CpuExp2(v * -kLog2E));
}
// SiluMul of simd/vec_ops.h; a gate that is not a number stays so.
__device__ __forceinline__ float CpuSiluMul(float x, float up) {
  constexpr float kLog2E = 1.4426950408889634f;
  const float gate = x < -87.0f ? -87.0f : x;
  return gate / (1.0f + CpuExp2(gate * -kLog2E)) * up;
}

// RmsNorm's factor of x[0, width).
__device__ float FactorOf(const float* x, int width, float epsilon, int lane) {
  float sum = 0.0f;
  for (int i = lane % 16; i < width; i += 16) sum = fmaf(x[i], x[i], sum);
  return 1.0f / sqrtf(SumOfLanes16(sum) / static_cast<float>(width) + epsilon);
}

// A warp per (token, part): the q of a key head, the k of one, a value head's v and gates.
__global__ void __launch_bounds__(kWarps * 32) ConvolveKernel(const Params p) {
  const LinearAttentionSpec& spec = p.args.spec;
  const int parts = 2 * spec.key_heads + spec.value_heads;
  const int unit = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, item = static_cast<int>(blockIdx.y);
  const int token = unit / parts, part = unit % parts;
  const PrefillChunk chunk = ChunkOf(p.args, item);
  const float* const state = StateOf(p.args, item);
  if (state == nullptr || token >= chunk.query_tokens) return;
  const int head = part - 2 * spec.key_heads;  // a value head, or negative
  const int kind = part < spec.key_heads ? 0 : head < 0 ? 1 : 2;
  const int each = spec.values_per_key_head();
  const HeadChannels at =
      ChannelsOf(spec, kind == 2 ? head : (kind == 0 ? part : part - spec.key_heads) * each, kind);
  const int dims = kind == 2 ? spec.value_dim : spec.key_dim;
  const int channels = spec.conv_channels(), taps = spec.conv_kernel;
  const int64_t width = spec.input_width(), row = chunk.query_begin + token;
  float* const out = p.scratch.convolved + row * channels + at.channel;
  for (int i = lane; i < dims; i += 32) {
    float sum = 0.0f;
    for (int j = 0; j < taps; ++j) {
      const int from = token - (taps - 1) + j;
      const float x = from >= 0 ? p.args.inputs[(chunk.query_begin + from) * width + at.input + i]
                                : state[spec.matrix_floats() +
                                        (taps - 1 + from) * int64_t{channels} + at.channel + i];
      sum = fmaf(p.args.weights.conv[j * channels + at.channel + i], x, sum);
    }
    out[i] = CpuSiluMul(sum, 1.0f);
  }
  if (kind < 2) {
    __syncwarp();
    const auto size = static_cast<float>(dims);
    const float factor = FactorOf(out, dims, kLengthEpsilon / size, lane);
    const float scale = kind == 0 ? 1.0f / size : 1.0f / sqrtf(size);
    __syncwarp();
    for (int i = lane; i < dims; i += 32) out[i] = out[i] * factor * scale;
    return;
  }
  if (lane > 0) return;
  // In double precision, as on the CPU: rounded to fp32 it does not show whose functions they are.
  const float* const in = p.args.inputs + row * width;
  const double a = static_cast<double>(in[spec.AOf(head)]) + p.args.weights.step_bias[head];
  const double step = a > 20.0 ? a : log1p(exp(a));
  const int64_t to = row * spec.value_heads + head;
  p.scratch.decay[to] =
      static_cast<float>(exp(-static_cast<double>(p.args.weights.decay_rate[head]) * step));
  const double b = in[spec.BOf(head)];
  p.scratch.beta[to] = static_cast<float>(1.0 / (1.0 + exp(-b)));
}

// A block per (sequence, value head), a thread per value dim; then what the state keeps of the
// inputs, which every convolution of this layer has read.
__global__ void __launch_bounds__(kMaxStateValueDim) RuleKernel(const Params p) {
  const LinearAttentionSpec& spec = p.args.spec;
  const int item = static_cast<int>(blockIdx.x) / spec.value_heads;
  const int head = static_cast<int>(blockIdx.x) % spec.value_heads;
  const int column = static_cast<int>(threadIdx.x);
  float* const all = StateOf(p.args, item);
  if (all == nullptr) return;
  const PrefillChunk chunk = ChunkOf(p.args, item);
  const int key_dim = spec.key_dim, value_dim = spec.value_dim, taps = spec.conv_kernel;
  const int channels = spec.conv_channels(), each = spec.values_per_key_head();
  float* const state = all + int64_t{head} * key_dim * value_dim + column;
  for (int t = 0; t < chunk.query_tokens && column < value_dim; ++t) {
    const int64_t row = chunk.query_begin + t;
    const float* const convolved = p.scratch.convolved + row * channels;
    const float* const q = convolved + head / each * key_dim;
    const float* const k = q + spec.key_width();
    const float v = convolved[2 * spec.key_width() + head * value_dim + column];
    const float decay = p.scratch.decay[row * spec.value_heads + head];
    const float beta = p.scratch.beta[row * spec.value_heads + head];
    // Even and odd key dims are summed apart.
    float sum[2] = {};
    for (int d = 0; d < key_dim; ++d) {
      const float s = state[d * value_dim] * decay;
      state[d * value_dim] = s;
      sum[d % 2] = fmaf(k[d], s, sum[d % 2]);
    }
    const float change = beta * (v - (sum[0] + sum[1]));
    sum[0] = sum[1] = 0.0f;
    for (int d = 0; d < key_dim; ++d) {
      const float s = fmaf(k[d], change, state[d * value_dim]);
      state[d * value_dim] = s;
      sum[d % 2] = fmaf(q[d], s, sum[d % 2]);
    }
    p.out[row * spec.value_width() + head * value_dim + column] = sum[0] + sum[1];
  }
  const int64_t width = spec.input_width();
  float* const kept = all + spec.matrix_floats();
  for (int part = 0; part < 3; ++part) {
    if (part < 2 && head % each != 0) continue;
    const HeadChannels at = ChannelsOf(spec, head, part);
    for (int i = column; i < (part == 2 ? value_dim : key_dim); i += kMaxStateValueDim) {
      // From the oldest on: none is overwritten before it is moved.
      for (int j = 0; j < taps - 1; ++j) {
        const int from = chunk.query_tokens - (taps - 1) + j;
        kept[j * int64_t{channels} + at.channel + i] =
            from >= 0 ? p.args.inputs[(chunk.query_begin + from) * width + at.input + i]
                      : kept[(taps - 1 + from) * int64_t{channels} + at.channel + i];
      }
    }
  }
}

// A warp per (token, value head).
__global__ void __launch_bounds__(kWarps * 32) NormKernel(const Params p) {
  const LinearAttentionSpec& spec = p.args.spec;
  const int unit = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, item = static_cast<int>(blockIdx.y);
  const int token = unit / spec.value_heads, head = unit % spec.value_heads;
  const PrefillChunk chunk = ChunkOf(p.args, item);
  if (p.args.states[item] < 0 || token >= chunk.query_tokens) return;
  const int64_t row = chunk.query_begin + token;
  float* const o = p.out + row * spec.value_width() + head * spec.value_dim;
  const float* const z = p.args.inputs + row * spec.input_width() + spec.ZOf(head);
  const float factor = FactorOf(o, spec.value_dim, p.args.norm_epsilon, lane);
  __syncwarp();
  for (int i = lane; i < spec.value_dim; i += 32) {
    o[i] = CpuSiluMul(z[i], o[i] * factor * p.args.weights.norm[i]);
  }
}

// A warp per (token, head).
template <int kDim>
__global__ void __launch_bounds__(kWarps * 32)
    GateKernel(const PortableHeads p, const PortableGate gate) {
  constexpr int kRegs = kDim / 32;
  const int64_t unit = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t token = unit / p.heads;
  const int head = static_cast<int>(unit % p.heads);
  if (token >= p.tokens) return;
  float* const row = gate.attended + unit * kDim;
  const float* const gates =
      p.qkv + token * p.stride + (p.heads + 2 * p.kv_heads + head) * int64_t{kDim};
  float x[kRegs], y[kRegs];
#pragma unroll
  for (int r = 0; r < kRegs; ++r) x[r] = y[r] = row[lane + 32 * r];
  if (gate.turn.matrices != nullptr) {
    const int kv_head = head / (p.heads / p.kv_heads);
    const float* const matrix =
        gate.turn.matrices + (gate.turn.num_matrices > 1 ? int64_t{kv_head} * kDim * kDim : 0);
    for (int d = 0; d < kDim; ++d) {
      // Dot: number i belongs to lane i % 16, which the warp holds twice.
      float sum = 0.0f;
#pragma unroll
      for (int r = 0; r < kRegs; ++r) {
        const float low = __shfl_sync(~0u, x[r], lane % 16);
        const float high = __shfl_sync(~0u, x[r], lane % 16 + 16);
        sum = fmaf(low, matrix[d * kDim + 32 * r + lane % 16], sum);
        sum = fmaf(high, matrix[d * kDim + 32 * r + 16 + lane % 16], sum);
      }
      sum = SumOfLanes16(sum);
#pragma unroll
      for (int r = 0; r < kRegs; ++r) {
        if (d == lane + 32 * r) y[r] = sum;
      }
    }
  } else if (gate.turn.hadamard_order > 0) {
    HadamardButterflies(y, lane, gate.turn.hadamard_order);
#pragma unroll
    for (int r = 0; r < kRegs; ++r) y[r] *= gate.turn.hadamard_scale;
  }
#pragma unroll
  for (int r = 0; r < kRegs; ++r) row[lane + 32 * r] = y[r] * CpuSigmoid(gates[lane + 32 * r]);
}

__global__ void ScaleKernel(float* x, const float* factors, int64_t count, int width) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    x[i] *= factors[i / width];
  }
}

dim3 Grid(int64_t units, int batch) {
  return {static_cast<unsigned>((units + kWarps - 1) / kWarps), static_cast<unsigned>(batch)};
}

}  // namespace

Status LaunchPortableStates(const StateArguments& args, int longest,
                            const PortableStateScratch& scratch, float* out, Stream stream) {
  if (args.batch <= 0) return {};
  const LinearAttentionSpec& spec = args.spec;
  const Params params{args, scratch, out};
  const int parts = 2 * spec.key_heads + spec.value_heads;
  ConvolveKernel<<<Grid(int64_t{longest} * parts, args.batch), kWarps * 32, 0, stream>>>(params);
  RuleKernel<<<static_cast<unsigned>(args.batch * spec.value_heads), kMaxStateValueDim, 0,
               stream>>>(params);
  NormKernel<<<Grid(int64_t{longest} * spec.value_heads, args.batch), kWarps * 32, 0, stream>>>(
      params);
  return CudaStatus(cudaGetLastError(), "launching portable linear attention");
}

Status LaunchPortableGate(const PortableHeads& heads, const PortableGate& gate, Stream stream) {
  if (heads.tokens <= 0) return {};
  const Status none =
      Unimplemented("no portable pass for head dim " + std::to_string(heads.head_dim));
  return DispatchHeadDim(heads.head_dim, none, [&]<int kDim>() {
    GateKernel<kDim>
        <<<Grid(int64_t{heads.tokens} * heads.heads, 1), kWarps * 32, 0, stream>>>(heads, gate);
    return CudaStatus(cudaGetLastError(), "launching a portable gate");
  });
}

Status LaunchPortableScale(float* x, const float* factors, int rows, int width, Stream stream) {
  const int64_t count = int64_t{rows} * width;
  if (count <= 0) return {};
  ScaleKernel<<<static_cast<unsigned>(std::min<int64_t>((count + 255) / 256, 4096)), 256, 0,
                stream>>>(x, factors, count, width);
  return CudaStatus(cudaGetLastError(), "launching a portable scale");
}

}  // namespace oscar::cuda
