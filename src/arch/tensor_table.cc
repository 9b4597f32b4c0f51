#include "arch/tensor_table.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/check.h"
#include "base/mxfp4.h"

namespace oscar {

std::span<const Role> PartsOf(LayerMatrix matrix) {
  static constexpr Role kQkv[] = {Role::kQ, Role::kK, Role::kV}, kO[] = {Role::kO},
                        kGateUp[] = {Role::kGate, Role::kUp}, kDown[] = {Role::kDown},
                        kSharedGateUp[] = {Role::kSharedGate, Role::kSharedUp},
                        kSharedDown[] = {Role::kSharedDown},
                        kStateIn[] = {Role::kStateQkv, Role::kStateZ, Role::kStateB, Role::kStateA},
                        kStateInGrouped[] = {Role::kStateQkvz, Role::kStateBa},
                        kStateOut[] = {Role::kStateOut};
  switch (matrix) {
    case LayerMatrix::kQkv:
      return kQkv;
    case LayerMatrix::kO:
      return kO;
    case LayerMatrix::kGateUp:
      return kGateUp;
    case LayerMatrix::kDown:
      return kDown;
    case LayerMatrix::kSharedGateUp:
      return kSharedGateUp;
    case LayerMatrix::kSharedDown:
      return kSharedDown;
    case LayerMatrix::kStateIn:
      return kStateIn;
    case LayerMatrix::kStateInGrouped:
      return kStateInGrouped;
    case LayerMatrix::kStateOut:
      return kStateOut;
  }
  return {};
}

std::span<const Role> BiasesOf(LayerMatrix matrix) {
  static constexpr Role kQkv[] = {Role::kQBias, Role::kKBias, Role::kVBias}, kO[] = {Role::kOBias};
  switch (matrix) {
    case LayerMatrix::kQkv:
      return kQkv;
    case LayerMatrix::kO:
      return kO;
    default:
      return {};
  }
}

TensorTable::TensorTable(const ModelSpec& spec) : spec_(&spec) {
  using enum Role;
  using enum TensorKind;
  const int64_t hidden = spec.hidden, vocab = spec.vocab_size;
  Add(kEmbedding, -1, -1, {vocab, hidden}, kTable, TensorSplit::kRows);
  if (!spec.tied_head) Add(kHead, -1, -1, {vocab, hidden}, kTable, TensorSplit::kRows);
  Add(kFinalNorm, -1, -1, {hidden}, kVector, TensorSplit::kNone);
  for (int i = 0; i < spec.num_layers(); ++i) {
    const LayerSpec& layer = spec.layer(i);
    const auto rows = [&](Role role, int64_t outputs, int64_t inputs, int expert = -1) {
      Add(role, i, expert, {outputs, inputs}, kMatrix, TensorSplit::kRows);
    };
    const auto columns = [&](Role role, int64_t outputs, int64_t inputs, int expert = -1) {
      Add(role, i, expert, {outputs, inputs}, kMatrix, TensorSplit::kColumns);
    };
    const auto vector = [&](Role role, int64_t size, TensorSplit split = TensorSplit::kNone) {
      Add(role, i, -1, {size}, kVector, split);
    };
    if (const AttentionSpec* attention = layer.attention()) {
      const int64_t q = attention->q_width(), kv = attention->kv_width();
      vector(kAttentionNorm, hidden);
      if (attention->qk_norm == QkNorm::kPerHead) {
        vector(kQNorm, attention->head_dim);
        vector(kKNorm, attention->head_dim);
      } else if (attention->qk_norm == QkNorm::kAllHeads) {
        vector(kQNorm, q, TensorSplit::kRows);
        vector(kKNorm, kv, TensorSplit::kRows);
      }
      rows(kQ, q + attention->gate_width(), hidden);
      rows(kK, kv, hidden);
      rows(kV, kv, hidden);
      columns(kO, hidden, q);
      if (attention->qkv_bias) {
        vector(kQBias, q, TensorSplit::kRows);
        vector(kKBias, kv, TensorSplit::kRows);
        vector(kVBias, kv, TensorSplit::kRows);
      }
      if (attention->o_bias) vector(kOBias, hidden);
      if (attention->has_sinks) vector(kSinks, attention->num_heads, TensorSplit::kRows);
    }
    if (const LinearAttentionSpec* linear = layer.linear_attention()) {
      const int64_t heads = linear->value_heads, values = linear->value_width();
      const auto small_rows = [&](Role role, int64_t outputs) {
        Add(role, i, -1, {outputs, hidden}, kBf16Matrix, TensorSplit::kRows);
      };
      vector(kAttentionNorm, hidden);
      if (linear->grouped_inputs) {
        rows(kStateQkvz, linear->conv_channels() + values, hidden);
        small_rows(kStateBa, 2 * heads);
      } else {
        rows(kStateQkv, linear->conv_channels(), hidden);
        rows(kStateZ, values, hidden);
        small_rows(kStateB, heads);
        small_rows(kStateA, heads);
      }
      Add(kStateConv, i, -1, {linear->conv_channels(), 1, linear->conv_kernel}, kVector,
          TensorSplit::kRows);
      vector(kStateDecay, heads, TensorSplit::kRows);
      vector(kStateStepBias, heads, TensorSplit::kRows);
      vector(kStateNorm, linear->value_dim);
      columns(kStateOut, hidden, values);
    }
    vector(kFeedForwardNorm, hidden);
    if (const DenseSpec* dense = layer.dense()) {
      rows(kGate, dense->intermediate, hidden);
      rows(kUp, dense->intermediate, hidden);
      columns(kDown, hidden, dense->intermediate);
      continue;
    }
    const ExpertsSpec& experts = *layer.experts();
    Add(kRouter, i, -1, {experts.num_experts, hidden}, TensorKind::kFp32Matrix, TensorSplit::kNone);
    if (experts.choice_bias) vector(kRouterBias, experts.num_experts);
    if (experts.has_biases) vector(kRouterLogitBias, experts.num_experts);
    for (int e = 0; e < experts.num_experts; ++e) {
      if (experts.alternates_gate_up) {
        rows(kExpertGateUp, int64_t{2} * experts.intermediate, hidden, e);
      } else {
        rows(kExpertGate, experts.intermediate, hidden, e);
        rows(kExpertUp, experts.intermediate, hidden, e);
      }
      columns(kExpertDown, hidden, experts.intermediate, e);
      if (!experts.has_biases) continue;
      Add(kExpertGateUpBias, i, e, {int64_t{2} * experts.intermediate}, kVector,
          TensorSplit::kRows);
      Add(kExpertDownBias, i, e, {hidden}, kVector, TensorSplit::kNone);
    }
    if (experts.shared_intermediate > 0) {
      rows(kSharedGate, experts.shared_intermediate, hidden);
      rows(kSharedUp, experts.shared_intermediate, hidden);
      columns(kSharedDown, hidden, experts.shared_intermediate);
      if (experts.has_shared_share) {
        Add(kSharedShare, i, -1, {1, hidden}, TensorKind::kFp32Matrix, TensorSplit::kNone);
      }
    }
  }
  for (const TensorDecl& tensor : tensors_) {
    if (tensor.expert >= 0) {
      const ExpertsSpec& experts = *spec.layer(tensor.layer).experts();
      if (tensor.expert >= experts.experts_per_token) continue;
    }
    num_active_parameters_ += tensor.num_elements();
  }
  spec_ = nullptr;
}

void TensorTable::Add(Role role, int layer, int expert, std::vector<int64_t> shape, TensorKind kind,
                      TensorSplit split) {
  std::string name = fmt::format(fmt::runtime(spec_->name(role)), layer, expert);
  index_.emplace(std::tuple(role, layer, expert), tensors_.size());
  constexpr std::array kNorms = {Role::kFinalNorm, Role::kAttentionNorm, Role::kFeedForwardNorm,
                                 Role::kQNorm, Role::kKNorm};
  const bool is_norm = std::ranges::find(kNorms, role) != kNorms.end();
  tensors_.push_back({role, layer, expert, std::move(name), std::move(shape), kind, split,
                      is_norm ? spec_->norm_offset : 0.0f});
}

const TensorDecl* TensorTable::Find(Role role, int layer, int expert) const {
  const auto found = index_.find({role, layer, expert});
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

const TensorDecl& TensorTable::Get(Role role, int layer, int expert) const {
  const TensorDecl* tensor = Find(role, layer, expert);
  OSCAR_CHECK(tensor != nullptr, "layer {} has no tensor of role {}", layer,
              static_cast<int>(role));
  return *tensor;
}

uint64_t TensorTable::num_parameters() const {
  uint64_t count = 0;
  for (const TensorDecl& tensor : tensors_) count += tensor.num_elements();
  return count;
}

uint64_t TensorTable::num_active_parameters() const { return num_active_parameters_; }

uint64_t TensorTable::BytesOf(const TensorDecl& tensor, Fp8 fp8, bool rotates_v) {
  const bool folded = rotates_v && (tensor.role == Role::kV || tensor.role == Role::kO);
  const bool is_byte = tensor.kind == TensorKind::kMatrix && !folded &&
                       (fp8 == Fp8::kAll || (fp8 == Fp8::kExperts && tensor.expert >= 0));
  if (fp8 == Fp8::kMxfp4Experts && tensor.kind == TensorKind::kMatrix && tensor.expert >= 0) {
    return tensor.num_elements() / kMxfp4Block * (kMxfp4Block / 2 + 1);
  }
  const uint64_t each = is_byte ? 1 : tensor.kind == TensorKind::kFp32Matrix ? 4 : 2;
  return tensor.num_elements() * each;
}

uint64_t TensorTable::Bytes(Fp8 fp8, bool rotates_v) const {
  uint64_t bytes = 0;
  for (const TensorDecl& tensor : tensors_) bytes += BytesOf(tensor, fp8, rotates_v);
  return bytes;
}

}  // namespace oscar
