// A decoder on a device, from its parts.
#pragma once

#include <memory>

#include "backend/backend.h"
#include "devices/devices.h"
#include "model/decoder.h"
#include "oscar/options.h"
#include "oscar/status.h"
#include "weights/source.h"

namespace oscar {

Result<std::unique_ptr<Decoder>> LoadModel(Device device, const ModelSpec& spec,
                                           const WeightSource& source, const KvPlan& plan,
                                           ThreadPool& threads, const BackendOptions& options = {});

}  // namespace oscar
