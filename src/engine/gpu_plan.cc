#include "engine/gpu_plan.h"

#include <fmt/core.h>

#include <algorithm>

namespace oscar {
namespace {

constexpr int kMostGpus = 64;

// What keeps `gpus` from sharing the model; empty: nothing.
std::string ProblemOf(const ModelSpec& spec, int block_rows, int gpus) {
  for (const LayerSpec& layer : spec.layers) {
    if (const AttentionSpec* attention = layer.attention()) {
      if (attention->num_heads % gpus != 0) {
        return fmt::format("{} heads do not divide by {}", attention->num_heads, gpus);
      }
      if (attention->num_kv_heads % gpus != 0 && gpus % attention->num_kv_heads != 0) {
        return fmt::format("{} KV heads and {} GPUs do not divide", attention->num_kv_heads, gpus);
      }
    }
    if (const LinearAttentionSpec* linear = layer.linear_attention()) {
      if (linear->key_heads % gpus != 0) {
        return fmt::format("{} key heads of linear attention do not divide by {}",
                           linear->key_heads, gpus);
      }
    }
    const auto divides = [&](int width) {
      return width % gpus == 0 && (block_rows == 1 || width / gpus % block_rows == 0);
    };
    if (const DenseSpec* dense = layer.dense()) {
      if (!divides(dense->intermediate)) {
        return fmt::format("a feed-forward width of {} does not divide by {}{}",
                           dense->intermediate, gpus,
                           block_rows > 1 ? fmt::format(" in blocks of {}", block_rows) : "");
      }
    } else if (layer.experts()->num_experts % gpus != 0 &&
               !divides(layer.experts()->intermediate)) {
      return fmt::format("{} experts of width {} do not divide by {}", layer.experts()->num_experts,
                         layer.experts()->intermediate, gpus);
    }
  }
  return "";
}

}  // namespace

std::vector<GpuShare> PlanGpus(const ModelSpec& spec, TensorTable::Fp8 fp8, int block_rows,
                               const KvPlan& kv, int64_t tokens, uint64_t gpu_memory) {
  const TensorTable table(spec);
  const bool rotates_v = kv.rotates_v();
  const int kv_heads = spec.attention().num_kv_heads;
  const uint64_t conversation = kv.StoredBytes(tokens);
  std::vector<GpuShare> shares;
  for (int gpus = 1; gpus <= kMostGpus; gpus *= 2) {
    GpuShare share;
    share.gpus = gpus;
    share.kv_heads_are_copied = gpus > kv_heads;
    for (const TensorDecl& tensor : table.tensors()) {
      const bool is_kv = tensor.role == Role::kK || tensor.role == Role::kV ||
                         tensor.role == Role::kKBias || tensor.role == Role::kVBias;
      const int parts = tensor.split == TensorSplit::kNone ? 1
                        : is_kv                            ? std::min(gpus, kv_heads)
                                                           : gpus;
      const uint64_t bytes = TensorTable::BytesOf(tensor, fp8, rotates_v);
      share.weight_bytes +=
          (bytes + static_cast<uint64_t>(parts) - 1) / static_cast<uint64_t>(parts);
    }
    share.conversation_bytes = conversation / static_cast<uint64_t>(std::min(gpus, kv_heads)) +
                               spec.state_bytes() / static_cast<uint64_t>(gpus);
    share.problem = ProblemOf(spec, block_rows, gpus);
    const auto room = static_cast<uint64_t>(kShareOfGpu * static_cast<double>(gpu_memory));
    const bool fits = share.problem.empty() && share.bytes() <= room;
    shares.push_back(std::move(share));
    if (fits) break;
  }
  return shares;
}

}  // namespace oscar
