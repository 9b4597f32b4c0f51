#include "io/torch_value.h"

#include "base/check.h"

namespace oscar {
namespace {

template <typename T>
TorchTensor CopyTensor(DType dtype, std::vector<int64_t> shape, std::span<const T> values) {
  const auto bytes = CheckedNumBytes(dtype, shape);
  OSCAR_CHECK(bytes.has_value() && *bytes == values.size_bytes(), "{} values for shape {}",
              values.size(), ShapeToString(shape));
  auto owner = std::make_shared<const std::vector<T>>(values.begin(), values.end());
  const auto data = std::as_bytes(std::span(*owner));
  return {dtype, std::move(shape), data, std::move(owner)};
}

template <typename Key, typename Wanted>
const TorchValue* FindKey(const TorchDict& dict, Wanted wanted) {
  for (const auto& [key, value] : dict.items) {
    const Key* found = std::get_if<Key>(&key);
    if (found != nullptr && *found == wanted) return &value;
  }
  return nullptr;
}

}  // namespace

TorchTensor TorchTensor::FromFloats(std::vector<int64_t> shape, std::span<const float> values) {
  return CopyTensor(DType::kF32, std::move(shape), values);
}

TorchTensor TorchTensor::FromInts32(std::vector<int64_t> shape, std::span<const int32_t> values) {
  return CopyTensor(DType::kI32, std::move(shape), values);
}

TorchTensor TorchTensor::Borrow(const TensorView& view) {
  return {view.dtype, view.shape, view.data, nullptr};
}

const TorchValue* TorchDict::Find(std::string_view key) const {
  return FindKey<std::string>(*this, key);
}

const TorchValue* TorchDict::Find(int64_t key) const { return FindKey<int64_t>(*this, key); }

void TorchDict::Set(std::string key, TorchValue value) {
  items.emplace_back(std::move(key), std::move(value));
}

void TorchDict::Set(int64_t key, TorchValue value) { items.emplace_back(key, std::move(value)); }

std::string_view TorchValue::KindName() const {
  constexpr std::string_view kNames[] = {"none", "bool",  "int",  "float", "string",
                                         "list", "tuple", "dict", "tensor"};
  return kNames[data_.index()];
}

const TorchValue* TorchValue::Find(std::string_view key) const {
  const TorchDict* dict = AsDict();
  return dict == nullptr ? nullptr : dict->Find(key);
}

const TorchValue* TorchValue::Find(int64_t key) const {
  const TorchDict* dict = AsDict();
  return dict == nullptr ? nullptr : dict->Find(key);
}

}  // namespace oscar
