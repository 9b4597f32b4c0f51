// ServedModel: everything the handlers need of a loaded model; tests serve a fake engine. Immutable
// once published; what it points to must outlive the server.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "dialogue/dialogue.h"
#include "engine/service.h"
#include "grammar/compiler.h"
#include "openai/request.h"

namespace oscar::server {

struct ServedModel {
  std::vector<std::string> names;  // the first is the one responses carry
  std::string root;                // the directory it came from, its last component
  int64_t created = 0;
  EngineService* engine = nullptr;
  const Dialogue* dialogue = nullptr;
  GrammarCompiler* grammars = nullptr;  // null: constrained answers are refused
  RequestLimits limits;
  std::string fingerprint;   // build, model and cache format
  std::string properties;    // a JSON object for GET /props
  std::string simd, device;  // for build_info

  // What one choice may need in the whole context is never too much.
  int64_t max_answer_logprobs() const {
    return std::max(limits.max_answer_logprobs,
                    (1 + limits.max_top_logprobs) * engine->max_context());
  }
};

}  // namespace oscar::server
