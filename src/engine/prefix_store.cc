#include "engine/prefix_store.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <iterator>
#include <optional>
#include <string>
#include <tuple>

#include "base/file.h"
#include "base/log.h"

namespace oscar {
namespace {

constexpr uint64_t kMaxQueuedBytes = uint64_t{256} << 20;

// The hash that a page's file name says.
std::optional<uint64_t> ParseName(std::string_view name) {
  constexpr std::string_view kSuffix = ".page";
  if (name.size() != 16 + kSuffix.size() || !name.ends_with(kSuffix)) return std::nullopt;
  uint64_t hash = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + 16, hash, 16);
  if (error != std::errc() || end != name.data() + 16) return std::nullopt;
  return hash;
}

// What AtomicFileWriter leaves of a page when the process is killed.
bool IsTemporary(std::string_view name) {
  return name.substr(0, 26).ends_with(".page.tmp.") && ParseName(name.substr(0, 21)).has_value();
}

struct FileHead {
  struct stat info {};
  PageFileHeader header{};  // zeros where the file is shorter
};

// Does not follow links, nor wait for whoever may write to a pipe; empty where `path` is not a
// regular file or cannot be read.
std::optional<FileHead> ReadHead(const std::filesystem::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
  if (fd < 0) return std::nullopt;
  FileHead head;
  bool read = ::fstat(fd, &head.info) == 0 && S_ISREG(head.info.st_mode);
  if (read) {
    const ssize_t got = ::pread(fd, &head.header, sizeof(head.header), 0);
    if (got != sizeof(head.header)) head.header = {};
    read = got >= 0;
  }
  ::close(fd);
  if (!read) return std::nullopt;
  return head;
}

}  // namespace

uint64_t PrefixStoreKey(const Model& model) {
  const KvPlan& plan = model.kv();
  const CacheConfig& config = plan.cache();
  const ModelSpec& spec = model.spec();
  uint64_t key = XXH3_64bits_withSeed(kPageFileMagic, sizeof(kPageFileMagic), model.fingerprint());
  const auto add = [&](const void* data, size_t bytes) {
    key = XXH3_64bits_withSeed(data, bytes, key);
  };
  const std::string description = fmt::format("{}/{}", plan.method().name, plan.Describe());
  add(description.data(), description.size());
  // Pages of other arithmetic would show in answers that are to be the same everywhere.
  if (model.portable()) add("portable", sizeof("portable"));
  for (const int value : {config.sink, config.recent, config.cell, spec.attention().num_kv_heads}) {
    add(&value, sizeof(value));
  }
  // The same weights give other keys and values under another config or --rope-scaling.
  const RopeScaling& rope = spec.rope_scaling;
  for (const double value :
       {static_cast<double>(spec.norm_eps), spec.rope_theta, static_cast<double>(rope.type),
        rope.factor, static_cast<double>(rope.original_max_position), rope.low_freq_factor,
        rope.high_freq_factor, rope.attention_factor, rope.beta_fast, rope.beta_slow}) {
    add(&value, sizeof(value));
  }
  for (const std::vector<BlockRules>& layer : plan.rules()) {
    for (const BlockRules& rules : layer) {
      for (const float value : {static_cast<float>(rules.k_rule), static_cast<float>(rules.v_rule),
                                rules.k_clip_ratio, rules.v_clip_ratio}) {
        add(&value, sizeof(value));
      }
    }
  }
  for (int layer = 0; layer < spec.num_kv_layers(); ++layer) {
    for (const PageLayout* shape : {&config.open, &config.sealed}) {
      for (const BlockPlace& place : shape->blocks(layer)) {
        const uint64_t id = place.layout.id();
        add(&id, sizeof(id));
      }
    }
    for (const SideTransform* side : {&plan.k(layer), &plan.v(layer)}) {
      add(side->matrices.data(), side->matrices.size() * sizeof(float));
    }
  }
  return key;
}

PrefixStore::LockFile::~LockFile() {
  if (fd >= 0) ::close(fd);  // and gives up the lock
}

Result<std::unique_ptr<PrefixStore>> PrefixStore::Open(const std::filesystem::path& folder,
                                                       const PrefixStoreOptions& options) {
  std::unique_ptr<PrefixStore> store(
      new PrefixStore(folder / fmt::format("{:016x}", options.format.key), options));
  std::error_code error;
  std::filesystem::create_directories(store->folder_, error);
  OSCAR_RETURN_IF_ERROR(store->Lock());
  OSCAR_RETURN_IF_ERROR(store->Scan());
  if (store->read_only()) return store;
  store->Trim(/*written=*/0);
  store->thread_ =
      std::jthread([raw = store.get()](const std::stop_token& stop) { raw->WriteLoop(stop); });
  return store;
}

Status PrefixStore::Lock() {
  const std::string path = (folder_ / "lock").string();
  const auto failed = [&](const char* what) {
    return InvalidArgument(fmt::format("{}: cannot be used as prefix folder: {}: {}",
                                       folder_.string(), what, std::strerror(errno)));
  };
  // As a pipe or a link it would be somebody's trap.
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW, 0644);
  if (fd < 0) return failed("its lock cannot be opened");
  LockFile lock{fd};
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    errno = EINVAL;
    return failed("its lock is not a regular file");
  }
  if (::flock(fd, LOCK_EX | LOCK_NB) == 0) {
    std::swap(lock_.fd, lock.fd);
    return {};
  }
  if (errno != EWOULDBLOCK) return failed("it cannot be locked");
  LogWarning(
      "{}: another oscar writes to this prefix folder; its pages are read now, and none of this "
      "process's are kept. Give each server its own folder",
      folder_.string());
  return {};
}

Status PrefixStore::Scan() {
  struct Found {
    bool damaged;
    timespec time;
    File file;
  };
  std::vector<Found> found;
  std::error_code error;
  for (auto entry = std::filesystem::directory_iterator(folder_, error);
       !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    const std::filesystem::path path = entry->path();
    const std::string name = path.filename().string();
    if (IsTemporary(name) && !read_only()) {
      std::error_code ignored;
      std::filesystem::remove(path, ignored);
    }
    const std::optional<uint64_t> hash = ParseName(name);
    if (!hash.has_value()) continue;
    const std::optional<FileHead> head = ReadHead(path);
    if (!head.has_value()) {
      LogWarning("{}: ignored: not a regular file, or closed to us", path.string());
      continue;
    }
    const PageFileHeader& header = head->header;
    const auto bytes = static_cast<uint64_t>(head->info.st_size);
    const bool damaged = header.hash != *hash || header.key != options_.format.key ||
                         header.index > kMaxPageIndex ||
                         bytes != PageFileBytes(header.sealed == 1 ? options_.format.sealed_bytes
                                                                   : options_.format.open_bytes);
    found.push_back({damaged,
                     head->info.st_mtim,
                     {path, bytes, header.parent, *hash, damaged ? 0 : header.index}});
  }
  if (error) {
    return InvalidArgument(
        fmt::format("{}: cannot be used as prefix folder: {}", folder_.string(), error.message()));
  }
  // Damaged ones first, in the order in which they go.
  std::ranges::sort(found, [](const Found& a, const Found& b) {
    const auto rank = [](const Found& one) {
      return std::tuple(!one.damaged, one.time.tv_sec, one.time.tv_nsec);
    };
    return rank(a) < rank(b);
  });
  for (Found& one : found) Remember(std::move(one.file));
  return {};
}

PrefixStore::~PrefixStore() {
  if (!thread_.joinable()) return;  // Open failed, or nothing is written
  Flush();
  thread_.request_stop();
  thread_.join();
}

void PrefixStore::Remember(File file) {
  if (const auto before = pages_.find(file.hash); before != pages_.end()) {
    bytes_ -= before->second->bytes;  // it was damaged, or did not fit when it was to be loaded
    files_.erase(before->second);
    pages_.erase(before);
  }
  bytes_ += file.bytes;
  files_.push_back(std::move(file));
  const File& added = files_.back();
  pages_[added.hash] = std::prev(files_.end());
  uint64_t parent = added.parent;
  for (int64_t left = added.index; left > 0; --left) {
    const auto at = FindPage(parent);
    if (at == pages_.end()) break;
    files_.splice(files_.end(), files_, at->second);
    parent = at->second->parent;
  }
}

void PrefixStore::Trim(uint64_t written) {
  while (bytes_ > options_.max_bytes && !files_.empty()) {
    const File& file = files_.front();
    std::error_code ignored;
    std::filesystem::remove(file.path, ignored);
    bytes_ -= file.bytes;
    pages_.erase(file.hash);
    // What goes may come again, but not at once where one history alone is over the limit.
    if (file.hash != written) {
      const std::lock_guard lock(mutex_);
      known_.erase(file.hash);
    }
    files_.pop_front();
  }
}

void PrefixStore::Load(const std::function<bool(PageRecord record)>& body) {
  // In order of depth: not all may fit.
  std::vector<const File*> files;
  for (const File& file : files_) files.push_back(&file);
  std::ranges::sort(files, {}, &File::index);
  const uint64_t largest =
      PageFileBytes(std::max(options_.format.open_bytes, options_.format.sealed_bytes));
  for (const File* file : files) {
    const Result<std::string> text = ReadFile(file->path, largest);
    // Where another process writes, pages may go at any time.
    if (read_only() && !text.has_value() && text.error().code() == StatusCode::kNotFound) continue;
    Result<PageRecord> record = text.has_value() ? ParsePageFile(*text, file->hash, options_.format)
                                                 : Result<PageRecord>(Unexpected(text.error()));
    if (!record.has_value()) {
      LogWarning("{}: ignored: {}", file->path.string(), record.error().message());
      continue;
    }
    {
      const std::lock_guard lock(mutex_);
      known_.insert(file->hash);
    }
    if (!body(std::move(*record))) return;
  }
}

bool PrefixStore::Wants(uint64_t hash, size_t payload_bytes) const {
  const std::lock_guard lock(mutex_);
  return !read_only() && !known_.contains(hash) && queued_bytes_ + payload_bytes <= kMaxQueuedBytes;
}

bool PrefixStore::Put(PageRecord record) {
  if (Has(record.hash)) return true;
  const uint64_t bytes = record.payload.size();
  if (!Wants(record.hash, bytes)) return false;
  {
    const std::lock_guard lock(mutex_);
    known_.insert(record.hash);
    queued_bytes_ += bytes;
    queue_.push_back(std::move(record));
  }
  changed_.notify_all();
  return true;
}

void PrefixStore::Flush() {
  std::unique_lock lock(mutex_);
  disk_full_ = false;  // try once more, now
  changed_.notify_all();
  changed_.wait(lock, [&] { return queue_.empty() || disk_full_; });
}

Status PrefixStore::Write(const PageRecord& record) {
  if (record.index > 0 && FindPage(record.parent) == pages_.end()) {
    // Nothing would ever lead to it. Where its parent may come again, so may it.
    const std::lock_guard lock(mutex_);
    if (!known_.contains(record.parent) && !known_.contains(record.parent ^ kWindowPage)) {
      known_.erase(record.hash);
    }
    return {};
  }
  const std::string bytes = FormatPageFile(record, options_.format.key);
  const std::filesystem::path path = folder_ / fmt::format("{:016x}.page", record.hash);
  OSCAR_ASSIGN_OR_RETURN(AtomicFileWriter writer, AtomicFileWriter::Create(path));
  OSCAR_RETURN_IF_ERROR(writer.Write(bytes));
  OSCAR_RETURN_IF_ERROR(writer.Commit());
  Remember({path, bytes.size(), record.parent, record.hash, record.index});
  Trim(record.hash);
  return {};
}

void PrefixStore::WriteLoop(const std::stop_token& stop) {
  bool failing = false;  // each spell of failures says so once
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, stop, [&] { return !queue_.empty(); });
    if (stop.stop_requested()) return;          // after a Flush
    const PageRecord& record = queue_.front();  // stays in place while others are added behind it
    lock.unlock();
    const Status status = Write(record);
    if (!status.ok() && !failing) {
      LogWarning("prefix pages are not kept on disk: {}", status.message());
    } else if (status.ok() && failing) {
      LogInfo("prefix pages are kept on disk again");
    }
    failing = !status.ok();
    lock.lock();
    if (status.code() == StatusCode::kResourceExhausted) {
      disk_full_ = true;
      changed_.notify_all();
      changed_.wait_for(lock, stop, options_.retry_after, [&] { return !disk_full_; });
      disk_full_ = false;
      continue;
    }
    queued_bytes_ -= record.payload.size();
    queue_.pop_front();
    changed_.notify_all();
  }
}

}  // namespace oscar
