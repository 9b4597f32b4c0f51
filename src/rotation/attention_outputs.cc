#include "rotation/attention_outputs.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/check.h"
#include "numeric/multiversion.h"

namespace oscar {
namespace {

constexpr int64_t kQueryBlock = 32;
constexpr int64_t kKeyBlock = 32;

// logits[0..kKeyBlock) = sum_d q[d] * keys[d, 0..kKeyBlock), d in order; `keys` is transposed.
OSCAR_MULTIVERSION
void DotKeys(const double* q, const double* keys, int64_t key_stride, int64_t dim, double* logits) {
  double sum[kKeyBlock] = {};
  for (int64_t d = 0; d < dim; ++d) {
    const double x = q[d];
    const double* row = keys + d * key_stride;
    for (int64_t j = 0; j < kKeyBlock; ++j) sum[j] += x * row[j];
  }
  for (int64_t j = 0; j < kKeyBlock; ++j) logits[j] = sum[j];
}

OSCAR_MULTIVERSION
void AddScaled(double p, const double* v, double* out, int64_t dim) {
  for (int64_t d = 0; d < dim; ++d) out[d] += p * v[d];
}

}  // namespace

void CausalAttentionOutputs(const QkvShape& shape, int64_t num_tokens, std::span<const float> q,
                            std::span<const float> k, std::span<const float> v,
                            std::span<float> out, ThreadPool& pool) {
  const int64_t dim = shape.head_dim;
  const int64_t q_stride = shape.num_query_heads * dim;
  const int64_t kv_stride = shape.num_kv_heads * dim;
  OSCAR_CHECK(static_cast<int64_t>(q.size()) == num_tokens * q_stride && out.size() == q.size() &&
              static_cast<int64_t>(k.size()) == num_tokens * kv_stride && v.size() == k.size());
  const double scale = 1.0 / std::sqrt(static_cast<double>(dim));
  const int64_t padded = (num_tokens + kKeyBlock - 1) / kKeyBlock * kKeyBlock;
  const int64_t blocks = (num_tokens + kQueryBlock - 1) / kQueryBlock;
  const int64_t group = shape.group();

  std::vector<double> keys(static_cast<size_t>(dim * padded));        // [D, padded tokens]
  std::vector<double> values(static_cast<size_t>(num_tokens * dim));  // [T, D]
  for (int64_t kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
    for (int64_t t = 0; t < num_tokens; ++t) {
      for (int64_t d = 0; d < dim; ++d) {
        const auto at = static_cast<size_t>(t * kv_stride + kv_head * dim + d);
        keys[static_cast<size_t>(d * padded + t)] = k[at];
        values[static_cast<size_t>(t * dim + d)] = v[at];
      }
    }
    // Later blocks see more keys: start with the longest, so that threads end together.
    pool.ParallelFor(blocks * group, [&](int64_t task, int) {
      const int64_t block = blocks - 1 - task / group;
      const int64_t head = kv_head * group + task % group;
      std::vector<double> logits(static_cast<size_t>(padded));
      std::vector<double> query(static_cast<size_t>(dim));
      std::vector<double> output(static_cast<size_t>(dim));
      const int64_t last = std::min(num_tokens, (block + 1) * kQueryBlock);
      for (int64_t t = block * kQueryBlock; t < last; ++t) {
        const int64_t at = t * q_stride + head * dim;
        for (int64_t d = 0; d < dim; ++d) {
          query[static_cast<size_t>(d)] = scale * q[static_cast<size_t>(at + d)];
        }
        for (int64_t j = 0; j <= t; j += kKeyBlock) {
          DotKeys(query.data(), keys.data() + j, padded, dim, logits.data() + j);
        }
        const double largest = *std::max_element(logits.begin(), logits.begin() + t + 1);
        double sum = 0;
        std::fill(output.begin(), output.end(), 0.0);
        for (int64_t j = 0; j <= t; ++j) {
          const double p = std::exp(logits[static_cast<size_t>(j)] - largest);
          sum += p;
          AddScaled(p, values.data() + j * dim, output.data(), dim);
        }
        for (int64_t d = 0; d < dim; ++d) {
          out[static_cast<size_t>(at + d)] =
              static_cast<float>(output[static_cast<size_t>(d)] / sum);
        }
      }
    });
  }
}

}  // namespace oscar
