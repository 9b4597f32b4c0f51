#include "hub/listing.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error_text.h"
#include "base/json.h"
#include "hub/digest.h"

namespace oscar::hub {
namespace {

using nlohmann::json;

constexpr size_t kMaxFiles = 100'000;

const json* Member(const json& object, const char* name) {
  if (!object.is_object()) return nullptr;
  const auto found = object.find(name);
  return found == object.end() ? nullptr : &*found;
}

std::string TextOf(const json& object, const char* name) {
  const json* value = Member(object, name);
  return value != nullptr && value->is_string() ? value->get<std::string>() : std::string();
}

std::optional<uint64_t> SizeOf(const json& object, const char* name) {
  const json* value = Member(object, name);
  if (value == nullptr || !value->is_number_unsigned()) return std::nullopt;
  return value->get<uint64_t>();
}

Status AddFile(RemoteFile file, std::string_view what, std::set<std::string>& seen,
               std::vector<RemoteFile>& out) {
  if (!IsSafeRelativePath(file.path)) {
    return DataLoss(
        fmt::format("{}: lists {}, which is no name of a file in it", what, Quote(file.path)));
  }
  if (!seen.insert(file.path).second) {
    return DataLoss(fmt::format("{}: lists {} twice", what, Quote(file.path)));
  }
  if (out.size() >= kMaxFiles) {
    return DataLoss(fmt::format("{}: lists more than {} files", what, kMaxFiles));
  }
  // A digest names the blob; what is none is asked for at the file itself.
  if (!IsDigest(file.digest)) file.digest.clear();
  out.push_back(std::move(file));
  return {};
}

bool IsRotationName(std::string_view name) {
  return name == "rotation.safetensors" || name == "sensitivity.json" ||
         (name.ends_with(".pt") && (name.starts_with("k_") || name.starts_with("v_")));
}

}  // namespace

const RemoteFile* Listing::Find(std::string_view path) const {
  const auto found = std::ranges::find_if(files, [&](const auto& f) { return f.path == path; });
  return found == files.end() ? nullptr : &*found;
}

Result<Listing> ParseHubListing(std::string_view text, std::string_view what) {
  OSCAR_ASSIGN_OR_RETURN(const json parsed, ParseJson(text, what));
  Listing out;
  out.commit = TextOf(parsed, "sha");
  const json* siblings = Member(parsed, "siblings");
  if (!IsCommit(out.commit) || siblings == nullptr || !siblings->is_array()) {
    return Unexpected(DataLoss(fmt::format(
        "{}: not the answer of a hub (no commit and list of files); check HF_ENDPOINT", what)));
  }
  std::set<std::string> seen;
  for (const json& sibling : *siblings) {
    RemoteFile file{TextOf(sibling, "rfilename"), SizeOf(sibling, "size"),
                    TextOf(sibling, "blobId")};
    if (const json* lfs = Member(sibling, "lfs"); lfs != nullptr && lfs->is_object()) {
      file.digest = TextOf(*lfs, "sha256");
      if (const auto size = SizeOf(*lfs, "size")) file.size = size;
    }
    OSCAR_RETURN_IF_ERROR(AddFile(std::move(file), what, seen, out.files));
  }
  return out;
}

Result<Listing> ParseModelScopeListing(std::string_view text, std::string_view what) {
  OSCAR_ASSIGN_OR_RETURN(const json parsed, ParseJson(text, what));
  const json* data = Member(parsed, "Data");
  const json* files = data == nullptr ? nullptr : Member(*data, "Files");
  if (files == nullptr || !files->is_array()) {
    return Unexpected(
        DataLoss(fmt::format("{}: not the answer of ModelScope (no list of files)", what)));
  }
  Listing out;
  std::set<std::string> seen;
  std::map<std::string, std::string> digests;
  for (const json& entry : *files) {
    if (TextOf(entry, "Type") == "tree") continue;
    RemoteFile file{TextOf(entry, "Path"), SizeOf(entry, "Size"), TextOf(entry, "Sha256")};
    OSCAR_RETURN_IF_ERROR(AddFile(std::move(file), what, seen, out.files));
    digests.emplace(out.files.back().path, out.files.back().digest);
  }
  std::string all;
  for (const auto& [path, digest] : digests) all += fmt::format("{} {}\n", digest, path);
  out.commit = Sha256(all).substr(0, 40);
  return out;
}

std::vector<RemoteFile> SelectModelFiles(const Listing& listing, ModelParts parts) {
  std::set<std::string_view> names = {"config.json", "generation_config.json",
                                      "adapter_config.json"};
  if (parts != ModelParts::kConfig) {
    names.insert(
        {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "sample_prompts.json"});
  }
  if (parts == ModelParts::kWeights) {
    names.insert(listing.Find("model.safetensors") != nullptr ? "model.safetensors"
                                                              : "model.safetensors.index.json");
  }
  std::vector<RemoteFile> out;
  for (const RemoteFile& file : listing.files) {
    constexpr std::string_view kFolder = "rotation/";  // a plan of memory reads its map of bits
    const bool is_rotation = file.path.starts_with(kFolder) &&
                             IsRotationName(std::string_view(file.path).substr(kFolder.size()));
    if (names.contains(file.path) || is_rotation) out.push_back(file);
  }
  return out;
}

std::vector<RemoteFile> SelectRotations(const Listing& listing, std::string_view folder) {
  std::vector<RemoteFile> out;
  for (const RemoteFile& file : listing.files) {
    const std::string_view path = file.path;
    const size_t slash = path.rfind('/');
    const std::string_view name = slash == path.npos ? path : path.substr(slash + 1);
    const bool is_below =
        folder.empty() ||
        (path.starts_with(folder) && path.size() > folder.size() && path[folder.size()] == '/');
    if (is_below && IsRotationName(name)) out.push_back(file);
  }
  return out;
}

}  // namespace oscar::hub
