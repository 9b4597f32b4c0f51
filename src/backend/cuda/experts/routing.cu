// Routing of rows to experts.
//
// Router     grid: a warp for some experts and rows, then a warp a row for the normed input, in one
//            launch. A lane takes four consecutive inputs in 128, so that a sum's order is the same
//            whatever the tile, and a row's choice the same in any batch. fp32 on CUDA cores: the
//            choice hangs on last bits. Bytes: experts x hidden x 4, once for every 8 rows, out of
//            the L2. Few rows: latency of the loads, which are all in flight at once; prompts: half
//            of a tile's issue slots are loads, so at most half of the fp32 peak. Loads of few rows
//            are written out in batches, since no compiler takes one past a loop's end.
// Choose     a warp a row; scores in registers, an argmax over lanes for each choice. Up to 32 rows
//            are chosen for and sorted by one block, a launch less.
// Sort       one block: counts, a scan, places by shared-memory atomics. Places within an expert
// come
//            in any order, which no result shows: rows of a GEMM do not depend on one another, and
//            Combine goes by choice.
// Combine    a thread four numbers of a row. Bytes: rows x (choices + 2) x hidden x 4.
#include <algorithm>
#include <cfloat>

#include "cuda/device/launch.h"
#include "cuda/device/ptx.cuh"
#include "cuda/experts/lane_order.h"
#include "cuda/experts/routing.h"
#include "cuda/gemm/gemm_kernels.cuh"

namespace oscar::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;

__device__ __forceinline__ float WarpSum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

__device__ __forceinline__ float Dot(float4 a, float4 b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// Calls use(i, batch) for this lane's vectors of a row, kBatch loads at a time: load(i) of those
// within `end`.
template <int kBatch, typename Load, typename Use>
__device__ __forceinline__ void ForVectors(int lane, int end, const Load& load, const Use& use) {
  for (int first = lane * 4; first < end; first += 128 * kBatch) {
    decltype(load(0)) loaded[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (first + b * 128 < end) loaded[b] = load(first + b * 128);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (first + b * 128 < end) use(first + b * 128, loaded[b]);
    }
  }
}

__device__ void NormRow(const RouterArguments& p, int row, int lane) {
  const float* x = p.x + int64_t{row} * p.hidden;
  const auto load = [&](int i) { return *reinterpret_cast<const float4*>(x + i); };
  float sum = 0.0f;
  ForVectors<8>(lane, p.hidden, load, [&](int, const float4& v) { sum = Dot(v, v, sum); });
  const float factor = 1.0f / sqrtf(WarpSum(sum) / static_cast<float>(p.hidden) + p.epsilon);
  auto* const out = reinterpret_cast<uint16_t*>(p.normed) + int64_t{row} * p.normed_stride;
  struct Both {
    float4 v, w;
  };
  const auto load_both = [&](int i) {
    if (i >= p.hidden) return Both{};
    return Both{load(i), __ldg(reinterpret_cast<const float4*>(p.norm + i))};
  };
  ForVectors<8>(lane, p.normed_stride, load_both, [&](int i, const Both& both) {
    const float4 &v = both.v, &w = both.w;
    uint2 pairs = make_uint2(PackBf16(v.x * factor * w.x, v.y * factor * w.y),
                             PackBf16(v.z * factor * w.z, v.w * factor * w.w));
    if (p.raise) pairs = make_uint2(RaiseForFp8(pairs.x), RaiseForFp8(pairs.y));
    if (p.lane_order) {
      *reinterpret_cast<uint32_t*>(out + PlaceOfInput(i)) = pairs.x;
      *reinterpret_cast<uint32_t*>(out + PlaceOfInput(i + 2)) = pairs.y;
    } else {
      *reinterpret_cast<uint2*>(out + i) = pairs;
    }
  });
}

// Blocks [0, logit_blocks) have logits, those beyond the normed rows.
template <int kRows, int kExperts>
__global__ void __launch_bounds__(kThreads)
    RouterKernel(const RouterArguments p, int logit_blocks) {
  LetSuccessorStart();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const auto block = static_cast<int>(blockIdx.x);
  if (block >= logit_blocks) {
    WaitForPredecessor();
    const int row = (block - logit_blocks) * kWarps + warp;
    if (row < p.rows) NormRow(p, row, lane);
    return;
  }
  constexpr int kOfBlock = kWarps * kExperts;
  const int across = (p.num_experts + kOfBlock - 1) / kOfBlock;
  const int first_expert = block % across * kOfBlock + warp * kExperts;
  const int first_row = block / across * kRows;
  if (first_expert >= p.num_experts) return;
  // The last ones are computed again where there are fewer.
  const float* x[kRows];
  const float* w[kExperts];
#pragma unroll
  for (int r = 0; r < kRows; ++r) x[r] = p.x + int64_t{min(first_row + r, p.rows - 1)} * p.hidden;
#pragma unroll
  for (int e = 0; e < kExperts; ++e) {
    w[e] = p.router + int64_t{min(first_expert + e, p.num_experts - 1)} * p.hidden;
  }
  if constexpr (kExperts == 1) {  // the predecessor has no part in them
    for (int i = lane * 32; i < p.hidden; i += 1024) PrefetchL2(w[0] + i);
  }
  WaitForPredecessor();
  float sums[kRows][kExperts] = {}, squares[kRows] = {};
  struct Inputs {
    float4 weights[kExperts], x[kRows];
  };
  constexpr int kBatch = kExperts > 1 ? 1 : kRows == 1 ? 8 : 4;
  const auto load = [&](int i) {
    Inputs in;
#pragma unroll
    for (int e = 0; e < kExperts; ++e) {
      in.weights[e] = __ldg(reinterpret_cast<const float4*>(w[e] + i));
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) in.x[r] = *reinterpret_cast<const float4*>(x[r] + i);
    return in;
  };
  ForVectors<kBatch>(lane, p.hidden, load, [&](int, const Inputs& in) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      squares[r] = Dot(in.x[r], in.x[r], squares[r]);
#pragma unroll
      for (int e = 0; e < kExperts; ++e) sums[r][e] = Dot(in.weights[e], in.x[r], sums[r][e]);
    }
  });
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float mean = WarpSum(squares[r]) / static_cast<float>(p.hidden);
    const float factor = 1.0f / sqrtf(mean + p.epsilon);
#pragma unroll
    for (int e = 0; e < kExperts; ++e) {
      float logit = WarpSum(sums[r][e]) * factor;
      if (p.bias != nullptr) logit += __ldg(p.bias + min(first_expert + e, p.num_experts - 1));
      if (lane == 0 && first_row + r < p.rows && first_expert + e < p.num_experts) {
        p.logits[int64_t{first_row + r} * p.num_experts + first_expert + e] = logit;
      }
    }
  }
}

struct ChooseParams {
  const float *logits, *bias;
  const int32_t* positions;
  int32_t* experts;
  float* weights;
  int rows, num_experts, choices, groups, chosen_groups;
  RouterScore score;
  bool are_scores, normalize;
  float weight_scale;
};

// The larger of two, the lower index where they are equal.
__device__ __forceinline__ void KeepBetter(float value, int index, float* best, int* at) {
  if (value > *best || (value == *best && index < *at)) *best = value, *at = index;
}
// Of all lanes, in all lanes.
__device__ __forceinline__ int WarpArgMax(float best, int at) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const float value = __shfl_xor_sync(~0u, best, offset);
    const int index = __shfl_xor_sync(~0u, at, offset);
    KeepBetter(value, index, &best, &at);
  }
  return at;
}

constexpr float kLeast = -INFINITY, kLog2E = 1.4426950408889634f;
constexpr int kNowhere = 1 << 30;

// Ranks outside the best groups become the least.
template <int kSlots>
__device__ void KeepBestGroups(const ChooseParams& p, int lane, float (&rank)[kSlots]) {
  const int size = p.num_experts / p.groups;
  float total = kLeast;  // of group `lane`
  for (int g = 0; g < p.groups; ++g) {
    float first = kLeast, second = kLeast;
    const auto add = [&](float x) {
      second = fmaxf(second, fminf(first, x));
      first = fmaxf(first, x);
    };
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const int e = lane + 32 * i;
      if (e >= g * size && e < (g + 1) * size) add(rank[i]);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const float a = __shfl_xor_sync(~0u, first, offset), b = __shfl_xor_sync(~0u, second, offset);
      add(a);
      second = fmaxf(second, b);
    }
    if (lane == g) total = first + second;
  }
  uint32_t kept = 0;
  int index = lane < p.groups ? lane : kNowhere;
  for (int i = 0; i < p.chosen_groups; ++i) {
    const int best = WarpArgMax(total, index);
    kept |= 1u << best;
    if (lane == best) total = kLeast, index = kNowhere;
  }
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    const int e = lane + 32 * i;
    if (e < p.num_experts && (kept >> (e / size) & 1u) == 0) rank[i] = kLeast;
  }
}

// By a warp.
template <int kSlots>
__device__ __forceinline__ void ChooseForRow(const ChooseParams& p, int row, int lane) {
  if (row >= p.rows) return;
  const int64_t at = int64_t{row} * p.choices + lane;
  if (p.positions[row] < 0) {
    if (lane < p.choices) p.experts[at] = -1, p.weights[at] = 0.0f;
    return;
  }
  float score[kSlots], rank[kSlots];
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    const int e = lane + 32 * i;
    score[i] = e < p.num_experts ? p.logits[int64_t{row} * p.num_experts + e] : kLeast;
  }
  if (!p.are_scores && p.score == RouterScore::kSigmoid) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) score[i] = 1.0f / (1.0f + Exp2(score[i] * -kLog2E));
  } else if (!p.are_scores) {
    float largest = kLeast, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) largest = fmaxf(largest, score[i]);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, offset));
    }
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      score[i] = lane + 32 * i < p.num_experts ? Exp2((score[i] - largest) * kLog2E) : 0.0f;
      sum += score[i];
    }
    sum = WarpSum(sum);
#pragma unroll
    for (int i = 0; i < kSlots; ++i) score[i] /= sum;
  }
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    const int e = lane + 32 * i;
    rank[i] = score[i];
    if (p.bias != nullptr && e < p.num_experts) rank[i] += p.bias[e];
    if (rank[i] != rank[i]) rank[i] = -FLT_MAX;
    if (e >= p.num_experts) rank[i] = kLeast;
  }
  if (p.groups > 1) KeepBestGroups(p, lane, rank);
  int mine = 0;  // choice `lane`
  float weight = 0.0f, sum = 0.0f;
  for (int j = 0; j < p.choices; ++j) {
    float best = kLeast;
    int index = kNowhere;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (lane + 32 * i < p.num_experts) KeepBetter(rank[i], lane + 32 * i, &best, &index);
    }
    const int expert = WarpArgMax(best, index);
    float own = 0.0f;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (expert == lane + 32 * i) own = score[i], rank[i] = kLeast;
    }
    const float chosen = __shfl_sync(~0u, own, expert % 32);
    sum += chosen;
    if (lane == j) mine = expert, weight = chosen;
  }
  if (lane >= p.choices) return;
  if (p.normalize) weight /= sum + 1e-20f;
  p.experts[at] = mine;
  p.weights[at] = weight * p.weight_scale;
}

template <int kSlots>
__global__ void __launch_bounds__(kThreads) ChooseKernel(const ChooseParams p) {
  LetSuccessorStart();
  WaitForPredecessor();
  ChooseForRow<kSlots>(p,
                       static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32,
                       static_cast<int>(threadIdx.x) % 32);
}

constexpr int kSortThreads = 1024;

struct SortParams {
  Routing routing;
  int pairs, choices, num_experts, tile_rows;
  ExpertCounts* counts;
};

// kSlots > 0: the choice as well, a warp for each of the rows, which are no more than there are
// warps.
template <int kSlots>
__global__ void __launch_bounds__(kSortThreads)
    SortKernel(const SortParams p, const ChooseParams choose) {
  __shared__ int count[kMaxDeviceExperts], first[kMaxDeviceExperts], first_tile[kMaxDeviceExperts];
  LetSuccessorStart();
  const auto thread = static_cast<int>(threadIdx.x);
  const Routing& routing = p.routing;
  const int pairs = p.pairs, choices = p.choices, num_experts = p.num_experts;
  const int tile_rows = p.tile_rows;
  ExpertCounts* const counts = p.counts;
  for (int e = thread; e < kMaxDeviceExperts; e += kSortThreads) count[e] = 0;
  WaitForPredecessor();
  if constexpr (kSlots > 0) ChooseForRow<kSlots>(choose, thread / 32, thread % 32);
  __syncthreads();
  for (int i = thread; i < pairs; i += kSortThreads) {
    const int expert = routing.experts[i];
    if (expert >= 0) atomicAdd(&count[expert], 1);
  }
  __syncthreads();
  if (thread < 32) {
    // Each lane scans its experts, then the lanes are scanned.
    const int of_lane = (num_experts + 31) / 32;
    int places = 0, tiles = 0, touched = 0;
    for (int i = 0; i < of_lane; ++i) {
      const int n = count[thread * of_lane + i];
      places += n;
      tiles += (n + tile_rows - 1) / tile_rows;
      touched += n > 0 ? 1 : 0;
    }
    int place = places, tile = tiles;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int other_place = __shfl_up_sync(~0u, place, offset);
      const int other_tile = __shfl_up_sync(~0u, tile, offset);
      if (thread >= offset) place += other_place, tile += other_tile;
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      touched += __shfl_xor_sync(~0u, touched, offset);
    }
    if (thread == 31) {
      *routing.num_tiles = tile;
      if (counts != nullptr && touched > 0) ++counts->runs, counts->touched += touched;
    }
    place -= places;
    tile -= tiles;
    for (int i = 0; i < of_lane; ++i) {
      const int e = thread * of_lane + i, n = count[e];
      first[e] = place;
      first_tile[e] = tile;
      place += n;
      tile += (n + tile_rows - 1) / tile_rows;
    }
  }
  __syncthreads();
  for (int e = thread; e < num_experts; e += kSortThreads) {
    for (int row = 0, tile = first_tile[e]; row < count[e]; row += tile_rows, ++tile) {
      routing.tiles[tile] = {e, first[e] + row, min(tile_rows, count[e] - row)};
    }
  }
  __syncthreads();
  for (int i = thread; i < pairs; i += kSortThreads) {
    const int expert = routing.experts[i];
    const int place = expert >= 0 ? atomicAdd(&first[expert], 1) : -1;
    routing.places[i] = place;
    if (place >= 0) routing.rows[place] = i / choices;
  }
}

constexpr int kCombineThreads = 256;

__global__ void __launch_bounds__(kCombineThreads)
    CombineKernel(const Routing routing, const float* outputs, float* stream, int rows, int hidden,
                  int choices) {
  LetSuccessorStart();
  WaitForPredecessor();
  const int per_row = hidden / 4;
  const int64_t vector = int64_t{blockIdx.x} * kCombineThreads + threadIdx.x;
  if (vector >= int64_t{rows} * per_row) return;
  const auto row = static_cast<int>(vector / per_row);
  const int column = static_cast<int>(vector % per_row) * 4;
  auto* const to = reinterpret_cast<float4*>(stream + int64_t{row} * hidden + column);
  float4 sum = *to;
#pragma unroll 8
  for (int i = row * choices; i < (row + 1) * choices; ++i) {
    const int place = routing.places[i];
    if (place < 0) continue;
    const float w = routing.weights[i];
    const auto y = *reinterpret_cast<const float4*>(outputs + int64_t{place} * hidden + column);
    sum.x = fmaf(w, y.x, sum.x);
    sum.y = fmaf(w, y.y, sum.y);
    sum.z = fmaf(w, y.z, sum.z);
    sum.w = fmaf(w, y.w, sum.w);
  }
  *to = sum;
}

template <int kRows, int kExperts>
Status Launch(const RouterArguments& args, Stream stream) {
  constexpr int kOfBlock = kWarps * kExperts;
  int logit_blocks =
      (args.num_experts + kOfBlock - 1) / kOfBlock * ((args.rows + kRows - 1) / kRows);
  RouterArguments params = args;
  void* kernel_args[] = {&params, &logit_blocks};
  return LaunchOverlapping(reinterpret_cast<const void*>(&RouterKernel<kRows, kExperts>),
                           {logit_blocks + (args.rows + kWarps - 1) / kWarps, kThreads},
                           kernel_args, stream, "launching a router");
}

}  // namespace

Status LaunchRouter(const RouterArguments& args, Stream stream) {
  if (args.rows <= 0) return {};
  if (args.rows == 1) return Launch<1, 1>(args, stream);
  return args.rows <= 32 ? Launch<4, 1>(args, stream) : Launch<8, 4>(args, stream);
}

Status LaunchChoiceAndSort(const ExpertsSpec& experts, const RoutingArguments& args,
                           const Routing& routing, ExpertCounts* counts, Stream stream) {
  if (args.rows <= 0) return {};
  OSCAR_RETURN_IF_ERROR(CheckExperts(experts));
  ChooseParams choose{args.logits,
                      args.bias,
                      args.positions,
                      routing.experts,
                      routing.weights,
                      args.rows,
                      experts.num_experts,
                      experts.experts_per_token,
                      experts.groups,
                      experts.chosen_groups,
                      experts.score,
                      args.are_scores,
                      experts.normalize_weights,
                      experts.weight_scale};
  SortParams sort{routing,
                  args.rows * experts.experts_per_token,
                  experts.experts_per_token,
                  experts.num_experts,
                  args.tile_rows,
                  counts};
  const auto by_experts = [&](const void* few, const void* some, const void* many) {
    return experts.num_experts <= 128 ? few : experts.num_experts <= 256 ? some : many;
  };
  void* kernel_args[] = {&sort, &choose};
  if (args.rows <= kSortThreads / 32) {
    const void* both = by_experts(reinterpret_cast<const void*>(&SortKernel<4>),
                                  reinterpret_cast<const void*>(&SortKernel<8>),
                                  reinterpret_cast<const void*>(&SortKernel<16>));
    return LaunchOverlapping(both, {1, kSortThreads}, kernel_args, stream,
                             "launching the choice of experts");
  }
  const void* choice = by_experts(reinterpret_cast<const void*>(&ChooseKernel<4>),
                                  reinterpret_cast<const void*>(&ChooseKernel<8>),
                                  reinterpret_cast<const void*>(&ChooseKernel<16>));
  void* choose_args[] = {&choose};
  OSCAR_RETURN_IF_ERROR(LaunchOverlapping(choice, {(args.rows + kWarps - 1) / kWarps, kThreads},
                                          choose_args, stream, "launching the choice of experts"));
  return LaunchOverlapping(reinterpret_cast<const void*>(&SortKernel<0>), {1, kSortThreads},
                           kernel_args, stream, "launching the sort by expert");
}

Status LaunchCombine(const Routing& routing, const float* outputs, float* stream_rows, int rows,
                     int hidden, int experts_per_token, Stream stream) {
  const int64_t vectors = int64_t{rows} * (hidden / 4);
  if (vectors <= 0) return {};
  Routing params = routing;
  void* args[] = {&params, &outputs, &stream_rows, &rows, &hidden, &experts_per_token};
  return LaunchOverlapping(
      reinterpret_cast<const void*>(&CombineKernel),
      {static_cast<int>((vectors + kCombineThreads - 1) / kCombineThreads), kCombineThreads}, args,
      stream, "launching the combination of experts");
}

}  // namespace oscar::cuda
