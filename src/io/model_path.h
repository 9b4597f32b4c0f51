// Where a model lies that someone named: a directory, a config.json, or a name on the Hugging Face
// hub whose files are in the local hub cache. Nothing is downloaded; hub/hub.h does that. Safe from
// any thread.
#pragma once

#include <filesystem>
#include <string>

#include "oscar/status.h"

namespace oscar {

// A path that exists is returned as it is; "org/name" or "org/name@revision" becomes its snapshot
// in the hub cache (io/hub_cache.h). Errors say what lies there instead of a model that can be
// read: a GGUF file, an adapter, nothing.
Result<std::filesystem::path> FindModel(const std::filesystem::path& given);

// What to call a model directory: "org/name" for a snapshot of the hub cache, else its last part.
std::string ModelName(const std::filesystem::path& directory);

}  // namespace oscar
