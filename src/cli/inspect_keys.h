// oscar inspect --prompt: the keys of a prompt, before and after what a cache method does to them.
#pragma once

#include <filesystem>
#include <string>

#include "oscar/options.h"
#include "oscar/status.h"

namespace oscar::cli {

struct InspectKeysOptions {
  ModelOptions model;  // `kv` is the method that is looked at
  std::filesystem::path prompt;
  std::filesystem::path out;  // for charts; empty: none
  int layer = -1, kv_head = -1;
  bool json = false;
};

Status InspectKeys(const InspectKeysOptions& options);

}  // namespace oscar::cli
