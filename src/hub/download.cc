#include "hub/download.h"

#include <errno.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <cstring>
#include <ctime>
#include <mutex>
#include <set>
#include <thread>

#include "base/error_text.h"
#include "base/file.h"
#include "base/log.h"
#include "base/progress.h"
#include "hub/digest.h"

namespace oscar::hub {
namespace {

namespace fs = std::filesystem;

Status MakeFolder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (!error) return {};
  return InvalidArgument(
      fmt::format("{}: cannot make the folder: {}", folder.string(), error.message()));
}

Status FileError(const fs::path& path, const char* what) {
  const int code = errno;
  if (code == ENOSPC || code == EDQUOT || code == EFBIG) {
    return ResourceExhausted(
        fmt::format("{}: no room for more ({}); make some and run the same command again, which "
                    "continues where this one stopped",
                    path.string(), std::strerror(code)));
  }
  return Unavailable(fmt::format("{}: {}: {}", path.string(), what, std::strerror(code)));
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

// The lock that the hub's clients take for the same blob; the system gives it back when the process
// ends. Waits for whoever has it.
Status Lock(const Descriptor& file, const fs::path& path, const std::string& title) {
  if (file.get() < 0) return FileError(path, "cannot open the lock");
  if (::flock(file.get(), LOCK_EX | LOCK_NB) == 0) return {};
  if (errno == EWOULDBLOCK) LogInfo("{}: another process is downloading it; waiting", title);
  while (::flock(file.get(), LOCK_EX) != 0) {
    // Where a filesystem has no locks, two at once cost bytes, not correctness: digests decide.
    if (errno == ENOLCK || errno == ENOTSUP || errno == ENOSYS) return {};
    if (errno != EINTR) return FileError(path, "cannot lock");
  }
  return {};
}

// bytes 5-9/10
bool ParseContentRange(const std::string& text, uint64_t* start, std::optional<uint64_t>* total) {
  constexpr std::string_view kUnit = "bytes ";
  if (!text.starts_with(kUnit)) return false;
  const char* const end = text.data() + text.size();
  const auto [after, error] = std::from_chars(text.data() + kUnit.size(), end, *start);
  if (error != std::errc() || after == end || *after != '-') return false;
  const size_t slash = text.find('/');
  uint64_t value = 0;
  if (slash != std::string::npos &&
      std::from_chars(text.data() + slash + 1, end, value).ec == std::errc()) {
    *total = value;
  }
  return true;
}

// One file on its way to a blob. The bytes that arrived are hashed as they come.
class BlobWriter {
 public:
  BlobWriter(const Remote& remote, const RemoteFile& file, fs::path blob, Progress& progress,
             const std::atomic<bool>& stop)
      : remote_(remote),
        file_(file),
        blob_(std::move(blob)),
        partial_(blob_.string() + ".incomplete"),
        progress_(progress),
        stop_(stop) {}

  Status Run(const Url& url) {
    const Descriptor fd(::open(partial_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666));
    if (fd.get() < 0) return FileError(partial_, "cannot create");
    fd_ = fd.get();
    OSCAR_RETURN_IF_ERROR(ReadPartial());
    Patience patience(remote_.options().retry);
    int wrong = 0;
    while (true) {
      if (have_ == size_) {
        if (digest_->Matches()) break;
        if (++wrong == 2) {
          ::unlink(partial_.c_str());
          return DataLoss(fmt::format(
              "{}: {}: the bytes that arrived are not those that the hub lists (digest {}); twice "
              "in a row, so something on the way changes them",
              remote_.Title(), Printable(file_.path), file_.digest));
        }
        OSCAR_RETURN_IF_ERROR(StartAgain());
        if (size_ == 0) continue;
      }
      OSCAR_RETURN_IF_ERROR(ReceiveSome(url, patience));
    }
    if (::fsync(fd_) != 0) return FileError(partial_, "cannot write");
    if (::rename(partial_.c_str(), blob_.c_str()) != 0) return FileError(blob_, "cannot rename");
    return {};
  }

 private:
  // What an earlier run left counts, once it is hashed.
  Status ReadPartial() {
    struct stat info {};
    if (::fstat(fd_, &info) != 0) return FileError(partial_, "cannot read");
    if (!S_ISREG(info.st_mode)) return DataLoss(fmt::format("{}: no file", partial_.string()));
    if (static_cast<uint64_t>(info.st_size) > size_) return StartAgain();
    digest_ = std::make_unique<Digest>(file_.digest, size_);
    std::vector<char> buffer(size_t{1} << 20);
    while (true) {
      const ssize_t count = ::read(fd_, buffer.data(), buffer.size());
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return FileError(partial_, "cannot read");
      if (count == 0) break;
      digest_->Add({buffer.data(), static_cast<size_t>(count)});
      have_ += static_cast<uint64_t>(count);
      if (have_ > size_) return StartAgain();
    }
    Count();
    return {};
  }

  Status StartAgain() {
    if (::ftruncate(fd_, 0) != 0) return FileError(partial_, "cannot write");
    digest_ = std::make_unique<Digest>(file_.digest, size_);
    have_ = 0;
    return {};
  }

  // One request; an error only where another would not help.
  Status ReceiveSome(const Url& url, Patience& patience) {
    HttpRequest request;
    request.url = url;
    request.token = remote_.options().token;
    if (have_ > 0) request.range = fmt::format("bytes={}-", have_);
    const uint64_t before = have_;
    bool arrived = false;
    request.begin = [&](const HttpAnswer& head) { return Begin(head); };
    request.receive = [&](std::span<const char> bytes) {
      arrived = arrived || !bytes.empty();
      return Receive(bytes);
    };
    const auto answer = Send(request, remote_.options().http);
    // A server that starts over each time brings nothing, however many bytes it sends.
    if (arrived && have_ > before) patience.Restart();
    if (!answer.has_value()) {
      if (answer.error().code() != StatusCode::kUnavailable || errno_is_ours_) {
        return answer.error();
      }
      if (have_ > before) return {};  // cut on the way: continue at once
      return patience.Wait(Named(answer.error()));
    }
    if (answer->status == 416) {  // the server knows fewer bytes than we have
      OSCAR_RETURN_IF_ERROR(StartAgain());
      return patience.Wait(DataLoss(fmt::format("{}: {}: the server has fewer bytes than it lists",
                                                remote_.Title(), Printable(file_.path))));
    }
    if (answer->status != 200 && answer->status != 206) {
      const Status why = remote_.Explain(*answer, file_.path);
      // Signed addresses expire; the hub gives another with the next request.
      if (!IsPassing(answer->status) && answer->is_home) return why;
      return patience.Wait(why, RetryAfter(*answer, std::time(nullptr)));
    }
    if (have_ == size_ || have_ > before) return {};
    return patience.Wait(Named(Unavailable(fmt::format("{}: the answer ended after {} of {} bytes",
                                                       url.ForMessages(), have_, size_))));
  }

  Status Named(const Status& status) const {
    return status.WithContext(fmt::format("{}: {}", remote_.Title(), Printable(file_.path)));
  }

  Status Begin(const HttpAnswer& head) {
    std::optional<uint64_t> total;
    if (head.status == 200) {
      if (have_ > 0) OSCAR_RETURN_IF_ERROR(StartAgain());  // it does not do ranges
      uint64_t length = 0;
      const std::string text = head.Header("content-length");
      if (std::from_chars(text.data(), text.data() + text.size(), length).ec == std::errc()) {
        total = length;
      }
    } else {
      uint64_t start = 0;
      const std::string range = head.Header("content-range");
      if (!ParseContentRange(range, &start, &total) || start != have_) {
        return Named(
            DataLoss(fmt::format("asked for bytes from {}, got range {}", have_, Quote(range))));
      }
    }
    if (total.has_value() && *total != size_) {
      return Named(DataLoss(fmt::format("{} bytes, where the hub lists {}", *total, size_)));
    }
    return {};
  }

  Status Receive(std::span<const char> bytes) {
    if (stop_.load()) return {StatusCode::kCancelled, "stopped"};
    if (bytes.size() > size_ - have_) {
      return Named(DataLoss(fmt::format("more than the {} bytes that the hub lists", size_)));
    }
    for (size_t done = 0; done < bytes.size();) {
      const ssize_t count =
          ::pwrite(fd_, bytes.data() + done, bytes.size() - done, static_cast<off_t>(have_ + done));
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) {
        errno_is_ours_ = true;
        return FileError(partial_, "cannot write");
      }
      done += static_cast<size_t>(count);
    }
    digest_->Add(bytes);
    have_ += bytes.size();
    Count();
    return {};
  }

  // Bytes that come a second time are no progress.
  void Count() {
    if (have_ <= counted_) return;
    progress_.Add(have_ - counted_);
    counted_ = have_;
  }

  const Remote& remote_;
  const RemoteFile& file_;
  const fs::path blob_, partial_;
  Progress& progress_;
  const std::atomic<bool>& stop_;
  const uint64_t size_ = *file_.size;
  int fd_ = -1;
  uint64_t have_ = 0, counted_ = 0;
  bool errno_is_ours_ = false;
  std::unique_ptr<Digest> digest_;
};

bool HasBlob(const fs::path& blob, uint64_t size) {
  std::error_code error;
  return fs::file_size(blob, error) == size && !error;
}

// snapshots/COMMIT/a/b -> ../../../blobs/DIGEST, as the hub's clients link. The link is made as
// `temporary`, which nobody else writes to, and moved: a process that is killed leaves nothing in a
// snapshot that is no file of it.
Status Link(const Place& place, const RemoteFile& file, const fs::path& temporary) {
  const fs::path link = place.Snapshot() / file.path;
  std::string target = "../../";
  for (const char c : file.path) target += c == '/' ? "../" : "";
  target += "blobs/" + file.digest;
  std::error_code error;
  if (fs::read_symlink(link, error) == target && !error) return {};
  OSCAR_RETURN_IF_ERROR(MakeFolder(link.parent_path()));
  fs::remove(temporary, error);
  fs::create_symlink(target, temporary, error);
  if (error) {  // a filesystem without links: the file itself, as the hub's clients do
    fs::copy_file(place.Folder() / "blobs" / file.digest, temporary, error);
  }
  if (!error) fs::rename(temporary, link, error);
  if (error) {
    std::error_code ignored;
    fs::remove(temporary, ignored);
    return InvalidArgument(fmt::format("{}: cannot link: {}", link.string(), error.message()));
  }
  return {};
}

Status Fetch(const Remote& remote, const Place& place, const RemoteFile& file, Progress& progress,
             const std::atomic<bool>& stop) {
  const fs::path blob = place.Folder() / "blobs" / file.digest;
  const fs::path lock =
      place.cache / ".locks" / place.Folder().filename() / (file.digest + ".lock");
  OSCAR_RETURN_IF_ERROR(MakeFolder(blob.parent_path()));
  OSCAR_RETURN_IF_ERROR(MakeFolder(lock.parent_path()));
  const Descriptor held(::open(lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  OSCAR_RETURN_IF_ERROR(
      Lock(held, lock, fmt::format("{}: {}", remote.Title(), Printable(file.path))));
  if (HasBlob(blob, *file.size)) {
    progress.Add(*file.size);
  } else {
    BlobWriter writer(remote, file, blob, progress, stop);
    OSCAR_RETURN_IF_ERROR(writer.Run(remote.FileUrl(file, place.commit)));
  }
  // Beside the lock, which is held.
  return Link(place, file, fs::path(lock).replace_extension(".link"));
}

// Says so before an hour of downloading rather than after it.
Status CheckRoom(const Remote& remote, const Place& place, const std::vector<RemoteFile>& files) {
  uint64_t needed = 0;
  std::set<std::string> counted;
  for (const RemoteFile& file : files) {
    const fs::path blob = place.Folder() / "blobs" / file.digest;
    if (HasBlob(blob, *file.size) || !counted.insert(file.digest).second) continue;
    std::error_code error;
    const uint64_t partial = fs::file_size(blob.string() + ".incomplete", error);
    needed += *file.size - (error ? 0 : std::min(partial, *file.size));
  }
  OSCAR_RETURN_IF_ERROR(MakeFolder(place.Folder()));
  std::error_code error;
  const fs::space_info space = fs::space(place.Folder(), error);
  if (error || needed <= space.available) return {};
  return ResourceExhausted(fmt::format(
      "{}: {} are still to come, and {} has {} free; make room, or set HF_HUB_CACHE to "
      "a folder elsewhere",
      remote.Title(), FormatBytes(needed), place.cache.string(), FormatBytes(space.available)));
}

}  // namespace

Status Download(const Remote& remote, const Place& place, std::vector<RemoteFile> files) {
  // Linked already: nothing to ask, and nothing to write where the cache is read-only.
  std::erase_if(files, [&](const RemoteFile& file) {
    std::error_code error;
    const uint64_t size = fs::file_size(place.Snapshot() / file.path, error);
    const std::string target = fs::read_symlink(place.Snapshot() / file.path, error).string();
    return !error && target.ends_with("/" + file.digest) && file.size == size;
  });
  if (files.empty()) return {};
  for (RemoteFile& file : files) {
    OSCAR_RETURN_IF_ERROR(remote.Complete(file, place.commit));
  }
  OSCAR_RETURN_IF_ERROR(CheckRoom(remote, place, files));
  // The longest first, so that none is left alone at the end.
  std::ranges::stable_sort(files, [](const auto& a, const auto& b) { return *a.size > *b.size; });
  uint64_t total = 0;
  for (const RemoteFile& file : files) total += *file.size;
  Progress progress(remote.Title(), total, "B");
  std::atomic<size_t> next{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;
  Status failure;
  const auto work = [&] {
    for (size_t i = next++; i < files.size() && !stop; i = next++) {
      const Status status = Fetch(remote, place, files[i], progress, stop);
      if (status.ok()) continue;
      const std::lock_guard lock(mutex);
      if (!stop.exchange(true)) failure = status;
    }
  };
  std::vector<std::thread> threads;
  const size_t count =
      std::min<size_t>(files.size(), static_cast<size_t>(remote.options().parallel));
  for (size_t i = 1; i < count; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  return failure;
}

Status WriteRef(const Place& place, const std::string& revision) {
  if (revision == place.commit) return {};
  const fs::path ref = place.Folder() / "refs" / revision;
  if (const auto text = ReadFile(ref, 256); text.has_value() && *text == place.commit) return {};
  OSCAR_RETURN_IF_ERROR(MakeFolder(ref.parent_path()));
  return WriteFileAtomically(ref, place.commit);
}

}  // namespace oscar::hub
