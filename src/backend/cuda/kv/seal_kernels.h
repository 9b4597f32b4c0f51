// The seal kernels this library was built with: every head dim and group that blocks have. Private
// to src/backend/cuda.
#pragma once

#include "cuda/attention/cache_view.h"

namespace oscar::cuda {

// `fits`: with the least-squares rules, too; without them more thread blocks fit on an SM. A
// translation unit per kind defines its own. Null where there is none.
template <BlockKind kKind>
const void* FindSealKernel(int head_dim, int group_dims, bool fits);
// Of pages whose heads differ in bits.
const void* FindMixedSealKernel(int head_dim, int group_dims);

}  // namespace oscar::cuda
