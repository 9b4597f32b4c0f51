#include "backend/kv_plan.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "base/check.h"
#include "cache/method_layout.h"
#include "cache/sequence_cache.h"
#include "numeric/hadamard.h"

namespace oscar {
namespace {

// Bits of every head of a method that takes them; `meta` is what metadata adds to a number.
Result<BitMap> MakeBitMap(const KvPlanOptions& options, int num_slots, int kv_heads, double meta) {
  const bool is_known = options.sensitivities.has_value();
  const double wanted =
      options.bits.value_or(kMinMapBits + meta + (is_known ? kDefaultExtraBits : 0.0));
  const double code_bits = wanted - meta;
  if (!(code_bits >= kMinMapBits - 1e-9 && code_bits <= kMaxMapBits + 1e-9)) {
    return Unexpected(InvalidArgument(fmt::format("--bits {}: must lie between {:.4g} and {:.4g}",
                                                  wanted, kMinMapBits + meta, kMaxMapBits + meta))
                          .WithParam("bits"));
  }
  if (is_known) {
    const SensitivityMap& map = *options.sensitivities;
    const bool fits = std::cmp_equal(map.size(), num_slots) &&
                      std::ranges::all_of(map, [&](const std::vector<HeadSensitivity>& layer) {
                        return std::cmp_equal(layer.size(), kv_heads);
                      });
    if (!fits) {
      return Unexpected(InvalidArgument(fmt::format(
          "the sensitivities are not those of {} layers and {} KV heads", num_slots, kv_heads)));
    }
    return ChooseBits(map, std::clamp<double>(code_bits, kMinMapBits, kMaxMapBits));
  }
  const double whole = std::round(code_bits);
  if (std::fabs(code_bits - whole) > 1e-6) {
    return Unexpected(
        InvalidArgument(fmt::format("--bits {}: which heads get them is not known: measure it with "
                                    "`oscar calibrate` and pass --rotation, or give all heads "
                                    "alike {:.4g}, {:.4g} or {:.4g}",
                                    wanted, 2 + meta, 3 + meta, 4 + meta))
            .WithParam("bits"));
  }
  return UniformBits(num_slots, kv_heads, static_cast<int>(whole));
}

SideTransform MakeTransform(RotationKind kind, int hadamard_block, const SideRotation* rotation) {
  SideTransform transform;
  transform.kind = kind;
  transform.hadamard_block = hadamard_block;
  if (kind == RotationKind::kCalibrated) {
    transform.num_matrices = rotation->num_heads;
    transform.matrices = rotation->matrices;
  }
  return transform;
}

}  // namespace

std::span<const float> SideTransform::MatrixOf(int kv_head, int head_dim) const {
  const auto size = static_cast<size_t>(head_dim) * static_cast<size_t>(head_dim);
  return {matrices.data() + (num_matrices == 1 ? 0 : static_cast<size_t>(kv_head)) * size, size};
}

void SideTransform::Apply(int kv_head, std::span<float> x) const {
  switch (kind) {
    case RotationKind::kNone:
      return;
    case RotationKind::kHadamard:
      FastHadamard(x);
      return;
    case RotationKind::kBlockHadamard:
      FastHadamardBlocks(x, hadamard_block);
      return;
    case RotationKind::kCalibrated: {
      const std::span<const float> matrix = MatrixOf(kv_head, static_cast<int>(x.size()));
      std::array<float, kMaxHeadDim> out{};
      for (size_t i = 0; i < x.size(); ++i) {
        for (size_t j = 0; j < x.size(); ++j) out[j] += x[i] * matrix[i * x.size() + j];
      }
      std::copy_n(out.begin(), x.size(), x.begin());
      return;
    }
  }
}

void SideTransform::Undo(int kv_head, std::span<float> x) const {
  if (kind != RotationKind::kCalibrated) return Apply(kv_head, x);  // they are symmetric
  const std::span<const float> matrix = MatrixOf(kv_head, static_cast<int>(x.size()));
  std::array<float, kMaxHeadDim> out{};
  for (size_t i = 0; i < x.size(); ++i) {
    for (size_t j = 0; j < x.size(); ++j) out[i] += x[j] * matrix[i * x.size() + j];
  }
  std::copy_n(out.begin(), x.size(), x.begin());
}

Result<std::unique_ptr<KvPlan>> KvPlan::Make(const ModelSpec& spec, const KvPlanOptions& options,
                                             BlockEncoder encoder) {
  const AttentionSpec& attention = spec.attention();
  const int head_dim = attention.head_dim, kv_heads = attention.num_kv_heads;
  const std::vector<int> layers = spec.kv_layers();  // by slot
  const auto num_slots = static_cast<int>(layers.size());
  // Layers with a sliding window never quantise what they see: no rotation, no bits, no blocks.
  const std::vector<int> history = spec.history_layers();
  const std::vector<bool> has_history = spec.slots_with_history();
  const auto num_history = static_cast<int>(history.size());
  const int64_t window = spec.max_window();
  KvMethodOptions method_options;
  method_options.name = options.method;
  method_options.head_dim = head_dim;
  method_options.has_rotation = options.rotation.has_value();
  method_options.group_dims = options.group_dims;
  method_options.sink_tokens = options.sink;
  method_options.recent_tokens = options.recent;
  method_options.k_clip = options.k_clip;
  method_options.v_clip = options.v_clip;
  std::unique_ptr<KvPlan> plan(new KvPlan);
  OSCAR_ASSIGN_OR_RETURN(plan->method_, MakeKvMethod(method_options));
  const KvMethod& method = plan->method_;
  OSCAR_RETURN_IF_ERROR(
      CheckBlockShape(head_dim, method.is_quantized ? method.v.rows.group_dims : head_dim));
  plan->kv_heads_ = kv_heads;
  plan->head_dim_ = head_dim;
  plan->num_slots_ = num_slots;
  plan->num_history_ = num_history;
  plan->encoder_ = encoder;
  plan->calibrated_ = method.k.rotation == RotationKind::kCalibrated ||
                      method.v.rotation == RotationKind::kCalibrated;
  if (options.rotation.has_value()) {
    OSCAR_RETURN_IF_ERROR(CheckRotationFits(*options.rotation, history, head_dim, kv_heads,
                                            /*model_fingerprint=*/"", /*unused_ids=*/layers));
  }

  OSCAR_ASSIGN_OR_RETURN(const KvMethodInfo info, FindKvMethod(options.method));
  if (info.takes_bits) {
    OSCAR_ASSIGN_OR_RETURN(plan->bit_map_, MakeBitMap(options, num_history, kv_heads,
                                                      32.0 / method.k.rows.group_dims));
    plan->has_sensitivities_ = options.sensitivities.has_value();
  } else if (options.bits.has_value()) {
    return Unexpected(InvalidArgument(fmt::format("--bits {}: the bits of {} are its own; leave it "
                                                  "out, or choose oscar+",
                                                  *options.bits, method.name))
                          .WithParam("bits"));
  }

  std::vector<std::vector<BlockLayout>> sealed_layouts;
  std::vector<std::vector<BlockRules>> rules;
  const BlockLayout open(BlockKind::kBf16, options.order, head_dim, head_dim);
  int index = 0;  // of the layer among those with a history
  for (int slot = 0; slot < num_slots; ++slot) {
    if (!has_history[static_cast<size_t>(slot)]) {
      plan->k_.emplace_back();
      plan->v_.emplace_back();
      sealed_layouts.emplace_back(static_cast<size_t>(kv_heads), open);
      rules.emplace_back(static_cast<size_t>(kv_heads));
      continue;
    }
    const LayerRotation* rotation = options.rotation.has_value()
                                        ? options.rotation->Find(layers[static_cast<size_t>(slot)])
                                        : nullptr;
    plan->k_.push_back(MakeTransform(method.k.rotation, method.hadamard_block,
                                     rotation != nullptr ? &rotation->k : nullptr));
    plan->v_.push_back(MakeTransform(method.v.rotation, method.hadamard_block,
                                     rotation != nullptr ? &rotation->v : nullptr));
    std::vector<BlockLayout>& blocks = sealed_layouts.emplace_back();
    for (int head = 0; head < kv_heads; ++head) {
      if (!method.IsQuantizedLayer(index, num_history)) {
        blocks.emplace_back(BlockKind::kBf16, options.order, head_dim, head_dim);
        continue;
      }
      const HeadBits* bits =
          plan->bit_map_.empty()
              ? nullptr
              : &plan->bit_map_[static_cast<size_t>(index)][static_cast<size_t>(head)];
      blocks.push_back(LayoutOf(method, bits == nullptr ? method.k.rows.bits : bits->k,
                                bits == nullptr ? method.v.rows.bits : bits->v, options.order,
                                head_dim));
    }
    std::vector<BlockRules>& layer_rules = rules.emplace_back();
    for (int head = 0; head < kv_heads; ++head) {
      BlockRules& rule = layer_rules.emplace_back(RulesOf(method));
      // Ratios that came with the rotation, unless the command line sets its own.
      if (rotation != nullptr && rule.k_clip_ratio > 0.0f && !options.k_clip.has_value()) {
        rule.k_clip_ratio = rotation->k.ClipOf(head);
      }
      if (rotation != nullptr && rule.v_clip_ratio > 0.0f && !options.v_clip.has_value()) {
        rule.v_clip_ratio = rotation->v.ClipOf(head);
      }
    }
    ++index;
  }
  CacheConfig config{PageLayout(std::vector<BlockLayout>(layers.size(), open), kv_heads),
                     PageLayout(sealed_layouts, has_history, method.k.norm == TokenNorm::kAllHeads),
                     method.sink_tokens,
                     method.recent_tokens,
                     options.prefill_cell,
                     !method.is_quantized ? 0 : method.run_tokens / kPageTokens,
                     PageLayout::OfBytes(spec.state_bytes()),
                     window};
  if (!method.is_quantized && window > 0) {
    // Sealed pages of BF16: the rows of layers that see all.
    config.pages_together = 1;
    config.recent = static_cast<int>(PagesOf(window)) * kPageTokens;
  }
  plan->cache_ = std::make_unique<CacheConfig>(std::move(config));
  OSCAR_RETURN_IF_ERROR(plan->cache_->Validate());
  if (plan->cache_->seals()) {
    plan->host_sealer_ = std::make_unique<RuleSealer>(*plan->cache_, rules, encoder);
    if (method.is_quantized) plan->rules_ = std::move(rules);
  }
  if (options.token_windows && method.is_quantized) {
    // A row can only be shown as stored when the rows it is stored with exist.
    const int together =
        std::max(method.k.quantizer->tokens_per_run(), method.v.quantizer->tokens_per_run());
    if (together > 1 && method.recent_tokens < method.run_tokens) {
      return Unexpected(InvalidArgument(fmt::format(
          "a recent window of {} tokens that ends at the token: {} quantises {} tokens together; "
          "widen the window to that, or let it end at pages",
          method.recent_tokens, method.name, method.run_tokens)));
    }
    plan->token_window_ = std::max(1, method.recent_tokens);
  }
  return plan;
}

Result<std::unique_ptr<KvPlan>> KvPlan::WithBits(const BitMap& map) const {
  OSCAR_CHECK(map.size() == bit_map_.size());
  std::unique_ptr<KvPlan> plan(new KvPlan);
  plan->method_ = method_;
  plan->kv_heads_ = kv_heads_, plan->head_dim_ = head_dim_, plan->num_slots_ = num_slots_;
  plan->num_history_ = num_history_;
  plan->calibrated_ = calibrated_;
  plan->token_window_ = token_window_;
  plan->k_ = k_, plan->v_ = v_;
  plan->rules_ = rules_;
  plan->bit_map_ = map;
  plan->has_sensitivities_ = has_sensitivities_;
  plan->encoder_ = encoder_;
  std::vector<std::vector<BlockLayout>> blocks;
  std::vector<bool> held;
  size_t index = 0;  // in the map
  for (int slot = 0; slot < num_slots_; ++slot) {
    const std::span<const BlockPlace> places = cache_->sealed.blocks(slot);
    std::vector<BlockLayout>& heads = blocks.emplace_back();
    held.push_back(cache_->sealed.Holds(slot));
    if (!held.back()) {
      for (const BlockPlace& place : places) heads.push_back(place.layout);
      continue;
    }
    const std::vector<HeadBits>& layer = map[index++];
    OSCAR_CHECK(std::cmp_equal(layer.size(), kv_heads_));
    const BlockLayout& any = places.front().layout;
    for (const HeadBits& bits : layer) {
      heads.push_back(LayoutOf(method_, bits.k, bits.v, any.order(), any.head_dim()));
    }
  }
  plan->cache_ = std::make_unique<CacheConfig>(
      CacheConfig{cache_->open, PageLayout(blocks, held), cache_->sink, cache_->recent,
                  cache_->cell, cache_->pages_together, cache_->state, cache_->window});
  plan->host_sealer_ = std::make_unique<RuleSealer>(*plan->cache_, rules_, encoder_);
  return plan;
}

double KvPlan::HistoryBits() const {
  // Of quantised layers alone; where others stay BF16, Describe() says so.
  const PageLayout& page = cache_->sealed;
  double bits = 0.0, elements = 0.0;
  for (int slot = 0; slot < num_slots_; ++slot) {
    if (!page.Holds(slot) || page.block(slot, 0).is_bf16()) continue;
    bits += 8.0 * static_cast<double>(page.LayerBytes(slot));
    elements += 2.0 * kPageTokens * kv_heads_ * head_dim_;
  }
  return elements > 0.0 ? bits / elements : 16.0;
}

std::string KvPlan::Describe() const {
  int64_t sides = 0, raised = 0;
  for (const auto& layer : bit_map_) {
    for (const HeadBits& head : layer) {
      sides += 2;
      raised += (head.k > kMinMapBits ? 1 : 0) + (head.v > kMinMapBits ? 1 : 0);
    }
  }
  const bool is_mixed = raised > 0 && !cache_->sealed.is_uniform();
  return method_.Describe(HistoryBits()) +
         (is_mixed ? fmt::format(", {} of {} sides at more than 2", raised, sides) : "") +
         (token_window_ > 0 ? ", windows that end at the token simulated" : "");
}

double KvPlan::StoredBits(int64_t tokens) const {
  OSCAR_CHECK(tokens > 0);
  const double elements =
      2.0 * kv_heads_ * head_dim_ *
      (static_cast<double>(tokens) * num_history_ +
       static_cast<double>(WindowedTokens(tokens)) * (num_slots_ - num_history_));
  return 8.0 * static_cast<double>(StoredBytes(tokens)) / elements;
}

int64_t KvPlan::WindowedTokens(int64_t tokens) const {
  const CacheConfig& config = *cache_;
  const int64_t end = SequenceCache::SealedEndAt(config, tokens - config.recent);
  return tokens - (end - config.sink / kPageTokens) * kPageTokens;
}

bool KvPlan::rotates_v() const {
  return std::ranges::any_of(
      v_, [](const SideTransform& side) { return side.kind != RotationKind::kNone; });
}

uint64_t KvPlan::StoredBytes(int64_t tokens) const {
  const TokenSplit split = method_.Split(tokens);
  const uint64_t row = 2 * sizeof(Bf16) * static_cast<uint64_t>(kv_heads_ * head_dim_);
  const auto exact =
      static_cast<uint64_t>(split.sink + split.newest) * static_cast<uint64_t>(num_history_);
  const auto windowed = static_cast<uint64_t>(WindowedTokens(tokens)) *
                        static_cast<uint64_t>(num_slots_ - num_history_);
  return (exact + windowed) * row +
         static_cast<uint64_t>(split.history / kPageTokens) * cache_->sealed.bytes();
}

void AbsorbIntoValues(const SideTransform& rotation, int first_head, int head_dim, int hidden,
                      std::span<float> w_v, std::span<float> b_v) {
  if (rotation.kind == RotationKind::kNone) return;
  const auto dim = static_cast<size_t>(head_dim), width = static_cast<size_t>(hidden);
  std::vector<float> x(dim);
  // Column c of a head's rows of W_v is a vector of D; R^T w is (w R) for row vectors.
  int head = first_head;
  for (size_t at = 0; at < w_v.size(); at += dim * width, ++head) {
    float* const rows = w_v.data() + at;
    for (size_t c = 0; c < width; ++c) {
      for (size_t d = 0; d < dim; ++d) x[d] = rows[d * width + c];
      rotation.Apply(head, x);
      for (size_t d = 0; d < dim; ++d) rows[d * width + c] = x[d];
    }
    if (!b_v.empty()) rotation.Apply(head, b_v.subspan(at / width, dim));
  }
}

void AbsorbIntoOutputs(const SideTransform& rotation, int num_heads, int num_kv_heads, int head_dim,
                       std::span<float> w_o) {
  if (rotation.kind == RotationKind::kNone) return;
  const auto dim = static_cast<size_t>(head_dim);
  const auto heads = static_cast<size_t>(num_heads);
  const int group = num_heads / num_kv_heads;
  for (size_t i = 0; i < w_o.size() / dim; ++i) {
    rotation.Apply(static_cast<int>(i % heads) / group, w_o.subspan(i * dim, dim));
  }
}

void AbsorbValueRotation(const SideTransform& rotation, int num_heads, int num_kv_heads,
                         int head_dim, int hidden, std::span<float> w_v, std::span<float> b_v,
                         std::span<float> w_o) {
  AbsorbIntoValues(rotation, /*first_head=*/0, head_dim, hidden, w_v, b_v);
  AbsorbIntoOutputs(rotation, num_heads, num_kv_heads, head_dim, w_o);
}

}  // namespace oscar
