#include "model/model.h"

namespace oscar {
namespace {

Status NotHere(std::string_view what) {
  return Unimplemented(std::string("this model does not ").append(what));
}

}  // namespace

Result<std::unique_ptr<CellRead>> Model::StartCell(SequenceCache&, std::span<const int32_t>) {
  return Unexpected(NotHere("read prompts layer by layer"));
}
Result<bool> Model::ContinueCell(CellRead&, int64_t, std::span<float>) {
  return Unexpected(NotHere("read prompts layer by layer"));
}
Status Model::ForwardAndSample(std::span<const ForwardItem>, std::span<const SampleParams>,
                               std::span<int32_t>, const BeforeSample&) {
  return NotHere("sample tokens");
}
Status Model::ReadLogits(size_t, std::span<float>) { return NotHere("sample tokens"); }
Status Model::Launch(std::span<const ForwardItem>, std::span<const SampleParams>,
                     const BeforeSample&) {
  return NotHere("run ahead");
}
Status Model::Collect(std::span<int32_t>) { return NotHere("run ahead"); }

}  // namespace oscar
