// WriteTorchFile: the pickle and the zip archive around it. The archive is written by hand because
// torch wants tensor data at multiples of 64 bytes, which needs control over local headers.
#include <fmt/core.h>

#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "base/error_text.h"
#include "base/file.h"
#include "io/torch_file.h"
#include "io/utf8.h"

namespace oscar {
namespace {

// What torch names an archive that is not saved to a named file.
constexpr std::string_view kRoot = "archive";
constexpr uint64_t kAlignment = 64;

template <typename T>
void PutLittle(std::string* out, T value) {
  static_assert(std::endian::native == std::endian::little);
  out->append(reinterpret_cast<const char*>(&value), sizeof value);
}

std::string_view StorageClass(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return "DoubleStorage";
    case DType::kF32:
      return "FloatStorage";
    case DType::kF16:
      return "HalfStorage";
    case DType::kBf16:
      return "BFloat16Storage";
    case DType::kI64:
      return "LongStorage";
    case DType::kI32:
      return "IntStorage";
    case DType::kI16:
      return "ShortStorage";
    case DType::kI8:
      return "CharStorage";
    case DType::kU8:
      return "ByteStorage";
    case DType::kBool:
      return "BoolStorage";
    default:
      return {};  // types that torch learned later, with another way of saving them
  }
}

// Encodes a value as protocol-2 pickle and collects the storages that it refers to.
class PickleWriter {
 public:
  Status Encode(const TorchValue& value) {
    out_ = "\x80\x02";
    OSCAR_RETURN_IF_ERROR(Put(value, 0));
    out_ += '.';
    return {};
  }

  const std::string& pickle() const { return out_; }
  // Storage i is the zip entry data/i.
  const std::vector<std::span<const std::byte>>& storages() const { return storages_; }

 private:
  Status Put(const TorchValue& value, int depth) {
    if (depth > kMaxTorchDepth) {
      return InvalidArgument(fmt::format("value nested deeper than {} levels", kMaxTorchDepth));
    }
    if (value.is_none()) out_ += 'N';
    if (const bool* flag = value.AsBool()) out_ += *flag ? '\x88' : '\x89';
    if (const int64_t* number = value.AsInt()) PutInt(*number);
    if (const double* number = value.AsFloat()) PutFloat(*number);
    if (const std::string* text = value.AsString()) return PutString(*text);
    if (const TorchTensor* tensor = value.AsTensor()) return PutTensor(*tensor);
    if (const TorchList* list = value.AsList()) {
      out_ += "](";
      OSCAR_RETURN_IF_ERROR(PutAll(*list, depth));
      out_ += 'e';
    }
    if (const TorchTuple* tuple = value.AsTuple()) {
      out_ += '(';
      OSCAR_RETURN_IF_ERROR(PutAll(tuple->items, depth));
      out_ += 't';
    }
    if (const TorchDict* dict = value.AsDict()) return PutDict(*dict, depth);
    return {};
  }

  Status PutAll(const TorchList& items, int depth) {
    for (const TorchValue& item : items) OSCAR_RETURN_IF_ERROR(Put(item, depth + 1));
    return {};
  }

  Status PutDict(const TorchDict& dict, int depth) {
    std::set<TorchKey> keys;
    out_ += "}(";
    for (const auto& [key, value] : dict.items) {
      if (!keys.insert(key).second) return InvalidArgument("dict with two equal keys");
      if (const int64_t* number = std::get_if<int64_t>(&key)) {
        PutInt(*number);
      } else {
        OSCAR_RETURN_IF_ERROR(PutString(std::get<std::string>(key)));
      }
      OSCAR_RETURN_IF_ERROR(Put(value, depth + 1));
    }
    out_ += 'u';
    return {};
  }

  void PutInt(int64_t value) {
    if (value >= 0 && value <= 0xff) {
      out_ += 'K';
      PutLittle(&out_, static_cast<uint8_t>(value));
    } else if (value >= 0 && value <= 0xffff) {
      out_ += 'M';
      PutLittle(&out_, static_cast<uint16_t>(value));
    } else if (value >= std::numeric_limits<int32_t>::min() &&
               value <= std::numeric_limits<int32_t>::max()) {
      out_ += 'J';
      PutLittle(&out_, static_cast<int32_t>(value));
    } else {
      out_ += '\x8a';
      PutLittle(&out_, uint8_t{8});
      PutLittle(&out_, value);
    }
  }

  void PutFloat(double value) {
    const auto bits = std::bit_cast<uint64_t>(value);
    out_ += 'G';
    for (int shift = 56; shift >= 0; shift -= 8) out_ += static_cast<char>(bits >> shift & 0xff);
  }

  Status PutString(std::string_view text) {
    if (!IsValidUtf8(text)) {
      return InvalidArgument(fmt::format("string {} is not UTF-8", Quote(text)));
    }
    if (text.size() > std::numeric_limits<uint32_t>::max()) {
      return OutOfRange("string of 4 GiB or more");
    }
    out_ += 'X';
    PutLittle(&out_, static_cast<uint32_t>(text.size()));
    out_ += text;
    return {};
  }

  Status PutTensor(const TorchTensor& tensor) {
    const auto bytes = CheckedNumBytes(tensor.dtype, tensor.shape);
    if (!bytes || *bytes != tensor.data.size()) {
      return InvalidArgument(fmt::format("tensor: {} {} does not take {} bytes",
                                         NameOf(tensor.dtype), ShapeToString(tensor.shape),
                                         tensor.data.size()));
    }
    const std::string_view storage_class = StorageClass(tensor.dtype);
    if (storage_class.empty()) {
      return Unimplemented(
          fmt::format("tensors of type {} cannot be written to .pt files", NameOf(tensor.dtype)));
    }
    out_ += "ctorch._utils\n_rebuild_tensor_v2\n((";
    OSCAR_RETURN_IF_ERROR(PutString("storage"));
    out_ += fmt::format("ctorch\n{}\n", storage_class);
    OSCAR_RETURN_IF_ERROR(PutString(std::to_string(StorageOf(tensor))));
    OSCAR_RETURN_IF_ERROR(PutString("cpu"));
    PutInt(static_cast<int64_t>(tensor.data.size() / SizeOf(tensor.dtype)));
    out_ += "tQ";
    PutInt(0);  // offset
    out_ += '(';
    for (const int64_t dim : tensor.shape) PutInt(dim);
    out_ += "t(";
    for (size_t i = 0; i < tensor.shape.size(); ++i) {
      int64_t stride = 1;  // bounded by the size in bytes, but for empty tensors: there 0s follow
      for (size_t j = i + 1; j < tensor.shape.size(); ++j) {
        stride *= tensor.data.empty() ? 1 : tensor.shape[j];
      }
      PutInt(stride);
    }
    out_ += "t\x89";  // requires no gradient
    out_ += "ccollections\nOrderedDict\n)RtR";
    return {};
  }

  size_t StorageOf(const TorchTensor& tensor) {
    const std::tuple key(tensor.data.data(), tensor.data.size(), tensor.dtype);
    const auto [at, inserted] = index_.emplace(key, storages_.size());
    if (inserted) storages_.push_back(tensor.data);
    return at->second;
  }

  std::string out_;
  std::vector<std::span<const std::byte>> storages_;
  std::map<std::tuple<const std::byte*, size_t, DType>, size_t> index_;
};

// CRC-32 of zip (reflected polynomial 0xedb88320), four bytes a step.
class Crc32 {
 public:
  Crc32() {
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t crc = i;
      for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1) != 0 ? 0xedb88320u : 0u);
      table_[0][i] = crc;
    }
    for (uint32_t i = 0; i < 256; ++i) {
      for (size_t t = 1; t < 4; ++t) {
        table_[t][i] = table_[t - 1][i] >> 8 ^ table_[0][table_[t - 1][i] & 0xff];
      }
    }
  }

  uint32_t Of(std::span<const std::byte> bytes) const {
    uint32_t crc = ~0u;
    while (bytes.size() >= 4) {
      uint32_t word = 0;
      std::memcpy(&word, bytes.data(), 4);
      crc ^= word;
      crc = table_[3][crc & 0xff] ^ table_[2][crc >> 8 & 0xff] ^ table_[1][crc >> 16 & 0xff] ^
            table_[0][crc >> 24];
      bytes = bytes.subspan(4);
    }
    for (const std::byte byte : bytes) {
      crc = crc >> 8 ^ table_[0][(crc ^ static_cast<uint32_t>(byte)) & 0xff];
    }
    return ~crc;
  }

 private:
  std::array<std::array<uint32_t, 256>, 4> table_;
};

// Writes stored entries, then the directory. 32-bit offsets: less than 4 GiB.
class ZipWriter {
 public:
  explicit ZipWriter(AtomicFileWriter* file) : file_(file) {}

  Status Add(std::string_view name, std::span<const std::byte> bytes) {
    const uint64_t offset = file_->bytes_written();
    const std::string full_name = fmt::format("{}/{}", kRoot, name);
    constexpr uint64_t kLocalHeaderBytes = 30;
    constexpr uint64_t kExtraHeaderBytes = 4;
    const uint64_t unpadded = offset + kLocalHeaderBytes + full_name.size() + kExtraHeaderBytes;
    const uint64_t padding = (kAlignment - unpadded % kAlignment) % kAlignment;
    constexpr uint64_t kLimit = std::numeric_limits<uint32_t>::max();
    if (unpadded + padding > kLimit || bytes.size() >= kLimit - unpadded - padding ||
        num_entries_ == std::numeric_limits<uint16_t>::max() - 1) {
      return OutOfRange(".pt files of 4 GiB or 65535 entries and more are not supported");
    }
    const std::string common = CommonFields(full_name, bytes);
    std::string local = "PK\x03\x04";
    local += common;
    PutLittle(&local, static_cast<uint16_t>(kExtraHeaderBytes + padding));
    local += full_name;
    local += "FB";  // the id of torch's padding field
    PutLittle(&local, static_cast<uint16_t>(padding));
    local.append(padding, 'Z');
    OSCAR_RETURN_IF_ERROR(file_->Write(local));
    OSCAR_RETURN_IF_ERROR(file_->Write(bytes));

    directory_ += "PK\x01\x02";
    PutLittle(&directory_, uint16_t{20});  // made by: version 2.0, MS-DOS attributes
    directory_ += common;
    PutLittle(&directory_, uint16_t{0});  // extra bytes
    PutLittle(&directory_, uint16_t{0});  // comment bytes
    PutLittle(&directory_, uint16_t{0});  // disk
    PutLittle(&directory_, uint16_t{0});  // internal attributes
    PutLittle(&directory_, uint32_t{0});  // external attributes
    PutLittle(&directory_, static_cast<uint32_t>(offset));
    directory_ += full_name;
    ++num_entries_;
    return {};
  }

  Status Finish() {
    const uint64_t offset = file_->bytes_written();
    if (offset + directory_.size() >= std::numeric_limits<uint32_t>::max()) {
      return OutOfRange(".pt files of 4 GiB and more are not supported");
    }
    std::string end = directory_;
    end += "PK\x05\x06";
    PutLittle(&end, uint32_t{0});  // this disk, disk of the directory
    PutLittle(&end, num_entries_);
    PutLittle(&end, num_entries_);
    PutLittle(&end, static_cast<uint32_t>(directory_.size()));
    PutLittle(&end, static_cast<uint32_t>(offset));
    PutLittle(&end, uint16_t{0});  // comment bytes
    return file_->Write(end);
  }

 private:
  // The fields that local header and directory share, up to the length of the name.
  std::string CommonFields(std::string_view name, std::span<const std::byte> bytes) const {
    std::string out;
    PutLittle(&out, uint16_t{20});      // needs version 2.0
    PutLittle(&out, uint16_t{0});       // flags
    PutLittle(&out, uint16_t{0});       // stored
    PutLittle(&out, uint16_t{0});       // time 00:00
    PutLittle(&out, uint16_t{0x0021});  // date 1980-01-01
    PutLittle(&out, crc_.Of(bytes));
    PutLittle(&out, static_cast<uint32_t>(bytes.size()));
    PutLittle(&out, static_cast<uint32_t>(bytes.size()));
    PutLittle(&out, static_cast<uint16_t>(name.size()));
    return out;
  }

  AtomicFileWriter* file_;
  Crc32 crc_;
  std::string directory_;
  uint16_t num_entries_ = 0;
};

std::span<const std::byte> AsBytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

}  // namespace

Result<AtomicFileWriter> StageTorchFile(const std::filesystem::path& path,
                                        const TorchValue& value) {
  PickleWriter pickle;
  if (const Status status = pickle.Encode(value); !status.ok()) {
    return Unexpected(status.WithContext(path.string()));
  }
  OSCAR_ASSIGN_OR_RETURN(AtomicFileWriter file, AtomicFileWriter::Create(path));
  ZipWriter zip(&file);
  const auto add = [&](std::string_view name, std::span<const std::byte> bytes) {
    const Status status = zip.Add(name, bytes);
    return status.code() == StatusCode::kOutOfRange ? status.WithContext(path.string()) : status;
  };
  OSCAR_RETURN_IF_ERROR(add("data.pkl", AsBytes(pickle.pickle())));
  OSCAR_RETURN_IF_ERROR(add("byteorder", AsBytes("little")));
  for (size_t i = 0; i < pickle.storages().size(); ++i) {
    OSCAR_RETURN_IF_ERROR(add(fmt::format("data/{}", i), pickle.storages()[i]));
  }
  OSCAR_RETURN_IF_ERROR(add("version", AsBytes("3\n")));
  OSCAR_RETURN_IF_ERROR(zip.Finish());
  OSCAR_RETURN_IF_ERROR(file.Sync());
  return file;
}

Status WriteTorchFile(const std::filesystem::path& path, const TorchValue& value) {
  OSCAR_ASSIGN_OR_RETURN(AtomicFileWriter file, StageTorchFile(path, value));
  return file.Commit();
}

}  // namespace oscar
