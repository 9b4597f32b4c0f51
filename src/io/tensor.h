// A named block of numbers in a file's bytes, and its conversion to the types that we compute in.
// A TensorView owns its name and shape but not its data: it is valid while the file (or whatever
// holds the bytes) lives. Immutable use is thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "io/dtype.h"
#include "oscar/status.h"

namespace oscar {

struct TensorView {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;       // row-major; empty for a scalar; no negative entries
  std::span<const std::byte> data;  // little-endian; NOT aligned in general: read by memcpy

  uint64_t num_elements() const { return data.size() / SizeOf(dtype); }
};

// A tensor that is still in its file. Keeps the file open; owns all else.
struct StoredTensor {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  std::shared_ptr<const InputFile> file;
  uint64_t offset = 0;  // of its first byte in the file
  uint64_t num_bytes = 0;

  uint64_t num_elements() const { return num_bytes / SizeOf(dtype); }
  // Bytes from `first` on. An error where the file has changed since it was opened.
  Status Read(uint64_t first, std::span<std::byte> out) const;
};

struct LoadedTensor {
  std::vector<std::byte> bytes;
  TensorView view;  // of `bytes`
};
Result<LoadedTensor> Load(const StoredTensor& tensor);

// "[3, 128, 128]"
std::string ShapeToString(std::span<const int64_t> shape);

// Product of the dimensions; an error (without context) where one is negative or the product or
// its size in bytes does not fit 63 bits.
Result<uint64_t> CheckedNumBytes(DType dtype, std::span<const int64_t> shape);

// OK when dtype and shape are what the caller needs; otherwise an error naming the tensor, what it
// is and what was wanted. A wanted dimension of -1 matches anything.
Status ExpectShape(const TensorView& tensor, std::span<const int64_t> shape);
Status ExpectShape(const StoredTensor& tensor, std::span<const int64_t> shape);

// Converts F64, F32, BF16, F16 and F8_E4M3 to float32. Other types are refused: integers never turn
// into weights unnoticed. `out` must have exactly num_elements() entries.
Status ConvertToFloat(const TensorView& tensor, std::span<float> out);
Result<std::vector<float>> ToFloatVector(const TensorView& tensor);
Result<std::vector<float>> ToFloatVector(const StoredTensor& tensor);

// Converts any integer type or BOOL to int64; U64 values beyond its range are an error.
Result<std::vector<int64_t>> ToIntVector(const TensorView& tensor);
Result<std::vector<int64_t>> ToIntVector(const StoredTensor& tensor);

// Element `index` as T, whatever the alignment. T must have the size of the element type.
template <typename T>
T LoadElement(const TensorView& tensor, uint64_t index) {
  T value;
  std::memcpy(&value, tensor.data.data() + index * sizeof(T), sizeof(T));
  return value;
}

}  // namespace oscar
