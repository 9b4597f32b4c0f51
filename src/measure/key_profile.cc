#include "measure/key_profile.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

namespace oscar {
namespace {

// Below it a norm or a channel counts as zero: fp32 keys are far above.
constexpr double kTiny = 1e-12;

double Norm(std::span<const float> row) {
  double sum = 0;
  for (const float x : row) sum += double{x} * x;
  return std::sqrt(sum);
}

}  // namespace

KeyShape ShapeOfKeys(std::span<const float> rows, size_t dim) {
  KeyShape out;
  const size_t tokens = rows.size() / dim;
  out.channel_rms.resize(dim);
  for (size_t t = 0; t < tokens; ++t) {
    const std::span<const float> row = rows.subspan(t * dim, dim);
    for (size_t d = 0; d < dim; ++d) out.channel_rms[d] += double{row[d]} * row[d];
    out.token_norms.push_back(Norm(row));
  }
  for (double& x : out.channel_rms) x = std::sqrt(x / static_cast<double>(tokens));
  std::vector<double> sorted = out.channel_rms;
  std::ranges::sort(sorted);
  out.channel_outlier = sorted.back() / std::max(sorted[dim / 2], kTiny);
  int64_t groups = 0;
  for (size_t t = 0; t + kProfileGroup <= tokens; t += kProfileGroup) {
    const auto [least, most] =
        std::ranges::minmax(std::span(out.token_norms).subspan(t, kProfileGroup));
    out.norm_imbalance += most / std::max(least, kTiny);
    ++groups;
  }
  if (groups > 0) out.norm_imbalance /= static_cast<double>(groups);
  return out;
}

Result<KeyProfile> MeasureKeys(LoadedModel& model, const KvPlan& plan,
                               std::span<const int32_t> prompt, int layer, int kv_head) {
  const ModelSpec& spec = model.spec();
  const int heads = spec.attention().num_kv_heads;
  const auto dim = static_cast<size_t>(spec.attention().head_dim);
  KeyProfile out;
  out.method = plan.Describe();
  out.layers = spec.history_layers();
  if (layer >= 0 && std::ranges::find(out.layers, layer) == out.layers.end()) {
    return Unexpected(InvalidArgument(
        fmt::format("--layer {}: the model has no such layer that keeps all tokens", layer)));
  }
  if (kv_head >= heads) {
    return Unexpected(InvalidArgument(
        fmt::format("--head {}: layers have KV heads 0 to {}", kv_head, heads - 1)));
  }
  if (std::ssize(prompt) < kProfileGroup) {
    return Unexpected(InvalidArgument(
        fmt::format("the prompt has {} tokens; norms are compared within groups of {}",
                    prompt.size(), kProfileGroup)));
  }
  const std::vector<std::vector<int32_t>> sequences = {{prompt.begin(), prompt.end()}};
  OSCAR_ASSIGN_OR_RETURN(const LayerErrorProbe probe,
                         LayerErrorProbe::Capture(model, std::span(sequences)));
  out.tokens = probe.num_tokens();
  const auto tokens = static_cast<size_t>(out.tokens);

  out.stages.push_back({"as computed", {}, {}});
  const KvSide& side = plan.method().k;
  const bool rotates = side.rotation != RotationKind::kNone;
  const bool scales = side.norm != TokenNorm::kNone;
  if (rotates) out.stages.push_back({"rotated", {}, {}});
  if (scales) out.stages.push_back({"divided by token norms", {}, {}});

  // Rows of every stage, of one layer: [stage][head][tokens * D].
  const auto stages_of = [&](size_t index) {
    std::vector<std::vector<std::vector<float>>> rows(1);
    const std::span<const float> keys = probe.Keys(static_cast<int>(index));
    const int slot = spec.layer(out.layers[index]).kv_slot;
    for (int h = 0; h < heads; ++h) {
      std::vector<float>& own = rows[0].emplace_back();
      for (size_t t = 0; t < tokens; ++t) {
        const auto row =
            keys.subspan((t * static_cast<size_t>(heads) + static_cast<size_t>(h)) * dim, dim);
        own.insert(own.end(), row.begin(), row.end());
      }
    }
    if (rotates) {
      rows.push_back(rows.back());
      for (int h = 0; h < heads; ++h) {
        std::vector<float>& own = rows.back()[static_cast<size_t>(h)];
        for (size_t t = 0; t < tokens; ++t) {
          plan.k(slot).Apply(h, std::span(own).subspan(t * dim, dim));
        }
      }
    }
    if (scales) {
      rows.push_back(rows.back());
      for (size_t t = 0; t < tokens; ++t) {
        double all = 0;
        for (const std::vector<float>& own : rows.back()) {
          const double norm = Norm(std::span(own).subspan(t * dim, dim));
          all += norm * norm;
        }
        for (std::vector<float>& own : rows.back()) {
          const std::span<float> row = std::span(own).subspan(t * dim, dim);
          const double norm = side.norm == TokenNorm::kPerHead ? Norm(row) : std::sqrt(all);
          if (!(norm > 0)) continue;  // stays as it is, as the method has it
          for (float& x : row) x = static_cast<float>(x / norm);
        }
      }
    }
    return rows;
  };

  for (size_t i = 0; i < out.layers.size(); ++i) {
    const auto rows = stages_of(i);
    for (size_t s = 0; s < rows.size(); ++s) {
      std::vector<KeyShape>& shapes = out.stages[s].shapes.emplace_back();
      for (const std::vector<float>& own : rows[s]) shapes.push_back(ShapeOfKeys(own, dim));
    }
  }
  // The one that stands out most, among those that were left open.
  double most = -1;
  size_t chosen = 0;
  for (size_t i = 0; i < out.layers.size(); ++i) {
    if (layer >= 0 && out.layers[i] != layer) continue;
    for (int h = 0; h < heads; ++h) {
      if (kv_head >= 0 && h != kv_head) continue;
      const double outlier = out.stages[0].shapes[i][static_cast<size_t>(h)].channel_outlier;
      if (outlier <= most) continue;
      most = outlier, chosen = i, out.layer = out.layers[i], out.kv_head = h;
    }
  }
  const auto rows = stages_of(chosen);
  for (size_t s = 0; s < rows.size(); ++s) {
    const std::vector<float>& own = rows[s][static_cast<size_t>(out.kv_head)];
    for (size_t t = 0; t < tokens; ++t) {
      std::vector<float>& magnitude = out.stages[s].magnitudes.emplace_back();
      for (size_t d = 0; d < dim; ++d) magnitude.push_back(std::abs(own[t * dim + d]));
    }
  }
  return out;
}

}  // namespace oscar
