#include "backend/backend.h"

namespace oscar {
namespace {

Status NotHere() { return Unimplemented("this device does not do that"); }

}  // namespace

Result<double> Backend::MeasureReadBandwidth() { return Unexpected(NotHere()); }
Status Backend::Experts(int) { return NotHere(); }
Status Backend::AdvanceState(int, int) { return NotHere(); }
Status Backend::Sample(int, std::span<const SampleParams>, std::span<const int32_t>) {
  return NotHere();
}
Status Backend::Await(int, std::span<int32_t>) { return NotHere(); }
Status Backend::ReadLogits(int, int, float*) { return NotHere(); }
Status Backend::BeginRecording() { return NotHere(); }
Result<std::unique_ptr<Recording>> Backend::EndRecording() { return Unexpected(NotHere()); }
Status Backend::Replay(const Recording&) { return NotHere(); }
Result<std::unique_ptr<CellStream>> Backend::EmbedCell(std::span<const int32_t>) {
  return Unexpected(NotHere());
}
Status Backend::BeginCellRows(CellStream&, LayeredAppend&, int64_t, int64_t) { return NotHere(); }

}  // namespace oscar
