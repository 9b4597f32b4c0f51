#include "measure/text_metrics.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"
#include "engine/pass_runner.h"
#include "engine/prompt_reader.h"
#include "simd/vec_ops.h"

namespace oscar {
namespace {

constexpr uint64_t kMaxProseBytes = uint64_t{1} << 28;

struct RowMetrics {
  double nll = 0, kl = 0;
  bool has_target = false, compared = false, agrees = false;
};

}  // namespace

double Divergence(std::span<const float> reference, std::span<const float> logits) {
  const double reference_norm = simd::LogSumExp(reference), norm = simd::LogSumExp(logits);
  double sum = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double log_p = reference[i] - reference_norm;
    sum += std::exp(log_p) * (log_p - (logits[i] - norm));
  }
  return std::max(sum, 0.0);
}

int ReferenceStride(int64_t total_tokens, int vocab, uint64_t max_bytes) {
  const uint64_t bytes = static_cast<uint64_t>(total_tokens) * static_cast<uint64_t>(vocab) * 4;
  return static_cast<int>(std::max<uint64_t>(1, (bytes + max_bytes - 1) / max_bytes));
}

Result<std::vector<std::vector<int32_t>>> ReadProseWindows(const std::filesystem::path& path,
                                                           const Tokenizer& tokenizer, int windows,
                                                           int tokens_each, int64_t skip_tokens) {
  OSCAR_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kMaxProseBytes));
  OSCAR_ASSIGN_OR_RETURN(const nlohmann::json documents, ParseJson(text, path.string()));
  if (!documents.is_array()) {
    return Unexpected(
        InvalidArgument(fmt::format("{}: must be a list of documents (strings)", path.string())));
  }
  std::optional<TokenId> separator = tokenizer.FindToken("<|endoftext|>");
  std::vector<std::vector<int32_t>> out;
  std::vector<int32_t> window;
  for (const nlohmann::json& document : documents) {
    if (!document.is_string()) {
      return Unexpected(
          InvalidArgument(fmt::format("{}: a document must be a string", path.string())));
    }
    OSCAR_ASSIGN_OR_RETURN(std::vector<TokenId> tokens,
                           tokenizer.Encode(document.get_ref<const std::string&>()));
    if (separator.has_value()) tokens.push_back(*separator);
    for (TokenId token : tokens) {
      if (skip_tokens > 0) {
        --skip_tokens;
        continue;
      }
      window.push_back(token);
      if (static_cast<int>(window.size()) < tokens_each) continue;
      out.push_back(std::move(window));
      window.clear();
      if (static_cast<int>(out.size()) == windows) return out;
    }
  }
  if (out.empty()) {
    return Unexpected(
        OutOfRange(fmt::format("{}: has no window of {} tokens", path.string(), tokens_each)));
  }
  return out;
}

Result<TextMetrics> MeasureText(LoadedModel& model, std::span<const std::vector<int32_t>> windows,
                                ReferenceLogits* reference, bool fill,
                                const std::function<void(int64_t)>& on_tokens) {
  constexpr int64_t kChunk = 64;
  OSCAR_CHECK(model.kv().cache().cell == kChunk);
  const auto vocab = static_cast<size_t>(model.spec().vocab_size);
  if (reference != nullptr && fill) reference->windows.assign(windows.size(), {});
  TextMetrics out;
  const auto together = static_cast<size_t>(model.model().max_batch_tokens() / kChunk);
  PassRunner pass(model.model());
  for (size_t first = 0; first < windows.size(); first += together) {
    const size_t count = std::min(together, windows.size() - first);
    std::vector<SequenceCache> caches;
    for (size_t i = 0; i < count; ++i) caches.emplace_back(model.kv().cache(), model.pool());
    const auto length = static_cast<int64_t>(windows[first].size());
    for (int64_t at = 0; at < length; at += kChunk) {
      const int64_t tokens = std::min(kChunk, length - at);
      std::vector<ForwardItem> items;
      for (size_t i = 0; i < count; ++i) {
        items.push_back(NextChunk(caches[i], windows[first + i], kChunk, /*num_logits=*/length));
      }
      OSCAR_RETURN_IF_ERROR(pass.Run(items));
      const auto logits_of = [&](int64_t index) {
        return pass.logits(static_cast<size_t>(index / tokens))
            .subspan(static_cast<size_t>(index % tokens) * vocab, vocab);
      };
      const int64_t num_rows = static_cast<int64_t>(count) * tokens;
      std::vector<RowMetrics> rows(static_cast<size_t>(num_rows));
      model.threads().ParallelFor(num_rows, [&](int64_t index, int) {
        RowMetrics& row = rows[static_cast<size_t>(index)];
        const auto window = first + static_cast<size_t>(index / tokens);
        const int64_t position = at + index % tokens;
        const std::span<const float> values = logits_of(index);
        if (position + 1 < length) {
          const int32_t target = windows[window][static_cast<size_t>(position) + 1];
          row.nll = simd::LogSumExp(values) - values[static_cast<size_t>(target)];
          row.has_target = true;
        }
        if (reference == nullptr || fill || position % reference->stride != 0) return;
        const std::vector<float>& kept = reference->windows[window];
        const std::span<const float> expected(
            kept.data() + static_cast<size_t>(position / reference->stride) * vocab, vocab);
        row.compared = true;
        row.kl = Divergence(expected, values);
        row.agrees = simd::ArgMax(expected) == simd::ArgMax(values);
      });
      for (size_t i = 0; i < rows.size(); ++i) {  // in order, so that sums are the same every time
        const int64_t position = at + static_cast<int64_t>(i) % tokens;
        if (fill && reference != nullptr && position % reference->stride == 0) {
          std::vector<float>& kept = reference->windows[first + i / static_cast<size_t>(tokens)];
          const std::span<const float> values = logits_of(static_cast<int64_t>(i));
          kept.insert(kept.end(), values.begin(), values.end());
        }
        out.nll += rows[i].nll;
        out.tokens += rows[i].has_target ? 1 : 0;
        out.kl += rows[i].kl;
        out.compared += rows[i].compared ? 1 : 0;
        out.top1 += rows[i].agrees ? 1 : 0;
      }
      if (on_tokens) on_tokens(num_rows);
    }
  }
  if (out.tokens > 0) out.nll /= static_cast<double>(out.tokens);
  out.perplexity = std::exp(out.nll);
  if (out.compared > 0) {
    out.kl /= static_cast<double>(out.compared);
    out.top1 /= static_cast<double>(out.compared);
  }
  return out;
}

}  // namespace oscar
