// Device memory: memory of this process, with a table of what was allocated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <shared_mutex>
#include <string>

namespace oscar::emulator {

struct Allocation {
  uint64_t begin = 0, bytes = 0;
  bool Contains(uint64_t address, uint64_t length) const {
    const uint64_t at = address - begin;
    return at <= bytes && length <= bytes - at;
  }
};

class Memory {
 public:
  // Fresh memory holds NaNs, up to a size; null when there is not enough.
  void* Allocate(size_t bytes, bool device);
  bool Free(void* at, bool device);
  // Memory that lives elsewhere, such as a module's variables.
  void Add(const void* at, size_t bytes);
  bool Find(uint64_t address, Allocation* out) const;
  // A sentence on what lies around an address that is in no allocation.
  std::string Describe(uint64_t address, uint64_t bytes) const;
  size_t used() const { return used_; }

 private:
  struct Entry {
    size_t bytes;
    bool device, ours;
  };
  mutable std::shared_mutex mutex_;
  std::map<uint64_t, Entry> entries_;
  size_t used_ = 0;
};

}  // namespace oscar::emulator
