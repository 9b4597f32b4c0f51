// oscar info: what this build is and what this machine offers.
#include <fmt/core.h>

#include <CLI/App.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/progress.h"
#include "cli/command.h"
#include "devices/devices.h"
#include "oscar/version.h"
#include "simd/dispatch.h"
#include "simd/gemm.h"

namespace oscar::cli {
namespace {

struct InfoOptions {
  bool json = false;
};

std::string Cuda() {
#ifdef OSCAR_HAVE_CUDA
  const auto device = FindDevice(Device::kCuda);
  if (!device.has_value()) return "built in; " + device.error().message();
  return fmt::format("{}, compute capability {}.{}, {} of {} free", device->name, device->major,
                     device->minor, FormatBytes(device->free_bytes),
                     FormatBytes(device->total_bytes));
#else
  return "left out";
#endif
}

Status RunInfo(const InfoOptions& options) {
  const std::string cuda = Cuda();
  const unsigned cores = std::thread::hardware_concurrency();
  const Status cpu = simd::CheckCpu();
  const std::string target = cpu.ok() ? std::string(simd::TargetName(simd::ActiveTarget()))
                                      : "unsupported: " + cpu.message();
  const std::string gemm =
      cpu.ok() ? std::string(simd::GemmPathName(simd::DefaultGemmPath())) : "none";
  if (options.json) {
    const nlohmann::ordered_json out = {
        {"version", kVersion}, {"cores", cores}, {"simd", target}, {"gemm", gemm}, {"cuda", cuda}};
    fmt::print("{}\n", out.dump(2));
  } else {
    fmt::print("oscar {}\ncores  {}\nSIMD   {}\nGEMM   {}\nCUDA   {}\n", kVersion, cores, target,
               gemm, cuda);
  }
  return {};
}

}  // namespace

void AddInfoCommand(CLI::App& app, RunFunction& run) {
  auto options = std::make_shared<InfoOptions>();
  CLI::App* command = app.add_subcommand("info", "Show version, processor features and devices");
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options, &run] { run = [options] { return RunInfo(*options); }; });
}

}  // namespace oscar::cli
