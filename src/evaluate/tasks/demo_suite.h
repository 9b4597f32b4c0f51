// The demo suite's tasks from any seed, as many items as wanted: the record files that the demo
// model's own generator writes of that seed, byte for byte. It is a Python program, so random
// numbers are Python's. The prose around needles is the suite's haystack.txt, of which records hold
// offsets. Free functions; safe from any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "oscar/status.h"
#include "tasks/suite.h"

namespace oscar {

// "recall_4k" ... "copy".
std::span<const std::string_view> DemoTasks();

// Records 0 to samples - 1 of a task (tasks/suite.h), one per line. kNotFound for another name,
// kOutOfRange where the haystack is too short for the task.
Result<std::string> DemoTaskLines(std::string_view task, int64_t samples, uint64_t seed,
                                  const CodePointText& haystack);

// The same as items, of the tasks that `options` takes.
Result<EvalSuite> MakeDemoSuite(int64_t samples, uint64_t seed, const CodePointText& haystack,
                                const SuiteOptions& options);

}  // namespace oscar
