// What is known of a device before anything runs on it. Plain values.
#pragma once

#include <cstdint>
#include <string>

namespace oscar {

struct DeviceInfo {
  std::string name;
  int major = 0, minor = 0;                  // compute capability of a GPU
  int driver = 0;                            // CUDA version the driver speaks, such as 13000
  uint64_t free_bytes = 0, total_bytes = 0;  // of device memory
};

}  // namespace oscar
