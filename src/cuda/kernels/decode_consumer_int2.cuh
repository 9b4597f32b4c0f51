// The decode kernel's consumer warps for INT2 pages of D 128, one group a row, up to 4 query heads
// a KV head. Device only; decode_attention.cuh describes the whole.
//
// Four heads fill half of a fragment's eight columns. Head h has columns 2h and 2h + 1, so a lane
// has the tokens of one head only, and half as many logits as in the layout of DecodeConsumer. The
// second column is zero for K; for V it carries what rounding took from P, so P * (V scale) is a
// sum of two fp16 numbers and P against the windows one of two BF16 numbers, at no further product.
//
// R, the reference of the softmax, is a whole number for pages: the largest P * (V scale) begins
// between 2^10 and 2^11 and R rises when one exceeds fp16.
#pragma once

#include "cuda/kernels/decode_ring.cuh"

namespace oscar::cuda {

template <typename T>
class DecodeConsumerInt2 : DecodeRing<T> {
 public:
  static_assert(T::kKind == PageKind::kInt2 && T::kDim == 128 && T::kGroups == 1 && T::kHeads == 4);

  __device__ DecodeConsumerInt2(const DecodeKernelParams& p, uint8_t* shared,
                                const DecodeShared<T>& at, int warp, int lane)
      : DecodeRing<T>(p, shared, at, warp, lane) {}

  __device__ void Run() {
    this->ForEachItem([&](const DecodeItem& item, const uint8_t* q, int rank) {
      if (item.kind == kItemPages) {
        Pages(item, q, rank);
      } else {
        Units(item, q, rank);
      }
    });
  }

 private:
  using Ring = DecodeRing<T>;
  using Ring::lane_, Ring::quad_, Ring::row_, Ring::shared_;
  using Ring::Power2, Ring::ExponentOf, Ring::TokenMax, Ring::TokenSum;

  static constexpr float kLargestProduct = 65000.0f;  // of P * (V scale), in fp16
  static constexpr float kProductBits = 11.0f;        // of the largest where R is set

  struct PageState {
    uint32_t q[T::kSteps][2];
    float q_sum, factor;  // raw logits of all codes 1; raw logit -> log2 units
    float reference = kEmptyReference, l = 0.0f, z = 0.0f;
    float o[T::kSteps][4] = {};
  };

  __device__ __forceinline__ void LoadQ(const DecodeItem& item, const uint8_t* q,
                                        uint32_t (&fragments)[T::kSteps][2]) const {
    const bool valid = (row_ & 1) == 0 && row_ / 2 < item.heads;
    q += row_ / 2 * (T::kDim * 2) + quad_ * 4;
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        fragments[s][j] = valid ? *reinterpret_cast<const uint32_t*>(q + s * 32 + j * 16) : 0u;
      }
    }
  }

  // fp16, times 2^(4 - exponent of the k-step) and a power of two a head.
  __device__ __forceinline__ void ScaleQ(PageState& state) const {
    __nv_bfloat162 most = __habs2(AsBf16x2(state.q[0][0]));
#pragma unroll
    for (int i = 1; i < 2 * T::kSteps; ++i) {
      most = __hmax2(most, __habs2(AsBf16x2(state.q[i / 2][i % 2])));
    }
    float largest = fmaxf(__low2float(most), __high2float(most));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const int exponent = largest > 0.0f ? ExponentOf(largest) - 10 : 0;
    float ones[4] = {};
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
      const float f = Power2(4 - T::Exponent(s) - exponent);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        state.q[s][j] = PackHalf(Bf16Low(state.q[s][j]) * f, Bf16High(state.q[s][j]) * f);
      }
      const uint32_t one = 0x00010001u << T::Exponent(s);
      MmaFp16(ones, one, one, one, one, state.q[s][0], state.q[s][1]);
    }
    state.q_sum = ones[0];
    const float factor = this->p_.scale_log2 * Power2(20) * Power2(exponent);
    state.factor = __shfl_sync(~0u, factor, quad_ * 8);
  }
  __device__ static __forceinline__ __nv_bfloat162 AsBf16x2(uint32_t x) {
    return *reinterpret_cast<const __nv_bfloat162*>(&x);
  }

  __device__ __forceinline__ void Pages(const DecodeItem& item, const uint8_t* q, int rank) {
    PageState state;
    LoadQ(item, q, state.q);
    ScaleQ(state);
    for (int i = rank; i < item.count; i += T::kWarps) Page(state);
    this->WaitForState();
    const float l = TokenSum(state.l), z = TokenSum(state.z);
    if (quad_ >= item.heads) return;
    float* out = StateOf(rank * item.heads + quad_);
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
      const float up = Power2(24 - T::Exponent(s));
      out[s * 16 + row_] = fmaf(state.o[s][0] + state.o[s][1], up, z);
      out[s * 16 + 8 + row_] = fmaf(state.o[s][2] + state.o[s][3], up, z);
    }
    WriteReference(rank * item.heads + quad_, state.reference, l);
  }

  __device__ __forceinline__ void Page(PageState& state) {
    this->WaitStage();
    const uint8_t* block = shared_ + this->StageOffset();
    float logit[8];  // of tokens row_ + 8 j
    Keys(block, state, logit);
    float scale[8], minimum[8];
    LoadMeta(block + T::kLayout.v_meta_offset(), scale, minimum);
    float p[8], product[8];
    const float largest = Softmax(state, logit, scale, p, product);
    if (__any_sync(~0u, largest > kLargestProduct)) {
      RaiseReference(state, logit, scale);
      Softmax(state, logit, scale, p, product);
    }
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      state.l += p[j] + p[j + 1];
      state.z = fmaf(p[j], minimum[j], fmaf(p[j + 1], minimum[j + 1], state.z));
    }
    Values(block + T::kLayout.v_codes_offset(), product, state);
    this->ReleaseStage();
  }

  // p and p * (V scale); returns this lane's largest product.
  __device__ static __forceinline__ float Softmax(const PageState& state, const float (&logit)[8],
                                                  const float (&scale)[8], float (&p)[8],
                                                  float (&product)[8]) {
    float largest = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      p[j] = Exp2(fmaf(logit[j], state.factor, -state.reference));
      product[j] = p[j] * scale[j];
      largest = fmaxf(largest, product[j]);
    }
    return largest;
  }

  __device__ __forceinline__ void LoadMeta(const uint8_t* meta, float (&scale)[8],
                                           float (&minimum)[8]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 m = *reinterpret_cast<const uint4*>(meta + row_ * 32 + i * 16);
      const uint32_t pair[4] = {m.x, m.y, m.z, m.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = HalfPair(pair[j]);
        scale[i * 4 + j] = x.x;
        minimum[i * 4 + j] = x.y;
      }
    }
  }

  __device__ __forceinline__ void Keys(const uint8_t* block, const PageState& state,
                                       float (&logit)[8]) const {
    float c[4][4] = {};
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const uint4 w = *reinterpret_cast<const uint4*>(block + T::kLayout.k_codes_offset() +
                                                      t * 512 + lane_ * 16);
      const uint4 shifted = {w.x >> 8, w.y >> 8, w.z >> 8, w.w >> 8};
#pragma unroll
      for (int s = 0; s < T::kSteps; ++s) {
        const uint32_t mask = 0x00030003u << T::Exponent(s);
        const uint4& from = s < 4 ? w : shifted;
        MmaFp16(c[t], from.x & mask, from.z & mask, from.y & mask, from.w & mask, state.q[s][0],
                state.q[s][1]);
      }
    }
    float scale[8], minimum[8];
    LoadMeta(block + T::kLayout.k_meta_offset(), scale, minimum);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      logit[j] = fmaf(c[j / 2][j % 2 * 2], scale[j], minimum[j] * state.q_sum);
    }
  }

  __device__ __forceinline__ void Values(const uint8_t* codes, const float (&product)[8],
                                         PageState& state) const {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      uint32_t b[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float x = product[2 * t + i];
        b[i] = Transpose8x8(PackHalf(x, x - HalfPair(PackHalf(x, 0.0f)).x));
      }
      const uint4 w = *reinterpret_cast<const uint4*>(codes + t * 512 + lane_ * 16);
      const uint4 shifted = {w.x >> 8, w.y >> 8, w.z >> 8, w.w >> 8};
#pragma unroll
      for (int s = 0; s < T::kSteps; ++s) {
        const uint32_t mask = 0x00030003u << T::Exponent(s);
        const uint4& from = s < 4 ? w : shifted;
        MmaFp16(state.o[s], from.x & mask, from.y & mask, from.z & mask, from.w & mask, b[0], b[1]);
      }
    }
  }

  __device__ __forceinline__ void RaiseReference(PageState& state, const float (&logit)[8],
                                                 const float (&scale)[8]) const {
    float largest = -INFINITY;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      largest = fmaxf(largest, fmaf(logit[j], state.factor, __log2f(scale[j])));
    }
    const float reference = fmaxf(ceilf(TokenMax(largest)) - kProductBits, state.reference);
    const float f = Exp2(state.reference - reference);
    state.reference = reference;
    state.l *= f;
    state.z *= f;
#pragma unroll
    for (int i = 0; i < 4 * T::kSteps; ++i) state.o[i / 4][i % 4] *= f;
  }

  // ---- BF16 windows, in units of 16 tokens ----

  struct UnitState {
    uint32_t q[T::kSteps][2];
    float reference = kEmptyReference, l = 0.0f;
    float o[T::kSteps][4] = {};
  };

  __device__ __forceinline__ void Units(const DecodeItem& item, const uint8_t* q, int rank) {
    UnitState state;
    LoadQ(item, q, state.q);
    for (int i = rank; i < item.count; i += T::kWarps) {
      Unit(this->ValidRows(item, item.first + i), state);
    }
    this->WaitForState();
    const float l = TokenSum(state.l);
    if (quad_ >= item.heads) return;
    float* out = StateOf(rank * item.heads + quad_);
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
      out[s * 16 + row_] = state.o[s][0] + state.o[s][1];
      out[s * 16 + 8 + row_] = state.o[s][2] + state.o[s][3];
    }
    WriteReference(rank * item.heads + quad_, state.reference, l);
  }

  // The first `valid` of 16 tokens count.
  __device__ __forceinline__ void Unit(int valid, UnitState& state) {
    const float factor = this->p_.scale_log2;
    this->WaitStage();
    float c[4] = {};
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
      uint32_t a[4];
      LoadMatrix4(a, this->KeyRow(s));
      MmaBf16(c, a[0], a[1], a[2], a[3], state.q[s][0], state.q[s][1]);
    }
    this->ReleaseStage();
    const float logit[2] = {row_ < valid ? c[0] * factor : -INFINITY,
                            row_ + 8 < valid ? c[2] * factor : -INFINITY};
    const float largest = fmaxf(logit[0], logit[1]);
    if (__any_sync(~0u, largest > state.reference)) {
      const float reference = fmaxf(TokenMax(largest), state.reference);
      const float f = Exp2(state.reference - reference);
      state.reference = reference;
      state.l *= f;
#pragma unroll
      for (int i = 0; i < 4 * T::kSteps; ++i) state.o[i / 4][i % 4] *= f;
    }
    uint32_t b[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float p = Exp2(logit[i] - state.reference);
      state.l += p;
      const float rounded = Bf16Low(PackBf16(p, 0.0f));
      b[i] = Transpose8x8(PackBf16(p, p - rounded));
    }
    this->WaitStage();
    if (valid < kUnitTokens) this->ClearRows(valid);
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
      uint32_t a[4];
      LoadMatrix4Transposed(a, this->ValueRow(s));
      MmaBf16(state.o[s], a[0], a[1], a[2], a[3], b[0], b[1]);
    }
    this->ReleaseStage();
  }

  __device__ __forceinline__ float* StateOf(int index) const {
    return reinterpret_cast<float*>(shared_ + this->at_.state) + index * T::kStateStride;
  }
  __device__ __forceinline__ void WriteReference(int index, float reference, float l) const {
    if (row_ == 0) reinterpret_cast<float2*>(shared_ + this->at_.ml)[index] = {reference, l};
  }
};

}  // namespace oscar::cuda
