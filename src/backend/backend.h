// Backend: the operations of a forward pass on one device, with the weights, activations and page
// memory they work on. The decoder (model/decoder.h) is the only one that says in which order they
// run; a backend says how. `reference`, `cpu`, `cuda` and the portable form of `cuda` are the ones
// there are.
//
// Operations act on the rows of the current pass (BeginPass) in order and may return before they
// have run; what the host reads is there after Synchronize, or when Await returns. One thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "arch/tensor_table.h"
#include "backend/batch.h"
#include "backend/kv_plan.h"
#include "backend/sample_params.h"
#include "base/thread_pool.h"
#include "cache/layered_append.h"
#include "cache/page_pool.h"
#include "oscar/status.h"

namespace oscar {

// Activations of a pass. A backend keeps them where and in the precision it likes; the residual
// stream is fp32.
enum class Activation : uint8_t {
  kStream,  // [rows, hidden], the residual stream
  kQkv,     // [rows, (heads + 2 KV heads) D], gates of the heads behind; inputs of linear attention
  kAttended,  // [rows, heads D]; values of linear attention
  kGated,     // [rows, intermediate], silu(gate) * up
};

// output = matrix x input + bias. A norm comes before; kStream as output is added to, and kGated
// takes the gate's half through SiLU times the other; where the layer has Role::kSharedShare, the
// shared part's kGated is multiplied by the sigmoid of that.
struct LinearOp {
  int layer = 0;
  LayerMatrix matrix = LayerMatrix::kQkv;
  Activation input = Activation::kStream;
  std::optional<Role> norm;  // RMSNorm of the input, by this tensor of the layer
  Activation output = Activation::kStream;
};

struct BackendOptions {
  int max_batch_tokens = 0;  // 0: what suits the device
  // Sequences of the largest recorded step, rounded up to a bucket; passes may hold more.
  int max_sequences = 128;
  int64_t max_context = 0;  // tokens; 0: the model's
  uint64_t kv_bytes = 0;    // of pages in the device's own memory; 0: what it has left
  // Every GEMM by kernels whose sums do not depend on the batch: slower prompts.
  bool batch_invariant = false;
  // Every sum in one order, the same bits on any processor and on a GPU: activations in fp32, and
  // generated tokens by the attention of prompts. Slow.
  bool portable = false;
  // Of a matrix on its way from the source to its packed form, in host memory.
  size_t staging_bytes = size_t{1} << 20;
};

// Bytes taken in device memory, exact: nothing else is, and nothing after loading. What the
// driver takes for code and graphs is not in them, but missing from `free`.
struct DeviceMemory {
  uint64_t weights = 0;      // and RoPE's angles, rotations
  uint64_t activations = 0;  // step inputs, page tables and workspaces included
  uint64_t pages = 0;        // the arena
  uint64_t free = 0;         // left when everything was taken
};

// A step that was recorded, to be replayed.
class Recording {
 public:
  virtual ~Recording() = default;
};

// The residual stream of the tokens of one cell, between the layers.
class CellStream {
 public:
  virtual ~CellStream() = default;
};

// What routed experts cost since the start: how often a layer ran, how many experts it touched (one
// that several rows of a pass go to counts once) and the bytes of their weights.
struct ExpertTraffic {
  uint64_t layers = 0, experts = 0, bytes = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  const ModelSpec& spec() const { return spec_; }
  const KvPlan& kv() const { return plan_; }
  ThreadPool& threads() const { return threads_; }
  virtual uint64_t weight_bytes() const = 0;
  // Of the matrices that a pass of one token reads; of its experts, the routed ones.
  virtual uint64_t weight_bytes_per_step() const = 0;
  virtual ExpertTraffic expert_traffic() const { return {}; }
  virtual uint64_t fingerprint() const = 0;
  virtual bool portable() const = 0;
  virtual int max_batch_tokens() const = 0;
  // Positions that tables were made for; longer sequences are refused.
  virtual int64_t max_positions() const { return spec_.max_positions; }

  // --- Page memory -------------------------------------------------------------------------------
  // Null: pages lie in host memory. A pool over it may be given page_budget() bytes.
  virtual PageMemory* page_memory() { return nullptr; }
  virtual uint64_t page_budget() const { return 0; }
  virtual std::optional<DeviceMemory> device_memory() const { return std::nullopt; }
  // Before a sequence's first pass on this device.
  virtual Status Admit(SequenceCache&) { return {}; }
  // Runs what sealing has queued. A pass that is given up needs it: pages are handed out again.
  virtual Status FlushPages() { return {}; }
  // Keys and values that were clamped, or not a number, when their page was sealed, of all
  // sequences since the start, where CacheUsage has none of it. Waits for the device.
  virtual Result<uint64_t> Saturated() { return uint64_t{0}; }
  // Bytes per second that a plain read of the device's memory reaches.
  virtual Result<double> MeasureReadBandwidth();

  // --- A pass ------------------------------------------------------------------------------------
  // Rows of BatchRows; the caches have room. `padded` > 0: generated tokens alone, for a recorded
  // step of that many rows, of which those beyond the items touch nothing.
  virtual Status BeginPass(std::span<const ForwardItem> items, int padded) = 0;
  virtual Status Embed() = 0;
  virtual Status Linear(const LinearOp& op) = 0;
  // The routed experts of a layer: norm of the stream, router, the chosen experts' feed-forward
  // parts, added to the stream by their weights.
  virtual Status Experts(int layer);
  // kQkv, row by row: norm of heads, RoPE, rotation; keys and values to their open pages. `slot`:
  // of the layer in the cache.
  virtual Status WriteKv(int layer, int slot) = 0;
  // Attention over the pages, to kAttended; gated where the layer has gates.
  virtual Status Attend(int layer, int slot) = 0;
  // Linear attention: from kQkv to kAttended, row by row through the states of their sequences,
  // which lie in the caches (SequenceCache::state). `slot`: of the layer among those with a state.
  virtual Status AdvanceState(int layer, int slot);
  // Before WriteKv: [rows, qkv width] to the host, q and k after norm and RoPE, not rotated. Waits.
  virtual Status ReadQkv(int layer, std::span<float> out) = 0;
  // Final norm and head for `count` of the rows whose logits are wanted, from the first-th on in
  // item order; in a padded pass, of all rows. To host memory, or null: where Sample finds them.
  virtual Status Logits(int first, int count, float* out) = 0;
  // Rows that one call of Logits takes.
  virtual int max_logit_rows() const = 0;
  virtual Status Synchronize() { return {}; }

  // --- Sampling on the device --------------------------------------------------------------------
  virtual bool CanSample() const { return false; }
  static constexpr int kFlights = 2;
  // Tokens from rows of the logits, without waiting; the next pass may take them
  // (ForwardItem::Sampled). Masks are copied before it returns.
  virtual Status Sample(int flight, std::span<const SampleParams> sampling,
                        std::span<const int32_t> rows);
  virtual Status Await(int flight, std::span<int32_t> ids);
  // Rows of the logits that the last pass left on the device.
  virtual Status ReadLogits(int row, int count, float* out);

  // --- Recorded steps ----------------------------------------------------------------------------
  // Rows of the largest one; 0: none are recorded.
  virtual int max_recorded_rows() const { return 0; }
  // Operations after BeginRecording are kept, not run.
  virtual Status BeginRecording();
  virtual Result<std::unique_ptr<Recording>> EndRecording();
  virtual Status Replay(const Recording& recording);

  // --- A cell read layer by layer ----------------------------------------------------------------
  virtual bool CanReadByLayer() const { return false; }
  virtual Result<std::unique_ptr<CellStream>> EmbedCell(std::span<const int32_t> tokens);
  // As BeginPass and Embed, for some rows of the cell in the layer that `append` is at. Logits are
  // of the last row.
  virtual Status BeginCellRows(CellStream& stream, LayeredAppend& append, int64_t first,
                               int64_t count);

 protected:
  Backend(const ModelSpec& spec, const KvPlan& plan, ThreadPool& threads)
      : spec_(spec), plan_(plan), threads_(threads) {}

  const ModelSpec spec_;
  const KvPlan& plan_;
  ThreadPool& threads_;
};

}  // namespace oscar
