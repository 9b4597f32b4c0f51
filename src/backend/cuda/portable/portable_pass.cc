#include "cuda/portable/portable_pass.h"

#include <algorithm>
#include <cmath>

#include "cuda/portable/portable_kernels.h"
#include "numeric/hadamard.h"

namespace oscar::cuda {

Result<std::unique_ptr<PortablePass>> PortablePass::Create(const ModelSpec& spec,
                                                           const KvPlan& plan,
                                                           const AttentionShape& shape,
                                                           Stream stream) {
  OSCAR_ASSIGN_OR_RETURN(const PortableAttention attention, PortableAttention::Create(shape));
  return std::unique_ptr<PortablePass>(new PortablePass(spec, plan, attention, stream));
}

void PortablePass::Carve(DeviceCarver& carver, size_t rows, size_t logit_rows) {
  normed_ = carver.Take<float>(std::max(rows, logit_rows) * static_cast<size_t>(spec_.hidden));
  attended_ = carver.Take<float>(rows * static_cast<size_t>(q_width()));
  product_ = carver.Take<float>(rows * static_cast<size_t>(spec_.intermediate));
}

Status PortablePass::Product(const DeviceMatrix& matrix, const float* x, const float* bias,
                             float* out, int rows, bool add) {
  PortableProduct product;
  product.weights = matrix.weights;
  product.outputs = matrix.outputs;
  product.inputs = matrix.inputs;
  product.x = x;
  product.bias = bias;
  product.out = out;
  product.out_stride = matrix.outputs;
  product.rows = rows;
  product.add = add;
  return LaunchPortableProduct(product, stream_);
}

Status PortablePass::Project(const DeviceLayer& layer, const float* cos_sin, const Pass& pass,
                             const float* x) {
  OSCAR_RETURN_IF_ERROR(LaunchPortableNorm(x, layer.attention_norm, spec_.norm_eps, nullptr,
                                           normed_, pass.rows, spec_.hidden, stream_));
  OSCAR_RETURN_IF_ERROR(Product(layer.qkv, normed_, layer.qkv_bias, qkv_, pass.rows));
  const PortableHeads heads{qkv_,          pass.positions,  pass.table_rows,
                            pass.rows,     spec_.num_heads, spec_.num_kv_heads,
                            spec_.head_dim};
  return LaunchPortableRope(heads, layer.q_norm, layer.k_norm, spec_.norm_eps, cos_sin, stream_);
}

Status PortablePass::Finish(const DeviceLayer& layer, const CacheView& view, int index,
                            const Pass& pass, float* x) {
  const PortableHeads heads{qkv_,          pass.positions,  pass.table_rows,
                            pass.rows,     spec_.num_heads, spec_.num_kv_heads,
                            spec_.head_dim};
  const SideTransform& k = plan_.k(index);
  PortableRotation rotation;
  if (k.kind == RotationKind::kHadamard || k.kind == RotationKind::kBlockHadamard) {
    rotation.hadamard_order = k.kind == RotationKind::kHadamard ? spec_.head_dim : k.hadamard_block;
    rotation.hadamard_scale = HadamardScale(rotation.hadamard_order);
  } else if (k.kind == RotationKind::kCalibrated) {
    rotation.matrices = layer.rotation_matrices;
    rotation.num_matrices = k.num_matrices;
  }
  OSCAR_RETURN_IF_ERROR(LaunchPortableStore(heads, rotation, view, stream_));

  PortableArguments args;
  args.cache = view;
  args.q = qkv_;
  args.q_stride = qkv_width();
  args.out = attended_;
  args.softmax_scale = 1.0f / std::sqrt(static_cast<float>(spec_.head_dim));
  args.sequences = pass.decode_views;
  args.batch = pass.decodes;
  OSCAR_RETURN_IF_ERROR(attention_.Launch(args, stream_));
  args.sequences = pass.chunk_views;
  args.chunks = pass.chunk_rows;
  args.batch = pass.chunks;
  args.max_query_tokens = std::max(pass.longest_chunk, 1);
  OSCAR_RETURN_IF_ERROR(attention_.Launch(args, stream_));
  OSCAR_RETURN_IF_ERROR(Product(layer.o, attended_, layer.o_bias, x, pass.rows, /*add=*/true));

  const int hidden = spec_.hidden, middle = spec_.intermediate;
  OSCAR_RETURN_IF_ERROR(LaunchPortableNorm(x, layer.feed_forward_norm, spec_.norm_eps, nullptr,
                                           normed_, pass.rows, hidden, stream_));
  for (int first = 0; first < pass.rows; first += gate_up_rows_) {
    const int rows = std::min(gate_up_rows_, pass.rows - first);
    OSCAR_RETURN_IF_ERROR(
        Product(layer.gate_up, normed_ + int64_t{first} * hidden, nullptr, gate_up_, rows));
    OSCAR_RETURN_IF_ERROR(
        LaunchPortableSiluMul(gate_up_, product_ + int64_t{first} * middle, rows, middle, stream_));
  }
  return Product(layer.down, product_, nullptr, x, pass.rows, /*add=*/true);
}

Status PortablePass::Logits(const DeviceWeights& weights, const float* x, const int32_t* sources,
                            int rows, float* logits) {
  OSCAR_RETURN_IF_ERROR(LaunchPortableNorm(x, weights.final_norm, spec_.norm_eps, sources, normed_,
                                           rows, spec_.hidden, stream_));
  return Product(weights.head, normed_, nullptr, logits, rows);
}

}  // namespace oscar::cuda
