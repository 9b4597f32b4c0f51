// GemmDispatch: the GEMMs of a pass, each by whichever kernel suits its rows. Few rows go
// through kernels that read weights once (up to 64 in FP8), many through tiles, ours or
// cuBLASLt's, FP8 matrices multiplied out to BF16 before. Owns no memory. One thread.
#pragma once

#include <memory>

#include "base/half.h"
#include "cuda/gemm/batch_gemm.h"
#include "cuda/gemm/blas.h"
#include "cuda/gemm/skinny_gemm.h"
#include "cuda/gemm/tile_gemm.h"
#include "oscar/status.h"

namespace oscar::cuda {

// The RMSNorm of the residual stream, as the input of a product.
struct NormedInput {
  const float* x = nullptr;  // [rows, inputs]
  const float* weight = nullptr;
  float epsilon = 0.0f;
  Bf16* scratch = nullptr;  // [rows, inputs], where the norm is a separate launch
};

class GemmDispatch {
 public:
  // `blas` null: every product by the skinny kernels. `scratch` holds the largest FP8 matrix in
  // BF16. `invariant`: one kernel for any number of rows. Without `skinny` every product is the
  // library's.
  GemmDispatch(std::unique_ptr<Blas> blas, Bf16* scratch, bool invariant,
               bool skinny = TakesSkinnyLaunches())
      : blas_(std::move(blas)),
        scratch_(scratch),
        invariant_(invariant),
        skinny_(skinny),
        wide_(!invariant && TakesWideLaunches()),
        batched_(skinny && !invariant && HasBatchGemm()),
        tiled_(!invariant && HasTileGemm()) {}

  // out [rows, out_stride] of x [rows, inputs]; `bias` [outputs] or null. kSiluMul only where
  // TakesSiluMul. Asynchronous; may be captured once the shape has been seen.
  Status Of(const DeviceMatrix& matrix, const Bf16* x, void* out, int out_stride, int rows,
            GemmOutput output, const float* bias, Stream stream);
  Status OfNormed(const DeviceMatrix& matrix, const NormedInput& x, void* out, int out_stride,
                  int rows, GemmOutput output, const float* bias, Stream stream);
  // The matrix as Of reads it for that many rows, multiplied out where it has to be: for several
  // products in a row, and until the next one that multiplies out.
  Result<DeviceMatrix> Expanded(const DeviceMatrix& matrix, int rows, Stream stream);
  bool TakesSiluMul(const DeviceMatrix& matrix, int rows) const {
    return IsSkinny(matrix, rows) || IsBatched(matrix, rows) ||
           IsTiled(matrix, rows, matrix.outputs / 2);
  }

 private:
  bool IsSkinny(const DeviceMatrix& matrix, int rows) const;
  bool IsGemv(const DeviceMatrix& matrix, int rows) const;  // which are skinny, too
  bool IsBatched(const DeviceMatrix& matrix, int rows) const;
  bool IsTiled(const DeviceMatrix& matrix, int rows, int out_stride) const;

  std::unique_ptr<Blas> blas_;
  Bf16* scratch_;
  bool invariant_;
  bool skinny_;
  bool wide_;     // FP8 matrices take kFp8SkinnyRows a launch
  bool batched_;  // the device has LaunchBatchGemm
  bool tiled_;    // the device has LaunchTileGemm
};

}  // namespace oscar::cuda
