// Files of a repository into the hub's cache layout: each is a blob named by its digest, complete
// and checked before it has that name, and a link to it in the commit's snapshot. What an earlier
// run left is continued. Processes at once, this program's or the hub's own clients, keep out of
// each other's way by the hub's lock files.
#pragma once

#include <string>
#include <vector>

#include "hub/remote.h"
#include "oscar/status.h"

namespace oscar::hub {

// A repository's folder in the cache, and one of its commits.
struct Place {
  std::filesystem::path cache;
  std::string repository;  // ORG/NAME
  std::string commit;
  std::filesystem::path Folder() const { return HubRepository(cache, repository); }
  std::filesystem::path Snapshot() const { return Folder() / "snapshots" / commit; }
};

// Downloads what is not there yet, several files at a time, with one progress line.
Status Download(const Remote& remote, const Place& place, std::vector<RemoteFile> files);

// Lets a branch or tag name the commit; a commit needs no name.
Status WriteRef(const Place& place, const std::string& revision);

}  // namespace oscar::hub
