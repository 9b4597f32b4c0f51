// AlignedBuffer<T>: an uninitialised, growing array of trivial values on 64-byte boundaries (one
// cache line, one AVX-512 register), with huge pages asked for where it is large. Owns its memory;
// move-only; not thread-safe.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <type_traits>
#include <utility>

namespace oscar::simd {

template <typename T>
class AlignedBuffer {
 public:
  static_assert(std::is_trivially_copyable_v<T>);

  AlignedBuffer() = default;
  explicit AlignedBuffer(size_t size) { Grow(size); }
  AlignedBuffer(AlignedBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~AlignedBuffer() { Free(); }

  // At least `size` elements from here on; the contents are lost where it has to grow.
  void Grow(size_t size) {
    if (size <= size_) return;
    Free();
    const size_t bytes = size * sizeof(T);
    void* memory = bytes >= kMapped ? Map(bytes) : std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (memory == nullptr) throw std::bad_alloc();
    data_ = static_cast<T*>(memory);
    size_ = size;
  }

  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  // From here on buffers are separate mappings. In malloc's heap, to which glibc moves large
  // blocks once one has been freed, a huge page's boundary leaves holes that stay resident.
  static constexpr size_t kMapped = size_t{1} << 20;
  static constexpr size_t kHuge = size_t{2} << 20;

  // Null where there is no memory. From four huge pages on, it begins at the boundary of one, and
  // as many as it fills are asked for; its end is in small pages, so that no more than a small one
  // is unused.
  static void* Map(size_t bytes) {
    const size_t slack = bytes >= 4 * kHuge ? kHuge : 0;
    void* const mapped = ::mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS, /*fd=*/-1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    if (slack == 0) return mapped;
    auto* const begin = static_cast<std::byte*>(mapped);
    const size_t before = (kHuge - reinterpret_cast<uintptr_t>(begin) % kHuge) % kHuge;
    std::byte* const data = begin + before;
    if (before > 0) ::munmap(begin, before);
    // What is left behind the data, in whole pages of its mapping.
    const size_t page = 4096, end = (bytes + page - 1) / page * page;
    const size_t after = (bytes + slack + page - 1) / page * page - before - end;
    if (after > 0) ::munmap(data + end, after);
    ::madvise(data, bytes / kHuge * kHuge, MADV_HUGEPAGE);  // advice; failure is harmless
    return data;
  }
  void Free() {
    if (size_ * sizeof(T) >= kMapped) {
      ::munmap(data_, size_ * sizeof(T));
    } else {
      std::free(data_);
    }
    data_ = nullptr;
    size_ = 0;
  }

  T* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace oscar::simd
