// Processor time of the calling thread, in seconds: what masks cost, whatever else the machine
// does.
#pragma once

#include <time.h>

namespace oscar {

inline double ThreadSeconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace oscar
