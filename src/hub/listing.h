// What a hub says a repository holds: hostile JSON -> files with sizes and digests. Safe from any
// thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/hub_cache.h"
#include "oscar/status.h"

namespace oscar::hub {

struct RemoteFile {
  std::string path;              // safe to put below a folder
  std::optional<uint64_t> size;  // unset: the listing does not say
  std::string digest;            // sha256 of a large file, git's id of a small one; empty: unknown
};

struct Listing {
  std::string commit;  // 40 hex digits
  std::vector<RemoteFile> files;
  const RemoteFile* Find(std::string_view path) const;
};

inline constexpr uint64_t kMaxListingBytes = uint64_t{32} << 20;

// The hub's /api/models/ORG/NAME/revision/REV.
Result<Listing> ParseHubListing(std::string_view text, std::string_view what);
// ModelScope's /api/v1/models/ORG/NAME/repo/files. It names no commit; one is made of the digests.
Result<Listing> ParseModelScopeListing(std::string_view text, std::string_view what);

// The files of a listing that the program reads: config, tokenizer, template, generation config and
// what lies in rotation/; with weights model.safetensors, or the index of its shards, which are
// read from there. In the order of the listing.
std::vector<RemoteFile> SelectModelFiles(const Listing& listing, ModelParts parts);
// Rotation files in either format, below `folder` where that is not empty.
std::vector<RemoteFile> SelectRotations(const Listing& listing, std::string_view folder);

}  // namespace oscar::hub
