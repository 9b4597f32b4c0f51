#include "cuda/device_weights.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/fp8.h"
#include "base/mxfp4.h"
#include "cuda/experts/grouped_gemm.h"
#include "cuda/gemm/fp8_kernels.h"
#include "cuda/weight_parts.h"

namespace oscar::cuda {
namespace {

// The matrices that undo V's rotation before gates: none where a kernel has a form of its own.
int NumValueTurns(const SideTransform& transform, bool portable) {
  if (transform.kind == RotationKind::kCalibrated) return transform.num_matrices;
  return transform.kind == RotationKind::kBlockHadamard && !portable ? 1 : 0;
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

}  // namespace oscar::cuda
