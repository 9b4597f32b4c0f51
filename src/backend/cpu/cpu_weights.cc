#include "cpu/cpu_weights.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>
#include <type_traits>

#include "base/mxfp4.h"
#include "base/progress.h"
#include "simd/aligned_buffer.h"

namespace oscar {
namespace {

using simd::PackedMatrix;

class Loader {
 public:
  Loader(const ModelSpec& spec, const WeightSource& source, const KvPlan& plan, simd::GemmPath path,
         size_t staging_bytes, ThreadPool& threads)
      : spec_(spec),
        table_(spec),
        source_(source),
        plan_(plan),
        path_(path),
        staging_bytes_(staging_bytes),
        threads_(threads) {}

  Result<CpuWeights> Load();

 private:
  Status LoadLayer(int index, CpuWeights::Layer* layer);
  Status LoadExperts(int index, CpuWeights::Experts* experts);
  // Parts of one expert, one below the other: FP8 where all of them are, with scales that the
  // kernels take; MXFP4 where the one part is.
  Status LoadExpert(std::span<const Role> parts, int layer, int expert, PackedMatrix* matrix);
  Status Vector(Role role, int layer, std::vector<float>* out) const {
    out->clear();
    return Append(role, layer, -1, out);
  }
  Status Append(Role role, int layer, int expert, std::vector<float>* out) const {
    const TensorDecl* tensor = table_.Find(role, layer, expert);
    if (tensor == nullptr) return {};
    const size_t at = out->size();
    out->resize(at + tensor->num_elements());
    const std::span<float> values = std::span(*out).subspan(at);
    OSCAR_RETURN_IF_ERROR(source_.Load(tensor->name, tensor->shape, values));
    for (float& x : values) x += tensor->offset;
    return {};
  }
  Status LoadState(int index, CpuWeights::Layer* layer);
  // Heads' queries and gates, which alternate in the tensor: queries to the matrix's first rows,
  // gates to its last.
  Status PackGatedQueries(int layer, const AttentionSpec& attention, PackedMatrix* matrix);
  // Rows of `tensor` to rows of `matrix` from `first_row` on, read in multiples of `at_a_time`.
  // `change` sees the values of the rows from its first argument on before they are packed.
  template <typename T, typename Change>
  Status Pack(const TensorDecl& tensor, int first_row, int at_a_time, PackedMatrix* matrix,
              const Change& change);
  Status Pack(const TensorDecl& tensor, int first_row, PackedMatrix* matrix) {
    return Pack<Bf16>(tensor, first_row, PackedMatrix::kPanel, matrix, [](int, std::span<Bf16>) {});
  }

  const ModelSpec& spec_;
  const TensorTable table_;
  const WeightSource& source_;
  const KvPlan& plan_;
  const simd::GemmPath path_;
  const size_t staging_bytes_;
  ThreadPool& threads_;
  simd::AlignedBuffer<std::byte> staging_;  // rows on their way to their packed form
};

template <typename T, typename Change>
Status Loader::Pack(const TensorDecl& tensor, int first_row, int at_a_time, PackedMatrix* matrix,
                    const Change& change) {
  const auto outputs = static_cast<int>(tensor.shape[0]);
  const auto width = static_cast<size_t>(tensor.shape[1]);
  const size_t unit = static_cast<size_t>(at_a_time) * width;
  const auto for_threads =
      static_cast<size_t>(threads_.num_threads() * PackedMatrix::kPanel / at_a_time);
  const size_t units = std::max({staging_bytes_ / (unit * sizeof(T)), for_threads, size_t{1}});
  const int rows_at_once = static_cast<int>(
      std::min(units, static_cast<size_t>((outputs + at_a_time - 1) / at_a_time)) * at_a_time);
  staging_.Grow(static_cast<size_t>(std::min(rows_at_once, outputs)) * width * sizeof(T));
  for (int row = 0; row < outputs; row += rows_at_once) {
    const int count = std::min(rows_at_once, outputs - row);
    const std::span<T> values(reinterpret_cast<T*>(staging_.data()),
                              static_cast<size_t>(count) * width);
    if constexpr (std::is_same_v<T, Bf16>) {
      OSCAR_RETURN_IF_ERROR(source_.LoadBf16Rows(tensor.name, tensor.shape, {row, count}, values));
    } else {
      OSCAR_RETURN_IF_ERROR(source_.LoadRows(tensor.name, tensor.shape, {row, count}, values));
    }
    change(row, values);
    matrix->PackRows(threads_, first_row + row, count, std::span<const T>(values));
  }
  return {};
}

Status Loader::LoadExpert(std::span<const Role> parts, int layer, int expert,
                          PackedMatrix* matrix) {
  const simd::GemmPath path = simd::GroupedGemmPath(path_);
  const auto inputs = static_cast<int>(table_.Get(parts[0], layer, expert).shape[1]);
  if (parts.size() == 1) {
    const TensorDecl& tensor = table_.Get(parts[0], layer, expert);
    OSCAR_ASSIGN_OR_RETURN(const bool is_mxfp4,
                           source_.IsMxfp4(tensor.name, tensor.shape[0], inputs));
    if (is_mxfp4) {
      const auto rows = static_cast<int>(tensor.shape[0]);
      std::vector<uint8_t> codes(tensor.num_elements() / 2),
          scales(tensor.num_elements() / kMxfp4Block);
      OSCAR_RETURN_IF_ERROR(source_.LoadMxfp4(tensor.name, rows, inputs, codes, scales));
      *matrix = PackedMatrix::Mxfp4(rows, inputs, path);
      matrix->PackMxfp4Rows(threads_, 0, rows, codes, scales);
      return {};
    }
  }
  int outputs = 0;
  std::vector<const TensorDecl*> tensors;
  for (const Role role : parts) {
    tensors.push_back(&table_.Get(role, layer, expert));
    outputs += static_cast<int>(tensors.back()->shape[0]);
  }
  OSCAR_ASSIGN_OR_RETURN(const int64_t scale_inputs, ScaleInputsOf(source_, tensors));
  if (scale_inputs == 0) {
    *matrix = PackedMatrix(outputs, inputs, path);
    int first = 0;
    for (const TensorDecl* tensor : tensors) {
      OSCAR_RETURN_IF_ERROR(Pack(*tensor, first, matrix));
      first += static_cast<int>(tensor->shape[0]);
    }
    return {};
  }
  *matrix = PackedMatrix::Fp8(outputs, inputs, static_cast<int>(scale_inputs), path);
  int first = 0;
  std::vector<uint8_t> codes;
  std::vector<float> scales, by_row;
  for (const TensorDecl* each : tensors) {
    const TensorDecl& tensor = *each;
    OSCAR_ASSIGN_OR_RETURN(const std::optional<Fp8Tiles> tiles,
                           source_.Fp8Of(tensor.name, tensor.shape[0], inputs));
    const int64_t rows = tensor.shape[0], segments = tiles->NumColumns(inputs);
    codes.resize(tensor.num_elements());
    scales.resize(static_cast<size_t>(tiles->NumRows(rows) * segments));
    OSCAR_RETURN_IF_ERROR(source_.LoadFp8(tensor.name, rows, inputs, codes, scales));
    by_row.resize(static_cast<size_t>(rows * segments));
    for (int64_t row = 0; row < rows; ++row) {
      std::copy_n(scales.begin() + row / tiles->rows * segments, segments,
                  by_row.begin() + row * segments);
    }
    matrix->PackFp8Rows(threads_, first, static_cast<int>(rows), codes, by_row);
    first += static_cast<int>(rows);
  }
  return {};
}

Status Loader::LoadExperts(int index, CpuWeights::Experts* experts) {
  const TensorDecl& router = table_.Get(Role::kRouter, index);
  experts->router.resize(router.num_elements());
  OSCAR_RETURN_IF_ERROR(source_.Load(router.name, router.shape, experts->router));
  OSCAR_RETURN_IF_ERROR(Vector(Role::kRouterBias, index, &experts->choice_bias));
  OSCAR_RETURN_IF_ERROR(Vector(Role::kRouterLogitBias, index, &experts->logit_bias));
  const ExpertsSpec& spec = *spec_.layer(index).experts();
  const auto count = static_cast<size_t>(spec.num_experts);
  experts->gate_up.resize(count);
  experts->down.resize(count);
  static constexpr Role kGateUp[] = {Role::kExpertGate, Role::kExpertUp},
                        kAlternating[] = {Role::kExpertGateUp}, kDown[] = {Role::kExpertDown};
  const std::span<const Role> gate_up =
      spec.alternates_gate_up ? std::span<const Role>(kAlternating) : kGateUp;
  for (size_t e = 0; e < count; ++e) {
    const auto expert = static_cast<int>(e);
    OSCAR_RETURN_IF_ERROR(LoadExpert(gate_up, index, expert, &experts->gate_up[e]));
    OSCAR_RETURN_IF_ERROR(LoadExpert(kDown, index, expert, &experts->down[e]));
    OSCAR_RETURN_IF_ERROR(Append(Role::kExpertGateUpBias, index, expert, &experts->gate_up_bias));
    OSCAR_RETURN_IF_ERROR(Append(Role::kExpertDownBias, index, expert, &experts->down_bias));
  }
  return {};
}

Status Loader::LoadState(int index, CpuWeights::Layer* layer) {
  const LinearAttentionSpec* linear = spec_.layer(index).linear_attention();
  if (linear == nullptr) return {};
  OSCAR_RETURN_IF_ERROR(Vector(Role::kStateDecay, index, &layer->decay_rate));
  for (float& x : layer->decay_rate) x = std::exp(x);
  OSCAR_RETURN_IF_ERROR(Vector(Role::kStateStepBias, index, &layer->step_bias));
  OSCAR_RETURN_IF_ERROR(Vector(Role::kStateNorm, index, &layer->state_norm));
  std::vector<float> by_channel;
  OSCAR_RETURN_IF_ERROR(Vector(Role::kStateConv, index, &by_channel));
  const auto channels = static_cast<size_t>(linear->conv_channels());
  const auto kernel = static_cast<size_t>(linear->conv_kernel);
  layer->conv.resize(by_channel.size());
  for (size_t c = 0; c < channels; ++c) {
    for (size_t j = 0; j < kernel; ++j) layer->conv[j * channels + c] = by_channel[c * kernel + j];
  }
  return {};
}

Status Loader::PackGatedQueries(int layer, const AttentionSpec& attention, PackedMatrix* matrix) {
  const TensorDecl& tensor = table_.Get(Role::kQ, layer);
  const int dim = attention.head_dim, gates = attention.qkv_width() - attention.gate_width();
  std::vector<Bf16> rows(static_cast<size_t>(2 * dim) * static_cast<size_t>(tensor.shape[1]));
  for (int head = 0; head < attention.num_heads; ++head) {
    OSCAR_RETURN_IF_ERROR(
        source_.LoadBf16Rows(tensor.name, tensor.shape, {2 * head * dim, 2 * dim}, rows));
    const std::span<const Bf16> both(rows);
    matrix->PackRows(threads_, head * dim, dim, both.first(rows.size() / 2));
    matrix->PackRows(threads_, gates + head * dim, dim, both.subspan(rows.size() / 2));
  }
  return {};
}

Status Loader::LoadLayer(int index, CpuWeights::Layer* layer) {
  OSCAR_RETURN_IF_ERROR(Vector(Role::kAttentionNorm, index, &layer->attention_norm));
  OSCAR_RETURN_IF_ERROR(Vector(Role::kFeedForwardNorm, index, &layer->feed_forward_norm));
  OSCAR_RETURN_IF_ERROR(Vector(Role::kQNorm, index, &layer->q_norm));
  OSCAR_RETURN_IF_ERROR(Vector(Role::kKNorm, index, &layer->k_norm));
  OSCAR_RETURN_IF_ERROR(Vector(Role::kSharedShare, index, &layer->shared_share));
  OSCAR_RETURN_IF_ERROR(LoadState(index, layer));
  OSCAR_RETURN_IF_ERROR(Vector(Role::kSinks, index, &layer->sinks));
  const LayerSpec& spec = spec_.layer(index);
  const SideTransform* rotation = spec.kv_slot >= 0 ? &plan_.v(spec.kv_slot) : nullptr;
  if (rotation != nullptr && rotation->kind == RotationKind::kNone) rotation = nullptr;
  const bool has_gates = spec.attention() != nullptr && spec.attention()->has_output_gate;
  if (spec.experts() != nullptr) OSCAR_RETURN_IF_ERROR(LoadExperts(index, &layer->experts));
  for (const LayerMatrix which : kLayerMatrices) {
    if (table_.Find(PartsOf(which)[0], index) == nullptr) continue;  // a layer without it
    CpuWeights::Linear& linear = layer->linears[static_cast<size_t>(which)];
    for (const Role role : BiasesOf(which)) {
      std::vector<float> bias;
      OSCAR_RETURN_IF_ERROR(Vector(role, index, &bias));
      linear.bias.insert(linear.bias.end(), bias.begin(), bias.end());
    }
    int rows = 0;
    for (const Role role : PartsOf(which)) {
      rows += static_cast<int>(table_.Get(role, index).shape[0]);
    }
    const auto inputs = static_cast<int>(table_.Get(PartsOf(which)[0], index).shape[1]);
    linear.matrix = PackedMatrix(rows, inputs, path_);
    int first = 0;
    for (const Role role : PartsOf(which)) {
      const TensorDecl& tensor = table_.Get(role, index);
      if (has_gates && role == Role::kQ) {
        OSCAR_RETURN_IF_ERROR(PackGatedQueries(index, *spec.attention(), &linear.matrix));
        first += spec.attention()->q_width();
        continue;
      }
      if (rotation != nullptr && role == Role::kV) {
        const int dim = spec.attention()->head_dim;
        std::span<float> bias(linear.bias);
        if (!bias.empty()) bias = bias.subspan(static_cast<size_t>(first));
        OSCAR_RETURN_IF_ERROR(
            Pack<float>(tensor, first, dim, &linear.matrix, [&](int row, std::span<float> w_v) {
              AbsorbIntoValues(*rotation, row / dim, dim, inputs, w_v,
                               bias.empty() ? bias : bias.subspan(static_cast<size_t>(row)));
            }));
      } else if (rotation != nullptr && role == Role::kO && !has_gates) {
        const AttentionSpec& attention = *spec.attention();
        OSCAR_RETURN_IF_ERROR(Pack<float>(
            tensor, first, PackedMatrix::kPanel, &linear.matrix, [&](int, std::span<float> w_o) {
              AbsorbIntoOutputs(*rotation, attention.num_heads, attention.num_kv_heads,
                                attention.head_dim, w_o);
            }));
      } else {
        OSCAR_RETURN_IF_ERROR(Pack(tensor, first, &linear.matrix));
      }
      first += static_cast<int>(tensor.shape[0]);
    }
  }
  return {};
}

Result<CpuWeights> Loader::Load() {
  OSCAR_RETURN_IF_ERROR(CheckTensors(source_, table_));
  CpuWeights weights;
  Progress progress("loading weights", static_cast<uint64_t>(spec_.num_layers()) + 1, "layers");
  const TensorDecl& embedding = table_.Get(Role::kEmbedding);
  if (!spec_.tied_head) {
    weights.embedding.resize(embedding.num_elements());
    OSCAR_RETURN_IF_ERROR(source_.LoadBf16(embedding.name, embedding.shape, weights.embedding));
  }
  weights.head = PackedMatrix(spec_.vocab_size, spec_.hidden, path_);
  OSCAR_RETURN_IF_ERROR(
      Pack(spec_.tied_head ? embedding : table_.Get(Role::kHead), 0, &weights.head));
  OSCAR_RETURN_IF_ERROR(Vector(Role::kFinalNorm, -1, &weights.final_norm));
  weights.bytes = weights.head.bytes() + weights.embedding.size() * sizeof(Bf16);
  progress.Add(1);
  weights.layers.resize(static_cast<size_t>(spec_.num_layers()));
  for (int i = 0; i < spec_.num_layers(); ++i) {
    CpuWeights::Layer& layer = weights.layers[static_cast<size_t>(i)];
    OSCAR_RETURN_IF_ERROR(LoadLayer(i, &layer));
    for (const CpuWeights::Linear& linear : layer.linears) weights.bytes += linear.matrix.bytes();
    weights.bytes += layer.experts.router.size() * sizeof(float);
    for (size_t e = 0; e < layer.experts.down.size(); ++e) {
      const uint64_t bytes = layer.experts.gate_up[e].bytes() + layer.experts.down[e].bytes();
      weights.bytes += bytes;
      // They are all alike.
      const auto routed = static_cast<size_t>(spec_.layer(i).experts()->experts_per_token);
      if (e >= routed) weights.unrouted_expert_bytes += bytes;
    }
    progress.Add(1);
  }
  return weights;
}

}  // namespace

Result<CpuWeights> LoadCpuWeights(const ModelSpec& spec, const WeightSource& source,
                                  const KvPlan& plan, simd::GemmPath path, size_t staging_bytes,
                                  ThreadPool& threads) {
  return Loader(spec, source, plan, path, staging_bytes, threads).Load();
}

}  // namespace oscar
