// Linear layers: prefill in share of the peak of each path's own instruction, decode in bytes of
// weights a second.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <vector>

#include "base/rng.h"
#include "base/thread_pool.h"
#include "bench/attention_bench.h"
#include "simd/gemm.h"
#include "simd/gemm_kernels.h"

namespace oscar::simd {
namespace {

ThreadPool& Pool() {
  static ThreadPool pool(0);
  return pool;
}

void BM_Gemm(benchmark::State& state) {
  const auto path = static_cast<GemmPath>(state.range(0));
  const int rows = static_cast<int>(state.range(1)), size = static_cast<int>(state.range(2));
  if (!IsSupported(path)) {
    state.SkipWithError("not on this machine");
    return;
  }
  const auto elements = static_cast<size_t>(size) * static_cast<size_t>(size);
  const Philox rng(1, 1);
  std::vector<Bf16> w(elements);
  for (size_t i = 0; i < elements; ++i) w[i] = ToBf16(rng.Uniform(i) - 0.5f);
  PackedMatrix packed(size, size, path);
  packed.PackRows(Pool(), 0, size, std::span<const Bf16>(w));
  std::vector<float> x(static_cast<size_t>(rows) * static_cast<size_t>(size), 0.5f), y(x.size());
  GemmWorkspace workspace;
  for (auto _ : state) {
    Gemm(Pool(), workspace, x.data(), rows, static_cast<size_t>(size), packed, nullptr, y.data(),
         static_cast<size_t>(size));
    benchmark::ClobberMemory();
  }
  const double iterations = static_cast<double>(state.iterations());
  state.counters["flop/s"] = benchmark::Counter(
      2.0 * rows * static_cast<double>(elements) * iterations, benchmark::Counter::kIsRate);
  state.counters["weight_B/s"] = benchmark::Counter(
      2.0 * static_cast<double>(elements) * iterations, benchmark::Counter::kIsRate);
  state.SetLabel(std::string(GemmPathName(path)));
}
BENCHMARK(BM_Gemm)
    ->ArgNames({"path", "rows", "size"})
    ->ArgsProduct({{0, 1, 2}, {1, 4, 16, 256, 512}, {1024, 4096}})
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

// Where AMX loses: the kernel alone on one thread, with operands in L1 (32 x 256 by one panel), x
// in L2 (256 x 512 by one panel), a whole task (256 x 4096 by four panels); then whole products on
// more and more threads.
void BM_AmxPanels(benchmark::State& state) {
  const int blocks = static_cast<int>(state.range(0)), inputs = static_cast<int>(state.range(1));
  const int panels = static_cast<int>(state.range(2));
  if (!HasAmx()) {
    state.SkipWithError("not on this machine");
    return;
  }
  const uint16_t one = ToBf16(1.0f).bits;
  AlignedBuffer<uint16_t> x(static_cast<size_t>(blocks * 16 * inputs));
  AlignedBuffer<uint16_t> w(static_cast<size_t>(panels * PackedMatrix::kPanel * inputs));
  std::fill_n(x.data(), x.size(), one);
  std::fill_n(w.data(), w.size(), one);
  AlignedBuffer<float> sums(static_cast<size_t>(panels * blocks * kAmxSums));
  for (auto _ : state) AmxPanels(x.data(), blocks, inputs, w.data(), panels, sums.data());
  state.counters["flop/s"] =
      benchmark::Counter(2.0 * blocks * 16 * inputs * panels * PackedMatrix::kPanel *
                             static_cast<double>(state.iterations()),
                         benchmark::Counter::kIsRate);
}
BENCHMARK(BM_AmxPanels)
    ->ArgNames({"blocks", "inputs", "panels"})
    ->Args({2, 256, 1})
    ->Args({16, 512, 1})
    ->Args({16, 4096, 4})
    ->Unit(benchmark::kMicrosecond);

// All threads on the path's own instruction for about half a millisecond.
double PeakNow(ThreadPool& pool, GemmPath path) {
  constexpr int64_t kRounds = 15000;
  const int threads = pool.num_threads();
  std::vector<double> operations(static_cast<size_t>(threads));
  const auto start = std::chrono::steady_clock::now();
  pool.ParallelFor(threads, [&](int64_t i, int) {
    operations[static_cast<size_t>(i)] = Bf16PeakOperations(path, kRounds);
  });
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return std::accumulate(operations.begin(), operations.end(), 0.0) / seconds;
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// A neighbour on the same core halves products and peak alike from one moment to the next, so each
// product is measured against the peak right before and right after it. Threads are not pinned.
void BM_GemmThreads(benchmark::State& state) {
  const int threads = static_cast<int>(state.range(0)), rows = static_cast<int>(state.range(1));
  const int outputs = static_cast<int>(state.range(2)), inputs = static_cast<int>(state.range(3));
  const GemmPath path = DefaultGemmPath();
  if (path == GemmPath::kFma) {
    state.SkipWithError("no BF16 instruction on this machine");
    return;
  }
  ThreadPool pool(threads);
  PackedMatrix packed(outputs, inputs, path);
  const auto n = static_cast<size_t>(outputs), k = static_cast<size_t>(inputs);
  const Philox rng(1, 1);
  std::vector<Bf16> w(n * k);
  for (size_t i = 0; i < w.size(); ++i) w[i] = ToBf16(rng.Uniform(i) - 0.5f);
  packed.PackRows(pool, 0, outputs, std::span<const Bf16>(w));
  std::vector<float> x(static_cast<size_t>(rows) * k), y(static_cast<size_t>(rows) * n);
  for (size_t i = 0; i < x.size(); ++i) x[i] = rng.Uniform(i) - 0.5f;
  GemmWorkspace workspace;
  const double operations = 2.0 * rows * static_cast<double>(n * k);
  std::vector<double> rates, peaks, ratios;
  double before = PeakNow(pool, path);
  for (auto _ : state) {
    const auto start = std::chrono::steady_clock::now();
    Gemm(pool, workspace, x.data(), rows, k, packed, nullptr, y.data(), n);
    benchmark::ClobberMemory();
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    state.SetIterationTime(seconds);
    const double after = PeakNow(pool, path);
    peaks.push_back((before + after) / 2.0);
    before = after;
    rates.push_back(operations / seconds);
    ratios.push_back(rates.back() / peaks.back());
  }
  state.counters["flop/s"] = Median(rates);
  state.counters["best_flop/s"] = *std::max_element(rates.begin(), rates.end());
  state.counters["peak_flop/s"] = Median(peaks);
  state.counters["of_peak"] = Median(ratios);
  state.SetLabel(std::string(GemmPathName(path)));
}
BENCHMARK(BM_GemmThreads)
    ->ArgNames({"threads", "rows", "outputs", "inputs"})
    ->ArgsProduct({{1, 2, 4, 8, 16}, {256, 512}, {4096}, {4096}})
    ->Args({2, 256, 3072, 12288})
    ->Args({2, 256, 4096, 1024})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

// The roofs of this machine, in the same run.
void BM_Peak(benchmark::State& state) {
  const auto path = static_cast<GemmPath>(state.range(0));
  if (!IsSupported(path)) {
    state.SkipWithError("not on this machine");
    return;
  }
  double best = 0.0;
  for (auto _ : state) best = std::max(best, MeasurePeak(Pool(), path));
  state.counters["flop/s"] = best;
  state.SetLabel(std::string(GemmPathName(path)));
}
BENCHMARK(BM_Peak)->ArgName("path")->DenseRange(0, 2)->Iterations(3)->Unit(benchmark::kMillisecond);

void BM_ReadBandwidth(benchmark::State& state) {
  double best = 0.0;
  for (auto _ : state) best = std::max(best, MeasureReadBandwidth(Pool(), uint64_t{256} << 20));
  state.counters["B/s"] = best;
}
BENCHMARK(BM_ReadBandwidth)->Iterations(2)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace oscar::simd

BENCHMARK_MAIN();
