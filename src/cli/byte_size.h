// Sizes in bytes as options take them: 1073741824, 512MiB, 1.5GiB.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "oscar/status.h"

namespace CLI {
class Option;
}

namespace oscar::cli {

// A decimal number, and B, K, M, G or T (also KB, KiB and so on, in any case) for powers of 1024.
// Fractions of a byte are dropped.
Result<uint64_t> ParseByteSize(std::string_view text);

// The option, bound to a uint64_t, takes such sizes.
CLI::Option* TakesByteSize(CLI::Option* option);

}  // namespace oscar::cli
