#include "numeric/delta_rule.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/check.h"

namespace oscar {
namespace {

struct Shape {
  size_t tokens, key_dim, value_dim;

  Shape(const DeltaRuleTokens& in, std::span<const double> state, std::span<const double> out)
      : tokens(in.beta.size()) {
    OSCAR_CHECK(tokens > 0 && in.k.size() % tokens == 0 && in.v.size() % tokens == 0);
    key_dim = in.k.size() / tokens;
    value_dim = in.v.size() / tokens;
    OSCAR_CHECK(in.q.size() == in.k.size() && in.log_decay.size() == tokens &&
                state.size() == key_dim * value_dim && out.size() == tokens * value_dim);
  }
};

double Dot(const double* a, const double* b, size_t size) {
  double sum = 0.0;
  for (size_t i = 0; i < size; ++i) sum += a[i] * b[i];
  return sum;
}

// One chunk of n tokens. With G the running sum of the logarithms and D_ij = exp(G_i - G_j):
//   (I + A) V' = diag(beta) (V - diag(exp G) K S),  A_ij = beta_i (k_i . k_j) D_ij for j < i
//   O = diag(exp G) Q S + ((Q K^T) o D) V'          with j <= i
//   S <- exp(G_n) S + (diag(exp(G_n - G)) K)^T V'
void Chunk(const DeltaRuleTokens& in, const Shape& shape, size_t first, size_t n,
           std::span<double> state, std::span<double> out) {
  const size_t dk = shape.key_dim, dv = shape.value_dim;
  const double *q = in.q.data() + first * dk, *k = in.k.data() + first * dk;
  const double *v = in.v.data() + first * dv, *beta = in.beta.data() + first;
  std::vector<double> sums(n), written(n * dv);
  double sum = 0.0;
  for (size_t i = 0; i < n; ++i) sums[i] = sum += in.log_decay[first + i];
  const auto read = [&](const double* row, size_t column) {
    double value = 0.0;
    for (size_t d = 0; d < dk; ++d) value += row[d] * state[d * dv + column];
    return value;
  };
  for (size_t i = 0; i < n; ++i) {
    for (size_t c = 0; c < dv; ++c) {
      written[i * dv + c] = beta[i] * (v[i * dv + c] - std::exp(sums[i]) * read(k + i * dk, c));
    }
    for (size_t j = 0; j < i; ++j) {
      const double a = beta[i] * Dot(k + i * dk, k + j * dk, dk) * std::exp(sums[i] - sums[j]);
      for (size_t c = 0; c < dv; ++c) written[i * dv + c] -= a * written[j * dv + c];
    }
  }
  for (size_t i = 0; i < n; ++i) {
    double* const o = out.data() + (first + i) * dv;
    for (size_t c = 0; c < dv; ++c) o[c] = std::exp(sums[i]) * read(q + i * dk, c);
    for (size_t j = 0; j <= i; ++j) {
      const double weight = Dot(q + i * dk, k + j * dk, dk) * std::exp(sums[i] - sums[j]);
      for (size_t c = 0; c < dv; ++c) o[c] += weight * written[j * dv + c];
    }
  }
  for (double& s : state) s *= std::exp(sums[n - 1]);
  for (size_t i = 0; i < n; ++i) {
    const double left = std::exp(sums[n - 1] - sums[i]);
    for (size_t d = 0; d < dk; ++d) {
      for (size_t c = 0; c < dv; ++c)
        state[d * dv + c] += left * k[i * dk + d] * written[i * dv + c];
    }
  }
}

}  // namespace

void DeltaRuleRecurrent(const DeltaRuleTokens& in, std::span<double> state, std::span<double> out) {
  const Shape shape(in, state, out);
  const size_t dk = shape.key_dim, dv = shape.value_dim;
  std::vector<double> change(dv);
  for (size_t t = 0; t < shape.tokens; ++t) {
    const double *q = in.q.data() + t * dk, *k = in.k.data() + t * dk;
    double* const o = out.data() + t * dv;
    for (double& s : state) s *= std::exp(in.log_decay[t]);
    for (size_t c = 0; c < dv; ++c) {
      double held = 0.0;
      for (size_t d = 0; d < dk; ++d) held += k[d] * state[d * dv + c];
      change[c] = in.beta[t] * (in.v[t * dv + c] - held);
    }
    std::fill_n(o, dv, 0.0);
    for (size_t d = 0; d < dk; ++d) {
      for (size_t c = 0; c < dv; ++c) {
        state[d * dv + c] += k[d] * change[c];
        o[c] += q[d] * state[d * dv + c];
      }
    }
  }
}

void DeltaRuleChunked(const DeltaRuleTokens& in, int chunk, std::span<double> state,
                      std::span<double> out) {
  const Shape shape(in, state, out);
  OSCAR_CHECK(chunk > 0);
  const auto step = static_cast<size_t>(chunk);
  for (size_t first = 0; first < shape.tokens; first += step) {
    Chunk(in, shape, first, std::min(step, shape.tokens - first), state, out);
  }
}

}  // namespace oscar
