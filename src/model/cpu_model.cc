// The decoder on the CPU: packed BF16 weights, fp32 residual stream, attention straight from the
// cache's pages.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "arch/rope.h"
#include "base/check.h"
#include "base/progress.h"
#include "cache/layered_append.h"
#include "model/forward_items.h"
#include "model/model.h"
#include "simd/attention.h"
#include "simd/dispatch.h"
#include "simd/gemm.h"
#include "simd/vec_ops.h"

namespace oscar {
namespace {

using simd::AlignedBuffer;
using simd::PackedMatrix;

struct Layer {
  std::vector<float> attention_norm, feed_forward_norm, q_norm, k_norm;
  PackedMatrix qkv;      // [(heads + 2 kv_heads) D, hidden]
  PackedMatrix o;        // [hidden, heads D]
  PackedMatrix gate_up;  // [2 intermediate, hidden]
  PackedMatrix down;     // [hidden, intermediate]
  std::vector<float> qkv_bias, o_bias;
};

// The residual stream of all rows waits here between layers.
struct CpuCellRead : CellRead {
  std::unique_ptr<LayeredAppend> append;
  std::vector<int32_t> tokens;
  AlignedBuffer<float> x;  // [tokens, hidden]
  int layer = 0;
  int64_t row = 0;  // the next one in this layer

  int64_t num_tokens() const override { return append->num_tokens(); }
  uint64_t bytes() const override { return append->bytes(); }
};

class CpuModel : public Model {
 public:
  CpuModel(const ModelSpec& spec, const KvPlan& plan, ThreadPool& threads,
           const CpuModelOptions& options)
      : spec_(spec),
        plan_(plan),
        threads_(threads),
        options_(options),
        rope_(spec.rope_theta, spec.rope_scaling, spec.head_dim) {}

  Status Load(const WeightSource& source);

  const ModelSpec& spec() const override { return spec_; }
  const KvPlan& kv() const override { return plan_; }
  uint64_t weight_bytes() const override { return weight_bytes_; }
  uint64_t fingerprint() const override { return fingerprint_; }
  bool portable() const override { return options_.portable; }
  uint64_t weight_bytes_per_step() const override {
    return weight_bytes_ - embedding_.size() * sizeof(Bf16);
  }
  int max_batch_tokens() const override { return options_.max_batch_tokens; }
  Status SetTap(QkvTap tap) override;
  Status Forward(std::span<const ForwardItem> items, std::span<float> logits) override;
  bool CanReadByLayer() const override { return plan_.token_window() == 0; }
  Result<std::unique_ptr<CellRead>> StartCell(SequenceCache& cache,
                                              std::span<const int32_t> tokens) override;
  Result<bool> ContinueCell(CellRead& read, int64_t row_layers, std::span<float> logits) override;

 private:
  simd::GemmPath path() const {
    return options_.portable ? simd::GemmPath::kFma : simd::DefaultGemmPath();
  }
  size_t hidden() const { return static_cast<size_t>(spec_.hidden); }
  size_t dim() const { return static_cast<size_t>(spec_.head_dim); }
  size_t q_width() const { return static_cast<size_t>(spec_.num_heads) * dim(); }
  size_t kv_width() const { return static_cast<size_t>(spec_.num_kv_heads) * dim(); }
  size_t qkv_width() const { return q_width() + 2 * kv_width(); }
  size_t middle() const { return static_cast<size_t>(spec_.intermediate); }

  using Staging = AlignedBuffer<std::byte>;  // rows on their way to their packed form
  // `at_a_time`: `outputs` are read in multiples of it. `change` sees the values of the rows from
  // its first argument on before they are packed.
  template <typename T, typename Change>
  Status PackTensor(const WeightSource& source, const std::string& name, int outputs, int inputs,
                    int first_row, int at_a_time, Staging& staging, PackedMatrix& matrix,
                    const Change& change);
  Status PackTensor(const WeightSource& source, const std::string& name, int outputs, int inputs,
                    int first_row, Staging& staging, PackedMatrix& matrix) {
    return PackTensor<Bf16>(source, name, outputs, inputs, first_row, PackedMatrix::kPanel, staging,
                            matrix, [](int, std::span<Bf16>) {});
  }
  Status CheckShapes(const WeightSource& source) const;
  Status LoadLayer(const WeightSource& source, int index, Staging& staging);
  void Embed(int32_t token, std::span<float> out) const;
  void GrowBuffers(size_t num_rows);
  void PrepareRows(std::span<const ForwardItem> items, size_t num_rows);
  void AddRow(SequenceCache* cache, LayeredAppend* append, int64_t position);
  // One layer over rows_, whose residual stream is `x`; `attend` turns qkv_ into attended_.
  template <typename Attention>
  void RunLayer(int index, float* x, const Attention& attend);
  void RunCellRows(CpuCellRead& read, int64_t count);
  simd::AttentionLayer AttentionOf(int layer) const;
  void NormAndRope(const Layer& layer, size_t row);
  void Rotate(const SideTransform& rotation, int kv_head, std::span<float> head) const;
  void RotateAndStore(int layer, size_t row);
  void ProjectAndStore(int index, std::span<const ForwardItem> items);
  void Attend(int layer, std::span<const ForwardItem> items);
  void ShowAsStored(int layer, std::span<const ForwardItem> items);
  void ReportTap(int layer, std::span<const ForwardItem> items);
  void WriteLogits(std::span<const ForwardItem> items, std::span<float> logits);

  const ModelSpec spec_;
  const KvPlan& plan_;
  ThreadPool& threads_;
  const CpuModelOptions options_;
  const RopeTable rope_;
  std::vector<Bf16> embedding_;  // empty where the head is tied: rows come from head_
  PackedMatrix head_;            // [vocab, hidden]
  std::vector<float> final_norm_;
  std::vector<Layer> layers_;
  uint64_t weight_bytes_ = 0;
  uint64_t fingerprint_ = 0;
  QkvTap tap_;

  // Where each row of the batch belongs: to a sequence, or to a cell that is read by layers.
  struct Row {
    SequenceCache* cache;
    LayeredAppend* append;
    int64_t position;
  };
  std::vector<Row> rows_;
  std::vector<simd::DecodeQuery> decode_;
  std::vector<simd::PrefillQuery> prefill_;
  // KvPlan::token_window: one a sequence, pages by one layer.
  struct StoredView {
    std::vector<std::byte> open, sealed;
    std::vector<const std::byte*> pages;  // by position, null where a page has one form
  };
  std::vector<StoredView> views_;
  // [rows, ...], grown to the largest batch seen.
  AlignedBuffer<float> x_, normed_, qkv_, attended_, gate_up_, product_, cos_, sin_;
  simd::GemmWorkspace gemm_;
  simd::AttentionWorkspace attention_;
};

// All tensors, before room is made for any: a config may promise what no memory holds, and what the
// last layer lacks is told before the others are read.
Status CpuModel::CheckShapes(const WeightSource& source) const {
  const TensorNames& names = spec_.names;
  const int64_t hidden = spec_.hidden, middle = spec_.intermediate;
  const int64_t q = int64_t{spec_.num_heads} * spec_.head_dim;
  const int64_t kv = int64_t{spec_.num_kv_heads} * spec_.head_dim;
  const auto check = [&](const std::string& pattern, int layer,
                         const std::vector<int64_t>& shape) -> Status {
    if (pattern.empty()) return {};
    return source.CheckShape(fmt::format(fmt::runtime(pattern), layer), shape);
  };
  OSCAR_RETURN_IF_ERROR(check(names.embedding, 0, {spec_.vocab_size, hidden}));
  OSCAR_RETURN_IF_ERROR(check(names.head, 0, {spec_.vocab_size, hidden}));
  OSCAR_RETURN_IF_ERROR(check(names.final_norm, 0, {hidden}));
  for (int i = 0; i < spec_.num_layers; ++i) {
    for (const auto& [pattern, shape] :
         {std::pair<const std::string&, std::vector<int64_t>>(names.attention_norm, {hidden}),
          {names.feed_forward_norm, {hidden}},
          {names.q_norm, {spec_.head_dim}},
          {names.k_norm, {spec_.head_dim}},
          {names.q, {q, hidden}},
          {names.k, {kv, hidden}},
          {names.v, {kv, hidden}},
          {names.o, {hidden, q}},
          {names.q_bias, {q}},
          {names.k_bias, {kv}},
          {names.v_bias, {kv}},
          {names.o_bias, {hidden}},
          {names.gate, {middle, hidden}},
          {names.up, {middle, hidden}},
          {names.down, {hidden, middle}}}) {
      OSCAR_RETURN_IF_ERROR(check(pattern, i, shape));
    }
  }
  return {};
}

Status CpuModel::Load(const WeightSource& source) {
  OSCAR_RETURN_IF_ERROR(CheckShapes(source));
  const TensorNames& names = spec_.names;
  Progress progress("loading weights", static_cast<uint64_t>(spec_.num_layers) + 1, "layers");
  fingerprint_ = source.Fingerprint();
  const std::vector<int64_t> table{spec_.vocab_size, spec_.hidden};
  const size_t table_size = static_cast<size_t>(spec_.vocab_size) * hidden();
  Staging staging;
  if (!names.head.empty()) {
    embedding_.resize(table_size);
    OSCAR_RETURN_IF_ERROR(source.LoadBf16(names.embedding, table, embedding_));
  }
  head_ = PackedMatrix(spec_.vocab_size, spec_.hidden, path());
  OSCAR_RETURN_IF_ERROR(PackTensor(source, names.head.empty() ? names.embedding : names.head,
                                   spec_.vocab_size, spec_.hidden, 0, staging, head_));
  final_norm_.resize(hidden());
  OSCAR_RETURN_IF_ERROR(
      source.Load(names.final_norm, std::vector<int64_t>{spec_.hidden}, final_norm_));
  weight_bytes_ = head_.bytes() + embedding_.size() * sizeof(Bf16);
  progress.Add(1);
  layers_.resize(static_cast<size_t>(spec_.num_layers));
  for (int i = 0; i < spec_.num_layers; ++i) {
    OSCAR_RETURN_IF_ERROR(LoadLayer(source, i, staging));
    progress.Add(1);
  }
  return {};
}

template <typename T, typename Change>
Status CpuModel::PackTensor(const WeightSource& source, const std::string& name, int outputs,
                            int inputs, int first_row, int at_a_time, Staging& staging,
                            PackedMatrix& matrix, const Change& change) {
  const size_t unit = static_cast<size_t>(at_a_time) * static_cast<size_t>(inputs);
  const auto for_threads =
      static_cast<size_t>(threads_.num_threads() * PackedMatrix::kPanel / at_a_time);
  const size_t units =
      std::max({options_.staging_bytes / (unit * sizeof(T)), for_threads, size_t{1}});
  const int rows_at_once = static_cast<int>(
      std::min(units, static_cast<size_t>((outputs + at_a_time - 1) / at_a_time)) * at_a_time);
  const std::vector<int64_t> shape{outputs, inputs};
  const auto width = static_cast<size_t>(inputs);
  staging.Grow(static_cast<size_t>(std::min(rows_at_once, outputs)) * width * sizeof(T));
  for (int row = 0; row < outputs; row += rows_at_once) {
    const int count = std::min(rows_at_once, outputs - row);
    const std::span<T> values(reinterpret_cast<T*>(staging.data()),
                              static_cast<size_t>(count) * width);
    if constexpr (std::is_same_v<T, Bf16>) {
      OSCAR_RETURN_IF_ERROR(source.LoadBf16Rows(name, shape, {row, count}, values));
    } else {
      OSCAR_RETURN_IF_ERROR(source.LoadRows(name, shape, {row, count}, values));
    }
    change(row, values);
    matrix.PackRows(threads_, first_row + row, count, std::span<const T>(values));
  }
  return {};
}

Status CpuModel::LoadLayer(const WeightSource& source, int index, Staging& staging) {
  Layer& layer = layers_[static_cast<size_t>(index)];
  const TensorNames& names = spec_.names;
  const int q = spec_.num_heads * spec_.head_dim, kv = spec_.num_kv_heads * spec_.head_dim;
  const auto name = [&](const std::string& pattern) {
    return fmt::format(fmt::runtime(pattern), index);
  };
  const auto vector = [&](const std::string& pattern, int size, std::vector<float>* out) -> Status {
    if (pattern.empty()) return {};
    out->resize(static_cast<size_t>(size));
    return source.Load(name(pattern), std::vector<int64_t>{size}, *out);
  };
  OSCAR_RETURN_IF_ERROR(vector(names.attention_norm, spec_.hidden, &layer.attention_norm));
  OSCAR_RETURN_IF_ERROR(vector(names.feed_forward_norm, spec_.hidden, &layer.feed_forward_norm));
  OSCAR_RETURN_IF_ERROR(vector(names.q_norm, spec_.head_dim, &layer.q_norm));
  OSCAR_RETURN_IF_ERROR(vector(names.k_norm, spec_.head_dim, &layer.k_norm));

  const auto pack = [&](const std::string& pattern, int outputs, int inputs, int first,
                        PackedMatrix* matrix) -> Status {
    return PackTensor(source, name(pattern), outputs, inputs, first, staging, *matrix);
  };
  layer.qkv = PackedMatrix(q + 2 * kv, spec_.hidden, path());
  layer.o = PackedMatrix(spec_.hidden, q, path());
  OSCAR_RETURN_IF_ERROR(pack(names.q, q, spec_.hidden, 0, &layer.qkv));
  OSCAR_RETURN_IF_ERROR(pack(names.k, kv, spec_.hidden, q, &layer.qkv));
  std::vector<float> v_bias;
  OSCAR_RETURN_IF_ERROR(vector(names.v_bias, kv, &v_bias));
  if (plan_.v(index).kind == RotationKind::kNone) {
    OSCAR_RETURN_IF_ERROR(pack(names.v, kv, spec_.hidden, q + kv, &layer.qkv));
    OSCAR_RETURN_IF_ERROR(pack(names.o, spec_.hidden, q, 0, &layer.o));
  } else {
    const SideTransform& rotation = plan_.v(index);
    OSCAR_RETURN_IF_ERROR(PackTensor<float>(
        source, name(names.v), kv, spec_.hidden, q + kv, spec_.head_dim, staging, layer.qkv,
        [&](int row, std::span<float> w_v) {
          const std::span<float> b_v(v_bias);
          AbsorbIntoValues(rotation, row / spec_.head_dim, spec_.head_dim, spec_.hidden, w_v,
                           b_v.empty() ? b_v : b_v.subspan(static_cast<size_t>(row)));
        }));
    OSCAR_RETURN_IF_ERROR(PackTensor<float>(
        source, name(names.o), spec_.hidden, q, 0, PackedMatrix::kPanel, staging, layer.o,
        [&](int, std::span<float> w_o) {
          AbsorbIntoOutputs(rotation, spec_.num_heads, spec_.num_kv_heads, spec_.head_dim, w_o);
        }));
  }
  if (!names.q_bias.empty()) {
    std::vector<float> bias;
    OSCAR_RETURN_IF_ERROR(vector(names.q_bias, q, &layer.qkv_bias));
    OSCAR_RETURN_IF_ERROR(vector(names.k_bias, kv, &bias));
    layer.qkv_bias.insert(layer.qkv_bias.end(), bias.begin(), bias.end());
    layer.qkv_bias.insert(layer.qkv_bias.end(), v_bias.begin(), v_bias.end());
  }
  OSCAR_RETURN_IF_ERROR(vector(names.o_bias, spec_.hidden, &layer.o_bias));
  layer.gate_up = PackedMatrix(2 * spec_.intermediate, spec_.hidden, path());
  layer.down = PackedMatrix(spec_.hidden, spec_.intermediate, path());
  OSCAR_RETURN_IF_ERROR(pack(names.gate, spec_.intermediate, spec_.hidden, 0, &layer.gate_up));
  OSCAR_RETURN_IF_ERROR(
      pack(names.up, spec_.intermediate, spec_.hidden, spec_.intermediate, &layer.gate_up));
  OSCAR_RETURN_IF_ERROR(pack(names.down, spec_.hidden, spec_.intermediate, 0, &layer.down));
  weight_bytes_ += layer.qkv.bytes() + layer.o.bytes() + layer.gate_up.bytes() + layer.down.bytes();
  return {};
}

void CpuModel::Embed(int32_t token, std::span<float> out) const {
  if (!embedding_.empty()) {
    simd::ToFloatRow({embedding_.data() + static_cast<size_t>(token) * hidden(), hidden()}, out);
    return;
  }
  for (int d = 0; d < spec_.hidden; ++d) out[static_cast<size_t>(d)] = ToFloat(head_.At(token, d));
}

Status CpuModel::SetTap(QkvTap tap) {
  if (tap) OSCAR_RETURN_IF_ERROR(CheckTapPlan(plan_, spec_.num_layers));
  tap_ = std::move(tap);
  return {};
}

void CpuModel::GrowBuffers(size_t num_rows) {
  const auto half = static_cast<size_t>(rope_.half());
  normed_.Grow(num_rows * hidden());
  qkv_.Grow(num_rows * qkv_width());
  attended_.Grow(num_rows * q_width());
  gate_up_.Grow(num_rows * 2 * middle());
  product_.Grow(num_rows * middle());
  cos_.Grow(num_rows * half);
  sin_.Grow(num_rows * half);
}

void CpuModel::AddRow(SequenceCache* cache, LayeredAppend* append, int64_t position) {
  const auto half = static_cast<size_t>(rope_.half());
  const size_t row = rows_.size();
  rows_.push_back({cache, append, position});
  rope_.Fill(position, {cos_.data() + row * half, half}, {sin_.data() + row * half, half});
}

void CpuModel::PrepareRows(std::span<const ForwardItem> items, size_t num_rows) {
  GrowBuffers(num_rows);
  x_.Grow(num_rows * hidden());
  rows_.clear();
  for (const ForwardItem& item : items) {
    for (size_t t = 0; t < item.tokens.size(); ++t) {
      Embed(item.tokens[t], {x_.data() + rows_.size() * hidden(), hidden()});
      AddRow(item.cache, nullptr, item.cache->length() + static_cast<int64_t>(t));
    }
  }
}

void CpuModel::NormAndRope(const Layer& layer, size_t row) {
  const auto half = static_cast<size_t>(rope_.half());
  const std::span<const float> cos(cos_.data() + row * half, half);
  const std::span<const float> sin(sin_.data() + row * half, half);
  float* const qkv = qkv_.data() + row * qkv_width();
  for (int h = 0; h < spec_.num_heads + spec_.num_kv_heads; ++h) {  // keys follow the queries
    const std::span<float> head(qkv + static_cast<size_t>(h) * dim(), dim());
    const std::vector<float>& norm = h < spec_.num_heads ? layer.q_norm : layer.k_norm;
    if (!norm.empty()) simd::RmsNorm(head, norm, spec_.norm_eps, head);
    simd::ApplyRope(head, cos, sin);
  }
}

void CpuModel::Rotate(const SideTransform& rotation, int kv_head, std::span<float> head) const {
  switch (rotation.kind) {
    case RotationKind::kHadamard:
      simd::FastHadamardRow(head);
      break;
    case RotationKind::kCalibrated: {
      std::array<float, kMaxHeadDim> rotated;
      simd::RotateRow(head, rotation.MatrixOf(kv_head, spec_.head_dim), {rotated.data(), dim()});
      std::copy_n(rotated.begin(), dim(), head.begin());
      break;
    }
    default:
      rotation.Apply(kv_head, head);
  }
}

void CpuModel::RotateAndStore(int layer, size_t row) {
  const SideTransform& rotation = plan_.k(layer);
  const int group = spec_.queries_per_kv_head();
  float* const q = qkv_.data() + row * qkv_width();
  float* const k = q + q_width();
  const float* const v = k + kv_width();
  const Row& at = rows_[row];
  for (int h = 0; h < spec_.num_heads; ++h) {
    Rotate(rotation, h / group, {q + static_cast<size_t>(h) * dim(), dim()});
  }
  for (int h = 0; h < spec_.num_kv_heads; ++h) {
    const size_t offset = static_cast<size_t>(h) * dim();
    Rotate(rotation, h, {k + offset, dim()});
    Bf16* const k_row = at.append != nullptr ? at.append->KRow(h, at.position)
                                             : at.cache->KRow(layer, h, at.position);
    Bf16* const v_row = at.append != nullptr ? at.append->VRow(h, at.position)
                                             : at.cache->VRow(layer, h, at.position);
    simd::ToBf16Row({k + offset, dim()}, {k_row, dim()});
    simd::ToBf16Row({v + offset, dim()}, {v_row, dim()});
  }
}

// Queries and keys as attention wants them; keys and values into the open pages.
void CpuModel::ProjectAndStore(int index, std::span<const ForwardItem> items) {
  const Layer& layer = layers_[static_cast<size_t>(index)];
  const auto num_rows = static_cast<int64_t>(rows_.size());
  if (!tap_) {
    threads_.ParallelFor(num_rows, [&](int64_t row, int) {
      NormAndRope(layer, static_cast<size_t>(row));
      RotateAndStore(index, static_cast<size_t>(row));
    });
    return;
  }
  threads_.ParallelFor(num_rows,
                       [&](int64_t row, int) { NormAndRope(layer, static_cast<size_t>(row)); });
  ReportTap(index, items);
  threads_.ParallelFor(num_rows,
                       [&](int64_t row, int) { RotateAndStore(index, static_cast<size_t>(row)); });
}

void CpuModel::ReportTap(int layer, std::span<const ForwardItem> items) {
  std::vector<float> q, k, v;
  size_t row = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    q.clear(), k.clear(), v.clear();
    for (size_t t = 0; t < items[i].tokens.size(); ++t, ++row) {
      const float* qkv = qkv_.data() + row * qkv_width();
      q.insert(q.end(), qkv, qkv + q_width());
      k.insert(k.end(), qkv + q_width(), qkv + q_width() + kv_width());
      v.insert(v.end(), qkv + q_width() + kv_width(), qkv + qkv_width());
    }
    tap_(layer, i, q, k, v);
  }
}

simd::AttentionLayer CpuModel::AttentionOf(int layer) const {
  const CacheConfig& config = plan_.cache();
  return {spec_.num_heads,
          spec_.num_kv_heads,
          1.0f / std::sqrt(static_cast<float>(spec_.head_dim)),
          config.open.block(layer),
          config.sealed.block(layer),
          config.open.BlockOffset(layer, 0),
          config.sealed.BlockOffset(layer, 0),
          head_.path() != simd::GemmPath::kFma};
}

// The page in which the window ends and those that are stored with it, and the page in which the
// sink ends, as they would be stored.
void CpuModel::ShowAsStored(int layer, std::span<const ForwardItem> items) {
  const CacheConfig& config = plan_.cache();
  const auto& sealer = dynamic_cast<const HostPageSealer&>(*config.sealer);
  const int64_t together = sealer.pages_together(), sink = config.sink / kPageTokens;
  const size_t open_bytes = config.open.block(layer).block_bytes();
  const size_t open_layer = open_bytes * static_cast<size_t>(spec_.num_kv_heads);
  const size_t sealed_layer =
      config.sealed.block(layer).block_bytes() * static_cast<size_t>(spec_.num_kv_heads);
  views_.resize(std::max(views_.size(), items.size()));
  threads_.ParallelFor(static_cast<int64_t>(items.size()), [&](int64_t unit, int) {
    const ForwardItem& item = items[static_cast<size_t>(unit)];
    StoredView& view = views_[static_cast<size_t>(unit)];
    view.pages.clear();
    // Prompts see the whole of a cell that is longer than a page as it was written.
    if (item.is_prompt && config.cell > kPageTokens) return;
    const SequenceCache& cache = *item.cache;
    const int64_t end = cache.length() + static_cast<int64_t>(item.tokens.size());
    const int64_t last_old = end - 1 - plan_.token_window();  // that the last token sees stored
    if (last_old < 0) return;
    view.open.resize(open_layer);
    view.sealed.resize(static_cast<size_t>(2 * together) * sealed_layer);
    view.pages.resize(static_cast<size_t>(cache.num_pages()));
    // `count` pages from `first` on, which are stored with one another.
    const auto show = [&](int64_t first, int64_t count, std::byte* out) {
      std::vector<const std::byte*> from;
      std::vector<std::byte*> to;
      for (int64_t i = 0; i < together; ++i) {
        const int64_t page = first + std::min(i, count - 1);
        const std::byte* source = cache.page_table()[page] + config.open.BlockOffset(layer, 0);
        const int64_t used = std::min<int64_t>(end - page * kPageTokens, kPageTokens);
        if (used < kPageTokens) {
          // Rows to come are not numbers yet. Only the newest page has some.
          std::memset(view.open.data(), 0, open_layer);
          for (size_t half = 0; half < 2 * static_cast<size_t>(spec_.num_kv_heads); ++half) {
            const size_t at = half * open_bytes / 2;
            std::memcpy(view.open.data() + at, source + at,
                        static_cast<size_t>(used) * dim() * sizeof(Bf16));
          }
          source = view.open.data();
        }
        from.push_back(source);
        to.push_back(out + static_cast<size_t>(i) * sealed_layer);
        if (i < count) view.pages[static_cast<size_t>(page)] = to.back();
      }
      sealer.Seal(layer, from, to);
    };
    const int64_t last = last_old / kPageTokens;
    if (last >= sink && !cache.is_sealed(last)) {
      show(sink + (last - sink) / together * together, together, view.sealed.data());
    }
    // A sink that ends inside its last page: that page stands for all that it is stored with.
    if (sink > 0 && plan_.token_sink() < config.sink && last_old >= plan_.token_sink()) {
      show(sink - 1, 1, view.sealed.data() + static_cast<size_t>(together) * sealed_layer);
    }
  });
}

void CpuModel::Attend(int layer, std::span<const ForwardItem> items) {
  const simd::AttentionLayer shared = AttentionOf(layer);
  decode_.clear();
  prefill_.clear();
  const bool to_the_token = plan_.token_window() > 0;
  if (to_the_token) ShowAsStored(layer, items);
  size_t row = 0;
  for (const ForwardItem& item : items) {
    const simd::SequencePages pages{item.cache->page_table(), item.cache->sealed_flags()};
    const float* q = qkv_.data() + row * qkv_width();
    float* out = attended_.data() + row * q_width();
    if (item.is_prompt || to_the_token || options_.portable) {
      prefill_.push_back({pages, item.cache->length(), static_cast<int>(item.tokens.size()), q,
                          qkv_width(), out, q_width()});
      if (to_the_token) {
        const StoredView& view = views_[static_cast<size_t>(&item - items.data())];
        prefill_.back().window = {view.pages.data(), static_cast<int64_t>(view.pages.size()),
                                  plan_.token_sink(), plan_.token_window()};
      }
    } else {
      decode_.push_back({pages, item.cache->length() + 1, q, out});
    }
    row += item.tokens.size();
  }
  if (!decode_.empty()) simd::DecodeAttention(threads_, attention_, shared, decode_);
  if (!prefill_.empty()) simd::PrefillAttention(threads_, attention_, shared, prefill_);
}

void CpuModel::WriteLogits(std::span<const ForwardItem> items, std::span<float> logits) {
  size_t row = 0, count = 0;
  for (const ForwardItem& item : items) {
    row += item.tokens.size();
    for (size_t i = row - static_cast<size_t>(item.num_logits); i < row; ++i) {
      simd::RmsNorm({x_.data() + i * hidden(), hidden()}, final_norm_, spec_.norm_eps,
                    {normed_.data() + count++ * hidden(), hidden()});
    }
  }
  const auto vocab = static_cast<size_t>(spec_.vocab_size);
  OSCAR_CHECK(logits.size() == count * vocab);
  simd::Gemm(threads_, gemm_, normed_.data(), static_cast<int>(count), hidden(), head_, nullptr,
             logits.data(), vocab);
}

template <typename Attention>
void CpuModel::RunLayer(int index, float* stream, const Attention& attend) {
  const Layer& layer = layers_[static_cast<size_t>(index)];
  const auto count = static_cast<int>(rows_.size());
  const auto each_row = [&](const auto& body) {
    threads_.ParallelFor(count, [&](int64_t row, int) { body(static_cast<size_t>(row)); });
  };
  const auto x = [&](size_t row) { return std::span(stream + row * hidden(), hidden()); };
  const auto normed = [&](size_t row) {
    return std::span(normed_.data() + row * hidden(), hidden());
  };
  each_row([&](size_t row) {
    simd::RmsNorm(x(row), layer.attention_norm, spec_.norm_eps, normed(row));
  });
  simd::Gemm(threads_, gemm_, normed_.data(), count, hidden(), layer.qkv,
             layer.qkv_bias.empty() ? nullptr : layer.qkv_bias.data(), qkv_.data(), qkv_width());
  attend();
  simd::Gemm(threads_, gemm_, attended_.data(), count, q_width(), layer.o,
             layer.o_bias.empty() ? nullptr : layer.o_bias.data(), normed_.data(), hidden());
  each_row([&](size_t row) {
    simd::AddRmsNorm(x(row), normed(row), layer.feed_forward_norm, spec_.norm_eps, normed(row));
  });
  simd::Gemm(threads_, gemm_, normed_.data(), count, hidden(), layer.gate_up, nullptr,
             gate_up_.data(), 2 * middle());
  each_row([&](size_t row) {
    const float* gate = gate_up_.data() + row * 2 * middle();
    simd::SiluMul({gate, middle()}, {gate + middle(), middle()},
                  {product_.data() + row * middle(), middle()});
  });
  simd::Gemm(threads_, gemm_, product_.data(), count, middle(), layer.down, nullptr, normed_.data(),
             hidden());
  each_row([&](size_t row) { simd::Add(x(row), normed(row)); });
}

Status CpuModel::Forward(std::span<const ForwardItem> items, std::span<float> logits) {
  CheckItems(items, options_.max_batch_tokens);
  OSCAR_RETURN_IF_ERROR(MakeRoom(items, threads_));
  size_t num_rows = 0;
  for (const ForwardItem& item : items) num_rows += item.tokens.size();
  if (num_rows == 0) return {};
  PrepareRows(items, num_rows);
  for (int i = 0; i < spec_.num_layers; ++i) {
    RunLayer(i, x_.data(), [&] {
      ProjectAndStore(i, items);
      Attend(i, items);
    });
  }
  WriteLogits(items, logits);
  AdvanceAll(items);
  return {};
}

Result<std::unique_ptr<CellRead>> CpuModel::StartCell(SequenceCache& cache,
                                                      std::span<const int32_t> tokens) {
  OSCAR_CHECK(!tap_, "calibration reads prompts chunk by chunk");
  auto read = std::make_unique<CpuCellRead>();
  OSCAR_ASSIGN_OR_RETURN(
      read->append, LayeredAppend::Begin(cache, static_cast<int64_t>(tokens.size()), threads_));
  read->tokens.assign(tokens.begin(), tokens.end());
  read->x.Grow(tokens.size() * hidden());
  threads_.ParallelFor(static_cast<int64_t>(tokens.size()), [&](int64_t i, int) {
    const auto row = static_cast<size_t>(i);
    Embed(read->tokens[row], {read->x.data() + row * hidden(), hidden()});
  });
  return std::unique_ptr<CellRead>(std::move(read));
}

void CpuModel::RunCellRows(CpuCellRead& read, int64_t count) {
  LayeredAppend& append = *read.append;
  const int64_t first = append.cache().length() + read.row;
  GrowBuffers(static_cast<size_t>(count));
  rows_.clear();
  for (int64_t i = 0; i < count; ++i) AddRow(nullptr, &append, first + i);
  RunLayer(read.layer, read.x.data() + static_cast<size_t>(read.row) * hidden(), [&] {
    ProjectAndStore(read.layer, {});
    // The table has the addresses of this layer's blocks themselves.
    simd::AttentionLayer shared = AttentionOf(read.layer);
    shared.open_offset = shared.sealed_offset = 0;
    const simd::PrefillQuery query{{append.page_table(), append.sealed_flags()},
                                   first,
                                   static_cast<int>(count),
                                   qkv_.data(),
                                   qkv_width(),
                                   attended_.data(),
                                   q_width()};
    simd::PrefillAttention(threads_, attention_, shared, {&query, 1});
  });
}

Result<bool> CpuModel::ContinueCell(CellRead& cell, int64_t row_layers, std::span<float> logits) {
  auto& read = dynamic_cast<CpuCellRead&>(cell);
  const int64_t num_rows = read.num_tokens();
  while (row_layers > 0) {
    const int64_t count =
        std::min<int64_t>({num_rows - read.row, options_.max_batch_tokens, row_layers});
    RunCellRows(read, count);
    row_layers -= count;
    read.row += count;
    if (read.row < num_rows) continue;
    read.append->SealLayer(threads_);
    read.row = 0;
    if (++read.layer == spec_.num_layers) break;
    read.append->SetLayer(read.layer);
  }
  if (read.layer < spec_.num_layers) return false;
  if (!logits.empty()) {
    const size_t last = static_cast<size_t>(num_rows - 1) * hidden();
    simd::RmsNorm({read.x.data() + last, hidden()}, final_norm_, spec_.norm_eps,
                  {normed_.data(), hidden()});
    simd::Gemm(threads_, gemm_, normed_.data(), 1, hidden(), head_, nullptr, logits.data(),
               static_cast<size_t>(spec_.vocab_size));
  }
  read.append->Commit();
  return true;
}

}  // namespace

Result<std::unique_ptr<CellRead>> Model::StartCell(SequenceCache&, std::span<const int32_t>) {
  return Unexpected(Unimplemented("this device does not read prompts layer by layer"));
}

Result<bool> Model::ContinueCell(CellRead&, int64_t, std::span<float>) {
  return Unexpected(Unimplemented("this device does not read prompts layer by layer"));
}

Status Model::ForwardAndDraw(std::span<const ForwardItem>, std::span<const TokenDraw>,
                             std::span<int32_t>) {
  return Unimplemented("this model does not draw tokens");
}
Status Model::ReadLogits(size_t, std::span<float>) {
  return Unimplemented("this model does not draw tokens");
}
Status Model::Launch(std::span<const ForwardItem>, std::span<const TokenDraw>) {
  return Unimplemented("this model does not run ahead");
}
Status Model::Collect(std::span<int32_t>) { return Unimplemented("this model does not run ahead"); }

Result<std::unique_ptr<Model>> LoadCpuModel(const ModelSpec& spec, const WeightSource& source,
                                            const KvPlan& plan, ThreadPool& threads,
                                            const CpuModelOptions& options) {
  OSCAR_RETURN_IF_ERROR(simd::CheckCpu());
  auto model = std::make_unique<CpuModel>(spec, plan, threads, options);
  OSCAR_RETURN_IF_ERROR(model->Load(source));
  return model;
}

}  // namespace oscar
