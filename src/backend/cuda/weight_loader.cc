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
#include "cuda/device_weights.h"
#include "cuda/experts/grouped_gemm.h"
#include "cuda/gemm/fp8_kernels.h"
#include "cuda/step_kernels.h"
#include "cuda/weight_parts.h"

namespace oscar::cuda {
namespace {

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
      return Random(random->first, random->second, tensor, to);
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
  // As the source would give them, sampled on the device. REQUIRES: inputs that are not padded.
  Status Random(uint64_t seed, uint64_t stream, const TensorDecl& tensor, const DeviceMatrix& to);
  // Heads' queries and gates, which alternate in the tensor.
  Status GatedQueries(int index, const AttentionSpec& attention, const DeviceMatrix& q,
                      const DeviceMatrix& gates);
  Status State(int index, const LinearAttentionSpec& linear, const DeviceStateLayer& state);
  Status ValueTurn(const SideTransform& transform, const DeviceLayer& layer);
  Status SharedShare(int index, const float* norm, float* to);
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

Status Loader::Random(uint64_t seed, uint64_t stream, const TensorDecl& tensor,
                      const DeviceMatrix& to) {
  const auto count = int64_t{to.outputs} * to.inputs;
  OSCAR_RETURN_IF_ERROR(
      LaunchRandomWeights(seed, stream, to.is_fp8() ? scratch_ : to.weights, count, stream_));
  if (!to.is_fp8()) return {};
  OSCAR_ASSIGN_OR_RETURN(const std::optional<Fp8Tiles> tiles,
                         source_.Fp8Of(tensor.name, tensor.shape[0], tensor.shape[1]));
  if (tiles->rows > 1 || to.scale_columns > 1) {
    return LaunchQuantizeBlocks(scratch_, to, static_cast<int>(tiles->rows), stream_);
  }
  return LaunchQuantize(scratch_, to.codes, to.scales, to.outputs, to.inputs, stream_);
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
      OSCAR_RETURN_IF_ERROR(Random(random->first, stream, tensor, *to));
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

Status Loader::ValueTurn(const SideTransform& transform, const DeviceLayer& layer) {
  if (layer.value_turn == nullptr) return {};
  if (portable_) return Upload<float>(layer.value_turn, transform.matrices);
  const auto dim = static_cast<size_t>(spec_.attention().head_dim);
  std::vector<float> turns(static_cast<size_t>(layer.value_turns) * dim * dim, 0.0f);
  for (size_t i = 0; i < turns.size() / dim; ++i) {
    // Row i of the matrix is what the unit vector e_i becomes.
    turns[i * dim + i % dim] = 1.0f;
    transform.Undo(static_cast<int>(i / dim), {turns.data() + i * dim, dim});
  }
  return Upload<float>(layer.value_turn, turns);
}

Status Loader::SharedShare(int index, const float* norm, float* to) {
  if (to == nullptr) return {};
  const TensorDecl& tensor = table_.Get(Role::kSharedShare, index);
  std::vector<float> weights(tensor.num_elements()), factors;
  OSCAR_RETURN_IF_ERROR(source_.Load(tensor.name, tensor.shape, weights));
  if (!portable_) {
    OSCAR_RETURN_IF_ERROR(ReadNorm(norm, factors));
    for (size_t i = 0; i < weights.size(); ++i) weights[i] *= factors[i];
  }
  return Upload<float>(to, weights);
}

Status Loader::Mxfp4Matrix(const TensorDecl& tensor, const DeviceMatrix& to) {
  const int64_t inputs = tensor.shape[1], blocks = inputs / kMxfp4Block;
  if (const auto random = source_.RandomMxfp4Stream(tensor.name)) {
    return LaunchRandomMxfp4(random->first, random->second, kRandomMxfp4Scale, to.mxfp4, to.outputs,
                             static_cast<int>(inputs), Mxfp4RowBytes(to.inputs),
                             tensor.role == Role::kExpertGateUp, stream_);
  }
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
  OSCAR_RETURN_IF_ERROR(SharedShare(index, layer.feed_forward_norm, layer.shared_share));
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
  OSCAR_RETURN_IF_ERROR(ValueTurn(plan_.v(spec.kv_slot), layer));
  return Rotation(plan_.k(spec.kv_slot), layer);
}

}  // namespace

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
