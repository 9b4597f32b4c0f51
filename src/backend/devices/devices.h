// The devices a model may run on, and a backend on one of them. Nobody else names a backend.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "backend/backend.h"
#include "backend/device_info.h"
#include "oscar/options.h"
#include "oscar/status.h"
#include "weights/source.h"

namespace oscar {

// kNotFound where there is none, kUnavailable with the reason where there is one that this program
// does not run on.
Result<DeviceInfo> FindDevice(Device device);
// Features that the device's backend lacks, by name, whether or not this build has that backend.
Status CheckDeviceFeatures(Device device, const ModelSpec& spec);
// What the device would refuse of a model and its cache. Needs no device.
Status CheckPlan(Device device, const ModelSpec& spec, const KvPlan& plan);
// The order in which the device reads codes.
CodeOrder OrderOf(Device device);
// What a pool may be given where so many bytes of the device are for pages. Needs no device.
uint64_t PageBudget(Device device, const KvPlan& plan, uint64_t bytes);

// `plan` and `threads` must outlive the backend, which owns the pages' memory where that is the
// device's: pool and sequences must go before it.
Result<std::unique_ptr<Backend>> MakeBackend(Device device, const ModelSpec& spec,
                                             const WeightSource& source, const KvPlan& plan,
                                             ThreadPool& threads, const BackendOptions& options);

}  // namespace oscar
