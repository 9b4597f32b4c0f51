#include "io/hub_cache.h"

#include <algorithm>
#include <cstdlib>
#include <set>

#include "base/file.h"
#include "io/safetensors.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxNameBytes = 200, kMaxPathBytes = 1024, kMaxPartBytes = 255;
constexpr uint64_t kMaxIndexBytes = uint64_t{64} << 20;

// "~/x" is below the home directory, as the hub's clients read it.
std::optional<fs::path> FromEnvironment(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  const std::string_view text = value;
  const char* home = std::getenv("HOME");
  if (home != nullptr && (text == "~" || text.starts_with("~/"))) {
    return fs::path(home) / text.substr(std::min<size_t>(text.size(), 2));
  }
  return fs::path(text);
}

bool IsPlain(unsigned char c) { return std::isalnum(c) != 0 || c == '_'; }

bool IsNamePart(std::string_view text) {
  return !text.empty() && text.size() <= kMaxNameBytes &&
         IsPlain(static_cast<unsigned char>(text.front())) &&
         std::all_of(text.begin(), text.end(),
                     [](unsigned char c) { return IsPlain(c) || c == '-' || c == '.'; });
}

// Branches and tags may have parts: refs/pr/1.
bool IsRevision(std::string_view text) {
  if (text.empty() || text.size() > kMaxNameBytes) return false;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find('/', at), text.size());
    const std::string_view part = text.substr(at, end - at);
    if (!IsNamePart(part) || part.find("..") != std::string_view::npos) return false;
    at = end + 1;
  }
  return true;
}

}  // namespace

std::optional<HubName> ParseHubName(std::string_view text) {
  HubName out;
  if (const size_t at = text.find('@'); at != std::string_view::npos) {
    out.revision = text.substr(at + 1);
    if (!IsRevision(out.revision)) return std::nullopt;
    text = text.substr(0, at);
  }
  const size_t slash = text.find('/');
  if (slash == std::string_view::npos || !IsNamePart(text.substr(0, slash)) ||
      !IsNamePart(text.substr(slash + 1))) {
    return std::nullopt;
  }
  out.repository = text;
  return out;
}

// The order is that of huggingface_hub.
fs::path HubHome() {
  if (const auto home = FromEnvironment("HF_HOME")) return *home;
  if (const auto cache = FromEnvironment("XDG_CACHE_HOME")) return *cache / "huggingface";
  return FromEnvironment("HOME").value_or("/") / ".cache/huggingface";
}

fs::path HubCache() {
  if (const auto cache = FromEnvironment("HF_HUB_CACHE")) return *cache;
  if (const auto cache = FromEnvironment("HUGGINGFACE_HUB_CACHE")) return *cache;
  return HubHome() / "hub";
}

fs::path HubRepository(const fs::path& cache, const std::string& repository) {
  std::string folder = "models--" + repository;
  folder.replace(folder.find('/'), 1, "--");
  return cache / folder;
}

bool IsCommit(std::string_view text) {
  return text.size() == 40 && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

std::optional<fs::path> FindSnapshot(const fs::path& repository, const std::string& revision) {
  const fs::path snapshots = repository / "snapshots";
  const std::string ref = revision.empty() ? "main" : revision;
  if (const auto commit = ReadFile(repository / "refs" / ref, 256); commit.has_value()) {
    const std::string name = commit->substr(0, commit->find_last_not_of(" \r\n") + 1);
    if (IsNamePart(name) && IsDirectory(snapshots / name)) return snapshots / name;
  }
  if (!revision.empty()) {
    if (IsCommit(revision) && IsDirectory(snapshots / revision)) return snapshots / revision;
    return std::nullopt;
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

bool IsSafeRelativePath(std::string_view path) {
  if (path.empty() || path.size() > kMaxPathBytes) return false;
  for (const char c : path) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f || c == '\\') return false;
  }
  for (size_t at = 0; at <= path.size();) {
    const size_t end = std::min(path.find('/', at), path.size());
    const std::string_view part = path.substr(at, end - at);
    if (part.empty() || part == "." || part == ".." || part.size() > kMaxPartBytes) return false;
    at = end + 1;
  }
  return true;
}

MissingFile FindMissing(const fs::path& directory, ModelParts parts) {
  if (!Exists(directory / "config.json")) return {"config.json"};
  if (parts == ModelParts::kConfig) return {};
  if (parts == ModelParts::kWeights && !Exists(directory / "model.safetensors")) {
    const fs::path index = directory / "model.safetensors.index.json";
    const auto text = ReadFile(index, kMaxIndexBytes);
    if (!text.has_value()) return {"model.safetensors"};
    // A broken index is for whoever reads it to name.
    const auto files = ParseSafetensorsIndex(*text, index.string());
    if (!files.has_value()) return {};
    std::set<std::string> shards;
    for (const auto& [tensor, shard] : *files) shards.insert(shard);
    for (const std::string& shard : shards) {
      if (!Exists(directory / shard)) return {shard};
    }
  }
  if (!Exists(directory / "tokenizer.json")) return {"tokenizer.json", /*unsure=*/true};
  return {};
}

}  // namespace oscar
