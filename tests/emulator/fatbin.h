// The container that nvcc embeds device code in.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace oscar::emulator {

struct PtxText {
  std::string_view text;
  int architecture = 0;  // 90 for sm_90 and sm_90a
};

// The PTX texts of the container at `data`, which is trusted: it is part of this program. Machine
// code is skipped; `error` says what cannot be read, such as compressed text.
std::vector<PtxText> PtxOf(const void* data, std::string* error);

}  // namespace oscar::emulator
