// The write of new tokens from fp32 rows: what cuda::WriteTokens does, with a warp a head instead
// of tensor-core tiles, and K rounded once, as the CPU does it. Rotations by matrices are the
// tiles'.
#pragma once

#include "cuda/kv_write.h"

namespace oscar::gpu {

// Whether LaunchTokenWrite has a kernel for it: no rotation or the Hadamard one.
bool HasTokenWrite(const cuda::AttentionShape& shape, cuda::Rotation rotation);
// `qkv` [tokens, args.qkv_stride] takes the place of args.qkv. Asynchronous; may be captured. Reads
// what does not depend on it before the kernel that makes qkv has ended.
Status LaunchTokenWrite(const cuda::AttentionShape& shape, const cuda::WriteArguments& args,
                        const float* qkv, cuda::Stream stream);

}  // namespace oscar::gpu
