// The server's figures under the names that vLLM's dashboards ask for (--metrics-compat).
#pragma once

#include <string>

#include "engine/service.h"
#include "server/metrics.h"

namespace oscar::server {

// The histogram of tokens per forward pass.
Histogram::Snapshot BatchTokens(const EngineStats& stats);

// Text exposition; every sample has the labels model_name and engine="0".
std::string VllmMetrics(const ServerMetrics& metrics, const EngineStats& stats,
                        const std::string& model);

}  // namespace oscar::server
