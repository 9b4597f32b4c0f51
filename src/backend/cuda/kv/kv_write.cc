#include "cuda/kv/kv_write.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/check.h"
#include "cuda/device/cuda_status.h"
#include "cuda/kv/write_kernels.h"
#include "cuda/kv/write_params.h"

namespace oscar::cuda {

std::vector<uint32_t> PackRotation(std::span<const float> rotation, int head_dim) {
  const auto dims = static_cast<size_t>(head_dim);
  OSCAR_CHECK(rotation.size() == dims * dims && dims % 16 == 0);
  std::vector<uint32_t> words;
  words.reserve(dims * dims);
  for (size_t step = 0; step < dims / 16; ++step) {
    for (size_t tile = 0; tile < dims / 8; ++tile) {
      for (size_t lane = 0; lane < 32; ++lane) {
        const size_t column = tile * 8 + lane / 4;
        uint32_t fragment[4];
        for (size_t j = 0; j < 2; ++j) {
          const size_t row = step * 16 + lane % 4 * 2 + j * 8;
          uint32_t high = 0, low = 0;
          for (size_t e = 0; e < 2; ++e) {
            const float value = rotation[(row + e) * dims + column];
            const Bf16 rounded = ToBf16(value);
            high |= uint32_t{rounded.bits} << (16 * e);
            low |= uint32_t{ToBf16(value - ToFloat(rounded)).bits} << (16 * e);
          }
          fragment[j] = high;
          fragment[2 + j] = low;
        }
        words.insert(words.end(), fragment, fragment + 4);
      }
    }
  }
  return words;
}

Status WriteTokens(const AttentionShape& shape, const WriteArguments& args, Stream stream) {
  if (args.tokens == 0) return {};
  if (IsMatrix(args.rotation) && (args.rotation_fragments == nullptr ||
                                  (args.rotations != 1 && args.rotations != shape.num_kv_heads))) {
    return InvalidArgument(
        fmt::format("rotation: {} matrices for {} KV heads; give 1 or one per head", args.rotations,
                    shape.num_kv_heads));
  }
  const void* kernel = FindWriteKernel(shape.head_dim, args.rotation);
  if (kernel == nullptr) {
    return Unimplemented(fmt::format("no write kernel for head dim {}", shape.head_dim));
  }
  WriteKernelParams params{};
  params.qkv = args.qkv;
  params.qkv_stride = args.qkv_stride;
  params.positions = args.positions;
  params.table_rows = args.table_rows;
  params.cos_sin = reinterpret_cast<const float2*>(args.cos_sin);
  params.q_norm = args.q_norm;
  params.k_norm = args.k_norm;
  params.factors = args.factors;
  params.rotary_half = (args.rotary_dims > 0 ? args.rotary_dims : shape.head_dim) / 2;
  params.rotation = reinterpret_cast<const uint4*>(args.rotation_fragments);
  params.q_out = reinterpret_cast<uint16_t*>(args.q_out);
  params.window_pool = args.window_pool;
  params.cache = args.cache;
  params.tokens = args.tokens;
  params.num_q_heads = shape.num_q_heads;
  params.num_kv_heads = shape.num_kv_heads;
  params.rotations = args.rotations;
  params.norm_epsilon = args.norm_epsilon;
  params.q_scale = args.q_scale;
  const int tiles = (args.tokens * (shape.group_size() + 1) + 15) / 16;
  const dim3 grid(static_cast<unsigned>((tiles + kWriteWarps - 1) / kWriteWarps),
                  static_cast<unsigned>(shape.num_kv_heads + 1));
  void* kernel_args[] = {&params};
  return CudaStatus(cudaLaunchKernel(kernel, grid, dim3(kWriteWarps * 32), kernel_args, 0, stream),
                    "launching the token write");
}

}  // namespace oscar::cuda
