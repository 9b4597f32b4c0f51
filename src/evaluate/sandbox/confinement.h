// What keeps a child process from doing harm: a seccomp filter that allows the system calls of a
// computing program and refuses all others, and Landlock rules for where it may write. Built in the
// parent; Enter() runs in the child between fork and exec, and uses only calls that are safe there.
#pragma once

#include <linux/filter.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace oscar {

// The version of Landlock in the running kernel, 0 where it has none or does not let us use it.
int LandlockVersion();

class Confinement {
 public:
  // `landlock` is LandlockVersion(), or less to do with less. Without Landlock the child cannot
  // open any file for writing, since a filter sees no paths.
  explicit Confinement(int landlock);

  // False where the system has no such filters for this processor.
  static bool IsSupported();

  // From here on the process writes only beneath `directory` and to /dev/null, has no capabilities,
  // and signals nobody but itself; holds across exec. Null, or the name of the step that failed.
  const char* Enter(const char* directory);

 private:
  void Give(uint32_t verdict);
  void Load(size_t offset);
  void LoadArgument(int index);
  void JumpIfEqual(uint32_t value, uint8_t yes, uint8_t no);
  void Allow(long number);
  void AllowIfArgument(long number, int index, std::span<const uint32_t> values);
  void AllowForSelf(long number);
  void AllowOpen(long number, int index);

  int landlock_;
  std::vector<sock_filter> filter_;
  std::vector<size_t> own_ids_;  // instructions that compare with the process's own id
};

}  // namespace oscar
