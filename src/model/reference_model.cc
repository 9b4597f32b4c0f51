#include "model/reference_model.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "base/half.h"

namespace oscar {
namespace {

// y[out] = W[out, in] x[in] + bias[out]
std::vector<float> Linear(std::span<const float> weight, std::span<const float> bias,
                          std::span<const float> x) {
  const size_t in = x.size(), out = weight.size() / in;
  std::vector<float> y(out);
  for (size_t o = 0; o < out; ++o) {
    const float* row = weight.data() + o * in;
    // Eight running sums let the compiler use vectors; the order is still fixed.
    float sums[8] = {};
    size_t i = 0;
    for (; i + 8 <= in; i += 8) {
      for (size_t j = 0; j < 8; ++j) sums[j] += row[i + j] * x[i + j];
    }
    float sum = 0.0f;
    for (float s : sums) sum += s;
    for (; i < in; ++i) sum += row[i] * x[i];
    y[o] = sum + (bias.empty() ? 0.0f : bias[o]);
  }
  return y;
}

void RmsNorm(std::span<float> x, std::span<const float> weight, float eps) {
  double squares = 0.0;
  for (float v : x) squares += static_cast<double>(v) * v;
  const auto scale =
      static_cast<float>(1.0 / std::sqrt(squares / static_cast<double>(x.size()) + eps));
  for (size_t i = 0; i < x.size(); ++i) x[i] = x[i] * scale * weight[i];
}

void ApplyRope(std::span<float> head, std::span<const float> cos, std::span<const float> sin) {
  const size_t half = cos.size();
  for (size_t i = 0; i < half; ++i) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cos[i] - b * sin[i];
    head[i + half] = b * cos[i] + a * sin[i];
  }
}

}  // namespace

Result<ReferenceModel> ReferenceModel::Load(const ModelSpec& spec, const WeightSource& source) {
  ReferenceModel model(spec);
  const int64_t hidden = spec.hidden, heads = int64_t{spec.num_heads} * spec.head_dim,
                kv = int64_t{spec.num_kv_heads} * spec.head_dim, middle = spec.intermediate;
  const auto load = [&](const std::string& pattern, int layer, std::vector<int64_t> shape,
                        std::vector<float>* out) -> Status {
    if (pattern.empty()) return {};
    size_t count = 1;
    for (int64_t d : shape) count *= static_cast<size_t>(d);
    out->resize(count);
    return source.Load(fmt::format(fmt::runtime(pattern), layer), shape, *out);
  };
  const TensorNames& names = spec.names;
  OSCAR_RETURN_IF_ERROR(load(names.embedding, 0, {spec.vocab_size, hidden}, &model.embedding_));
  OSCAR_RETURN_IF_ERROR(load(names.final_norm, 0, {hidden}, &model.final_norm_));
  OSCAR_RETURN_IF_ERROR(load(names.head, 0, {spec.vocab_size, hidden}, &model.head_));
  model.layers_.resize(static_cast<size_t>(spec.num_layers));
  for (int i = 0; i < spec.num_layers; ++i) {
    Layer& l = model.layers_[static_cast<size_t>(i)];
    const struct {
      const std::string& name;
      std::vector<int64_t> shape;
      std::vector<float>* out;
    } tensors[] = {
        {names.attention_norm, {hidden}, &l.attention_norm},
        {names.feed_forward_norm, {hidden}, &l.feed_forward_norm},
        {names.q, {heads, hidden}, &l.q},
        {names.k, {kv, hidden}, &l.k},
        {names.v, {kv, hidden}, &l.v},
        {names.o, {hidden, heads}, &l.o},
        {names.q_bias, {heads}, &l.q_bias},
        {names.k_bias, {kv}, &l.k_bias},
        {names.v_bias, {kv}, &l.v_bias},
        {names.o_bias, {hidden}, &l.o_bias},
        {names.q_norm, {spec.head_dim}, &l.q_norm},
        {names.k_norm, {spec.head_dim}, &l.k_norm},
        {names.gate, {middle, hidden}, &l.gate},
        {names.up, {middle, hidden}, &l.up},
        {names.down, {hidden, middle}, &l.down},
    };
    for (const auto& t : tensors) OSCAR_RETURN_IF_ERROR(load(t.name, i, t.shape, t.out));
  }
  return model;
}

std::vector<float> ReferenceModel::Forward(std::span<const int32_t> tokens, const Tap& tap,
                                           bool bf16_cache) const {
  const size_t count = tokens.size(), hidden = static_cast<size_t>(spec_.hidden),
               dim = static_cast<size_t>(spec_.head_dim);
  const auto kv_heads = static_cast<size_t>(spec_.num_kv_heads);
  const auto heads = static_cast<size_t>(spec_.num_heads);
  std::vector<std::vector<float>> x(count);
  for (size_t t = 0; t < count; ++t) {
    const float* row = embedding_.data() + static_cast<size_t>(tokens[t]) * hidden;
    x[t].assign(row, row + hidden);
  }
  std::vector<float> cos(dim / 2), sin(dim / 2);
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& l = layers_[i];
    std::vector<std::vector<float>> keys(count), values(count);
    for (size_t t = 0; t < count; ++t) {
      std::vector<float> h = x[t];
      RmsNorm(h, l.attention_norm, spec_.norm_eps);
      std::vector<float> q = Linear(l.q, l.q_bias, h);
      keys[t] = Linear(l.k, l.k_bias, h);
      values[t] = Linear(l.v, l.v_bias, h);
      const auto each_head = [&](std::vector<float>& rows, const std::vector<float>& norm) {
        if (norm.empty()) return;
        for (size_t at = 0; at < rows.size(); at += dim) {
          RmsNorm({rows.data() + at, dim}, norm, spec_.norm_eps);
        }
      };
      each_head(q, l.q_norm);
      each_head(keys[t], l.k_norm);
      if (tap) tap(static_cast<int>(i), static_cast<int64_t>(t), q, keys[t], values[t]);
      rope_.Fill(static_cast<int64_t>(t), cos, sin);
      for (size_t at = 0; at < q.size(); at += dim) ApplyRope({q.data() + at, dim}, cos, sin);
      for (size_t at = 0; at < keys[t].size(); at += dim) {
        ApplyRope({keys[t].data() + at, dim}, cos, sin);
      }
      if (bf16_cache) {
        for (float& x_k : keys[t]) x_k = ToFloat(ToBf16(x_k));
        for (float& x_v : values[t]) x_v = ToFloat(ToBf16(x_v));
      }
      std::vector<float> attended(heads * dim, 0.0f), weights(t + 1);
      for (size_t head = 0; head < heads; ++head) {
        const size_t kv = head / (heads / kv_heads) * dim;
        double total = 0.0;
        float largest = -INFINITY;
        for (size_t s = 0; s <= t; ++s) {
          double dot = 0.0;
          for (size_t d = 0; d < dim; ++d) {
            dot += static_cast<double>(q[head * dim + d]) * keys[s][kv + d];
          }
          weights[s] = static_cast<float>(dot / std::sqrt(static_cast<double>(dim)));
          largest = std::max(largest, weights[s]);
        }
        for (float& w : weights) total += w = std::exp(w - largest);
        for (size_t s = 0; s <= t; ++s) {
          const auto share = static_cast<float>(weights[s] / total);
          for (size_t d = 0; d < dim; ++d) attended[head * dim + d] += share * values[s][kv + d];
        }
      }
      const std::vector<float> out = Linear(l.o, l.o_bias, attended);
      for (size_t d = 0; d < hidden; ++d) x[t][d] += out[d];
    }
    for (size_t t = 0; t < count; ++t) {
      std::vector<float> h = x[t];
      RmsNorm(h, l.feed_forward_norm, spec_.norm_eps);
      std::vector<float> gate = Linear(l.gate, {}, h);
      const std::vector<float> up = Linear(l.up, {}, h);
      for (size_t d = 0; d < gate.size(); ++d) {
        gate[d] = gate[d] / (1.0f + std::exp(-gate[d])) * up[d];
      }
      const std::vector<float> down = Linear(l.down, {}, gate);
      for (size_t d = 0; d < hidden; ++d) x[t][d] += down[d];
    }
  }
  std::vector<float> logits;
  logits.reserve(count * static_cast<size_t>(spec_.vocab_size));
  for (size_t t = 0; t < count; ++t) {
    RmsNorm(x[t], final_norm_, spec_.norm_eps);
    const std::vector<float> row = Linear(head_.empty() ? embedding_ : head_, {}, x[t]);
    logits.insert(logits.end(), row.begin(), row.end());
  }
  return logits;
}

}  // namespace oscar
