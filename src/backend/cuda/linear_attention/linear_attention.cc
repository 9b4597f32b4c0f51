#include "cuda/linear_attention/linear_attention.h"

#include <fmt/core.h>

namespace oscar::cuda {

Status CheckLinearAttention(const LinearAttentionSpec& spec) {
  if (spec.key_dim <= kMaxStateKeyDim && spec.value_dim <= kMaxStateValueDim &&
      spec.key_dim % 4 == 0 && spec.value_dim % 4 == 0 && spec.conv_kernel <= kMaxConvTaps) {
    return {};
  }
  return Unimplemented(fmt::format(
      "linear attention with {} key dims, {} value dims and {} taps: the GPU takes multiples of 4 "
      "up to {} and {}, and up to {} taps; use --device cpu",
      spec.key_dim, spec.value_dim, spec.conv_kernel, kMaxStateKeyDim, kMaxStateValueDim,
      kMaxConvTaps));
}

}  // namespace oscar::cuda
