// Whole .pt files: the zip directory and what follows from it. Checksums hide the pickle from most
// mutations; torch_pickle_fuzz covers it.
#include "fuzz_util.h"
#include "io/torch_file.h"
#include "torch_tree.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace oscar;
  TorchLimits limits;
  limits.max_tensor_bytes = 16 << 20;
  limits.max_values = 20000;
  const auto value = ParseTorchFile(FuzzBytes(data, size), "m.pt", limits);
  if (value) {
    CheckTorchValue(*value);
  } else {
    CheckError(value.error(), "m.pt: ");
  }
  return 0;
}
