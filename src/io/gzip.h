// Text that may have come compressed: several data sets are published as .jsonl.gz. Pure; safe from
// any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "oscar/status.h"

namespace oscar {

// The content of a gzip file, or `data` itself where it is none. kDataLoss where the file is cut
// short or broken, kOutOfRange where it holds more than `max_bytes`; `what` names it.
Result<std::string> Gunzip(std::string data, std::string_view what, uint64_t max_bytes);

}  // namespace oscar
