#include "cuda/device_weights.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "arch/rope.h"
#include "base/fp8.h"
#include "base/mxfp4.h"
#include "base/progress.h"
#include "cuda/device/cuda_status.h"
#include "cuda/experts/grouped_gemm.h"
#include "cuda/gemm/fp8_kernels.h"
#include "cuda/step_kernels.h"

namespace oscar::cuda {
namespace {

// The K rotation as matrices, where the write kernel has no form of its own for it.
int NumMatrices(const SideTransform& transform) {
  if (transform.kind == RotationKind::kCalibrated) return transform.num_matrices;
  return transform.kind == RotationKind::kBlockHadamard ? 1 : 0;
}

// The matrices that undo V's rotation before gates: none where a kernel has a form of its own.
int NumValueTurns(const SideTransform& transform, bool portable) {
  if (transform.kind == RotationKind::kCalibrated) return transform.num_matrices;
  return transform.kind == RotationKind::kBlockHadamard && !portable ? 1 : 0;
}

template <typename T>
Status Upload(T* to, std::span<const T> from) {
  return CudaStatus(cudaMemcpy(to, from.data(), from.size_bytes(), cudaMemcpyHostToDevice),
                    "copying weights to the device");
}

// Rows [first, first + outputs) of a matrix that several tensors lie in.
DeviceMatrix Part(const DeviceMatrix& matrix, int64_t first, int outputs) {
  DeviceMatrix part = matrix;
  part.outputs = outputs;
  if (part.weights != nullptr) part.weights += first * matrix.inputs;
  if (part.codes != nullptr) part.codes += first * (matrix.inputs / 4);
  if (part.mxfp4 != nullptr) part.mxfp4 += first * Mxfp4RowBytes(matrix.inputs);
  if (part.scales != nullptr) {
    part.scales += first / matrix.scale_rows * matrix.scale_columns;
  }
  return part;
}

constexpr float kLog2E = 1.4426950408889634f;

constexpr Role kExpertGateUp[] = {Role::kExpertGate, Role::kExpertUp},
               kExpertAlternating[] = {Role::kExpertGateUp}, kExpertDown[] = {Role::kExpertDown};
std::span<const Role> GateUpOf(const ExpertsSpec& experts) {
  return experts.alternates_gate_up ? std::span<const Role>(kExpertAlternating) : kExpertGateUp;
}

// Rows of `width` that are a gate, its up, the next gate and so on: all gates, then all ups.
template <typename T>
void GatesThenUps(std::vector<T>& rows, int64_t width) {
  const std::vector<T> from = rows;
  const auto half = static_cast<int64_t>(rows.size()) / width / 2;
  for (int64_t row = 0; row < 2 * half; ++row) {
    std::copy_n(from.begin() + row * width, width,
                rows.begin() + (row % 2 * half + row / 2) * width);
  }
}

// PackMxfp4 of two codes, by their place in the word.
constexpr auto kPackedPairs = [] {
  std::array<std::array<uint32_t, 256>, 4> table{};
  for (size_t p = 0; p < 4; ++p) {
    for (uint32_t codes = 0; codes < 256; ++codes) {
      table[p][codes] = PackMxfp4(codes << (8 * p));
    }
  }
  return table;
}();

// The dense or shared part of a layer's feed-forward: its matrices, or none.
std::span<const std::pair<LayerMatrix, DeviceMatrix DeviceLayer::*>> DensePartOf(
    const LayerSpec& layer) {
  static constexpr std::pair<LayerMatrix, DeviceMatrix DeviceLayer::*> kDense[] = {
      {LayerMatrix::kGateUp, &DeviceLayer::gate_up}, {LayerMatrix::kDown, &DeviceLayer::down}};
  static constexpr std::pair<LayerMatrix, DeviceMatrix DeviceLayer::*> kShared[] = {
      {LayerMatrix::kSharedGateUp, &DeviceLayer::gate_up},
      {LayerMatrix::kSharedDown, &DeviceLayer::down}};
  if (layer.dense() != nullptr) return kDense;
  if (layer.experts()->shared_intermediate > 0) return kShared;
  return {};
}

// Rows of `width` elements, each followed by zeros up to `padded`.
template <typename T>
void PadRows(std::vector<T>& values, int64_t width, int64_t padded) {
  if (width == padded) return;
  const auto rows = static_cast<int64_t>(values.size()) / width;
  std::vector<T> out(static_cast<size_t>(rows * padded), T{});
  for (int64_t row = 0; row < rows; ++row) {
    std::copy_n(values.begin() + row * width, width, out.begin() + row * padded);
  }
  values = std::move(out);
}

class Loader {
 public:
  Loader(const ModelSpec& spec, const KvPlan& plan, const WeightSource& source, bool portable,
         Bf16* scratch, Stream stream)
      : spec_(spec),
        table_(spec),
        plan_(plan),
        source_(source),
        portable_(portable),
        scratch_(scratch),
        stream_(stream) {}

  // Where `to` has more inputs, the rest are zeros.
  Status Matrix(Role role, int layer, const DeviceMatrix& to, int expert = -1) {
    const TensorDecl& tensor = table_.Get(role, layer, expert);
    const std::string& name = tensor.name;
    const int64_t count = static_cast<int64_t>(tensor.num_elements());
    const bool padded = tensor.shape[1] != to.inputs;
    if (to.is_mxfp4()) return Mxfp4Matrix(tensor, to);
    if (const auto random = source_.RandomStream(name); random.has_value() && !padded) {
      OSCAR_RETURN_IF_ERROR(LaunchRandomWeights(
          random->first, random->second, to.is_fp8() ? scratch_ : to.weights, count, stream_));
      if (!to.is_fp8()) return {};
      return LaunchQuantize(scratch_, to.codes, to.scales, to.outputs, to.inputs, stream_);
    }
    if (to.is_fp8()) return Fp8Matrix(tensor, to);
    staged_.resize(static_cast<size_t>(count));
    OSCAR_RETURN_IF_ERROR(source_.LoadBf16(name, tensor.shape, staged_));
    if (role == Role::kExpertGateUp) GatesThenUps(staged_, tensor.shape[1]);
    PadRows(staged_, tensor.shape[1], to.inputs);
    return Upload<Bf16>(to.weights, staged_);
  }
  // Nothing where the model has no such tensor.
  Status Vector(Role role, int layer, float* to, float factor = 1.0f) {
    const TensorDecl* tensor = table_.Find(role, layer);
    if (tensor == nullptr) return {};
    floats_.resize(tensor->num_elements());
    OSCAR_RETURN_IF_ERROR(source_.Load(tensor->name, tensor->shape, floats_));
    for (float& x : floats_) x = (x + tensor->offset) * factor;
    return Upload<float>(to, floats_);
  }
  Status Layer(int index, DeviceLayer& layer);

 private:
  // Codes of an FP8 tensor as kernels take them to `codes_`, and a scale for every `to.scale_rows`
  // of its rows and block.
  Status ReadFp8(const TensorDecl& tensor, const DeviceMatrix& to, std::vector<float>& scales);
  Status Fp8Matrix(const TensorDecl& tensor, const DeviceMatrix& to);
  // Heads' queries and gates, which alternate in the tensor.
  Status GatedQueries(int index, const AttentionSpec& attention, const DeviceMatrix& q,
                      const DeviceMatrix& gates);
  Status State(int index, const LinearAttentionSpec& linear, const DeviceStateLayer& state);
  Status ValueTurn(const SideTransform& transform, const DeviceLayer& layer, bool portable);
  Status SharedShare(int index, const float* norm, bool portable, float* to);
  Status ReadNorm(const float* norm, std::vector<float>& to) const {
    to.resize(static_cast<size_t>(spec_.hidden));
    return CudaStatus(
        cudaMemcpy(to.data(), norm, to.size() * sizeof(float), cudaMemcpyDeviceToHost),
        "reading a norm");
  }
  Status Mxfp4Matrix(const TensorDecl& tensor, const DeviceMatrix& to);
  // Biases of an expert's outputs; `gates_then_ups`: in that order.
  Status ExpertBias(Role role, int layer, int expert, bool gates_then_ups, float* to);
  Status Experts(int index, const float* norm, const DeviceExperts& experts);
  Status PortableExpert(std::span<const Role> parts, int layer, int expert,
                        const PortableMatrix& to);
  Status ValueAndOutput(int index, DeviceLayer& layer);
  Status UploadRounded(std::span<const float> values, Bf16* to) {
    staged_.resize(values.size());
    std::ranges::transform(values, staged_.begin(), ToBf16);
    return Upload<Bf16>(to, staged_);
  }
  Status Rotation(const SideTransform& transform, DeviceLayer& layer);

  const ModelSpec& spec_;
  const TensorTable table_;
  const KvPlan& plan_;
  const WeightSource& source_;
  const bool portable_;
  Bf16* scratch_;
  Stream stream_;
  std::vector<Bf16> staged_;
  std::vector<uint8_t> codes_;
  std::vector<float> floats_;
};

Status Loader::ReadFp8(const TensorDecl& tensor, const DeviceMatrix& to,
                       std::vector<float>& scales) {
  const std::string& name = tensor.name;
  const int64_t outputs = tensor.shape[0], inputs = tensor.shape[1];
  OSCAR_ASSIGN_OR_RETURN(const std::optional<Fp8Tiles> blocks,
                         source_.Fp8Of(name, outputs, inputs));
  const auto columns = static_cast<size_t>(blocks->NumColumns(inputs));
  codes_.resize(tensor.num_elements());
  floats_.resize(static_cast<size_t>(blocks->NumRows(outputs)) * columns);
  OSCAR_RETURN_IF_ERROR(source_.LoadFp8(name, outputs, inputs, codes_, floats_));
  if (tensor.role == Role::kExpertGateUp) {
    GatesThenUps(codes_, inputs);
    GatesThenUps(floats_, static_cast<int64_t>(columns));  // one scale per row: TakeAll
  }
  PadRows(codes_, inputs, to.inputs);
  for (size_t i = 0; i < codes_.size(); i += 4) {
    uint32_t word = 0;
    std::memcpy(&word, &codes_[i], sizeof(word));
    word = PackFp8(word);
    std::memcpy(&codes_[i], &word, sizeof(word));
  }
  // Every `scale_rows` outputs have their own on the device; one of a whole row, where others are
  // of blocks, is the same in each.
  scales.clear();
  for (int64_t row = 0; row < outputs; row += to.scale_rows) {
    const size_t from = static_cast<size_t>(row / blocks->rows) * columns;
    for (int column = 0; column < to.scale_columns; ++column) {
      scales.push_back(floats_[from + (columns == 1 ? 0 : static_cast<size_t>(column))]);
    }
  }
  return {};
}

Status Loader::Fp8Matrix(const TensorDecl& tensor, const DeviceMatrix& to) {
  std::vector<float> scales;
  OSCAR_RETURN_IF_ERROR(ReadFp8(tensor, to, scales));
  OSCAR_RETURN_IF_ERROR(
      CudaStatus(cudaMemcpy(to.codes, codes_.data(), codes_.size(), cudaMemcpyHostToDevice),
                 "copying weights to the device"));
  return Upload<float>(to.scales, scales);
}

Status Loader::GatedQueries(int index, const AttentionSpec& attention, const DeviceMatrix& q,
                            const DeviceMatrix& gates) {
  const TensorDecl& tensor = table_.Get(Role::kQ, index);
  const DeviceMatrix* const sides[] = {&q, &gates};
  if (const auto random = source_.RandomStream(tensor.name)) {
    // Which head a random row belongs to means nothing; gates have a stream to themselves.
    for (const DeviceMatrix* to : sides) {
      const uint64_t stream = to == &q ? random->second : ~random->second;
      const auto count = int64_t{to->outputs} * to->inputs;
      OSCAR_RETURN_IF_ERROR(LaunchRandomWeights(
          random->first, stream, to->is_fp8() ? scratch_ : to->weights, count, stream_));
      if (!to->is_fp8()) continue;
      OSCAR_RETURN_IF_ERROR(
          LaunchQuantize(scratch_, to->codes, to->scales, to->outputs, to->inputs, stream_));
    }
    return {};
  }
  std::vector<float> scales;
  if (q.is_fp8()) {
    OSCAR_RETURN_IF_ERROR(ReadFp8(tensor, q, scales));
  } else {
    staged_.resize(tensor.num_elements());
    OSCAR_RETURN_IF_ERROR(source_.LoadBf16(tensor.name, tensor.shape, staged_));
  }
  const int dim = attention.head_dim;
  for (int part = 0; part < 2 * attention.num_heads; ++part) {
    const DeviceMatrix to = Part(*sides[part % 2], int64_t{part / 2} * dim, dim);
    const auto size = static_cast<size_t>(dim) * static_cast<size_t>(q.inputs);
    const size_t at = static_cast<size_t>(part) * size;
    if (!q.is_fp8()) {
      OSCAR_RETURN_IF_ERROR(Upload<Bf16>(to.weights, std::span(staged_).subspan(at, size)));
      continue;
    }
    OSCAR_RETURN_IF_ERROR(
        CudaStatus(cudaMemcpy(to.codes, codes_.data() + at, size, cudaMemcpyHostToDevice),
                   "copying weights to the device"));
    const size_t count = static_cast<size_t>(dim / q.scale_rows * q.scale_columns);
    OSCAR_RETURN_IF_ERROR(Upload<float>(
        to.scales, std::span(scales).subspan(static_cast<size_t>(part) * count, count)));
  }
  return {};
}

Status Loader::State(int index, const LinearAttentionSpec& linear, const DeviceStateLayer& state) {
  const LayerMatrix in =
      linear.grouped_inputs ? LayerMatrix::kStateInGrouped : LayerMatrix::kStateIn;
  const std::span<const Role> parts = PartsOf(in);
  int64_t first = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const bool apart = state.gates.outputs > 0 && i >= parts.size() / 2;
    if (apart && i == parts.size() / 2) first = 0;
    const auto outputs = static_cast<int>(table_.Get(parts[i], index).shape[0]);
    OSCAR_RETURN_IF_ERROR(
        Matrix(parts[i], index, Part(apart ? state.gates : state.in, first, outputs)));
    first += outputs;
  }
  OSCAR_RETURN_IF_ERROR(Matrix(Role::kStateOut, index, state.out));
  OSCAR_RETURN_IF_ERROR(Vector(Role::kStateStepBias, index, state.step_bias));
  OSCAR_RETURN_IF_ERROR(Vector(Role::kStateNorm, index, state.norm));
  const TensorDecl& decay = table_.Get(Role::kStateDecay, index);
  std::vector<float> rates(decay.num_elements());
  OSCAR_RETURN_IF_ERROR(source_.Load(decay.name, decay.shape, rates));
  for (float& x : rates) x = std::exp(x);
  OSCAR_RETURN_IF_ERROR(Upload<float>(state.decay_rate, rates));
  const TensorDecl& conv = table_.Get(Role::kStateConv, index);
  std::vector<float> by_channel(conv.num_elements()), by_tap(conv.num_elements());
  OSCAR_RETURN_IF_ERROR(source_.Load(conv.name, conv.shape, by_channel));
  const auto taps = static_cast<size_t>(linear.conv_kernel);
  const size_t channels = by_channel.size() / taps;
  for (size_t i = 0; i < by_channel.size(); ++i) {
    by_tap[i % taps * channels + i / taps] = by_channel[i];
  }
  return Upload<float>(state.conv, by_tap);
}

Status Loader::ValueTurn(const SideTransform& transform, const DeviceLayer& layer, bool portable) {
  if (layer.value_turn == nullptr) return {};
  if (portable) return Upload<float>(layer.value_turn, transform.matrices);
  const auto dim = static_cast<size_t>(spec_.attention().head_dim);
  std::vector<float> turns(static_cast<size_t>(layer.value_turns) * dim * dim, 0.0f);
  for (size_t i = 0; i < turns.size() / dim; ++i) {
    // Row i of the matrix is what the unit vector e_i becomes.
    turns[i * dim + i % dim] = 1.0f;
    transform.Undo(static_cast<int>(i / dim), {turns.data() + i * dim, dim});
  }
  return Upload<float>(layer.value_turn, turns);
}

Status Loader::SharedShare(int index, const float* norm, bool portable, float* to) {
  if (to == nullptr) return {};
  const TensorDecl& tensor = table_.Get(Role::kSharedShare, index);
  std::vector<float> weights(tensor.num_elements()), factors;
  OSCAR_RETURN_IF_ERROR(source_.Load(tensor.name, tensor.shape, weights));
  if (!portable) {
    OSCAR_RETURN_IF_ERROR(ReadNorm(norm, factors));
    for (size_t i = 0; i < weights.size(); ++i) weights[i] *= factors[i];
  }
  return Upload<float>(to, weights);
}

Status Loader::Mxfp4Matrix(const TensorDecl& tensor, const DeviceMatrix& to) {
  const int64_t inputs = tensor.shape[1], blocks = inputs / kMxfp4Block;
  const auto rows = static_cast<size_t>(to.outputs);
  codes_.resize(rows * static_cast<size_t>(inputs / 2));
  std::vector<uint8_t> scales(rows * static_cast<size_t>(blocks));
  OSCAR_RETURN_IF_ERROR(source_.LoadMxfp4(tensor.name, to.outputs, inputs, codes_, scales));
  if (tensor.role == Role::kExpertGateUp) {
    GatesThenUps(codes_, inputs / 2);
    GatesThenUps(scales, blocks);
  }
  const auto row_bytes = static_cast<size_t>(Mxfp4RowBytes(to.inputs));
  std::vector<uint8_t> packed(rows * row_bytes, 0);
  const uint8_t* from = codes_.data();
  for (size_t row = 0; row < rows; ++row) {
    uint8_t* const out = packed.data() + row * row_bytes;
    for (int64_t block = 0; block < blocks; ++block) {
      out[Mxfp4ScaleAt(block)] =
          scales[row * static_cast<size_t>(blocks) + static_cast<size_t>(block)];
      uint8_t* at = out + Mxfp4CodesAt(block);
      for (int i = 0; i < 4; ++i, at += 4, from += 4) {
        const uint32_t word = kPackedPairs[0][from[0]] | kPackedPairs[1][from[1]] |
                              kPackedPairs[2][from[2]] | kPackedPairs[3][from[3]];
        std::memcpy(at, &word, sizeof(word));
      }
    }
  }
  return Upload<uint8_t>(to.mxfp4, packed);
}

Status Loader::ExpertBias(Role role, int layer, int expert, bool gates_then_ups, float* to) {
  if (to == nullptr) return {};
  const TensorDecl& tensor = table_.Get(role, layer, expert);
  floats_.resize(tensor.num_elements());
  OSCAR_RETURN_IF_ERROR(source_.Load(tensor.name, tensor.shape, floats_));
  if (gates_then_ups) GatesThenUps(floats_, 1);
  return Upload<float>(to + floats_.size() * static_cast<size_t>(expert), floats_);
}

Status Loader::PortableExpert(std::span<const Role> parts, int layer, int expert,
                              const PortableMatrix& to) {
  int64_t first = 0;  // row
  for (const Role role : parts) {
    const TensorDecl& tensor = table_.Get(role, layer, expert);
    const int64_t outputs = tensor.shape[0], inputs = tensor.shape[1];
    if (to.mxfp4_codes != nullptr) {
      codes_.resize(tensor.num_elements() / 2);
      std::vector<uint8_t> scales(tensor.num_elements() / kMxfp4Block);
      OSCAR_RETURN_IF_ERROR(source_.LoadMxfp4(tensor.name, outputs, inputs, codes_, scales));
      OSCAR_RETURN_IF_ERROR(Upload<uint8_t>(to.mxfp4_codes + first * inputs / 2, codes_));
      OSCAR_RETURN_IF_ERROR(
          Upload<uint8_t>(to.mxfp4_scales + first * inputs / kMxfp4Block, scales));
    } else if (to.codes == nullptr) {
      staged_.resize(tensor.num_elements());
      OSCAR_RETURN_IF_ERROR(source_.LoadBf16(tensor.name, tensor.shape, staged_));
      OSCAR_RETURN_IF_ERROR(Upload<Bf16>(to.weights + first * inputs, staged_));
    } else {
      OSCAR_ASSIGN_OR_RETURN(const std::optional<Fp8Tiles> tiles,
                             source_.Fp8Of(tensor.name, outputs, inputs));
      const int64_t segments = tiles->NumColumns(inputs);
      codes_.resize(tensor.num_elements());
      floats_.resize(static_cast<size_t>(tiles->NumRows(outputs) * segments));
      OSCAR_RETURN_IF_ERROR(source_.LoadFp8(tensor.name, outputs, inputs, codes_, floats_));
      OSCAR_RETURN_IF_ERROR(Upload<uint8_t>(to.codes + first * inputs, codes_));
      std::vector<float> by_row(static_cast<size_t>(outputs * segments));
      for (int64_t row = 0; row < outputs; ++row) {
        std::copy_n(floats_.begin() + row / tiles->rows * segments, segments,
                    by_row.begin() + row * segments);
      }
      OSCAR_RETURN_IF_ERROR(Upload<float>(to.scales + first * segments, by_row));
    }
    first += outputs;
  }
  return {};
}

// `norm`: the weights of the norm before, on the device.
Status Loader::Experts(int index, const float* norm, const DeviceExperts& experts) {
  const TensorDecl& router = table_.Get(Role::kRouter, index);
  std::vector<float> weights(router.num_elements());
  OSCAR_RETURN_IF_ERROR(source_.Load(router.name, router.shape, weights));
  const auto hidden = static_cast<size_t>(spec_.hidden);
  if (!portable_) {
    std::vector<float> factors;
    OSCAR_RETURN_IF_ERROR(ReadNorm(norm, factors));
    for (size_t i = 0; i < weights.size(); ++i) weights[i] *= factors[i % hidden];
  }
  OSCAR_RETURN_IF_ERROR(Upload<float>(experts.router, weights));
  OSCAR_RETURN_IF_ERROR(Vector(Role::kRouterBias, index, experts.choice_bias));
  OSCAR_RETURN_IF_ERROR(Vector(Role::kRouterLogitBias, index, experts.logit_bias));
  const ExpertsSpec& spec = *spec_.layer(index).experts();
  const int middle = spec.intermediate;
  for (int e = 0; e < spec.num_experts; ++e) {
    const auto at = static_cast<size_t>(e);
    OSCAR_RETURN_IF_ERROR(ExpertBias(Role::kExpertGateUpBias, index, e,
                                     spec.alternates_gate_up && !portable_, experts.gate_up_bias));
    OSCAR_RETURN_IF_ERROR(ExpertBias(Role::kExpertDownBias, index, e, false, experts.down_bias));
    if (portable_) {
      OSCAR_RETURN_IF_ERROR(PortableExpert(GateUpOf(spec), index, e, experts.portable_gate_up[at]));
      OSCAR_RETURN_IF_ERROR(PortableExpert(kExpertDown, index, e, experts.portable_down[at]));
      continue;
    }
    const int64_t first = int64_t{e} * 2 * middle;
    if (spec.alternates_gate_up) {
      OSCAR_RETURN_IF_ERROR(
          Matrix(Role::kExpertGateUp, index, Part(experts.gate_up, first, 2 * middle), e));
    } else {
      OSCAR_RETURN_IF_ERROR(
          Matrix(Role::kExpertGate, index, Part(experts.gate_up, first, middle), e));
      OSCAR_RETURN_IF_ERROR(
          Matrix(Role::kExpertUp, index, Part(experts.gate_up, first + middle, middle), e));
    }
    OSCAR_RETURN_IF_ERROR(Matrix(Role::kExpertDown, index,
                                 Part(experts.down, int64_t{e} * spec_.hidden, spec_.hidden), e));
  }
  if (!portable_) return {};
  OSCAR_RETURN_IF_ERROR(Upload<PortableMatrix>(experts.gate_up_table, experts.portable_gate_up));
  return Upload<PortableMatrix>(experts.down_table, experts.portable_down);
}

Status Loader::Rotation(const SideTransform& transform, DeviceLayer& layer) {
  const int head_dim = spec_.attention().head_dim;
  std::vector<uint32_t> words;
  const auto dim = static_cast<size_t>(head_dim);
  for (int head = 0; head < NumMatrices(transform); ++head) {
    // Row i of the matrix is what the unit vector e_i becomes.
    std::vector<float> matrix(dim * dim, 0.0f);
    for (size_t i = 0; i < dim; ++i) {
      matrix[i * dim + i] = 1.0f;
      transform.Apply(head, {matrix.data() + i * dim, dim});
    }
    const auto packed = PackRotation(matrix, head_dim);
    words.insert(words.end(), packed.begin(), packed.end());
  }
  if (layer.rotation_matrices != nullptr) {
    OSCAR_RETURN_IF_ERROR(Upload<float>(layer.rotation_matrices, transform.matrices));
  }
  return words.empty() ? Status() : Upload<uint32_t>(layer.rotation_fragments, words);
}

Status Loader::ValueAndOutput(int index, DeviceLayer& layer) {
  const LayerSpec& spec = spec_.layer(index);
  const AttentionSpec& attention = *spec.attention();
  const int q = attention.q_width(), kv = attention.kv_width();
  const TensorDecl &v = table_.Get(Role::kV, index), &o = table_.Get(Role::kO, index);
  const DeviceMatrix v_rows = layer.v.outputs > 0 ? layer.v : Part(layer.qkv, q + kv, kv);
  std::vector<float> v_bias;
  if (const TensorDecl* bias = table_.Find(Role::kVBias, index)) {
    v_bias.resize(bias->num_elements());
    OSCAR_RETURN_IF_ERROR(source_.Load(bias->name, bias->shape, v_bias));
  }
  const SideTransform& rotation = plan_.v(spec.kv_slot);
  if (rotation.kind == RotationKind::kNone || source_.RandomStream(v.name)) {
    OSCAR_RETURN_IF_ERROR(Matrix(Role::kV, index, v_rows));
    OSCAR_RETURN_IF_ERROR(Matrix(Role::kO, index, layer.o));
  } else if (attention.has_output_gate) {
    // Values are turned back before the gate.
    std::vector<float> w_v(v.num_elements());
    OSCAR_RETURN_IF_ERROR(source_.Load(v.name, v.shape, w_v));
    AbsorbIntoValues(rotation, /*first_head=*/0, attention.head_dim, spec_.hidden, w_v, v_bias);
    OSCAR_RETURN_IF_ERROR(UploadRounded(w_v, v_rows.weights));
    OSCAR_RETURN_IF_ERROR(Matrix(Role::kO, index, layer.o));
  } else {
    std::vector<float> w_v(v.num_elements()), w_o(o.num_elements());
    OSCAR_RETURN_IF_ERROR(source_.Load(v.name, v.shape, w_v));
    OSCAR_RETURN_IF_ERROR(source_.Load(o.name, o.shape, w_o));
    AbsorbValueRotation(rotation, attention.num_heads, attention.num_kv_heads, attention.head_dim,
                        spec_.hidden, w_v, v_bias, w_o);
    OSCAR_RETURN_IF_ERROR(UploadRounded(w_v, v_rows.weights));
    OSCAR_RETURN_IF_ERROR(UploadRounded(w_o, layer.o.weights));
  }
  if (v_bias.empty()) return {};
  return Upload<float>(layer.qkv_bias + q + kv, v_bias);
}

Status Loader::Layer(int index, DeviceLayer& layer) {
  OSCAR_RETURN_IF_ERROR(Vector(Role::kAttentionNorm, index, layer.attention_norm));
  OSCAR_RETURN_IF_ERROR(Vector(Role::kFeedForwardNorm, index, layer.feed_forward_norm));
  OSCAR_RETURN_IF_ERROR(Vector(Role::kQNorm, index, layer.q_norm));
  OSCAR_RETURN_IF_ERROR(Vector(Role::kKNorm, index, layer.k_norm));
  const LayerSpec& spec = spec_.layer(index);
  if (const AttentionSpec* attention = spec.attention()) {
    const int q = attention->q_width(), kv = attention->kv_width();
    if (attention->has_output_gate) {
      OSCAR_RETURN_IF_ERROR(GatedQueries(
          index, *attention, Part(layer.qkv, 0, q),
          layer.gates.outputs > 0 ? layer.gates : Part(layer.qkv, q + 2 * int64_t{kv}, q)));
    } else {
      OSCAR_RETURN_IF_ERROR(Matrix(Role::kQ, index, Part(layer.qkv, 0, q)));
    }
    OSCAR_RETURN_IF_ERROR(Matrix(Role::kK, index, Part(layer.qkv, q, kv)));
    OSCAR_RETURN_IF_ERROR(ValueAndOutput(index, layer));
    OSCAR_RETURN_IF_ERROR(Vector(Role::kQBias, index, layer.qkv_bias));
    OSCAR_RETURN_IF_ERROR(Vector(Role::kKBias, index, layer.qkv_bias + q));
    OSCAR_RETURN_IF_ERROR(Vector(Role::kOBias, index, layer.o_bias));
    OSCAR_RETURN_IF_ERROR(Vector(Role::kSinks, index, layer.sinks, portable_ ? 1.0f : kLog2E));
  }
  if (const LinearAttentionSpec* linear = spec.linear_attention()) {
    OSCAR_RETURN_IF_ERROR(State(index, *linear, layer.state));
  }
  OSCAR_RETURN_IF_ERROR(SharedShare(index, layer.feed_forward_norm, portable_, layer.shared_share));
  for (const auto& [which, matrix] : DensePartOf(spec)) {
    int first = 0;
    for (const Role role : PartsOf(which)) {
      const auto outputs = static_cast<int>(table_.Get(role, index).shape[0]);
      OSCAR_RETURN_IF_ERROR(Matrix(role, index, Part(layer.*matrix, first, outputs)));
      first += outputs;
    }
  }
  if (spec.experts() != nullptr) {
    OSCAR_RETURN_IF_ERROR(Experts(index, layer.feed_forward_norm, layer.experts));
  }
  if (spec.kv_slot < 0) return {};
  OSCAR_RETURN_IF_ERROR(ValueTurn(plan_.v(spec.kv_slot), layer, portable_));
  return Rotation(plan_.k(spec.kv_slot), layer);
}

// Decides how matrices are stored and takes memory for them.
class Layout {
 public:
  Layout(const ModelSpec& spec, const WeightSource& source, bool keep_fp8, DeviceCarver& carver,
         DeviceWeights& weights)
      : table_(spec), source_(source), keep_fp8_(keep_fp8), carver_(carver), weights_(weights) {}

  // Scales of these tensors, one below the other, as kernels take them; null: they must be BF16.
  Result<std::optional<Fp8Tiles>> Common(std::span<const Role> roles, int layer) const {
    const int64_t inputs = table_.Get(roles[0], layer).shape[1];
    if (!keep_fp8_ || !FitsGemmKernels(static_cast<int>(inputs), /*fp8=*/true)) {
      return std::optional<Fp8Tiles>();
    }
    std::vector<const TensorDecl*> tensors;
    for (const Role role : roles) tensors.push_back(&table_.Get(role, layer));
    return CommonOf(tensors, /*repeats=*/false);
  }
  // One matrix of these tensors, as they are stored or in BF16.
  DeviceMatrix Take(std::span<const Role> roles, int layer, const std::optional<Fp8Tiles>& blocks) {
    int64_t outputs = 0;
    for (const Role role : roles) outputs += table_.Get(role, layer).shape[0];
    return Take(static_cast<int>(outputs), static_cast<int>(table_.Get(roles[0], layer).shape[1]),
                blocks);
  }
  DeviceMatrix Take(int outputs, int width, const std::optional<Fp8Tiles>& blocks, int padded = 0) {
    const int inputs = std::max(width, padded);
    DeviceMatrix matrix;
    matrix.outputs = outputs;
    matrix.inputs = inputs;
    const auto size = static_cast<size_t>(outputs) * static_cast<size_t>(inputs);
    if (blocks.has_value()) {
      matrix.scale_rows = static_cast<int>(blocks->rows);
      matrix.scale_columns = static_cast<int>(blocks->NumColumns(width));
      matrix.codes = carver_.Take<uint32_t>(size / 4);
      const size_t scales = static_cast<size_t>(outputs / matrix.scale_rows) *
                            static_cast<size_t>(matrix.scale_columns);
      matrix.scales = carver_.Take<float>(scales);
      if (padded == 0) weights_.largest_fp8 = std::max<uint64_t>(weights_.largest_fp8, size);
      weights_.matrix_bytes += size + scales * sizeof(float);
    } else {
      matrix.weights = carver_.Take<Bf16>(size);
      weights_.matrix_bytes += size * sizeof(Bf16);
    }
    return matrix;
  }
  // fp32; null where the model has none of them.
  float* TakeVector(std::span<const Role> roles, int layer) {
    size_t size = 0;
    for (const Role role : roles) {
      if (const TensorDecl* tensor = table_.Find(role, layer)) size += tensor->num_elements();
    }
    return size == 0 ? nullptr : carver_.Take<float>(size);
  }
  float* TakeVector(Role role, int layer) { return TakeVector({&role, 1}, layer); }
  Status TakeExperts(int layer, const ExpertsSpec& spec, DeviceExperts& experts) {
    const TensorDecl& router = table_.Get(Role::kRouter, layer);
    experts.router = carver_.Take<float>(router.num_elements());
    weights_.matrix_bytes += router.num_elements() * sizeof(float);
    experts.choice_bias = TakeVector(Role::kRouterBias, layer);
    experts.logit_bias = TakeVector(Role::kRouterLogitBias, layer);
    const std::span<const Role> gate_up = GateUpOf(spec);
    const auto take_biases = [&](Role role) {
      const TensorDecl* one = table_.Find(role, layer, 0);
      return one == nullptr
                 ? nullptr
                 : carver_.Take<float>(one->num_elements() * static_cast<size_t>(spec.num_experts));
    };
    experts.gate_up_bias = take_biases(Role::kExpertGateUpBias);
    experts.down_bias = take_biases(Role::kExpertDownBias);
    const uint64_t before = weights_.matrix_bytes;
    if (keep_fp8_) {
      OSCAR_ASSIGN_OR_RETURN(experts.gate_up, TakeAll(gate_up, layer, spec.num_experts));
      OSCAR_ASSIGN_OR_RETURN(experts.down, TakeAll(kExpertDown, layer, spec.num_experts));
    } else {
      OSCAR_RETURN_IF_ERROR(TakePortable(gate_up, layer, spec.num_experts, experts.portable_gate_up,
                                         experts.gate_up_table));
      OSCAR_RETURN_IF_ERROR(TakePortable(kExpertDown, layer, spec.num_experts,
                                         experts.portable_down, experts.down_table));
    }
    experts.bytes_each = (weights_.matrix_bytes - before) / static_cast<uint64_t>(spec.num_experts);
    weights_.unrouted_bytes +=
        experts.bytes_each * static_cast<uint64_t>(spec.num_experts - spec.experts_per_token);
    return {};
  }

 private:
  // `repeats`: a scale of a whole row may stand for each block of others.
  Result<std::optional<Fp8Tiles>> CommonOf(std::span<const TensorDecl* const> tensors,
                                           bool repeats) const {
    std::optional<Fp8Tiles> common;
    for (const TensorDecl* tensor : tensors) {
      const int64_t outputs = tensor->shape[0], inputs = tensor->shape[1];
      OSCAR_ASSIGN_OR_RETURN(std::optional<Fp8Tiles> blocks,
                             source_.Fp8Of(tensor->name, outputs, inputs));
      if (!blocks.has_value()) return std::optional<Fp8Tiles>();
      // Blocks that end inside a tensor, or differ, become rows; kernels know whole rows and 128.
      blocks->columns = std::min<int64_t>(blocks->columns, inputs);
      if (blocks->columns == inputs || outputs % blocks->rows != 0) blocks->rows = 1;
      if (blocks->columns != inputs && blocks->columns != kScaleInputs) {
        return std::optional<Fp8Tiles>();
      }
      if (!common.has_value()) common = blocks;
      if (common->columns != blocks->columns) {
        if (!repeats) return std::optional<Fp8Tiles>();
        common->columns = kScaleInputs;
      }
      if (common->rows != blocks->rows) common->rows = 1;
    }
    return common;
  }
  // Whether all of them are.
  Result<bool> AreMxfp4(std::span<const TensorDecl* const> tensors) const {
    for (const TensorDecl* tensor : tensors) {
      OSCAR_ASSIGN_OR_RETURN(const bool is,
                             source_.IsMxfp4(tensor->name, tensor->shape[0], tensor->shape[1]));
      if (!is) return false;
    }
    return true;
  }
  // A layer's experts as one matrix.
  Result<DeviceMatrix> TakeAll(std::span<const Role> roles, int layer, int num_experts) {
    std::vector<const TensorDecl*> tensors;
    int64_t outputs = 0;
    for (int e = 0; e < num_experts; ++e) {
      for (const Role role : roles) {
        tensors.push_back(&table_.Get(role, layer, e));
        outputs += tensors.back()->shape[0];
        weights_.largest_expert =
            std::max<uint64_t>(weights_.largest_expert, tensors.back()->num_elements());
      }
    }
    const auto inputs = static_cast<int>(tensors[0]->shape[1]);
    OSCAR_ASSIGN_OR_RETURN(const bool mxfp4, AreMxfp4(tensors));
    if (mxfp4) {
      DeviceMatrix matrix;
      matrix.outputs = static_cast<int>(outputs);
      matrix.inputs = PaddedInputs(inputs, /*fp8=*/false);
      const auto bytes =
          static_cast<size_t>(outputs) * static_cast<size_t>(Mxfp4RowBytes(matrix.inputs));
      matrix.mxfp4 = carver_.Take<uint8_t>(bytes);
      weights_.matrix_bytes += bytes;
      return matrix;
    }
    OSCAR_ASSIGN_OR_RETURN(std::optional<Fp8Tiles> tiles, CommonOf(tensors, /*repeats=*/true));
    if (tiles.has_value() && roles[0] == Role::kExpertGateUp) {
      // Rows change places, so each has its scale; kernels with biases know whole rows alone.
      tiles->rows = 1;
      if (tiles->columns != inputs) tiles.reset();
    }
    return Take(static_cast<int>(outputs), inputs, tiles, PaddedInputs(inputs, tiles.has_value()));
  }
  Status TakePortable(std::span<const Role> roles, int layer, int num_experts,
                      std::vector<PortableMatrix>& matrices, PortableMatrix*& table) {
    for (int e = 0; e < num_experts; ++e) {
      std::vector<const TensorDecl*> tensors;
      size_t outputs = 0;
      for (const Role role : roles) {
        tensors.push_back(&table_.Get(role, layer, e));
        outputs += static_cast<size_t>(tensors.back()->shape[0]);
      }
      const auto inputs = static_cast<size_t>(tensors[0]->shape[1]);
      PortableMatrix& matrix = matrices.emplace_back();
      OSCAR_ASSIGN_OR_RETURN(const bool mxfp4, AreMxfp4(tensors));
      if (mxfp4) {
        matrix.mxfp4_codes = carver_.Take<uint8_t>(outputs * inputs / 2);
        matrix.mxfp4_scales = carver_.Take<uint8_t>(outputs * inputs / kMxfp4Block);
        weights_.matrix_bytes += outputs * inputs / kMxfp4Block * (kMxfp4Block / 2 + 1);
        continue;
      }
      OSCAR_ASSIGN_OR_RETURN(const int64_t scale_inputs, ScaleInputsOf(source_, tensors));
      matrix.scale_inputs = static_cast<int>(scale_inputs);
      if (scale_inputs == 0) {
        matrix.weights = carver_.Take<Bf16>(outputs * inputs);
        weights_.matrix_bytes += outputs * inputs * sizeof(Bf16);
        continue;
      }
      const auto each = static_cast<size_t>(scale_inputs);
      const size_t scales = outputs * ((inputs + each - 1) / each);
      // A null base only counts, but which form it is must be known.
      matrix.codes = carver_.Take<uint8_t>(outputs * inputs);
      matrix.scales = carver_.Take<float>(scales);
      weights_.matrix_bytes += outputs * inputs + scales * sizeof(float);
    }
    table = carver_.Take<PortableMatrix>(matrices.size());
    return {};
  }

  const TensorTable table_;
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
  Layout layout(spec, source, /*keep_fp8=*/!portable, carver, weights);
  const auto dim = static_cast<size_t>(spec.attention().head_dim);
  const Role embedding = Role::kEmbedding, head = Role::kHead;
  weights.embedding = layout.Take({&embedding, 1}, -1, std::nullopt);
  weights.head = spec.tied_head ? weights.embedding : layout.Take({&head, 1}, -1, std::nullopt);
  weights.final_norm = layout.TakeVector(Role::kFinalNorm, -1);
  weights.cos_sin = carver.Take<float>(static_cast<size_t>(positions) *
                                       static_cast<size_t>(spec.attention().rotary_dims));
  for (int i = 0; i < spec.num_layers(); ++i) {
    DeviceLayer& layer = weights.layers.emplace_back();
    const int slot = spec.layer(i).kv_slot;
    if (spec.layer(i).attention() != nullptr) {
      // A rotated V is computed in fp32 and rounded once, to BF16.
      const AttentionSpec& attention = *spec.layer(i).attention();
      const SideTransform& v = plan.v(slot);
      const bool rotates = v.kind != RotationKind::kNone, gated = attention.has_output_gate;
      const std::span<const Role> parts = PartsOf(LayerMatrix::kQkv);
      const auto common = [&](std::span<const Role> roles) {
        auto tiles = layout.Common(roles, i);
        // Queries and gates of a head lie apart here.
        const bool cut = gated && tiles.has_value() && tiles->has_value() &&
                         attention.head_dim % (*tiles)->rows != 0;
        if (cut) (*tiles)->rows = 1;
        return tiles;
      };
      OSCAR_ASSIGN_OR_RETURN(const auto qk, common(parts.first(2)));
      if (qk.has_value() && rotates) {
        layer.qkv = layout.Take(attention.q_width() + attention.kv_width(), spec.hidden, qk);
        layer.v = layout.Take(parts.subspan(2), i, std::nullopt);
        if (gated) layer.gates = layout.Take(attention.gate_width(), spec.hidden, qk);
      } else {
        OSCAR_ASSIGN_OR_RETURN(const auto qkv, common(parts));
        layer.qkv = layout.Take(parts, i, rotates ? std::nullopt : qkv);
      }
      OSCAR_ASSIGN_OR_RETURN(const auto o, layout.Common(PartsOf(LayerMatrix::kO), i));
      layer.o = layout.Take(PartsOf(LayerMatrix::kO), i, rotates && !gated ? std::nullopt : o);
      if (const int turns = gated ? NumValueTurns(v, portable) : 0; turns > 0) {
        layer.value_turn = carver.Take<float>(static_cast<size_t>(turns) * dim * dim);
        layer.value_turns = turns;
      }
    }
    if (const LinearAttentionSpec* linear = spec.layer(i).linear_attention()) {
      const std::span<const Role> parts =
          PartsOf(linear->grouped_inputs ? LayerMatrix::kStateInGrouped : LayerMatrix::kStateIn);
      const size_t half = parts.size() / 2;  // b and a, which are never FP8, behind
      OSCAR_ASSIGN_OR_RETURN(const auto in, layout.Common(parts.first(half), i));
      if (in.has_value()) {
        layer.state.in = layout.Take(parts.first(half), i, in);
        layer.state.gates = layout.Take(parts.subspan(half), i, std::nullopt);
      } else {
        layer.state.in = layout.Take(parts, i, std::nullopt);
      }
      OSCAR_ASSIGN_OR_RETURN(const auto out, layout.Common(PartsOf(LayerMatrix::kStateOut), i));
      layer.state.out = layout.Take(PartsOf(LayerMatrix::kStateOut), i, out);
      layer.state.conv = layout.TakeVector(Role::kStateConv, i);
      layer.state.decay_rate = layout.TakeVector(Role::kStateDecay, i);
      layer.state.step_bias = layout.TakeVector(Role::kStateStepBias, i);
      layer.state.norm = layout.TakeVector(Role::kStateNorm, i);
    }
    layer.shared_share = layout.TakeVector(Role::kSharedShare, i);
    for (const auto& [which, to] : DensePartOf(spec.layer(i))) {
      OSCAR_ASSIGN_OR_RETURN(const auto tiles, layout.Common(PartsOf(which), i));
      layer.*to = layout.Take(PartsOf(which), i, tiles);
    }
    if (const ExpertsSpec* experts = spec.layer(i).experts()) {
      OSCAR_RETURN_IF_ERROR(layout.TakeExperts(i, *experts, layer.experts));
    }
    layer.attention_norm = layout.TakeVector(Role::kAttentionNorm, i);
    layer.feed_forward_norm = layout.TakeVector(Role::kFeedForwardNorm, i);
    layer.q_norm = layout.TakeVector(Role::kQNorm, i);
    layer.k_norm = layout.TakeVector(Role::kKNorm, i);
    layer.qkv_bias = layout.TakeVector(BiasesOf(LayerMatrix::kQkv), i);
    layer.o_bias = layout.TakeVector(BiasesOf(LayerMatrix::kO), i);
    layer.sinks = layout.TakeVector(Role::kSinks, i);
    if (slot < 0) continue;
    const SideTransform& k = plan.k(slot);
    layer.rotation = k.kind;
    if (const int count = NumMatrices(k); count > 0) {
      layer.rotation_fragments = carver.Take<uint32_t>(static_cast<size_t>(count) * dim * dim);
      layer.rotations = count;
      if (portable && k.kind == RotationKind::kCalibrated) {
        layer.rotation_matrices = carver.Take<float>(static_cast<size_t>(count) * dim * dim);
      }
    }
  }
  weights.bytes_per_step = weights.matrix_bytes - weights.unrouted_bytes -
                           (spec.tied_head ? 0 : weights.embedding.bytes());
  // One expert at a time is quantised there.
  weights.largest_fp8 = std::max(weights.largest_fp8, weights.largest_expert);
  return weights;
}

Status LoadWeights(const ModelSpec& spec, const KvPlan& plan, const WeightSource& source,
                   int64_t positions, bool portable, Bf16* scratch, Stream stream,
                   DeviceWeights& weights) {
  Progress progress("loading weights", static_cast<uint64_t>(spec.num_layers()) + 1, "layers");
  Loader loader(spec, plan, source, portable, scratch, stream);
  OSCAR_RETURN_IF_ERROR(loader.Matrix(Role::kEmbedding, -1, weights.embedding));
  if (!spec.tied_head) OSCAR_RETURN_IF_ERROR(loader.Matrix(Role::kHead, -1, weights.head));
  OSCAR_RETURN_IF_ERROR(loader.Vector(Role::kFinalNorm, -1, weights.final_norm));
  const RopeTable rope(spec.rope_theta, spec.rope_scaling, spec.attention().rotary_dims);
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
  for (int i = 0; i < spec.num_layers(); ++i) {
    OSCAR_RETURN_IF_ERROR(loader.Layer(i, weights.layers[static_cast<size_t>(i)]));
    progress.Add(1);
  }
  // Not this stream alone: what was copied from pageable memory may be on its way still.
  return CudaStatus(cudaDeviceSynchronize(), "loading weights");
}

}  // namespace oscar::cuda
