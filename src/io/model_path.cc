#include "io/model_path.h"

#include <fmt/core.h>

#include <array>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>

#include "base/file.h"
#include "base/json.h"
#include "io/hub_cache.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMaxSmallFile = uint64_t{1} << 20;
constexpr std::string_view kCachePrefix = "models--";

Result<fs::path> FindInHubCache(const HubName& name, const std::string& given) {
  const fs::path cache = HubCache();
  const auto snapshot = FindSnapshot(HubRepository(cache, name.repository), name.revision);
  if (!snapshot.has_value()) {
    return Unexpected(NotFound(
        fmt::format("{}: neither a directory nor in the hub cache ({}); get it with: oscar pull {}",
                    given, cache.string(), given)));
  }
  if (!Exists(*snapshot / "config.json") && !Exists(*snapshot / "adapter_config.json")) {
    return Unexpected(
        NotFound(fmt::format("{}: {} has no config.json; finish the download with: oscar pull {}",
                             given, snapshot->string(), given)));
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
    const auto name = ParseHubName(given.string());
    if (!name.has_value()) {
      return Unexpected(
          NotFound(fmt::format("{}: no such file or model directory", given.string())));
    }
    OSCAR_ASSIGN_OR_RETURN(found, FindInHubCache(*name, given.string()));
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
