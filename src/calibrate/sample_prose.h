// The prose of the built-in calibration sample: models/demo/eval/heldout_prose.json as it stood
// when the program was built, so that calibrating needs no file beside it. Safe from any thread.
#pragma once

#include <string_view>

namespace oscar {

// A JSON list of documents, gzipped.
std::string_view SampleProseGzip();

}  // namespace oscar
