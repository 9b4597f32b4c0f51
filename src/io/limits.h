// What every reader of tensors keeps to, whatever the file says.
#pragma once

#include <cstddef>

namespace oscar {

inline constexpr size_t kMaxRank = 32;  // dimensions of a tensor

}  // namespace oscar
