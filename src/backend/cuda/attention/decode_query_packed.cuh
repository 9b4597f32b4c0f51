// The query of an item as DecodeConsumerPacked reads it: B fragments in lane order, made once an
// item by the scheduler warp rather than by every consumer. Device only.
//
//   [4][32 lanes] 16 B   fragments. Head h has columns 2h and 2h + 1.
//   [32 lanes] 8 B       of pages: {raw logit of all codes 1, raw logit -> log2 units}, head
//                        lane % 4
//   4 B                  of pages: whether there is a rest (below)
// Against the windows it is BF16 as it is, k-steps 2i and 2i + 1 a fragment, the odd columns zero.
//
// Against pages it is 16-bit integers, whose high and low byte (both signed) are the two columns:
// the largest lies between 2^14 and 2^15, so all within 2^-8 of it are exact. The k of two 16-dim
// steps (a, b) whose codes one mask picks are dims {16 a, 16 b, 16 a + 1, 16 b + 1} + 2 (lane % 4),
// and 8 more for the second register. Of 2 and 3 bits they are (p, p + 4), of 4 bits (0, 2),
// (1, 3), (4, 6) and (5, 7); fragment i has the pairs 2i and 2i + 1. Where rounding takes more than
// kMostRest in all (one dim far above the others), fragments 2 and 3 hold what it took, times 2^15.
#pragma once

#include "cuda/attention/decode_traits.cuh"

namespace oscar::cuda {

// Where codes of channels lie when fp16 takes them as they are: in bits [kAt, kAt + bits) of a
// half, at most the ten of a subnormal's fraction, and high among them: the lower a code lies, the
// more bits of a sum beside it are cut off (decode_consumer.cuh).
template <BlockKind kKind>
struct ChannelPlaces {
  static constexpr int kTop = kKind == BlockKind::kInt2 ? 8 : 6;
  // How far the word moves down so that the codes of `step` (of 8) lie there.
  OSCAR_HD static constexpr int Shift(int step) {
    if (kKind == BlockKind::kInt2) return step < 3 ? -4 : step < 5 ? 0 : 6;
    if (kKind == BlockKind::kInt3) return step / 2 * 4 - 4;
    return step % 4 * 4 - 6;
  }
  OSCAR_HD static constexpr int At(int step) {
    return (kKind == BlockKind::kInt4 ? step % 4 * 4 : step * 2) - Shift(step);
  }
  // 1, 4 or 16: what makes up for a lower place.
  OSCAR_HD static constexpr float Up(int step) {
    return static_cast<float>(1 << (kTop - At(step)));
  }
};

template <typename T>
class DecodeQueryPacked {
 public:
  // Keys that are not rows have twice the fragments, and rows behind the factors.
  static constexpr int kRestAt = T::kSteps / 4 * 512;
  static constexpr int kFragmentBytes = T::kSteps / 2 * 512 * (T::kForms ? 2 : 1);
  static constexpr int kRowsAt = kFragmentBytes + 256 + 16;

  __device__ static const float2* Factors(const uint8_t* query) {
    return reinterpret_cast<const float2*>(query + kFragmentBytes);
  }

  static constexpr float kRestUnit = 0x1p-15f;
  // Whether there is a rest, of any head.
  __device__ static bool HasRest(const uint8_t* query) {
    return *reinterpret_cast<const int32_t*>(query + kFragmentBytes + 256) != 0;
  }

  // What a lane needs of the rows: dims {2 (lane % 4), + 1} + 8 i of head lane / 8. For keys of 4
  // bits i is PlaceOf4(), so that what follows knows one order.
  struct Rows {
    uint32_t pair[2 * T::kSteps];
  };
  // Of the pairs of steps above: i is 2 (which) of the first, and 8 more of the second.
  __device__ static constexpr int PlaceOf4(int i) { return i % 8 / 4 * 8 + i / 8 * 4 + i % 4; }
  // q: the item's first query row, in global memory. keys: the kind of K, of pages.
  __device__ static __forceinline__ void Load(const uint16_t* q, int heads, bool pages,
                                              [[maybe_unused]] BlockKind keys, int lane,
                                              Rows& rows) {
    const int row = lane >> 2, quad = lane & 3;
    const bool valid = (pages || (row & 1) == 0) && row / 2 < heads;
    q += row / 2 * T::kDim + quad * 2;
    if constexpr (T::kMixed) {
      const bool wide = pages && keys == BlockKind::kInt4;
#pragma unroll
      for (int i = 0; i < 2 * T::kSteps; ++i) {
        const auto* pair = reinterpret_cast<const uint32_t*>(q + (wide ? PlaceOf4(i) : i) * 8);
        rows.pair[i] = valid ? __ldg(pair) : 0u;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2 * T::kSteps; ++i) {
        rows.pair[i] = valid ? __ldg(reinterpret_cast<const uint32_t*>(q + i * 8)) : 0u;
      }
    }
  }
  __device__ static __forceinline__ void WriteForWindows(const Rows& rows, uint8_t* query,
                                                         int lane) {
#pragma unroll
    for (int i = 0; i < T::kSteps / 2; ++i) {
      reinterpret_cast<uint4*>(query)[i * 32 + lane] = {rows.pair[4 * i], rows.pair[4 * i + 1],
                                                        rows.pair[4 * i + 2], rows.pair[4 * i + 3]};
    }
  }
  // Where the dims of an operand lie (Digits).
  enum class Order { kPairs, kLevelsBySteps, kLevelsInTurn };
  template <Order kOrder = Order::kPairs>
  __device__ static __forceinline__ void WriteForPages(const Rows& rows,
                                                       [[maybe_unused]] BlockKind keys,
                                                       float scale_log2, uint8_t* query, int lane) {
    uint32_t most = 0;
#pragma unroll
    for (const uint32_t pair : rows.pair) {
      most = max(most, max(pair << 16 & 0x7fff0000u, pair & 0x7fff0000u));
    }
    most = max(most, __shfl_xor_sync(~0u, most, 1));
    most = max(most, __shfl_xor_sync(~0u, most, 2));
    // Eight ones, 255 * 2^7, would be beyond 127 * 256 + 127.
    most += 0x00010000u;
    const int exponent = static_cast<int>(most >> 23) - 127 - 14;
    const float up = Power2(-exponent);

    float sum = 0.0f, rest = 0.0f;
    Digits<kOrder>(rows, query, lane, [&](float q) {
      const float x = q * up, integer = (x + kToInteger) - kToInteger;
      sum += integer;
      rest += fabsf(x - integer);
      return integer;
    });
    const bool has_rest = __any_sync(~0u, QuadSum(rest) > kMostRest);
    if (has_rest) {
      float rest_sum = 0.0f;
      Digits<kOrder>(rows, query + kRestAt, lane, [&](float q) {
        const float x = q * up, part = (x - ((x + kToInteger) - kToInteger)) * (1.0f / kRestUnit);
        const float integer = (part + kToInteger) - kToInteger;
        rest_sum += integer;
        return integer;
      });
      sum = fmaf(rest_sum, kRestUnit, sum);
    }
    if (lane == 0) *reinterpret_cast<int32_t*>(query + kFragmentBytes + 256) = has_rest ? 1 : 0;
    // Raw logits count code * 4^(3 - p) * 4^p at 2 bits, code * 16 at 3 and 4.
    const bool fine = T::kMixed && keys != BlockKind::kInt2;
    // Of the head of column lane / 4.
    const float factor = scale_log2 * Power2(exponent) * (fine ? 0x1p-4f : 0x1p-6f);
    sum = QuadSum(sum) * (fine ? 16.0f : 64.0f);
    const int head_lane = (lane & 3) * 8;
    reinterpret_cast<float2*>(query + kFragmentBytes)[lane] = {__shfl_sync(~0u, sum, head_lane),
                                                               __shfl_sync(~0u, factor, head_lane)};
  }

  // Keys of channels. q times a power of two in fp16, so that the largest lies between 2^-5 and
  // 2^-4 (no scale of fp16 makes 16 of it overflow), in the order of m16n8k16 fragments and times
  // ChannelPlaces::Up(); columns of a head are alike. Behind it, -q in odd columns and 0 in even
  // ones, which makes what rounding takes from q times a scale; and the rows, by head and dim.
  template <BlockKind kK>
  __device__ static __forceinline__ void WriteForChannels(const Rows& rows, float scale_log2,
                                                          uint8_t* query, int lane) {
    uint32_t most = 0;
#pragma unroll
    for (const uint32_t pair : rows.pair) {
      most = max(most, max(pair << 16 & 0x7fff0000u, pair & 0x7fff0000u));
    }
    most = max(most, __shfl_xor_sync(~0u, most, 1));
    most = max(most, __shfl_xor_sync(~0u, most, 2));
    const int exponent = static_cast<int>(most >> 23) - 127 + 5;
    const float up = Power2(-exponent);
    const bool odd = (lane >> 2 & 1) != 0;
    auto* fragments = reinterpret_cast<uint4*>(query) + lane;
    auto* plain = reinterpret_cast<uint32_t*>(query + kRowsAt) + (lane >> 3) * (T::kDim / 2);
#pragma unroll
    for (int i = 0; i < T::kSteps / 2; ++i) {
      uint32_t x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t pair = rows.pair[4 * i + j];
        const float f = up * ChannelPlaces<kK>::Up(2 * i + j / 2);
        x[j] = PackHalf(Bf16Low(pair) * f, Bf16High(pair) * f);
        if (!odd) {
          plain[(4 * i + j) * 4 + (lane & 3)] = PackHalf(Bf16Low(pair) * up, Bf16High(pair) * up);
        }
      }
      fragments[i * 32] = {x[0], x[1], x[2], x[3]};
      const uint32_t keep = odd ? ~0u : 0u, sign = 0x80008000u;
      fragments[(T::kSteps / 2 + i) * 32] = {(x[0] ^ sign) & keep, (x[1] ^ sign) & keep,
                                             (x[2] ^ sign) & keep, (x[3] ^ sign) & keep};
    }
    const float factor = scale_log2 * Power2(exponent);
    reinterpret_cast<float2*>(query + kFragmentBytes)[lane] = {
        0.0f, __shfl_sync(~0u, factor, (lane & 3) * 8)};
  }

 private:
  // Of units of the integers. Each is off by at most 1/2, so that the query is off by 1 of more
  // than 2^14: 6e-5 of it.
  static constexpr float kMostRest = 2.0f;
  static constexpr float kToInteger = 0x1.8p23f;  // a float near it has its integer in its low bits

  // High bytes in even columns, low ones in odd columns, of the integers that `to_integer` makes.
  // Levels of a codebook: operand 2 u + odd has the even or odd dims of 16-dim steps 2 i + u, or,
  // in turn, of steps 4 u + i.
  template <Order kOrder, typename ToInteger>
  __device__ static __forceinline__ void Digits(const Rows& rows, uint8_t* query, int lane,
                                                ToInteger to_integer) {
    const bool low = (lane >> 2 & 1) != 0;
    // integer = 256 * high + low, both in [-128, 128): the high byte is that of integer + 128.
    const float bias = low ? kToInteger : kToInteger + 128.0f;
    const uint32_t select = low ? 0x0040u : 0x0051u;
    const auto bits = [&](float q) { return __float_as_uint(to_integer(q) + bias); };
    uint32_t digits[4][2];
    if constexpr (kOrder != Order::kPairs) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {  // u, odd, and the half of a step
        const int u = i / 4, odd = i / 2 % 2;
        const auto byte_of = [&](int k) {
          const int step = kOrder == Order::kLevelsInTurn ? 4 * u + k : 2 * k + u;
          const uint32_t x = rows.pair[2 * step + i % 2];
          return bits(odd == 0 ? Bf16Low(x) : Bf16High(x));
        };
        digits[i / 2][i % 2] = __byte_perm(__byte_perm(byte_of(0), byte_of(1), select),
                                           __byte_perm(byte_of(2), byte_of(3), select), 0x5410);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t x = rows.pair[i], y = rows.pair[i + 8];
        const uint32_t even = __byte_perm(bits(Bf16Low(x)), bits(Bf16Low(y)), select);
        const uint32_t odd = __byte_perm(bits(Bf16High(x)), bits(Bf16High(y)), select);
        digits[i / 2][i % 2] = __byte_perm(even, odd, 0x5410);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      reinterpret_cast<uint4*>(query)[i * 32 + lane] = {digits[2 * i][0], digits[2 * i][1],
                                                        digits[2 * i + 1][0], digits[2 * i + 1][1]};
    }
  }

  __device__ static __forceinline__ float QuadSum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
  }
};

}  // namespace oscar::cuda
