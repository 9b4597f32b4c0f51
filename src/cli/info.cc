// oscar info: what this build is, what this machine offers, and what a model would take of it.
#include <fmt/core.h>

#include <CLI/App.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/progress.h"
#include "cli/command.h"
#include "cli/model_options.h"
#include "devices/devices.h"
#include "engine/loaded_model.h"
#include "hub/hub.h"
#include "io/model_path.h"
#include "oscar/version.h"
#include "simd/dispatch.h"
#include "simd/gemm.h"

namespace oscar::cli {
namespace {

struct InfoOptions {
  std::string model;
  bool offline = false;
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

// From the config alone.
Status AddModel(const InfoOptions& options, nlohmann::ordered_json& out) {
  ModelOptions model;
  OSCAR_ASSIGN_OR_RETURN(model.model,
                         hub::ObtainModel(options.model, ModelParts::kConfig, options.offline));
  OSCAR_ASSIGN_OR_RETURN(const ModelConfig config, ReadModelConfig(model.model));
  model.kv_memory = uint64_t{1} << 40;  // not the question here
  OSCAR_ASSIGN_OR_RETURN(const auto plan, LoadedModel::Plan(model));
  const int64_t tokens = plan->max_context();
  out["model"] = {{"name", ModelName(plan->directory())},
                  {"directory", plan->directory().string()},
                  {"architecture", plan->spec().architecture},
                  {"layers", config.num_layers},
                  {"context", tokens},
                  {"weight_bytes", plan->memory().weight_bytes},
                  {"cache_method", plan->kv().method().name},
                  {"cache_bytes_of_one_context", plan->kv().StoredBytes(tokens)}};
  return {};
}

Status RunInfo(const InfoOptions& options) {
  const std::string cuda = Cuda();
  const unsigned cores = std::thread::hardware_concurrency();
  const Status cpu = simd::CheckCpu();
  const std::string target = cpu.ok() ? std::string(simd::TargetName(simd::ActiveTarget()))
                                      : "unsupported: " + cpu.message();
  const std::string gemm =
      cpu.ok() ? std::string(simd::GemmPathName(simd::DefaultGemmPath())) : "none";
  nlohmann::ordered_json model = nlohmann::ordered_json::object();
  if (!options.model.empty()) OSCAR_RETURN_IF_ERROR(AddModel(options, model));
  if (options.json) {
    nlohmann::ordered_json out = {
        {"version", kVersion}, {"cores", cores}, {"simd", target}, {"gemm", gemm}, {"cuda", cuda}};
    out.update(model);
    fmt::print("{}\n", out.dump(2));
  } else {
    fmt::print("oscar {}\ncores  {}\nSIMD   {}\nGEMM   {}\nCUDA   {}\n", kVersion, cores, target,
               gemm, cuda);
    if (options.model.empty()) return {};
    const nlohmann::ordered_json& m = model["model"];
    fmt::print("model  {}, {} with {} layers, in {}\n", m["name"].get<std::string>(),
               m["architecture"].get<std::string>(), m["layers"].get<int64_t>(),
               m["directory"].get<std::string>());
    fmt::print("needs  {} for weights, {} for the cache of {} tokens ({})\n",
               FormatBytes(m["weight_bytes"].get<uint64_t>()),
               FormatBytes(m["cache_bytes_of_one_context"].get<uint64_t>()),
               m["context"].get<int64_t>(), m["cache_method"].get<std::string>());
  }
  return {};
}

}  // namespace

void AddInfoCommand(CLI::App& app, RunFunction& run) {
  auto options = std::make_shared<InfoOptions>();
  CLI::App* command = app.add_subcommand(
      "info", "Show version, processor features and devices, and what a model needs");
  command->add_option("model", options->model,
                      "Also what this model needs: a directory, or a name on the Hugging Face hub");
  AddOfflineFlag(*command, options->offline);
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options, &run] { run = [options] { return RunInfo(*options); }; });
}

}  // namespace oscar::cli
