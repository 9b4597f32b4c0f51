// The Hugging Face hub's cache of downloaded files, which its clients share: blobs named by their
// digest, snapshots of links to them, and refs that name a commit. What lies there, and by which
// names; nothing is downloaded. Safe from any thread.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/status.h"

namespace oscar {

// "org/name" or "org/name@revision".
struct HubName {
  std::string repository;
  std::string revision;  // a branch, tag or commit; empty: main
  const std::string& RevisionOr(const std::string& fallback) const {
    return revision.empty() ? fallback : revision;
  }
};
// Nothing where the text is no such name: a path, or a revision that leaves its folder.
std::optional<HubName> ParseHubName(std::string_view text);

// HF_HOME, XDG_CACHE_HOME/huggingface or ~/.cache/huggingface, in that order.
std::filesystem::path HubHome();
// HF_HUB_CACHE, HUGGINGFACE_HUB_CACHE or HubHome()/hub, in that order.
std::filesystem::path HubCache();
// models--org--name in `cache`.
std::filesystem::path HubRepository(const std::filesystem::path& cache,
                                    const std::string& repository);
// A full commit id: 40 hex digits.
bool IsCommit(std::string_view text);
// The snapshot of a revision: what its ref names, or the commit itself. Without a revision, main's,
// or the only one there is.
std::optional<std::filesystem::path> FindSnapshot(const std::filesystem::path& repository,
                                                  const std::string& revision);

// Whether a name from a stranger's listing stays below the folder it is put in: parts without "..",
// backslashes or control bytes, at most 1024 bytes in all.
bool IsSafeRelativePath(std::string_view path);

// What a command needs of a model.
enum class ModelParts {
  kConfig,   // config.json and the generation config: a plan of memory
  kText,     // also tokenizer and template
  kWeights,  // also all shards: everything
};
// The first file that a model directory lacks for these parts; empty where it lacks none. A model
// may have no tokenizer at all: `unsure` is set where only that is missing.
struct MissingFile {
  std::string name;
  bool unsure = false;
};
MissingFile FindMissing(const std::filesystem::path& directory, ModelParts parts);

}  // namespace oscar
