#include "hub/hub.h"

#include <fmt/core.h>

#include <algorithm>
#include <set>

#include "base/error_text.h"
#include "base/file.h"
#include "base/log.h"
#include "base/progress.h"
#include "hub/download.h"
#include "io/model_path.h"
#include "io/safetensors.h"

namespace oscar::hub {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMaxIndexBytes = uint64_t{64} << 20;
constexpr char kIndex[] = "model.safetensors.index.json", kWhole[] = "model.safetensors";

void Announce(const Remote& remote, const Listing& listing, const std::vector<RemoteFile>& files,
              const Place& place) {
  uint64_t bytes = 0;
  for (const RemoteFile& file : files) {
    if (!Exists(place.Snapshot() / file.path)) bytes += file.size.value_or(0);
  }
  if (bytes == 0) return;
  LogInfo("{}: {} of commit {} from {} into {}", remote.Title(), FormatBytes(bytes),
          listing.commit.substr(0, 7), remote.options().endpoint.host, place.cache.string());
}

// Says what a repository is that holds no model we read, before anything large is downloaded.
Status CheckHolds(const Remote& remote, const Listing& listing, ModelParts parts) {
  const auto any = [&](std::string_view end) {
    return std::ranges::any_of(listing.files, [&](const auto& f) { return f.path.ends_with(end); });
  };
  if (listing.Find("config.json") == nullptr && listing.Find("adapter_config.json") == nullptr) {
    return Unimplemented(fmt::format(
        "{}: {}", remote.Title(),
        any(".gguf") ? "holds GGUF files, a format that is not read yet; take the model's "
                       "safetensors form"
                     : "holds no config.json, so it is no model that can be read"));
  }
  if (parts == ModelParts::kWeights && listing.Find("config.json") != nullptr &&
      listing.Find(kWhole) == nullptr && listing.Find(kIndex) == nullptr) {
    return Unimplemented(fmt::format("{}: holds no {}: weights in other formats are not read",
                                     remote.Title(), kWhole));
  }
  return {};
}

Result<std::vector<RemoteFile>> Shards(const Remote& remote, const Listing& listing,
                                       const Place& place) {
  const fs::path index = place.Snapshot() / kIndex;
  OSCAR_ASSIGN_OR_RETURN(const std::string text, ReadFile(index, kMaxIndexBytes));
  OSCAR_ASSIGN_OR_RETURN(const auto file_of_tensor, ParseSafetensorsIndex(text, index.string()));
  std::set<std::string> names;
  for (const auto& [tensor, name] : file_of_tensor) names.insert(name);
  std::vector<RemoteFile> out;
  for (const std::string& name : names) {
    const RemoteFile* file = listing.Find(name);
    if (file == nullptr) {
      return Unexpected(NotFound(fmt::format("{}: its index names {}, which it does not hold",
                                             remote.Title(), Quote(name))));
    }
    out.push_back(*file);
  }
  return out;
}

Result<fs::path> FindOffline(const HubName& name, const std::string& title, const fs::path& cache) {
  const auto found = FindSnapshot(HubRepository(cache, name.repository), name.revision);
  if (found.has_value()) return *found;
  return Unexpected(NotFound(
      fmt::format("{}: not in the hub cache ({}), and offline (--offline or HF_HUB_OFFLINE); get "
                  "it with: oscar pull {}",
                  title, cache.string(), title)));
}

Status CheckComplete(const fs::path& snapshot, ModelParts parts, const std::string& title) {
  const MissingFile missing = FindMissing(snapshot, parts);
  if (missing.name.empty() || missing.unsure || Exists(snapshot / "adapter_config.json")) return {};
  return NotFound(
      fmt::format("{}: {} lacks {}, and offline (--offline or HF_HUB_OFFLINE); finish the download "
                  "with: oscar pull {}",
                  title, snapshot.string(), Quote(missing.name), title));
}

}  // namespace

Result<fs::path> PullModel(const HubName& name, ModelParts parts, const HubOptions& options) {
  const Remote remote(options, name);
  if (options.offline) {
    OSCAR_ASSIGN_OR_RETURN(const fs::path found, FindOffline(name, remote.Title(), options.cache));
    OSCAR_RETURN_IF_ERROR(CheckComplete(found, parts, remote.Title()));
    return found;
  }
  OSCAR_ASSIGN_OR_RETURN(const Listing listing, remote.List());
  OSCAR_RETURN_IF_ERROR(CheckHolds(remote, listing, parts));
  const Place place{options.cache, name.repository, listing.commit};
  std::vector<RemoteFile> small = SelectModelFiles(listing, parts), large;
  std::erase_if(small, [&](const RemoteFile& file) {
    if (file.path != kWhole) return false;
    large.push_back(file);
    return true;
  });
  OSCAR_RETURN_IF_ERROR(Download(remote, place, small));
  if (parts == ModelParts::kWeights && large.empty() && listing.Find(kIndex) != nullptr) {
    OSCAR_ASSIGN_OR_RETURN(large, Shards(remote, listing, place));
  }
  Announce(remote, listing, large, place);
  OSCAR_RETURN_IF_ERROR(Download(remote, place, large));
  // Last: until then the name still leads to what was complete before.
  OSCAR_RETURN_IF_ERROR(WriteRef(place, remote.Revision()));
  return place.Snapshot();
}

Result<fs::path> PullRotations(const HubName& name, const std::string& folder,
                               const HubOptions& options) {
  const Remote remote(options, name);
  if (options.offline) return FindOffline(name, remote.Title(), options.cache);
  OSCAR_ASSIGN_OR_RETURN(const Listing listing, remote.List());
  const std::vector<RemoteFile> files = SelectRotations(listing, folder);
  if (files.empty()) {
    std::set<std::string> folders;
    for (const RemoteFile& file : SelectRotations(listing, "")) {
      folders.insert(Printable(file.path.substr(0, file.path.find('/'))));
    }
    std::string known;
    for (const std::string& one : folders) known += (known.empty() ? "" : ", ") + one;
    return Unexpected(
        NotFound(fmt::format("{}: holds no rotation{}{}", remote.Title(),
                             folder.empty() ? "" : fmt::format(" in {}", Quote(folder)),
                             known.empty() ? "" : fmt::format("; there are {}", known))));
  }
  const Place place{options.cache, name.repository, listing.commit};
  OSCAR_RETURN_IF_ERROR(Download(remote, place, files));
  OSCAR_RETURN_IF_ERROR(WriteRef(place, remote.Revision()));
  return place.Snapshot();
}

Result<fs::path> ObtainModel(const fs::path& given, ModelParts parts, bool offline) {
  const auto name = ParseHubName(given.string());
  if (Exists(given) || !name.has_value()) return FindModel(given);
  OSCAR_ASSIGN_OR_RETURN(HubOptions options, HubOptions::FromEnvironment());
  options.offline = options.offline || offline;
  const auto here = FindSnapshot(HubRepository(options.cache, name->repository), name->revision);
  const MissingFile missing = here.has_value() ? FindMissing(*here, parts) : MissingFile{"all"};
  if (missing.name.empty()) return FindModel(*here);
  const Result<fs::path> pulled = PullModel(*name, parts, options);
  if (pulled.has_value()) return FindModel(*pulled);
  if (missing.unsure && pulled.error().code() == StatusCode::kUnavailable) {
    LogWarning("{}; using what is in {}", pulled.error().message(), here->string());
    return FindModel(*here);
  }
  return Unexpected(pulled.error());
}

}  // namespace oscar::hub
