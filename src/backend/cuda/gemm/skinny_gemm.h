// GemmDispatch of weights, BF16 or FP8, with few rows of activations, at the speed of reading the
// weights once; sums in fp32. A row's sum does not depend on the other rows; nor on how many there
// are, where that is asked for.
#pragma once

#include "cuda/gemm/gemm_arguments.h"
#include "oscar/status.h"

namespace oscar::cuda {

// Activations a launch, at most; FP8 matrices take more where sums need not be the same for any
// number of them.
inline constexpr int kSkinnyRows = 16, kFp8SkinnyRows = 32;
constexpr int SkinnyRows(bool wide) { return wide ? kFp8SkinnyRows : kSkinnyRows; }
// Whether this device has the shared memory for any of them (consumer cards have not), and for more
// than kSkinnyRows.
bool TakesSkinnyLaunches();
bool TakesWideLaunches();

// `invariant`: one kernel for any number of rows, so that launches of different sizes agree bit for
// bit. Asynchronous; may be captured. Begins to read weights while the launch before it still runs.
Status LaunchSkinny(const GemmArguments& args, bool invariant, Stream stream);

}  // namespace oscar::cuda
