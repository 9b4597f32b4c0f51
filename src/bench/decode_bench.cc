#include "bench/decode_bench.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "arch/tensor_table.h"
#include "base/progress.h"
#include "base/rng.h"
#include "engine/pass_runner.h"
#include "engine/prompt_reader.h"

namespace oscar {
namespace {

std::vector<Bf16> RandomNumbers(size_t count) {
  const Philox rng(1, 0);
  std::vector<Bf16> numbers(count);
  for (size_t i = 0; i < numbers.size(); ++i) {
    // The sum of four bytes is near enough to Gaussian, and quick.
    const uint32_t bits = rng.Bits(i);
    const auto sum =
        static_cast<int>((bits & 255) + ((bits >> 8) & 255) + ((bits >> 16) & 255) + (bits >> 24));
    numbers[i] = ToBf16(static_cast<float>(sum - 510) / 147.8f);
  }
  return numbers;
}

Status Fill(SequenceCache& cache, PagePool& pool, const PageRef& page, int64_t context,
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

constexpr int kWarmUp = 2;  // steps that warm caches and grow buffers

double Median(std::vector<double> times) {
  const auto middle = times.begin() + static_cast<ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

constexpr int kRounds = 2;
// The tokens that the rounds append, those before the timing and one ahead included.
int TokensOf(int steps) { return kRounds * (2 * (steps + kWarmUp) + 1); }

// Steps of every sequence; tokens are sampled where the model does that. With `ahead` each step is
// launched before the one before it has ended, where that is possible.
Status TimeSteps(Model& model, std::vector<SequenceCache>& caches, int steps, bool ahead,
                 std::vector<double>& times) {
  PassRunner pass(model);
  const std::vector<std::optional<SampleParams>> sampling(caches.size(), SampleParams{});
  std::vector<PassRunner::Ahead> next;
  for (size_t i = 0; ahead && i < caches.size(); ++i) next.push_back({i, SampleParams{}});
  auto last = std::chrono::steady_clock::now();
  for (int step = 0; step < steps + kWarmUp; ++step) {
    if (!pass.in_flight()) {
      std::vector<int32_t> tokens(caches.size());
      std::vector<ForwardItem> items;
      items.reserve(caches.size());
      for (size_t i = 0; i < caches.size(); ++i) {
        tokens[i] = static_cast<int32_t>((static_cast<size_t>(step) + 7919 * i) %
                                         static_cast<size_t>(model.spec().vocab_size));
        items.push_back({&caches[i], {&tokens[i], 1}, false, 1});
      }
      OSCAR_RETURN_IF_ERROR(pass.Run(items, sampling));
    }
    if (pass.in_flight()) OSCAR_RETURN_IF_ERROR(pass.Land(next));
    if (step >= kWarmUp) times.push_back(SecondsSince(last));
    last = std::chrono::steady_clock::now();
  }
  return pass.Drain();
}

}  // namespace

Result<std::unique_ptr<LoadedModel>> LoadForDecodeBench(ModelOptions options, int64_t longest,
                                                        int steps) {
  longest += 4 * int64_t{steps} + 16;
  if (options.max_context == 0) {
    OSCAR_ASSIGN_OR_RETURN(const auto plan, LoadedModel::Plan(options));
    if (longest > plan->max_context() && options.rope_scaling.empty()) {
      options.rope_scaling =
          fmt::format("yarn:{}", (longest + plan->max_context() - 1) / plan->max_context());
    }
    options.max_context = longest;
  }
  return LoadedModel::Load(options);
}

uint64_t DecodeBenchBytes(const KvPlan& kv, int64_t context, int batch, int steps) {
  // One page more a sequence than it ends with (a step may seal and append), and the template.
  return static_cast<uint64_t>(batch) *
             (SequenceCache::BytesFor(kv.cache(), context + TokensOf(steps)) +
              kv.cache().open.bytes()) +
         2 * kv.cache().open.bytes();
}

int LargestBatch(LoadedModel& loaded, uint64_t memory, int64_t context, int steps) {
  uint64_t fixed = loaded.memory().weight_bytes;
  double rounding = 1.0;  // of pages in the arena
  if (const auto taken = loaded.backend().device_memory()) {
    fixed = taken->weights + taken->activations;
    rounding = static_cast<double>(taken->pages) / static_cast<double>(loaded.memory().kv_bytes);
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
  PagePool& pool = loaded.pool();
  const uint64_t needed = DecodeBenchBytes(kv, context, batch, steps);
  if (needed > pool.budget()) {
    return Unexpected(ResourceExhausted(
        fmt::format("{} sequences of {} tokens need {} of cache, the budget is {}", batch, context,
                    FormatBytes(needed), FormatBytes(pool.budget()))));
  }
  std::vector<Bf16> numbers = RandomNumbers(kv.cache().open.bytes() / sizeof(Bf16));
  std::vector<SequenceCache> caches;
  for (int i = 0; i < batch; ++i) {
    // Each has a page of its own: sequences with the same past soon agree on the next token, and
    // so on experts.
    std::ranges::rotate(numbers, numbers.begin() + static_cast<ptrdiff_t>(numbers.size() / 97));
    OSCAR_ASSIGN_OR_RETURN(PageRef page, pool.Allocate(kv.cache().open));
    OSCAR_RETURN_IF_ERROR(pool.Write(page, std::as_bytes(std::span(numbers))));
    caches.emplace_back(kv.cache(), pool);
    OSCAR_RETURN_IF_ERROR(Fill(caches.back(), pool, page, context, loaded.threads()));
  }
  Model& model = loaded.model();
  DecodeBenchRow row;
  row.context = context;
  row.batch = batch;
  // In turn, because a device that has been busy for longer is slower.
  std::vector<double> alone, ahead;
  const bool runs_ahead = model.CanRunAhead() && model.max_samples() >= batch;
  const ExpertTraffic before = loaded.backend().expert_traffic();
  for (int round = 0; round < kRounds; ++round) {
    OSCAR_RETURN_IF_ERROR(TimeSteps(model, caches, steps, /*ahead=*/false, alone));
    if (runs_ahead) OSCAR_RETURN_IF_ERROR(TimeSteps(model, caches, steps, /*ahead=*/true, ahead));
  }
  row.seconds_alone = Median(std::move(alone));
  row.seconds_per_step = runs_ahead ? Median(std::move(ahead)) : row.seconds_alone;
  row.tokens_per_second = batch / row.seconds_per_step;
  row.weight_bytes = model.weight_bytes_per_step();
  const ExpertTraffic after = loaded.backend().expert_traffic();
  if (after.layers > before.layers) {
    // What one token's experts would be is in weight_bytes_per_step.
    uint64_t layers = 0, routed = 0;
    for (const LayerSpec& layer : model.spec().layers) {
      if (layer.experts() == nullptr) continue;
      ++layers;
      routed += static_cast<uint64_t>(layer.experts()->experts_per_token);
    }
    const uint64_t bytes = after.bytes - before.bytes, experts = after.experts - before.experts;
    const uint64_t steps_run = (after.layers - before.layers) / layers;
    row.weight_bytes += bytes / steps_run;
    row.weight_bytes -= bytes / experts * routed;
    row.experts_per_layer =
        static_cast<double>(experts) / static_cast<double>(after.layers - before.layers);
  }
  // A state is read and written.
  row.kv_bytes =
      static_cast<uint64_t>(batch) * (kv.StoredBytes(context) + 2 * kv.cache().state.bytes());
  row.bytes_per_second = static_cast<double>(row.bytes()) / row.seconds_per_step;
  return row;
}

Result<PrefillBenchRow> RunPrefillBench(LoadedModel& loaded, int64_t tokens) {
  constexpr int kRepetitions = 3;
  const ModelSpec& spec = loaded.spec();
  std::vector<int32_t> prompt(static_cast<size_t>(tokens));
  for (size_t i = 0; i < prompt.size(); ++i) {
    prompt[i] = static_cast<int32_t>(i * 7919 % static_cast<size_t>(spec.vocab_size));
  }
  PrefillBenchRow row;
  row.tokens = tokens;
  for (int i = 0; i <= kRepetitions; ++i) {
    SequenceCache cache(loaded.kv().cache(), loaded.pool());
    const auto start = std::chrono::steady_clock::now();
    OSCAR_RETURN_IF_ERROR(PromptReader(loaded.model(), cache, prompt, /*num_logits=*/1).ReadAll());
    const double seconds = SecondsSince(start);
    if (i == 1 || (i > 1 && seconds < row.seconds)) row.seconds = seconds;
  }
  // Multiply and add of every matrix that a token goes through; QK^T and PV over half of the
  // square. The head is for one token.
  const double count = static_cast<double>(tokens);
  const double tables = static_cast<double>(spec.hidden) * spec.vocab_size;
  const double matrices = static_cast<double>(TensorTable(spec).num_active_parameters()) -
                          tables * (spec.tied_head ? 1 : 2);
  row.flops = 2 * matrices * count + 2 * tables;
  for (const LayerSpec& layer : spec.layers) {
    if (layer.attention() != nullptr)
      row.flops += 2.0 * layer.attention()->q_width() * count * count;
  }
  return row;
}

}  // namespace oscar
