// Linear layers: prefill in share of the peak of each path's own instruction, decode in bytes of
// weights a second.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "base/rng.h"
#include "base/thread_pool.h"
#include "simd/attention_bench.h"
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

void BM_GemmThreads(benchmark::State& state) {
  const int threads = static_cast<int>(state.range(0)), rows = static_cast<int>(state.range(1));
  constexpr int kSize = 4096;
  const GemmPath path = DefaultGemmPath();
  ThreadPool pool(threads);
  PackedMatrix packed(kSize, kSize, path);
  const std::vector<Bf16> w(size_t{kSize} * kSize, ToBf16(0.5f));
  packed.PackRows(pool, 0, kSize, std::span<const Bf16>(w));
  std::vector<float> x(static_cast<size_t>(rows) * kSize, 0.5f), y(x.size());
  GemmWorkspace workspace;
  double best = 1e30;
  for (auto _ : state) {
    const auto start = std::chrono::steady_clock::now();
    Gemm(pool, workspace, x.data(), rows, kSize, packed, nullptr, y.data(), kSize);
    benchmark::ClobberMemory();
    best = std::min(
        best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  const double operations = 2.0 * rows * kSize * kSize;
  state.counters["flop/s"] = benchmark::Counter(
      operations * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
  state.counters["best_flop/s"] = operations / best;
  state.counters["peak_flop/s"] = MeasurePeak(pool, path);
  state.SetLabel(std::string(GemmPathName(path)));
}
BENCHMARK(BM_GemmThreads)
    ->ArgNames({"threads", "rows"})
    ->ArgsProduct({{1, 2, 4, 8, 16}, {256, 512}})
    ->UseRealTime()
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
