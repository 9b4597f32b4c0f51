// The order of inputs that lets a lane unpack codes of consecutive inputs into wgmma's A: of every
// 64, lane quad q of a row has inputs 16q to 16q + 15, four at each step of 16. Rows of x are kept
// in this order where such kernels read them. Host and device.
#pragma once

#include "base/half.h"

namespace oscar::cuda {

// Of input 16q + 4i + 2f + e: step i, half f of the step's inputs, lane quad q, element e.
OSCAR_HD constexpr int PlaceOfInput(int input) {
  return (input & ~63) | (input << 2 & 48) | (input << 2 & 8) | (input >> 3 & 6) | (input & 1);
}
OSCAR_HD constexpr int InputAtPlace(int place) {
  return (place & ~63) | (place << 3 & 48) | (place >> 2 & 12) | (place >> 2 & 2) | (place & 1);
}

}  // namespace oscar::cuda
