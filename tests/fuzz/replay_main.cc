// Runs a fuzz target on every file of the directories that are its arguments.
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <vector>

#include "base/file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int argc, char** argv) {
  size_t num_files = 0;
  for (int i = 1; i < argc; ++i) {
    std::error_code error;
    std::filesystem::directory_iterator directory(argv[i], error);
    if (error) {
      std::fprintf(stderr, "%s: %s\n", argv[i], error.message().c_str());
      return 1;
    }
    for (const auto& entry : directory) {
      auto text = oscar::ReadFile(entry.path(), 64 << 20);
      if (!text.has_value()) {
        std::fprintf(stderr, "%s\n", text.error().ToString().c_str());
        return 1;
      }
      std::printf("%s\n", entry.path().c_str());
      std::fflush(stdout);  // names the file where the next call aborts
      LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(text->data()), text->size());
      ++num_files;
    }
  }
  std::printf("%zu inputs\n", num_files);
  return num_files > 0 ? 0 : 1;  // an empty corpus tests nothing
}
