// Linear layers: prefill in share of the peak of each path's own instruction, decode in bytes of
// weights a second.
#include <benchmark/benchmark.h>

#include <vector>

#include "base/rng.h"
#include "base/thread_pool.h"
#include "simd/attention_bench.h"
#include "simd/gemm.h"

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
