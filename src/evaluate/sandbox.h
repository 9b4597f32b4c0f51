// Runs Python that a model wrote in a child process that can do little harm: limited time, memory,
// output and file size, no network and no further processes (a seccomp filter), a directory of its
// own that is removed afterwards, and no writing outside it where the kernel has Landlock. Reading
// is not restricted. Blocks the caller; safe from any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "oscar/status.h"

namespace oscar {

struct SandboxLimits {
  double seconds = 10;  // of wall and of processor time
  uint64_t memory_bytes = uint64_t{1} << 30;
  uint64_t file_bytes = uint64_t{1} << 24;
  size_t output_bytes = size_t{1} << 16;  // kept of standard output and error together
};

struct SandboxResult {
  bool timed_out = false;
  int exit_code = -1;  // -1: ended by a signal
  std::string output;
};

// `files` are (name, content) in the child's directory; the first is the program. kNotFound where
// there is no python3, kUnimplemented where the system cannot confine a child.
Result<SandboxResult> RunPython(const std::vector<std::pair<std::string, std::string>>& files,
                                const SandboxLimits& limits);

}  // namespace oscar
