// The judge of every attention kernel: plain fp64 attention over decoded pages, and the list of
// conformance cases (parameters, input generator, error budget) that the SIMD and CUDA backends
// both run. A case is data; its inputs are a pure function of it. Stateless; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/half.h"
#include "cache/block_codec.h"
#include "cache/block_layout.h"

namespace oscar {

// What the numbers look like; each attacks one step of a kernel.
enum class AttentionPattern : uint8_t {
  kGaussian,      // what a rotated cache holds
  kSharpLogits,   // keys ten times longer: logits of +-40, a softmax on a few tokens
  kOneHugeLogit,  // one token in the middle has a logit of several hundred
  kEqualLogits,   // every key the same: a flat softmax, the longest sums
  kTinyScales,    // rows of 1e-6: stored scales sit at the fp16 subnormal floor
  kLargeValues,   // values near the fp16 limit with a large common offset
  kMixedScales,   // value rows from 2^-8 to 2^8: range of P * scale inside a page
  kOutlierQuery,  // one query dim a hundred times the others
};

struct AttentionCase {
  BlockKind kind = BlockKind::kInt2;
  int head_dim = 128;
  int group_dims = 128;
  int kv_heads = 2;
  int queries_per_kv = 4;  // g = H_q / H_kv
  int sink_tokens = 64;    // BF16 rows before the pages
  int num_pages = 4;
  int recent_tokens = 70;  // BF16 rows after the pages
  AttentionPattern pattern = AttentionPattern::kGaussian;
  std::optional<BlockKind> v_kind = {};  // of V where it is not K's
  double budget = 1e-3;  // relative L2 of the output against ReferenceAttention, per query head
  // Keys that are not rows. Pages that are sealed together are whole runs of num_pages.
  SideForm k_form = SideForm::kRows;
  int group_tokens = 0;
  TokenNorm norm = TokenNorm::kNone;
  int boosted_dims = 0;

  BlockLayout layout(CodeOrder order) const {
    return BlockLayout({.kind = kind,
                        .form = k_form,
                        .group_tokens = group_tokens,
                        .head_norms = norm == TokenNorm::kPerHead,
                        .boosted_dims = boosted_dims},
                       v_kind.value_or(kind), order, head_dim, group_dims);
  }
  int num_tokens() const { return sink_tokens + num_pages * kPageTokens + recent_tokens; }
  int q_heads() const { return kv_heads * queries_per_kv; }
  std::string Name() const;  // unique in AttentionCases(); letters, digits and underscores
};

// Every kind of rows, head dim, group and g that kernels must serve, with each pattern and the edge
// shapes (one token, no pages, no windows).
std::span<const AttentionCase> AttentionCases();
// The same for keys that are not rows.
std::span<const AttentionCase> FormCases();

// One sequence. Rows are BF16, [kv_heads, tokens, head_dim]; blocks [kv_heads, num_pages,
// block_bytes], encoded by EncodeBlocks from BF16 rows of the same distribution.
struct AttentionInputs {
  BlockLayout layout;
  std::vector<float> q{};  // [q_heads, head_dim]; the softmax scale is not folded in
  std::vector<Bf16> sink_k{}, sink_v{};
  std::vector<Bf16> recent_k{}, recent_v{};
  std::vector<std::byte> blocks{};
  std::vector<float> norms{};  // [num_pages, 64] where they are of all heads
  float softmax_scale = 1.0f;  // multiplies q.k, natural base
};

AttentionInputs MakeAttentionInputs(const AttentionCase& c, CodeOrder order, uint64_t seed = 1);

// What attention sees of one KV head: [num_tokens, head_dim], sink, decoded pages, recent.
struct DenseKv {
  std::vector<float> k, v;
};
DenseKv DecodeKvHead(const AttentionCase& c, const AttentionInputs& inputs, int kv_head);

// softmax(scale * q.k) . v over the first `num_tokens` rows, in fp64. q: [head_dim]; k, v:
// [>= num_tokens, head_dim]; out: [head_dim].
void ReferenceAttention(std::span<const float> q, std::span<const float> k,
                        std::span<const float> v, int num_tokens, double softmax_scale,
                        std::span<double> out);

// All query heads of a case over all its tokens: [q_heads, head_dim].
std::vector<double> ReferenceDecodeAttention(const AttentionCase& c, const AttentionInputs& inputs);

// |actual - expected| / |expected|; 0 where both are zero. NaN anywhere gives infinity.
double RelativeL2(std::span<const float> actual, std::span<const double> expected);

}  // namespace oscar
