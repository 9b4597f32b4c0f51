#include "engine/scheduler.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>

#include "base/check.h"
#include "base/log.h"
#include "cache/layered_append.h"
#include "engine/page_budget.h"
#include "engine/prompt_reader.h"
#include "engine/token_mask.h"

namespace oscar {
namespace {

// Tokens that a newly admitted sequence may generate before it can run out of room; doubled each
// time it is preempted, so that it does not come back only to be preempted again.
constexpr int64_t kHeadroom = kPageTokens;
constexpr int kMaxHeadroomDoublings = 10;
// Of a pass with prompts to read, one part in this many is theirs even if all the rest generate.
constexpr int kPrefillShare = 8;
// Prompts that are read beside one another; more are admitted where a pass has tokens for them.
constexpr int kMostReaders = 8;
// Of the tokens for prompts, one part in this many is for those much shorter than the first.
constexpr int kShortShare = 2;
// Logits of prompt tokens held at once, in numbers: 64 MiB.
constexpr int64_t kMaxPromptLogits = int64_t{16} << 20;

}  // namespace

Sequence::Sequence(EngineRequest engine_request, std::shared_ptr<EventChannel> events,
                   int64_t max_tokens, const CacheConfig& config, PagePool& pool)
    : request(std::move(engine_request)),
      channel(std::move(events)),
      limit(max_tokens),
      tokens(request.prompt),
      sampler(request.sampling),
      cache(config, pool) {
  ExtendPageHashes(request.cache_salt, tokens, &hashes);
  sampler.ObservePrompt(request.prompt);
  if (request.make_constraint) {
    constraint = request.make_constraint();
    request.make_constraint = nullptr;
  }
}

void Sequence::Constrain(int32_t token) {
  if (constrained > generated()) return;
  ++constrained;
  constraint_status = constraint->Accept(token);
  mask_filled = false;
  mask_status = {};
}

int64_t Sequence::NextSnapshot(int64_t at) const {
  const int64_t cell = cache.config().cell;
  int64_t next = (at / cell + 1) * cell;
  for (const int64_t point : {(prompt_size() - 1) / kPageTokens * kPageTokens, branch}) {
    if (point > at) next = std::min(next, point);
  }
  return next;
}

std::span<const int32_t> Sequence::RestOfCell() {
  return NextChunk(cache, request.prompt, prompt_size()).tokens;
}

Scheduler::Scheduler(Model& model, PagePool& pool, ThreadPool& threads,
                     const EngineServiceOptions& options)
    : model_(model),
      pool_(pool),
      threads_(threads),
      options_(options),
      config_(model.kv().cache()),
      index_(config_, pool, options.deterministic,
             std::min(options.snapshot_bytes.value_or(pool.budget() / 4), pool.budget())),
      pass_(model),
      pacer_(options.target_pass_seconds, std::min(options.step_tokens, model.max_batch_tokens())) {
  OSCAR_CHECK(options.max_running > 0 && options.step_tokens > 0);
  if (options.prefix_cache && !options.prefix_dir.empty()) OpenStore();
}

void Scheduler::OpenStore() {
  if (config_.has_state()) {
    LogWarning(
        "{}: not used: prefix pages of {} are of no use without its recurrent states, whose "
        "snapshots are not written to disk",
        options_.prefix_dir, model_.spec().architecture);
    return;
  }
  if (options_.deterministic || config_.pages_together > 1) {
    LogWarning(
        "{}: not used: prefix pages survive a restart neither with --deterministic nor "
        "with methods that seal several pages together",
        options_.prefix_dir);
    return;
  }
  auto store = PrefixStore::Open(
      options_.prefix_dir,
      {.format = {PrefixStoreKey(model_), config_.open.bytes(), config_.sealed.bytes()},
       .max_bytes = options_.prefix_dir_bytes});
  if (!store.has_value()) {
    LogWarning("prefix pages will not survive a restart: {}", store.error().message());
    return;
  }
  store_ = std::move(*store);
  index_.AttachStore(store_.get());
  LogInfo("{}: {} prefix pages taken up", options_.prefix_dir, index_.num_nodes());
}

void Scheduler::Enqueue(std::unique_ptr<Sequence> sequence) {
  sequence->arrival = next_arrival_++;
  if (sequence->constraint != nullptr) sequence->mask.resize(MaskWords(model_.spec().vocab_size));
  Queue(std::move(sequence));
}

void Scheduler::Queue(std::unique_ptr<Sequence> sequence) {
  const auto at = std::ranges::upper_bound(waiting_, sequence->rank(), {},
                                           [](const auto& s) { return s->rank(); });
  waiting_.insert(at, std::move(sequence));
}

void Scheduler::Finish(Sequence& sequence, FinishReason reason) {
  sequence.read.reset();
  if (options_.prefix_cache) {
    index_.Insert(sequence.key(), sequence.cache, sequence.exact_tokens, PrefixIndex::Keep::kAll);
  }
  sequence.cache.Trim(0);
  sequence.channel->Push({.kind = EngineEvent::Kind::kFinished, .reason = reason});
  counts_.cancelled += reason == FinishReason::kCancelled ? 1 : 0;
  ended_.push_back(&sequence);
}

void Scheduler::RemoveEnded() {
  const auto has_ended = [&](const std::unique_ptr<Sequence>& sequence) {
    return std::ranges::find(ended_, sequence.get()) != ended_.end();
  };
  if (ended_.empty()) return;
  std::erase_if(running_, has_ended);
  std::erase_if(waiting_, has_ended);
  ended_.clear();
}

void Scheduler::ReapCancelled() {
  for (const auto& sequence : running_) {
    if (sequence->channel->cancelled()) Finish(*sequence, FinishReason::kCancelled);
  }
  for (const auto& sequence : waiting_) {
    if (sequence->channel->cancelled()) Finish(*sequence, FinishReason::kCancelled);
  }
  RemoveEnded();
}

void Scheduler::FailAll(const Status& status) {
  Drain();
  const EngineEvent event{.kind = EngineEvent::Kind::kFailed, .status = status};
  for (const auto& sequence : running_) sequence->channel->Push(event);
  for (const auto& sequence : waiting_) sequence->channel->Push(event);
  batch_.clear();
  cell_ = nullptr;
  running_.clear();
  waiting_.clear();
}

// --- Which tokens the next pass computes ---------------------------------------------------------

void Scheduler::PlanDecodes(int cap) {
  std::vector<Sequence*> decoders;
  for (const auto& sequence : running_) {
    if (!sequence->reading_prompt()) decoders.push_back(sequence.get());
  }
  // When not all of them fit, they take turns, whatever their priority: who has begun continues.
  size_t first = 0;
  if (static_cast<int>(decoders.size()) > cap) {
    while (first < decoders.size() && decoders[first]->rank() < next_decoder_) ++first;
  }
  const size_t count = std::min(decoders.size(), static_cast<size_t>(cap));
  for (size_t i = 0; i < count; ++i) {
    Sequence& sequence = *decoders[(first + i) % decoders.size()];
    batch_.push_back(Work::Decode(sequence));
    next_decoder_ = {sequence.request.priority, sequence.arrival + 1};
  }
}

int Scheduler::PlanPrefill(Sequence& sequence, int budget) {
  if (sequence.by_layer) {
    if (cell_ != nullptr) return 0;  // one at a time
    cell_ = &sequence;
    cell_tokens_ = budget;
    return budget;
  }
  int64_t max_tokens = budget;
  if (config_.has_state() && options_.prefix_cache) {
    const int64_t at = sequence.cache.length();
    max_tokens = std::min(max_tokens, sequence.NextSnapshot(at) - at);
  }
  if (config_.has_state()) {
    // Devices take prompts through states in tiles on the grid of pages: a cut elsewhere makes two
    // of one, and shows in the last bits.
    const int64_t at = sequence.cache.length(), end = at + max_tokens;
    const int64_t whole = end / kPageTokens * kPageTokens;
    if (whole > at && end < sequence.prompt_size()) max_tokens = whole - at;
  }
  int64_t num_logits = sequence.generated() == 0 ? 1 : 0;
  if (sequence.WantsPromptLogprobs()) {
    max_tokens =
        std::min(max_tokens, std::max<int64_t>(1, kMaxPromptLogits / model_.spec().vocab_size));
    num_logits = sequence.prompt_size() - static_cast<int64_t>(sequence.prompt_logprobs.size());
  }
  const ForwardItem chunk =
      NextChunk(sequence.cache, sequence.request.prompt, max_tokens, num_logits);
  const auto count = static_cast<int>(chunk.tokens.size());
  batch_.push_back({&sequence, count, /*is_prompt=*/true, chunk.num_logits});
  return count;
}

// Divides what a pass has for prompts. The first in rank gets at least half, so that it ends; the
// rest is for those of its priority that have at most half as much left to read, the shortest
// first, so that a short prompt need not wait for long ones. (It comes sooner by more than the
// first comes later; prompts of one length would only delay one another.) What these leave goes to
// all others.
void Scheduler::PlanPrompts(int left) {
  std::vector<Sequence*> readers;
  for (const auto& sequence : running_) {
    if (sequence->reading_prompt()) readers.push_back(sequence.get());
  }
  const auto left_of = [](const Sequence* s) { return s->prompt_size() - s->cache.length(); };
  for (size_t begin = 0, end = 0; begin < readers.size() && left > 0; begin = end) {
    while (end < readers.size() &&
           readers[end]->request.priority == readers[begin]->request.priority) {
      ++end;
    }
    const std::span others(readers.begin() + static_cast<ptrdiff_t>(begin) + 1,
                           readers.begin() + static_cast<ptrdiff_t>(end));
    std::ranges::stable_sort(others, {}, left_of);
    int64_t wanted = 0;
    for (const Sequence* other : others) {
      if (2 * left_of(other) <= left_of(readers[begin])) wanted += left_of(other);
    }
    const int others_share = static_cast<int>(std::min<int64_t>(wanted, left / kShortShare));
    left -= PlanPrefill(*readers[begin], left - others_share);
    for (Sequence* other : others) {
      if (left > 0) left -= PlanPrefill(*other, left);
    }
  }
}

void Scheduler::Plan() {
  batch_.clear();
  cell_ = nullptr;
  const int budget = std::min(options_.step_tokens, model_.max_batch_tokens());
  const bool may_admit =
      !waiting_.empty() && static_cast<int>(running_.size()) < options_.max_running;
  const bool has_prompts =
      may_admit || std::ranges::any_of(running_, [](const auto& s) { return s->reading_prompt(); });
  int reserved = has_prompts ? std::max(1, budget / kPrefillShare) : 0;
  if (reserved == budget && counts_.steps % 2 == 0) reserved = 0;  // a pass of one token: in turn
  PlanDecodes(budget - reserved);
  int left = budget - static_cast<int>(batch_.size());
  if (!batch_.empty()) left = std::min(left, pacer_.limit());  // somebody waits for a token
  int64_t wanted = 0;
  int readers = 0;
  const auto count = [&](const Sequence& sequence) {
    wanted += sequence.prompt_size() - sequence.cache.length();
    ++readers;
  };
  for (const auto& sequence : running_) {
    if (sequence->reading_prompt()) count(*sequence);
  }
  while (left > 0 && (wanted < left || readers < kMostReaders) && !waiting_.empty() &&
         static_cast<int>(running_.size()) < options_.max_running) {
    Sequence* const admitted = TryAdmit();
    if (admitted == nullptr) break;
    if (admitted->reading_prompt()) {
      count(*admitted);
    } else {
      // Resumed with its whole prompt found: its next token rides along.
      batch_.push_back(Work::Decode(*admitted));
      --left;
    }
  }
  PlanPrompts(left);
}

// Of the pass that is planned.
int Scheduler::PromptTokens() const {
  int tokens = cell_ != nullptr ? cell_tokens_ : 0;
  for (const Work& work : batch_)
    tokens += work.is_prompt && work.sequence != cell_ ? work.count : 0;
  return tokens;
}

// --- Admission -----------------------------------------------------------------------------------

uint64_t Scheduler::FutureBytes(const Sequence& sequence) const {
  const SequenceCache& cache = sequence.cache;
  const int64_t headroom = kHeadroom << std::min(sequence.preemptions, kMaxHeadroomDoublings);
  const int64_t known = std::max(sequence.prompt_size(), sequence.size());
  const int64_t horizon = std::min(known + headroom, sequence.final_length());
  const uint64_t peak = PeakBytes(config_, cache.length(), cache.sealed_end(),
                                  sequence.prompt_size(), std::max(horizon, known - 1),
                                  sequence.by_layer ? Reading::kByLayer : Reading::kByChunk);
  // Pages before it will be sealed by then.
  const int64_t sealed_end =
      SequenceCache::SealedEndAt(config_, std::max(horizon, known) - config_.recent);
  uint64_t held = sequence.read != nullptr ? sequence.read->bytes() : 0, uncredited = 0;
  for (int64_t j = 0; j < cache.num_pages(); ++j) {
    const bool sealed = cache.is_sealed(j);
    held += sealed ? config_.sealed.bytes() : config_.open.bytes();
    // Sealing a shared page, or writing to it, frees nothing; one that stays as it is costs
    // nothing.
    const bool partial = (j + 1) * kPageTokens > cache.length();
    const bool seals = j >= config_.sink / kPageTokens && j < sealed_end;
    if (!sealed && cache.page(j).shared() && (partial || seals)) {
      uncredited += config_.open.bytes();
    }
  }
  if (cache.state()) {
    held += config_.state.bytes();
    if (cache.state().shared()) uncredited += config_.state.bytes();
  }
  return (peak > held ? peak - held : 0) + uncredited;
}

// How much of a running sequence's first `common` tokens the index will have when its prompt has
// been read.
int64_t Scheduler::SoonPublished(const Sequence& other, int64_t common) const {
  const int64_t prompt = other.prompt_size();
  const int64_t soon = std::min(
      common, options_.deterministic
                  ? prompt
                  : SequenceCache::SealedEndAt(config_, prompt - config_.recent) * kPageTokens);
  if (!config_.has_state()) return soon;
  int64_t snapshot = 0;
  while (other.NextSnapshot(snapshot) <= soon) snapshot = other.NextSnapshot(snapshot);
  return snapshot;
}

// Whether a running sequence is about to publish pages that `sequence` would otherwise compute too;
// of what layers with a window see, it is asked to.
bool Scheduler::WaitsForPrefix(const Sequence& sequence, int64_t hit) {
  for (const auto& other : running_) {
    // Pages appear while the prompt is read, and at the first pass after it.
    if (other->cache.length() > other->prompt_size()) continue;
    if (other->request.cache_salt != sequence.request.cache_salt) continue;
    const auto [mine, theirs] = std::ranges::mismatch(sequence.hashes, other->hashes);
    const int64_t common = std::min<int64_t>((mine - sequence.hashes.begin()) * kPageTokens,
                                             sequence.prompt_size() - 1);
    int64_t soon = SoonPublished(*other, common);
    if (config_.window > 0 && !options_.deterministic) {
      // Sealed pages alone are no hit: the other one keeps what is seen from there, if it can.
      const int64_t at = common / kPageTokens * kPageTokens;
      const auto is_sealed = [&](int64_t j) {
        return j < other->cache.num_pages() && other->cache.is_sealed(j);
      };
      if (other->diverges_at == 0 && LengthWithWindow(config_, at, is_sealed) == at) {
        other->diverges_at = at;
      }
      soon = other->diverges_at <= at ? other->diverges_at : 0;
      Publish(*other);  // it may be past that already
    }
    if (soon >= hit + kPageTokens) return true;
  }
  return false;
}

// Whether there is memory for it beside those that run; chooses how its prompt is read. Layer by
// layer takes less memory but a pass of its own, so only where chunks do not fit.
bool Scheduler::FitsBeside(Sequence& sequence) {
  const uint64_t free = pool_.budget() - pool_.bytes_in_use();
  uint64_t others = 0;
  for (const auto& other : running_) others += FutureBytes(*other);
  const auto fits = [&] {
    const uint64_t needed = others + FutureBytes(sequence);
    return needed <= free || index_.EvictableBytes(needed - free) >= needed - free;
  };
  sequence.by_layer = false;
  if (fits()) return true;
  sequence.by_layer = model_.CanReadByLayer() && config_.seals() &&
                      !sequence.WantsPromptLogprobs() && sequence.reading_prompt();
  if (sequence.by_layer && fits()) return true;
  if (!running_.empty()) return false;
  // The last to leave an empty engine always fits: Submit has checked. Where that counted on
  // layers, open pages that were found may be in the way: then it starts afresh.
  const int64_t prompt = sequence.prompt_size();
  sequence.by_layer = sequence.by_layer && PeakBytes(config_, prompt, prompt) > pool_.budget();
  if (sequence.by_layer) sequence.DropCache();
  return true;
}

Sequence* Scheduler::TryAdmit() {
  Sequence& sequence = *waiting_.front();
  const bool resumed = sequence.preemptions > 0;
  if (options_.prefix_cache && !sequence.WantsPromptLogprobs()) {
    // The last token is computed for its logits. What must equal an earlier run bit for bit may
    // take only the prompt, and only where it is exact.
    const bool exact_only = options_.deterministic || (resumed && sequence.exact);
    int64_t limit = sequence.size() - 1;
    if (exact_only) limit = std::min(limit, sequence.prompt_size());
    PrefixIndex::Hit hit = index_.Match(sequence.key(), limit, exact_only);
    const int64_t length = hit.cache.length();
    if (!running_.empty() && !resumed && WaitsForPrefix(sequence, length)) return nullptr;
    sequence.diverges_at =
        hit.without_window > length ? hit.without_window / kPageTokens * kPageTokens : 0;
    sequence.cache = std::move(hit.cache);
    sequence.branch = hit.without_state;
    sequence.exact_tokens = hit.exact_tokens;
    if (!resumed) sequence.exact = hit.exact;
    if (resumed && !hit.exact) sequence.exact = false;
  }
  if (!FitsBeside(sequence)) {
    sequence.DropCache();
    return nullptr;
  }
  sequence.published_open = sequence.published_sealed = 0;
  if (!resumed) {
    sequence.cached_tokens = sequence.cache.length();
    counts_.prompt_tokens += static_cast<uint64_t>(sequence.prompt_size());
    counts_.cached_prompt_tokens += static_cast<uint64_t>(sequence.cached_tokens);
    if (options_.prefix_cache) {
      ++counts_.prefix_queries;
      counts_.prefix_hits += sequence.cached_tokens > 0 ? 1 : 0;
    }
  }
  if (!sequence.started && !sequence.WantsPromptLogprobs()) Start(sequence);
  const auto at = std::ranges::upper_bound(running_, sequence.rank(), {},
                                           [](const auto& s) { return s->rank(); });
  running_.insert(at, std::move(waiting_.front()));
  waiting_.pop_front();
  return &sequence;
}

void Scheduler::Start(Sequence& sequence) {
  sequence.started = true;
  sequence.request.want_prompt_logprobs = false;
  sequence.channel->Push({.kind = EngineEvent::Kind::kStarted,
                          .cached_tokens = sequence.cached_tokens,
                          .prompt_logprobs = std::exchange(sequence.prompt_logprobs, {})});
}

// --- Room ----------------------------------------------------------------------------------------

int64_t Scheduler::BatchBytes() const {
  int64_t in_use = 0, peak = 0, reserve = 0;
  if (cell_ != nullptr && cell_->read == nullptr) {  // its pages are taken first
    const AppendCost cost =
        LayeredAppend::CostOf(cell_->cache, static_cast<int64_t>(cell_->RestOfCell().size()));
    peak = cost.seal_peak;
    in_use = cost.seal_net + cost.reserve;
  }
  for (const Work& work : batch_) {
    const AppendCost cost = work.sequence->cache.CostOf(work.count, work.is_prompt);
    peak = std::max(peak, in_use + cost.seal_peak);
    in_use += cost.seal_net;
    reserve += cost.reserve;
  }
  return std::max(peak, in_use + reserve);
}

void Scheduler::DropWork(const Sequence& sequence) {
  std::erase_if(batch_, [&](const Work& work) { return work.sequence == &sequence; });
  if (cell_ == &sequence) cell_ = nullptr;
}

// A prompt can give back its newest page and be read again from there, as long as nothing is sealed
// that would not have been sealed at that length.
bool Scheduler::Rewind(Sequence& sequence) {
  if (sequence.read != nullptr) {
    sequence.read.reset();
    return true;
  }
  const int64_t length = sequence.cache.length();
  if (!sequence.reading_prompt() || length <= kPageTokens || config_.has_state()) return false;
  const int64_t target = (length - 1) / kPageTokens * kPageTokens;
  const int64_t cell_start = target / config_.cell * config_.cell;
  if (sequence.cache.sealed_end() >
      SequenceCache::SealedEndAt(config_, cell_start - config_.recent)) {
    return false;
  }
  sequence.cache.Trim(target);
  sequence.exact_tokens = std::min(sequence.exact_tokens, target);
  sequence.published_open = std::min(sequence.published_open, target / kPageTokens);
  return true;
}

void Scheduler::Preempt(size_t index) {
  Sequence& sequence = *running_[index];
  if (options_.prefix_cache) {
    index_.Insert(sequence.key(), sequence.cache, sequence.exact_tokens,
                  PrefixIndex::Keep::kImmutable);
  }
  sequence.DropCache();
  ++sequence.preemptions;
  ++counts_.preemptions;
  std::unique_ptr<Sequence> owned = std::move(running_[index]);
  running_.erase(running_.begin() + static_cast<ptrdiff_t>(index));
  Queue(std::move(owned));
}

void Scheduler::FreeNewest() {
  const size_t newest = running_.size() - 1;
  DropWork(*running_[newest]);
  if (!Rewind(*running_[newest])) Preempt(newest);
}

bool Scheduler::MakeRoom() {
  while (!batch_.empty() || cell_ != nullptr) {
    const int64_t bytes = BatchBytes();
    if (bytes <= 0 || index_.EvictFor(static_cast<uint64_t>(bytes))) return true;
    if (DropSnapshots() || index_.ReleaseShared()) continue;
    // Prompts can wait; a generated token goes before any of them.
    if (!batch_.empty() && cell_ != nullptr && cell_->read == nullptr) {
      cell_ = nullptr;
    } else if (batch_.size() > 1 && batch_.back().is_prompt) {
      batch_.pop_back();
    } else if (running_.size() > 1) {
      FreeNewest();
    } else {
      return false;
    }
  }
  return true;
}

// --- The pass ------------------------------------------------------------------------------------

Status Scheduler::RunCell() {
  Sequence& sequence = *cell_;
  // The share of a pass in rows of single layers.
  const int64_t row_layers = int64_t{cell_tokens_} * model_.spec().num_layers();
  const int64_t count = sequence.read->num_tokens();
  const bool samples = sequence.cache.length() + count == sequence.size();
  OSCAR_ASSIGN_OR_RETURN(const bool done, pass_.ContinueCell(*sequence.read, row_layers, samples));
  if (!done) return {};
  sequence.read.reset();
  ++counts_.cells_by_layer;
  batch_.push_back({&sequence, static_cast<int>(count), /*is_prompt=*/true, samples ? 1 : 0});
  return {};
}

Status Scheduler::RunPass() {
  if (cell_ != nullptr && cell_->read == nullptr) {
    OSCAR_ASSIGN_OR_RETURN(cell_->read, model_.StartCell(cell_->cache, cell_->RestOfCell()));
  }
  std::vector<ForwardItem> items;
  std::vector<std::optional<SampleParams>> sampling;
  items.reserve(batch_.size());
  sampling.reserve(batch_.size());
  for (const Work& work : batch_) {
    Sequence& sequence = *work.sequence;
    const auto at = static_cast<size_t>(sequence.cache.length());
    items.push_back({&sequence.cache,
                     std::span(sequence.tokens).subspan(at, static_cast<size_t>(work.count)),
                     work.is_prompt, work.num_logits});
    sampling.push_back(work.num_logits > 0 ? DeviceSample(sequence, 0) : std::nullopt);
  }
  std::vector<Sequence*> masked;
  for (size_t i = 0; i < batch_.size(); ++i) {
    if (sampling[i].has_value() && sampling[i]->mask != nullptr) {
      masked.push_back(batch_[i].sequence);
    }
  }
  Model::BeforeSample fill_masks;
  if (!masked.empty()) {
    fill_masks = [&] {
      threads_.ParallelFor(static_cast<int64_t>(masked.size()),
                           [&](int64_t i, int) { FillMask(*masked[static_cast<size_t>(i)]); });
      return Status();
    };
  }
  OSCAR_RETURN_IF_ERROR(pass_.Run(items, sampling, fill_masks));
  if (pass_.in_flight()) flight_ = std::exchange(batch_, {});
  return cell_ != nullptr ? RunCell() : Status{};
}

// Who takes part in the pass after the one in flight: nobody unless that pass would be the same
// whatever is being sampled now, so no other may be waiting to be planned for.
std::vector<PassRunner::Ahead> Scheduler::PlanAhead() const {
  if (!waiting_.empty() && static_cast<int>(running_.size()) < options_.max_running) return {};
  const auto flying = static_cast<size_t>(
      std::ranges::count_if(flight_, [](const Work& work) { return work.sequence != nullptr; }));
  if (flying != running_.size()) return {};
  std::vector<PassRunner::Ahead> ahead;
  for (size_t row = 0; row < flight_.size(); ++row) {
    if (flight_[row].sequence == nullptr) continue;
    const Sequence& sequence = *flight_[row].sequence;
    if (sequence.channel->cancelled()) return {};
    if (sequence.generated() + 1 >= sequence.limit) continue;  // ends with what is being sampled
    const std::optional<SampleParams> sample = DeviceSample(sequence, 1);
    if (!sample.has_value()) return {};
    ahead.push_back({row, *sample});
  }
  return ahead;
}

// Ends the pass in flight, after launching the next one where that is possible.
Status Scheduler::Land() {
  for (const Work& work : flight_) {
    if (work.sequence != nullptr) Publish(*work.sequence);
  }
  const std::vector<PassRunner::Ahead> ahead = PlanAhead();
  PassRunner::FillMasks fill_masks;
  if (std::ranges::any_of(ahead, [](const auto& next) { return next.sample.mask != nullptr; })) {
    fill_masks = [&](std::span<const int32_t> ids) { FillMasksAfter(ahead, ids); };
  }
  OSCAR_RETURN_IF_ERROR(pass_.Land(ahead, fill_masks));
  batch_ = std::exchange(flight_, {});
  if (pass_.in_flight()) {
    for (const PassRunner::Ahead& next : ahead) flight_.push_back(batch_[next.row]);
  }
  ++counts_.steps;
  Absorb(/*landed=*/true);
  if (!pass_.wanted()) Drain();
  return {};
}

// Takes a sequence out of the pass in flight: what that computed for it never was.
void Scheduler::Leave(Sequence& sequence) {
  pass_.Leave(sequence.cache);
  for (Work& work : flight_) {
    if (work.sequence == &sequence) work.sequence = nullptr;
  }
}

// Waits for what is in flight and forgets it.
void Scheduler::Drain() {
  [[maybe_unused]] const Status ignored = pass_.Drain();
  flight_.clear();
}

Status Scheduler::Step() {
  if (pass_.in_flight()) return Land();
  const auto start = std::chrono::steady_clock::now();
  int prompt_tokens = 0;
  ReapCancelled();
  Plan();
  while (true) {
    const bool fits = MakeRoom();
    if (batch_.empty() && cell_ == nullptr) return {};
    prompt_tokens = PromptTokens();
    Status status =
        fits ? RunPass()
             : ResourceExhausted(fmt::format("a pass needs {} bytes of cache, {} of {} are in use",
                                             BatchBytes(), pool_.bytes_in_use(), pool_.budget()));
    if (status.ok()) break;
    if (status.code() != StatusCode::kResourceExhausted) return status;
    // By the accounts it fits, so the system itself is out of memory: give back what can be.
    LogWarning("cache pages: {}", status.message());
    if (index_.num_nodes() > 0) {
      index_.Clear();
    } else if (running_.size() > 1) {
      FreeNewest();
    } else {
      FailRunning(0, status);
      return {};
    }
  }
  if (pass_.in_flight()) return {};  // counted when it lands
  ++counts_.steps;
  Absorb(/*landed=*/false);
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  pacer_.Observe(prompt_tokens, taken.count());
  return {};
}

void Scheduler::FailRunning(size_t index, const Status& status) {
  running_[index]->channel->Push({.kind = EngineEvent::Kind::kFailed, .status = status});
  running_.erase(running_.begin() + static_cast<ptrdiff_t>(index));
  batch_.clear();
  cell_ = nullptr;
}

// What the pass of batch_ came to. A landed one was published before, and its caches may be a token
// ahead.
void Scheduler::Absorb(bool landed) {
  struct Sampled {
    Sequence* sequence;
    size_t row;
    GeneratedToken token;
  };
  std::vector<Sampled> sampled_tokens;
  size_t num_tokens = cell_ != nullptr ? static_cast<size_t>(cell_tokens_) : 0;
  for (size_t row = 0; row < batch_.size(); ++row) {
    const Work& work = batch_[row];
    if (work.sequence == nullptr) continue;  // it ended before the pass did
    Sequence& sequence = *work.sequence;
    if (pass_.id(row) == PassRunner::kRecompute) {
      Leave(sequence);
      sequence.samples_here = true;
      continue;
    }
    // A cell counts in each step by its share.
    if (work.sequence != cell_) num_tokens += static_cast<size_t>(work.count);
    if (work.is_prompt && sequence.exact) sequence.exact_tokens = sequence.cache.length();
    if (work.is_prompt && sequence.WantsPromptLogprobs())
      TakePromptLogprobs(work, pass_.logits(row));
    if (landed || sequence.cache.length() == sequence.size()) {
      sampled_tokens.push_back({&sequence, row, {}});
    }
    if (!landed) {
      if (config_.has_state()) KeepSnapshot(sequence);
      Publish(sequence);
    }
  }
  counts_.batch_tokens.Observe(num_tokens);
  // Each sampler belongs to one sequence, so who samples changes nothing.
  threads_.ParallelFor(static_cast<int64_t>(sampled_tokens.size()), [&](int64_t i, int) {
    Sampled& sampled = sampled_tokens[static_cast<size_t>(i)];
    SampleToken(*sampled.sequence, sampled.row, &sampled.token);
  });
  for (Sampled& sampled : sampled_tokens) {
    Sequence& sequence = *sampled.sequence;
    if (!sequence.started) Start(sequence);
    const int32_t token = sampled.token.token;
    if (token < 0) {
      Leave(sequence);
      sequence.channel->Push({.kind = EngineEvent::Kind::kFailed,
                              .status = token == kNoTokenLeft ? NoTokenLeft(sequence.generated())
                                                              : NotFinite(sequence.size())});
      ended_.push_back(&sequence);
      continue;
    }
    if (const Status status = Constrained(sequence, token); !status.ok()) {
      Leave(sequence);
      sequence.channel->Push({.kind = EngineEvent::Kind::kFailed, .status = status});
      ended_.push_back(&sequence);
      continue;
    }
    sequence.tokens.push_back(token);
    ++counts_.generated_tokens;
    sequence.channel->Push({.kind = EngineEvent::Kind::kToken, .token = std::move(sampled.token)});
    ExtendPageHashes(sequence.request.cache_salt, sequence.tokens, &sequence.hashes);
    if (std::ranges::find(sequence.request.stop_tokens, token) !=
            sequence.request.stop_tokens.end() ||
        (sequence.constraint != nullptr && sequence.constraint->finished())) {
      Leave(sequence);
      Finish(sequence, FinishReason::kStop);
    } else if (sequence.generated() >= sequence.limit) {
      Finish(sequence, FinishReason::kLength);
    }
  }
  RemoveEnded();
}

// Of a pass that has ended: the state as it is. Until its pages are published, the sequence has it.
void Scheduler::KeepSnapshot(Sequence& sequence) {
  if (!options_.prefix_cache || !sequence.WantsSnapshot()) return;
  const uint64_t bytes = config_.state.bytes();
  uint64_t pending = bytes;
  for (const auto& other : running_) pending += other->cache.snapshots().size() * bytes;
  if (index_.MakeRoomForSnapshot(pending)) sequence.cache.KeepSnapshot();
}

// Those that are not published yet: gone, they make room.
bool Scheduler::DropSnapshots() {
  bool any = false;
  for (const auto& sequence : running_) {
    any = any || !sequence->cache.snapshots().empty();
    sequence->cache.ForgetSnapshots(sequence->cache.length());
  }
  return any;
}

void Scheduler::Publish(Sequence& sequence) {
  if (!options_.prefix_cache) return;
  const SequenceCache& cache = sequence.cache;
  if (const int64_t at = sequence.diverges_at; at > 0 && cache.length() >= at) {
    sequence.diverges_at = 0;
    const auto is_sealed = [&](int64_t j) { return cache.is_sealed(j); };
    if (!options_.deterministic && LengthWithWindow(config_, at, is_sealed) == at) {
      index_.Insert(sequence.key(), cache, sequence.exact_tokens, PrefixIndex::Keep::kWindow, at);
    }
  }
  const int64_t full = cache.length() / kPageTokens;
  const int64_t open = options_.deterministic ? std::min(sequence.exact_tokens / kPageTokens, full)
                                              : std::min<int64_t>(full, config_.sink / kPageTokens);
  const int64_t sealed = std::min(cache.sealed_end(), full);
  if (open <= sequence.published_open && sealed <= sequence.published_sealed) return;
  sequence.published_open = open;
  sequence.published_sealed = sealed;
  index_.Insert(
      sequence.key(), cache, sequence.exact_tokens,
      options_.deterministic ? PrefixIndex::Keep::kFullPages : PrefixIndex::Keep::kImmutable);
  sequence.cache.ForgetSnapshots(std::max(open, sealed) * kPageTokens);
}

}  // namespace oscar
