#include "io/safetensors.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <set>
#include <unordered_set>

#include "base/error_text.h"
#include "base/json.h"
#include "io/limits.h"

namespace oscar {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kMetadataKey = "__metadata__";
constexpr uint64_t kMaxIndexBytes = 64 << 20;
constexpr size_t kLengthBytes = 8;

struct HeaderEntry {
  std::string name;
  std::optional<DType> dtype;
  std::vector<int64_t> shape;
  std::vector<uint64_t> offsets;
  bool has_shape = false;
  bool has_offsets = false;
};

// Builds the entries straight from the parser's events, with no document in between, and stops at
// the first event that the format does not allow: memory stays in proportion to the header, nesting
// cannot exceed three levels and a repeated key is seen (a document tree would hide it).
class HeaderReader : public nlohmann::json_sax<Json> {
 public:
  std::vector<HeaderEntry> entries;
  std::map<std::string, std::string> metadata;
  std::string error;

  bool start_object(size_t) override {
    switch (state_) {
      case State::kStart:
        state_ = State::kTop;
        return true;
      case State::kTensorValue:
        state_ = State::kTensor;
        return true;
      case State::kMetadataValue:
        state_ = State::kMetadata;
        return true;
      default:
        return Unwanted("an object");
    }
  }

  bool key(std::string& name) override {
    switch (state_) {
      case State::kTop:
        if (!names_.insert(name).second) return Fail(fmt::format("duplicate key {}", Quote(name)));
        if (name == kMetadataKey) {
          state_ = State::kMetadataValue;
        } else {
          entries.emplace_back().name = name;
          state_ = State::kTensorValue;
        }
        return true;
      case State::kMetadata:
        if (metadata.count(name) > 0) {
          return Fail(fmt::format("duplicate key {} in {}", Quote(name), kMetadataKey));
        }
        metadata_key_ = name;
        state_ = State::kMetadataText;
        return true;
      default:  // kTensor: the parser delivers keys inside objects alone
        return TensorField(name);
    }
  }

  bool string(std::string& text) override {
    if (state_ == State::kMetadataText) {
      metadata.emplace(metadata_key_, text);
      state_ = State::kMetadata;
      return true;
    }
    if (state_ != State::kDtypeValue) return Unwanted("a string");
    entries.back().dtype = DTypeFromName(text);
    if (!entries.back().dtype) return Fail(fmt::format("unknown dtype {}", Quote(text)));
    state_ = State::kTensor;
    return true;
  }

  bool start_array(size_t) override {
    if (state_ == State::kShapeValue) {
      state_ = State::kShape;
      return true;
    }
    if (state_ == State::kOffsetsValue) {
      state_ = State::kOffsets;
      return true;
    }
    return Unwanted("an array");
  }

  bool number_unsigned(uint64_t value) override {
    HeaderEntry* entry = entries.empty() ? nullptr : &entries.back();
    if (state_ == State::kShape) {
      if (value > static_cast<uint64_t>(INT64_MAX)) {
        return Fail(fmt::format("dimension {} is too large", value));
      }
      if (entry->shape.size() == kMaxRank) {
        return Fail(fmt::format("more than {} dimensions", kMaxRank));
      }
      entry->shape.push_back(static_cast<int64_t>(value));
      return true;
    }
    if (state_ == State::kOffsets) {
      if (entry->offsets.size() == 2) return Fail("data_offsets has more than two entries");
      entry->offsets.push_back(value);
      return true;
    }
    return Unwanted("a number");
  }

  bool end_array() override {
    if (state_ == State::kOffsets && entries.back().offsets.size() != 2) {
      return Fail("data_offsets needs two entries");
    }
    state_ = State::kTensor;
    return true;
  }

  bool end_object() override {
    if (state_ == State::kTensor) {
      const HeaderEntry& entry = entries.back();
      if (!entry.dtype) return Fail("no dtype");
      if (!entry.has_shape) return Fail("no shape");
      if (!entry.has_offsets) return Fail("no data_offsets");
    }
    state_ = state_ == State::kTop ? State::kEnd : State::kTop;
    return true;
  }

  bool number_integer(int64_t value) override {
    if (state_ == State::kShape || state_ == State::kOffsets) {
      return Fail(fmt::format("negative number {}", value));
    }
    return Unwanted("a number");
  }
  bool number_float(double, const std::string& text) override {
    return Fail(fmt::format("{} is not an integer", Quote(text)));
  }
  bool null() override { return Unwanted("null"); }
  bool boolean(bool) override { return Unwanted("a boolean"); }
  bool binary(Json::binary_t&) override { return Unwanted("binary data"); }

  bool parse_error(size_t position, const std::string&, const Json::exception& ex) override {
    std::string_view message = ex.what();
    if (const size_t colon = message.find(": "); colon != std::string_view::npos) {
      message.remove_prefix(colon + 2);
    }
    error = fmt::format("invalid JSON at byte {}: {}", kLengthBytes + position, Printable(message));
    return false;
  }

 private:
  enum class State {
    kStart,
    kTop,
    kMetadataValue,
    kMetadata,
    kMetadataText,
    kTensorValue,
    kTensor,
    kDtypeValue,
    kShapeValue,
    kShape,
    kOffsetsValue,
    kOffsets,
    kEnd,
  };

  bool TensorField(const std::string& name) {
    HeaderEntry& entry = entries.back();
    if (name == "dtype" && !entry.dtype) {
      state_ = State::kDtypeValue;
    } else if (name == "shape" && !entry.has_shape) {
      entry.has_shape = true;
      state_ = State::kShapeValue;
    } else if (name == "data_offsets" && !entry.has_offsets) {
      entry.has_offsets = true;
      state_ = State::kOffsetsValue;
    } else {
      const bool known = name == "dtype" || name == "shape" || name == "data_offsets";
      return Fail(fmt::format("{} field {}", known ? "duplicate" : "unknown", Quote(name)));
    }
    return true;
  }

  bool Unwanted(std::string_view what) {
    switch (state_) {
      case State::kStart:
        return Fail(fmt::format("expected an object, found {}", what));
      case State::kMetadataValue:
        return Fail(fmt::format("{} must be an object, found {}", kMetadataKey, what));
      case State::kMetadataText:
        return Fail(fmt::format("{} of {} must be a string, found {}", Quote(metadata_key_),
                                kMetadataKey, what));
      case State::kTensorValue:
        return Fail(fmt::format("must be an object, found {}", what));
      case State::kDtypeValue:
        return Fail(fmt::format("dtype must be a string, found {}", what));
      case State::kShapeValue:
      case State::kShape:
        return Fail(fmt::format("shape must be an array of integers, found {}", what));
      default:
        return Fail(fmt::format("data_offsets must be an array of two integers, found {}", what));
    }
  }

  bool Fail(std::string message) {
    const bool in_tensor = state_ >= State::kTensorValue && state_ != State::kEnd;
    error = in_tensor ? fmt::format("tensor {}: {}", Quote(entries.back().name), message)
                      : std::move(message);
    return false;
  }

  State state_ = State::kStart;
  std::unordered_set<std::string> names_;
  std::string metadata_key_;
};

// Takes the place of the missing shard-name rules of the format: a name that could leave the
// directory is refused before it reaches the file system.
bool IsPlainFileName(std::string_view name) {
  return !name.empty() && name.size() <= 255 && name != "." && name != ".." &&
         name.find_first_of(std::string_view("/\\\0", 3)) == std::string_view::npos;
}

const StoredTensor* FindSorted(const std::vector<StoredTensor>& tensors, std::string_view name) {
  const auto at = std::lower_bound(
      tensors.begin(), tensors.end(), name,
      [](const StoredTensor& tensor, std::string_view wanted) { return tensor.name < wanted; });
  return at != tensors.end() && at->name == name ? &*at : nullptr;
}

Result<std::string> ReadHeader(const InputFile& input) {
  const auto damaged = [&](const std::string& what) {
    return Unexpected(DataLoss(what).WithContext(input.path()));
  };
  if (input.size() < kLengthBytes) {
    return damaged(
        fmt::format("truncated: {} bytes, no room for the 8-byte header length", input.size()));
  }
  uint64_t header_bytes = 0;
  OSCAR_RETURN_IF_ERROR(input.Read(0, std::as_writable_bytes(std::span(&header_bytes, 1))));
  if (header_bytes > kMaxSafetensorsHeaderBytes) {
    return damaged(fmt::format(
        "byte 0: header length {} is above the limit of {}; not a safetensors file, or corrupt",
        header_bytes, kMaxSafetensorsHeaderBytes));
  }
  if (header_bytes > input.size() - kLengthBytes) {
    return damaged(fmt::format("truncated: the header ends at byte {}, the file at byte {}",
                               kLengthBytes + header_bytes, input.size()));
  }
  std::string header(header_bytes, '\0');
  OSCAR_RETURN_IF_ERROR(input.Read(kLengthBytes, std::as_writable_bytes(std::span(header))));
  return header;
}

}  // namespace

Result<SafetensorsFile> SafetensorsFile::Open(const std::filesystem::path& path) {
  OSCAR_ASSIGN_OR_RETURN(InputFile input, InputFile::Open(path));
  return Parse(std::move(input));
}

Result<SafetensorsFile> SafetensorsFile::FromBytes(std::span<const std::byte> bytes,
                                                   std::string name) {
  return Parse(InputFile::FromBytes(bytes, std::move(name)));
}

Result<SafetensorsFile> SafetensorsFile::Parse(InputFile input) {
  SafetensorsFile file;
  file.path_ = input.path();
  OSCAR_ASSIGN_OR_RETURN(const std::string header, ReadHeader(input));
  const Status status = file.ParseHeader(header, std::make_shared<InputFile>(std::move(input)));
  if (!status.ok()) return Unexpected(status.WithContext(file.path_));
  return file;
}

Status SafetensorsFile::ParseHeader(std::string_view header,
                                    const std::shared_ptr<const InputFile>& input) {
  if (header.empty() || header.front() != '{') {
    return DataLoss(
        "byte 8: the header does not start with '{'; not a safetensors file, or corrupt");
  }
  HeaderReader reader;
  if (!Json::sax_parse(header.begin(), header.end(), &reader)) {
    return DataLoss(fmt::format("header: {}", reader.error));
  }

  const uint64_t data_offset = kLengthBytes + header.size();
  const uint64_t data_bytes = input->size() - data_offset;
  std::vector<HeaderEntry>& entries = reader.entries;
  for (const HeaderEntry& entry : entries) {
    const uint64_t begin = entry.offsets[0];
    const uint64_t end = entry.offsets[1];
    if (begin > end || end > data_bytes) {
      return DataLoss(
          fmt::format("tensor {}: data_offsets [{}, {}] do not lie in the {} bytes of data{}",
                      Quote(entry.name), begin, end, data_bytes,
                      begin <= end ? "; the file is truncated or corrupt" : ""));
    }
    const auto want = CheckedNumBytes(*entry.dtype, entry.shape);
    if (!want) return want.error().WithContext(fmt::format("tensor {}", Quote(entry.name)));
    if (*want != end - begin) {
      return DataLoss(fmt::format("tensor {}: {} {} takes {} bytes, data_offsets [{}, {}] hold {}",
                                  Quote(entry.name), NameOf(*entry.dtype),
                                  ShapeToString(entry.shape), *want, begin, end, end - begin));
    }
  }
  // Empty tensors come before the one that starts where they lie, so that ends stay sorted, too.
  std::sort(entries.begin(), entries.end(), [](const HeaderEntry& a, const HeaderEntry& b) {
    return std::tie(a.offsets, a.name) < std::tie(b.offsets, b.name);
  });
  uint64_t covered = 0;
  const HeaderEntry* previous = nullptr;
  for (const HeaderEntry& entry : entries) {
    if (entry.offsets[0] < covered) {
      return DataLoss(fmt::format("tensors {} and {} overlap at data byte {}",
                                  Quote(previous->name), Quote(entry.name), entry.offsets[0]));
    }
    if (entry.offsets[0] > covered) {
      return DataLoss(fmt::format("data bytes [{}, {}) before tensor {} belong to no tensor",
                                  covered, entry.offsets[0], Quote(entry.name)));
    }
    covered = entry.offsets[1];
    previous = &entry;
  }
  if (covered != data_bytes) {
    return DataLoss(fmt::format(
        "{} bytes after the last tensor (data bytes [{}, {})) belong to no tensor; corrupt or "
        "over-long file",
        data_bytes - covered, covered, data_bytes));
  }

  metadata_ = std::move(reader.metadata);
  tensors_.reserve(entries.size());
  for (HeaderEntry& entry : entries) {
    index_.emplace(entry.name, tensors_.size());
    tensors_.push_back({std::move(entry.name), *entry.dtype, std::move(entry.shape), input,
                        data_offset + entry.offsets[0], entry.offsets[1] - entry.offsets[0]});
  }
  return {};
}

const StoredTensor* SafetensorsFile::Find(std::string_view name) const {
  const auto at = index_.find(std::string(name));
  return at == index_.end() ? nullptr : &tensors_[at->second];
}

Result<StoredTensor> SafetensorsFile::Get(std::string_view name) const {
  if (const StoredTensor* tensor = Find(name)) return *tensor;
  return Unexpected(NotFound(fmt::format("{}: no tensor {}", path_, Quote(name))));
}

Result<std::map<std::string, std::string>> ParseSafetensorsIndex(std::string_view text,
                                                                 std::string_view what) {
  OSCAR_ASSIGN_OR_RETURN(const Json json, ParseStrictJson(text, what));
  const auto map = json.is_object() ? json.find("weight_map") : json.end();
  if (!json.is_object() || map == json.end() || !map->is_object()) {
    return Unexpected(DataLoss(fmt::format("{}: no object 'weight_map'", what)));
  }
  std::map<std::string, std::string> files;
  for (const auto& [tensor, file] : map->items()) {
    if (!file.is_string()) {
      return Unexpected(DataLoss(fmt::format(
          "{}: weight_map: the file of tensor {} is not a string", what, Quote(tensor))));
    }
    const auto& name = file.get_ref<const std::string&>();
    if (!IsPlainFileName(name)) {
      return Unexpected(
          DataLoss(fmt::format("{}: weight_map: tensor {} is in {}, which is not a plain file name",
                               what, Quote(tensor), Quote(name))));
    }
    files.emplace(tensor, name);
  }
  return files;
}

Result<Checkpoint> Checkpoint::Open(const std::filesystem::path& directory) {
  Checkpoint checkpoint;
  checkpoint.directory_ = directory.string();
  const std::filesystem::path whole = directory / "model.safetensors";
  const std::filesystem::path index = directory / "model.safetensors.index.json";
  if (IsThere(whole)) {
    OSCAR_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open(whole));
    checkpoint.files_.push_back(std::move(file));
    for (const StoredTensor& tensor : checkpoint.files_[0].tensors()) checkpoint.Add(tensor, 0);
    checkpoint.Finish();
    return checkpoint;
  }
  if (!IsThere(index)) {
    return Unexpected(NotFound(
        fmt::format("{}: neither model.safetensors nor model.safetensors.index.json is there",
                    checkpoint.directory_)));
  }
  const std::string index_path = index.string();
  OSCAR_ASSIGN_OR_RETURN(const std::string text, ReadFile(index, kMaxIndexBytes));
  OSCAR_ASSIGN_OR_RETURN(const auto file_of_tensor, ParseSafetensorsIndex(text, index_path));

  std::map<std::string, size_t> shards;  // file name -> files_
  for (const auto& [tensor, file] : file_of_tensor) shards.emplace(file, 0);
  std::unordered_map<std::string, size_t> seen;  // tensor -> the shard that holds it
  for (auto& [name, file_idx] : shards) {
    auto file = SafetensorsFile::Open(directory / name);
    if (!file) {
      if (file.error().code() == StatusCode::kNotFound) {
        return Unexpected(NotFound(fmt::format("{}: shard {} is missing from {}", index_path,
                                               Quote(name), checkpoint.directory_)));
      }
      return Unexpected(file.error());
    }
    file_idx = checkpoint.files_.size();
    checkpoint.files_.push_back(std::move(*file));
    for (const StoredTensor& tensor : checkpoint.files_.back().tensors()) {
      const auto [at, inserted] = seen.emplace(tensor.name, file_idx);
      if (!inserted) {
        return Unexpected(DataLoss(
            fmt::format("tensor {} is both in {} and in {}", Quote(tensor.name),
                        checkpoint.files_[at->second].path(), checkpoint.files_[file_idx].path())));
      }
    }
  }
  for (const auto& [name, file] : file_of_tensor) {
    const size_t file_idx = shards.at(file);
    const StoredTensor* tensor = checkpoint.files_[file_idx].Find(name);
    if (tensor == nullptr) {
      return Unexpected(
          DataLoss(fmt::format("{}: tensor {} is listed in {}, which does not have it", index_path,
                               Quote(name), checkpoint.files_[file_idx].path())));
    }
    checkpoint.Add(*tensor, file_idx);
  }
  checkpoint.Finish();
  return checkpoint;
}

void Checkpoint::Add(const StoredTensor& tensor, size_t file_idx) {
  tensors_.push_back(tensor);
  file_of_.push_back(file_idx);
  total_bytes_ += tensor.num_bytes;
}

void Checkpoint::Finish() {
  std::vector<size_t> order(tensors_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return tensors_[a].name < tensors_[b].name; });
  std::vector<StoredTensor> tensors;
  std::vector<size_t> file_of;
  for (const size_t i : order) {
    tensors.push_back(std::move(tensors_[i]));
    file_of.push_back(file_of_[i]);
  }
  tensors_ = std::move(tensors);
  file_of_ = std::move(file_of);
}

const StoredTensor* Checkpoint::Find(std::string_view name) const {
  return FindSorted(tensors_, name);
}

Result<StoredTensor> Checkpoint::Get(std::string_view name) const {
  if (const StoredTensor* tensor = Find(name)) return *tensor;
  return Unexpected(NotFound(fmt::format("{}: no tensor {}", directory_, Quote(name))));
}

Status WriteSafetensors(const std::filesystem::path& path, std::span<const TensorView> tensors,
                        const std::map<std::string, std::string>& metadata) {
  const std::string path_text = path.string();
  std::vector<const TensorView*> order;
  for (const TensorView& tensor : tensors) {
    const auto bytes = CheckedNumBytes(tensor.dtype, tensor.shape);
    if (!bytes || *bytes != tensor.data.size()) {
      return InvalidArgument(fmt::format("{}: tensor {}: {} {} does not take {} bytes", path_text,
                                         Quote(tensor.name), NameOf(tensor.dtype),
                                         ShapeToString(tensor.shape), tensor.data.size()));
    }
    if (tensor.name == kMetadataKey) {
      return InvalidArgument(fmt::format("{}: {} cannot name a tensor", path_text, kMetadataKey));
    }
    order.push_back(&tensor);
  }
  std::sort(order.begin(), order.end(), [](const TensorView* a, const TensorView* b) {
    const size_t a_size = SizeOf(a->dtype);
    const size_t b_size = SizeOf(b->dtype);
    return a_size != b_size ? a_size > b_size : a->name < b->name;
  });

  std::set<std::string_view> names;
  std::string header = "{";
  uint64_t offset = 0;
  try {  // the JSON library throws for text that is not UTF-8
    if (!metadata.empty()) header += fmt::format("\"{}\":{}", kMetadataKey, Json(metadata).dump());
    for (const TensorView* tensor : order) {
      if (!names.insert(tensor->name).second) {
        return InvalidArgument(
            fmt::format("{}: two tensors are named {}", path_text, Quote(tensor->name)));
      }
      const uint64_t end = offset + tensor->data.size();
      header += fmt::format("{}{}:{{\"dtype\":\"{}\",\"shape\":{},\"data_offsets\":[{},{}]}}",
                            header.size() > 1 ? "," : "", Json(tensor->name).dump(),
                            NameOf(tensor->dtype), Json(tensor->shape).dump(), offset, end);
      offset = end;
    }
  } catch (const Json::exception&) {
    return InvalidArgument(
        fmt::format("{}: a tensor name or metadata text is not UTF-8", path_text));
  }
  header += "}";
  header.append((8 - header.size() % 8) % 8, ' ');
  const uint64_t header_bytes = header.size();
  if (header_bytes > kMaxSafetensorsHeaderBytes) {
    return OutOfRange(fmt::format("{}: the header would take {} bytes, more than the limit of {}",
                                  path_text, header_bytes, kMaxSafetensorsHeaderBytes));
  }

  OSCAR_ASSIGN_OR_RETURN(AtomicFileWriter writer, AtomicFileWriter::Create(path));
  OSCAR_RETURN_IF_ERROR(writer.Write(std::as_bytes(std::span(&header_bytes, 1))));
  OSCAR_RETURN_IF_ERROR(writer.Write(header));
  for (const TensorView* tensor : order) OSCAR_RETURN_IF_ERROR(writer.Write(tensor->data));
  return writer.Commit();
}

}  // namespace oscar
