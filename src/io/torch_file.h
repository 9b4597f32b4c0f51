// PyTorch .pt files: zip archives of one pickle and raw tensor storages. Reading interprets a
// whitelist of pickle operations and executes nothing; every other operation or global is an error
// that names it. Writing yields files that torch.load(weights_only=True) reads.
// Free functions; thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "base/file.h"
#include "io/torch_value.h"
#include "oscar/status.h"

namespace oscar {

struct TorchLimits {
  // Bytes of tensor data held at the end: storages, plus copies of tensors that were stored
  // non-contiguously. Independently, copies may not exceed 64 MiB + 16 x the file's size, so that a
  // small file cannot ask for a large allocation (a stride of 0 repeats one element for free).
  uint64_t max_tensor_bytes = uint64_t{16} << 30;
  uint64_t max_pickle_bytes = uint64_t{64} << 20;
  // Values in the finished tree (a value referred to twice counts twice) and on the way to it.
  uint64_t max_values = 1'000'000;
};

// Errors name the file, the zip entry, and the pickle byte or tensor at fault.
Result<TorchValue> ReadTorchFile(const std::filesystem::path& path, const TorchLimits& limits = {});
// The same from bytes, which need not outlive the call; `name` stands for the path in errors.
Result<TorchValue> ParseTorchFile(std::span<const std::byte> bytes, std::string_view name,
                                  const TorchLimits& limits = {});

// Writes atomically. Equal values give equal bytes: timestamps and the archive's inner name are
// fixed. Entries are stored, tensor data starts at multiples of 64 bytes in the file, and tensors
// over the same bytes share one storage. Strings must be UTF-8; dict keys distinct; at most
// kMaxTorchDepth levels; less than 4 GiB in all. Torch 1.13 loads everything but floats outside of
// tensors when asked for weights only.
Status WriteTorchFile(const std::filesystem::path& path, const TorchValue& value);
// The same without the last step: the file is on disk under another name until its Commit. For
// files that belong together.
Result<AtomicFileWriter> StageTorchFile(const std::filesystem::path& path, const TorchValue& value);

}  // namespace oscar
