// Files: read-only memory maps and atomic writes. Every error names the path and the cause.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "oscar/status.h"

namespace oscar {

// A whole file mapped read-only. Move-only; the bytes live as long as the object. Thread-safe to
// read. A file that another process truncates while mapped raises SIGBUS: model and rotation files
// are taken to be stable while open.
class MappedFile {
 public:
  static Result<MappedFile> Open(const std::filesystem::path& path);
  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  const std::string& path() const { return path_; }

 private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
  std::string path_;
};

// What lies there. Where that cannot be found out, as in a directory that is closed to us, the
// answer is no: reading will say why. The library's own throw.
bool Exists(const std::filesystem::path& path);
bool IsDirectory(const std::filesystem::path& path);
bool IsRegularFile(const std::filesystem::path& path);

// Whether files can be written to a directory that need not exist yet: what is there of its path
// is a directory, and open to us. The error names that part.
Status CheckCanWriteBelow(const std::filesystem::path& directory);

// Reads a whole small file. `max_bytes` bounds memory against hostile or mistaken paths.
Result<std::string> ReadFile(const std::filesystem::path& path, uint64_t max_bytes);

// The same of what a user hands over, which may be a pipe: /dev/stdin, a shell's <(...). Waits for
// whoever writes to it.
Result<std::string> ReadInput(const std::filesystem::path& path, uint64_t max_bytes);

// Writes beside the target under a temporary name and renames on Commit, so that readers see the
// old file or the whole new one. Destroyed without Commit, it removes the temporary.
class AtomicFileWriter {
 public:
  static Result<AtomicFileWriter> Create(const std::filesystem::path& path);
  AtomicFileWriter(AtomicFileWriter&& other) noexcept;
  AtomicFileWriter& operator=(AtomicFileWriter&&) = delete;
  ~AtomicFileWriter();

  Status Write(std::span<const std::byte> bytes);
  Status Write(std::string_view text);
  uint64_t bytes_written() const { return written_; }
  // Flushes what was written to disk: after it Commit no longer fails for want of room.
  Status Sync();
  // Syncs, renames and syncs the directory. Call once, last.
  Status Commit();

 private:
  AtomicFileWriter(int fd, std::string temporary, std::string path);
  int fd_ = -1;
  std::string temporary_;
  std::string path_;
  uint64_t written_ = 0;
};

Status WriteFileAtomically(const std::filesystem::path& path, std::string_view text);

}  // namespace oscar
