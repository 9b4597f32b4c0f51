#include "emulator/memory.h"

#include <fmt/core.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <mutex>

namespace oscar::emulator {

namespace {

constexpr size_t kPage = 4096;
// Device memory is filled up to here: 0xff bytes are NaNs in every format and indices out of range.
// A fill of gigabytes that nobody reads would cost more than it finds.
constexpr size_t kPoisoned = size_t{16} << 20;

size_t Mapped(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

void* Memory::Allocate(size_t bytes, bool device) {
  const size_t mapped = Mapped(std::max<size_t>(bytes, 1));
  void* at = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return nullptr;
  if (device) std::memset(at, 0xff, std::min(bytes, kPoisoned));
  const std::unique_lock lock(mutex_);
  entries_[reinterpret_cast<uint64_t>(at)] = {bytes, device, true};
  if (device) used_ += bytes;
  return at;
}

bool Memory::Free(void* at, bool device) {
  const std::unique_lock lock(mutex_);
  const auto found = entries_.find(reinterpret_cast<uint64_t>(at));
  if (found == entries_.end() || !found->second.ours || found->second.device != device) {
    return false;
  }
  ::munmap(at, Mapped(std::max<size_t>(found->second.bytes, 1)));
  if (device) used_ -= found->second.bytes;
  entries_.erase(found);
  return true;
}

void Memory::Add(const void* at, size_t bytes) {
  const std::unique_lock lock(mutex_);
  entries_[reinterpret_cast<uint64_t>(at)] = {bytes, true, false};
}

bool Memory::Find(uint64_t address, Allocation* out) const {
  const std::shared_lock lock(mutex_);
  auto next = entries_.upper_bound(address);
  if (next == entries_.begin()) return false;
  --next;
  *out = {next->first, next->second.bytes};
  return out->Contains(address, 1);
}

std::string Memory::Describe(uint64_t address, uint64_t bytes) const {
  const std::shared_lock lock(mutex_);
  auto next = entries_.upper_bound(address);
  if (next == entries_.begin()) return "below all device memory";
  --next;
  const uint64_t size = next->second.bytes;
  const uint64_t at = address - next->first;
  if (at < size) {
    return fmt::format("bytes {} to {} of an allocation of {}", at, at + bytes, size);
  }
  return fmt::format("{} bytes behind the end of an allocation of {}", at - size, size);
}

}  // namespace oscar::emulator
