// AlignedBuffer<T>: an uninitialised, growing array of trivial values on 64-byte boundaries (one
// cache line, one AVX-512 register), with huge pages asked for where it is large. Owns its memory;
// move-only; not thread-safe.
#pragma once

#include <sys/mman.h>

#include <cstddef>
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
  ~AlignedBuffer() { std::free(data_); }

  // At least `size` elements from here on; the contents are lost where it has to grow.
  void Grow(size_t size) {
    if (size <= size_) return;
    constexpr size_t kHuge = size_t{2} << 20;
    const size_t bytes = size * sizeof(T);
    const size_t alignment = bytes >= 4 * kHuge ? kHuge : 64;
    const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
    std::free(data_);
    data_ = nullptr;
    size_ = 0;
    void* memory = std::aligned_alloc(alignment, rounded);
    if (memory == nullptr) throw std::bad_alloc();
    if (alignment == kHuge) madvise(memory, rounded, MADV_HUGEPAGE);  // advice; failure is harmless
    data_ = static_cast<T*>(memory);
    size_ = size;
  }

  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace oscar::simd
