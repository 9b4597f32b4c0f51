#include "run/item_log.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/file.h"
#include "base/log.h"

namespace oscar {
namespace {

constexpr uint64_t kMaxLogBytes = uint64_t{1} << 32;

// The records of a file's text in its order. A line that is none is warned of, with what follows
// from that.
std::vector<ItemRecord> ParseItems(const std::string& text, const std::filesystem::path& file,
                                   std::string_view consequence) {
  std::vector<ItemRecord> out;
  size_t line = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    ++line;
    Result<ItemRecord> record = ParseItemRecord(std::string_view(text).substr(at, end - at));
    at = end + 1;
    if (record.has_value()) {
      out.push_back(std::move(*record));
    } else {
      LogWarning("{}:{}: not read ({}); {}", file.string(), line, record.error().message(),
                 consequence);
    }
  }
  return out;
}

}  // namespace

ItemLog::~ItemLog() {
  if (file_ != nullptr) std::fclose(file_);
}

Status ItemLog::Open(const std::filesystem::path& path) {
  std::error_code error;
  if (std::filesystem::exists(path, error)) {
    OSCAR_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kMaxLogBytes));
    for (ItemRecord& record : ParseItems(text, path, "the item is measured again")) {
      std::pair<std::string, ItemKey> key{record.settings, KeyOf(record)};
      records_[std::move(key)] = std::move(record);
    }
    needs_newline_ = !text.empty() && text.back() != '\n';
  }
  file_ = std::fopen(path.c_str(), "a");
  if (file_ == nullptr) return Unavailable(fmt::format("{}: cannot be opened", path.string()));
  return {};
}

const ItemRecord* ItemLog::Find(const std::string& settings, const ItemKey& key) const {
  const auto found = records_.find({settings, key});
  return found == records_.end() ? nullptr : &found->second;
}

Status ItemLog::Append(ItemRecord record) {
  const std::string line = (needs_newline_ ? "\n" : "") + ToJsonLine(record);
  needs_newline_ = false;
  if (std::fwrite(line.data(), 1, line.size(), file_) != line.size() || std::fflush(file_) != 0) {
    return Unavailable("items.jsonl: cannot be written; is the disk full?");
  }
  std::pair<std::string, ItemKey> key{record.settings, KeyOf(record)};
  records_[std::move(key)] = std::move(record);
  return {};
}

Result<std::vector<ItemRecord>> ReadItems(const std::filesystem::path& path) {
  std::filesystem::path file = path;
  if (IsDirectory(file)) file /= "items.jsonl";
  OSCAR_ASSIGN_OR_RETURN(const std::string text, ReadFile(file, kMaxLogBytes));
  return ParseItems(text, file, "the item is left out");
}

}  // namespace oscar
