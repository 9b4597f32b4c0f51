#include "measure/layer_errors.h"

#include <algorithm>
#include <array>

#include "base/check.h"
#include "cache/block_codec.h"
#include "engine/prompt_reader.h"
#include "numeric/eigen.h"
#include "numeric/matrix.h"
#include "simd/vec_ops.h"

namespace oscar {
namespace {

// Queries are alike from one token to the next: one in so many gives the moment.
constexpr int64_t kQueryStride = 8;

double WeightedSquare(std::span<const float> x, std::span<const double> c) {
  const size_t dim = x.size();
  double sum = 0;
  for (size_t i = 0; i < dim; ++i) {
    double inner = 0;
    for (size_t j = 0; j < dim; ++j) inner += c[i * dim + j] * x[j];
    sum += inner * x[i];
  }
  return sum;
}

}  // namespace

Result<LayerErrorProbe> LayerErrorProbe::Capture(LoadedModel& model,
                                                 std::span<const std::vector<int32_t>> sequences) {
  const ModelSpec& spec = model.spec();
  LayerErrorProbe probe;
  for (const int layer : spec.history_layers()) probe.slots_.push_back(spec.layer(layer).kv_slot);
  probe.num_layers_ = static_cast<int>(probe.slots_.size());
  probe.num_heads_ = spec.attention().num_heads;
  probe.kv_heads_ = spec.attention().num_kv_heads;
  probe.head_dim_ = spec.attention().head_dim;
  probe.layers_.resize(static_cast<size_t>(probe.num_layers_));
  OSCAR_RETURN_IF_ERROR(
      model.model().SetTap([&](int layer, size_t, std::span<const float> q,
                               std::span<const float> k, std::span<const float> v) {
        const auto slot = std::ranges::find(probe.slots_, spec.layer(layer).kv_slot);
        if (slot == probe.slots_.end()) return;
        LayerRows& rows = probe.layers_[static_cast<size_t>(slot - probe.slots_.begin())];
        rows.q.insert(rows.q.end(), q.begin(), q.end());
        rows.k.insert(rows.k.end(), k.begin(), k.end());
        rows.v.insert(rows.v.end(), v.begin(), v.end());
      }));
  Status status;
  for (const std::vector<int32_t>& tokens : sequences) {
    SequenceCache cache(model.kv().cache(), model.pool());
    const int64_t total =
        std::min<int64_t>(kMaxTokens - probe.num_tokens_, static_cast<int64_t>(tokens.size()));
    const auto read = std::span(tokens).first(static_cast<size_t>(total));
    if (status.ok()) status = PromptReader(model.model(), cache, read).ReadAll();
    probe.num_tokens_ += total;
  }
  OSCAR_RETURN_IF_ERROR(model.model().SetTap({}));
  OSCAR_RETURN_IF_ERROR(status);
  return probe;
}

std::vector<double> LayerErrorProbe::QueryMoment(int layer, int kv_head,
                                                 const SideTransform* rotation) const {
  const auto dim = static_cast<size_t>(head_dim_);
  const auto group = static_cast<size_t>(num_heads_ / kv_heads_);
  std::vector<double> moment(dim * dim);
  std::vector<float> query(dim);
  for (int64_t t = 0; t < num_tokens_; t += kQueryStride) {
    for (size_t g = 0; g < group; ++g) {
      const size_t head = static_cast<size_t>(kv_head) * group + g;
      const float* from = layers_[static_cast<size_t>(layer)].q.data() +
                          (static_cast<size_t>(t) * static_cast<size_t>(num_heads_) + head) * dim;
      std::copy_n(from, dim, query.begin());
      if (rotation != nullptr) rotation->Apply(kv_head, query);
      for (size_t i = 0; i < dim; ++i) {
        for (size_t j = 0; j < dim; ++j) moment[i * dim + j] += double{query[i]} * query[j];
      }
    }
  }
  return moment;
}

Result<std::vector<std::vector<double>>> LayerErrorProbe::QuerySpectra() const {
  std::vector<std::vector<double>> out;
  for (int layer = 0; layer < num_layers_; ++layer) {
    std::vector<double>& mean = out.emplace_back(static_cast<size_t>(head_dim_));
    for (int h = 0; h < kv_heads_; ++h) {
      const std::vector<double> moment = QueryMoment(layer, h, nullptr);
      Matrix matrix(head_dim_, head_dim_);
      for (int i = 0; i < head_dim_; ++i) {
        for (int j = 0; j < head_dim_; ++j) {
          matrix(i, j) = moment[static_cast<size_t>(i * head_dim_ + j)];
        }
      }
      OSCAR_ASSIGN_OR_RETURN(const SymmetricEigen eigen, DecomposeSymmetric(matrix));
      double total = 0;
      for (double value : eigen.values) total += value;
      // Largest first, as shares of the mean: layers become comparable.
      for (size_t i = 0; i < mean.size(); ++i) {
        mean[i] += eigen.values[mean.size() - 1 - i] * static_cast<double>(mean.size()) /
                   std::max(total, 1e-30) / kv_heads_;
      }
    }
  }
  return out;
}

Result<std::vector<std::pair<double, double>>> LayerErrorProbe::Measure(const KvPlan& plan) const {
  const auto dim = static_cast<size_t>(head_dim_);
  std::vector<std::pair<double, double>> out(static_cast<size_t>(num_layers_));
  const CacheConfig& config = plan.cache();
  if (!config.seals()) return out;
  // A copy of the open rows, and the cache that seals them.
  PagePool pool(uint64_t{1} << 34, plan.host_sealer());
  SequenceCache cache(config, pool);
  ThreadPool inline_pool(1);
  OSCAR_RETURN_IF_ERROR(cache.Reserve(num_tokens_));
  std::vector<std::vector<float>> k_rows(out.size()), v_rows(out.size());  // rotated, as BF16
  for (int layer = 0; layer < num_layers_; ++layer) {
    const LayerRows& rows = layers_[static_cast<size_t>(layer)];
    const int slot = slots_[static_cast<size_t>(layer)];
    std::vector<float>& k = k_rows[static_cast<size_t>(layer)] = rows.k;
    std::vector<float>& v = v_rows[static_cast<size_t>(layer)] = rows.v;
    for (int64_t t = 0; t < num_tokens_; ++t) {
      for (int h = 0; h < kv_heads_; ++h) {
        const size_t at =
            (static_cast<size_t>(t) * static_cast<size_t>(kv_heads_) + static_cast<size_t>(h)) *
            dim;
        for (auto& [side, transform, target] :
             {std::tuple{&k, &plan.k(slot), cache.KRow(slot, h, t)},
              std::tuple{&v, &plan.v(slot), cache.VRow(slot, h, t)}}) {
          const std::span<float> row(side->data() + at, dim);
          transform->Apply(h, row);
          simd::ToBf16Row(row, {target, dim});
          simd::ToFloatRow(std::span<const Bf16>(target, dim), row);
        }
      }
    }
  }
  cache.Advance(num_tokens_);
  OSCAR_RETURN_IF_ERROR(cache.SealForGeneration(inline_pool));
  std::vector<float> k_page(kPageTokens * dim), v_page(kPageTokens * dim);
  for (int layer = 0; layer < num_layers_; ++layer) {
    const int slot = slots_[static_cast<size_t>(layer)];
    double k_error = 0, k_energy = 0, v_error = 0, v_energy = 0;
    for (int h = 0; h < kv_heads_; ++h) {
      const std::vector<double> moment = QueryMoment(layer, h, &plan.k(slot));
      for (int64_t page = 0; page < cache.num_pages(); ++page) {
        if (!cache.is_sealed(page)) continue;
        DecodeBlock(config.sealed.block(slot, h), cache.SealedBlockOf(slot, h, page), k_page,
                    v_page);
        for (size_t t = 0; t < kPageTokens; ++t) {
          const size_t at =
              ((static_cast<size_t>(page) * kPageTokens + t) * static_cast<size_t>(kv_heads_) +
               static_cast<size_t>(h)) *
              dim;
          std::array<float, kMaxHeadDim> difference;
          const std::span<const float> k(k_rows[static_cast<size_t>(layer)].data() + at, dim);
          const std::span<const float> v(v_rows[static_cast<size_t>(layer)].data() + at, dim);
          for (size_t i = 0; i < dim; ++i) {
            difference[i] = k[i] - k_page[t * dim + i];
            const double e = double{v[i]} - v_page[t * dim + i];
            v_error += e * e, v_energy += double{v[i]} * v[i];
          }
          k_error += WeightedSquare({difference.data(), dim}, moment);
          k_energy += WeightedSquare(k, moment);
        }
      }
    }
    out[static_cast<size_t>(layer)] = {k_energy > 0 ? k_error / k_energy : 0.0,
                                       v_energy > 0 ? v_error / v_energy : 0.0};
  }
  return out;
}

}  // namespace oscar
