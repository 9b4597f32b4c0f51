// The operations in plain fp32 loops, with keys and values kept in fp32 beside the cache and never
// quantised: the specification that the other backends are judged by, and judged itself by the
// outputs of transformers. Slow; for tests and for finding out what a kernel got wrong.
#pragma once

#include <memory>

#include "backend/backend.h"
#include "oscar/status.h"
#include "weights/source.h"

namespace oscar {

struct ReferenceOptions {
  int max_batch_tokens = 4096;
  // Keys and values are rounded to BF16 before attention reads them: what a BF16 cache does, and
  // nothing else.
  bool bf16_cache = false;
};

Result<std::unique_ptr<Backend>> MakeReferenceBackend(const ModelSpec& spec,
                                                      const WeightSource& source,
                                                      const KvPlan& plan, ThreadPool& threads,
                                                      const ReferenceOptions& options = {});

}  // namespace oscar
