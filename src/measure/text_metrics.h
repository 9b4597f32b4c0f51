// How well a cache method keeps the model's predictions on plain text: perplexity over windows of
// held-out prose, and, against the same windows on a BF16 cache, the KL divergence and how often
// the most likely token is the same. Prompt cells are 64 tokens here whatever the run uses, so that
// each token reads history as the method stores it. One thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <vector>

#include "engine/loaded_model.h"
#include "oscar/status.h"
#include "text/tokenizer.h"

namespace oscar {

struct TextMetrics {
  double nll = 0;         // nats a token, mean over `tokens`
  double perplexity = 0;  // exp(nll)
  double kl = 0;          // nats, KL(bf16 || method), mean over `compared`
  double top1 = 0;        // share of `compared` whose argmax is that of BF16
  int64_t tokens = 0;
  int64_t compared = 0;
};

// KL(reference || logits) of two rows of logits, in nats.
double Divergence(std::span<const float> reference, std::span<const float> logits);

// [windows][tokens] of the JSON list of documents in `path`, joined by the end-of-text token.
// `skip_tokens` are left out at the start. Fewer windows where the text is too short; kOutOfRange
// where there is none.
Result<std::vector<std::vector<int32_t>>> ReadProseWindows(const std::filesystem::path& path,
                                                           const Tokenizer& tokenizer, int windows,
                                                           int tokens_each,
                                                           int64_t skip_tokens = 0);

// The logits of a BF16 cache at evenly spaced positions, kept for the other methods.
struct ReferenceLogits {
  int stride = 0;                           // positions that are multiples of it are kept
  std::vector<std::vector<float>> windows;  // [kept positions, vocab] each
};

// Loaded with prefill_cell 64. `reference` is filled where `fill`, else compared with (null:
// neither). `on_tokens` reports progress.
Result<TextMetrics> MeasureText(LoadedModel& model, std::span<const std::vector<int32_t>> windows,
                                ReferenceLogits* reference, bool fill,
                                const std::function<void(int64_t)>& on_tokens);

// Stride such that the logits of all windows take at most `max_bytes`.
int ReferenceStride(int64_t total_tokens, int vocab, uint64_t max_bytes);

}  // namespace oscar
