#include "rotation/rotation_file.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <set>
#include <string_view>

#include "base/error_text.h"
#include "io/safetensors.h"
#include "io/torch_file.h"
#include "rotation/recipe.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;

constexpr int kMaxLayerId = 1'000'000;
constexpr size_t kMaxMetadataBytes = 4096;

std::optional<int> ParseLayerId(std::string_view text) {
  int value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  // One spelling a number, so that two names cannot mean the same layer.
  if (error != std::errc() || stop != end || value < 0 || value > kMaxLayerId ||
      (text.size() > 1 && text[0] == '0')) {
    return std::nullopt;
  }
  return value;
}

struct TensorName {
  int layer;
  char side;
  std::string_view kind;  // "rotation", "eigenvalues" or "clip"
};

// "layers.12.k_rotation"
std::optional<TensorName> ParseTensorName(std::string_view name) {
  constexpr std::string_view kPrefix = "layers.";
  if (!name.starts_with(kPrefix)) return std::nullopt;
  name.remove_prefix(kPrefix.size());
  const size_t dot = name.find('.');
  if (dot == std::string_view::npos) return std::nullopt;
  const std::optional<int> layer = ParseLayerId(name.substr(0, dot));
  name.remove_prefix(dot + 1);
  if (!layer || !(name.starts_with("k_") || name.starts_with("v_"))) return std::nullopt;
  const std::string_view kind = name.substr(2);
  if (kind != "rotation" && kind != "eigenvalues" && kind != "clip") return std::nullopt;
  return TensorName{*layer, name[0], kind};
}

std::span<const std::byte> BytesOf(const std::vector<float>& values) {
  return std::as_bytes(std::span(values));
}

Result<std::string> GetMetadata(const SafetensorsFile& file, const char* key) {
  const auto found = file.metadata().find(key);
  if (found == file.metadata().end()) {
    return Unexpected(DataLoss(fmt::format("metadata has no '{}': not a rotation file", key)));
  }
  if (found->second.size() > kMaxMetadataBytes) {
    return Unexpected(DataLoss(fmt::format("metadata '{}' has {} bytes; at most {}", key,
                                           found->second.size(), kMaxMetadataBytes)));
  }
  return found->second;
}

Status ParseInfo(const SafetensorsFile& file, RotationInfo& info) {
  OSCAR_ASSIGN_OR_RETURN(const std::string version, GetMetadata(file, "format_version"));
  if (version != kRotationFormatVersion) {
    return Unimplemented(fmt::format("rotation format version {}; this program reads version {}",
                                     Quote(version), kRotationFormatVersion));
  }
  for (const auto& [name, field] : kRotationStrings) {
    OSCAR_ASSIGN_OR_RETURN(info.*field, GetMetadata(file, name));
  }
  OSCAR_ASSIGN_OR_RETURN(const std::string tokens, GetMetadata(file, "calibration_tokens"));
  const char* end = tokens.data() + tokens.size();
  const auto [stop, error] = std::from_chars(tokens.data(), end, info.calibration_tokens);
  if (error != std::errc() || stop != end || info.calibration_tokens < 0) {
    return DataLoss(fmt::format("metadata 'calibration_tokens' is {}, not a count", Quote(tokens)));
  }
  return {};
}

Status ExpectF32(const StoredTensor& tensor, std::span<const int64_t> shape) {
  if (tensor.dtype != DType::kF32) {
    return DataLoss(
        fmt::format("tensor {} is {}; expected F32", Quote(tensor.name), NameOf(tensor.dtype)));
  }
  return ExpectShape(tensor, shape);
}

Result<SideRotation> ReadSide(const SafetensorsFile& file, int layer, char name, int& head_dim) {
  const std::string prefix = fmt::format("layers.{}.{}_", layer, name);
  OSCAR_ASSIGN_OR_RETURN(const StoredTensor matrices, file.Get(prefix + "rotation"));
  OSCAR_RETURN_IF_ERROR(ExpectF32(matrices, std::array<int64_t, 3>{-1, -1, -1}));
  const int64_t heads = matrices.shape[0];
  const int64_t dim = matrices.shape[1];
  if (heads < 1 || heads > kMaxRotationHeads || dim < 1 || dim > kMaxRotationDim) {
    return Unexpected(DataLoss(fmt::format(
        "tensor {} is {}; at most {} matrices of dimension at most {} are allowed",
        Quote(matrices.name), ShapeToString(matrices.shape), kMaxRotationHeads, kMaxRotationDim)));
  }
  if (head_dim == 0) head_dim = static_cast<int>(dim);
  OSCAR_RETURN_IF_ERROR(ExpectF32(matrices, std::array<int64_t, 3>{heads, head_dim, head_dim}));
  OSCAR_ASSIGN_OR_RETURN(const StoredTensor eigenvalues, file.Get(prefix + "eigenvalues"));
  OSCAR_RETURN_IF_ERROR(ExpectF32(eigenvalues, std::array<int64_t, 2>{heads, head_dim}));
  OSCAR_ASSIGN_OR_RETURN(const StoredTensor clip, file.Get(prefix + "clip"));
  OSCAR_RETURN_IF_ERROR(ExpectF32(clip, std::array<int64_t, 1>{heads}));
  SideRotation side;
  side.num_heads = static_cast<int>(heads);
  OSCAR_ASSIGN_OR_RETURN(side.matrices, ToFloatVector(matrices));
  OSCAR_ASSIGN_OR_RETURN(side.eigenvalues, ToFloatVector(eigenvalues));
  OSCAR_ASSIGN_OR_RETURN(side.clip, ToFloatVector(clip));
  return side;
}

Result<Rotation> ParseRotationFile(const SafetensorsFile& file) {
  Rotation rotation;
  OSCAR_RETURN_IF_ERROR(ParseInfo(file, rotation.info));
  std::set<int> layer_ids;
  for (const StoredTensor& tensor : file.tensors()) {
    const std::optional<TensorName> name = ParseTensorName(tensor.name);
    if (!name) {
      return Unexpected(DataLoss(
          fmt::format("tensor {} does not belong in a rotation file", Quote(tensor.name))));
    }
    layer_ids.insert(name->layer);
    if (layer_ids.size() > kMaxRotationLayers) {
      return Unexpected(DataLoss(fmt::format("more than {} layers", kMaxRotationLayers)));
    }
  }
  for (const int layer : layer_ids) {
    LayerRotation& sides = rotation.layers[layer];
    OSCAR_ASSIGN_OR_RETURN(sides.k, ReadSide(file, layer, 'k', rotation.head_dim));
    OSCAR_ASSIGN_OR_RETURN(sides.v, ReadSide(file, layer, 'v', rotation.head_dim));
  }
  return rotation;
}

// One file of a pair into one side of each layer.
Status ReadZooFile(const fs::path& path, bool is_k, Rotation& rotation, std::string& objective) {
  OSCAR_ASSIGN_OR_RETURN(const TorchValue root, ReadTorchFile(path));
  if (root.AsDict() == nullptr) {
    return DataLoss(fmt::format("is a {}; a rotation file is a dict", root.KindName()));
  }
  // Words, such as "identity-v1", are their writers' labels; another number is another layout.
  const TorchValue* version = root.Find("format_version");
  if (version != nullptr && version->AsInt() != nullptr && *version->AsInt() != 1) {
    return Unimplemented(fmt::format("format_version is {}; only 1 is known", *version->AsInt()));
  }
  if (const TorchValue* text = root.Find("objective"); text != nullptr && text->AsString()) {
    objective = text->AsString()->substr(0, kMaxMetadataBytes);
  }
  const TorchValue* grouping = root.Find("source_grouping");
  if (grouping != nullptr && grouping->AsString() && *grouping->AsString() != "layer") {
    return Unimplemented(
        fmt::format("source_grouping is {}; only 'layer' is known", Quote(*grouping->AsString())));
  }
  const TorchValue* layers = root.Find("layers");
  if (layers == nullptr || layers->AsDict() == nullptr) {
    return DataLoss("has no dict 'layers': not a rotation file");
  }
  if (layers->AsDict()->items.size() > kMaxRotationLayers) {
    return DataLoss(
        fmt::format("{} layers; at most {}", layers->AsDict()->items.size(), kMaxRotationLayers));
  }
  for (const auto& [key, entry] : layers->AsDict()->items) {
    std::optional<int> layer;
    if (const int64_t* number = std::get_if<int64_t>(&key)) {
      if (*number >= 0 && *number <= kMaxLayerId) layer = static_cast<int>(*number);
    } else {
      layer = ParseLayerId(std::get<std::string>(key));
    }
    if (!layer) return DataLoss("a key of 'layers' is not a layer id");
    const TorchValue* id = entry.Find("layer_id");
    if (id != nullptr && (id->AsInt() == nullptr || *id->AsInt() != *layer)) {
      return DataLoss(fmt::format("layer {} says it is another layer ('layer_id')", *layer));
    }
    const TorchValue* matrix = entry.Find("rotation");
    if (matrix == nullptr || matrix->AsTensor() == nullptr) {
      return DataLoss(fmt::format("layer {} has no tensor 'rotation'", *layer));
    }
    const TensorView view = matrix->AsTensor()->View(fmt::format("layers.{}.rotation", *layer));
    OSCAR_RETURN_IF_ERROR(ExpectShape(view, std::array<int64_t, 2>{-1, -1}));
    const int64_t dim = view.shape[0];
    if (dim < 1 || dim > kMaxRotationDim) {
      return DataLoss(fmt::format("layer {}: dimension {}; between 1 and {} are allowed", *layer,
                                  dim, kMaxRotationDim));
    }
    if (rotation.head_dim == 0) rotation.head_dim = static_cast<int>(dim);
    const int64_t head_dim = rotation.head_dim;
    OSCAR_RETURN_IF_ERROR(ExpectShape(view, std::array<int64_t, 2>{head_dim, head_dim}));
    LayerRotation& sides = rotation.layers[*layer];
    SideRotation& side = is_k ? sides.k : sides.v;
    if (side.num_heads != 0) return DataLoss(fmt::format("layer {} appears twice", *layer));
    side.num_heads = 1;
    OSCAR_ASSIGN_OR_RETURN(side.matrices, ToFloatVector(view));
    const TorchValue* eigenvalues = entry.Find("eigenvalues");
    if (eigenvalues == nullptr) {
      side.eigenvalues.assign(static_cast<size_t>(head_dim), 1.0f);
    } else if (eigenvalues->AsTensor() == nullptr) {
      return DataLoss(fmt::format("layer {}: 'eigenvalues' is a {}, not a tensor", *layer,
                                  eigenvalues->KindName()));
    } else {
      const TensorView values =
          eigenvalues->AsTensor()->View(fmt::format("layers.{}.eigenvalues", *layer));
      OSCAR_RETURN_IF_ERROR(ExpectShape(values, std::array<int64_t, 1>{head_dim}));
      OSCAR_ASSIGN_OR_RETURN(side.eigenvalues, ToFloatVector(values));
    }
    side.clip = {is_k ? kPublishedKClip : kPublishedVClip};
  }
  return {};
}

TorchValue ZooValue(const Rotation& rotation, bool is_k, const std::string& objective) {
  TorchDict layers;
  const int64_t dim = rotation.head_dim;
  for (const auto& [layer, sides] : rotation.layers) {
    const SideRotation& side = is_k ? sides.k : sides.v;
    TorchDict entry;
    entry.Set("layer_id", TorchValue(layer));
    entry.Set("rotation", TorchValue(TorchTensor::FromFloats({dim, dim}, side.matrices)));
    entry.Set("eigenvalues", TorchValue(TorchTensor::FromFloats({dim}, side.eigenvalues)));
    layers.Set(int64_t{layer}, TorchValue(std::move(entry)));
  }
  TorchDict root;
  root.Set("format_version", TorchValue(1));
  root.Set("objective", TorchValue(objective));
  root.Set("source_grouping", TorchValue("layer"));
  root.Set("layers", TorchValue(std::move(layers)));
  return TorchValue(std::move(root));
}

// An objective comes from a file: nothing in it may leave the directory or need quoting.
std::string ForFileName(std::string_view text) {
  std::string out(text.substr(0, 100));
  for (char& c : out) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    if (!plain && c != '_' && c != '-') c = '-';
  }
  return out.empty() ? "unknown" : out;
}

// The pair that a .pt file belongs to: its namesake of the other side, or else the directory's only
// pair, if this file is part of it.
Result<ZooPaths> CompletePair(const fs::path& path) {
  const std::string name = path.filename().string();
  const bool is_k = name.starts_with("k_");
  if (!is_k && !name.starts_with("v_")) {
    return Unexpected(InvalidArgument(fmt::format(
        "{}: the name tells neither K nor V; a pair is named k_*.pt and v_*.pt", path.string())));
  }
  const fs::path directory = path.has_parent_path() ? path.parent_path() : fs::path(".");
  const fs::path namesake = directory / ((is_k ? "v_" : "k_") + name.substr(2));
  std::error_code error;
  if (fs::exists(namesake, error)) {
    return is_k ? ZooPaths{path, namesake} : ZooPaths{namesake, path};
  }
  return FindZooPair(directory);
}

}  // namespace

Result<Rotation> ReadRotationFile(const fs::path& path, double tolerance) {
  OSCAR_ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::Open(path));
  auto rotation = ParseRotationFile(file);
  if (!rotation) return Unexpected(rotation.error().WithContext(path.string()));
  if (const Status status = ValidateRotation(*rotation, tolerance); !status.ok()) {
    return Unexpected(status.WithContext(path.string()));
  }
  return rotation;
}

Status WriteRotationFile(const fs::path& path, const Rotation& rotation) {
  if (const Status status = ValidateRotation(rotation); !status.ok()) {
    return status.WithContext(fmt::format("{}: not written", path.string()));
  }
  std::vector<TensorView> tensors;
  const int64_t dim = rotation.head_dim;
  for (const auto& [layer, sides] : rotation.layers) {
    for (const char name : {'k', 'v'}) {
      const SideRotation& side = name == 'k' ? sides.k : sides.v;
      const std::string prefix = fmt::format("layers.{}.{}_", layer, name);
      const int64_t heads = side.num_heads;
      tensors.push_back(
          {prefix + "rotation", DType::kF32, {heads, dim, dim}, BytesOf(side.matrices)});
      tensors.push_back(
          {prefix + "eigenvalues", DType::kF32, {heads, dim}, BytesOf(side.eigenvalues)});
      tensors.push_back({prefix + "clip", DType::kF32, {heads}, BytesOf(side.clip)});
    }
  }
  std::map<std::string, std::string> metadata = {
      {"format_version", std::string(kRotationFormatVersion)},
      {"calibration_tokens", std::to_string(rotation.info.calibration_tokens)}};
  AddStrings(rotation.info, metadata);
  return WriteSafetensors(path, tensors, metadata);
}

Result<Rotation> ReadZooPair(const ZooPaths& paths, double tolerance) {
  Rotation rotation;
  std::string objectives[2];
  for (const bool is_k : {true, false}) {
    const fs::path& path = is_k ? paths.k : paths.v;
    const Status status = ReadZooFile(path, is_k, rotation, objectives[is_k ? 0 : 1]);
    if (!status.ok()) {
      // The torch reader names the file by itself.
      return Unexpected(status.message().find(path.string()) == std::string::npos
                            ? status.WithContext(path.string())
                            : status);
    }
  }
  const std::string pair = fmt::format("{} and {}", paths.k.string(), paths.v.filename().string());
  for (const auto& [layer, sides] : rotation.layers) {
    if (sides.k.num_heads == 0 || sides.v.num_heads == 0) {
      return Unexpected(
          DataLoss(fmt::format("{}: layer {} is in only one of the two", pair, layer)));
    }
  }
  std::string compositions[2];
  SplitZooObjective(objectives[0], rotation.info.k_objective, compositions[0]);
  SplitZooObjective(objectives[1], rotation.info.v_objective, compositions[1]);
  if (compositions[0] == compositions[1] || compositions[1].empty()) {
    rotation.info.composition = compositions[0];
  } else if (compositions[0].empty()) {
    rotation.info.composition = compositions[1];
  } else {  // one field holds one composition: keep each with its objective
    rotation.info.k_objective = objectives[0];
    rotation.info.v_objective = objectives[1];
  }
  rotation.info.clip_source = "published";
  if (const Status status = ValidateRotation(rotation, tolerance); !status.ok()) {
    return Unexpected(status.WithContext(pair));
  }
  return rotation;
}

bool HasRotation(const fs::path& directory) {
  std::error_code error;
  return fs::exists(directory / kRotationFileName, error) || FindZooPair(directory).has_value();
}

bool IsZooFile(const fs::path& path) {
  const std::string name = path.filename().string();
  return name.ends_with(".pt") && (name.starts_with("k_") || name.starts_with("v_"));
}

ZooPaths ZooPairPaths(const fs::path& directory, const RotationInfo& info) {
  const std::string k = ZooObjective(info.k_objective, info.composition);
  const std::string v = ZooObjective(info.v_objective, info.composition);
  return {directory / fmt::format("k_rotation_{}.pt", ForFileName(k)),
          directory / fmt::format("v_rotation_{}.pt", ForFileName(v))};
}

Result<ZooPaths> FindZooPair(const fs::path& directory) {
  std::vector<fs::path> found[2];
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    if (!IsZooFile(it->path())) continue;
    found[it->path().filename().string().starts_with("k_") ? 0 : 1].push_back(it->path());
  }
  if (error) {
    return Unexpected(
        NotFound(fmt::format("{}: cannot list: {}", directory.string(), error.message())));
  }
  for (const auto& [paths, name] : {std::pair(&found[0], 'k'), std::pair(&found[1], 'v')}) {
    if (paths->empty()) {
      return Unexpected(
          NotFound(fmt::format("{}: no rotation: neither {} nor a pair k_*.pt, v_*.pt (no {}_*.pt)",
                               directory.string(), kRotationFileName, name)));
    }
    if (paths->size() > 1) {
      std::sort(paths->begin(), paths->end());
      std::string names;
      for (const fs::path& path : *paths) names += fmt::format(" {}", path.filename().string());
      return Unexpected(InvalidArgument(
          fmt::format("{}: {} files could be {}'s rotation:{}; leave one of each side in the "
                      "directory",
                      directory.string(), paths->size(), name, names)));
    }
  }
  return ZooPaths{found[0][0], found[1][0]};
}

Result<ZooPaths> WriteZooPair(const fs::path& directory, const Rotation& rotation) {
  if (const Status status = ValidateRotation(rotation); !status.ok()) {
    return Unexpected(status.WithContext(fmt::format("{}: not written", directory.string())));
  }
  for (const auto& [layer, sides] : rotation.layers) {
    const int heads = std::max(sides.k.num_heads, sides.v.num_heads);
    if (heads > 1) {
      return Unexpected(InvalidArgument(fmt::format(
          "layer {} has {} matrices, one per KV head; a .pt pair holds one per layer. Take the "
          "pair "
          "that oscar calibrate writes to {}/ beside {}, or fit one matrix per layer (oscar "
          "rotation fit without --per-head)",
          layer, heads, kZooDirectoryName, kRotationFileName)));
    }
  }
  std::error_code error;
  fs::create_directories(directory, error);
  if (error) {
    return Unexpected(InvalidArgument(
        fmt::format("{}: cannot make the directory: {}", directory.string(), error.message())));
  }
  const std::string k = ZooObjective(rotation.info.k_objective, rotation.info.composition);
  const std::string v = ZooObjective(rotation.info.v_objective, rotation.info.composition);
  ZooPaths paths = ZooPairPaths(directory, rotation.info);
  // Both are on disk before either has its name: half a pair would be worse than none.
  OSCAR_ASSIGN_OR_RETURN(AtomicFileWriter k_file,
                         StageTorchFile(paths.k, ZooValue(rotation, true, k)));
  OSCAR_ASSIGN_OR_RETURN(AtomicFileWriter v_file,
                         StageTorchFile(paths.v, ZooValue(rotation, false, v)));
  OSCAR_RETURN_IF_ERROR(k_file.Commit());
  if (const Status status = v_file.Commit(); !status.ok()) {
    fs::remove(paths.k, error);
    return Unexpected(status);
  }
  return paths;
}

Result<Rotation> LoadRotation(const fs::path& path, double tolerance) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) {
    return Unexpected(NotFound(fmt::format("{}: no such file or directory", path.string())));
  }
  if (fs::is_directory(status)) {
    if (fs::exists(path / kRotationFileName, error)) {
      return ReadRotationFile(path / kRotationFileName, tolerance);
    }
    OSCAR_ASSIGN_OR_RETURN(const ZooPaths pair, FindZooPair(path));
    return ReadZooPair(pair, tolerance);
  }
  if (path.extension() == ".safetensors") return ReadRotationFile(path, tolerance);
  if (path.extension() == ".pt") {
    OSCAR_ASSIGN_OR_RETURN(const ZooPaths pair, CompletePair(path));
    return ReadZooPair(pair, tolerance);
  }
  return Unexpected(InvalidArgument(
      fmt::format("{}: neither .safetensors nor .pt, so not a rotation file", path.string())));
}

}  // namespace oscar
