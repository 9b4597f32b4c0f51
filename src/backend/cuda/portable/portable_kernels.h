// The kernels of a portable pass: what the CPU computes between products, and the products, in the
// CPU's order of sums (simd/vec_ops.h, simd/gemm.h with fp32 products), bit for bit. Each is one
// asynchronous launch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/half.h"
#include "cuda/attention/cache_view.h"
#include "cuda/device_weights.h"
#include "cuda/experts/routing.h"
#include "oscar/status.h"

namespace oscar::cuda {

// out[r] = x[source(r)] / rms * weight. `sources` null: row r itself.
Status LaunchPortableNorm(const float* x, const float* weight, float epsilon,
                          const int32_t* sources, float* out, int rows, int width, Stream stream);

struct PortableGemm {
  const Bf16* weights = nullptr;  // [outputs, inputs]
  int outputs = 0, inputs = 0;
  const float* x = nullptr;     // [rows, inputs]
  const float* bias = nullptr;  // [outputs] or null
  float* out = nullptr;         // [rows, out_stride]
  int out_stride = 0;
  int rows = 0;
  bool add = false;  // to what is there
};
Status LaunchPortableGemm(const PortableGemm& product, Stream stream);

// The same of a layer's experts, each with the rows that go to it (Routing).
struct PortableGroupedGemm {
  const PortableMatrix* experts = nullptr;  // [experts], device: [outputs, inputs] each
  const float* bias = nullptr;              // [experts, outputs], added to sums, or null
  int outputs = 0, inputs = 0;
  const float* x = nullptr;           // [*, inputs]
  const int32_t* x_rows = nullptr;    // of x, by place; null: the place itself
  const ExpertTile* tiles = nullptr;  // of at most kPortableTileRows
  const int32_t* num_tiles = nullptr;
  int max_tiles = 0;
  float* out = nullptr;  // [places, outputs]
};
inline constexpr int kPortableTileRows = 64;
Status LaunchPortableGroupedGemm(const PortableGroupedGemm& product, Stream stream);

// A router's scores [rows, experts] of normed rows: logits, `bias` [experts] added or null, then
// softmax or sigmoid.
Status LaunchPortableScores(const float* x, const float* router, const float* bias,
                            RouterScore kind, float* scores, int rows, int hidden, int num_experts,
                            Stream stream);
// Of rows that are a gate, its up, the next gate and so on: ClampedGate's rule.
Status LaunchPortableClampedGate(const float* gate_up, const ClampedGate& gate, float* out,
                                 int rows, int width, Stream stream);

// out[r][i] = silu(gate_up[r][i]) * gate_up[r][width + i].
Status LaunchPortableSiluMul(const float* gate_up, float* out, int rows, int width, Stream stream);

// Rows of q heads, k heads and v heads.
struct PortableHeads {
  float* qkv = nullptr;  // [tokens, stride]
  int64_t stride = 0;    // elements
  const int32_t* positions = nullptr;
  const int32_t* table_rows = nullptr;
  int tokens = 0, heads = 0, kv_heads = 0, head_dim = 0;
};
struct PortableNorm {
  const float *q = nullptr, *k = nullptr;  // [D]; null: no norm
  // [tokens, 2], of a norm over all heads, whose weights are [heads, D] and [kv_heads, D]; or null.
  const float* factors = nullptr;
  float epsilon = 0.0f;
};
// 1 / rms of a token's q and of its k.
Status LaunchPortableFactors(const PortableHeads& heads, float epsilon, float* factors,
                             Stream stream);
// Norm (where there is one) and RoPE of q and k, in place. cos_sin: [positions, rotary_dims / 2,
// 2].
Status LaunchPortableRope(const PortableHeads& heads, const PortableNorm& norm,
                          const float* cos_sin, int rotary_dims, Stream stream);

// q <- q R and k <- k R; k and v rows, rounded to BF16, to their window pages.
struct PortableRotation {
  int hadamard_order = 0;           // of the blocks of a Hadamard; 0: none
  float hadamard_scale = 1.0f;      // HadamardScale(order)
  const float* matrices = nullptr;  // [num_matrices, D, D] or null
  int num_matrices = 0;             // 1 or kv_heads
};
Status LaunchPortableStore(const PortableHeads& heads, const PortableRotation& rotation,
                           const CacheView& cache, Stream stream);

}  // namespace oscar::cuda
