// Walks a TorchValue, checking what its header promises.
#pragma once

#include "base/check.h"
#include "io/torch_value.h"
#include "io/utf8.h"

namespace oscar {

inline void CheckTorchValue(const TorchValue& value, int depth = 0) {
  OSCAR_CHECK(depth <= kMaxTorchDepth);
  if (const std::string* text = value.AsString()) OSCAR_CHECK(IsValidUtf8(*text));
  if (const TorchTensor* tensor = value.AsTensor()) {
    const auto num_bytes = CheckedNumBytes(tensor->dtype, tensor->shape);
    OSCAR_CHECK(num_bytes.has_value() && *num_bytes == tensor->data.size());
    OSCAR_CHECK(tensor->data.empty() || tensor->owner != nullptr);
    std::byte sum{};  // every byte must be readable
    for (const std::byte byte : tensor->data) sum ^= byte;
    volatile std::byte sink = sum;
    (void)sink;
  }
  if (const TorchList* list = value.AsList()) {
    for (const TorchValue& item : *list) CheckTorchValue(item, depth + 1);
  }
  if (const TorchTuple* tuple = value.AsTuple()) {
    for (const TorchValue& item : tuple->items) CheckTorchValue(item, depth + 1);
  }
  if (const TorchDict* dict = value.AsDict()) {
    for (const auto& [key, item] : dict->items) CheckTorchValue(item, depth + 1);
  }
}

}  // namespace oscar
