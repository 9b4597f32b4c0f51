// What rows of K or V are multiplied by before they are stored. Kernels take it as it is.
#pragma once

#include <cstdint>

namespace oscar {

enum class RotationKind : uint8_t {
  kNone,
  kHadamard,       // orthonormal, of the whole head
  kBlockHadamard,  // orthonormal, of each hadamard_block consecutive dims
  kCalibrated,     // from a rotation file
};

}  // namespace oscar
