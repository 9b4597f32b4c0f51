#include "engine/prefix_store.h"

#include <fmt/core.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>

#include "base/file.h"
#include "base/log.h"

namespace oscar {
namespace {

constexpr uint64_t kMaxQueuedBytes = uint64_t{256} << 20;
constexpr char kMagic[8] = {'O', 'S', 'C', 'P', 'A', 'G', 'E', '1'};

// Little-endian, without padding; the payload and an XXH3 of everything before it follow.
struct Header {
  char magic[8];
  uint64_t key;
  uint64_t parent;
  uint64_t hash;
  uint64_t payload_bytes;
  uint32_t index;
  uint32_t sealed;
  int32_t tokens[kPageTokens];
};
static_assert(sizeof(Header) == 48 + 4 * kPageTokens);
static_assert(std::is_trivially_copyable_v<Header>);

Result<PageRecord> Parse(const std::string& text, uint64_t key, uint64_t name, size_t open_bytes,
                         size_t sealed_bytes) {
  Header header;
  uint64_t checksum = 0;
  if (text.size() < sizeof(header) + sizeof(checksum)) {
    return Unexpected(DataLoss("shorter than its header"));
  }
  std::memcpy(&header, text.data(), sizeof(header));
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0 || header.key != key) {
    return Unexpected(DataLoss("not a page of this model and format"));
  }
  const size_t expected = header.sealed != 0 ? sealed_bytes : open_bytes;
  const size_t body = sizeof(header) + expected;
  if (header.payload_bytes != expected || text.size() != body + sizeof(checksum)) {
    return Unexpected(
        DataLoss(fmt::format("has {} bytes, a page of {} was expected", text.size(), expected)));
  }
  std::memcpy(&checksum, text.data() + body, sizeof(checksum));
  if (checksum != XXH3_64bits(text.data(), body)) return Unexpected(DataLoss("checksum differs"));
  const uint64_t hash = XXH3_64bits_withSeed(header.tokens, sizeof(header.tokens), header.parent);
  if (header.hash != hash || hash != name || header.index > (1u << 24)) {
    return Unexpected(DataLoss("its name and its tokens disagree"));
  }
  PageRecord record;
  record.parent = header.parent;
  record.hash = hash;
  record.index = header.index;
  record.sealed = header.sealed != 0;
  record.tokens.assign(std::begin(header.tokens), std::end(header.tokens));
  const auto* payload = reinterpret_cast<const std::byte*>(text.data()) + sizeof(header);
  record.payload.assign(payload, payload + expected);
  return record;
}

// Unchecked, and zeros where the file is too short.
Header ReadHeader(const std::filesystem::path& path) {
  Header header{};
  std::ifstream stream(path, std::ios::binary);
  stream.read(reinterpret_cast<char*>(&header), sizeof(header));
  header.index = std::min(header.index, 1u << 24);
  return header;
}

bool ParseName(const std::filesystem::path& path, uint64_t* hash) {
  const std::string stem = path.stem().string();
  if (path.extension() != ".page" || stem.size() != 16) return false;
  char* end = nullptr;
  *hash = std::strtoull(stem.c_str(), &end, 16);
  return end == stem.c_str() + stem.size();
}

}  // namespace

uint64_t PrefixStoreKey(const Model& model) {
  const KvPlan& plan = model.kv();
  const CacheConfig& config = plan.cache();
  const ModelSpec& spec = model.spec();
  uint64_t key = XXH3_64bits_withSeed(kMagic, sizeof(kMagic), model.fingerprint());
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
      const uint64_t id = shape->block(layer).id();
      add(&id, sizeof(id));
    }
    for (const SideTransform* side : {&plan.k(layer), &plan.v(layer)}) {
      add(side->matrices.data(), side->matrices.size() * sizeof(float));
    }
  }
  return key;
}

PrefixStore::PrefixStore(std::filesystem::path folder, uint64_t key, uint64_t max_bytes)
    : folder_(std::move(folder)), key_(key), max_bytes_(max_bytes) {}

Result<std::unique_ptr<PrefixStore>> PrefixStore::Open(const std::filesystem::path& folder,
                                                       uint64_t key, uint64_t max_bytes) {
  std::unique_ptr<PrefixStore> store(
      new PrefixStore(folder / fmt::format("{:016x}", key), key, max_bytes));
  std::error_code error;
  std::filesystem::create_directories(store->folder_, error);
  struct Found {
    std::filesystem::file_time_type time;
    File file;
  };
  std::vector<Found> found;
  auto entries = std::filesystem::directory_iterator(store->folder_, error);
  if (error) {
    return Unexpected(InvalidArgument(fmt::format("{}: cannot be used as prefix folder: {}",
                                                  store->folder_.string(), error.message())));
  }
  for (const auto& entry : entries) {
    std::error_code ignored;
    if (!entry.is_regular_file(ignored)) continue;
    File file{entry.path(), entry.file_size(ignored)};
    if (ParseName(file.path, &file.hash)) {
      const Header header = ReadHeader(file.path);
      file.parent = header.parent;
      file.index = header.index;
    }
    found.push_back({entry.last_write_time(ignored), std::move(file)});
  }
  std::ranges::sort(found, {}, &Found::time);
  for (Found& one : found) store->Remember(std::move(one.file));
  store->Trim(/*written=*/0);
  store->thread_ =
      std::jthread([raw = store.get()](const std::stop_token& stop) { raw->WriteLoop(stop); });
  return store;
}

PrefixStore::~PrefixStore() {
  if (!thread_.joinable()) return;  // Open failed
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
  if (added.hash == 0) return;
  pages_[added.hash] = std::prev(files_.end());
  uint64_t parent = added.parent;
  for (int64_t left = added.index; left > 0; --left) {
    const auto at = pages_.find(parent);
    if (at == pages_.end()) break;
    files_.splice(files_.end(), files_, at->second);
    parent = at->second->parent;
  }
}

void PrefixStore::Trim(uint64_t written) {
  while (bytes_ > max_bytes_ && !files_.empty()) {
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

void PrefixStore::Load(size_t open_bytes, size_t sealed_bytes,
                       const std::function<bool(PageRecord record)>& body) {
  // Headers first: pages are handed over in order of depth, and not all may fit.
  struct Found {
    uint32_t index;
    uint64_t hash;
    std::filesystem::path path;
  };
  std::vector<Found> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder_, error)) {
    Found file{0, 0, entry.path()};
    if (!ParseName(file.path, &file.hash)) continue;  // a temporary that a crash left
    file.index = ReadHeader(file.path).index;
    found.push_back(std::move(file));
  }
  std::ranges::sort(found, {}, &Found::index);
  const uint64_t largest = sizeof(Header) + std::max(open_bytes, sealed_bytes) + sizeof(uint64_t);
  for (const Found& file : found) {
    const Result<std::string> text = ReadFile(file.path, largest);
    Result<PageRecord> record = text.has_value()
                                    ? Parse(*text, key_, file.hash, open_bytes, sealed_bytes)
                                    : Result<PageRecord>(Unexpected(text.error()));
    if (!record.has_value()) {
      LogWarning("{}: ignored: {}", file.path.string(), record.error().message());
      continue;
    }
    {
      const std::lock_guard lock(mutex_);
      known_.insert(file.hash);
    }
    if (!body(std::move(*record))) return;
  }
}

bool PrefixStore::Put(PageRecord record) {
  if (Has(record.hash)) return true;
  const uint64_t bytes = record.payload.size();
  {
    const std::lock_guard lock(mutex_);
    if (queued_bytes_ + bytes > kMaxQueuedBytes) return false;
    known_.insert(record.hash);
    queued_bytes_ += bytes;
    queue_.push_back(std::move(record));
  }
  changed_.notify_all();
  return true;
}

void PrefixStore::Flush() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return queue_.empty() && !writing_; });
}

Status PrefixStore::Write(const PageRecord& record) {
  if (record.index > 0 && !pages_.contains(record.parent)) {
    // Nothing would ever lead to it. Where its parent may come again, so may it.
    const std::lock_guard lock(mutex_);
    if (!known_.contains(record.parent)) known_.erase(record.hash);
    return {};
  }
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.key = key_;
  header.parent = record.parent;
  header.hash = record.hash;
  header.payload_bytes = record.payload.size();
  header.index = static_cast<uint32_t>(record.index);
  header.sealed = record.sealed ? 1 : 0;
  std::copy_n(record.tokens.begin(), kPageTokens, header.tokens);
  std::vector<std::byte> bytes(sizeof(header) + record.payload.size());
  std::memcpy(bytes.data(), &header, sizeof(header));
  std::ranges::copy(record.payload, bytes.begin() + sizeof(header));
  const uint64_t checksum = XXH3_64bits(bytes.data(), bytes.size());
  const std::filesystem::path path = folder_ / fmt::format("{:016x}.page", record.hash);
  OSCAR_ASSIGN_OR_RETURN(AtomicFileWriter writer, AtomicFileWriter::Create(path));
  OSCAR_RETURN_IF_ERROR(writer.Write(bytes));
  OSCAR_RETURN_IF_ERROR(writer.Write(std::as_bytes(std::span(&checksum, 1))));
  OSCAR_RETURN_IF_ERROR(writer.Commit());
  Remember({path, bytes.size() + sizeof(checksum), record.parent, record.hash, record.index});
  Trim(record.hash);
  return {};
}

void PrefixStore::WriteLoop(const std::stop_token& stop) {
  bool warned = false;
  while (true) {
    PageRecord record;
    {
      std::unique_lock lock(mutex_);
      writing_ = false;
      changed_.notify_all();
      if (!changed_.wait(lock, stop, [&] { return !queue_.empty(); })) return;
      record = std::move(queue_.front());
      queue_.pop_front();
      queued_bytes_ -= record.payload.size();
      writing_ = true;
    }
    const Status status = Write(record);
    if (!status.ok() && !warned) {
      warned = true;  // a full disk says so once
      LogWarning("prefix pages are not kept on disk: {}", status.message());
    }
  }
}

}  // namespace oscar
