// A prompt that was read exactly, on a BF16 cache without rotation, for caches of other plans to go
// on from: reading it once serves every method and every map of bits. One thread.
#pragma once

#include "backend/kv_plan.h"
#include "base/thread_pool.h"
#include "cache/sequence_cache.h"
#include "oscar/status.h"

namespace oscar {

// Copies a shared prompt into an empty cache of another plan: rows are rotated as the plan says and
// rounded to BF16 once more. Values that the plan's weights would give rotated are rotated here. A
// recurrent state comes as it is.
Status ImportPrompt(const SequenceCache& from, const KvPlan& plan, int num_layers, int kv_heads,
                    int head_dim, ThreadPool& threads, SequenceCache& to);

}  // namespace oscar
