// Scalar encode and decode of INT2 rows and pages, per rule, beside memcpy of the same BF16 bytes
// in the same run. Rates are bytes of BF16 rows a second on one core: K and V of a token of one
// head count 4 D bytes. This is the reference code; bench/ programs of the simd and cuda modules
// measure the writers that serve.
//
//   build/release/bench/quant_bench --benchmark_min_time=0.2
#include <benchmark/benchmark.h>

#include <cstring>
#include <vector>

#include "base/rng.h"
#include "cache/block_codec.h"
#include "quant/kv_method.h"

namespace oscar {
namespace {

constexpr int kDims = 128;
constexpr int kPages = 64;  // of memcpy: 2 MiB of BF16, out of L1 and mostly out of L2

std::vector<Bf16> GaussianRows(size_t count, uint64_t stream) {
  const Philox rng(1, stream);
  std::vector<Bf16> rows(count);
  for (size_t i = 0; i < count; ++i) rows[i] = ToBf16(rng.Normal(i));
  return rows;
}

std::vector<float> Widen(const std::vector<Bf16>& rows) {
  std::vector<float> x(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) x[i] = ToFloat(rows[i]);
  return x;
}

void SetRate(benchmark::State& state, size_t elements) {
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(elements * sizeof(Bf16)));
}

void Memcpy(benchmark::State& state) {
  const auto rows = GaussianRows(size_t{2} * kPages * kPageTokens * kDims, 0);
  std::vector<Bf16> copy(rows.size());
  for (auto _ : state) {
    std::memcpy(copy.data(), rows.data(), rows.size() * sizeof(Bf16));
    benchmark::DoNotOptimize(copy.data());
    benchmark::ClobberMemory();
  }
  SetRate(state, rows.size());
}
BENCHMARK(Memcpy);

const char* NameOf(RowRule rule) {
  switch (rule) {
    case RowRule::kMinMax:
      return "min/max";
    case RowRule::kSymmetric:
      return "symmetric";
    case RowRule::kMseFit:
      return "fit";
    case RowRule::kMseFitUnbiased:
      return "unbiased fit";
    case RowRule::kRealMin:
      return "real min";
    case RowRule::kIntegerZero:
      return "integer zero";
    case RowRule::kLloydMax:
      return "Lloyd-Max";
  }
  return "";
}

RowSpec SpecOf(const benchmark::State& state) {
  RowSpec spec;
  spec.rule = static_cast<RowRule>(state.range(0));
  spec.clip_ratio = static_cast<float>(state.range(1)) / 100.0f;
  spec.group_dims = static_cast<int>(state.range(2));
  return spec;
}

// Arguments: rule, clip in percent, group.
void RowCases(benchmark::internal::Benchmark* b) {
  b->ArgNames({"rule", "clip", "group"});
  for (int64_t group : {128, 32}) {
    b->Args({static_cast<int64_t>(RowRule::kMinMax), 0, group});
    b->Args({static_cast<int64_t>(RowRule::kMinMax), 96, group});
    b->Args({static_cast<int64_t>(RowRule::kSymmetric), 0, group});
    b->Args({static_cast<int64_t>(RowRule::kMseFit), 0, group});
    b->Args({static_cast<int64_t>(RowRule::kMseFitUnbiased), 0, group});
    b->Args({static_cast<int64_t>(RowRule::kLloydMax), 96, group});
  }
}

void EncodeRows(benchmark::State& state) {
  const RowSpec spec = SpecOf(state);
  const auto rows = Widen(GaussianRows(size_t{kPageTokens} * kDims, 1));
  std::vector<uint8_t> codes(kDims);
  std::vector<float> scale(kMaxGroups), min(kMaxGroups);
  for (auto _ : state) {
    for (size_t r = 0; r < kPageTokens; ++r) {
      QuantizeRow(spec, {rows.data() + r * kDims, kDims}, codes, scale, min);
      benchmark::DoNotOptimize(codes.data());
    }
  }
  state.SetLabel(NameOf(spec.rule));
  SetRate(state, rows.size());
}
BENCHMARK(EncodeRows)->Apply(RowCases);

void DecodeRows(benchmark::State& state) {
  const RowSpec spec = SpecOf(state);
  const auto rows = Widen(GaussianRows(kDims, 2));
  std::vector<uint8_t> codes(kDims);
  std::vector<float> scale(kMaxGroups), min(kMaxGroups), back(kDims);
  QuantizeRow(spec, rows, codes, scale, min);
  for (auto _ : state) {
    DequantizeRow(spec, codes, scale, min, back);
    benchmark::DoNotOptimize(back.data());
    benchmark::ClobberMemory();
  }
  SetRate(state, rows.size());
}
// Decoding does not depend on the rule.
BENCHMARK(DecodeRows)->ArgNames({"rule", "clip", "group"})->Args({0, 0, 128})->Args({0, 0, 32});

// Whole pages, K and V, in the order of each backend. Arguments: rule of K and V, clip in percent,
// order.
void EncodePages(benchmark::State& state) {
  const BlockRules rules{static_cast<RowRule>(state.range(0)), static_cast<RowRule>(state.range(0)),
                         static_cast<float>(state.range(1)) / 100.0f,
                         static_cast<float>(state.range(1)) / 100.0f};
  const BlockLayout layout(BlockKind::kInt2, static_cast<CodeOrder>(state.range(2)), kDims, kDims);
  const auto k = GaussianRows(size_t{kPageTokens} * kDims, 3);
  const auto v = GaussianRows(size_t{kPageTokens} * kDims, 4);
  std::vector<std::byte> block(layout.block_bytes());
  for (auto _ : state) {
    EncodeBlock(layout, rules, k, v, block);
    benchmark::DoNotOptimize(block.data());
    benchmark::ClobberMemory();
  }
  state.SetLabel(NameOf(rules.k_rule));
  SetRate(state, k.size() + v.size());
}
BENCHMARK(EncodePages)->Apply([](benchmark::internal::Benchmark* b) {
  b->ArgNames({"rule", "clip", "order"});
  for (CodeOrder order : {CodeOrder::kTensorCore, CodeOrder::kCpu}) {
    b->Args({static_cast<int64_t>(RowRule::kMinMax), 0, static_cast<int64_t>(order)});
    b->Args({static_cast<int64_t>(RowRule::kMinMax), 96, static_cast<int64_t>(order)});
    b->Args({static_cast<int64_t>(RowRule::kMseFit), 0, static_cast<int64_t>(order)});
    b->Args({static_cast<int64_t>(RowRule::kMseFitUnbiased), 0, static_cast<int64_t>(order)});
    b->Args({static_cast<int64_t>(RowRule::kLloydMax), 96, static_cast<int64_t>(order)});
  }
});

void DecodePages(benchmark::State& state) {
  const BlockLayout layout(BlockKind::kInt2, static_cast<CodeOrder>(state.range(0)), kDims, kDims);
  const auto rows = GaussianRows(size_t{kPageTokens} * kDims, 5);
  std::vector<std::byte> block(layout.block_bytes());
  EncodeBlock(layout, {}, rows, rows, block);
  std::vector<float> k(rows.size()), v(rows.size());
  for (auto _ : state) {
    DecodeBlock(layout, block, k, v);
    benchmark::DoNotOptimize(k.data());
    benchmark::ClobberMemory();
  }
  SetRate(state, 2 * rows.size());
}
BENCHMARK(DecodePages)->ArgName("order")->Arg(0)->Arg(1);

// Every method of the table through its own bytes: K and V of one block of 8 heads.
void Method(benchmark::State& state, const std::string& name, bool encode) {
  KvMethodOptions options;
  options.name = name;
  options.has_rotation = name == "oscar";
  const auto method = MakeKvMethod(options);
  if (!method.has_value()) {
    state.SkipWithError(method.error().ToString().c_str());
    return;
  }
  const TileShape shape{method->run_tokens, 8, kDims};
  auto rows = Widen(GaussianRows(shape.elements(), 6));
  const KvQuantizer& k_codec = *method->k.quantizer;
  const KvQuantizer& v_codec = *method->v.quantizer;
  std::vector<std::byte> k(k_codec.EncodedBytes(shape)), v(v_codec.EncodedBytes(shape));
  k_codec.Encode(shape, rows, k);
  v_codec.Encode(shape, rows, v);
  for (auto _ : state) {
    if (encode) {
      k_codec.Encode(shape, rows, k);
      v_codec.Encode(shape, rows, v);
    } else if (!k_codec.Decode(shape, k, rows).ok() || !v_codec.Decode(shape, v, rows).ok()) {
      state.SkipWithError("decode failed");
    }
    benchmark::ClobberMemory();
  }
  SetRate(state, 2 * shape.elements());
}

const bool kMethodsRegistered = [] {
  for (const KvMethodInfo& info : KvMethodTable()) {
    const std::string name(info.name);
    benchmark::RegisterBenchmark(("MethodEncode/" + name).c_str(), [name](benchmark::State& state) {
      Method(state, name, /*encode=*/true);
    });
    benchmark::RegisterBenchmark(("MethodDecode/" + name).c_str(), [name](benchmark::State& state) {
      Method(state, name, /*encode=*/false);
    });
  }
  return true;
}();

}  // namespace
}  // namespace oscar

BENCHMARK_MAIN();
