// What every model does with the items of a pass before and after it computes: checks, sealing and
// room in the caches, growth. One thread.
#pragma once

#include <span>

#include "base/thread_pool.h"
#include "model/model.h"
#include "oscar/status.h"

namespace oscar {

// The caller's mistakes end the program: no tokens, a chunk across cells, too many tokens.
void CheckItems(std::span<const ForwardItem> items, int max_batch_tokens);
// Seals what is due and takes pages for the items' tokens: for every item or for none (what was due
// stays sealed).
Status MakeRoom(std::span<const ForwardItem> items, ThreadPool& threads);
// The caches grow by the items' tokens.
void AdvanceAll(std::span<const ForwardItem> items);

// Whether calibration may look: kInvalidArgument where the plan rotates V.
Status CheckTapPlan(const KvPlan& plan, int num_layers);

}  // namespace oscar
