// Many rows per expert by wgmma (sm_90a): out[place, m] = sum_k x[row, k] w[expert, m, k].
//
// Grid       a block an SM; items are (tile of up to 128 rows of one expert, 256 weight rows or 128
//            gates and their 128 ups; half of that for FP8 with scales of blocks), weight rows
//            inside: blocks that run together share rows of x and whole experts in the L2. How many
//            there are is read from the device.
// Pipeline   64 inputs a stage. The producer warpgroup gathers rows of x by 16-byte cp.async, into
//            128-byte swizzle; one of its threads has the tensor copy engine bring the weights as
//            they are stored. It runs ahead over items: stages are filled while one is written.
// Operands   two consumer warpgroups, all of whose sums are in registers. BF16: x is A, weights are
//            B, 64 rows x 256 weight rows each, out of shared memory. FP8 and MXFP4: weights are A,
//            128 (64) weight rows x 128 rows each, so out comes transposed; a lane unpacks codes of
//            consecutive inputs into A's registers, once for the 128 rows, for which x has its
//            inputs in lane_order.h's order. Tiles of up to 64 rows take half the MMAs.
// FP8        as in gemm_kernels.cuh, x already raised. With scales of blocks, sums over a block's
//            128 inputs are apart from those they are added to.
// MXFP4      as in grouped_skinny.cu; every eighth stage brings the scales of eight.
// Order      k ascending in steps of 16, inside a step as the instruction has it: fixed.
// Bound      tensor cores. From the L2 come 48 KiB (FP8 with scales of rows 32, MXFP4 24) for 128 x
//            256 x 64 weights and rows: 5.3 TB/s (3.5, 2.6) at 450 TFLOP/s.
#include <algorithm>

#include "cuda/device/cuda_status.h"
#include "cuda/device/launch.h"
#include "cuda/experts/wgmma_bf16.cuh"
#include "cuda/experts/wgmma_codes.cuh"

namespace oscar::cuda {
namespace {

template <GemmOutput kOut, WeightFormat kFormat, bool kBiased>
__global__ void __launch_bounds__(kThreads, 1)
    GroupedWgmmaKernel(const __grid_constant__ CUtensorMap w_map,
                       const __grid_constant__ CUtensorMap scale_map, const GroupedParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using L = Layout<kFormat>;
  extern __shared__ uint8_t unaligned[];
  Ring<kFormat> ring((SharedAddress(unaligned) + 1023u) & ~1023u);
  // Known to be the same for a warp, so that what follows from it is computed once a warp.
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) ring.Init();
  __syncthreads();
  LetSuccessorStart();
  WaitForPredecessor();
  constexpr int kOutputs = kOut == GemmOutput::kSiluMul ? L::kRows / 2 : L::kRows;
  const int across = (WrittenOutputs<kOut>(p) + kOutputs - 1) / kOutputs;
  const int items = *p.num_tiles * across;
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(L::kProducerRegisters));
    Produce<kFormat, kOut>(p, &w_map, &scale_map, ring, across, items);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(L::kConsumerRegisters));
    const int consumer = group - 1, lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      const ExpertTile tile = p.tiles[item / across];
      const int first = item % across * kOutputs;
      if constexpr (L::kBf16) {
        Bf16Sums sums;
#pragma unroll
        for (float& sum : sums) sum = 0.0f;
        MultiplyBf16(p, ring, consumer, tile, sums);
        WriteBf16<kOut, kBiased>(p, tile, first, consumer * 64 + warp * 16 + lane / 4, lane % 4,
                                 sums);
      } else {
        const CodeLane<kFormat, kOut> c{consumer, warp, lane / 4, lane % 4, p.lane_order};
        float sums[L::kBlocks][kTileRows / 2];
#pragma unroll
        for (auto& block : sums) {
#pragma unroll
          for (float& sum : block) sum = 0.0f;
        }
        if (tile.rows <= kTileRows / 2) {
          MultiplyCodes<kTileRows / 2>(p, ring, c, tile, first, sums);
        } else {
          MultiplyCodes<kTileRows>(p, ring, c, tile, first, sums);
        }
        WriteCodes<kFormat, kOut, kBiased>(p, c, tile, first, sums);
      }
    }
  }
#endif
}

struct Choice {
  const void* kernel;
  int shared_bytes, rows, row_bytes;
};

template <WeightFormat kFormat, bool kBiased = false>
Choice Make(GemmOutput output) {
  using L = Layout<kFormat>;
  const void* kernel = output == GemmOutput::kSiluMul
                           ? reinterpret_cast<const void*>(
                                 &GroupedWgmmaKernel<GemmOutput::kSiluMul, kFormat, kBiased>)
                           : reinterpret_cast<const void*>(
                                 &GroupedWgmmaKernel<GemmOutput::kFloat, kFormat, kBiased>);
  return {kernel, L::kSharedBytes, L::kRows, L::kRowBytes};
}

Choice Choose(WeightFormat format, bool biased, GemmOutput output) {
  switch (format) {
    case WeightFormat::kBf16:
      return biased ? Make<WeightFormat::kBf16, true>(output) : Make<WeightFormat::kBf16>(output);
    case WeightFormat::kFp8Rows:
      return biased ? Make<WeightFormat::kFp8Rows, true>(output)
                    : Make<WeightFormat::kFp8Rows>(output);
    case WeightFormat::kFp8Blocks:
      return Make<WeightFormat::kFp8Blocks>(output);
    case WeightFormat::kMxfp4:
      return Make<WeightFormat::kMxfp4, true>(output);
  }
  return {};
}

bool FindGroupedWgmma() {
  int device = 0, major = 0, minor = 0;
  cudaFuncAttributes attributes{};
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess &&
         major == 9 && minor == 0 && HasTensorMaps() &&
         cudaFuncGetAttributes(&attributes,
                               Choose(WeightFormat::kBf16, false, GemmOutput::kFloat).kernel) ==
             cudaSuccess &&
         attributes.binaryVersion == 90;
}

}  // namespace

bool HasGroupedWgmma() {
  static const bool has = FindGroupedWgmma();
  return has;
}

Status LaunchGroupedWgmma(const GroupedGemm& args, Stream stream) {
  const bool pair = args.output == GemmOutput::kSiluMul;
  if (!HasGroupedWgmma() || (pair && args.out_stride % 8 != 0)) {
    return InvalidArgument("a GEMM of experts by wgmma takes whole 16 bytes of a row, on Hopper");
  }
  const DeviceMatrix& matrix = args.matrix;
  const WeightFormat format = FormatOf(matrix);
  const Choice choice = Choose(format, args.bias != nullptr, args.output);
  OSCAR_ASSIGN_OR_RETURN(const DeviceLimits limits, CurrentDeviceLimits());
  OSCAR_RETURN_IF_ERROR(
      AllowSharedMemory(choice.kernel, choice.shared_bytes, "preparing a GEMM of experts"));
  GroupedParams params = ParamsOf(args);
  const int box_rows = pair ? choice.rows / 2 : choice.rows;
  const int64_t row_bytes =
      format == WeightFormat::kMxfp4 ? Mxfp4RowBytes(matrix.inputs) : matrix.inputs;
  OSCAR_ASSIGN_OR_RETURN(
      CUtensorMap w_map,
      format == WeightFormat::kBf16
          ? SwizzledMap(matrix.weights, matrix.outputs, matrix.inputs, box_rows)
          : ByteMap(params.w, matrix.outputs, row_bytes, box_rows, choice.row_bytes));
  CUtensorMap scale_map = w_map;
  if (format == WeightFormat::kMxfp4) {
    OSCAR_ASSIGN_OR_RETURN(scale_map, ByteMap(params.w, matrix.outputs, row_bytes, box_rows, 16));
  }
  const int unit = pair ? choice.rows / 2 : choice.rows;
  const int written = pair ? args.out_stride : args.outputs();
  const int64_t items = int64_t{args.max_tiles} * ((written + unit - 1) / unit);
  void* kernel_args[] = {&w_map, &scale_map, &params};
  return LaunchOverlapping(choice.kernel,
                           {static_cast<int>(std::min<int64_t>(items, limits.multiprocessors)),
                            kThreads, choice.shared_bytes},
                           kernel_args, stream, "launching a GEMM of experts");
}

}  // namespace oscar::cuda
