// What the stand-in for the CUDA runtime gives to the stand-in for cuBLASLt and to tests.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "emulator/machine.h"

namespace oscar::emulator {

// Runs `work` in the stream's order: at once, or whenever the graph is launched that the stream is
// captured into.
void Enqueue(void* stream, std::function<void()> work);

// A sentence where `bytes` at `at` are not device memory, else an empty string.
std::string CheckDeviceMemory(const void* at, size_t bytes);

}  // namespace oscar::emulator
