// The values that a PyTorch .pt file can hold for us: none, bool, int, float, string, list, tuple,
// dict and tensor. A TorchValue is an ordinary value (copying copies the tree, but tensor data is
// shared); it has no cycles and is at most kMaxTorchDepth deep. Immutable use is thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "io/tensor.h"

namespace oscar {

inline constexpr int kMaxTorchDepth = 64;

// A contiguous row-major tensor. `owner` keeps `data` alive; it is null for borrowed bytes, which
// the caller then keeps alive.
struct TorchTensor {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  std::span<const std::byte> data;
  std::shared_ptr<const void> owner;

  // For the conversions of tensor.h; `name` appears in their errors.
  TensorView View(std::string name) const { return {std::move(name), dtype, shape, data}; }

  // Takes a copy; the product of `shape` must be the number of elements.
  static TorchTensor FromFloats(std::vector<int64_t> shape, std::span<const float> values);
  static TorchTensor FromInts32(std::vector<int64_t> shape, std::span<const int32_t> values);
  // Borrows the bytes of `view`.
  static TorchTensor Borrow(const TensorView& view);
};

class TorchValue;
using TorchList = std::vector<TorchValue>;

struct TorchTuple {
  TorchList items;
};

using TorchKey = std::variant<int64_t, std::string>;

// In the order of insertion. Keys are distinct in every dict that was read from a file.
struct TorchDict {
  std::vector<std::pair<TorchKey, TorchValue>> items;

  const TorchValue* Find(std::string_view key) const;
  const TorchValue* Find(int64_t key) const;
  void Set(std::string key, TorchValue value);  // appends; does not look for an equal key
  void Set(int64_t key, TorchValue value);
};

class TorchValue {
 public:
  TorchValue() = default;  // none
  explicit TorchValue(bool value) : data_(value) {}
  explicit TorchValue(int value) : data_(int64_t{value}) {}
  explicit TorchValue(int64_t value) : data_(value) {}
  explicit TorchValue(double value) : data_(value) {}
  explicit TorchValue(std::string value) : data_(std::move(value)) {}
  explicit TorchValue(const char* value) : data_(std::string(value)) {}
  explicit TorchValue(TorchList value) : data_(std::move(value)) {}
  explicit TorchValue(TorchTuple value) : data_(std::move(value)) {}
  explicit TorchValue(TorchDict value) : data_(std::move(value)) {}
  explicit TorchValue(TorchTensor value) : data_(std::move(value)) {}

  // "none", "bool", "int", "float", "string", "list", "tuple", "dict", "tensor"; for errors.
  std::string_view KindName() const;

  bool is_none() const { return std::holds_alternative<std::monostate>(data_); }
  // Null where the value is of another kind. A bool is no int and an int no float.
  const bool* AsBool() const { return std::get_if<bool>(&data_); }
  const int64_t* AsInt() const { return std::get_if<int64_t>(&data_); }
  const double* AsFloat() const { return std::get_if<double>(&data_); }
  const std::string* AsString() const { return std::get_if<std::string>(&data_); }
  const TorchList* AsList() const { return std::get_if<TorchList>(&data_); }
  const TorchTuple* AsTuple() const { return std::get_if<TorchTuple>(&data_); }
  const TorchDict* AsDict() const { return std::get_if<TorchDict>(&data_); }
  const TorchTensor* AsTensor() const { return std::get_if<TorchTensor>(&data_); }

  // The entry of a dict; null where this is no dict or has no such key.
  const TorchValue* Find(std::string_view key) const;
  const TorchValue* Find(int64_t key) const;

 private:
  std::variant<std::monostate, bool, int64_t, double, std::string, TorchList, TorchTuple, TorchDict,
               TorchTensor>
      data_;
};

}  // namespace oscar
