// Safetensors files and checkpoint indexes from arbitrary bytes.
#include <unordered_set>

#include "fuzz_util.h"
#include "io/safetensors.h"

namespace oscar {
namespace {

void CheckFile(std::span<const std::byte> bytes) {
  const auto file = SafetensorsFile::FromBytes(bytes, "m.safetensors");
  if (!file) return CheckError(file.error(), "m.safetensors: ");
  uint64_t end = 0;  // tensors tile the data in order
  for (const StoredTensor& tensor : file->tensors()) {
    const auto num_bytes = CheckedNumBytes(tensor.dtype, tensor.shape);
    OSCAR_CHECK(num_bytes.has_value() && *num_bytes == tensor.num_bytes);
    OSCAR_CHECK(end == 0 || tensor.offset == end);
    end = tensor.offset + tensor.num_bytes;
    OSCAR_CHECK(end <= bytes.size());
    OSCAR_CHECK(file->Find(tensor.name) == &tensor);
    const auto floats = ToFloatVector(tensor);  // reads every byte, under the sanitizer's eye
    const auto ints = ToIntVector(tensor);
    OSCAR_CHECK(!floats || floats->size() == tensor.num_elements());
    OSCAR_CHECK(!(floats.has_value() && ints.has_value()));
  }
  OSCAR_CHECK(end == 0 || end == bytes.size());
}

}  // namespace
}  // namespace oscar

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace oscar;
  CheckFile(FuzzBytes(data, size));
  const auto index = ParseSafetensorsIndex(FuzzText(data, size), "index.json");
  if (!index) {
    CheckError(index.error(), "index.json: ");
    return 0;
  }
  for (const auto& [tensor, file] : *index) {
    OSCAR_CHECK(!file.empty() && file != "." && file != "..");
    OSCAR_CHECK(file.find('/') == std::string::npos && file.find('\0') == std::string::npos);
  }
  return 0;
}
