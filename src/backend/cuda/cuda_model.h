// CudaModel: a decoder on one CUDA device. Weights, pages, tables and workspaces are taken from the
// device once, at load; afterwards nothing is allocated there. A pass without prompts is one CUDA
// graph a batch bucket; what is sent for it does not grow with the context.
//
// Owns the pages' memory: pool and sequences must go before it. One caller thread at a time.
// Where the build has no CUDA, FindCudaDevice and LoadCudaModel fail with kUnimplemented.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "cache/page_pool.h"
#include "model/model.h"

namespace oscar {

struct CudaDevice {
  std::string name;
  int major = 0, minor = 0;
  int driver = 0;  // CUDA version the driver speaks, such as 13000
  uint64_t free_bytes = 0, total_bytes = 0;
};
// kNotFound where there is none, kUnavailable with the reason where there is one that these kernels
// do not run on.
Result<CudaDevice> FindCudaDevice();

// What the kernels would refuse: methods without real pages, shapes they do not take. Needs no
// device.
Status CheckCudaPlan(const ModelSpec& spec, const KvPlan& plan);
// What CudaModelOptions::kv_bytes may be where so many bytes of the device are for pages: less than
// all of them, by what does not fit between pages of two sizes. Needs no device.
uint64_t CudaPageBudget(const KvPlan& plan, uint64_t bytes);

struct CudaModelOptions {
  int max_batch_tokens = 4096;
  // Sequences of the largest decode graph, rounded up to a bucket, 512 at most; passes may hold
  // more, at the cost of extra launches.
  int max_sequences = 128;
  int64_t max_context = 0;  // tokens; 0: the model's
  uint64_t kv_bytes = 0;    // of pages; 0: what the device has left
  // Every product by kernels whose sums do not depend on the batch: slower prompts.
  bool batch_invariant = false;
  // The CPU's bits (CpuModelOptions::portable): kernels that sum in its order, far slower.
  bool portable = false;
};

// Bytes taken on the device, exact: nothing else is, and nothing after loading. What the driver
// takes for code and graphs is not in them, but missing from `free`.
struct CudaMemoryPlan {
  uint64_t weights = 0;  // and RoPE's angles, rotations
  // Activations, step inputs, page tables, workspaces of attention, products and sealing.
  uint64_t activations = 0;
  uint64_t pages = 0;  // the arena
  uint64_t free = 0;   // left when everything was taken
};

class CudaModel : public Model {
 public:
  virtual PageMemory& pages() = 0;
  // What a PagePool over pages() may be given: any mix of pages within it fits.
  virtual uint64_t page_budget() const = 0;
  virtual const CudaMemoryPlan& memory() const = 0;
  virtual const CudaDevice& device() const = 0;
  // Bytes a second that a plain read of device memory reaches: the roof of a decode step.
  virtual Result<double> MeasureReadBandwidth() = 0;
  // Keys and values that were clamped, or not a number, when their page was sealed, of all
  // sequences since the start; CacheUsage has none of it. Waits for the device.
  virtual Result<uint64_t> Saturated() = 0;
  // The pool that sequences come from; once, before the first pass.
  virtual void SetPool(const PagePool& pool) = 0;
};

// `plan` gets the device's sealer and must outlive the model, like `threads`.
Result<std::unique_ptr<CudaModel>> LoadCudaModel(const ModelSpec& spec, const WeightSource& source,
                                                 KvPlan& plan, ThreadPool& threads,
                                                 const CudaModelOptions& options);

}  // namespace oscar
