// PrefixStore: immutable prefix pages on disk, so that a restart finds them again. One file per
// page, written beside its name and renamed, with a checksum over all of it: a crash loses at most
// the pages that were not yet written. A folder belongs to one store key (model, its positions,
// method, rotation, clips, page format); other folders are left alone. Files are hostile: a torn or
// damaged page is skipped with a warning and is the first to go when space is needed. Names that
// are not ours are neither counted nor touched.
//
// One process at a time writes to a folder: it holds a lock on the file `lock` there. Another one
// reads the pages that are there when it starts, and writes none.
//
// Put copies and returns; a thread of the store's own writes. All methods from the engine thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "engine/page_file.h"
#include "model/model.h"
#include "oscar/status.h"

namespace oscar {

// What pages must agree on to be readable and to mean the same.
uint64_t PrefixStoreKey(const Model& model);

struct PrefixStoreOptions {
  PageFileFormat format;  // its key is PrefixStoreKey; files of other sizes are damaged
  // Bounds the files of this key. Those go first that were written longest ago, pages before the
  // ones they continue, which alone make them usable.
  uint64_t max_bytes = 0;
  // How long writing pauses after a disk was full.
  std::chrono::milliseconds retry_after = std::chrono::seconds(5);
};

class PrefixStore {
 public:
  // Makes `folder`/<key> if need be.
  static Result<std::unique_ptr<PrefixStore>> Open(const std::filesystem::path& folder,
                                                   const PrefixStoreOptions& options);
  ~PrefixStore();  // writes what is still queued

  // Whether another process writes to the folder: pages can be loaded, none are taken.
  bool read_only() const { return lock_.fd < 0; }
  // Hands over pages, parents before children, while `body` returns true. Call once, first.
  void Load(const std::function<bool(PageRecord record)>& body);
  // Whether Put would take a page, so that nothing is copied in vain.
  bool Wants(uint64_t hash, size_t payload_bytes) const;
  // False when the store is read-only or the queue is full: the page may be offered again.
  bool Put(PageRecord record);
  bool Has(uint64_t hash) const {
    const std::lock_guard lock(mutex_);
    return known_.contains(hash);
  }
  // Waits until everything queued is on disk, or the disk is full. For an orderly end.
  void Flush();

 private:
  PrefixStore(std::filesystem::path folder, const PrefixStoreOptions& options)
      : folder_(std::move(folder)), options_(options) {}
  Status Lock();
  Status Scan();
  void WriteLoop(const std::stop_token& stop);
  Status Write(const PageRecord& record);
  struct File {
    std::filesystem::path path;
    uint64_t bytes = 0;
    uint64_t parent = 0;
    uint64_t hash = 0;
    int64_t index = 0;
  };
  // The file of the page with this hash, sealed or else open (kWindowPage).
  std::unordered_map<uint64_t, std::list<File>::iterator>::iterator FindPage(uint64_t hash) {
    const auto found = pages_.find(hash);
    return found != pages_.end() ? found : pages_.find(hash ^ kWindowPage);
  }
  void Remember(File file);
  // Back to the limit; `written` is the page that was just written, if any.
  void Trim(uint64_t written);

  struct LockFile {
    ~LockFile();
    int fd = -1;
  };

  const std::filesystem::path folder_;
  const PrefixStoreOptions options_;
  LockFile lock_;

  mutable std::mutex mutex_;
  std::unordered_set<uint64_t> known_;  // queued or on disk; guarded by mutex_
  std::condition_variable_any changed_;
  std::deque<PageRecord> queue_;  // guarded by mutex_; the front is being written
  uint64_t queued_bytes_ = 0;     // guarded by mutex_
  bool disk_full_ = false;        // guarded by mutex_; the front waits to be tried again

  // The writer's: what is on disk, in the order in which it goes, and pages by their hashes.
  std::list<File> files_;
  std::unordered_map<uint64_t, std::list<File>::iterator> pages_;
  uint64_t bytes_ = 0;
  std::jthread thread_;  // last: joins before the state above goes
};

}  // namespace oscar
