// The pickle interpreter alone: no checksum stands between the fuzzer and it. Storages of up to
// 64 KiB exist, whatever their key.
#include "fuzz_util.h"
#include "io/torch_pickle.h"
#include "torch_tree.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace oscar;
  const auto load = [](std::string_view, uint64_t num_bytes) -> Result<TorchStorageBytes> {
    if (num_bytes > (64 << 10)) return Unexpected(NotFound("storage is too large"));
    return std::make_shared<const std::vector<std::byte>>(num_bytes, std::byte{1});
  };
  TorchLimits limits;
  limits.max_tensor_bytes = 16 << 20;
  limits.max_values = 20000;
  const auto value = ParseTorchPickle(FuzzBytes(data, size), "data.pkl", load, limits, 1 << 20);
  if (value) {
    CheckTorchValue(*value);
  } else {
    CheckError(value.error(), "data.pkl: ");
  }
  return 0;
}
