// Files: bounded and checked reading, atomic writes. Every error names the path and the cause.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "oscar/status.h"

namespace oscar {

// A regular file open for reading at any place, or bytes in memory that stand for one. Move-only.
// Thread-safe. Not a memory map: one whose file another process truncates raises SIGBUS.
class InputFile {
 public:
  static Result<InputFile> Open(const std::filesystem::path& path);
  // Bytes that the caller keeps alive; `name` stands for the path in errors.
  static InputFile FromBytes(std::span<const std::byte> bytes, std::string name);
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&&) = delete;
  ~InputFile();

  // As it was when it was opened.
  uint64_t size() const { return size_; }
  const std::string& path() const { return path_; }
  // Fills `out` with what stands at `offset`. A file that has been written to since it was opened
  // is an error: what was read of it does not belong together. REQUIRES: within size().
  Status Read(uint64_t offset, std::span<std::byte> out) const;
  // Whether the file is as it was when it was opened, by its size and time.
  Status CheckUnchanged() const;

 private:
  InputFile(int fd, uint64_t size, std::string path)
      : fd_(fd), size_(size), path_(std::move(path)) {}
  int fd_ = -1;  // -1: bytes in memory
  uint64_t size_ = 0;
  int64_t modified_ns_ = 0;
  const std::byte* data_ = nullptr;
  std::string path_;
};

// What lies there. Where that cannot be found out, as in a directory that is closed to us, the
// answer is no: reading will say why. The library's own throw.
bool Exists(const std::filesystem::path& path);
bool IsDirectory(const std::filesystem::path& path);
bool IsRegularFile(const std::filesystem::path& path);
// Whether the name is taken, if only by a link that leads nowhere: a file that may be absent is
// then broken, not absent.
bool IsThere(const std::filesystem::path& path);

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
