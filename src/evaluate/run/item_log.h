// items.jsonl of a run: every finished item, appended as it ends, and found again by the next run.
// A torn last line, as a crash leaves it, is reported and measured again. Owns the open file; one
// thread.
#pragma once

#include <cstdio>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "oscar/status.h"
#include "run/results.h"

namespace oscar {

class ItemLog {
 public:
  ItemLog() = default;
  ~ItemLog();
  ItemLog(const ItemLog&) = delete;
  ItemLog& operator=(const ItemLog&) = delete;

  Status Open(const std::filesystem::path& path);
  // Null where the item was not measured under these settings.
  const ItemRecord* Find(const std::string& settings, const ItemKey& key) const;
  Status Append(ItemRecord record);

 private:
  std::FILE* file_ = nullptr;
  bool needs_newline_ = false;
  std::map<std::pair<std::string, ItemKey>, ItemRecord> records_;
};

// items.jsonl, or the one in the directory. Lines that cannot be read are skipped with a warning.
Result<std::vector<ItemRecord>> ReadItems(const std::filesystem::path& path);

}  // namespace oscar
