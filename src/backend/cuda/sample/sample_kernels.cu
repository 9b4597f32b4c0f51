// One block a row. Greedy: one pass. With neither top-k nor top-p every token is weighed in fp64,
// in the order of ids, as the scalar sampler does: each thread sums a run of them, and the one in
// whose run the sample falls goes through it again. Otherwise the 1024 most likely tokens are found
// by a radix select over order-preserving keys (three passes of 11, 11 and 10 bits), sorted in
// shared memory and weighed. Where the answer needs more of them than that (top-k beyond them, a
// nucleus beyond them, or more equal logits than fit) the row is left undecided and the caller
// fetches its logits. Tokens outside a row's mask take part in none of this, except that a value
// that is not finite is told of wherever it stands.
#include <cuda_runtime_api.h>

#include <cmath>

#include "cuda/device/cuda_status.h"
#include "cuda/sample/sample_kernels.h"

namespace oscar::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kKept = SampleParams::kMaxCandidates;  // that a sample may need
constexpr int kCapacity = 2 * kKept;                 // with those equal to the last

// Larger floats have larger keys, and both zeros the same; NaN is dealt with before.
__device__ __forceinline__ uint32_t KeyOf(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float ValueOf(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}
// Orders by logit, then by lower id; unsigned, larger first.
__device__ __forceinline__ uint64_t Packed(float x, int id) {
  return (uint64_t{KeyOf(x)} << 32) | (0xffffffffu - static_cast<uint32_t>(id));
}
__device__ __forceinline__ int IdOf(uint64_t packed) {
  return static_cast<int>(0xffffffffu - static_cast<uint32_t>(packed));
}

__device__ uint64_t BlockMax(uint64_t value, uint64_t* scratch) {
  for (int offset = 16; offset > 0; offset /= 2) {
    const uint64_t other = __shfl_xor_sync(~0u, value, offset);
    value = other > value ? other : value;
  }
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  value = scratch[threadIdx.x % 32];
  for (int offset = 16; offset > 0; offset /= 2) {
    const uint64_t other = __shfl_xor_sync(~0u, value, offset);
    value = other > value ? other : value;
  }
  __syncthreads();
  return value;
}

__device__ double BlockSum(double value, double* scratch) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  value = scratch[threadIdx.x % 32];
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  __syncthreads();
  return value;
}

// Of this thread and those before it.
__device__ double InclusiveSum(double value, double* scratch) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  for (int offset = 1; offset < 32; offset *= 2) {
    const double other = __shfl_up_sync(~0u, value, offset);
    if (lane >= offset) value += other;
  }
  if (lane == 31) scratch[warp] = value;
  __syncthreads();
  double before = 0.0;
  for (int i = 0; i < warp; ++i) before += scratch[i];
  __syncthreads();
  return before + value;
}

__device__ __forceinline__ bool IsAllowed(const uint32_t* mask, int i) {
  return mask == nullptr || (mask[i / 32] >> (i % 32) & 1u) != 0;
}

// How many of the first `vocab` bits are set.
__device__ int CountAllowed(const uint32_t* mask, int vocab, int* count) {
  if (mask == nullptr) return vocab;
  if (threadIdx.x == 0) *count = 0;
  __syncthreads();
  int mine = 0;
  for (int word = static_cast<int>(threadIdx.x); 32 * word < vocab; word += kThreads) {
    const int left = vocab - 32 * word;
    mine += __popc(left >= 32 ? mask[word] : mask[word] & ((1u << left) - 1u));
  }
  if (mine > 0) atomicAdd(count, mine);
  __syncthreads();
  const int all = *count;
  __syncthreads();
  return all;
}

// Samples from every token whose weight (1 for the largest) is at least min_p. `sums` [kThreads].
__device__ void SampleFromAll(const float* row, int vocab, const SampleParams& sample,
                              uint64_t best, double* sums, int* owner, int32_t* id) {
  const int tid = static_cast<int>(threadIdx.x);
  const float largest = ValueOf(static_cast<uint32_t>(best >> 32));
  const double inverse = 1.0 / static_cast<double>(sample.temperature);
  const auto weight = [&](int i) {
    if (!IsAllowed(sample.mask, i)) return 0.0;
    const double w = exp((static_cast<double>(row[i]) - largest) * inverse);
    return w >= sample.min_p ? w : 0.0;
  };
  const int run = (vocab + kThreads - 1) / kThreads;
  const int first = min(tid * run, vocab), end = min(first + run, vocab);
  double mine = 0.0;
  for (int i = first; i < end; ++i) mine += weight(i);
  const double upto = InclusiveSum(mine, sums);
  sums[tid] = upto;
  if (tid == 0) *owner = kThreads - 1;
  __syncthreads();
  const double u = sample.uniform * sums[kThreads - 1];
  if (u < upto) atomicMin(owner, tid);
  __syncthreads();
  if (tid != *owner) return;
  double sum = tid > 0 ? sums[tid - 1] : 0.0;
  int32_t sampled = IdOf(best);  // rounding may leave nothing in the run that `u` falls into
  for (int i = first; i < end; ++i) {
    const double w = weight(i);
    if (w > 0.0) sampled = i;
    sum += w;
    if (u < sum) break;
  }
  *id = sampled;
}

// The bin (from the top) in which the `want`-th largest falls, and how many lie above it.
__device__ void FindBin(const int* histogram, int bins, int want, int* bin, int* above) {
  if (threadIdx.x == 0) {
    int sum = 0, at = bins - 1;
    for (; at > 0 && sum + histogram[at] < want; --at) sum += histogram[at];
    *bin = at;
    *above = sum;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads)
    SampleKernel(const float* logits, const int32_t* sources, const SampleParams* sampling,
                 int32_t* ids, int vocab) {
  __shared__ uint64_t candidates[kCapacity];
  __shared__ double weights[kCapacity];
  __shared__ int histogram[2048];
  __shared__ int shared_bin, shared_above, count;
  const SampleParams sample = sampling[blockIdx.x];
  const float* row = logits + int64_t{sources[blockIdx.x]} * vocab;
  const int tid = static_cast<int>(threadIdx.x);

  uint64_t best = 0;
  bool bad = false;
  const auto consider = [&](float x, int i) {
    bad |= !isfinite(x);
    if (!IsAllowed(sample.mask, i)) return;
    const uint64_t packed = Packed(x, i);
    best = packed > best ? packed : best;
  };
  // Rows are 16-byte aligned where the vocabulary is a multiple of 4; several loads in flight.
  const int vectors = vocab % 4 == 0 ? vocab / 4 : 0;
#pragma unroll 8
  for (int i = tid; i < vectors; i += kThreads) {
    const float4 x = reinterpret_cast<const float4*>(row)[i];
    consider(x.x, 4 * i);
    consider(x.y, 4 * i + 1);
    consider(x.z, 4 * i + 2);
    consider(x.w, 4 * i + 3);
  }
  for (int i = 4 * vectors + tid; i < vocab; i += kThreads) consider(row[i], i);
  if (__syncthreads_or(bad)) {
    if (tid == 0) ids[blockIdx.x] = SampleParams::kNotFinite;
    return;
  }
  best = BlockMax(best, candidates);
  if (sample.temperature == 0.0f) {
    if (tid == 0) ids[blockIdx.x] = IdOf(best);
    return;
  }
  const int allowed = CountAllowed(sample.mask, vocab, &count);
  const bool limited = sample.top_k > 0 && sample.top_k < allowed;
  if (!limited && sample.top_p >= 1.0f) {
    SampleFromAll(row, vocab, sample, best, weights, &count, &ids[blockIdx.x]);
    return;
  }
  if (limited && sample.top_k > kKept) {
    if (tid == 0) ids[blockIdx.x] = SampleParams::kUndecided;
    return;
  }
  const float largest = ValueOf(static_cast<uint32_t>(best >> 32));
  const double inverse = 1.0 / static_cast<double>(sample.temperature);
  const int wanted = limited ? sample.top_k : allowed;
  const int keep = min(wanted, kKept);
  double all = 0.0;  // of the weights of every token, where top-k is off
  if (!limited) {
    for (int i = tid; i < vocab; i += kThreads) {
      if (IsAllowed(sample.mask, i)) all += exp((static_cast<double>(row[i]) - largest) * inverse);
    }
    all = BlockSum(all, weights);
  }

  // The key of the keep-th largest, digit by digit.
  uint32_t prefix = 0, mask = 0;
  int want = keep;
  for (int pass = 0; pass < 3; ++pass) {
    const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0, bins = pass == 2 ? 1024 : 2048;
    for (int i = tid; i < bins; i += kThreads) histogram[i] = 0;
    __syncthreads();
    for (int i = tid; i < vocab; i += kThreads) {
      const uint32_t key = KeyOf(row[i]);
      if ((key & mask) == prefix && IsAllowed(sample.mask, i))
        atomicAdd(&histogram[(key >> shift) & (bins - 1)], 1);
    }
    __syncthreads();
    FindBin(histogram, bins, want, &shared_bin, &shared_above);
    prefix |= static_cast<uint32_t>(shared_bin) << shift;
    mask |= static_cast<uint32_t>(bins - 1) << shift;
    want -= shared_above;
    __syncthreads();
  }
  if (tid == 0) count = 0;
  for (int i = tid; i < kCapacity; i += kThreads) candidates[i] = 0;
  __syncthreads();
  for (int i = tid; i < vocab; i += kThreads) {
    if (KeyOf(row[i]) < prefix || !IsAllowed(sample.mask, i)) continue;
    const int at = atomicAdd(&count, 1);
    if (at < kCapacity) candidates[at] = Packed(row[i], i);
  }
  __syncthreads();
  if (count > kCapacity) {
    if (tid == 0) ids[blockIdx.x] = SampleParams::kUndecided;
    return;
  }
  // Bitonic, descending; empty slots are 0 and end up last.
  for (int size = 2; size <= kCapacity; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      for (int i = tid; i < kCapacity / 2; i += kThreads) {
        const int low = 2 * i - (i & (stride - 1)), high = low + stride;
        const bool descending = (low & size) == 0;
        const uint64_t a = candidates[low], b = candidates[high];
        if ((a < b) == descending) {
          candidates[low] = b;
          candidates[high] = a;
        }
      }
      __syncthreads();
    }
  }
  for (int i = tid; i < keep; i += kThreads) {
    const float x = ValueOf(static_cast<uint32_t>(candidates[i] >> 32));
    weights[i] = exp((static_cast<double>(x) - largest) * inverse);
  }
  __syncthreads();
  if (tid != 0) return;
  int kept = keep;
  double total = 0.0;
  if (limited) {
    all = 0.0;
    for (int i = 0; i < keep; ++i) all += weights[i];
  }
  if (sample.top_p < 1.0f) {
    kept = 0;
    while (kept < keep && total < sample.top_p * all) total += weights[kept++];
    if (total < sample.top_p * all && keep < wanted) {
      ids[blockIdx.x] = SampleParams::kUndecided;
      return;
    }
  }
  if (sample.min_p > 0.0f) {
    int end = 0;
    while (end < kept && weights[end] >= sample.min_p) ++end;
    kept = end;
  }
  total = 0.0;
  for (int i = 0; i < kept; ++i) total += weights[i];
  const double u = sample.uniform * total;
  double sum = 0.0;
  int id = IdOf(candidates[kept - 1]);
  for (int i = 0; i < kept; ++i) {
    sum += weights[i];
    if (u < sum) {
      id = IdOf(candidates[i]);
      break;
    }
  }
  ids[blockIdx.x] = id;
}

}  // namespace

Status LaunchSample(const float* logits, const int32_t* sources, const SampleParams* sampling,
                    int32_t* ids, int rows, int vocab, Stream stream) {
  if (rows == 0) return {};
  SampleKernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(logits, sources, sampling, ids,
                                                                     vocab);
  return CudaStatus(cudaGetLastError(), "launching the sample");
}

}  // namespace oscar::cuda
