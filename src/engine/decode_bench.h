// Times whole decode steps of a model over caches of a given length. The caches are filled with
// random rows and sealed as generation would, so that no prompt of 128K tokens has to be computed.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/loaded_model.h"
#include "oscar/status.h"

namespace oscar {

struct DecodeBenchRow {
  int64_t context = 0;
  int batch = 0;
  double seconds_per_step = 0.0;  // median
  double tokens_per_second = 0.0;
  uint64_t weight_bytes = 0;  // read once a step
  uint64_t kv_bytes = 0;      // read once a step, all sequences
  double bytes_per_second = 0.0;
};

// kResourceExhausted, naming the bytes, where the caches do not fit the budget.
Result<DecodeBenchRow> RunDecodeBench(LoadedModel& loaded, int64_t context, int batch, int steps);

}  // namespace oscar
