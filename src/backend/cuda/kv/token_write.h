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

}  // namespace oscar::cuda
