#include "base/file.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace oscar {
namespace {

Status ErrnoStatus(std::string_view path, std::string_view action, int error) {
  const StatusCode code = error == ENOENT    ? StatusCode::kNotFound
                          : error == ENOSPC  ? StatusCode::kResourceExhausted
                          : error == EDQUOT  ? StatusCode::kResourceExhausted
                          : error == EFBIG   ? StatusCode::kResourceExhausted
                          : error == EACCES  ? StatusCode::kInvalidArgument
                          : error == EISDIR  ? StatusCode::kInvalidArgument
                          : error == ENOTDIR ? StatusCode::kNotFound
                                             : StatusCode::kInternal;
  return {code, fmt::format("{}: cannot {}: {}", path, action, std::strerror(error))};
}

// Opens a regular file for reading and reports its size.
Result<std::pair<int, uint64_t>> OpenRegular(const std::string& path) {
  // A pipe would otherwise wait for somebody to write before it could be refused.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    const int error = errno;
    std::error_code ignored;
    if (error == ENOENT && std::filesystem::is_symlink(path, ignored)) {
      const std::string target = std::filesystem::read_symlink(path, ignored).string();
      return Unexpected(
          DataLoss(fmt::format("{}: a link to {}, which is not there", path, target)));
    }
    return Unexpected(ErrnoStatus(path, "open", error));
  }
  struct stat info {};
  if (::fstat(fd, &info) != 0) {
    const int error = errno;
    ::close(fd);
    return Unexpected(ErrnoStatus(path, "stat", error));
  }
  if (!S_ISREG(info.st_mode)) {
    ::close(fd);
    return Unexpected(InvalidArgument(fmt::format("{}: not a regular file", path)));
  }
  return std::pair<int, uint64_t>{fd, static_cast<uint64_t>(info.st_size)};
}

int64_t ModifiedNs(const struct stat& info) {
  return int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec;
}

// Fills `out` unless the end comes before; says how far it got.
Result<size_t> ReadUpTo(int fd, const std::string& path, std::span<char> out) {
  size_t at = 0;
  while (at < out.size()) {
    const ssize_t got = ::read(fd, out.data() + at, out.size() - at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Unexpected(ErrnoStatus(path, "read", errno));
    if (got == 0) break;
    at += static_cast<size_t>(got);
  }
  return at;
}

}  // namespace

Result<InputFile> InputFile::Open(const std::filesystem::path& path) {
  const std::string name = path.string();
  OSCAR_ASSIGN_OR_RETURN(const auto opened, OpenRegular(name));
  InputFile file(opened.first, opened.second, name);
  struct stat info {};
  if (::fstat(file.fd_, &info) != 0) return Unexpected(ErrnoStatus(name, "stat", errno));
  file.modified_ns_ = ModifiedNs(info);
  return file;
}

InputFile InputFile::FromBytes(std::span<const std::byte> bytes, std::string name) {
  InputFile file(-1, bytes.size(), std::move(name));
  file.data_ = bytes.data();
  return file;
}

InputFile::InputFile(InputFile&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      size_(other.size_),
      modified_ns_(other.modified_ns_),
      data_(other.data_),
      path_(std::move(other.path_)) {}

InputFile::~InputFile() {
  if (fd_ >= 0) ::close(fd_);
}

Status InputFile::Read(uint64_t offset, std::span<std::byte> out) const {
  OSCAR_CHECK(offset <= size_ && out.size() <= size_ - offset);
  if (out.empty()) return {};
  if (fd_ < 0) {
    std::memcpy(out.data(), data_ + offset, out.size());
    return {};
  }
  while (!out.empty()) {
    const ssize_t got = ::pread(fd_, out.data(), out.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus(path_, "read", errno);
    if (got == 0) {
      return DataLoss(fmt::format("{}: changed while it was read: it ends at byte {} and had {}",
                                  path_, offset, size_));
    }
    offset += static_cast<uint64_t>(got);
    out = out.subspan(static_cast<size_t>(got));
  }
  return CheckUnchanged();
}

Status InputFile::CheckUnchanged() const {
  if (fd_ < 0) return {};
  struct stat info {};
  if (::fstat(fd_, &info) != 0) return ErrnoStatus(path_, "stat", errno);
  const auto size = static_cast<uint64_t>(info.st_size);
  if (size == size_ && ModifiedNs(info) == modified_ns_) return {};
  return DataLoss(fmt::format("{}: changed while it was read: it has {} bytes and had {}{}", path_,
                              size, size_, size == size_ ? "; it was written to" : ""));
}

bool Exists(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

bool IsDirectory(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::is_directory(path, error);
}

bool IsRegularFile(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error);
}

bool IsThere(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::exists(std::filesystem::symlink_status(path, error));
}

Status CheckCanWriteBelow(const std::filesystem::path& directory) {
  namespace fs = std::filesystem;
  std::error_code error;
  fs::path present = fs::absolute(directory, error);
  while (!fs::exists(present, error) && present.has_relative_path()) {
    present = present.parent_path();
  }
  if (!fs::is_directory(present, error)) {
    return InvalidArgument(fmt::format("{} is not a directory", present.string()));
  }
  if (::access(present.c_str(), W_OK | X_OK) != 0) {
    return InvalidArgument(
        fmt::format("{} cannot be written to: {}", present.string(), std::strerror(errno)));
  }
  return {};
}

Result<std::string> ReadFile(const std::filesystem::path& path, uint64_t max_bytes) {
  const std::string name = path.string();
  OSCAR_ASSIGN_OR_RETURN(const auto opened, OpenRegular(name));
  const auto [fd, size] = opened;
  if (size > max_bytes) {
    ::close(fd);
    return Unexpected(
        OutOfRange(fmt::format("{}: {} bytes, more than the limit of {}", name, size, max_bytes)));
  }
  std::string text(size, '\0');
  Result<size_t> got = ReadUpTo(fd, name, text);
  ::close(fd);
  if (!got.has_value()) return Unexpected(got.error());
  text.resize(*got);  // less where the file shrank while we read
  return text;
}

Result<std::string> ReadInput(const std::filesystem::path& path, uint64_t max_bytes) {
  const std::string name = path.string();
  struct stat info {};
  if (::stat(name.c_str(), &info) != 0) return Unexpected(ErrnoStatus(name, "open", errno));
  if (S_ISREG(info.st_mode)) return ReadFile(path, max_bytes);
  if (!S_ISFIFO(info.st_mode)) {
    return Unexpected(InvalidArgument(fmt::format("{}: neither a file nor a pipe", name)));
  }
  const int fd = ::open(name.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return Unexpected(ErrnoStatus(name, "open", errno));
  std::string text;
  Result<size_t> got = size_t{0};
  do {
    const size_t before = text.size();
    text.resize(std::min(std::max<uint64_t>(2 * before, 1 << 16), max_bytes + 1));
    got = ReadUpTo(fd, name, std::span(text).subspan(before));
    if (got.has_value()) text.resize(before + *got);
  } while (got.has_value() && *got > 0 && text.size() <= max_bytes);
  ::close(fd);
  if (!got.has_value()) return Unexpected(got.error());
  if (text.size() > max_bytes) {
    return Unexpected(
        OutOfRange(fmt::format("{}: more than the limit of {} bytes", name, max_bytes)));
  }
  return text;
}

AtomicFileWriter::AtomicFileWriter(int fd, std::string temporary, std::string path)
    : fd_(fd), temporary_(std::move(temporary)), path_(std::move(path)) {}

Result<AtomicFileWriter> AtomicFileWriter::Create(const std::filesystem::path& path) {
  static std::atomic<uint64_t> counter{0};
  const std::string name = path.string();
  std::string temporary = fmt::format("{}.tmp.{}.{}", name, ::getpid(), counter.fetch_add(1));
  const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd < 0) return Unexpected(ErrnoStatus(name, "create", errno));
  return AtomicFileWriter(fd, std::move(temporary), name);
}

AtomicFileWriter::AtomicFileWriter(AtomicFileWriter&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      temporary_(std::move(other.temporary_)),
      path_(std::move(other.path_)),
      written_(other.written_) {}

AtomicFileWriter::~AtomicFileWriter() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temporary_.c_str());
}

Status AtomicFileWriter::Write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t put = ::write(fd_, bytes.data(), bytes.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return ErrnoStatus(path_, "write", errno);
    written_ += static_cast<uint64_t>(put);
    bytes = bytes.subspan(static_cast<size_t>(put));
  }
  return {};
}

Status AtomicFileWriter::Write(std::string_view text) {
  return Write(std::as_bytes(std::span(text.data(), text.size())));
}

Status AtomicFileWriter::Sync() {
  if (::fsync(fd_) != 0) return ErrnoStatus(path_, "flush", errno);
  return {};
}

Status AtomicFileWriter::Commit() {
  OSCAR_RETURN_IF_ERROR(Sync());
  if (::close(std::exchange(fd_, -1)) != 0) {
    const int error = errno;
    ::unlink(temporary_.c_str());
    return ErrnoStatus(path_, "close", error);
  }
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
    const int error = errno;
    ::unlink(temporary_.c_str());
    return ErrnoStatus(path_, "rename", error);
  }
  // The rename itself must survive a crash; failure here leaves a complete file, so it is not one.
  std::string directory = std::filesystem::path(path_).parent_path().string();
  const int dir = ::open(directory.empty() ? "." : directory.c_str(), O_RDONLY | O_CLOEXEC);
  if (dir >= 0) {
    ::fsync(dir);
    ::close(dir);
  }
  return {};
}

Status WriteFileAtomically(const std::filesystem::path& path, std::string_view text) {
  OSCAR_ASSIGN_OR_RETURN(AtomicFileWriter writer, AtomicFileWriter::Create(path));
  OSCAR_RETURN_IF_ERROR(writer.Write(text));
  return writer.Commit();
}

}  // namespace oscar
