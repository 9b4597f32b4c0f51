#include "gpu/device_pages.h"

#include <fmt/core.h>

#include <algorithm>
#include <bit>

#include "base/check.h"
#include "cuda/cuda_status.h"

namespace oscar::gpu {
namespace {

using cuda::CudaStatus;

constexpr uint32_t kOpen = ~0u;
constexpr size_t kMaxJobs = 1024;

uint64_t RoundUp(uint64_t bytes) {
  return (bytes + DevicePages::kUnit - 1) / DevicePages::kUnit * DevicePages::kUnit;
}

bool SameRules(const PageRules& a, const PageRules& b) {
  return a.k_rule == b.k_rule && a.v_rule == b.v_rule && a.k_clip_ratio == b.k_clip_ratio &&
         a.v_clip_ratio == b.v_clip_ratio;
}

}  // namespace

uint64_t DevicePages::SlabBytes(const CacheConfig& config) { return RoundUp(config.open.bytes()); }
uint64_t DevicePages::SealedBytes(const CacheConfig& config) {
  return RoundUp(config.sealed.bytes());
}
int DevicePages::PerSlab(const CacheConfig& config) {
  return static_cast<int>(std::clamp<uint64_t>(SlabBytes(config) / SealedBytes(config), 1, 31));
}

// A slab counts as what its sealed pages hold, which is not more than an open page: then any mix of
// pages that the budget allows has slabs enough.
uint64_t DevicePages::BudgetOf(const CacheConfig& config, uint64_t bytes) {
  const uint64_t slabs = bytes / SlabBytes(config);
  if (config.sealer == nullptr) return slabs * config.open.bytes();
  return slabs * std::min<uint64_t>(config.open.bytes(),
                                    static_cast<uint64_t>(PerSlab(config)) * config.sealed.bytes());
}
uint64_t DevicePages::ArenaBytes(const CacheConfig& config, uint64_t budget) {
  const uint64_t per_slab = BudgetOf(config, SlabBytes(config));
  return (budget + per_slab - 1) / per_slab * SlabBytes(config);
}
uint64_t DevicePages::ScratchBytes(const CacheConfig& config) {
  return SealedBytes(config) + kUnit + 2 * kMaxJobs * sizeof(int32_t);
}

Result<std::unique_ptr<DevicePages>> DevicePages::Create(const CacheConfig& config,
                                                         const cuda::AttentionShape& shape,
                                                         const KvPlan& plan, std::byte* arena,
                                                         uint64_t arena_bytes, std::byte* scratch,
                                                         cuda::Stream stream) {
  std::unique_ptr<DevicePages> pages(new DevicePages);
  pages->config_ = &config;
  pages->stream_ = stream;
  pages->arena_ = arena;
  pages->scratch_ = scratch;
  pages->saturated_ = reinterpret_cast<unsigned long long*>(scratch + SealedBytes(config));
  pages->device_jobs_ = reinterpret_cast<int32_t*>(scratch + SealedBytes(config) + kUnit);
  pages->slab_bytes_ = SlabBytes(config);
  pages->open_bytes_ = config.open.bytes();
  pages->sealed_bytes_ = SealedBytes(config);
  pages->per_slab_ = PerSlab(config);
  pages->budget_ = BudgetOf(config, arena_bytes);
  const uint64_t slabs = arena_bytes / pages->slab_bytes_;
  if (arena_bytes / kUnit > uint64_t{1} << 31) {
    return Unexpected(Unimplemented("a page arena beyond 512 GiB"));
  }
  pages->slabs_.resize(slabs);
  for (uint64_t i = slabs; i-- > 0;) pages->free_.push_back(static_cast<int64_t>(i));
  void* host = nullptr;
  OSCAR_RETURN_IF_ERROR(CudaStatus(cudaMallocHost(&host, 2 * kMaxJobs * sizeof(int32_t)),
                                   "pinned memory for page sealing"));
  pages->host_jobs_ = static_cast<int32_t*>(host);
  cudaEvent_t event = nullptr;
  OSCAR_RETURN_IF_ERROR(
      CudaStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event"));
  pages->jobs_sent_ = event;
  OSCAR_RETURN_IF_ERROR(
      CudaStatus(cudaMemsetAsync(pages->saturated_, 0, sizeof(unsigned long long), stream),
                 "clearing memory"));
  if (config.sealer != nullptr) {
    OSCAR_RETURN_IF_ERROR(pages->PrepareSealing(config, shape, plan));
  }
  return pages;
}

DevicePages::~DevicePages() {
  if (jobs_sent_ != nullptr) cudaEventDestroy(static_cast<cudaEvent_t>(jobs_sent_));
  cudaFreeHost(host_jobs_);
}

Status DevicePages::PrepareSealing(const CacheConfig& config, const cuda::AttentionShape& shape,
                                   const KvPlan& plan) {
  const auto& rules = plan.rules();
  const int layers = config.open.num_layers();
  for (int layer = 0; layer < layers; ++layer) {
    const auto& heads = rules[static_cast<size_t>(layer)];
    const bool uniform = std::ranges::all_of(
        heads, [&](const PageRules& rule) { return SameRules(rule, heads.front()); });
    if (uniform && layer > 0 && runs_.back().head < 0 &&
        SameRules(rules[static_cast<size_t>(runs_.back().first_layer)].front(), heads.front())) {
      ++runs_.back().layers;
      continue;
    }
    cuda::AttentionShape one = shape;
    if (!uniform) one.num_kv_heads = one.num_q_heads = 1;
    for (int head = 0; head < (uniform ? 1 : shape.num_kv_heads); ++head) {
      OSCAR_ASSIGN_OR_RETURN(cuda::PageSeal seal,
                             cuda::PageSeal::Create(one, heads[static_cast<size_t>(head)]));
      runs_.push_back({std::move(seal), layer, 1, uniform ? -1 : head});
    }
  }
  return {};
}

std::byte* DevicePages::Allocate(size_t bytes) {
  if (bytes == open_bytes_) {
    if (free_.empty() && !FreeASlab()) return nullptr;
    const int64_t slab = free_.back();
    free_.pop_back();
    slabs_[static_cast<size_t>(slab)] = {kOpen, 1};
    return At(slab, 0);
  }
  OSCAR_CHECK(bytes <= sealed_bytes_);
  return TakeSlot();
}

std::byte* DevicePages::TakeSlot() {
  int64_t slab;
  if (!partial_.empty()) {  // the fullest, so that others may become empty
    const auto last = std::prev(partial_.end());
    slab = last->second;
    partial_.erase(last);
  } else {
    if (free_.empty()) return nullptr;
    slab = free_.back();
    free_.pop_back();
    slabs_[static_cast<size_t>(slab)] = {};
  }
  Slab& at = slabs_[static_cast<size_t>(slab)];
  const int slot = std::countr_one(at.used);
  at.used |= 1u << slot;
  if (++at.count < per_slab_) partial_.emplace(at.count, slab);
  return At(slab, slot);
}

// Moves the pages of the emptiest slab into others.
bool DevicePages::FreeASlab() {
  if (partial_.size() < 2) return false;
  const auto [count, slab] = *partial_.begin();
  int room = 0;
  for (auto it = std::next(partial_.begin()); it != partial_.end() && room < count; ++it) {
    room += per_slab_ - it->first;
  }
  if (room < count) return false;
  partial_.erase(partial_.begin());
  Slab& from = slabs_[static_cast<size_t>(slab)];
  for (int slot = 0; slot < per_slab_; ++slot) {
    if ((from.used >> slot & 1u) == 0) continue;
    std::byte* to = TakeSlot();
    Copy(to, At(slab, slot), sealed_bytes_);
    on_move_(At(slab, slot), to);
  }
  from = {};
  free_.push_back(slab);
  return true;
}

void DevicePages::Free(std::byte* page, size_t) {
  const auto offset = static_cast<uint64_t>(page - arena_);
  const auto slab = static_cast<int64_t>(offset / slab_bytes_);
  Slab& at = slabs_[static_cast<size_t>(slab)];
  if (at.used == kOpen) {
    at = {};
    free_.push_back(slab);
    return;
  }
  const auto slot = static_cast<int>(offset % slab_bytes_ / sealed_bytes_);
  partial_.erase({at.count, slab});
  at.used &= ~(1u << slot);
  if (--at.count == 0) {
    free_.push_back(slab);
  } else {
    partial_.emplace(at.count, slab);
  }
}

void DevicePages::Copy(std::byte* to, const std::byte* from, size_t bytes) {
  Keep(Flush());
  Keep(CudaStatus(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_),
                  "copying a cache page"));
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

void DevicePages::QueueSeal(const std::byte* open, std::byte* sealed) {
  // A page may be sealed into the slab of one that was sealed a moment ago: that one must have been
  // read by then. Jobs of one launch run in any order.
  const auto slab_of = [&](const std::byte* page) {
    return page >= arena_ && page < arena_ + slabs_.size() * slab_bytes_
               ? static_cast<int64_t>(static_cast<uint64_t>(page - arena_) / slab_bytes_)
               : int64_t{-1};
  };
  const int64_t target = slab_of(sealed);
  const bool overlaps = std::ranges::any_of(jobs_, [&](const SealJob& job) {
    return slab_of(job.open) == target || job.sealed == sealed;
  });
  // The scratch page is reused at once.
  if (overlaps || jobs_.size() == kMaxJobs) Keep(Flush());
  jobs_.push_back({open, sealed});
}

Status DevicePages::Flush() {
  if (!jobs_.empty()) {
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
    const PageShape& open = config_->open;
    const PageShape& sealed = config_->sealed;
    for (const SealRun& run : runs_) {
      const int head = std::max(run.head, 0);
      cuda::SealArguments args;
      args.window_pool = arena_ + open.BlockOffset(run.first_layer, head);
      args.history_pool = arena_ + sealed.BlockOffset(run.first_layer, head);
      args.window_page_stride = args.history_page_stride = kUnit;
      if (run.layers > 1) {
        args.window_layer_stride =
            static_cast<int64_t>(open.BlockOffset(1, 0) - open.BlockOffset(0, 0));
        args.history_layer_stride =
            static_cast<int64_t>(sealed.BlockOffset(1, 0) - sealed.BlockOffset(0, 0));
      }
      args.source_pages = device_jobs_;
      args.target_pages = device_jobs_ + count;
      args.saturated = saturated_;
      args.jobs = static_cast<int>(count);
      args.layers = run.layers;
      Keep(run.seal.Launch(args, stream_));
    }
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

}  // namespace oscar::gpu
