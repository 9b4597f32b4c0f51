#include "io/tensor.h"

#include <fmt/core.h>

#include <limits>

#include "base/check.h"
#include "base/error_text.h"
#include "base/half.h"

namespace oscar {
namespace {

template <typename Stored, typename Convert>
void ConvertAll(const TensorView& tensor, std::span<float> out, Convert convert) {
  const std::byte* at = tensor.data.data();
  for (float& value : out) {
    Stored stored;
    std::memcpy(&stored, at, sizeof stored);
    value = convert(stored);
    at += sizeof stored;
  }
}

template <typename Stored>
void WidenAll(const TensorView& tensor, std::vector<int64_t>* out) {
  for (uint64_t i = 0; i < tensor.num_elements(); ++i) {
    out->push_back(static_cast<int64_t>(LoadElement<Stored>(tensor, i)));
  }
}

Status ExpectShape(std::string_view name, std::span<const int64_t> shape,
                   std::span<const int64_t> wanted) {
  bool same = shape.size() == wanted.size();
  for (size_t i = 0; same && i < shape.size(); ++i) {
    same = wanted[i] == -1 || wanted[i] == shape[i];
  }
  if (same) return {};
  return DataLoss(fmt::format("tensor {} has shape {}, expected {}", Quote(name),
                              ShapeToString(shape), ShapeToString(wanted)));
}

}  // namespace

std::string ShapeToString(std::span<const int64_t> shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) out += fmt::format("{}{}", i > 0 ? ", " : "", shape[i]);
  return out + "]";
}

Result<uint64_t> CheckedNumBytes(DType dtype, std::span<const int64_t> shape) {
  constexpr uint64_t kMax = std::numeric_limits<int64_t>::max();
  uint64_t bytes = SizeOf(dtype);
  bool empty = false;
  for (const int64_t dim : shape) {
    if (dim < 0) {
      return Unexpected(
          DataLoss(fmt::format("negative dimension in shape {}", ShapeToString(shape))));
    }
    if (dim == 0) {
      empty = true;
      continue;  // the other dimensions must still have a product that fits
    }
    if (bytes > kMax / static_cast<uint64_t>(dim)) {
      return Unexpected(
          DataLoss(fmt::format("shape {} of {} overflows", ShapeToString(shape), NameOf(dtype))));
    }
    bytes *= static_cast<uint64_t>(dim);
  }
  return empty ? 0 : bytes;
}

Status StoredTensor::Read(uint64_t first, std::span<std::byte> out) const {
  OSCAR_CHECK(first <= num_bytes && out.size() <= num_bytes - first);
  return file->Read(offset + first, out);
}

Result<LoadedTensor> Load(const StoredTensor& tensor) {
  LoadedTensor loaded;
  loaded.bytes.resize(tensor.num_bytes);
  OSCAR_RETURN_IF_ERROR(tensor.Read(0, loaded.bytes));
  loaded.view = {tensor.name, tensor.dtype, tensor.shape, loaded.bytes};
  return loaded;
}

Status ExpectShape(const TensorView& tensor, std::span<const int64_t> shape) {
  return ExpectShape(tensor.name, tensor.shape, shape);
}
Status ExpectShape(const StoredTensor& tensor, std::span<const int64_t> shape) {
  return ExpectShape(tensor.name, tensor.shape, shape);
}

Status ConvertToFloat(const TensorView& tensor, std::span<float> out) {
  OSCAR_CHECK(out.size() == tensor.num_elements(), "{} floats for {} elements", out.size(),
              tensor.num_elements());
  if (out.empty()) return {};
  switch (tensor.dtype) {
    case DType::kF32:
      std::memcpy(out.data(), tensor.data.data(), tensor.data.size());
      return {};
    case DType::kF64:
      ConvertAll<double>(tensor, out, [](double x) { return static_cast<float>(x); });
      return {};
    case DType::kBf16:
      ConvertAll<uint16_t>(tensor, out, [](uint16_t x) { return ToFloat(Bf16{x}); });
      return {};
    case DType::kF16:
      ConvertAll<uint16_t>(tensor, out, [](uint16_t x) { return ToFloat(Fp16{x}); });
      return {};
    case DType::kF8E4M3:
      ConvertAll<uint8_t>(tensor, out, [](uint8_t x) { return F8E4M3ToFloat(x); });
      return {};
    default:
      return Unimplemented(fmt::format(
          "tensor {} has type {}; expected a floating type (F64, F32, BF16, F16 or F8_E4M3)",
          Quote(tensor.name), NameOf(tensor.dtype)));
  }
}

Result<std::vector<float>> ToFloatVector(const TensorView& tensor) {
  std::vector<float> out(tensor.num_elements());
  OSCAR_RETURN_IF_ERROR(ConvertToFloat(tensor, out));
  return out;
}

Result<std::vector<float>> ToFloatVector(const StoredTensor& tensor) {
  OSCAR_ASSIGN_OR_RETURN(const LoadedTensor loaded, Load(tensor));
  return ToFloatVector(loaded.view);
}

Result<std::vector<int64_t>> ToIntVector(const StoredTensor& tensor) {
  OSCAR_ASSIGN_OR_RETURN(const LoadedTensor loaded, Load(tensor));
  return ToIntVector(loaded.view);
}

Result<std::vector<int64_t>> ToIntVector(const TensorView& tensor) {
  std::vector<int64_t> out;
  out.reserve(tensor.num_elements());
  switch (tensor.dtype) {
    case DType::kI64:
      WidenAll<int64_t>(tensor, &out);
      return out;
    case DType::kI32:
      WidenAll<int32_t>(tensor, &out);
      return out;
    case DType::kI16:
      WidenAll<int16_t>(tensor, &out);
      return out;
    case DType::kI8:
      WidenAll<int8_t>(tensor, &out);
      return out;
    case DType::kU64:
      WidenAll<uint64_t>(tensor, &out);
      for (const int64_t value : out) {
        if (value < 0) {
          return Unexpected(
              OutOfRange(fmt::format("tensor {} has a value beyond 2^63 - 1", Quote(tensor.name))));
        }
      }
      return out;
    case DType::kU32:
      WidenAll<uint32_t>(tensor, &out);
      return out;
    case DType::kU16:
      WidenAll<uint16_t>(tensor, &out);
      return out;
    case DType::kU8:
      WidenAll<uint8_t>(tensor, &out);
      return out;
    case DType::kBool:
      WidenAll<uint8_t>(tensor, &out);
      for (int64_t& value : out) value = value != 0 ? 1 : 0;
      return out;
    default:
      return Unexpected(Unimplemented(fmt::format("tensor {} has type {}; expected integers",
                                                  Quote(tensor.name), NameOf(tensor.dtype))));
  }
}

}  // namespace oscar
