// The gated delta rule of one head, scalar and in binary64: the specification of linear attention
// (LinearAttentionSpec, arch/spec.h). Both forms compute the same; the chunked one does so with
// matrix multiplications over stretches of tokens, which is what suits tensor cores.
#pragma once

#include <span>

namespace oscar {

// Consecutive tokens: q and k [tokens, key_dim], normalised and scaled; v [tokens, value_dim]; the
// logarithm of each token's decay, at most 0; and how much of it is written, in [0, 1].
struct DeltaRuleTokens {
  std::span<const double> q, k, v, log_decay, beta;
};

// `state` [key_dim, value_dim] is read and left as it is after the last token; `out` [tokens,
// value_dim].
void DeltaRuleRecurrent(const DeltaRuleTokens& tokens, std::span<double> state,
                        std::span<double> out);
// The same in chunks of at most `chunk` tokens.
void DeltaRuleChunked(const DeltaRuleTokens& tokens, int chunk, std::span<double> state,
                      std::span<double> out);

}  // namespace oscar
