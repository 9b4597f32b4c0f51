#include "io/model_path.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "base/file.h"
#include "base/json.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMaxSmallFile = uint64_t{1} << 20;
constexpr std::string_view kCachePrefix = "models--";

std::optional<fs::path> FromEnvironment(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return fs::path(value);
}

// The order is that of huggingface_hub.
fs::path HubCache() {
  if (const auto cache = FromEnvironment("HF_HUB_CACHE")) return *cache;
  if (const auto home = FromEnvironment("HF_HOME")) return *home / "hub";
  if (const auto cache = FromEnvironment("XDG_CACHE_HOME")) return *cache / "huggingface/hub";
  return FromEnvironment("HOME").value_or("/") / ".cache/huggingface/hub";
}

bool IsNamePart(std::string_view text) {
  const auto is_plain = [](unsigned char c) { return std::isalnum(c) != 0 || c == '_'; };
  return !text.empty() && is_plain(static_cast<unsigned char>(text.front())) &&
         std::all_of(text.begin(), text.end(),
                     [&](unsigned char c) { return is_plain(c) || c == '-' || c == '.'; });
}

// "org/name" and nothing that a path needs.
bool IsHubName(std::string_view text) {
  const size_t slash = text.find('/');
  return slash != std::string_view::npos && IsNamePart(text.substr(0, slash)) &&
         IsNamePart(text.substr(slash + 1));
}

// The snapshot that refs/main names, or the only one there is.
std::optional<fs::path> SnapshotOf(const fs::path& repository) {
  const fs::path snapshots = repository / "snapshots";
  if (const auto commit = ReadFile(repository / "refs/main", 256); commit.has_value()) {
    const std::string name = commit->substr(0, commit->find_last_not_of(" \r\n") + 1);
    if (IsNamePart(name) && IsDirectory(snapshots / name)) return snapshots / name;
  }
  std::optional<fs::path> only;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(snapshots, error)) {
    if (!IsDirectory(entry.path())) continue;
    if (only.has_value()) return std::nullopt;
    only = entry.path();
  }
  return only;
}

Result<fs::path> FindInHubCache(const std::string& name) {
  std::string folder = std::string(kCachePrefix) + name;
  folder.replace(folder.find('/'), 1, "--");
  const fs::path cache = HubCache();
  const auto snapshot = SnapshotOf(cache / folder);
  if (!snapshot.has_value()) {
    return Unexpected(NotFound(fmt::format(
        "{}: neither a directory nor in the hub cache ({}); get it with: hf download {}", name,
        cache.string(), name)));
  }
  if (!Exists(*snapshot / "config.json") && !Exists(*snapshot / "adapter_config.json")) {
    return Unexpected(
        NotFound(fmt::format("{}: {} has no config.json; finish the download with: hf download {}",
                             name, snapshot->string(), name)));
  }
  return *snapshot;
}

Status NotReadYet(const fs::path& path) {
  return Unimplemented(fmt::format(
      "{}: a GGUF file, a format that is not read yet; take the model's safetensors form",
      path.string()));
}

bool HasGgufMagic(const fs::path& path) {
  std::array<char, 4> magic{};
  std::ifstream(path, std::ios::binary).read(magic.data(), magic.size());
  return std::string_view(magic.data(), magic.size()) == "GGUF";
}

// What a directory without a config.json holds instead.
Status ExplainDirectory(const fs::path& directory) {
  const fs::path adapter = directory / "adapter_config.json";
  if (IsRegularFile(adapter)) {
    std::string base = "its base model";
    if (const auto text = ReadFile(adapter, kMaxSmallFile); text.has_value()) {
      const auto json = ParseJson(*text, "");
      const std::string key = "base_model_name_or_path";
      if (json.has_value() && json->is_object() && json->contains(key) &&
          (*json)[key].is_string()) {
        base = nlohmann::json((*json)[key].get<std::string>().substr(0, 256))
                   .dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
      }
    }
    return Unimplemented(
        fmt::format("{}: an adapter, not a model; merge it into {} and name the result",
                    directory.string(), base));
  }
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory, error)) {
    if (entry.path().extension() == ".gguf") return NotReadYet(entry.path());
  }
  return {};
}

}  // namespace

Result<fs::path> FindModel(const fs::path& given) {
  fs::path found = given;
  if (!Exists(given)) {
    if (!IsHubName(given.string())) {
      return Unexpected(
          NotFound(fmt::format("{}: no such file or model directory", given.string())));
    }
    OSCAR_ASSIGN_OR_RETURN(found, FindInHubCache(given.string()));
  }
  if (IsRegularFile(found) && HasGgufMagic(found)) return Unexpected(NotReadYet(found));
  if (IsDirectory(found) && !Exists(found / "config.json")) {
    OSCAR_RETURN_IF_ERROR(ExplainDirectory(found));
  }
  return found;
}

std::string ModelName(const fs::path& directory) {
  fs::path clean = directory.lexically_normal();
  if (!clean.has_filename()) clean = clean.parent_path();
  const fs::path repository = clean.parent_path().parent_path();
  std::string folder = repository.filename().string();
  if (clean.parent_path().filename() == "snapshots" && folder.starts_with(kCachePrefix)) {
    folder.erase(0, kCachePrefix.size());
    if (const size_t dashes = folder.find("--"); dashes != std::string::npos) {
      folder.replace(dashes, 2, "/");
    }
    return folder;
  }
  return clean.filename().string();
}

}  // namespace oscar
