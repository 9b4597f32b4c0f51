// Model: what engine, evaluation and calibration ask of a loaded decoder, wherever it runs
// (model/decoder.h is the one that is real). Forward runs any mix of prompt chunks and generated
// tokens of different sequences in one pass. One caller thread (the engine's) at a time.
//
// Sameness: the logits of a token depend on the tokens of its sequence, their positions and
// which of them were prompt; never on the chunk, the batch or the number of threads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "arch/spec.h"
#include "backend/batch.h"
#include "backend/kv_plan.h"
#include "backend/sample_params.h"
#include "cache/sequence_cache.h"
#include "oscar/status.h"

namespace oscar {

// Sees q and k after norm and RoPE, before rotation, and v in the model's own basis: what
// calibration measures. [tokens, heads, head_dim] of one item; called for each layer in turn.
using QkvTap = std::function<void(int layer, size_t item, std::span<const float> q,
                                  std::span<const float> k, std::span<const float> v)>;

// A cell of a prompt that is being read layer by layer (Model::StartCell). Holds pages of the
// sequence's pool and the rows' activations; dropping it gives the pages back and leaves the
// sequence as it was.
class CellRead {
 public:
  virtual ~CellRead() = default;
  virtual int64_t num_tokens() const = 0;
  virtual uint64_t bytes() const = 0;  // pages beside those of the sequence
};

class Model {
 public:
  virtual ~Model() = default;
  virtual const ModelSpec& spec() const = 0;
  virtual const KvPlan& kv() const = 0;
  virtual uint64_t weight_bytes() const = 0;
  virtual uint64_t fingerprint() const = 0;
  // Whether its bits are those of every device (BackendOptions::portable).
  virtual bool portable() const { return false; }

  // Seals what is due, appends the items' keys and values to their caches and writes logits
  // [sum of num_logits, vocab] in item order. On kResourceExhausted no cache has grown.
  virtual Status Forward(std::span<const ForwardItem> items, std::span<float> logits) = 0;
  // Where the model samples tokens itself (on its device), only ids come back: as Forward with at
  // most one row of logits per item, `sampling` and `ids` one per row. kUndecided leaves a row's
  // sample to the caller, who fetches its logits with ReadLogits before the next pass. At most
  // max_samples rows a pass; 0: the model does not sample.
  virtual int max_samples() const { return 0; }
  // `before_sample`, where given, is called when the pass is under way and its sample is not, to
  // fill the masks that `sampling` points to; an error of it is the pass's.
  using BeforeSample = std::function<Status()>;
  virtual Status ForwardAndSample(std::span<const ForwardItem> items,
                                  std::span<const SampleParams> sampling, std::span<int32_t> ids,
                                  const BeforeSample& before_sample = {});
  virtual Status ReadLogits(size_t row, std::span<float> logits);
  // Passes of generated tokens, one sample each, that are left running. Launch starts one and lets
  // the caches grow; Collect waits for the oldest and gives its ids. Two may be under way, the
  // tokens of the second being what the first samples (ForwardItem::Sampled); no other pass
  // meanwhile. Caches may be trimmed and dropped: what follows on the device comes after. The
  // logits of a pass are gone once the next is launched, so a row that stays undecided has to be
  // computed again. The `before_sample` of the second may Collect the first: its ids are what the
  // masks depend on.
  virtual bool CanRunAhead() const { return false; }
  virtual Status Launch(std::span<const ForwardItem> items, std::span<const SampleParams> sampling,
                        const BeforeSample& before_sample = {});
  virtual Status Collect(std::span<int32_t> ids);
  // Weights that a pass of one token reads.
  virtual uint64_t weight_bytes_per_step() const { return weight_bytes(); }
  // At most this many tokens in one Forward.
  virtual int max_batch_tokens() const = 0;

  // Reading a cell layer by layer instead of chunk by chunk: the same rows and logits, bit for bit,
  // with one layer of the cell in BF16 at a time (LayeredAppend). StartCell takes the next tokens
  // of a prompt, which lie in one cell; what it takes of the pool is LayeredAppend::CostOf. Other
  // passes may run until ContinueCell, which computes at most `row_layers` rows of one layer each,
  // says true: then the sequence has grown, what was due for sealing at its new length is sealed,
  // and `logits` [vocab], where not empty, are those of the last token.
  virtual bool CanReadByLayer() const { return false; }
  virtual Result<std::unique_ptr<CellRead>> StartCell(SequenceCache& cache,
                                                      std::span<const int32_t> tokens);
  virtual Result<bool> ContinueCell(CellRead& read, int64_t row_layers, std::span<float> logits);
  // Only where the plan does not rotate V (its basis would be another). Empty stops.
  virtual Status SetTap(QkvTap tap) = 0;
};

}  // namespace oscar
