#include "engine/decode_bench.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/progress.h"
#include "base/rng.h"

namespace oscar {
namespace {

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Result<PageRef> RandomPage(BlockPool& pool, const PageShape& shape) {
  const Philox rng(1, 0);
  std::vector<Bf16> numbers(shape.bytes() / sizeof(Bf16));
  for (size_t i = 0; i < numbers.size(); ++i) {
    // The sum of four bytes is near enough to Gaussian, and quick.
    const uint32_t bits = rng.Bits(i);
    const auto sum =
        static_cast<int>((bits & 255) + ((bits >> 8) & 255) + ((bits >> 16) & 255) + (bits >> 24));
    numbers[i] = ToBf16(static_cast<float>(sum - 510) / 147.8f);
  }
  OSCAR_ASSIGN_OR_RETURN(PageRef page, pool.Allocate(shape));
  OSCAR_RETURN_IF_ERROR(pool.Write(page, std::as_bytes(std::span(numbers))));
  return page;
}

Status Fill(SequenceCache& cache, BlockPool& pool, const PageRef& page, int64_t context,
            ThreadPool& threads) {
  while (cache.length() < context) {
    const int64_t count = std::min<int64_t>(kPageTokens, context - cache.length());
    OSCAR_RETURN_IF_ERROR(cache.Reserve(count));
    pool.Copy(cache.page(cache.num_pages() - 1), page);
    cache.Advance(count);
    OSCAR_RETURN_IF_ERROR(cache.SealForGeneration(threads));
  }
  return {};
}

// One step of every sequence; the token is drawn where the model does that.
Status Step(Model& model, std::span<const ForwardItem> items, std::vector<float>& logits) {
  if (static_cast<size_t>(model.max_draws()) < items.size()) return model.Forward(items, logits);
  const std::vector<TokenDraw> draws(items.size());
  std::vector<int32_t> ids(items.size());
  return model.ForwardAndDraw(items, draws, ids);
}

}  // namespace

uint64_t DecodeBenchBytes(const KvPlan& kv, int64_t context, int batch, int steps) {
  // One page more a sequence than it ends with (a step may seal and append), and the template.
  return static_cast<uint64_t>(batch) *
             (SequenceCache::BytesFor(kv.cache(), context + steps + 1) + kv.cache().open.bytes()) +
         2 * kv.cache().open.bytes();
}

int LargestBatch(const LoadedModel& loaded, uint64_t memory, int64_t context, int steps) {
  uint64_t fixed = loaded.memory().weight_bytes;
  double rounding = 1.0;  // of pages in the arena
  if (loaded.cuda() != nullptr) {
    const CudaMemoryPlan& plan = loaded.cuda()->memory();
    fixed = plan.weights + plan.activations;
    rounding = static_cast<double>(plan.pages) / static_cast<double>(loaded.memory().kv_bytes);
  }
  if (memory <= fixed) return 0;
  int batch = 0;
  while (static_cast<double>(DecodeBenchBytes(loaded.kv(), context, batch + 1, steps)) * rounding <=
         static_cast<double>(memory - fixed)) {
    ++batch;
  }
  return batch;
}

Result<DecodeBenchRow> RunDecodeBench(LoadedModel& loaded, int64_t context, int batch, int steps) {
  const KvPlan& kv = loaded.kv();
  BlockPool& pool = loaded.pool();
  const uint64_t needed = DecodeBenchBytes(kv, context, batch, steps);
  if (needed > pool.budget()) {
    return Unexpected(ResourceExhausted(
        fmt::format("{} sequences of {} tokens need {} of cache, the budget is {}", batch, context,
                    FormatBytes(needed), FormatBytes(pool.budget()))));
  }
  OSCAR_ASSIGN_OR_RETURN(PageRef page, RandomPage(pool, kv.cache().open));
  std::vector<SequenceCache> caches;
  for (int i = 0; i < batch; ++i) {
    caches.emplace_back(kv.cache(), pool);
    OSCAR_RETURN_IF_ERROR(Fill(caches.back(), pool, page, context, loaded.threads()));
  }
  const auto vocab = static_cast<size_t>(loaded.spec().vocab_size);
  std::vector<float> logits(static_cast<size_t>(batch) * vocab);
  std::vector<double> times;
  constexpr int kWarmUp = 2;  // warms caches and grows buffers
  for (int step = 0; step < steps + kWarmUp; ++step) {
    const int32_t token = step % loaded.spec().vocab_size;
    std::vector<ForwardItem> items;
    items.reserve(caches.size());
    for (SequenceCache& cache : caches) items.push_back({&cache, {&token, 1}, false, 1});
    const auto start = std::chrono::steady_clock::now();
    OSCAR_RETURN_IF_ERROR(Step(loaded.model(), items, logits));
    if (step >= kWarmUp) times.push_back(SecondsSince(start));
  }
  std::nth_element(times.begin(), times.begin() + static_cast<ptrdiff_t>(times.size() / 2),
                   times.end());
  DecodeBenchRow row;
  row.context = context;
  row.batch = batch;
  row.seconds_per_step = times[times.size() / 2];
  row.tokens_per_second = batch / row.seconds_per_step;
  row.weight_bytes = loaded.model().weight_bytes_per_step();
  row.kv_bytes = static_cast<uint64_t>(batch) * kv.StoredBytes(context);
  row.bytes_per_second = static_cast<double>(row.bytes()) / row.seconds_per_step;
  return row;
}

Result<PrefillBenchRow> RunPrefillBench(LoadedModel& loaded, int64_t tokens) {
  constexpr int kRepetitions = 3;
  Model& model = loaded.model();
  const ModelSpec& spec = loaded.spec();
  std::vector<int32_t> prompt(static_cast<size_t>(tokens));
  for (size_t i = 0; i < prompt.size(); ++i) {
    prompt[i] = static_cast<int32_t>(i * 7919 % static_cast<size_t>(spec.vocab_size));
  }
  std::vector<float> logits(static_cast<size_t>(spec.vocab_size));
  PrefillBenchRow row;
  row.tokens = tokens;
  for (int i = 0; i <= kRepetitions; ++i) {
    SequenceCache cache(loaded.kv().cache(), loaded.pool());
    const auto start = std::chrono::steady_clock::now();
    while (cache.length() < tokens) {
      const int64_t at = cache.length(), cell = loaded.kv().cache().cell;
      const int64_t count =
          std::min<int64_t>({model.max_batch_tokens(), tokens - at, cell - at % cell});
      const bool last = at + count == tokens;
      const ForwardItem item{
          &cache, std::span(prompt).subspan(static_cast<size_t>(at), static_cast<size_t>(count)),
          /*is_prompt=*/true, last ? 1 : 0};
      OSCAR_RETURN_IF_ERROR(
          model.Forward({&item, 1}, last ? std::span(logits) : std::span<float>()));
    }
    const double seconds = SecondsSince(start);
    if (i == 1 || (i > 1 && seconds < row.seconds)) row.seconds = seconds;
  }
  const double count = static_cast<double>(tokens), layers = spec.num_layers;
  const double width = static_cast<double>(spec.num_heads) * spec.head_dim;
  const double kv_width = static_cast<double>(spec.num_kv_heads) * spec.head_dim;
  const double products =
      spec.hidden * (2 * width + 2 * kv_width + 3 * static_cast<double>(spec.intermediate));
  // Multiply and add; QK^T and PV over half of the square.
  row.flops = layers * (2 * products * count + 2 * width * count * count) +
              2.0 * spec.hidden * spec.vocab_size;
  return row;
}

}  // namespace oscar
