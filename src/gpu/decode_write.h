// The write of one generated token a sequence: what cuda::WriteTokens does, with a warp a head
// instead of tensor-core tiles, for passes that are too small to fill those.
#pragma once

#include "cuda/kv_write.h"

namespace oscar::gpu {

// Whether LaunchDecodeWrite has a kernel for it: no rotation or the Hadamard one.
bool HasDecodeWrite(const cuda::AttentionShape& shape, cuda::Rotation rotation);
// Asynchronous; may be captured. Reads what does not depend on it before the kernel that makes qkv
// has ended.
Status LaunchDecodeWrite(const cuda::AttentionShape& shape, const cuda::WriteArguments& args,
                         cuda::Stream stream);

}  // namespace oscar::gpu
