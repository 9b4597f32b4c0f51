#include "cuda/device_weights.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>

#include "arch/rope.h"
#include "base/fp8.h"
#include "base/progress.h"
#include "cuda/device/cuda_status.h"
#include "cuda/gemm/fp8_kernels.h"
#include "cuda/step_kernels.h"

namespace oscar::cuda {
namespace {

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

// Rows [first, first + outputs) of a matrix that several tensors lie in.
DeviceMatrix Part(const DeviceMatrix& matrix, int first, int outputs) {
  DeviceMatrix part = matrix;
  part.outputs = outputs;
  if (part.weights != nullptr) part.weights += int64_t{first} * matrix.inputs;
  if (part.codes != nullptr) part.codes += int64_t{first} * (matrix.inputs / 4);
  if (part.scales != nullptr) {
    part.scales += int64_t{first / matrix.scale_rows} * matrix.scale_columns;
  }
  return part;
}

class Loader {
 public:
  Loader(const ModelSpec& spec, const KvPlan& plan, const WeightSource& source, Bf16* scratch,
         Stream stream)
      : spec_(spec), plan_(plan), source_(source), scratch_(scratch), stream_(stream) {}

  Status Matrix(const std::string& name, const DeviceMatrix& to) {
    const int64_t count = int64_t{to.outputs} * to.inputs;
    if (const auto random = source_.RandomStream(name)) {
      OSCAR_RETURN_IF_ERROR(LaunchRandomWeights(
          random->first, random->second, to.is_fp8() ? scratch_ : to.weights, count, stream_));
      if (!to.is_fp8()) return {};
      return LaunchQuantize(scratch_, to.codes, to.scales, to.outputs, to.inputs, stream_);
    }
    if (to.is_fp8()) return Fp8Matrix(name, to);
    staged_.resize(static_cast<size_t>(count));
    OSCAR_RETURN_IF_ERROR(
        source_.LoadBf16(name, std::vector<int64_t>{to.outputs, to.inputs}, staged_));
    return Upload<Bf16>(to.weights, staged_);
  }
  Status Vector(const std::string& name, int size, float* to) {
    if (to == nullptr) return {};
    floats_.resize(static_cast<size_t>(size));
    OSCAR_RETURN_IF_ERROR(source_.Load(name, std::vector<int64_t>{size}, floats_));
    return Upload<float>(to, floats_);
  }
  Status Layer(int index, DeviceLayer& layer);

 private:
  Status Fp8Matrix(const std::string& name, const DeviceMatrix& to);
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
  Bf16* scratch_;
  Stream stream_;
  std::vector<Bf16> staged_;
  std::vector<uint8_t> codes_;
  std::vector<float> floats_;
};

Status Loader::Fp8Matrix(const std::string& name, const DeviceMatrix& to) {
  OSCAR_ASSIGN_OR_RETURN(const std::optional<Fp8Tiles> blocks,
                         source_.Fp8Of(name, to.outputs, to.inputs));
  const auto columns = static_cast<size_t>(blocks->NumColumns(to.inputs));
  codes_.resize(static_cast<size_t>(to.outputs) * static_cast<size_t>(to.inputs));
  floats_.resize(static_cast<size_t>(blocks->NumRows(to.outputs)) * columns);
  OSCAR_RETURN_IF_ERROR(source_.LoadFp8(name, to.outputs, to.inputs, codes_, floats_));
  for (size_t i = 0; i < codes_.size(); i += 4) {
    uint32_t word = 0;
    std::memcpy(&word, &codes_[i], sizeof(word));
    word = PackFp8(word);
    std::memcpy(&codes_[i], &word, sizeof(word));
  }
  OSCAR_RETURN_IF_ERROR(
      CudaStatus(cudaMemcpy(to.codes, codes_.data(), codes_.size(), cudaMemcpyHostToDevice),
                 "copying weights to the device"));
  // Every `scale_rows` outputs have their own on the device.
  std::vector<float> scales;
  for (int64_t row = 0; row < to.outputs; row += to.scale_rows) {
    const auto from = floats_.begin() +
                      static_cast<ptrdiff_t>(row / blocks->rows) * static_cast<ptrdiff_t>(columns);
    scales.insert(scales.end(), from, from + static_cast<ptrdiff_t>(columns));
  }
  return Upload<float>(to.scales, scales);
}

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
    const auto packed = PackRotation(matrix, spec_.head_dim);
    words.insert(words.end(), packed.begin(), packed.end());
  }
  if (layer.rotation_matrices != nullptr) {
    OSCAR_RETURN_IF_ERROR(Upload<float>(layer.rotation_matrices, transform.matrices));
  }
  return words.empty() ? Status() : Upload<uint32_t>(layer.rotation_fragments, words);
}

Status Loader::ValueAndOutput(int index, DeviceLayer& layer) {
  const TensorNames& names = spec_.names;
  const int q = QWidth(spec_), kv = KvWidth(spec_);
  const std::string v_name = fmt::format(fmt::runtime(names.v), index);
  const std::string o_name = fmt::format(fmt::runtime(names.o), index);
  const DeviceMatrix v_rows = layer.v.outputs > 0 ? layer.v : Part(layer.qkv, q + kv, kv);
  std::vector<float> v_bias;
  if (!names.v_bias.empty()) {
    v_bias.resize(static_cast<size_t>(kv));
    OSCAR_RETURN_IF_ERROR(source_.Load(fmt::format(fmt::runtime(names.v_bias), index),
                                       std::vector<int64_t>{kv}, v_bias));
  }
  if (plan_.v(index).kind == RotationKind::kNone || source_.RandomStream(v_name)) {
    OSCAR_RETURN_IF_ERROR(Matrix(v_name, v_rows));
    OSCAR_RETURN_IF_ERROR(Matrix(o_name, layer.o));
  } else {
    std::vector<float> w_v(static_cast<size_t>(kv) * static_cast<size_t>(spec_.hidden));
    std::vector<float> w_o(static_cast<size_t>(q) * static_cast<size_t>(spec_.hidden));
    OSCAR_RETURN_IF_ERROR(source_.Load(v_name, std::vector<int64_t>{kv, spec_.hidden}, w_v));
    OSCAR_RETURN_IF_ERROR(source_.Load(o_name, std::vector<int64_t>{spec_.hidden, q}, w_o));
    AbsorbValueRotation(plan_.v(index), spec_.num_heads, spec_.num_kv_heads, spec_.head_dim,
                        spec_.hidden, w_v, v_bias, w_o);
    OSCAR_RETURN_IF_ERROR(UploadRounded(w_v, v_rows.weights));
    OSCAR_RETURN_IF_ERROR(UploadRounded(w_o, layer.o.weights));
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
  OSCAR_RETURN_IF_ERROR(Matrix(name(names.q), Part(layer.qkv, 0, q)));
  OSCAR_RETURN_IF_ERROR(Matrix(name(names.k), Part(layer.qkv, q, kv)));
  OSCAR_RETURN_IF_ERROR(ValueAndOutput(index, layer));
  if (layer.qkv_bias != nullptr) {
    OSCAR_RETURN_IF_ERROR(Vector(name(names.q_bias), q, layer.qkv_bias));
    OSCAR_RETURN_IF_ERROR(Vector(name(names.k_bias), kv, layer.qkv_bias + q));
  }
  OSCAR_RETURN_IF_ERROR(Vector(name(names.o_bias), hidden, layer.o_bias));
  const int middle = spec_.intermediate;
  OSCAR_RETURN_IF_ERROR(Matrix(name(names.gate), Part(layer.gate_up, 0, middle)));
  OSCAR_RETURN_IF_ERROR(Matrix(name(names.up), Part(layer.gate_up, middle, middle)));
  OSCAR_RETURN_IF_ERROR(Matrix(name(names.down), layer.down));
  return Rotation(plan_.k(index), layer);
}

// Decides how matrices are stored and takes memory for them.
class Layout {
 public:
  Layout(const WeightSource& source, bool keep_fp8, DeviceCarver& carver, DeviceWeights& weights)
      : source_(source), keep_fp8_(keep_fp8), carver_(carver), weights_(weights) {}

  struct Tensor {
    std::string name;
    int outputs;
  };
  // Scales of these tensors, one below the other, as kernels take them; null: they must be BF16.
  Result<std::optional<Fp8Tiles>> Common(const std::vector<Tensor>& tensors, int inputs) const {
    std::optional<Fp8Tiles> common;
    if (!keep_fp8_ || !FitsProductKernels(inputs, /*fp8=*/true)) return common;
    for (const Tensor& tensor : tensors) {
      OSCAR_ASSIGN_OR_RETURN(std::optional<Fp8Tiles> blocks,
                             source_.Fp8Of(tensor.name, tensor.outputs, inputs));
      if (!blocks.has_value()) return std::optional<Fp8Tiles>();
      // Blocks that end inside a tensor, or differ, become rows; kernels know whole rows and 128.
      blocks->columns = std::min<int64_t>(blocks->columns, inputs);
      if (blocks->columns == inputs || tensor.outputs % blocks->rows != 0) blocks->rows = 1;
      if (blocks->columns != inputs && blocks->columns != kScaleInputs) {
        return std::optional<Fp8Tiles>();
      }
      if (!common.has_value()) common = blocks;
      if (common->columns != blocks->columns) return std::optional<Fp8Tiles>();
      if (common->rows != blocks->rows) common->rows = 1;
    }
    return common;
  }
  DeviceMatrix Take(int outputs, int inputs, const std::optional<Fp8Tiles>& blocks) {
    DeviceMatrix matrix;
    matrix.outputs = outputs;
    matrix.inputs = inputs;
    const auto size = static_cast<size_t>(outputs) * static_cast<size_t>(inputs);
    if (blocks.has_value()) {
      matrix.scale_rows = static_cast<int>(blocks->rows);
      matrix.scale_columns = static_cast<int>(blocks->NumColumns(inputs));
      matrix.codes = carver_.Take<uint32_t>(size / 4);
      const size_t scales = static_cast<size_t>(outputs / matrix.scale_rows) *
                            static_cast<size_t>(matrix.scale_columns);
      matrix.scales = carver_.Take<float>(scales);
      weights_.largest_fp8 = std::max<uint64_t>(weights_.largest_fp8, size);
      weights_.matrix_bytes += size + scales * sizeof(float);
    } else {
      matrix.weights = carver_.Take<Bf16>(size);
      weights_.matrix_bytes += size * sizeof(Bf16);
    }
    return matrix;
  }

 private:
  const WeightSource& source_;
  const bool keep_fp8_;
  DeviceCarver& carver_;
  DeviceWeights& weights_;
};

}  // namespace

Result<DeviceWeights> CarveWeights(const ModelSpec& spec, const KvPlan& plan,
                                   const WeightSource& source, int64_t positions, bool portable,
                                   DeviceCarver& carver) {
  DeviceWeights weights;
  Layout layout(source, /*keep_fp8=*/!portable, carver, weights);
  const TensorNames& names = spec.names;
  const int hidden = spec.hidden, middle = spec.intermediate;
  const int q = QWidth(spec), kv = KvWidth(spec);
  const auto dim = static_cast<size_t>(spec.head_dim);
  const auto optional = [&](const std::string& name, int size) {
    return name.empty() ? nullptr : carver.Take<float>(static_cast<size_t>(size));
  };
  weights.embedding = layout.Take(spec.vocab_size, hidden, std::nullopt);
  weights.head =
      names.head.empty() ? weights.embedding : layout.Take(spec.vocab_size, hidden, std::nullopt);
  weights.final_norm = carver.Take<float>(static_cast<size_t>(hidden));
  weights.cos_sin = carver.Take<float>(static_cast<size_t>(positions) * dim);
  for (int i = 0; i < spec.num_layers; ++i) {
    DeviceLayer& layer = weights.layers.emplace_back();
    const auto name = [&](const std::string& pattern) {
      return fmt::format(fmt::runtime(pattern), i);
    };
    // A rotated V is computed in fp32 and rounded once, to BF16.
    const bool rotates = plan.v(i).kind != RotationKind::kNone;
    std::vector<Layout::Tensor> tensors = {{name(names.q), q}, {name(names.k), kv}};
    OSCAR_ASSIGN_OR_RETURN(const auto qk, layout.Common(tensors, hidden));
    if (qk.has_value() && rotates) {
      layer.qkv = layout.Take(q + kv, hidden, qk);
      layer.v = layout.Take(kv, hidden, std::nullopt);
    } else {
      tensors.push_back({name(names.v), kv});
      OSCAR_ASSIGN_OR_RETURN(const auto qkv, layout.Common(tensors, hidden));
      layer.qkv = layout.Take(q + 2 * kv, hidden, rotates ? std::nullopt : qkv);
    }
    OSCAR_ASSIGN_OR_RETURN(const auto o, layout.Common({{name(names.o), hidden}}, q));
    layer.o = layout.Take(hidden, q, rotates ? std::nullopt : o);
    OSCAR_ASSIGN_OR_RETURN(
        const auto gate_up,
        layout.Common({{name(names.gate), middle}, {name(names.up), middle}}, hidden));
    layer.gate_up = layout.Take(2 * middle, hidden, gate_up);
    OSCAR_ASSIGN_OR_RETURN(const auto down, layout.Common({{name(names.down), hidden}}, middle));
    layer.down = layout.Take(hidden, middle, down);
    layer.attention_norm = carver.Take<float>(static_cast<size_t>(hidden));
    layer.feed_forward_norm = carver.Take<float>(static_cast<size_t>(hidden));
    layer.q_norm = optional(names.q_norm, spec.head_dim);
    layer.k_norm = optional(names.k_norm, spec.head_dim);
    layer.qkv_bias = optional(names.q_bias, q + 2 * kv);
    layer.o_bias = optional(names.o_bias, hidden);
    const SideTransform& k = plan.k(i);
    layer.rotation = k.kind == RotationKind::kNone       ? Rotation::kNone
                     : k.kind == RotationKind::kHadamard ? Rotation::kHadamard
                                                         : Rotation::kMatrix;
    if (const int count = NumMatrices(k); count > 0) {
      layer.rotation_fragments = carver.Take<uint32_t>(static_cast<size_t>(count) * dim * dim);
      layer.rotations = count;
      if (portable && k.kind == RotationKind::kCalibrated) {
        layer.rotation_matrices = carver.Take<float>(static_cast<size_t>(count) * dim * dim);
      }
    }
  }
  weights.bytes_per_step =
      weights.matrix_bytes - (names.head.empty() ? 0 : weights.embedding.bytes());
  return weights;
}

Status LoadWeights(const ModelSpec& spec, const KvPlan& plan, const WeightSource& source,
                   int64_t positions, Bf16* scratch, Stream stream, DeviceWeights& weights) {
  Progress progress("loading weights", static_cast<uint64_t>(spec.num_layers) + 1, "layers");
  Loader loader(spec, plan, source, scratch, stream);
  OSCAR_RETURN_IF_ERROR(loader.Matrix(spec.names.embedding, weights.embedding));
  if (!spec.names.head.empty()) {
    OSCAR_RETURN_IF_ERROR(loader.Matrix(spec.names.head, weights.head));
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
  // Not this stream alone: what was copied from pageable memory may be on its way still.
  return CudaStatus(cudaDeviceSynchronize(), "loading weights");
}

}  // namespace oscar::cuda
