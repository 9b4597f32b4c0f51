#include "emulator/runtime_state.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "emulator/decoder.h"
#include "emulator/emulator.h"
#include "emulator/fatbin.h"

namespace oscar::emulator {

namespace {

// From the tables of compute capabilities in NVIDIA's programming guide and the products' sheets.
constexpr DeviceModel kDevices[] = {
    {"NVIDIA H200 (emulated)", 9, 0, 132, 228 << 10, 227 << 10, uint64_t{141} * 1000 * 1000 * 1000},
    {"NVIDIA A100 (emulated)", 8, 0, 108, 164 << 10, 163 << 10, uint64_t{80} << 30},
    {"NVIDIA L40S (emulated)", 8, 9, 142, 100 << 10, 99 << 10, uint64_t{48} << 30},
    {"NVIDIA B200 (emulated)", 10, 0, 148, 228 << 10, 227 << 10, uint64_t{180} << 30},
    {"NVIDIA RTX PRO 6000 (emulated)", 12, 0, 188, 100 << 10, 99 << 10, uint64_t{96} << 30},
};

[[noreturn]] void Die(const std::string& what) {
  fmt::print(stderr, "CUDA emulator: {}\n", what);
  std::abort();
}

DeviceModel ChosenDevice() {
  const char* wanted = std::getenv("OSCAR_EMULATOR_DEVICE");
  if (wanted == nullptr) return kDevices[0];
  for (const DeviceModel& d : kDevices) {
    if (fmt::format("{}.{}", d.major, d.minor) == wanted) return d;
  }
  Die(fmt::format(
      "OSCAR_EMULATOR_DEVICE={}: no such device; 9.0, 8.0, 8.9, 10.0 and 12.0 are known", wanted));
}

}  // namespace

Runtime& Runtime::Get() {
  static Runtime* runtime = new Runtime;  // outlives every static object of the program
  return *runtime;
}

Runtime::Runtime() : device_(ChosenDevice()) {
  if (const char* threads = std::getenv("OSCAR_EMULATOR_THREADS")) {
    threads_ = std::atoi(threads);
    if (threads_ < 1) Die(fmt::format("OSCAR_EMULATOR_THREADS={}: at least 1", threads));
  }
  trace_ = std::getenv("OSCAR_EMULATOR_TRACE") != nullptr;
  if (const char* copies = std::getenv("OSCAR_EMULATOR_COPIES")) {
    late_copies_ = std::string_view(copies) == "late";
    if (!late_copies_ && std::string_view(copies) != "early") {
      Die(fmt::format("OSCAR_EMULATOR_COPIES={}: early or late", copies));
    }
  }
}

LoadedModule* Runtime::AddModule(const void* container) {
  const std::lock_guard lock(mutex_);
  modules_.push_back(std::make_unique<LoadedModule>());
  modules_.back()->container = container;
  return modules_.back().get();
}

void Runtime::AddKernel(LoadedModule* module, const void* host, const char* name) {
  const std::lock_guard lock(mutex_);
  auto kernel = std::make_unique<Kernel>();
  kernel->module = module;
  kernel->name = name;
  handles_[kernel.get()] = kernel.get();
  kernels_[host] = std::move(kernel);
}

Kernel* Runtime::FindKernel(const void* function) {
  const std::lock_guard lock(mutex_);
  const auto found = kernels_.find(function);
  if (found != kernels_.end()) return found->second.get();
  const auto handle = handles_.find(function);
  return handle == handles_.end() ? nullptr : handle->second;
}

cudaError_t Runtime::Load(Kernel* kernel) {
  const std::lock_guard lock(mutex_);
  if (kernel->program != nullptr) return cudaSuccess;
  LoadedModule& loaded = *kernel->module;
  if (loaded.module == nullptr && loaded.error.empty()) {
    const std::vector<PtxText> texts = PtxOf(loaded.container, &loaded.error);
    const PtxText* best = nullptr;
    const int device = 10 * device_.major + device_.minor;
    for (const PtxText& text : texts) {
      // Text for sm_90a runs on 9.0 alone, other text on everything newer.
      const bool own = text.text.find(fmt::format(".target sm_{}a", text.architecture)) !=
                       std::string_view::npos;
      if (own ? text.architecture != device : text.architecture > device) continue;
      if (best == nullptr || text.architecture > best->architecture) best = &text;
    }
    auto module = std::make_unique<Module>();
    if (best == nullptr) {
      if (loaded.error.empty()) {
        loaded.error =
            fmt::format("no PTX for compute capability {}.{}", device_.major, device_.minor);
      }
    } else if (ScanModule(best->text, module.get(), &loaded.error)) {
      for (const auto& [name, variable] : module->variables) {
        if (variable.memory != nullptr) memory_.Add(variable.memory.get(), variable.declared.bytes);
      }
      loaded.module = std::move(module);
    }
  }
  if (loaded.module == nullptr) {
    fault_text_ = loaded.error;
    fmt::print(stderr, "CUDA emulator: {}\n", loaded.error);
    return cudaErrorNoKernelImageForDevice;
  }
  const auto found = loaded.module->functions.find(kernel->name);
  if (found == loaded.module->functions.end()) return cudaErrorInvalidDeviceFunction;
  auto program = std::make_unique<Program>();
  if (!MakeProgram(*loaded.module, found->second, program.get(), &kernel->error)) {
    Die(fmt::format("{}\n  in {}", kernel->error, kernel->name));
  }
  kernel->program = std::move(program);
  return cudaSuccess;
}

cudaError_t Runtime::LaunchKernel(const void* function, Dim3 grid, Dim3 block, void** args,
                                  size_t shared, cudaStream_t stream, uint32_t cluster) {
  Kernel* kernel = FindKernel(function);
  if (kernel == nullptr) return Return(cudaErrorInvalidDeviceFunction);
  if (const cudaError_t error = Load(kernel); error != cudaSuccess) return Return(error);
  const Program& program = *kernel->program;
  const uint64_t threads = block.count();
  if (threads == 0 || grid.count() == 0 || block.x > 1024 || block.y > 1024 || block.z > 64 ||
      grid.y > 65535 || grid.z > 65535) {
    return Return(cudaErrorInvalidConfiguration);
  }
  if (threads > static_cast<uint64_t>(program.max_threads)) {
    return Return(cudaErrorLaunchOutOfResources);
  }
  if (shared > static_cast<size_t>(kernel->max_dynamic_shared) ||
      shared + program.static_shared > static_cast<size_t>(device_.shared_per_block)) {
    return Return(cudaErrorInvalidValue);
  }
  if (cluster == 0) cluster = std::max(1u, program.cluster);
  if (cluster > 8 || grid.x % cluster != 0 || (cluster > 1 && device_.major < 9)) {
    return Return(cudaErrorInvalidConfiguration);
  }
  Launch launch;
  launch.cluster = cluster;
  launch.program = &program;
  launch.grid = grid;
  launch.block = block;
  launch.dynamic_shared = static_cast<uint32_t>(shared);
  launch.late_copies = late_copies_;
  launch.parameters.resize(program.parameter_bytes);
  for (size_t i = 0; i < program.parameters.size(); ++i) {
    const Parameter& p = program.parameters[i];
    std::memcpy(launch.parameters.data() + p.offset, args[i], p.bytes);
  }
  Enqueue(stream, [this, launch = std::move(launch)] { Run(launch); });
  return cudaSuccess;
}

void Runtime::Run(const Launch& launch) {
  const std::lock_guard lock(mutex_);
  uint64_t instructions = 0;
  const auto begin = std::chrono::steady_clock::now();
  const std::string fault = RunLaunch(launch, memory_, threads_, &instructions);
  if (trace_) {
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    fmt::print(
        stderr, "{:9.3f} ms {:10} warp instructions {:7.1f} M/s  {}x{}x{} blocks of {}  {}\n",
        seconds * 1e3, instructions, static_cast<double>(instructions) / seconds * 1e-6,
        launch.grid.x, launch.grid.y, launch.grid.z, launch.block.count(), launch.program->name);
  }
  if (fault.empty()) return;
  fmt::print(stderr, "CUDA emulator: {}\n", fault);
  fault_text_ = fault;
  fault_ = fault.starts_with("illegal")      ? cudaErrorIllegalAddress
           : fault.starts_with("misaligned") ? cudaErrorMisalignedAddress
           : fault.starts_with("deadlock")   ? cudaErrorLaunchTimeout
                                             : cudaErrorLaunchFailure;
}

void Runtime::Enqueue(cudaStream_t stream, std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  auto* s = reinterpret_cast<Stream*>(stream);
  if (s != nullptr && s->capture != nullptr) {
    s->capture->work.push_back(std::move(work));
  } else {
    work();
  }
}

cudaError_t Runtime::Return(cudaError_t error) {
  if (error != cudaSuccess) last_ = error;
  return error;
}

cudaError_t Runtime::TakeFault() {
  const cudaError_t fault = std::exchange(fault_, cudaSuccess);
  return fault != cudaSuccess ? Return(fault) : cudaSuccess;
}

cudaError_t Runtime::TakeLast() { return std::exchange(last_, cudaSuccess); }

void Enqueue(void* stream, std::function<void()> work) {
  Runtime::Get().Enqueue(static_cast<cudaStream_t>(stream), std::move(work));
}

std::string CheckDeviceMemory(const void* at, size_t bytes) {
  Memory& memory = Runtime::Get().memory();
  Allocation found;
  const auto address = reinterpret_cast<uint64_t>(at);
  if (bytes == 0 || (memory.Find(address, &found) && found.Contains(address, bytes))) return {};
  return memory.Describe(address, bytes);
}

}  // namespace oscar::emulator
