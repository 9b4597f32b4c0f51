#include "reference/reference_backend.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "arch/rope.h"
#include "arch/router.h"
#include "base/check.h"
#include "base/half.h"
#include "numeric/delta_rule.h"

namespace oscar {
namespace {

using Rows = std::vector<std::vector<float>>;

// y[out] = W[out, in] x[in] + bias[out]
void AppendLinear(std::span<const float> weight, std::span<const float> bias,
                  std::span<const float> x, std::vector<float>* y) {
  const size_t in = x.size(), out = weight.size() / in;
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
    y->push_back(sum + (bias.empty() ? 0.0f : bias[o]));
  }
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

// A router's logits to scores.
void Score(RouterScore kind, std::vector<float>& x) {
  if (kind == RouterScore::kSigmoid) {
    for (float& v : x) v = static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(v))));
    return;
  }
  const float largest = *std::ranges::max_element(x);
  double sum = 0.0;
  for (float& v : x) sum += v = std::exp(v - largest);
  for (float& v : x) v = static_cast<float>(v / sum);
}

float Gated(const ExpertsSpec& experts, float gate, float up) {
  if (!experts.clamped.has_value()) return gate / (1.0f + std::exp(-gate)) * up;
  const ClampedGate& clamped = *experts.clamped;
  gate = std::min(gate, clamped.limit);
  up = std::clamp(up, -clamped.limit, clamped.limit);
  return (up + 1.0f) * gate / (1.0f + std::exp(-clamped.slope * gate));
}

// Keys and values of a sequence in fp32, [slot][position].
struct KeptRows : CacheAttachment {
  std::vector<Rows> keys, values;
};

class ReferenceBackend final : public Backend {
 public:
  ReferenceBackend(const ModelSpec& spec, const KvPlan& plan, ThreadPool& threads,
                   const ReferenceOptions& options)
      : Backend(spec, plan, threads),
        options_(options),
        table_(spec_),
        rope_(spec.rope_theta, spec.rope_scaling, spec_.attention().rotary_dims) {}

  Status Load(const WeightSource& source) {
    OSCAR_RETURN_IF_ERROR(
        CheckFeatures(spec_,
                      {Feature::kPartialRope, Feature::kQkNormAllHeads, Feature::kOutputGate,
                       Feature::kExperts, Feature::kLinearAttention, Feature::kSharedShare,
                       Feature::kClampedExperts, Feature::kSlidingWindow, Feature::kSinks},
                      "the reference"));
    OSCAR_RETURN_IF_ERROR(CheckTensors(source, table_));
    fingerprint_ = source.Fingerprint();
    for (const TensorDecl& tensor : table_.tensors()) {
      std::vector<float>& values = weights_[&tensor];
      values.resize(tensor.num_elements());
      OSCAR_RETURN_IF_ERROR(source.Load(tensor.name, tensor.shape, values));
      for (float& x : values) x += tensor.offset;
    }
    return {};
  }

  uint64_t weight_bytes() const override { return table_.num_parameters() * sizeof(float); }
  uint64_t weight_bytes_per_step() const override { return weight_bytes(); }
  uint64_t fingerprint() const override { return fingerprint_; }
  bool portable() const override { return true; }
  int max_batch_tokens() const override { return options_.max_batch_tokens; }
  int max_logit_rows() const override { return std::numeric_limits<int>::max(); }

  Status BeginPass(std::span<const ForwardItem> items, int padded) override {
    OSCAR_CHECK(padded == 0, "the reference records no steps");
    const BatchRows rows(items);
    rows_.resize(static_cast<size_t>(rows.rows));
    logit_rows_.clear();
    items_ = items;
    first_rows_ = rows.first;
    for (size_t i = 0; i < items.size(); ++i) {
      SequenceCache& cache = *items[i].cache;
      if (cache.attachment() == nullptr) {
        auto kept = std::make_unique<KeptRows>();
        kept->keys.resize(static_cast<size_t>(spec_.num_kv_layers()));
        kept->values.resize(kept->keys.size());
        cache.Attach(std::move(kept));
      }
      const auto first = static_cast<size_t>(rows.first[i]), count = items[i].tokens.size();
      for (size_t t = 0; t < count; ++t) {
        rows_[first + t] = {static_cast<KeptRows*>(cache.attachment()),
                            cache.length() + static_cast<int64_t>(t), items[i].tokens[t]};
      }
      for (size_t t = count - static_cast<size_t>(items[i].num_logits); t < count; ++t) {
        logit_rows_.push_back(first + t);
      }
    }
    for (Rows* activation : {&stream_, &qkv_, &attended_, &gated_}) {
      activation->assign(rows_.size(), {});
    }
    return {};
  }

  Status Embed() override {
    const auto hidden = static_cast<size_t>(spec_.hidden);
    for (size_t row = 0; row < rows_.size(); ++row) {
      const float* from =
          Weights(Role::kEmbedding).data() + static_cast<size_t>(rows_[row].token) * hidden;
      stream_[row].assign(from, from + hidden);
    }
    return {};
  }

  Status Linear(const LinearOp& op) override {
    const Rows& input = op.input == Activation::kStream     ? stream_
                        : op.input == Activation::kAttended ? attended_
                                                            : gated_;
    for (size_t row = 0; row < rows_.size(); ++row) {
      std::vector<float> x = input[row], y;
      if (op.norm.has_value()) RmsNorm(x, Weights(*op.norm, op.layer), spec_.norm_eps);
      for (size_t part = 0; part < PartsOf(op.matrix).size(); ++part) {
        std::span<const float> bias;
        if (!BiasesOf(op.matrix).empty()) bias = Weights(BiasesOf(op.matrix)[part], op.layer);
        AppendLinear(Weights(PartsOf(op.matrix)[part], op.layer), bias, x, &y);
      }
      if (op.matrix == LayerMatrix::kQkv) GatesLast(*spec_.layer(op.layer).attention(), &y);
      if (op.output == Activation::kQkv) {
        qkv_[row] = std::move(y);
      } else if (op.output == Activation::kGated) {
        const size_t middle = y.size() / 2;
        for (size_t d = 0; d < middle; ++d) y[d] = Silu(y[d]) * y[middle + d];
        y.resize(middle);
        const auto share = Weights(Role::kSharedShare, op.layer);
        if (op.matrix == LayerMatrix::kSharedGateUp && !share.empty()) {
          std::vector<float> gate;
          AppendLinear(share, {}, x, &gate);
          for (float& value : y) value *= Sigmoid(gate[0]);
        }
        gated_[row] = std::move(y);
      } else {
        for (size_t d = 0; d < y.size(); ++d) stream_[row][d] += y[d];
      }
    }
    return {};
  }

  Status Experts(int layer) override {
    const ExpertsSpec& experts = *spec_.layer(layer).experts();
    for (std::vector<float>& stream : stream_) {
      std::vector<float> x = stream, scores;
      RmsNorm(x, Weights(Role::kFeedForwardNorm, layer), spec_.norm_eps);
      AppendLinear(Weights(Role::kRouter, layer), Weights(Role::kRouterLogitBias, layer), x,
                   &scores);
      Score(experts.score, scores);
      std::vector<ExpertChoice> chosen(static_cast<size_t>(experts.experts_per_token));
      RouteToken(experts, scores, Weights(Role::kRouterBias, layer), chosen);
      for (const ExpertChoice& choice : chosen) {
        const int e = choice.expert;
        std::vector<float> gated, y;
        if (experts.alternates_gate_up) {
          std::vector<float> both;
          AppendLinear(Weights(Role::kExpertGateUp, layer, e),
                       Weights(Role::kExpertGateUpBias, layer, e), x, &both);
          for (size_t d = 0; d < both.size(); d += 2) {
            gated.push_back(Gated(experts, both[d], both[d + 1]));
          }
        } else {
          std::vector<float> up;
          AppendLinear(Weights(Role::kExpertGate, layer, e), {}, x, &gated);
          AppendLinear(Weights(Role::kExpertUp, layer, e), {}, x, &up);
          for (size_t d = 0; d < up.size(); ++d) gated[d] = Gated(experts, gated[d], up[d]);
        }
        AppendLinear(Weights(Role::kExpertDown, layer, e), Weights(Role::kExpertDownBias, layer, e),
                     gated, &y);
        for (size_t d = 0; d < y.size(); ++d) stream[d] += choice.weight * y[d];
      }
    }
    return {};
  }

  Status WriteKv(int layer, int slot) override {
    const AttentionSpec& attention = *spec_.layer(layer).attention();
    const auto q = static_cast<ptrdiff_t>(attention.q_width()),
               kv = static_cast<ptrdiff_t>(attention.kv_width());
    for (size_t row = 0; row < rows_.size(); ++row) {
      NormAndRope(layer, row, qkv_[row]);
      std::vector<float> keys(qkv_[row].begin() + q, qkv_[row].begin() + q + kv);
      std::vector<float> values(qkv_[row].begin() + q + kv, qkv_[row].begin() + q + 2 * kv);
      if (options_.bf16_cache) {
        for (float& x : keys) x = ToFloat(ToBf16(x));
        for (float& x : values) x = ToFloat(ToBf16(x));
      }
      KeptRows& kept = *rows_[row].kept;
      const auto at = static_cast<size_t>(rows_[row].position);
      Rows& all_keys = kept.keys[static_cast<size_t>(slot)];
      Rows& all_values = kept.values[static_cast<size_t>(slot)];
      all_keys.resize(at + 1);  // what was trimmed goes
      all_values.resize(at + 1);
      all_keys[at] = std::move(keys);
      all_values[at] = std::move(values);
    }
    return {};
  }

  Status Attend(int layer, int slot) override {
    const AttentionSpec& attention = *spec_.layer(layer).attention();
    const auto dim = static_cast<size_t>(attention.head_dim);
    for (size_t row = 0; row < rows_.size(); ++row) {
      const Rows& keys = rows_[row].kept->keys[static_cast<size_t>(slot)];
      const Rows& values = rows_[row].kept->values[static_cast<size_t>(slot)];
      const auto count = static_cast<size_t>(rows_[row].position) + 1;
      const std::vector<float>& q = qkv_[row];
      std::vector<float>& out = attended_[row];
      out.assign(static_cast<size_t>(attention.q_width()), 0.0f);
      const size_t begin =
          attention.sliding_window == 0
              ? 0
              : count - std::min(count, static_cast<size_t>(attention.sliding_window));
      const std::span<const float> sinks = Weights(Role::kSinks, layer);
      std::vector<float> weights(count);
      for (int head = 0; head < attention.num_heads; ++head) {
        const size_t at = static_cast<size_t>(head) * dim;
        const size_t kv = static_cast<size_t>(head / attention.queries_per_kv_head()) * dim;
        double total = 0.0;
        float largest = sinks.empty() ? -INFINITY : sinks[static_cast<size_t>(head)];
        for (size_t s = begin; s < count; ++s) {
          double dot = 0.0;
          for (size_t d = 0; d < dim; ++d) {
            dot += static_cast<double>(q[at + d]) * keys[s][kv + d];
          }
          weights[s] = static_cast<float>(dot * attention.softmax_scale);
          largest = std::max(largest, weights[s]);
        }
        if (!sinks.empty()) total = std::exp(sinks[static_cast<size_t>(head)] - largest);
        for (size_t s = begin; s < count; ++s) total += weights[s] = std::exp(weights[s] - largest);
        for (size_t s = begin; s < count; ++s) {
          const auto share = static_cast<float>(weights[s] / total);
          for (size_t d = 0; d < dim; ++d) out[at + d] += share * values[s][kv + d];
        }
      }
      const size_t gates = q.size() - static_cast<size_t>(attention.gate_width());
      for (size_t d = gates; d < q.size(); ++d) out[d - gates] *= Sigmoid(q[d]);
    }
    return {};
  }

  // Prompts in chunks, a generated token alone: the two forms of the rule.
  Status AdvanceState(int layer, int slot) override {
    const LinearAttentionSpec& linear = *spec_.layer(layer).linear_attention();
    for (size_t i = 0; i < items_.size(); ++i) {
      auto* const states = reinterpret_cast<float*>(items_[i].cache->state().data());
      const std::span<float> state(
          states + static_cast<size_t>(slot) * linear.state_bytes() / sizeof(float),
          linear.state_bytes() / sizeof(float));
      Advance(layer, linear, static_cast<size_t>(first_rows_[i]), items_[i].tokens.size(), state);
    }
    return {};
  }

  Status ReadQkv(int layer, std::span<float> out) override {
    for (size_t row = 0; row < rows_.size(); ++row) {
      std::vector<float> qkv = qkv_[row];
      NormAndRope(layer, row, qkv);
      std::ranges::copy(qkv, out.begin() + static_cast<ptrdiff_t>(row * qkv.size()));
    }
    return {};
  }

  Status Logits(int first, int count, float* out) override {
    const Role head = spec_.tied_head ? Role::kEmbedding : Role::kHead;
    for (int i = first; i < first + count; ++i) {
      std::vector<float> x = stream_[logit_rows_[static_cast<size_t>(i)]], y;
      RmsNorm(x, Weights(Role::kFinalNorm), spec_.norm_eps);
      AppendLinear(Weights(head), {}, x, &y);
      out = std::ranges::copy(y, out).out;
    }
    return {};
  }

 private:
  struct Row {
    KeptRows* kept = nullptr;
    int64_t position = 0;
    int32_t token = 0;
  };

  static float Sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
  static float Silu(float x) { return x / (1.0f + std::exp(-x)); }

  // Heads' queries and gates alternate in the tensor; here the gates come last.
  static void GatesLast(const AttentionSpec& attention, std::vector<float>* y) {
    if (!attention.has_output_gate) return;
    const auto dim = static_cast<size_t>(attention.head_dim);
    const auto heads = static_cast<size_t>(attention.num_heads);
    const auto both = y->begin() + static_cast<ptrdiff_t>(2 * heads * dim);
    std::vector<float> queries, gates;
    for (size_t h = 0; h < heads; ++h) {
      const auto at = y->begin() + static_cast<ptrdiff_t>(2 * h * dim);
      queries.insert(queries.end(), at, at + static_cast<ptrdiff_t>(dim));
      gates.insert(gates.end(), at + static_cast<ptrdiff_t>(dim),
                   at + static_cast<ptrdiff_t>(2 * dim));
    }
    queries.insert(queries.end(), both, y->end());
    queries.insert(queries.end(), gates.begin(), gates.end());
    *y = std::move(queries);
  }

  // Linear attention over `count` rows of one sequence, from qkv_ to attended_.
  void Advance(int layer, const LinearAttentionSpec& linear, size_t first, size_t count,
               std::span<float> state) {
    const auto channels = static_cast<size_t>(linear.conv_channels());
    const auto kernel = static_cast<size_t>(linear.conv_kernel);
    const auto dk = static_cast<size_t>(linear.key_dim), dv = static_cast<size_t>(linear.value_dim);
    const std::span<const float> taps = Weights(Role::kStateConv, layer);
    // Inputs of the convolution, those before the first row too, in the order of its channels.
    Rows inputs(kernel - 1 + count);
    for (size_t j = 0; j + 1 < kernel; ++j) {
      const float* const kept = state.data() + linear.matrix_floats() + j * channels;
      inputs[j].assign(kept, kept + channels);
    }
    for (size_t t = 0; t < count; ++t) {
      const auto take = [&](int from, size_t size) {
        const auto at = qkv_[first + t].begin() + from;
        auto& to = inputs[kernel - 1 + t];
        to.insert(to.end(), at, at + static_cast<ptrdiff_t>(size));
      };
      for (int head = 0; head < linear.key_heads; ++head) take(linear.QOf(head), dk);
      for (int head = 0; head < linear.key_heads; ++head) take(linear.KOf(head), dk);
      for (int head = 0; head < linear.value_heads; ++head) take(linear.VOf(head), dv);
    }
    std::vector<std::vector<double>> convolved(count, std::vector<double>(channels));
    for (size_t t = 0; t < count; ++t) {
      for (size_t c = 0; c < channels; ++c) {
        double sum = 0.0;
        for (size_t j = 0; j < kernel; ++j) {
          sum += static_cast<double>(taps[c * kernel + j]) * inputs[t + j][c];
        }
        convolved[t][c] = sum / (1.0 + std::exp(-sum));
      }
    }
    for (size_t j = 0; j + 1 < kernel; ++j) {
      std::ranges::copy(
          inputs[count + j],
          state.begin() + static_cast<ptrdiff_t>(linear.matrix_floats() + j * channels));
    }
    for (size_t t = 0; t < count; ++t) {
      attended_[first + t].assign(static_cast<size_t>(linear.value_width()), 0.0f);
    }
    for (int head = 0; head < linear.value_heads; ++head) {
      AdvanceHead(layer, linear, head, first, convolved,
                  state.subspan(static_cast<size_t>(head) * dk * dv, dk * dv));
    }
  }

  void AdvanceHead(int layer, const LinearAttentionSpec& linear, int head, size_t first,
                   const std::vector<std::vector<double>>& convolved, std::span<float> kept) {
    const auto dk = static_cast<size_t>(linear.key_dim), dv = static_cast<size_t>(linear.value_dim);
    const auto index = static_cast<size_t>(head);
    const size_t key = index / static_cast<size_t>(linear.values_per_key_head()) * dk;
    const double rate = std::exp(static_cast<double>(Weights(Role::kStateDecay, layer)[index]));
    const double bias = Weights(Role::kStateStepBias, layer)[index];
    std::vector<double> q, k, v, log_decay, beta;
    const auto take = [&](const std::vector<double>& row, size_t at, double scale,
                          std::vector<double>* to) {
      double squares = 1e-6;
      for (size_t d = at; d < at + dk; ++d) squares += row[d] * row[d];
      for (size_t d = at; d < at + dk; ++d) to->push_back(row[d] / std::sqrt(squares) * scale);
    };
    for (size_t t = 0; t < convolved.size(); ++t) {
      take(convolved[t], key, 1.0 / std::sqrt(static_cast<double>(dk)), &q);
      take(convolved[t], static_cast<size_t>(linear.key_width()) + key, 1.0, &k);
      const auto at =
          convolved[t].begin() +
          static_cast<ptrdiff_t>(2 * static_cast<size_t>(linear.key_width()) + index * dv);
      v.insert(v.end(), at, at + static_cast<ptrdiff_t>(dv));
      const std::vector<float>& row = qkv_[first + t];
      const double a = row[static_cast<size_t>(linear.AOf(head))] + bias;
      log_decay.push_back(-rate * (a > 20.0 ? a : std::log1p(std::exp(a))));
      beta.push_back(1.0 / (1.0 + std::exp(-row[static_cast<size_t>(linear.BOf(head))])));
    }
    std::vector<double> state(kept.begin(), kept.end()), out(v.size());
    constexpr int kChunk = 64;
    if (convolved.size() == 1) {
      DeltaRuleRecurrent({q, k, v, log_decay, beta}, state, out);
    } else {
      DeltaRuleChunked({q, k, v, log_decay, beta}, kChunk, state, out);
    }
    std::ranges::transform(state, kept.begin(), [](double x) { return static_cast<float>(x); });
    for (size_t t = 0; t < convolved.size(); ++t) {
      float* const o = attended_[first + t].data() + index * dv;
      for (size_t d = 0; d < dv; ++d) o[d] = static_cast<float>(out[t * dv + d]);
      RmsNorm({o, dv}, Weights(Role::kStateNorm, layer), spec_.norm_eps);
      const float* const z = qkv_[first + t].data() + linear.ZOf(head);
      for (size_t d = 0; d < dv; ++d) o[d] *= Silu(z[d]);
    }
  }

  // Empty where the model has no such tensor.
  std::span<const float> Weights(Role role, int layer = -1, int expert = -1) const {
    const TensorDecl* tensor = table_.Find(role, layer, expert);
    return tensor == nullptr ? std::span<const float>() : weights_.at(tensor);
  }

  void NormAndRope(int layer, size_t row, std::vector<float>& qkv) const {
    const AttentionSpec& attention = *spec_.layer(layer).attention();
    const auto dim = static_cast<size_t>(attention.head_dim);
    std::vector<float> cos(static_cast<size_t>(rope_.half())), sin(cos.size());
    rope_.Fill(rows_[row].position, cos, sin);
    if (attention.qk_norm == QkNorm::kAllHeads) {
      const auto q = static_cast<size_t>(attention.q_width());
      const auto kv = static_cast<size_t>(attention.kv_width());
      RmsNorm(std::span(qkv).first(q), Weights(Role::kQNorm, layer), spec_.norm_eps);
      RmsNorm(std::span(qkv).subspan(q, kv), Weights(Role::kKNorm, layer), spec_.norm_eps);
    }
    for (int head = 0; head < attention.num_heads + attention.num_kv_heads; ++head) {
      const std::span<float> x(qkv.data() + static_cast<size_t>(head) * dim, dim);
      if (attention.qk_norm == QkNorm::kPerHead) {
        const bool is_q = head < attention.num_heads;
        RmsNorm(x, Weights(is_q ? Role::kQNorm : Role::kKNorm, layer), spec_.norm_eps);
      }
      ApplyRope(x, cos, sin);
    }
  }

  const ReferenceOptions options_;
  const TensorTable table_;
  const RopeTable rope_;
  uint64_t fingerprint_ = 0;
  std::map<const TensorDecl*, std::vector<float>> weights_;
  std::vector<Row> rows_;
  std::vector<size_t> logit_rows_;
  std::span<const ForwardItem> items_;
  std::vector<int> first_rows_;
  Rows stream_, qkv_, attended_, gated_;
};

}  // namespace

Result<std::unique_ptr<Backend>> MakeReferenceBackend(const ModelSpec& spec,
                                                      const WeightSource& source,
                                                      const KvPlan& plan, ThreadPool& threads,
                                                      const ReferenceOptions& options) {
  auto backend = std::make_unique<ReferenceBackend>(spec, plan, threads, options);
  OSCAR_RETURN_IF_ERROR(backend->Load(source));
  return backend;
}

}  // namespace oscar
