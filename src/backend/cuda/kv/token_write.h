// The write of new tokens: what WriteTokens does, with a warp a head instead of tensor-core
// tiles. Rotations by matrices are the tiles'.
#pragma once

#include "cuda/kv/kv_write.h"

namespace oscar::cuda {

// Whether LaunchTokenWrite has a kernel for it: no rotation or the Hadamard one.
bool HasTokenWrite(const AttentionShape& shape, RotationKind rotation);
// Asynchronous; may be captured. Reads what does not depend on qkv before the kernel that makes it
// has ended.
Status LaunchTokenWrite(const AttentionShape& shape, const WriteArguments& args, Stream stream);

// What calibration sees, to `out` [tokens, qkv_stride], device: q and k after norm and RoPE,
// neither scaled nor rotated, and v. Of `args` only what norm and RoPE need.
Status LaunchTap(const AttentionShape& shape, const WriteArguments& args, float* out,
                 Stream stream);

// WriteArguments::factors of a norm over all heads: 1 / rms of a token's q and of its k.
Status LaunchHeadFactors(const AttentionShape& shape, const float* qkv, int64_t qkv_stride,
                         float epsilon, float* factors, int tokens, Stream stream);

}  // namespace oscar::cuda
