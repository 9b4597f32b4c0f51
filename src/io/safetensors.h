// Safetensors files and sharded checkpoints. A file is 8 bytes of little-endian header length, a
// JSON header, then tensor data. Files are never read whole: opening a 70 GB checkpoint costs its
// headers. The header is hostile until proven: every tensor must lie inside the data,
// tensors may neither overlap nor leave gaps, and dtype x shape must be the size in bytes.
// Alignment is not demanded (valid files exist without it); read elements by memcpy.
//
// Tensors that objects hand out outlive them. Reading from several threads is safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/file.h"
#include "io/tensor.h"
#include "oscar/status.h"

namespace oscar {

// The limit that the reference implementation sets, so that no valid file exceeds it.
inline constexpr uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;

class SafetensorsFile {
 public:
  static Result<SafetensorsFile> Open(const std::filesystem::path& path);
  // Parses bytes that the caller keeps alive; `name` stands for the path in errors.
  static Result<SafetensorsFile> FromBytes(std::span<const std::byte> bytes, std::string name);

  SafetensorsFile(SafetensorsFile&&) noexcept = default;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept = default;

  // In the order of their data.
  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  // Null where the file has no tensor of that name.
  const StoredTensor* Find(std::string_view name) const;
  // As Find, with an error naming file and tensor.
  Result<StoredTensor> Get(std::string_view name) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::string& path() const { return path_; }

 private:
  SafetensorsFile() = default;
  static Result<SafetensorsFile> Parse(InputFile input);
  Status ParseHeader(std::string_view header, const std::shared_ptr<const InputFile>& input);

  std::string path_;
  std::vector<StoredTensor> tensors_;
  std::map<std::string, std::string> metadata_;
  std::unordered_map<std::string, size_t> index_;  // name -> tensors_
};

// A model directory: model.safetensors, or the shards of model.safetensors.index.json. Tensors in
// shards that the index does not list are not part of the checkpoint.
class Checkpoint {
 public:
  static Result<Checkpoint> Open(const std::filesystem::path& directory);

  // Sorted by name. `path_of(i)` is the file that holds tensors()[i].
  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  const std::string& path_of(size_t tensor_idx) const {
    return files_[file_of_[tensor_idx]].path();
  }
  const StoredTensor* Find(std::string_view name) const;
  Result<StoredTensor> Get(std::string_view name) const;
  const std::vector<SafetensorsFile>& files() const { return files_; }
  uint64_t total_bytes() const { return total_bytes_; }
  const std::string& directory() const { return directory_; }

 private:
  Checkpoint() = default;
  void Add(const StoredTensor& tensor, size_t file_idx);
  void Finish();

  std::string directory_;
  std::vector<SafetensorsFile> files_;
  std::vector<StoredTensor> tensors_;
  std::vector<size_t> file_of_;  // parallel to tensors_
  uint64_t total_bytes_ = 0;
};

// The index of a sharded checkpoint: tensor name -> file name, checked to stay in its directory.
// `what` names the source in errors.
Result<std::map<std::string, std::string>> ParseSafetensorsIndex(std::string_view text,
                                                                 std::string_view what);

// Writes atomically: the old file or the whole new one. Equal arguments give equal bytes: tensors
// are laid out by element size (largest first, so that all are aligned), then by name, whatever the
// order of `tensors`; the header is padded with spaces to a multiple of 8.
Status WriteSafetensors(const std::filesystem::path& path, std::span<const TensorView> tensors,
                        const std::map<std::string, std::string>& metadata = {});

}  // namespace oscar
