// Tasks on a server: the same items, scores, records and tables as an evaluation of cache methods.
// What cannot be seen from outside (strict scores, bits, bytes, perplexity) is left out.
#pragma once

#include "evaluate/endpoint.h"
#include "evaluate/evaluation.h"

namespace oscar {

// Uses the suite, seed, output directory and progress of `options`. Items whose request fails for
// good are named in the warnings and asked again by the next run.
Result<EvalResults> EvaluateEndpoint(const EvalOptions& options, const EndpointOptions& endpoint);

}  // namespace oscar
