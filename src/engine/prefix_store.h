// PrefixStore: immutable prefix pages on disk, so that a restart finds them again. One file a page,
// written beside its name and renamed, with a checksum over all of it: a crash loses at most the
// pages that were not yet written. A folder belongs to one store key (model, its positions, method,
// rotation, clips, page format); other folders are left alone. Files are hostile: what is torn,
// foreign or damaged is skipped with a warning and removed when space is needed.
//
// Put copies and returns; a thread of the store's own writes. All methods from the engine thread.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "model/model.h"
#include "oscar/status.h"

namespace oscar {

// What pages must agree on to be readable and to mean the same.
uint64_t PrefixStoreKey(const Model& model);

struct PageRecord {
  uint64_t parent = 0;  // chain hashes; see prefix_index.h
  uint64_t hash = 0;
  int64_t index = 0;  // of the page in its sequence
  bool sealed = false;
  std::vector<int32_t> tokens;     // [64]
  std::vector<std::byte> payload;  // the page's bytes
};

class PrefixStore {
 public:
  // Makes `folder`/<key> if need be. `max_bytes` bounds the files of this key: those go first that
  // were written longest ago, pages before the ones they continue, which alone make them usable.
  static Result<std::unique_ptr<PrefixStore>> Open(const std::filesystem::path& folder,
                                                   uint64_t key, uint64_t max_bytes);
  ~PrefixStore();  // writes what is still queued

  // Hands over pages, parents before children, while `body` returns true. `page_bytes` are the
  // sizes of open and sealed pages; anything else is foreign.
  void Load(size_t open_bytes, size_t sealed_bytes,
            const std::function<bool(PageRecord record)>& body);
  // False when the queue is full: the page may be offered again.
  bool Put(PageRecord record);
  bool Has(uint64_t hash) const {
    const std::lock_guard lock(mutex_);
    return known_.contains(hash);
  }
  // Waits until everything queued is on disk. For tests and for an orderly end.
  void Flush();

 private:
  PrefixStore(std::filesystem::path folder, uint64_t key, uint64_t max_bytes);
  void WriteLoop(const std::stop_token& stop);
  Status Write(const PageRecord& record);
  struct File {
    std::filesystem::path path;
    uint64_t bytes = 0;
    uint64_t parent = 0;
    uint64_t hash = 0;  // 0: no page
    int64_t index = 0;
  };
  void Remember(File file);
  // Back to the limit; `written` is the page that was just written, if any.
  void Trim(uint64_t written);

  const std::filesystem::path folder_;
  const uint64_t key_;
  const uint64_t max_bytes_;

  mutable std::mutex mutex_;
  std::unordered_set<uint64_t> known_;  // queued or on disk; guarded by mutex_
  std::condition_variable_any changed_;
  std::deque<PageRecord> queue_;  // guarded by mutex_
  uint64_t queued_bytes_ = 0;     // guarded by mutex_
  bool writing_ = false;          // guarded by mutex_

  // The writer's: what is on disk, in the order in which it goes, and pages by their hashes.
  std::list<File> files_;
  std::unordered_map<uint64_t, std::list<File>::iterator> pages_;
  uint64_t bytes_ = 0;
  std::jthread thread_;  // last: joins before the state above goes
};

}  // namespace oscar
