// The pickle inside a PyTorch file, read by whitelist. Accepted are the protocol-2 operations that
// torch.save emits for dicts, lists, tuples, strings, numbers and tensors, and these globals:
// torch._utils._rebuild_tensor_v2 and _v3, the torch storage classes, the torch dtypes and
// collections.OrderedDict. They are recognised, never called: the interpreter only moves values
// between its stack and a table. Everything else is an error that names the operation and its byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/torch_file.h"
#include "io/torch_value.h"
#include "oscar/status.h"

namespace oscar {

using TorchStorageBytes = std::shared_ptr<const std::vector<std::byte>>;

// Gives the bytes of the storage `key`, exactly `num_bytes` of them. Called once for each key that
// a tensor of the finished tree needs.
using TorchStorageLoader =
    std::function<Result<TorchStorageBytes>(std::string_view key, uint64_t num_bytes)>;

// `max_copy_bytes` bounds the copies made of non-contiguous tensors, on top of `limits`.
Result<TorchValue> ParseTorchPickle(std::span<const std::byte> pickle, std::string_view what,
                                    const TorchStorageLoader& load, const TorchLimits& limits,
                                    uint64_t max_copy_bytes);

}  // namespace oscar
