// What an evaluation of methods and one of a server do alike with their items: how outputs are
// sampled, what an item is known by, and what stands for an output that never came. Plain
// functions.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/options.h"
#include "oscar/status.h"
#include "run/results.h"
#include "tasks/suite.h"

namespace oscar {

// Settles how outputs are sampled: `overrides` changes what each task publishes (greedy where it
// publishes nothing), `repeats` too unless 0. kInvalidArgument for repeats of greedy outputs.
Status SetSampling(EvalSuite& suite,
                   const std::function<SamplingOptions(SamplingOptions)>& overrides, int repeats);
std::string DescribeSampling(const EvalSuite& suite);
uint64_t HashText(std::string_view text, uint64_t seed);
// Of everything in an item and its task that decides a score.
uint64_t HashItem(const EvalTask& task, const EvalItem& item);

// The record of an item that has no output.
ItemRecord FailedRecord(const EvalTask& task, const EvalItem& item, int repeat);
// "a, b, c, d, e and 4 more".
std::string ListSome(const std::vector<std::string>& list);

}  // namespace oscar
