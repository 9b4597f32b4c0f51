// LoadedModel: a model directory made ready to run: config, rotation, KV plan, weights on a device,
// and the page pool. Every command that computes starts here. Owns everything; one engine thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "base/thread_pool.h"
#include "cache/page_pool.h"
#include "io/hf_config.h"
#include "model/load.h"
#include "oscar/options.h"
#include "oscar/status.h"

namespace oscar {

// What fits where, before anything is loaded.
struct MemoryPlan {
  uint64_t weight_bytes = 0;
  uint64_t kv_bytes = 0;         // the budget
  uint64_t open_page_bytes = 0;  // 64 tokens in BF16, all layers
  uint64_t sealed_page_bytes = 0;
  uint64_t state_bytes = 0;      // recurrent states of one sequence
  uint64_t available_bytes = 0;  // free memory of the device when asked
};

class LoadedModel {
 public:
  static Result<std::unique_ptr<LoadedModel>> Load(const ModelOptions& options);
  // Config, spec and plan alone: no weights are read.
  static Result<std::unique_ptr<LoadedModel>> Plan(const ModelOptions& options);
  // The same of a model that this machine may not hold, or of a config without weights: what is
  // short stands in the plan.
  static Result<std::unique_ptr<LoadedModel>> DryRun(const ModelOptions& options);

  const ModelConfig& config() const { return config_; }
  const ModelSpec& spec() const { return spec_; }
  const KvPlan& kv() const { return *plan_; }
  // Pages that fit so many bytes of the device's memory: on a GPU less than all of them.
  uint64_t PageBudget(uint64_t bytes) const;
  const MemoryPlan& memory() const { return memory_; }
  // Whether weights are FP8, in the checkpoint or by the options.
  bool has_fp8_weights() const { return has_fp8_weights_; }
  // As the config says it, and random weights then have it too.
  bool HasMxfp4Experts() const { return config_.quantization_method == "mxfp4"; }
  int64_t max_context() const { return max_context_; }
  const std::filesystem::path& directory() const { return directory_; }
  // Where the model runs: kCpu or kCuda.
  Device device() const { return device_; }
  // "cpu", or the GPU's name.
  const std::string& device_name() const { return device_name_; }
  // The file of sensitivities that decides the bits of heads; empty where none does.
  const std::filesystem::path& sensitivity_path() const { return sensitivity_path_; }
  // Who chose the bits of heads and what that is as stored, to follow the plan's description:
  // " by DIR/sensitivity.json; as stored: 3.27 at 4K, ...". Empty for methods without such bits.
  std::string DescribeBits() const;
  // After Load.
  Backend& backend() { return model_->backend(); }
  Model& model() { return *model_; }
  PagePool& pool() { return *pool_; }
  ThreadPool& threads() { return *threads_; }

 private:
  LoadedModel() = default;
  // Rotation and sensitivities of the options, or those beside the weights.
  Status FindRotation(const ModelOptions& options, KvPlanOptions& plan);
  Status ChooseDevice(const ModelOptions& options, const KvPlanOptions& plan);
  // What weights take and the cache gets, of the memory that is free.
  Status PlanMemory(const ModelOptions& options);
  static Result<std::unique_ptr<LoadedModel>> Plan(const ModelOptions& options, bool is_dry_run);
  std::filesystem::path directory_;
  ModelConfig config_;
  ModelSpec spec_;
  MemoryPlan memory_;
  std::string rotation_model_;  // fingerprint that the rotation names; empty: none
  // Of the sensitivities that decide bits; empty: none.
  std::filesystem::path sensitivity_path_;
  int64_t max_context_ = 0;
  bool has_fp8_weights_ = false;
  Device device_ = Device::kCpu;
  std::string device_name_ = "cpu";
  std::unique_ptr<ThreadPool> threads_;
  std::unique_ptr<KvPlan> plan_;
  std::unique_ptr<Decoder> model_;  // holds the pool's memory on a GPU
  std::unique_ptr<PagePool> pool_;
};

// Where the embedded default model lies: $OSCAR_DEMO_MODEL, beside the binary's source tree, or in
// the installed share directory.
Result<std::filesystem::path> FindDemoModel();

// Memory that this process could still take: free and reclaimable, within its control group.
uint64_t AvailableMemory();

}  // namespace oscar
