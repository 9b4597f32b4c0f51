#include "cpu/cpu_backend.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <limits>

#include "arch/rope.h"
#include "base/check.h"
#include "cpu/cpu_experts.h"
#include "cpu/cpu_linear_attention.h"
#include "cpu/cpu_weights.h"
#include "cpu/token_windows.h"
#include "simd/attention.h"
#include "simd/dispatch.h"
#include "simd/gemm.h"
#include "simd/vec_ops.h"

namespace oscar {
namespace {

using simd::AlignedBuffer;

constexpr int kDefaultBatchTokens = 512;

struct CpuCellStream : CellStream {
  AlignedBuffer<float> x;  // [tokens, hidden]
};

class CpuBackend final : public Backend {
 public:
  CpuBackend(const ModelSpec& spec, const KvPlan& plan, ThreadPool& threads,
             const BackendOptions& options, uint64_t fingerprint, CpuWeights weights)
      : Backend(spec, plan, threads),
        options_(options),
        attention_spec_(spec_.attention()),
        rope_(spec.rope_theta, spec.rope_scaling, attention_spec_.rotary_dims),
        fingerprint_(fingerprint),
        weights_(std::move(weights)),
        windows_(plan) {}

  uint64_t weight_bytes() const override { return weights_.bytes; }
  uint64_t weight_bytes_per_step() const override {
    return weights_.bytes - weights_.embedding.size() * sizeof(Bf16) -
           weights_.unrouted_expert_bytes;
  }
  ExpertTraffic expert_traffic() const override { return experts_.traffic(); }
  uint64_t fingerprint() const override { return fingerprint_; }
  bool portable() const override { return options_.portable; }
  int max_batch_tokens() const override {
    return options_.max_batch_tokens > 0 ? options_.max_batch_tokens : kDefaultBatchTokens;
  }
  int max_logit_rows() const override { return std::numeric_limits<int>::max(); }

  Result<double> MeasureReadBandwidth() override;
  Status BeginPass(std::span<const ForwardItem> items, int padded) override;
  Status Embed() override;
  Status Linear(const LinearOp& op) override;
  Status Experts(int layer) override;
  Status WriteKv(int layer, int slot) override;
  Status Attend(int layer, int slot) override;
  Status AdvanceState(int layer, int slot) override;
  Status ReadQkv(int layer, std::span<float> out) override;
  Status Logits(int first, int count, float* out) override;
  // Nor where layers have states: a cell that is given up half read would have to bring them back.
  bool CanReadByLayer() const override {
    return plan_.token_window() == 0 && spec_.linear_attention() == nullptr;
  }
  Result<std::unique_ptr<CellStream>> EmbedCell(std::span<const int32_t> tokens) override;
  Status BeginCellRows(CellStream& stream, LayeredAppend& append, int64_t first,
                       int64_t count) override;

 private:
  size_t hidden() const { return static_cast<size_t>(spec_.hidden); }
  size_t dim() const { return static_cast<size_t>(attention_spec_.head_dim); }
  size_t q_width() const { return static_cast<size_t>(attention_spec_.q_width()); }
  size_t kv_width() const { return static_cast<size_t>(attention_spec_.kv_width()); }
  size_t qkv_width() const { return static_cast<size_t>(attention_spec_.qkv_width()); }

  template <typename Body>
  void EachRow(const Body& body) {
    threads_.ParallelFor(static_cast<int64_t>(rows_.size()),
                         [&](int64_t row, int) { body(static_cast<size_t>(row)); });
  }
  void BeginRows(size_t num_rows);
  void SetRow(size_t row, SequenceCache* cache, LayeredAppend* append, int64_t position);
  void EmbedToken(int32_t token, std::span<float> out) const;
  void NormAndRope(int layer, size_t row, float* qkv) const;
  void Rotate(const SideTransform& rotation, int kv_head, std::span<float> head) const;
  void RotateAndStore(int slot, size_t row);
  simd::AttentionLayer AttentionOf(int layer, int slot, const CacheConfig& config) const;
  void AttendCell(int layer, int slot);
  void GateAttended(int slot);

  const BackendOptions options_;
  const AttentionSpec attention_spec_;
  const RopeTable rope_;
  const uint64_t fingerprint_;
  const CpuWeights weights_;
  TokenWindows windows_;

  // The pass. A row belongs to a sequence, or to a cell that is read by layers.
  struct Row {
    SequenceCache* cache;
    LayeredAppend* append;
    int64_t position;
    int32_t token;
  };
  std::span<const ForwardItem> items_;  // none: rows of a cell
  std::vector<Row> rows_;
  std::vector<int> first_rows_;     // by item
  std::vector<size_t> logit_rows_;  // rows whose logits are wanted, in item order
  float* stream_ = nullptr;         // [rows, hidden]: x_, or a cell's
  std::vector<simd::DecodeQuery> decode_;
  std::vector<simd::PrefillQuery> prefill_;
  // [rows, ...], grown to the largest pass seen. `scratch_` holds normed inputs of a GEMM and sums
  // that are added to the stream.
  AlignedBuffer<float> x_, scratch_, qkv_, attended_, gate_up_, gated_, cos_, sin_;
  simd::GemmWorkspace gemm_;
  CpuExperts experts_;
  CpuLinearAttention linear_;
  std::vector<CpuLinearAttention::Item> linear_items_;
  simd::AttentionWorkspace attention_;
};

void CpuBackend::BeginRows(size_t num_rows) {
  const auto half = static_cast<size_t>(rope_.half());
  const auto middle = static_cast<size_t>(spec_.max_intermediate());
  size_t mixer_inputs = qkv_width(), mixer_outputs = q_width();
  if (const LinearAttentionSpec* linear = spec_.linear_attention()) {
    mixer_inputs = std::max(mixer_inputs, static_cast<size_t>(linear->input_width()));
    mixer_outputs = std::max(mixer_outputs, static_cast<size_t>(linear->value_width()));
  }
  scratch_.Grow(num_rows * hidden());
  qkv_.Grow(num_rows * mixer_inputs);
  attended_.Grow(num_rows * mixer_outputs);
  gate_up_.Grow(num_rows * 2 * middle);
  gated_.Grow(num_rows * middle);
  cos_.Grow(num_rows * half);
  sin_.Grow(num_rows * half);
  rows_.resize(num_rows);
  logit_rows_.clear();
}

void CpuBackend::SetRow(size_t row, SequenceCache* cache, LayeredAppend* append, int64_t position) {
  const auto half = static_cast<size_t>(rope_.half());
  rows_[row] = {cache, append, position, 0};
  rope_.Fill(position, {cos_.data() + row * half, half}, {sin_.data() + row * half, half});
}

Result<double> CpuBackend::MeasureReadBandwidth() {
  // Far more than any cache; each task reads what no other does.
  constexpr size_t kPiece = size_t{1} << 20, kPieces = 128;  // floats: 512 MiB
  AlignedBuffer<float> memory(kPiece * kPieces);
  std::vector<float> largest(kPieces);
  double best = 0.0;
  for (int round = 0; round < 6; ++round) {
    const auto start = std::chrono::steady_clock::now();
    threads_.ParallelFor(kPieces, [&](int64_t i, int) {
      const std::span<float> piece(memory.data() + static_cast<size_t>(i) * kPiece, kPiece);
      if (round == 0) std::ranges::fill(piece, 1.0f);
      largest[static_cast<size_t>(i)] = simd::MaxElement(piece);
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    if (round > 0) {
      best =
          std::max(best, static_cast<double>(kPiece * kPieces * sizeof(float)) / seconds.count());
    }
  }
  return best;
}

Status CpuBackend::BeginPass(std::span<const ForwardItem> items, int padded) {
  OSCAR_CHECK(padded == 0, "the CPU records no steps");
  const BatchRows rows(items);
  BeginRows(static_cast<size_t>(rows.rows));
  x_.Grow(rows_.size() * hidden());
  stream_ = x_.data();
  items_ = items;
  first_rows_ = rows.first;
  for (size_t i = 0; i < items.size(); ++i) {
    const ForwardItem& item = items[i];
    const auto first = static_cast<size_t>(rows.first[i]);
    for (size_t t = 0; t < item.tokens.size(); ++t) {
      SetRow(first + t, item.cache, nullptr, item.cache->length() + static_cast<int64_t>(t));
      rows_[first + t].token = item.tokens[t];
    }
    const size_t end = first + item.tokens.size();
    for (size_t row = end - static_cast<size_t>(item.num_logits); row < end; ++row) {
      logit_rows_.push_back(row);
    }
  }
  return {};
}

void CpuBackend::EmbedToken(int32_t token, std::span<float> out) const {
  if (!weights_.embedding.empty()) {
    const Bf16* row = weights_.embedding.data() + static_cast<size_t>(token) * hidden();
    simd::ToFloatRow({row, hidden()}, out);
    return;
  }
  for (int d = 0; d < spec_.hidden; ++d) {
    out[static_cast<size_t>(d)] = ToFloat(weights_.head.At(token, d));
  }
}

Status CpuBackend::Embed() {
  EachRow([&](size_t row) { EmbedToken(rows_[row].token, {stream_ + row * hidden(), hidden()}); });
  return {};
}

Result<std::unique_ptr<CellStream>> CpuBackend::EmbedCell(std::span<const int32_t> tokens) {
  auto stream = std::make_unique<CpuCellStream>();
  stream->x.Grow(tokens.size() * hidden());
  threads_.ParallelFor(static_cast<int64_t>(tokens.size()), [&](int64_t i, int) {
    const auto row = static_cast<size_t>(i);
    EmbedToken(tokens[row], {stream->x.data() + row * hidden(), hidden()});
  });
  return std::unique_ptr<CellStream>(std::move(stream));
}

Status CpuBackend::BeginCellRows(CellStream& stream, LayeredAppend& append, int64_t first,
                                 int64_t count) {
  BeginRows(static_cast<size_t>(count));
  items_ = {};
  stream_ = dynamic_cast<CpuCellStream&>(stream).x.data() + static_cast<size_t>(first) * hidden();
  for (size_t row = 0; row < rows_.size(); ++row) {
    SetRow(row, nullptr, &append, append.cache().length() + first + static_cast<int64_t>(row));
  }
  logit_rows_.push_back(rows_.size() - 1);
  return {};
}

Status CpuBackend::Linear(const LinearOp& op) {
  const CpuWeights::Layer& layer = weights_.layers[static_cast<size_t>(op.layer)];
  const CpuWeights::Linear& linear = layer.linear(op.matrix);
  const auto inputs = static_cast<size_t>(linear.matrix.num_inputs());
  const auto outputs = static_cast<size_t>(linear.matrix.num_outputs());
  const float* x = op.input == Activation::kAttended ? attended_.data() : gated_.data();
  if (op.norm.has_value()) {
    EachRow([&](size_t row) {
      simd::RmsNorm({stream_ + row * inputs, inputs}, layer.norm(*op.norm), spec_.norm_eps,
                    {scratch_.data() + row * inputs, inputs});
    });
    x = scratch_.data();
  }
  float* const y = op.output == Activation::kQkv     ? qkv_.data()
                   : op.output == Activation::kGated ? gate_up_.data()
                                                     : scratch_.data();
  simd::Gemm(threads_, gemm_, x, static_cast<int>(rows_.size()), inputs, linear.matrix,
             linear.bias.empty() ? nullptr : linear.bias.data(), y, outputs);
  if (op.output == Activation::kStream) {
    EachRow([&](size_t row) {
      simd::Add({stream_ + row * outputs, outputs}, {y + row * outputs, outputs});
    });
  } else if (op.output == Activation::kGated) {
    const size_t middle = outputs / 2;
    EachRow([&](size_t row) {
      const float* gate = y + row * outputs;
      const std::span<float> gated(gated_.data() + row * middle, middle);
      simd::SiluMul({gate, middle}, {gate + middle, middle}, gated);
      if (op.matrix != LayerMatrix::kSharedGateUp || layer.shared_share.empty()) return;
      std::array<float, 1> share = {simd::Dot({x + row * inputs, inputs}, layer.shared_share)};
      simd::Sigmoid(share);
      for (float& value : gated) value *= share[0];
    });
  }
  return {};
}

Status CpuBackend::Experts(int layer) {
  const CpuWeights::Layer& weights = weights_.layers[static_cast<size_t>(layer)];
  EachRow([&](size_t row) {
    simd::RmsNorm({stream_ + row * hidden(), hidden()}, weights.feed_forward_norm, spec_.norm_eps,
                  {scratch_.data() + row * hidden(), hidden()});
  });
  experts_.Run(*spec_.layer(layer).experts(), weights.experts, scratch_.data(), rows_.size(),
               hidden(), stream_, threads_);
  return {};
}

void CpuBackend::NormAndRope(int layer, size_t row, float* qkv) const {
  const CpuWeights::Layer& weights = weights_.layers[static_cast<size_t>(layer)];
  const auto half = static_cast<size_t>(rope_.half());
  const std::span<const float> cos(cos_.data() + row * half, half);
  const std::span<const float> sin(sin_.data() + row * half, half);
  const int heads = attention_spec_.num_heads;
  const QkNorm kind = spec_.layer(layer).attention()->qk_norm;
  if (kind == QkNorm::kAllHeads) {
    const std::span<float> q(qkv, q_width()), k(qkv + q_width(), kv_width());
    simd::RmsNorm(q, weights.q_norm, spec_.norm_eps, q);
    simd::RmsNorm(k, weights.k_norm, spec_.norm_eps, k);
  }
  for (int h = 0; h < heads + attention_spec_.num_kv_heads; ++h) {  // keys follow the queries
    const std::span<float> head(qkv + static_cast<size_t>(h) * dim(), dim());
    if (kind == QkNorm::kPerHead) {
      simd::RmsNorm(head, h < heads ? weights.q_norm : weights.k_norm, spec_.norm_eps, head);
    }
    simd::ApplyRope(head.first(2 * half), cos, sin);
  }
}

void CpuBackend::Rotate(const SideTransform& rotation, int kv_head, std::span<float> head) const {
  switch (rotation.kind) {
    case RotationKind::kHadamard:
      simd::FastHadamardRow(head);
      break;
    case RotationKind::kCalibrated: {
      std::array<float, kMaxHeadDim> rotated;
      simd::RotateRow(head, rotation.MatrixOf(kv_head, attention_spec_.head_dim),
                      {rotated.data(), dim()});
      std::copy_n(rotated.begin(), dim(), head.begin());
      break;
    }
    default:
      rotation.Apply(kv_head, head);
  }
}

void CpuBackend::RotateAndStore(int slot, size_t row) {
  const SideTransform& rotation = plan_.k(slot);
  const int group = attention_spec_.queries_per_kv_head();
  float* const q = qkv_.data() + row * qkv_width();
  float* const k = q + q_width();
  const float* const v = k + kv_width();
  const Row& at = rows_[row];
  for (int h = 0; h < attention_spec_.num_heads; ++h) {
    Rotate(rotation, h / group, {q + static_cast<size_t>(h) * dim(), dim()});
  }
  for (int h = 0; h < attention_spec_.num_kv_heads; ++h) {
    const size_t offset = static_cast<size_t>(h) * dim();
    Rotate(rotation, h, {k + offset, dim()});
    Bf16* const k_row = at.append != nullptr ? at.append->KRow(h, at.position)
                                             : at.cache->KRow(slot, h, at.position);
    Bf16* const v_row = at.append != nullptr ? at.append->VRow(h, at.position)
                                             : at.cache->VRow(slot, h, at.position);
    simd::ToBf16Row({k + offset, dim()}, {k_row, dim()});
    simd::ToBf16Row({v + offset, dim()}, {v_row, dim()});
  }
}

Status CpuBackend::WriteKv(int layer, int slot) {
  EachRow([&](size_t row) {
    NormAndRope(layer, row, qkv_.data() + row * qkv_width());
    RotateAndStore(slot, row);
  });
  return {};
}

Status CpuBackend::ReadQkv(int layer, std::span<float> out) {
  OSCAR_CHECK(out.size() == rows_.size() * qkv_width());
  EachRow([&](size_t row) {
    float* const to = out.data() + row * qkv_width();
    std::copy_n(qkv_.data() + row * qkv_width(), qkv_width(), to);
    NormAndRope(layer, row, to);
  });
  return {};
}

simd::AttentionLayer CpuBackend::AttentionOf(int layer, int slot, const CacheConfig& config) const {
  const std::vector<float>& sinks = weights_.layers[static_cast<size_t>(layer)].sinks;
  return {attention_spec_.num_heads,
          attention_spec_.num_kv_heads,
          static_cast<float>(attention_spec_.softmax_scale),
          config.open.block(slot, 0),
          config.sealed.blocks(slot),
          config.open.BlockOffset(slot, 0),
          /*sealed_base=*/0,
          config.sealed.NormOffset(slot),
          config.sealed.has_norms(slot),
          config.sink / kPageTokens,
          weights_.head.path() != simd::GemmPath::kFma,
          spec_.layer(layer).attention()->sliding_window,
          sinks.empty() ? nullptr : sinks.data()};
}

void CpuBackend::AttendCell(int layer, int slot) {
  const LayeredAppend& append = *rows_.front().append;
  // The table has the addresses of this layer's blocks themselves.
  simd::AttentionLayer shared = AttentionOf(layer, slot, plan_.cache());
  shared.open_offset = 0;
  shared.sealed_base = shared.sealed.front().offset;
  const simd::PrefillQuery query{{append.page_table(), append.sealed_flags()},
                                 rows_.front().position,
                                 static_cast<int>(rows_.size()),
                                 qkv_.data(),
                                 qkv_width(),
                                 attended_.data(),
                                 q_width()};
  simd::PrefillAttention(threads_, attention_, shared, {&query, 1});
}

// Gates are in the model's basis, so values are turned back before them rather than by W_o.
void CpuBackend::GateAttended(int slot) {
  if (!attention_spec_.has_output_gate) return;
  const SideTransform& rotation = plan_.v(slot);
  const int group = attention_spec_.queries_per_kv_head();
  EachRow([&](size_t row) {
    float* const gates = qkv_.data() + row * qkv_width() + q_width() + 2 * kv_width();
    simd::Sigmoid({gates, q_width()});
    for (int h = 0; h < attention_spec_.num_heads; ++h) {
      const size_t at = static_cast<size_t>(h) * dim();
      const std::span<float> head(attended_.data() + row * q_width() + at, dim());
      if (rotation.kind == RotationKind::kHadamard) {
        simd::FastHadamardRow(head);  // its own inverse
      } else if (rotation.kind == RotationKind::kCalibrated) {
        const std::span<const float> matrix =
            rotation.MatrixOf(h / group, attention_spec_.head_dim);
        std::array<float, kMaxHeadDim> turned;
        for (size_t d = 0; d < dim(); ++d) {
          turned[d] = simd::Dot(head, matrix.subspan(d * dim(), dim()));
        }
        std::copy_n(turned.begin(), dim(), head.begin());
      } else {
        rotation.Undo(h / group, head);
      }
      for (size_t d = 0; d < dim(); ++d) head[d] *= gates[at + d];
    }
  });
}

Status CpuBackend::AdvanceState(int layer, int slot) {
  const LinearAttentionSpec& linear = *spec_.layer(layer).linear_attention();
  linear_items_.clear();
  for (size_t i = 0; i < items_.size(); ++i) {
    std::byte* const states = items_[i].cache->state().data();
    linear_items_.push_back(
        {static_cast<size_t>(first_rows_[i]), items_[i].tokens.size(),
         reinterpret_cast<float*>(states + static_cast<size_t>(slot) * linear.state_bytes())});
  }
  linear_.Run(linear, weights_.layers[static_cast<size_t>(layer)], spec_.norm_eps, linear_items_,
              qkv_.data(), attended_.data(), threads_);
  return {};
}

Status CpuBackend::Attend(int layer, int slot) {
  if (items_.empty()) {
    AttendCell(layer, slot);
    GateAttended(slot);
    return {};
  }
  // The sequences' own: they may be of another plan of the same rotations, whose bits differ.
  const simd::AttentionLayer shared = AttentionOf(layer, slot, items_.front().cache->config());
  decode_.clear();
  prefill_.clear();
  const bool to_the_token = plan_.token_window() > 0;
  const bool shows = to_the_token && plan_.cache().sealed.Holds(slot);
  if (shows) windows_.Show(slot, items_, threads_);
  for (size_t i = 0; i < items_.size(); ++i) {
    const ForwardItem& item = items_[i];
    const auto row = static_cast<size_t>(first_rows_[i]);
    const simd::SequencePages pages{item.cache->page_table(), item.cache->sealed_flags()};
    const float* q = qkv_.data() + row * qkv_width();
    float* out = attended_.data() + row * q_width();
    if (item.is_prompt || to_the_token || options_.portable) {
      prefill_.push_back({pages, item.cache->length(), static_cast<int>(item.tokens.size()), q,
                          qkv_width(), out, q_width()});
      if (shows) prefill_.back().window = windows_.WindowOf(i);
    } else {
      decode_.push_back({pages, item.cache->length() + 1, q, out});
    }
  }
  if (!decode_.empty()) simd::DecodeAttention(threads_, attention_, shared, decode_);
  if (!prefill_.empty()) simd::PrefillAttention(threads_, attention_, shared, prefill_);
  GateAttended(slot);
  return {};
}

Status CpuBackend::Logits(int first, int count, float* out) {
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    const size_t row = logit_rows_[static_cast<size_t>(first) + i];
    simd::RmsNorm({stream_ + row * hidden(), hidden()}, weights_.final_norm, spec_.norm_eps,
                  {scratch_.data() + i * hidden(), hidden()});
  }
  simd::Gemm(threads_, gemm_, scratch_.data(), count, hidden(), weights_.head, nullptr, out,
             static_cast<size_t>(spec_.vocab_size));
  return {};
}

}  // namespace

Status CheckCpuFeatures(const ModelSpec& spec) {
  return CheckFeatures(spec,
                       {Feature::kPartialRope, Feature::kQkNormAllHeads, Feature::kOutputGate,
                        Feature::kExperts, Feature::kLinearAttention, Feature::kSharedShare,
                        Feature::kClampedExperts, Feature::kSlidingWindow, Feature::kSinks},
                       "a CPU");
}

Status CheckCpuPlan(const ModelSpec& spec, const KvPlan&) {
  OSCAR_RETURN_IF_ERROR(simd::CheckCpu());
  return CheckCpuFeatures(spec);
}

Result<std::unique_ptr<Backend>> MakeCpuBackend(const ModelSpec& spec, const WeightSource& source,
                                                const KvPlan& plan, ThreadPool& threads,
                                                const BackendOptions& options) {
  OSCAR_RETURN_IF_ERROR(CheckCpuPlan(spec, plan));
  const simd::GemmPath path = options.portable ? simd::GemmPath::kFma : simd::DefaultGemmPath();
  // Reads parts of the files, whose pages should not come on top of the weights.
  const uint64_t fingerprint = source.Fingerprint();
  OSCAR_ASSIGN_OR_RETURN(CpuWeights weights,
                         LoadCpuWeights(spec, source, plan, path, options.staging_bytes, threads));
  return std::make_unique<CpuBackend>(spec, plan, threads, options, fingerprint,
                                      std::move(weights));
}

}  // namespace oscar
