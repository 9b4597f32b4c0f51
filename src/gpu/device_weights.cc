#include "gpu/device_weights.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/progress.h"
#include "cuda/cuda_status.h"
#include "gpu/step_kernels.h"
#include "model/rope.h"

namespace oscar::gpu {
namespace {

using cuda::CudaStatus;

int QWidth(const ModelSpec& spec) { return spec.num_heads * spec.head_dim; }
int KvWidth(const ModelSpec& spec) { return spec.num_kv_heads * spec.head_dim; }

// The K rotation as matrices, where the write kernel has no form of its own for it.
int NumMatrices(const SideTransform& transform) {
  if (transform.kind == RotationKind::kCalibrated) return transform.num_matrices;
  return transform.kind == RotationKind::kBlockHadamard ? 1 : 0;
}

template <typename T>
Status Upload(T* to, std::span<const T> from) {
  return CudaStatus(cudaMemcpy(to, from.data(), from.size_bytes(), cudaMemcpyHostToDevice),
                    "copying weights to the device");
}

class Loader {
 public:
  Loader(const ModelSpec& spec, const KvPlan& plan, const WeightSource& source, cuda::Stream stream)
      : spec_(spec), plan_(plan), source_(source), stream_(stream) {}

  Status Matrix(const std::string& name, int outputs, int inputs, Bf16* to) {
    const int64_t count = int64_t{outputs} * inputs;
    if (const auto random = source_.RandomStream(name)) {
      return LaunchRandomWeights(random->first, random->second, to, count, stream_);
    }
    staged_.resize(static_cast<size_t>(count));
    OSCAR_RETURN_IF_ERROR(source_.LoadBf16(name, std::vector<int64_t>{outputs, inputs}, staged_));
    return Upload<Bf16>(to, staged_);
  }
  Status Vector(const std::string& name, int size, float* to) {
    if (to == nullptr) return {};
    floats_.resize(static_cast<size_t>(size));
    OSCAR_RETURN_IF_ERROR(source_.Load(name, std::vector<int64_t>{size}, floats_));
    return Upload<float>(to, floats_);
  }
  Status Layer(int index, DeviceLayer& layer);

 private:
  Status ValueAndOutput(int index, DeviceLayer& layer);
  Status UploadRounded(std::span<const float> values, Bf16* to) {
    staged_.resize(values.size());
    std::ranges::transform(values, staged_.begin(), ToBf16);
    return Upload<Bf16>(to, staged_);
  }
  Status Rotation(const SideTransform& transform, DeviceLayer& layer);

  const ModelSpec& spec_;
  const KvPlan& plan_;
  const WeightSource& source_;
  cuda::Stream stream_;
  std::vector<Bf16> staged_;
  std::vector<float> floats_;
};

Status Loader::Rotation(const SideTransform& transform, DeviceLayer& layer) {
  std::vector<uint32_t> words;
  const auto dim = static_cast<size_t>(spec_.head_dim);
  for (int head = 0; head < NumMatrices(transform); ++head) {
    // Row i of the matrix is what the unit vector e_i becomes.
    std::vector<float> matrix(dim * dim, 0.0f);
    for (size_t i = 0; i < dim; ++i) {
      matrix[i * dim + i] = 1.0f;
      transform.Apply(head, {matrix.data() + i * dim, dim});
    }
    const auto packed = cuda::PackRotation(matrix, spec_.head_dim);
    words.insert(words.end(), packed.begin(), packed.end());
  }
  return words.empty() ? Status() : Upload<uint32_t>(layer.rotation_fragments, words);
}

Status Loader::ValueAndOutput(int index, DeviceLayer& layer) {
  const TensorNames& names = spec_.names;
  const int q = QWidth(spec_), kv = KvWidth(spec_);
  const std::string v_name = fmt::format(fmt::runtime(names.v), index);
  const std::string o_name = fmt::format(fmt::runtime(names.o), index);
  Bf16* const v_rows = layer.qkv + int64_t{q + kv} * spec_.hidden;
  std::vector<float> v_bias;
  if (!names.v_bias.empty()) {
    v_bias.resize(static_cast<size_t>(kv));
    OSCAR_RETURN_IF_ERROR(source_.Load(fmt::format(fmt::runtime(names.v_bias), index),
                                       std::vector<int64_t>{kv}, v_bias));
  }
  if (plan_.v(index).kind == RotationKind::kNone || source_.RandomStream(v_name)) {
    OSCAR_RETURN_IF_ERROR(Matrix(v_name, kv, spec_.hidden, v_rows));
    OSCAR_RETURN_IF_ERROR(Matrix(o_name, spec_.hidden, q, layer.o));
  } else {
    std::vector<float> w_v(static_cast<size_t>(kv) * static_cast<size_t>(spec_.hidden));
    std::vector<float> w_o(static_cast<size_t>(q) * static_cast<size_t>(spec_.hidden));
    OSCAR_RETURN_IF_ERROR(source_.Load(v_name, std::vector<int64_t>{kv, spec_.hidden}, w_v));
    OSCAR_RETURN_IF_ERROR(source_.Load(o_name, std::vector<int64_t>{spec_.hidden, q}, w_o));
    AbsorbValueRotation(plan_.v(index), spec_.num_heads, spec_.num_kv_heads, spec_.head_dim,
                        spec_.hidden, w_v, v_bias, w_o);
    OSCAR_RETURN_IF_ERROR(UploadRounded(w_v, v_rows));
    OSCAR_RETURN_IF_ERROR(UploadRounded(w_o, layer.o));
  }
  if (layer.qkv_bias != nullptr && !v_bias.empty()) {
    OSCAR_RETURN_IF_ERROR(Upload<float>(layer.qkv_bias + q + kv, v_bias));
  }
  return {};
}

Status Loader::Layer(int index, DeviceLayer& layer) {
  const TensorNames& names = spec_.names;
  const int q = QWidth(spec_), kv = KvWidth(spec_), hidden = spec_.hidden;
  const auto name = [&](const std::string& pattern) {
    return fmt::format(fmt::runtime(pattern), index);
  };
  OSCAR_RETURN_IF_ERROR(Vector(name(names.attention_norm), hidden, layer.attention_norm));
  OSCAR_RETURN_IF_ERROR(Vector(name(names.feed_forward_norm), hidden, layer.feed_forward_norm));
  OSCAR_RETURN_IF_ERROR(Vector(name(names.q_norm), spec_.head_dim, layer.q_norm));
  OSCAR_RETURN_IF_ERROR(Vector(name(names.k_norm), spec_.head_dim, layer.k_norm));
  OSCAR_RETURN_IF_ERROR(Matrix(name(names.q), q, hidden, layer.qkv));
  OSCAR_RETURN_IF_ERROR(Matrix(name(names.k), kv, hidden, layer.qkv + int64_t{q} * hidden));
  OSCAR_RETURN_IF_ERROR(ValueAndOutput(index, layer));
  if (layer.qkv_bias != nullptr) {
    OSCAR_RETURN_IF_ERROR(Vector(name(names.q_bias), q, layer.qkv_bias));
    OSCAR_RETURN_IF_ERROR(Vector(name(names.k_bias), kv, layer.qkv_bias + q));
  }
  OSCAR_RETURN_IF_ERROR(Vector(name(names.o_bias), hidden, layer.o_bias));
  OSCAR_RETURN_IF_ERROR(Matrix(name(names.gate), spec_.intermediate, hidden, layer.gate_up));
  OSCAR_RETURN_IF_ERROR(Matrix(name(names.up), spec_.intermediate, hidden,
                               layer.gate_up + int64_t{spec_.intermediate} * hidden));
  OSCAR_RETURN_IF_ERROR(Matrix(name(names.down), hidden, spec_.intermediate, layer.down));
  return Rotation(plan_.k(index), layer);
}

}  // namespace

DeviceWeights CarveWeights(const ModelSpec& spec, const KvPlan& plan, int64_t positions,
                           DeviceCarver& carver) {
  DeviceWeights weights;
  const TensorNames& names = spec.names;
  const auto hidden = static_cast<size_t>(spec.hidden), dim = static_cast<size_t>(spec.head_dim);
  const auto q = static_cast<size_t>(QWidth(spec)), kv = static_cast<size_t>(KvWidth(spec));
  const auto middle = static_cast<size_t>(spec.intermediate);
  const size_t table = static_cast<size_t>(spec.vocab_size) * hidden;
  const auto matrix = [&](size_t size) {
    weights.matrix_bytes += size * sizeof(Bf16);
    return carver.Take<Bf16>(size);
  };
  const auto optional = [&](const std::string& name, size_t size) {
    return name.empty() ? nullptr : carver.Take<float>(size);
  };
  weights.embedding = matrix(table);
  weights.head = names.head.empty() ? weights.embedding : matrix(table);
  weights.final_norm = carver.Take<float>(hidden);
  weights.cos_sin = carver.Take<float>(static_cast<size_t>(positions) * dim);
  for (int i = 0; i < spec.num_layers; ++i) {
    DeviceLayer& layer = weights.layers.emplace_back();
    layer.qkv = matrix((q + 2 * kv) * hidden);
    layer.o = matrix(hidden * q);
    layer.gate_up = matrix(2 * middle * hidden);
    layer.down = matrix(hidden * middle);
    layer.attention_norm = carver.Take<float>(hidden);
    layer.feed_forward_norm = carver.Take<float>(hidden);
    layer.q_norm = optional(names.q_norm, dim);
    layer.k_norm = optional(names.k_norm, dim);
    layer.qkv_bias = optional(names.q_bias, q + 2 * kv);
    layer.o_bias = optional(names.o_bias, hidden);
    const SideTransform& k = plan.k(i);
    layer.rotation = k.kind == RotationKind::kNone       ? cuda::Rotation::kNone
                     : k.kind == RotationKind::kHadamard ? cuda::Rotation::kHadamard
                                                         : cuda::Rotation::kMatrix;
    if (const int count = NumMatrices(k); count > 0) {
      layer.rotation_fragments = carver.Take<uint32_t>(static_cast<size_t>(count) * dim * dim);
      layer.rotations = count;
    }
  }
  weights.bytes_per_step = weights.matrix_bytes - (names.head.empty() ? 0 : table * sizeof(Bf16));
  return weights;
}

Status LoadWeights(const ModelSpec& spec, const KvPlan& plan, const WeightSource& source,
                   int64_t positions, cuda::Stream stream, DeviceWeights& weights) {
  Progress progress("loading weights", static_cast<uint64_t>(spec.num_layers) + 1, "layers");
  Loader loader(spec, plan, source, stream);
  OSCAR_RETURN_IF_ERROR(
      loader.Matrix(spec.names.embedding, spec.vocab_size, spec.hidden, weights.embedding));
  if (weights.head != weights.embedding) {
    OSCAR_RETURN_IF_ERROR(
        loader.Matrix(spec.names.head, spec.vocab_size, spec.hidden, weights.head));
  }
  OSCAR_RETURN_IF_ERROR(loader.Vector(spec.names.final_norm, spec.hidden, weights.final_norm));
  const RopeTable rope(spec.rope_theta, spec.rope_scaling, spec.head_dim);
  const auto half = static_cast<size_t>(rope.half());
  // In pieces: the whole table of a long context is large.
  constexpr int64_t kPiece = 4096;
  std::vector<float> cos(half), sin(half), angles;
  for (int64_t first = 0; first < positions; first += kPiece) {
    const int64_t count = std::min(kPiece, positions - first);
    angles.clear();
    for (int64_t p = first; p < first + count; ++p) {
      rope.Fill(p, cos, sin);
      for (size_t i = 0; i < half; ++i) angles.insert(angles.end(), {cos[i], sin[i]});
    }
    OSCAR_RETURN_IF_ERROR(
        Upload<float>(weights.cos_sin + static_cast<size_t>(first) * 2 * half, angles));
  }
  progress.Add(1);
  for (int i = 0; i < spec.num_layers; ++i) {
    OSCAR_RETURN_IF_ERROR(loader.Layer(i, weights.layers[static_cast<size_t>(i)]));
    progress.Add(1);
  }
  return CudaStatus(cudaStreamSynchronize(stream), "loading weights");
}

}  // namespace oscar::gpu
