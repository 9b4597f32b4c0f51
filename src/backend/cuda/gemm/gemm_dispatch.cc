#include "cuda/gemm/gemm_dispatch.h"

#include <fmt/core.h>

#include <algorithm>

#include "cuda/gemm/fp8_kernels.h"
#include "cuda/gemm/gemv.h"
#include "cuda/step_kernels.h"

namespace oscar::cuda {
namespace {

// Up to here reading the weights once is all there is to do; beyond, the library's tiles are
// faster.
constexpr int kBf16Rows = 8;
// From here on FP8 goes through LaunchBatchGemm, where the device has it.
constexpr int kBatchedRows = 9;
// From here on our tiles are; they fuse what follows the product.
constexpr int kTiledRows = 512;

size_t SizeOf(GemmOutput output) {
  return output == GemmOutput::kSiluMul ? sizeof(Bf16) : sizeof(float);
}

}  // namespace

bool GemmDispatch::IsSkinny(const DeviceMatrix& matrix, int rows) const {
  // FP8 matrices are read once a launch. Multiplying them out (a byte read, two written, two read
  // by the product) costs as much as two launches.
  const int limit = matrix.is_fp8() ? 2 * SkinnyRows(wide_) : kBf16Rows;
  return skinny_ && (rows <= limit || blas_ == nullptr || invariant_) &&
         FitsGemmKernels(matrix.inputs, matrix.is_fp8());
}

bool GemmDispatch::IsGemv(const DeviceMatrix& matrix, int rows) const {
  // Its sums have another order than those of more rows, so batches would show.
  return skinny_ && !invariant_ && FitsGemv(matrix, rows);
}

bool GemmDispatch::IsBatched(const DeviceMatrix& matrix, int rows) const {
  return batched_ && rows >= kBatchedRows && FitsBatchGemm(matrix, rows);
}

bool GemmDispatch::IsTiled(const DeviceMatrix& matrix, int rows, int out_stride) const {
  return tiled_ && rows >= kTiledRows && FitsTileGemm(matrix.outputs, matrix.inputs, out_stride);
}

Result<DeviceMatrix> GemmDispatch::Expanded(const DeviceMatrix& matrix, int rows, Stream stream) {
  if (!matrix.is_fp8() || IsSkinny(matrix, rows) || IsBatched(matrix, rows)) return matrix;
  OSCAR_RETURN_IF_ERROR(LaunchMultiplyOut(matrix, scratch_, stream));
  DeviceMatrix expanded;
  expanded.weights = scratch_;
  expanded.outputs = matrix.outputs;
  expanded.inputs = matrix.inputs;
  return expanded;
}

Status GemmDispatch::Of(const DeviceMatrix& matrix, const Bf16* x, void* out, int out_stride,
                        int rows, GemmOutput output, const float* bias, Stream stream) {
  if (IsBatched(matrix, rows)) {
    GemmArguments args;
    args.matrix = matrix;
    args.x = x;
    args.out = out;
    args.out_stride = out_stride;
    args.bias = bias;
    args.rows = rows;
    args.output = output;
    return LaunchBatchGemm(args, stream);
  }
  if (IsSkinny(matrix, rows)) {
    const int most = SkinnyRows(matrix.is_fp8() && wide_);
    for (int first = 0; first < rows; first += most) {
      GemmArguments args;
      args.matrix = matrix;
      args.x = x + int64_t{first} * matrix.inputs;
      args.out = static_cast<std::byte*>(out) +
                 static_cast<size_t>(int64_t{first} * out_stride) * SizeOf(output);
      args.out_stride = out_stride;
      args.bias = bias;
      args.rows = std::min(most, rows - first);
      args.output = output;
      OSCAR_RETURN_IF_ERROR(IsGemv(matrix, args.rows) ? LaunchGemv(args, stream)
                                                      : LaunchSkinny(args, invariant_, stream));
    }
    return {};
  }
  if (IsTiled(matrix, rows, out_stride)) {
    GemmArguments args;
    OSCAR_ASSIGN_OR_RETURN(args.matrix, Expanded(matrix, rows, stream));
    args.x = x;
    args.out = out;
    args.out_stride = out_stride;
    args.bias = bias;
    args.rows = rows;
    args.output = output;
    return LaunchTileGemm(args, stream);
  }
  if (blas_ == nullptr) {
    return Unimplemented(
        skinny_ ? fmt::format("a GEMM with {} inputs needs cuBLASLt", matrix.inputs)
                : "this GPU has too little shared memory for GEMMs without cuBLASLt, and for "
                  "--batch-invariant; use --device cpu");
  }
  OSCAR_ASSIGN_OR_RETURN(const DeviceMatrix expanded, Expanded(matrix, rows, stream));
  OSCAR_RETURN_IF_ERROR(blas_->Gemm(expanded.weights, x, out, out_stride, matrix.outputs,
                                    matrix.inputs, rows, output, stream));
  if (bias == nullptr) return {};
  return LaunchAddBias(static_cast<float*>(out), bias, rows, matrix.outputs, out_stride, stream);
}

Status GemmDispatch::OfNormed(const DeviceMatrix& matrix, const NormedInput& x, void* out,
                              int out_stride, int rows, GemmOutput output, const float* bias,
                              Stream stream) {
  if (IsGemv(matrix, rows)) {
    GemmArguments args;
    args.matrix = matrix;
    args.residual = x.x;
    args.norm_weight = x.weight;
    args.norm_epsilon = x.epsilon;
    args.out = out;
    args.out_stride = out_stride;
    args.bias = bias;
    args.rows = rows;
    args.output = output;
    return LaunchGemv(args, stream);
  }
  OSCAR_RETURN_IF_ERROR(
      LaunchNorm(x.x, x.weight, x.epsilon, nullptr, x.scratch, rows, matrix.inputs, stream));
  return Of(matrix, x.scratch, out, out_stride, rows, output, bias, stream);
}

}  // namespace oscar::cuda
