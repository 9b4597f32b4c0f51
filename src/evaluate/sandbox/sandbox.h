// Runs Python that a model wrote in a child process that can do little harm: limited time, memory,
// threads, output and space on the disk, no network, no further processes, no signals or changes to
// other processes (a seccomp filter), and a private directory, removed afterwards, as the only
// place to write (Landlock; where the kernel has none, no place at all). Reading is not restricted.
// Blocks the caller, also while as many run as there are processors; safe from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "oscar/status.h"

namespace oscar {

struct SandboxLimits {
  double seconds = 10;  // of wall and of processor time
  uint64_t memory_bytes = uint64_t{1} << 30;
  uint64_t file_bytes = uint64_t{1} << 24;       // of one file
  uint64_t directory_bytes = uint64_t{1} << 27;  // of all files, by what the disk gave them
  uint64_t written_bytes = uint64_t{1} << 28;    // ever, to files and output together
  int64_t files = 4096;
  int64_t threads = 256;
  size_t output_bytes = size_t{1} << 16;  // kept of standard output and error together
  std::optional<int> landlock;  // as if the kernel had this version, if it has a later one
};

struct SandboxResult {
  bool timed_out = false;
  bool over_limit = false;  // ended for its files, what it wrote or its threads
  bool confirmed = false;   // the program wrote its secret to descriptor kSecretDescriptor
  int exit_code = -1;       // -1: ended by a signal, or by us
  std::string output;
};

// Standard input holds a secret of kSecretBytes characters and nothing else. A program that takes
// it before it runs foreign code, and afterwards writes it to kSecretDescriptor and nothing else,
// says something that the foreign code's output cannot say; the run ends there.
inline constexpr int kSecretDescriptor = 3;
inline constexpr size_t kSecretBytes = 32;

// `files` are (name, content) in the child's directory; the first is the program. kNotFound where
// there is no python3, kUnimplemented where the system cannot confine a child.
Result<SandboxResult> RunPython(const std::vector<std::pair<std::string, std::string>>& files,
                                const SandboxLimits& limits);

// For a process that is about to end: ends the programs that run and removes their directories,
// within seconds. No call of RunPython returns from here on, so that nothing is taken for a result.
void EndSandboxes();

// What users must know of this system's sandbox, empty where it lacks nothing. `landlock` is the
// version to speak of, the kernel's own by default.
std::string SandboxWarning(std::optional<int> landlock = {});

}  // namespace oscar
