#include "measure/head_sensitivity.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <optional>

#include "base/check.h"
#include "base/progress.h"
#include "engine/prompt_reader.h"
#include "measure/import_prompt.h"
#include "measure/text_metrics.h"
#include "quant/row_quantizer.h"
#include "simd/vec_ops.h"

namespace oscar {
namespace {

// Tokens of history that a sequence must have beside its windows.
constexpr int64_t kMinHistory = 2 * kPageTokens;
// A text has as many tokens behind that, at least; and of text without an answer so many are
// compared.
constexpr int64_t kMinTail = 48;
// Logits of the BF16 cache that are kept, and so many times as much of its rows.
constexpr int64_t kMaxKeptBytes = int64_t{1} << 30;
constexpr int64_t kRowsToLogits = 4;
// One query in so many gives the proxy.
constexpr size_t kQueryStride = 4;

// A sequence read on a BF16 cache up to its last tokens, and what the model says there.
struct ReadText {
  std::span<const int32_t> tokens;
  int64_t tail;  // tokens that are compared
  SequenceCache prefix;
  std::vector<float> logits;           // [tail, vocab]; end to end
  std::vector<double> k_cost, v_cost;  // [slots * kv_heads]; proxy
};

// What the proxy needs of one KV head: K and V before the compared tokens, and some of their
// queries.
struct HeadRows {
  std::vector<float> q, k, v;  // [n, D]
};
// Of a layer that is being read, chunk by chunk; gone with the text's last token.
struct LayerRows {
  size_t tokens = 0;
  std::vector<HeadRows> heads;
};

// The squared error of one row of a side at 2 bits, after rotation.
double RowError(const SideTransform& rotation, const RowSpec& spec, int head,
                std::span<const float> row) {
  std::array<float, kMaxHeadDim> x, back;
  std::array<uint8_t, kMaxHeadDim> codes;
  std::array<float, kMaxGroups> scale, min;
  const std::span<float> rotated(x.data(), row.size());
  std::copy(row.begin(), row.end(), x.begin());
  rotation.Apply(head, rotated);
  QuantizeRow(spec, rotated, codes, scale, min);
  DequantizeRow(spec, {codes.data(), row.size()}, scale, min, {back.data(), row.size()});
  double sum = 0;
  for (size_t i = 0; i < row.size(); ++i) sum += double{x[i] - back[i]} * (x[i] - back[i]);
  return sum;
}

class Meter {
 public:
  Meter(const SensitivityOptions& options, LoadedModel& exact, LoadedModel& stored)
      : options_(options), exact_(exact), stored_(stored), spec_(exact.spec()) {}

  Status Read(std::span<const std::vector<int32_t>> sequences, std::span<const int64_t> answers,
              Progress* progress);
  // KL of each text's compared tokens under a map, summed, and averaged over texts.
  Result<double> Kl(const BitMap& map) const;
  Sensitivities Proxy() const;

  int64_t num_sequences() const { return static_cast<int64_t>(texts_.size()); }
  int64_t num_tokens() const {
    int64_t sum = 0;
    for (const ReadText& text : texts_) sum += static_cast<int64_t>(text.tokens.size());
    return sum;
  }
  int64_t compared() const {
    int64_t sum = 0;
    for (const ReadText& text : texts_) sum += text.tail;
    return sum;
  }

 private:
  Status ReadOne(std::span<const int32_t> tokens, int64_t tail);
  Status ReadForProxy(std::span<const int32_t> tokens, int64_t tail);
  void AddProxy(size_t slot, size_t kv_head, HeadRows& rows, ReadText& text) const;

  const SensitivityOptions& options_;
  LoadedModel& exact_;
  LoadedModel& stored_;
  const ModelSpec& spec_;
  std::vector<ReadText> texts_;
};

Status Meter::Read(std::span<const std::vector<int32_t>> sequences,
                   std::span<const int64_t> answers, Progress* progress) {
  const CacheConfig& config = stored_.kv().cache();
  // Compared tokens see a history, so a text's first ones are not compared.
  const int64_t before = config.sink + config.recent + kMinHistory;
  const int64_t least = before + kMinTail;
  const int64_t eligible = std::ranges::count_if(
      sequences, [&](const auto& sequence) { return std::ssize(sequence) >= least; });
  // What is kept of a token: logits of those that are compared, rows of the others.
  const auto logits_bytes = static_cast<int64_t>(spec_.vocab_size) * int64_t{sizeof(float)};
  const int64_t row_bytes = spec_.num_kv_layers() * spec_.attention().kv_width() * int64_t{4};
  // All texts have a share of the logits, a short one at least.
  const int64_t share = kMaxKeptBytes / logits_bytes / std::max<int64_t>(eligible, 1);
  const int64_t most = options_.use_proxy
                           ? options_.tail
                           : std::clamp(share, std::min(kMinTail, options_.tail), options_.tail);
  int64_t bytes_of_logits = 0, bytes_of_rows = 0;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const std::vector<int32_t>& sequence = sequences[i];
    const int64_t length = std::ssize(sequence);
    if (length < least) continue;
    // Of text without an answer as many as short answers have, so that it weighs no more.
    const int64_t answer = i < answers.size() ? answers[i] : 0;
    const int64_t tail = std::min({answer > 0 ? answer : kMinTail, most, length - before});
    bytes_of_logits += tail * logits_bytes;
    bytes_of_rows += length * row_bytes;
    if (!options_.use_proxy && !texts_.empty() &&
        std::max(bytes_of_logits, bytes_of_rows / kRowsToLogits) > kMaxKeptBytes) {
      break;
    }
    OSCAR_RETURN_IF_ERROR(ReadOne(sequence, tail));
    if (progress != nullptr) progress->Add(sequence.size());
  }
  if (!texts_.empty()) return {};
  return OutOfRange(fmt::format(
      "sensitivities need texts of {} tokens and more, which leave the BF16 windows; raise "
      "--tokens or --max-length, give longer ones with --data, or leave them out with "
      "--sensitivity none",
      least));
}

Status Meter::ReadOne(std::span<const int32_t> tokens, int64_t tail) {
  if (options_.use_proxy) return ReadForProxy(tokens, tail);
  const auto head = static_cast<int64_t>(tokens.size()) - tail;
  ReadText text{tokens, tail, SequenceCache(exact_.kv().cache(), exact_.pool()), {}, {}, {}};
  PromptReader reader(exact_.model(), text.prefix, tokens.first(static_cast<size_t>(head)));
  OSCAR_RETURN_IF_ERROR(reader.ReadAll());
  SequenceCache whole = text.prefix.Fork();
  PromptReader rest(exact_.model(), whole, tokens, tail);
  while (!rest.done()) {
    OSCAR_RETURN_IF_ERROR(rest.ReadChunk());
    text.logits.insert(text.logits.end(), rest.logits().begin(), rest.logits().end());
  }
  texts_.push_back(std::move(text));
  return {};
}

Status Meter::ReadForProxy(std::span<const int32_t> tokens, int64_t tail) {
  const AttentionSpec& attention = spec_.attention();
  const auto dim = static_cast<size_t>(attention.head_dim);
  const auto heads = static_cast<size_t>(attention.num_kv_heads);
  const auto group = static_cast<size_t>(attention.num_heads) / heads;
  const std::vector<bool> has_history = spec_.slots_with_history();
  const size_t prefix = tokens.size() - static_cast<size_t>(tail);
  ReadText text{tokens, tail, SequenceCache(exact_.kv().cache(), exact_.pool()), {}, {}, {}};
  text.k_cost.resize(has_history.size() * heads);
  text.v_cost.resize(has_history.size() * heads);
  std::vector<LayerRows> layers(has_history.size());
  const auto take = [&](int layer, size_t, std::span<const float> q, std::span<const float> k,
                        std::span<const float> v) {
    const auto slot = static_cast<size_t>(spec_.layer(layer).kv_slot);
    if (!has_history[slot]) return;
    LayerRows& rows = layers[slot];
    rows.heads.resize(heads);
    const size_t count = k.size() / (heads * dim);
    for (size_t t = 0; t < count; ++t, ++rows.tokens) {
      const bool compared = rows.tokens >= prefix && (rows.tokens - prefix) % kQueryStride == 0;
      for (size_t h = 0; h < heads; ++h) {
        HeadRows& head = rows.heads[h];
        const size_t at = (t * heads + h) * dim;
        if (rows.tokens < prefix) {
          head.k.insert(head.k.end(), k.begin() + at, k.begin() + at + dim);
          head.v.insert(head.v.end(), v.begin() + at, v.begin() + at + dim);
        }
        if (!compared) continue;
        const auto from = q.begin() + (t * heads + h) * group * dim;
        head.q.insert(head.q.end(), from, from + group * dim);
      }
    }
    if (rows.tokens < tokens.size()) return;
    exact_.threads().ParallelFor(static_cast<int64_t>(heads), [&](int64_t h, int) {
      AddProxy(slot, static_cast<size_t>(h), rows.heads[static_cast<size_t>(h)], text);
    });
    rows = {};
  };
  OSCAR_RETURN_IF_ERROR(exact_.model().SetTap(take));
  PromptReader reader(exact_.model(), text.prefix, tokens);
  const Status status = reader.ReadAll();
  OSCAR_RETURN_IF_ERROR(exact_.model().SetTap({}));
  OSCAR_RETURN_IF_ERROR(status);
  text.prefix.Trim(0);
  texts_.push_back(std::move(text));
  return {};
}

void Meter::AddProxy(size_t slot, size_t kv_head, HeadRows& rows, ReadText& text) const {
  const KvPlan& plan = stored_.kv();
  const auto dim = static_cast<size_t>(spec_.attention().head_dim);
  const double scale = spec_.attention().softmax_scale;
  // As a cache would keep them.
  for (std::vector<float>* side : {&rows.k, &rows.v}) {
    for (float& x : *side) x = ToFloat(ToBf16(x));
  }
  const std::vector<float>&k = rows.k, &v = rows.v;
  const auto length = static_cast<int64_t>(k.size() / dim);
  const int64_t first = plan.cache().sink, end = length - plan.cache().recent;
  std::vector<double> k_error(static_cast<size_t>(length)), v_error(k_error.size());
  for (int64_t t = first; t < end; ++t) {
    const auto i = static_cast<size_t>(t);
    const auto layer = static_cast<int>(slot), head = static_cast<int>(kv_head);
    k_error[i] = RowError(plan.k(layer), plan.method().k.rows, head, {k.data() + i * dim, dim});
    v_error[i] = RowError(plan.v(layer), plan.method().v.rows, head, {v.data() + i * dim, dim});
  }
  std::vector<double> p(static_cast<size_t>(length)), out(dim);
  double k_cost = 0, v_cost = 0;
  const size_t count = rows.q.size() / dim;
  for (size_t n = 0; n < count; ++n) {
    const float* q = rows.q.data() + n * dim;
    double largest = -1e300, total = 0, q_square = 0;
    for (size_t d = 0; d < dim; ++d) q_square += double{q[d]} * q[d];
    for (size_t t = 0; t < p.size(); ++t) {
      double dot = 0;
      for (size_t d = 0; d < dim; ++d) dot += double{q[d]} * k[t * dim + d];
      p[t] = dot * scale;
      largest = std::max(largest, p[t]);
    }
    for (double& x : p) total += x = std::exp(x - largest);
    std::fill(out.begin(), out.end(), 0.0);
    double noise = 0, v_noise = 0;
    for (size_t t = 0; t < p.size(); ++t) {
      p[t] /= total;
      for (size_t d = 0; d < dim; ++d) out[d] += p[t] * v[t * dim + d];
      noise += p[t] * (1 - p[t]) * k_error[t];
      v_noise += p[t] * p[t] * v_error[t];
    }
    double o_square = 1e-30;
    for (const double x : out) o_square += x * x;
    k_cost += 0.5 * scale * scale * q_square / static_cast<double>(dim) * noise;
    v_cost += 0.5 * v_noise / o_square;
  }
  const size_t index = slot * static_cast<size_t>(spec_.attention().num_kv_heads) + kv_head;
  text.k_cost[index] = k_cost / static_cast<double>(std::max<size_t>(count, 1));
  text.v_cost[index] = v_cost / static_cast<double>(std::max<size_t>(count, 1));
}

Result<double> Meter::Kl(const BitMap& map) const {
  // Rotations are the loaded plan's; only bits differ.
  OSCAR_ASSIGN_OR_RETURN(const std::unique_ptr<KvPlan> plan, stored_.kv().WithBits(map));
  PagePool pool(stored_.pool().budget(), plan->host_sealer());
  const auto vocab = static_cast<size_t>(spec_.vocab_size);
  double sum = 0;
  for (const ReadText& text : texts_) {
    SequenceCache cache(plan->cache(), pool);
    OSCAR_RETURN_IF_ERROR(ImportPrompt(text.prefix, *plan, spec_.num_kv_layers(),
                                       spec_.attention().num_kv_heads, spec_.attention().head_dim,
                                       stored_.threads(), cache));
    OSCAR_RETURN_IF_ERROR(cache.SealForGeneration(stored_.threads()));
    PromptReader reader(stored_.model(), cache, text.tokens, text.tail);
    double of_text = 0;
    size_t row = 0;
    while (!reader.done()) {
      OSCAR_RETURN_IF_ERROR(reader.ReadChunk());
      const std::span<const float> logits = reader.logits();
      std::vector<double> rows(logits.size() / vocab);
      stored_.threads().ParallelFor(static_cast<int64_t>(rows.size()), [&](int64_t i, int) {
        const auto at = static_cast<size_t>(i) * vocab;
        rows[static_cast<size_t>(i)] = Divergence(
            std::span(text.logits).subspan(row * vocab + at, vocab), logits.subspan(at, vocab));
      });
      for (const double kl : rows) of_text += kl;
      row += rows.size();
    }
    sum += of_text;
  }
  return sum / static_cast<double>(texts_.size());
}

Sensitivities Meter::Proxy() const {
  const auto heads = static_cast<size_t>(spec_.attention().num_kv_heads);
  Sensitivities out;
  out.measure = "proxy";
  for (const int id : spec_.history_layers()) {
    const int slot = spec_.layer(id).kv_slot;
    auto& layer = out.layers[id];
    for (size_t h = 0; h < heads; ++h) {
      HeadSensitivity& head = layer.emplace_back();
      for (const ReadText& text : texts_) {
        head.k += text.k_cost[static_cast<size_t>(slot) * heads + h];
        head.v += text.v_cost[static_cast<size_t>(slot) * heads + h];
      }
      head.k /= static_cast<double>(texts_.size());
      head.v /= static_cast<double>(texts_.size());
    }
  }
  return out;
}

std::vector<double> Flat(const Sensitivities& from) {
  std::vector<double> out;
  for (const auto& [id, heads] : from.layers) {
    for (const HeadSensitivity& head : heads) out.insert(out.end(), {head.k, head.v});
  }
  return out;
}

std::vector<double> Ranks(const std::vector<double>& values) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return values[a] < values[b]; });
  std::vector<double> ranks(values.size());
  for (size_t i = 0; i < order.size();) {
    size_t end = i + 1;
    while (end < order.size() && values[order[end]] == values[order[i]]) ++end;
    for (size_t j = i; j < end; ++j) ranks[order[j]] = 0.5 * static_cast<double>(i + end - 1);
    i = end;
  }
  return ranks;
}

}  // namespace

Result<SensitivityResult> MeasureSensitivities(const SensitivityOptions& options,
                                               std::span<const std::vector<int32_t>> sequences,
                                               std::span<const int64_t> answers) {
  ModelOptions model_options = options.model;
  model_options.kv = "oscar+";
  model_options.bits = std::nullopt;
  // Passes over pages of many maps run where pages are sealed for any map, on the host; the proxy
  // needs rows of K, V and q alone.
  if (!options.use_proxy) model_options.device = Device::kCpu;
  if (model_options.rotation.empty()) model_options.rotation = "none";
  ModelOptions plain = model_options;
  plain.kv = "bf16";
  plain.rotation.clear();
  plain.group_dims = plain.sink = plain.recent = std::nullopt;
  plain.k_clip = plain.v_clip = std::nullopt;
  OSCAR_ASSIGN_OR_RETURN(const std::unique_ptr<LoadedModel> exact, LoadedModel::Load(plain));
  std::unique_ptr<LoadedModel> stored;
  if (options.use_proxy) {
    OSCAR_ASSIGN_OR_RETURN(stored, LoadedModel::Plan(model_options));
  } else {
    OSCAR_ASSIGN_OR_RETURN(stored, LoadedModel::Load(model_options));
  }
  const ModelSpec& spec = exact->spec();
  // The map of bits is of these.
  const std::vector<int> layers = spec.history_layers();
  const int slots = static_cast<int>(layers.size()), heads = spec.attention().num_kv_heads;
  std::optional<Progress> progress;
  if (options.show_progress) {
    uint64_t tokens = 0;
    for (const auto& sequence : sequences) tokens += sequence.size();
    progress.emplace("reading", tokens, "tokens");
  }
  Meter meter(options, *exact, *stored);
  OSCAR_RETURN_IF_ERROR(
      meter.Read(sequences, answers, progress.has_value() ? &*progress : nullptr));
  progress.reset();
  SensitivityResult out;
  out.num_sequences = meter.num_sequences();
  out.num_tokens = meter.num_tokens();
  if (options.use_proxy) {
    out.sensitivities = meter.Proxy();
  } else {
    const auto sides = static_cast<uint64_t>(2 * slots * heads);
    if (options.show_progress) progress.emplace("weighing heads", sides, "sides");
    const BitMap fine = UniformBits(slots, heads, kMaxMapBits);
    OSCAR_ASSIGN_OR_RETURN(out.kl_at_2, meter.Kl(UniformBits(slots, heads, kMinMapBits)));
    OSCAR_ASSIGN_OR_RETURN(out.kl_at_4, meter.Kl(fine));
    for (int slot = 0; slot < slots; ++slot) {
      auto& layer = out.sensitivities.layers[layers[static_cast<size_t>(slot)]];
      for (int h = 0; h < heads; ++h) {
        HeadSensitivity& head = layer.emplace_back();
        for (const auto& [bits, cost] :
             {std::pair{&HeadBits::k, &head.k}, std::pair{&HeadBits::v, &head.v}}) {
          BitMap map = fine;
          map[static_cast<size_t>(slot)][static_cast<size_t>(h)].*bits = kMinMapBits;
          OSCAR_ASSIGN_OR_RETURN(const double kl, meter.Kl(map));
          *cost = std::max(0.0, kl - out.kl_at_4);
          if (progress.has_value()) progress->Add(1);
        }
      }
    }
  }
  out.sensitivities.tokens = meter.compared();
  out.sensitivities.rotation = stored->kv().uses_calibrated_rotation() ? "calibrated" : "hadamard";
  out.sensitivities.model_fingerprint = fmt::format("{:016x}", exact->model().fingerprint());
  return out;
}

double RankCorrelation(const Sensitivities& a, const Sensitivities& b) {
  const std::vector<double> x = Ranks(Flat(a)), y = Ranks(Flat(b));
  OSCAR_CHECK(x.size() == y.size() && !x.empty());
  const double mean = 0.5 * static_cast<double>(x.size() - 1);
  double xy = 0, xx = 0, yy = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    xy += (x[i] - mean) * (y[i] - mean);
    xx += (x[i] - mean) * (x[i] - mean);
    yy += (y[i] - mean) * (y[i] - mean);
  }
  return xx > 0 && yy > 0 ? xy / std::sqrt(xx * yy) : 0.0;
}

}  // namespace oscar
