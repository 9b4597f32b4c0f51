// Scheduler: the engine's state and one step of it. Decides which tokens of which sequences the
// next forward pass computes, makes room for them, runs the pass, samples tokens and hands them
// out. The rules (docs/engine-contract.md) are numbered there; tests name the numbers.
//
// Belongs to the engine thread. Requests come in through Enqueue and leave through their channels.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "engine/chunk_pacer.h"
#include "engine/event_channel.h"
#include "engine/pass_runner.h"
#include "engine/prefix_index.h"
#include "engine/prefix_store.h"
#include "engine/sampler.h"
#include "engine/service.h"
#include "engine/token_constraint.h"
#include "model/model.h"

namespace oscar {

// A request from admission queue to last token. `tokens` is the prompt and what was generated;
// the cache holds the first of them, in order.
struct Sequence {
  Sequence(EngineRequest engine_request, std::shared_ptr<EventChannel> events, int64_t max_tokens,
           const CacheConfig& config, PagePool& pool);

  EngineRequest request;
  std::shared_ptr<EventChannel> channel;
  uint64_t arrival = 0;
  int64_t limit;  // generated tokens, at most
  std::vector<int32_t> tokens;
  std::vector<uint64_t> hashes;  // of the full pages of `tokens`
  Sampler sampler;
  SequenceCache cache;
  bool started = false;      // kStarted was sent
  bool exact = true;         // its cache is what the request alone would have
  int64_t exact_tokens = 0;  // leading ones in the cache computed as a fresh prompt would
  int64_t cached_tokens = 0;
  bool samples_here = false;  // its next sample needs the logits
  std::unique_ptr<TokenConstraint> constraint;
  std::vector<uint32_t> mask;  // of its next sample, where it has a constraint
  bool mask_filled = false;
  Status mask_status;        // why it could not be filled
  Status constraint_status;  // what the constraint said to the last token it was told of
  int64_t constrained = 0;   // generated tokens that it was told of
  int preemptions = 0;
  int64_t published_open = 0, published_sealed = 0;  // pages in the prefix index
  int64_t branch = 0;  // where earlier sequences left its prompt, and no snapshot is
  // Where its text diverges from others, in tokens, whole pages: what layers with a window see
  // there is kept once it gets there; 0: nowhere.
  int64_t diverges_at = 0;
  std::vector<GeneratedToken> prompt_logprobs;
  // Its prompt is read layer by layer, for which there is room, rather than chunk by chunk.
  bool by_layer = false;
  std::unique_ptr<CellRead> read;  // the cell being read so; goes before the cache

  // Who comes first: lower is served earlier and preempted later.
  std::pair<int64_t, uint64_t> rank() const { return {request.priority, arrival}; }
  // Tells the constraint of the generated token that comes next, once.
  void Constrain(int32_t token);
  int64_t prompt_size() const { return static_cast<int64_t>(request.prompt.size()); }
  int64_t size() const { return static_cast<int64_t>(tokens.size()); }
  int64_t generated() const { return size() - prompt_size(); }
  bool reading_prompt() const { return cache.length() < prompt_size(); }
  // The most tokens its cache will ever hold: the last one sampled is not computed.
  int64_t final_length() const { return prompt_size() + limit - 1; }
  bool WantsPromptLogprobs() const {
    return request.want_prompt_logprobs &&
           static_cast<int64_t>(prompt_logprobs.size()) < prompt_size() - 1;
  }
  // Where a snapshot of its state is kept: the first length after `at`. Cells end there,
  // its prompt's last whole page does, or others left it there. REQUIRES: at < size().
  int64_t NextSnapshot(int64_t at) const;
  bool WantsSnapshot() const {
    return cache.length() > 0 && NextSnapshot(cache.length() - 1) == cache.length();
  }
  // What is left of its prompt in the cell that it has got to.
  std::span<const int32_t> RestOfCell();
  PageKey key() const { return {request.cache_salt, tokens, hashes}; }
  // Frees its pages.
  void DropCache() {
    read.reset();
    cache.Trim(0);
    exact_tokens = 0;
  }
};

class Scheduler {
 public:
  Scheduler(Model& model, PagePool& pool, ThreadPool& threads, const EngineServiceOptions& options);

  void Enqueue(std::unique_ptr<Sequence> sequence);
  bool idle() const { return running_.empty() && waiting_.empty(); }
  int64_t num_waiting() const { return static_cast<int64_t>(waiting_.size()); }
  // One forward pass, where there is anything to do, or the end of the one that was left running.
  // An error (of the model; never of memory) leaves every request as it was; the caller fails them
  // with FailAll.
  Status Step();
  void FailAll(const Status& status);

  // The numbers that are kept anyway, and those that need a walk over all pages.
  void CountInto(EngineStats* stats) const;
  void MeasureInto(EngineStats* stats) const;
  std::vector<SequenceInfo> Describe() const;

 private:
  // A sequence's share of the next pass.
  struct Work {
    Sequence* sequence;
    int count;
    bool is_prompt;
    int num_logits;
    // Tokens sampled before a preemption are computed again, not sampled again.
    static Work Decode(Sequence& sequence) {
      return {&sequence, 1, false, sequence.cache.length() + 1 == sequence.size() ? 1 : 0};
    }
  };

  void OpenStore();
  void ReapCancelled();
  void Plan();
  void PlanDecodes(int cap);
  void PlanPrompts(int left);
  int PlanPrefill(Sequence& sequence, int budget);
  // The one that was admitted; null: none fits.
  Sequence* TryAdmit();
  void Queue(std::unique_ptr<Sequence> sequence);
  bool FitsBeside(Sequence& sequence);
  bool WaitsForPrefix(const Sequence& sequence, int64_t hit);
  uint64_t FutureBytes(const Sequence& sequence) const;
  int64_t BatchBytes() const;
  bool MakeRoom();
  void FreeNewest();
  bool Rewind(Sequence& sequence);
  void Preempt(size_t index);
  void DropWork(const Sequence& sequence);
  Status RunPass();
  Status RunCell();
  std::optional<SampleParams> DeviceSample(const Sequence& sequence, int64_t ahead) const;
  Status Land();
  std::vector<PassRunner::Ahead> PlanAhead() const;
  void Leave(Sequence& sequence);
  void Drain();
  int PromptTokens() const;
  void Absorb(bool landed);
  void TakePromptLogprobs(const Work& work, std::span<const float> logits);
  void FillMask(Sequence& sequence) const;
  static Status Constrained(Sequence& sequence, int32_t token);
  void FillMasksAfter(std::span<const PassRunner::Ahead> ahead, std::span<const int32_t> ids) const;
  void SampleToken(Sequence& sequence, size_t row, GeneratedToken* sampled);
  void Start(Sequence& sequence);
  void Publish(Sequence& sequence);
  void KeepSnapshot(Sequence& sequence);
  bool DropSnapshots();
  int64_t SoonPublished(const Sequence& other, int64_t common) const;
  void Finish(Sequence& sequence, FinishReason reason);
  void FailRunning(size_t index, const Status& status);
  void RemoveEnded();

  Model& model_;
  PagePool& pool_;
  ThreadPool& threads_;
  const EngineServiceOptions options_;
  const CacheConfig& config_;
  std::unique_ptr<PrefixStore> store_;
  PrefixIndex index_;
  std::vector<std::unique_ptr<Sequence>> running_;  // by rank
  std::deque<std::unique_ptr<Sequence>>
      waiting_;  // by rank; preempted ones are the oldest of theirs
  std::vector<Work> batch_;
  PassRunner pass_;
  ChunkPacer pacer_;
  // Whose the rows of the pass in flight are; no sequence: it has ended meanwhile. Their caches
  // have grown; what is sampled is not known yet.
  std::vector<Work> flight_;
  Sequence* cell_ = nullptr;  // whose prompt this step reads by layers, beside the batch
  int cell_tokens_ = 0;       // the share of the step that is for it
  std::vector<Sequence*> ended_;
  uint64_t next_arrival_ = 0;
  // Rank of the decoder whose turn it is when not all fit.
  std::pair<int64_t, uint64_t> next_decoder_{std::numeric_limits<int64_t>::min(), 0};
  EngineStats counts_;
};

}  // namespace oscar
