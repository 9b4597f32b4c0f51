// The write of new tokens: what cuda::WriteTokens does, with a warp a head instead of tensor-core
// tiles. Rotations by matrices are the tiles'.
#pragma once

#include "cuda/kv_write.h"

namespace oscar::gpu {

// Whether LaunchTokenWrite has a kernel for it: no rotation or the Hadamard one.
bool HasTokenWrite(const cuda::AttentionShape& shape, cuda::Rotation rotation);
// Asynchronous; may be captured. Reads what does not depend on qkv before the kernel that makes it
// has ended.
Status LaunchTokenWrite(const cuda::AttentionShape& shape, const cuda::WriteArguments& args,
                        cuda::Stream stream);

}  // namespace oscar::gpu
