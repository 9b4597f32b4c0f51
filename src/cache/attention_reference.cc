#include "cache/attention_reference.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string_view>

#include "base/check.h"
#include "base/rng.h"

namespace oscar {
namespace {

const char* PatternName(AttentionPattern pattern) {
  switch (pattern) {
    case AttentionPattern::kGaussian:
      return "gaussian";
    case AttentionPattern::kSharpLogits:
      return "sharp_logits";
    case AttentionPattern::kOneHugeLogit:
      return "one_huge_logit";
    case AttentionPattern::kEqualLogits:
      return "equal_logits";
    case AttentionPattern::kTinyScales:
      return "tiny_scales";
    case AttentionPattern::kLargeValues:
      return "large_values";
    case AttentionPattern::kMixedScales:
      return "mixed_scales";
    case AttentionPattern::kOutlierQuery:
      return "outlier_query";
  }
  return "unknown";
}

const char* KindName(BlockKind kind) {
  return kind == BlockKind::kInt2   ? "int2"
         : kind == BlockKind::kInt3 ? "int3"
         : kind == BlockKind::kInt4 ? "int4"
                                    : "bf16";
}

std::vector<AttentionCase> BuildCases() {
  std::vector<AttentionCase> cases;
  for (const BlockKind kind :
       {BlockKind::kInt2, BlockKind::kInt3, BlockKind::kInt4, BlockKind::kBf16}) {
    for (const int dim : {64, 128, 256}) {
      for (const int group : {32, 64, 128, 256}) {
        if (!BlockLayout::IsSupported(dim, group)) continue;
        if (kind == BlockKind::kBf16 && group != dim) continue;
        cases.push_back({.kind = kind, .head_dim = dim, .group_dims = group});
      }
    }
    for (const int g : {1, 2, 3, 5, 7, 8, 16}) {
      cases.push_back({.kind = kind, .queries_per_kv = g});
    }
    for (const auto pattern : {AttentionPattern::kSharpLogits, AttentionPattern::kOneHugeLogit,
                               AttentionPattern::kEqualLogits, AttentionPattern::kTinyScales,
                               AttentionPattern::kLargeValues, AttentionPattern::kMixedScales,
                               AttentionPattern::kOutlierQuery}) {
      cases.push_back({.kind = kind, .num_pages = 5, .pattern = pattern});
      cases.push_back({.kind = kind,
                       .group_dims = kind == BlockKind::kBf16 ? 128 : 32,
                       .sink_tokens = 0,
                       .num_pages = 3,
                       .recent_tokens = 0,
                       .pattern = pattern});
    }
    // Edge shapes: pages alone, one page, odd windows, and long enough for several splits.
    cases.push_back({.kind = kind, .sink_tokens = 0, .num_pages = 1, .recent_tokens = 0});
    cases.push_back({.kind = kind, .sink_tokens = 1, .num_pages = 2, .recent_tokens = 319});
    cases.push_back({.kind = kind, .kv_heads = 1, .num_pages = 67, .recent_tokens = 1});
  }
  // K and V apart.
  constexpr BlockKind kPacked[] = {BlockKind::kInt2, BlockKind::kInt3, BlockKind::kInt4};
  for (const BlockKind k : kPacked) {
    for (const BlockKind v : kPacked) {
      if (k == v) continue;
      cases.push_back({.kind = k, .v_kind = v});
      cases.push_back({.kind = k,
                       .head_dim = 64,
                       .group_dims = 32,
                       .queries_per_kv = 3,
                       .pattern = AttentionPattern::kSharpLogits,
                       .v_kind = v});
    }
  }
  cases.push_back({.sink_tokens = 1, .num_pages = 0, .recent_tokens = 0});
  cases.push_back({.sink_tokens = 64, .num_pages = 0, .recent_tokens = 17});
  cases.push_back({.sink_tokens = 0, .num_pages = 0, .recent_tokens = 383});
  return cases;
}

std::vector<AttentionCase> BuildFormCases() {
  using enum BlockKind;
  const AttentionCase kivi{.group_dims = 32, .k_form = SideForm::kChannels, .group_tokens = 32};
  AttentionCase oscar_su = kivi, wide = kivi, kitty = kivi, codebook = kivi;
  oscar_su.norm = TokenNorm::kAllHeads;
  wide.group_dims = 64, wide.group_tokens = 128;
  kitty.group_dims = 64, kitty.group_tokens = 128;
  kitty.k_form = SideForm::kMixed, kitty.boosted_dims = 16;
  codebook.k_form = SideForm::kCodebook, codebook.group_tokens = 0;
  codebook.kind = kInt3, codebook.group_dims = 64;
  std::vector<AttentionCase> cases;
  for (const AttentionCase& form : {kivi, oscar_su, wide, kitty, codebook}) {
    for (const int dim : {64, 128, 256}) {
      cases.push_back(form);
      cases.back().head_dim = dim;
    }
    for (const int g : {1, 3, 7, 8}) {
      cases.push_back(form);
      cases.back().queries_per_kv = g;
    }
    for (const auto pattern : {AttentionPattern::kSharpLogits, AttentionPattern::kOneHugeLogit,
                               AttentionPattern::kEqualLogits, AttentionPattern::kTinyScales,
                               AttentionPattern::kLargeValues, AttentionPattern::kMixedScales,
                               AttentionPattern::kOutlierQuery}) {
      cases.push_back(form);
      cases.back().pattern = pattern;
      cases.back().sink_tokens = cases.back().recent_tokens = 0;
    }
    cases.push_back(form);
    cases.back().kv_heads = 1, cases.back().num_pages = 66, cases.back().recent_tokens = 1;
  }
  // Other bits, groups and norms.
  for (const BlockKind kind : {kInt3, kInt4}) {
    for (AttentionCase c : {kivi, codebook}) {
      c.kind = kind, c.v_kind = kInt2;
      cases.push_back(c);
    }
    AttentionCase c = wide;
    c.kind = kind, c.norm = TokenNorm::kPerHead;
    cases.push_back(c);
  }
  AttentionCase middle = oscar_su, two = codebook;
  middle.group_tokens = 64, middle.norm = TokenNorm::kPerHead;
  two.kind = kInt2;
  cases.push_back(middle);
  cases.push_back(two);
  return cases;
}

// Streams of one seed; a value's index is its flat position, so shapes that share a prefix share
// its numbers.
enum Stream : uint64_t { kQ = 1, kK = 2, kV = 3 };

}  // namespace

std::string AttentionCase::Name() const {
  constexpr std::string_view kForms[] = {"", "_channels", "_mixed", "_codebook"};
  constexpr std::string_view kNorms[] = {"", "_norm", "_head_norm"};
  return fmt::format("{}{}{}{}{}_d{}_g{}_h{}x{}_sink{}_pages{}_recent{}_{}", KindName(kind),
                     v_kind.has_value() ? fmt::format("_{}", KindName(*v_kind)) : "",
                     kForms[static_cast<size_t>(k_form)],
                     group_tokens > 0 ? fmt::format("{}", group_tokens) : "",
                     kNorms[static_cast<size_t>(norm)], head_dim, group_dims, kv_heads,
                     queries_per_kv, sink_tokens, num_pages, recent_tokens, PatternName(pattern));
}

std::span<const AttentionCase> AttentionCases() {
  static const std::vector<AttentionCase> cases = BuildCases();
  return cases;
}

std::span<const AttentionCase> FormCases() {
  static const std::vector<AttentionCase> cases = BuildFormCases();
  return cases;
}

AttentionInputs MakeAttentionInputs(const AttentionCase& c, CodeOrder order, uint64_t seed) {
  const int dims = c.head_dim;
  const auto row = static_cast<size_t>(dims);
  AttentionInputs in{.layout = c.layout(order)};
  in.softmax_scale = 1.0f / std::sqrt(static_cast<float>(dims));

  const Philox q_rng(seed, kQ), k_rng(seed, kK), v_rng(seed, kV);
  in.q.resize(static_cast<size_t>(c.q_heads()) * row);
  for (size_t i = 0; i < in.q.size(); ++i) {
    in.q[i] = q_rng.Normal(i);
    if (c.pattern == AttentionPattern::kOutlierQuery && i % row == 5) in.q[i] *= 100.0f;
  }

  // [kv_heads, tokens, D], then cut into sink, pages and recent.
  const int tokens = c.num_tokens();
  const size_t head_elements = static_cast<size_t>(tokens) * row;
  std::vector<Bf16> k(head_elements * static_cast<size_t>(c.kv_heads)), v(k.size());
  for (int h = 0; h < c.kv_heads; ++h) {
    for (int t = 0; t < tokens; ++t) {
      const size_t base = static_cast<size_t>(h) * head_elements + static_cast<size_t>(t) * row;
      for (size_t d = 0; d < row; ++d) {
        // Equal logits: one key row for all tokens of the head.
        const bool equal = c.pattern == AttentionPattern::kEqualLogits;
        float key = k_rng.Normal(equal ? static_cast<size_t>(h) * head_elements + d : base + d);
        float value = v_rng.Normal(base + d);
        switch (c.pattern) {
          case AttentionPattern::kSharpLogits:
            key *= 10.0f;
            break;
          case AttentionPattern::kOneHugeLogit:
            if (t == tokens / 2) {
              key = 60.0f * in.q[static_cast<size_t>(h * c.queries_per_kv) * row + d];
            }
            break;
          case AttentionPattern::kTinyScales:
            key *= 1e-6f;
            value *= 1e-6f;
            break;
          case AttentionPattern::kLargeValues:
            value = 30000.0f + 9000.0f * value;
            break;
          case AttentionPattern::kMixedScales:
            value = std::ldexp(value, static_cast<int>(v_rng.Below(base, 17)) - 8);
            break;
          default:
            break;
        }
        k[base + d] = ToBf16(key);
        v[base + d] = ToBf16(value);
      }
    }
  }

  const auto page = static_cast<size_t>(kPageTokens) * row;
  const size_t block = in.layout.block_bytes();
  in.blocks.resize(block * static_cast<size_t>(c.kv_heads * c.num_pages));
  const auto together = static_cast<size_t>(in.layout.pages_together());
  OSCAR_CHECK(static_cast<size_t>(c.num_pages) % together == 0);
  // Of page `index` and the tokens that come before pages.
  const auto page_at = [&](const std::vector<Bf16>& rows, int head, size_t index) {
    return rows.data() + static_cast<size_t>(head) * head_elements +
           static_cast<size_t>(c.sink_tokens) * row + index * page;
  };
  if (c.norm == TokenNorm::kAllHeads) {
    in.norms.resize(static_cast<size_t>(c.num_pages * kPageTokens));
    for (int p = 0; p < c.num_pages; ++p) {
      std::vector<const Bf16*> heads;
      for (int h = 0; h < c.kv_heads; ++h) heads.push_back(page_at(k, h, static_cast<size_t>(p)));
      TokenNorms(heads, dims,
                 std::span(in.norms).subspan(static_cast<size_t>(p * kPageTokens), kPageTokens));
    }
  }
  const BlockRules rules{.k_rule = RowRule::kMinMax,
                         .v_rule = RowRule::kMinMax,
                         .k_clip_ratio = 0.96f,
                         .v_clip_ratio = 0.92f};
  for (int h = 0; h < c.kv_heads; ++h) {
    const Bf16* hk = k.data() + static_cast<size_t>(h) * head_elements;
    const Bf16* hv = v.data() + static_cast<size_t>(h) * head_elements;
    const size_t sink = static_cast<size_t>(c.sink_tokens) * row;
    in.sink_k.insert(in.sink_k.end(), hk, hk + sink);
    in.sink_v.insert(in.sink_v.end(), hv, hv + sink);
    for (size_t p = 0; p < static_cast<size_t>(c.num_pages); p += together) {
      std::vector<const Bf16*> k_pages, v_pages;
      std::vector<std::byte*> blocks;
      for (size_t i = p; i < p + together; ++i) {
        k_pages.push_back(page_at(k, h, i));
        v_pages.push_back(page_at(v, h, i));
        blocks.push_back(in.blocks.data() + (static_cast<size_t>(h * c.num_pages) + i) * block);
      }
      EncodeBlocks(in.layout, rules,
                   {k_pages, v_pages, blocks,
                    in.norms.empty() ? nullptr : in.norms.data() + p * kPageTokens});
    }
    const size_t recent = sink + static_cast<size_t>(c.num_pages) * page;
    in.recent_k.insert(in.recent_k.end(), hk + recent, hk + head_elements);
    in.recent_v.insert(in.recent_v.end(), hv + recent, hv + head_elements);
  }
  return in;
}

DenseKv DecodeKvHead(const AttentionCase& c, const AttentionInputs& in, int kv_head) {
  const auto row = static_cast<size_t>(c.head_dim);
  const auto h = static_cast<size_t>(kv_head);
  DenseKv dense;
  const auto append_rows = [&](const std::vector<Bf16>& source, int tokens,
                               std::vector<float>& target) {
    const size_t count = static_cast<size_t>(tokens) * row;
    for (size_t i = 0; i < count; ++i) target.push_back(ToFloat(source[h * count + i]));
  };
  append_rows(in.sink_k, c.sink_tokens, dense.k);
  append_rows(in.sink_v, c.sink_tokens, dense.v);
  const size_t block = in.layout.block_bytes();
  std::vector<float> page_k(static_cast<size_t>(kPageTokens) * row), page_v(page_k.size());
  for (int p = 0; p < c.num_pages; ++p) {
    const std::byte* const first = in.blocks.data() + h * static_cast<size_t>(c.num_pages) * block;
    SealedBlock from{.block = first + static_cast<size_t>(p) * block};
    if (in.layout.pages_together() > 1) {
      from.pair[0] = first + static_cast<size_t>(p / 2 * 2) * block;
      from.pair[1] = from.pair[0] + block;
    }
    if (!in.norms.empty()) {
      from.norms = reinterpret_cast<const std::byte*>(in.norms.data() + p * kPageTokens);
    }
    DecodeBlock(in.layout, from, page_k, page_v);
    dense.k.insert(dense.k.end(), page_k.begin(), page_k.end());
    dense.v.insert(dense.v.end(), page_v.begin(), page_v.end());
  }
  append_rows(in.recent_k, c.recent_tokens, dense.k);
  append_rows(in.recent_v, c.recent_tokens, dense.v);
  return dense;
}

void ReferenceAttention(std::span<const float> q, std::span<const float> k,
                        std::span<const float> v, int num_tokens, double softmax_scale,
                        std::span<double> out) {
  const size_t dims = q.size();
  const auto tokens = static_cast<size_t>(num_tokens);
  OSCAR_CHECK(num_tokens > 0 && k.size() >= tokens * dims && v.size() >= tokens * dims &&
              out.size() == dims);
  std::vector<double> logits(tokens);
  for (size_t t = 0; t < tokens; ++t) {
    double dot = 0.0;
    for (size_t d = 0; d < dims; ++d) dot += static_cast<double>(q[d]) * k[t * dims + d];
    logits[t] = dot * softmax_scale;
  }
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (double& logit : logits) sum += logit = std::exp(logit - largest);
  std::fill(out.begin(), out.end(), 0.0);
  for (size_t t = 0; t < tokens; ++t) {
    for (size_t d = 0; d < dims; ++d) out[d] += logits[t] / sum * v[t * dims + d];
  }
}

std::vector<double> ReferenceDecodeAttention(const AttentionCase& c, const AttentionInputs& in) {
  const auto row = static_cast<size_t>(c.head_dim);
  std::vector<double> out(in.q.size());
  for (int h = 0; h < c.kv_heads; ++h) {
    const DenseKv dense = DecodeKvHead(c, in, h);
    for (int j = 0; j < c.queries_per_kv; ++j) {
      const size_t at = static_cast<size_t>(h * c.queries_per_kv + j) * row;
      ReferenceAttention({in.q.data() + at, row}, dense.k, dense.v, c.num_tokens(),
                         in.softmax_scale, {out.data() + at, row});
    }
  }
  return out;
}

double RelativeL2(std::span<const float> actual, std::span<const double> expected) {
  OSCAR_CHECK(actual.size() == expected.size());
  double error = 0.0, norm = 0.0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double difference = actual[i] - expected[i];
    if (std::isnan(difference)) return std::numeric_limits<double>::infinity();
    error += difference * difference;
    norm += expected[i] * expected[i];
  }
  if (norm == 0.0) return error == 0.0 ? 0.0 : std::numeric_limits<double>::infinity();
  return std::sqrt(error / norm);
}

}  // namespace oscar
