// oscar info: what this build is and what this machine offers.
#include <fmt/core.h>

#include <CLI/App.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli/command.h"
#include "oscar/version.h"

namespace oscar::cli {
namespace {

struct InfoOptions {
  bool json = false;
};

Status RunInfo(const InfoOptions& options) {
#ifdef OSCAR_HAVE_CUDA
  const char* cuda = "built in";
#else
  const char* cuda = "left out";
#endif
  const unsigned cores = std::thread::hardware_concurrency();
  if (options.json) {
    const nlohmann::ordered_json out = {{"version", kVersion}, {"cores", cores}, {"cuda", cuda}};
    fmt::print("{}\n", out.dump(2));
  } else {
    fmt::print("oscar {}\ncores  {}\nCUDA   {}\n", kVersion, cores, cuda);
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
