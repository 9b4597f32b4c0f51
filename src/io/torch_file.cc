#include "io/torch_file.h"

#include <fmt/core.h>
#include <zip.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/error_text.h"
#include "base/file.h"
#include "io/torch_pickle.h"

namespace oscar {
namespace {

constexpr int64_t kMaxEntries = 100'000;
constexpr std::string_view kPickleName = "/data.pkl";

struct ZipCloser {
  void operator()(zip_t* archive) const { zip_discard(archive); }
};
struct ZipFileCloser {
  void operator()(zip_file_t* file) const { zip_fclose(file); }
};

struct Entry {
  zip_uint64_t index;
  uint64_t size;
};

std::string ZipErrorText(int code) {
  zip_error_t error;
  zip_error_init_with_code(&error, code);
  std::string text = zip_error_strerror(&error);
  zip_error_fini(&error);
  return text;
}

// What libzip reads from: an InputFile and a place in it.
class ZipInput {
 public:
  explicit ZipInput(const InputFile& input) : input_(input) { zip_error_init(&error_); }
  ~ZipInput() { zip_error_fini(&error_); }
  ZipInput(const ZipInput&) = delete;
  ZipInput& operator=(const ZipInput&) = delete;

  static zip_int64_t Call(void* state, void* data, zip_uint64_t length, zip_source_cmd_t command) {
    auto* const self = static_cast<ZipInput*>(state);
    switch (command) {
      case ZIP_SOURCE_OPEN:
        self->at_ = 0;
        return 0;
      case ZIP_SOURCE_READ: {
        const uint64_t count = std::min<uint64_t>(length, self->input_.size() - self->at_);
        const auto out = std::span(static_cast<std::byte*>(data), count);
        if (!self->input_.Read(self->at_, out).ok()) {
          zip_error_set(&self->error_, ZIP_ER_READ, EIO);
          return -1;
        }
        self->at_ += count;
        return static_cast<zip_int64_t>(count);
      }
      case ZIP_SOURCE_STAT: {
        zip_stat_t stat;
        zip_stat_init(&stat);
        stat.valid = ZIP_STAT_SIZE;
        stat.size = self->input_.size();
        std::memcpy(data, &stat, sizeof(stat));
        return sizeof(stat);
      }
      case ZIP_SOURCE_SEEK: {
        const zip_int64_t to = zip_source_seek_compute_offset(self->at_, self->input_.size(), data,
                                                              length, &self->error_);
        if (to < 0) return -1;
        self->at_ = static_cast<uint64_t>(to);
        return 0;
      }
      case ZIP_SOURCE_TELL:
        return static_cast<zip_int64_t>(self->at_);
      case ZIP_SOURCE_CLOSE:
        return 0;
      case ZIP_SOURCE_ERROR:
        return zip_error_to_data(&self->error_, data, length);
      case ZIP_SOURCE_FREE:
        delete self;
        return 0;
      case ZIP_SOURCE_SUPPORTS:
        return zip_source_make_command_bitmap(
            ZIP_SOURCE_OPEN, ZIP_SOURCE_READ, ZIP_SOURCE_STAT, ZIP_SOURCE_SEEK, ZIP_SOURCE_TELL,
            ZIP_SOURCE_CLOSE, ZIP_SOURCE_ERROR, ZIP_SOURCE_FREE, ZIP_SOURCE_SUPPORTS, -1);
      default:
        zip_error_set(&self->error_, ZIP_ER_OPNOTSUPP, 0);
        return -1;
    }
  }

 private:
  const InputFile& input_;
  uint64_t at_ = 0;
  zip_error_t error_;
};

// The archive's directory, checked: stored entries only, no name twice, and no more bytes than the
// file has, which also rules out entries that share bytes to multiply them.
class Archive {
 public:
  static Result<Archive> Open(const InputFile& input) {
    std::array<std::byte, 4> magic{};
    if (input.size() >= magic.size()) OSCAR_RETURN_IF_ERROR(input.Read(0, magic));
    if (std::memcmp(magic.data(), "PK\x03\x04", magic.size()) != 0) {
      return Unexpected(
          DataLoss("not a zip archive; torch versions before 1.6 wrote another format: load and "
                   "save the file with a newer one"));
    }
    zip_error_t error;
    zip_error_init(&error);
    zip_source_t* source = zip_source_function_create(&ZipInput::Call, new ZipInput(input), &error);
    zip_t* opened = nullptr;
    if (source != nullptr) {
      opened = zip_open_from_source(source, ZIP_RDONLY | ZIP_CHECKCONS, &error);
      if (opened == nullptr) zip_source_free(source);
    }
    const std::string message = opened == nullptr ? zip_error_strerror(&error) : "";
    zip_error_fini(&error);
    if (opened == nullptr) {
      OSCAR_RETURN_IF_ERROR(input.CheckUnchanged());
      return Unexpected(DataLoss(fmt::format("corrupt or truncated zip archive: {}", message)));
    }
    Archive archive;
    archive.zip_.reset(opened);
    OSCAR_RETURN_IF_ERROR(archive.ReadDirectory(input.size()));
    return archive;
  }

  const std::string& root() const { return root_; }

  bool Has(const std::string& name) const { return entries_.count(name) > 0; }

  // Bytes of an entry, its checksum verified. `wanted_bytes` < 0 accepts any size.
  Result<TorchStorageBytes> Read(const std::string& name, int64_t wanted_bytes) const {
    const auto found = entries_.find(name);
    if (found == entries_.end()) {
      return Unexpected(DataLoss(fmt::format("zip entry {} is missing", Quote(name))));
    }
    const Entry& entry = found->second;
    if (wanted_bytes >= 0 && entry.size != static_cast<uint64_t>(wanted_bytes)) {
      return Unexpected(DataLoss(fmt::format("zip entry {} has {} bytes, the pickle says {}",
                                             Quote(name), entry.size, wanted_bytes)));
    }
    const std::unique_ptr<zip_file_t, ZipFileCloser> file(
        zip_fopen_index(zip_.get(), entry.index, 0));
    if (file == nullptr) {
      return Unexpected(DataLoss(fmt::format("zip entry {}: {}", Quote(name),
                                             zip_error_strerror(zip_get_error(zip_.get())))));
    }
    std::vector<std::byte> bytes(entry.size);
    uint64_t at = 0;
    while (at < bytes.size()) {
      const zip_int64_t got = zip_fread(file.get(), bytes.data() + at, bytes.size() - at);
      if (got <= 0) return Unexpected(ReadError(name, file.get(), at));
      at += static_cast<uint64_t>(got);
    }
    std::byte beyond{};  // the checksum is compared when the end is seen
    if (zip_fread(file.get(), &beyond, 1) != 0) return Unexpected(ReadError(name, file.get(), at));
    return std::make_shared<const std::vector<std::byte>>(std::move(bytes));
  }

 private:
  static Status ReadError(const std::string& name, zip_file_t* file, uint64_t at) {
    const int code = zip_error_code_zip(zip_file_get_error(file));
    return DataLoss(fmt::format("zip entry {}, byte {}: {}", Quote(name), at,
                                code == 0 ? "unexpected length" : ZipErrorText(code)));
  }

  Status ReadDirectory(uint64_t file_bytes) {
    const zip_int64_t count = zip_get_num_entries(zip_.get(), 0);
    if (count > kMaxEntries) return DataLoss(fmt::format("{} zip entries", count));
    uint64_t total = 0;
    for (zip_int64_t i = 0; i < count; ++i) {
      zip_stat_t info;
      zip_stat_init(&info);
      const auto index = static_cast<zip_uint64_t>(i);
      constexpr zip_uint64_t kNeeded = ZIP_STAT_NAME | ZIP_STAT_SIZE | ZIP_STAT_COMP_SIZE |
                                       ZIP_STAT_COMP_METHOD | ZIP_STAT_ENCRYPTION_METHOD;
      if (zip_stat_index(zip_.get(), index, ZIP_FL_ENC_RAW, &info) != 0 ||
          (info.valid & kNeeded) != kNeeded) {
        return DataLoss(fmt::format("zip entry {} cannot be described", i));
      }
      const std::string name = info.name;
      if (info.comp_method != ZIP_CM_STORE || info.encryption_method != ZIP_EM_NONE) {
        return DataLoss(
            fmt::format("zip entry {} is compressed or encrypted; torch.save stores", Quote(name)));
      }
      if (info.size != info.comp_size || info.size > file_bytes - total) {
        return DataLoss(fmt::format("zip entry {} claims {} bytes, more than the file can hold",
                                    Quote(name), info.size));
      }
      total += info.size;
      if (!entries_.emplace(name, Entry{index, info.size}).second) {
        return DataLoss(fmt::format("zip entry {} appears twice", Quote(name)));
      }
      const size_t slash = name.find('/');
      if (slash != std::string::npos && name.substr(slash) == kPickleName) {
        if (!root_.empty()) return DataLoss("two zip entries are named data.pkl");
        root_ = name.substr(0, slash);
        if (root_.empty()) return DataLoss("zip entry '/data.pkl' has no folder");
      }
    }
    if (root_.empty()) return DataLoss("no zip entry data.pkl; not a file of torch.save");
    return {};
  }

  std::unique_ptr<zip_t, ZipCloser> zip_;
  std::unordered_map<std::string, Entry> entries_;
  std::string root_;
};

Result<TorchValue> Parse(const InputFile& input, const TorchLimits& limits) {
  OSCAR_ASSIGN_OR_RETURN(const Archive archive, Archive::Open(input));
  // Torch wrote no byte order before 2.1, and then always the machine's; ours is little-endian.
  const std::string byteorder = archive.root() + "/byteorder";
  if (archive.Has(byteorder)) {
    OSCAR_ASSIGN_OR_RETURN(const TorchStorageBytes order, archive.Read(byteorder, -1));
    const std::string_view text(reinterpret_cast<const char*>(order->data()), order->size());
    if (text != "little") {
      return Unexpected(DataLoss(fmt::format("zip entry {} says {}; only 'little' is supported",
                                             Quote(byteorder), Quote(text))));
    }
  }
  const std::string pickle_name = archive.root() + std::string(kPickleName);
  OSCAR_ASSIGN_OR_RETURN(const TorchStorageBytes pickle, archive.Read(pickle_name, -1));
  const TorchStorageLoader load = [&](std::string_view key, uint64_t num_bytes) {
    return archive.Read(fmt::format("{}/data/{}", archive.root(), key),
                        static_cast<int64_t>(num_bytes));
  };
  const uint64_t max_copy_bytes = (uint64_t{64} << 20) + 16 * input.size();
  return ParseTorchPickle(*pickle, Printable(pickle_name), load, limits, max_copy_bytes);
}

Result<TorchValue> ParseTorchFile(const InputFile& input, const TorchLimits& limits) {
  auto value = Parse(input, limits);
  if (value) return value;
  // What a change did to the archive says less than that there was one.
  OSCAR_RETURN_IF_ERROR(input.CheckUnchanged());
  return Unexpected(value.error().WithContext(input.path()));
}

}  // namespace

Result<TorchValue> ReadTorchFile(const std::filesystem::path& path, const TorchLimits& limits) {
  OSCAR_ASSIGN_OR_RETURN(const InputFile input, InputFile::Open(path));
  return ParseTorchFile(input, limits);
}

Result<TorchValue> ParseTorchFile(std::span<const std::byte> bytes, std::string_view name,
                                  const TorchLimits& limits) {
  return ParseTorchFile(InputFile::FromBytes(bytes, std::string(name)), limits);
}

}  // namespace oscar
