// What two bits cost each KV head, K and V apart, on text of the kind that the cache will hold
// (quant/bit_map.h): end to end, or by a proxy where the model has too many heads for that. The
// same inputs give the same numbers. The proxy reads on the model's device, the end-to-end measure
// on the CPU. One thread.
//
// Text is read once on a BF16 cache, up to its last tokens: the answer where it is known. Those see
// the rest through the cache under test, as generated tokens would.
//
// End to end: the KL divergence of the model's predictions there from those of the BF16 cache, with
// one side of one head at 2 bits and all others at 4, less that with all at 4. It is summed over the
// tokens of an answer, since any of them loses it, and averaged over texts.
//
// Proxy: for keys half the variance of the logits' noise times sum p (1 - p), which is what that
// noise adds in KL to the attention weights p; for values half of sum p^2 e over the output's
// square. Both over history alone (p of tokens in sink and recent window counts as exact), averaged
// over the head's queries at the last tokens. The noise of a logit is scale^2 |q|^2 e / D, with e
// the squared error of the row at 2 bits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/loaded_model.h"
#include "oscar/options.h"
#include "oscar/status.h"
#include "rotation/sensitivity_file.h"

namespace oscar {

struct SensitivityOptions {
  // rotation: "none" for the Hadamard, or the calibrated one. The method is oscar+.
  ModelOptions model;
  bool use_proxy = false;
  // Last tokens of each answer that are compared, at most. Reasoning fails in the middle of long ones.
  int64_t tail = 256;
  bool show_progress = true;
};

struct SensitivityResult {
  Sensitivities sensitivities;
  int64_t num_sequences = 0, num_tokens = 0;  // that were long enough
  // End to end: KL of all heads at 2 bits, and at 4. 0 with the proxy.
  double kl_at_2 = 0, kl_at_4 = 0;
};

// Sequences too short to leave the windows are passed over; kOutOfRange where none is long enough.
// `answers`: how many of a sequence's last tokens are an answer, 0 where that is not known; empty:
// of none.
Result<SensitivityResult> MeasureSensitivities(const SensitivityOptions& options,
                                               std::span<const std::vector<int32_t>> sequences,
                                               std::span<const int64_t> answers = {});

// Rank correlation (Spearman) of two measures over all sides; ties share their mean rank.
double RankCorrelation(const Sensitivities& a, const Sensitivities& b);

}  // namespace oscar
