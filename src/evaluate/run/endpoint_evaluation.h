// Tasks on a server: the same items, scores, records and tables as an evaluation of cache methods.
// What cannot be seen from outside (strict scores, bits, bytes, perplexity) is left out.
#pragma once

#include "run/endpoint.h"
#include "run/evaluation.h"

namespace oscar {

// Uses the suite, seed, output directory and progress of `options`; `options.model.model`, where
// named, is the directory of the server's tokenizer, without which texts are not cut to their
// task's limit. Items whose request fails for good count as wrong, are named in the warnings and
// asked again by the next run; kUnavailable where no item was ever answered.
Result<EvalResults> EvaluateEndpoint(const EvalOptions& options, const EndpointOptions& endpoint);

}  // namespace oscar
