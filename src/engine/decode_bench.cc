#include "engine/decode_bench.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/progress.h"
#include "base/rng.h"

namespace oscar {
namespace {

// A page of Gaussian rows; copied into every open page, because what is timed does not depend on
// it.
std::vector<Bf16> RandomPage(const PageShape& shape) {
  const Philox rng(1, 0);
  std::vector<Bf16> numbers(shape.bytes() / sizeof(Bf16));
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = ToBf16(rng.Normal(i));
  return numbers;
}

Status Fill(SequenceCache& cache, const std::vector<Bf16>& page, int64_t context,
            ThreadPool& threads) {
  while (cache.length() < context) {
    const int64_t count = std::min<int64_t>(kPageTokens, context - cache.length());
    OSCAR_RETURN_IF_ERROR(cache.Reserve(count));
    std::memcpy(cache.page(cache.num_pages() - 1).data(), page.data(), page.size() * sizeof(Bf16));
    cache.Advance(count);
    OSCAR_RETURN_IF_ERROR(cache.SealForGeneration(threads));
  }
  return {};
}

}  // namespace

Result<DecodeBenchRow> RunDecodeBench(LoadedModel& loaded, int64_t context, int batch, int steps) {
  const KvPlan& kv = loaded.kv();
  const uint64_t needed =
      static_cast<uint64_t>(batch) * SequenceCache::BytesFor(kv.cache(), context + steps + 1) +
      kv.cache().open.bytes();
  if (needed > loaded.pool().budget()) {
    return Unexpected(ResourceExhausted(
        fmt::format("{} sequences of {} tokens need {} of cache, the budget is {}", batch, context,
                    FormatBytes(needed), FormatBytes(loaded.pool().budget()))));
  }
  const std::vector<Bf16> page = RandomPage(kv.cache().open);
  std::vector<SequenceCache> caches;
  for (int i = 0; i < batch; ++i) {
    caches.emplace_back(kv.cache(), loaded.pool());
    OSCAR_RETURN_IF_ERROR(Fill(caches.back(), page, context, loaded.threads()));
  }
  const auto vocab = static_cast<size_t>(loaded.spec().vocab_size);
  std::vector<float> logits(static_cast<size_t>(batch) * vocab);
  std::vector<double> times;
  for (int step = 0; step <= steps; ++step) {
    const int32_t token = step % loaded.spec().vocab_size;
    std::vector<ForwardItem> items;
    items.reserve(caches.size());
    for (SequenceCache& cache : caches) items.push_back({&cache, {&token, 1}, false, 1});
    const auto start = std::chrono::steady_clock::now();
    OSCAR_RETURN_IF_ERROR(loaded.model().Forward(items, logits));
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (step > 0) times.push_back(seconds);  // the first warms caches and grows buffers
  }
  std::nth_element(times.begin(), times.begin() + static_cast<ptrdiff_t>(times.size() / 2),
                   times.end());
  DecodeBenchRow row;
  row.context = context;
  row.batch = batch;
  row.seconds_per_step = times[times.size() / 2];
  row.tokens_per_second = batch / row.seconds_per_step;
  row.weight_bytes = loaded.model().weight_bytes();
  row.kv_bytes = static_cast<uint64_t>(batch) * kv.StoredBytes(context);
  row.bytes_per_second =
      static_cast<double>(row.weight_bytes + row.kv_bytes) / row.seconds_per_step;
  return row;
}

}  // namespace oscar
