#include "cuda/kv/device_pages.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/check.h"
#include "base/log.h"
#include "cuda/attention/head_blocks.h"
#include "cuda/device/cuda_status.h"

namespace oscar::cuda {
namespace {

constexpr size_t kMaxJobs = 1024;

// Layers of `blocks` with that head alone; -1: as they are.
std::vector<HeadBlocks> OneHead(std::vector<HeadBlocks> blocks, int head) {
  if (head < 0) return blocks;
  for (HeadBlocks& layer : blocks) layer = {layer[static_cast<size_t>(head)]};
  return blocks;
}

bool SameRules(const BlockRules& a, const BlockRules& b) {
  return a.k_rule == b.k_rule && a.v_rule == b.v_rule && a.k_clip_ratio == b.k_clip_ratio &&
         a.v_clip_ratio == b.v_clip_ratio;
}

// Of the pages that are sealed together.
uint64_t RunScratch(const CacheConfig& config) {
  return static_cast<uint64_t>(config.page_run()) * DevicePages::SizesOf(config).slot_bytes();
}

}  // namespace

uint64_t DevicePages::ScratchBytes(const CacheConfig& config) {
  const auto heads = static_cast<uint64_t>(config.sealed.num_layers() * config.sealed.kv_heads());
  return RunScratch(config) + kUnit + 2 * kMaxJobs * sizeof(int32_t) + heads * sizeof(HeadBlock);
}

Result<std::unique_ptr<DevicePages>> DevicePages::Create(const CacheConfig& config,
                                                         const AttentionShape& shape,
                                                         const KvPlan& plan, std::byte* arena,
                                                         uint64_t arena_bytes, std::byte* scratch,
                                                         Stream stream) {
  std::unique_ptr<DevicePages> pages(new DevicePages);
  const PageArena::Sizes sizes = SizesOf(config);
  pages->config_ = &config;
  pages->stream_ = stream;
  pages->arena_ = arena;
  pages->scratch_ = scratch;
  pages->saturated_ = reinterpret_cast<unsigned long long*>(scratch + RunScratch(config));
  pages->device_jobs_ = reinterpret_cast<int32_t*>(scratch + RunScratch(config) + kUnit);
  pages->places_ = std::make_unique<PageArena>(
      sizes, arena_bytes, [self = pages.get()](uint64_t from, uint64_t to, uint64_t bytes) {
        self->MovePage(from, to, bytes);
      });
  if (arena_bytes / kUnit > uint64_t{1} << 31) {
    return Unexpected(Unimplemented("a page arena beyond 512 GiB"));
  }
  void* host = nullptr;
  OSCAR_RETURN_IF_ERROR(CudaStatus(cudaMallocHost(&host, 2 * kMaxJobs * sizeof(int32_t)),
                                   "pinned memory for page sealing"));
  pages->host_jobs_ = static_cast<int32_t*>(host);
  OSCAR_RETURN_IF_ERROR(CudaStatus(cudaMallocHost(&host, sizeof(unsigned long long)),
                                   "pinned memory for page sealing"));
  pages->seen_saturated_ = static_cast<unsigned long long*>(host);
  *pages->seen_saturated_ = 0;
  cudaEvent_t event = nullptr;
  OSCAR_RETURN_IF_ERROR(
      CudaStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event"));
  pages->jobs_sent_ = event;
  OSCAR_RETURN_IF_ERROR(
      CudaStatus(cudaMemsetAsync(pages->saturated_, 0, sizeof(unsigned long long), stream),
                 "clearing memory"));
  if (config.seals()) {
    OSCAR_RETURN_IF_ERROR(pages->PrepareSealing(config, shape, plan));
  }
  return pages;
}

DevicePages::~DevicePages() {
  if (jobs_sent_ != nullptr) cudaEventDestroy(static_cast<cudaEvent_t>(jobs_sent_));
  cudaFreeHost(host_jobs_);
  cudaFreeHost(seen_saturated_);
}

Status DevicePages::PrepareSealing(const CacheConfig& config, const AttentionShape& shape,
                                   const KvPlan& plan) {
  const auto& rules = plan.rules();  // none: BF16
  std::vector<int> held;             // layers
  for (int layer = 0; layer < config.sealed.num_layers(); ++layer) {
    if (config.sealed.Holds(layer)) held.push_back(layer);
  }
  for (const int layer : held) {
    if (!rules.empty() &&
        FormSeal::Takes(config.sealed.block(layer, 0), rules[static_cast<size_t>(layer)].front())) {
      return PrepareForms(config, plan);
    }
  }
  // One launch takes all layers, those of heads alike as well.
  std::vector<HeadBlocks> blocks;
  const bool is_uniform = config.sealed.is_uniform();
  if (!is_uniform || config.sealed.block(held[0], 0).kind() == BlockKind::kInt3) {
    device_heads_ = reinterpret_cast<HeadBlock*>(device_jobs_ + 2 * kMaxJobs);
    HeadBlocks all;
    for (const int layer : held) {
      blocks.push_back(HeadBlocksOf(config.sealed, layer));
      for (HeadBlock head : blocks.back()) {
        head.offset += static_cast<uint32_t>(config.sealed.BlockOffset(layer, 0));
        all.push_back(head);
      }
    }
    // Waits: `all` goes.
    OSCAR_RETURN_IF_ERROR(
        CudaStatus(cudaMemcpy(device_heads_, all.data(), all.size() * sizeof(HeadBlock),
                              cudaMemcpyHostToDevice),
                   "sending the bits of heads"));
  }
  for (size_t i = 0; i < held.size(); ++i) {
    const int layer = held[i], index = static_cast<int>(i);
    // Joins the run before where layers are as far apart.
    const auto joins = [&] {
      SealRun& run = runs_.back();
      const int step = layer - (run.first_layer + (run.layers - 1) * run.step);
      if (run.layers > 1 && step != run.step) return false;
      run.step = step;
      ++run.layers;
      return true;
    };
    if (rules.empty()) {
      if (runs_.empty() || !joins()) runs_.push_back({std::nullopt, layer, 1, 1, -1, index});
      continue;
    }
    const auto& heads = rules[static_cast<size_t>(layer)];
    const bool uniform = std::ranges::all_of(
        heads, [&](const BlockRules& rule) { return SameRules(rule, heads.front()); });
    if (uniform && !runs_.empty() && runs_.back().head < 0 &&
        SameRules(rules[static_cast<size_t>(runs_.back().first_layer)].front(), heads.front()) &&
        joins()) {
      continue;
    }
    AttentionShape one = shape;
    if (!uniform) one.num_kv_heads = one.num_q_heads = 1;
    for (int head = 0; head < (uniform ? 1 : shape.num_kv_heads); ++head) {
      OSCAR_ASSIGN_OR_RETURN(const PageSeal seal,
                             PageSeal::Create(one, heads[static_cast<size_t>(head)],
                                              OneHead(blocks, uniform ? -1 : head)));
      runs_.push_back({seal, layer, 1, 1, uniform ? -1 : head, index});
    }
  }
  return {};
}

Status DevicePages::PrepareForms(const CacheConfig& config, const KvPlan& plan) {
  const PageLayout& sealed = config.sealed;
  const auto norms_of = [&](int layer) {
    return sealed.has_norms(layer)
               ? static_cast<int64_t>(sealed.NormOffset(layer) - sealed.BlockOffset(layer, 0))
               : int64_t{0};
  };
  for (int layer = 0; layer < sealed.num_layers(); ++layer) {
    if (!sealed.Holds(layer)) continue;
    const BlockLayout& layout = sealed.block(layer, 0);
    // Layers that follow each other and are alike are as far apart as the first two of them.
    const bool continues = !form_runs_.empty() &&
                           form_runs_.back().first_layer + form_runs_.back().layers == layer &&
                           sealed.block(layer - 1, 0) == layout;
    if (continues) {
      ++form_runs_.back().layers;
      continue;
    }
    const BlockRules& rules = plan.rules()[static_cast<size_t>(layer)].front();
    OSCAR_ASSIGN_OR_RETURN(const FormSeal seal,
                           FormSeal::Create(layout, rules, sealed.kv_heads(), norms_of(layer)));
    form_runs_.push_back({seal, layer, 1});
  }
  return {};
}

std::byte* DevicePages::Allocate(size_t bytes) {
  // A size that is two kinds' goes to the first: a place is a place.
  std::optional<uint64_t> offset;
  if (bytes == config_->open.bytes()) {
    offset = places_->AllocateOpen();
  } else if (bytes == config_->sealed.bytes()) {
    offset = places_->AllocateSealed();
  } else {
    OSCAR_CHECK(bytes == config_->state.bytes());
    offset = places_->AllocateState();
  }
  return offset.has_value() ? arena_ + *offset : nullptr;
}

void DevicePages::Free(std::byte* page, size_t) {
  places_->Free(static_cast<uint64_t>(page - arena_));
}

void DevicePages::MovePage(uint64_t from, uint64_t to, uint64_t bytes) {
  Copy(arena_ + to, arena_ + from, bytes);
  on_move_(arena_ + from, arena_ + to);
}

void DevicePages::Copy(std::byte* to, const std::byte* from, size_t bytes) {
  Keep(Flush());
  Keep(CudaStatus(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_),
                  "copying a cache page"));
}

void DevicePages::Clear(std::byte* to, size_t bytes) {
  Keep(Flush());
  Keep(CudaStatus(cudaMemsetAsync(to, 0, bytes, stream_), "clearing a cache page"));
}

Status DevicePages::Read(const std::byte* from, std::span<std::byte> to) {
  OSCAR_RETURN_IF_ERROR(Flush());
  OSCAR_RETURN_IF_ERROR(
      CudaStatus(cudaMemcpyAsync(to.data(), from, to.size(), cudaMemcpyDeviceToHost, stream_),
                 "reading a cache page"));
  return CudaStatus(cudaStreamSynchronize(stream_), "reading a cache page");
}

Status DevicePages::Write(std::byte* to, std::span<const std::byte> from) {
  OSCAR_RETURN_IF_ERROR(Flush());
  OSCAR_RETURN_IF_ERROR(
      CudaStatus(cudaMemcpyAsync(to, from.data(), from.size(), cudaMemcpyHostToDevice, stream_),
                 "writing a cache page"));
  return CudaStatus(cudaStreamSynchronize(stream_), "writing a cache page");
}

uint64_t DeviceSealer::SealPages(std::span<const std::byte* const> open,
                                 std::span<std::byte* const> sealed, ThreadPool&) const {
  pages_.QueueSeal(open, sealed);
  return 0;
}

void DevicePages::QueueSeal(std::span<const std::byte* const> open,
                            std::span<std::byte* const> sealed) {
  // A page may be sealed into the slab of one that was sealed a moment ago: that one must have been
  // read by then. Jobs of one launch run in any order.
  const auto slab_of = [&](const std::byte* page) {
    return page >= arena_ && page < arena_ + places_->bytes()
               ? places_->SlabOf(static_cast<uint64_t>(page - arena_))
               : int64_t{-1};
  };
  const bool overlaps = std::ranges::any_of(jobs_, [&](const SealJob& job) {
    return std::ranges::any_of(sealed, [&](const std::byte* page) {
      return slab_of(job.open) == slab_of(page) || job.sealed == page;
    });
  });
  // Scratch pages are reused at once.
  if (overlaps || jobs_.size() + open.size() > kMaxJobs) Keep(Flush());
  for (size_t i = 0; i < open.size(); ++i) jobs_.push_back({open[i], sealed[i]});
}

void DevicePages::WarnOfSaturation() {
  const auto count = *static_cast<const volatile unsigned long long*>(seen_saturated_);
  if (warned_ || count == 0) return;
  warned_ = true;
  LogWarning(
      "{} keys or values were not a number or beyond +-65504 when their page was sealed; they are "
      "stored as 0 or clamped, and answers may suffer",
      count);
}

Status DevicePages::Flush() {
  if (!jobs_.empty()) {
    WarnOfSaturation();
    auto* event = static_cast<cudaEvent_t>(jobs_sent_);
    Keep(CudaStatus(cudaEventSynchronize(event), "waiting for page sealing"));
    const size_t count = jobs_.size();
    for (size_t i = 0; i < count; ++i) {
      host_jobs_[i] = IdOf(jobs_[i].open);
      // The scratch page lies outside the arena, but on the same grid of units.
      host_jobs_[count + i] =
          static_cast<int32_t>((jobs_[i].sealed - arena_) / static_cast<int64_t>(kUnit));
    }
    jobs_.clear();
    Keep(CudaStatus(cudaMemcpyAsync(device_jobs_, host_jobs_, 2 * count * sizeof(int32_t),
                                    cudaMemcpyHostToDevice, stream_),
                    "sending pages to seal"));
    Keep(CudaStatus(cudaEventRecord(event, stream_), "recording an event"));
    const PageLayout& open = config_->open;
    const PageLayout& sealed = config_->sealed;
    // `next_layer`: the second of several.
    const auto arguments = [&](int first_layer, int next_layer, int layers, int head) {
      SealArguments args;
      args.window_pool = arena_ + open.BlockOffset(first_layer, head);
      args.history_pool = arena_ + sealed.BlockOffset(first_layer, head);
      args.window_page_stride = args.history_page_stride = kUnit;
      if (layers > 1) {
        args.window_layer_stride = static_cast<int64_t>(open.BlockOffset(next_layer, 0) -
                                                        open.BlockOffset(first_layer, 0));
        args.history_layer_stride = static_cast<int64_t>(sealed.BlockOffset(next_layer, 0) -
                                                         sealed.BlockOffset(first_layer, 0));
      }
      args.source_pages = device_jobs_;
      args.target_pages = device_jobs_ + count;
      args.saturated = saturated_;
      args.jobs = static_cast<int>(count);
      args.layers = layers;
      return args;
    };
    for (const FormRun& run : form_runs_) {
      Keep(
          run.seal.Launch(arguments(run.first_layer, run.first_layer + 1, run.layers, 0), stream_));
    }
    for (const SealRun& run : runs_) {
      const int head = std::max(run.head, 0);
      SealArguments args = arguments(run.first_layer, run.first_layer + run.step, run.layers, head);
      if (device_heads_ != nullptr) {
        args.history_pool = arena_;
        args.heads_stride = sealed.kv_heads();
        args.heads = device_heads_ + run.index * sealed.kv_heads() + head;
      }
      Keep(run.seal.has_value()
               ? run.seal->Launch(args, stream_)
               : LaunchPageCopy(args, sealed.LayerBytes(run.first_layer), stream_));
    }
    Keep(CudaStatus(cudaMemcpyAsync(seen_saturated_, saturated_, sizeof(*saturated_),
                                    cudaMemcpyDeviceToHost, stream_),
                    "reading the saturation count"));
  }
  return std::exchange(status_, Status());
}

Result<uint64_t> DevicePages::Saturated() const {
  unsigned long long count = 0;
  OSCAR_RETURN_IF_ERROR(CudaStatus(
      cudaMemcpyAsync(&count, saturated_, sizeof(count), cudaMemcpyDeviceToHost, stream_),
      "reading the saturation count"));
  OSCAR_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(stream_), "reading the saturation count"));
  return count;
}

}  // namespace oscar::cuda
