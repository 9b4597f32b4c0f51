// Models by name: from the Hugging Face hub, or ModelScope for rotations, into the hub's cache.
// Safe from any thread.
#pragma once

#include <filesystem>
#include <string>

#include "hub/remote.h"
#include "io/hub_cache.h"
#include "oscar/status.h"

namespace oscar::hub {

// Asks the hub for the newest commit of the revision and downloads what is missing of the parts;
// the snapshot's directory. Offline: what is here, if it is complete.
Result<std::filesystem::path> PullModel(const HubName& name, ModelParts parts,
                                        const HubOptions& options);

// The same of rotations below a folder of the repository; empty: all of them.
Result<std::filesystem::path> PullRotations(const HubName& name, const std::string& folder,
                                            const HubOptions& options);

// The door of every command: where the model lies that someone named. A path and a name whose files
// are all here are answered without a question to anyone; else they are downloaded.
Result<std::filesystem::path> ObtainModel(const std::filesystem::path& given, ModelParts parts,
                                          bool offline);

}  // namespace oscar::hub
