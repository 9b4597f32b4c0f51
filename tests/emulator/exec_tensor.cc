// Matrices: ldmatrix, movmatrix, mma.sync and wgmma. Sums of floating-point dot products are made
// in fp32 in the order of k, which is more exact than tensor cores, who cut bits off.
#include <fmt/core.h>

#include <charconv>

#include "emulator/access.h"
#include "emulator/decoder.h"
#include "emulator/lanes.h"

namespace oscar::emulator {

namespace {

OSCAR_INLINE uint16_t HalfOf(uint32_t pair, uint32_t which) {
  return static_cast<uint16_t>(pair >> (16 * which));
}

// ---- 8 x 8 matrices of 16-bit numbers ----

// in.list: registers; count: matrices; flags: 1 transposed, 2 a 64-bit address, 4 a store.
void MoveMatrices(Warp& w, const Instruction& in) {
  if (!w.Gather(kAllLanes)) return;
  const bool transposed = (in.flags & 1) != 0, store = (in.flags & 4) != 0;
  // All rows first: a result may lie where the addresses do.
  std::byte* all_rows[kLanes];
  for (uint32_t lane = 0; lane < 8u * in.count; ++lane) {
    uint64_t address = in.flags & 2 ? AddressOf<uint64_t>(w, in, in.a, lane)
                                    : AddressOf<uint32_t>(w, in, in.a, lane);
    if (address - kSharedWindow < kWindowBytes) address -= kSharedWindow;
    all_rows[lane] = Access<Space::kShared>(w, in, address, 16, lane, 16);
    if (all_rows[lane] == nullptr) return;
  }
  for (uint32_t m = 0; m < in.count; ++m) {
    std::byte* const* rows = all_rows + 8 * m;
    uint32_t* d = w.R<uint32_t>(in.list[m]);
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      const uint32_t g = lane / 4, t = 2 * (lane % 4);
      uint16_t pair[2];
      for (uint32_t k = 0; k < 2; ++k) {
        std::byte* at = transposed ? rows[t + k] + 2 * g : rows[g] + 2 * (t + k);
        if (store) {
          const uint16_t value = HalfOf(d[lane], k);
          std::memcpy(at, &value, 2);
        } else {
          std::memcpy(&pair[k], at, 2);
        }
      }
      if (!store) d[lane] = uint32_t{pair[1]} << 16 | pair[0];
    }
  }
}

void Transpose(Warp& w, const Instruction& in) {
  if (!w.Gather(kAllLanes)) return;
  const uint32_t* a = w.R<uint32_t>(in.a);
  uint16_t matrix[8][8];
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    for (uint32_t k = 0; k < 2; ++k) matrix[lane / 4][2 * (lane % 4) + k] = HalfOf(a[lane], k);
  }
  uint32_t* d = w.R<uint32_t>(in.d);
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    d[lane] =
        uint32_t{matrix[2 * (lane % 4) + 1][lane / 4]} << 16 | matrix[2 * (lane % 4)][lane / 4];
  }
}

// ---- mma.sync ----

template <bool kBf16>
OSCAR_INLINE float Widen(uint16_t x) {
  return kBf16 ? Bf16ToFloat(x) : HalfToFloat(x);
}

// A [16][kK] from a warp's registers, as mma and wgmma have it.
template <bool kBf16>
OSCAR_INLINE void ReadA(const Warp& w, const uint32_t* places, int pairs_of_8, float (*a)[16]) {
  for (int r = 0; r < 2 * pairs_of_8; ++r) {
    const uint32_t* reg = w.R<uint32_t>(places[r]);
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      const uint32_t row = lane / 4 + (r & 1 ? 8 : 0), k = 2 * (lane % 4) + (r & 2 ? 8 : 0);
      a[row][k] = Widen<kBf16>(HalfOf(reg[lane], 0));
      a[row][k + 1] = Widen<kBf16>(HalfOf(reg[lane], 1));
    }
  }
}

// list: d0..3, a0.., b0.., c0..3.
template <bool kBf16, int kK>
void MmaHalf(Warp& w, const Instruction& in) {
  if (!w.Gather(kAllLanes)) return;
  constexpr int kA = kK / 4, kB = kK / 8;
  alignas(64) float a[16][16], b[kK][8], c[16][8];
  ReadA<kBf16>(w, in.list + 4, kK / 8, a);
  for (int r = 0; r < kB; ++r) {
    const uint32_t* reg = w.R<uint32_t>(in.list[4 + kA + r]);
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      const uint32_t k = 2 * (lane % 4) + 8 * static_cast<uint32_t>(r);
      b[k][lane / 4] = Widen<kBf16>(HalfOf(reg[lane], 0));
      b[k + 1][lane / 4] = Widen<kBf16>(HalfOf(reg[lane], 1));
    }
  }
  for (uint32_t r = 0; r < 4; ++r) {
    const float* reg = w.R<float>(in.list[4 + kA + kB + r]);
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      c[lane / 4 + (r & 2 ? 8 : 0)][2 * (lane % 4) + (r & 1)] = reg[lane];
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < kK; ++k) {
      const float x = a[row][k];
      for (int n = 0; n < 8; ++n) c[row][n] = __builtin_fmaf(x, b[k][n], c[row][n]);
    }
  }
  for (uint32_t r = 0; r < 4; ++r) {
    float* reg = w.R<float>(in.list[r]);
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      reg[lane] = Canonical(c[lane / 4 + (r & 2 ? 8 : 0)][2 * (lane % 4) + (r & 1)]);
    }
  }
}

// m16n8k32 on bytes; flags 1: A signed, 2: B signed.
void MmaBytes(Warp& w, const Instruction& in) {
  if (!w.Gather(kAllLanes)) return;
  alignas(64) int32_t a[16][32], b[32][8], c[16][8];
  const auto widen = [](uint32_t word, uint32_t which, bool is_signed) {
    const auto x = static_cast<uint8_t>(word >> (8 * which));
    return is_signed ? int32_t{static_cast<int8_t>(x)} : int32_t{x};
  };
  for (uint32_t r = 0; r < 4; ++r) {
    const uint32_t* reg = w.R<uint32_t>(in.list[4 + r]);
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      for (uint32_t k = 0; k < 4; ++k) {
        a[lane / 4 + (r & 1 ? 8 : 0)][4 * (lane % 4) + k + (r & 2 ? 16 : 0)] =
            widen(reg[lane], k, (in.flags & 1) != 0);
      }
    }
  }
  for (uint32_t r = 0; r < 2; ++r) {
    const uint32_t* reg = w.R<uint32_t>(in.list[8 + r]);
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      for (uint32_t k = 0; k < 4; ++k) {
        b[4 * (lane % 4) + k + 16 * r][lane / 4] = widen(reg[lane], k, (in.flags & 2) != 0);
      }
    }
  }
  for (uint32_t r = 0; r < 4; ++r) {
    const int32_t* reg = w.R<int32_t>(in.list[10 + r]);
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      c[lane / 4 + (r & 2 ? 8 : 0)][2 * (lane % 4) + (r & 1)] = reg[lane];
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 32; ++k) {
      const int32_t x = a[row][k];
      for (int n = 0; n < 8; ++n) {
        c[row][n] = static_cast<int32_t>(static_cast<uint32_t>(c[row][n]) +
                                         static_cast<uint32_t>(x * b[k][n]));
      }
    }
  }
  for (uint32_t r = 0; r < 4; ++r) {
    int32_t* reg = w.R<int32_t>(in.list[r]);
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      reg[lane] = c[lane / 4 + (r & 2 ? 8 : 0)][2 * (lane % 4) + (r & 1)];
    }
  }
}

// ---- wgmma: each warp of the four computes its own 16 rows, when it gets there ----

// A matrix in shared memory, as a descriptor says. All of its addresses are of 16 bytes.
struct Tile {
  explicit Tile(uint64_t d)
      : start((d & 0x3fff) << 4),
        leading(((d >> 16) & 0x3fff) << 4),
        stride(((d >> 32) & 0x3fff) << 4),
        swizzle(d >> 62) {}
  uint64_t start, leading, stride, swizzle;

  // Bytes that a row of an atom has: of 128, 64, 32, or 16 without swizzle.
  uint64_t row_bytes() const { return swizzle == 0 ? 16 : uint64_t{256} >> swizzle; }
  // Where 16 bytes lie: `row` and `byte` of a matrix whose rows go along k (K-major).
  uint64_t RowMajor(uint64_t row, uint64_t byte) const {
    uint64_t at = start + row / 8 * stride + row % 8 * row_bytes();
    at += swizzle == 0 ? byte / 16 * leading + byte % 16 : byte;
    return Swizzle(at);
  }
  // The same where they go along n: 8 rows of k by row_bytes() make an atom.
  uint64_t ColumnMajor(uint64_t k, uint64_t byte) const {
    const uint64_t width = row_bytes();
    return Swizzle(start + byte / width * leading + k / 8 * stride + k % 8 * width + byte % width);
  }
  uint64_t Swizzle(uint64_t at) const {
    if (swizzle == 0) return at;
    const uint64_t bits = swizzle == 1 ? 7 : swizzle == 2 ? 3 : 1;
    return at ^ (((at >> 7) & bits) << 4);
  }
};

// list: n / 2 accumulators, then 4 registers or a descriptor of A, a descriptor of B, and scale-d
// (a predicate's place, or 0 for 1). count: N / 8. flags: 1 BF16, 2 A in registers, 4 A transposed,
// 8 B transposed, 16 scale-d is 0, 32 and 64: A or B negated.
template <bool kBf16>
void Wgmma(Warp& w, const Instruction& in) {
  if (!w.Gather(kAllLanes)) return;
  if (w.live != kAllLanes) {
    w.Fault(in, "a warp that is not whole");
    return;
  }
  const auto columns = static_cast<uint32_t>(in.count) * 8;
  const uint32_t* places = in.list + columns / 2;
  alignas(64) float a[16][16];
  alignas(64) float b[16][256], d[16][256];
  const auto read = [&](uint64_t address, float* out) {
    const std::byte* at = Access<Space::kShared>(w, in, address, 16, 0, 16);
    if (at == nullptr) return false;
    uint16_t numbers[8];
    std::memcpy(numbers, at, 16);
    for (int i = 0; i < 8; ++i) out[i] = Widen<kBf16>(numbers[i]);
    return true;
  };
  uint64_t b_descriptor;
  if ((in.flags & 2) != 0) {
    ReadA<kBf16>(w, places, 2, a);
    b_descriptor = w.R<uint64_t>(places[4])[0];
  } else {
    const Tile tile(w.R<uint64_t>(places[0])[0]);
    b_descriptor = w.R<uint64_t>(places[1])[0];
    const uint32_t first = 16 * (static_cast<uint32_t>(w.index) % 4);
    float line[8];
    for (uint32_t i = 0; i < 16; ++i) {
      for (uint32_t half = 0; half < 2; ++half) {
        const bool flipped = (in.flags & 4) != 0;
        const uint64_t address = flipped ? tile.ColumnMajor(i, 2 * first + 16 * half)
                                         : tile.RowMajor(first + i, 16 * half);
        if (!read(address, line)) return;
        for (uint32_t k = 0; k < 8; ++k) {
          (flipped ? a[8 * half + k][i] : a[i][8 * half + k]) = line[k];
        }
      }
    }
  }
  const Tile tile(b_descriptor);
  if ((in.flags & 8) != 0) {
    for (uint32_t k = 0; k < 16; ++k) {
      for (uint32_t n = 0; n < columns; n += 8) {
        if (!read(tile.ColumnMajor(k, 2 * n), &b[k][n])) return;
      }
    }
  } else {
    float line[8];
    for (uint32_t n = 0; n < columns; ++n) {
      for (uint32_t half = 0; half < 2; ++half) {
        if (!read(tile.RowMajor(n, 16 * half), line)) return;
        for (uint32_t k = 0; k < 8; ++k) b[8 * half + k][n] = line[k];
      }
    }
  }
  const uint32_t scale_place = places[(in.flags & 2) != 0 ? 5 : 2];
  const bool keep = scale_place != 0 ? (w.P(scale_place) & 1) != 0 : (in.flags & 16) == 0;
  const float sign = ((in.flags >> 5) & 1) != ((in.flags >> 6) & 1) ? -1.0f : 1.0f;
  const auto element = [](uint32_t r, uint32_t lane, uint32_t* row, uint32_t* column) {
    *row = lane / 4 + (r & 2 ? 8 : 0);
    *column = r / 4 * 8 + 2 * (lane % 4) + (r & 1);
  };
  uint32_t row, column;
  for (uint32_t r = 0; r < columns / 2; ++r) {
    const float* reg = w.R<float>(in.list[r]);
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      element(r, lane, &row, &column);
      d[row][column] = keep ? reg[lane] : 0.0f;
    }
  }
  for (uint32_t i = 0; i < 16; ++i) {
    for (uint32_t k = 0; k < 16; ++k) {
      const float x = a[i][k] * sign;
      for (uint32_t n = 0; n < columns; ++n) d[i][n] = __builtin_fmaf(x, b[k][n], d[i][n]);
    }
  }
  for (uint32_t r = 0; r < columns / 2; ++r) {
    float* reg = w.R<float>(in.list[r]);
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      element(r, lane, &row, &column);
      reg[lane] = Canonical(d[row][column]);
    }
  }
}

void GatherOnly(Warp& w, const Instruction&) { w.Gather(kAllLanes); }

// ---- decoding ----

void AddPlaces(Decoder& d, size_t operand, int bytes, std::vector<uint32_t>* out) {
  const Operand& o = d.operand_at(operand);
  if (o.kind != Operand::Kind::kVector) {
    out->push_back(d.PlaceOf(o, bytes));
    return;
  }
  for (const Operand& item : o.items) out->push_back(d.PlaceOf(item, bytes));
}

bool DecodeMma(Decoder& d) {
  Instruction* in = d.in;
  std::vector<uint32_t> places;
  for (size_t i = 0; i < 4; ++i) AddPlaces(d, i, 4, &places);
  const auto& op = d.statement().op;
  std::vector<std::string_view> types;
  for (const std::string_view part : op) {
    if (ParseType(part).kind != 0) types.push_back(part);
  }
  if (types.size() != 4 || !d.Has("row") || !d.Has("col") || d.Has("satfinite")) {
    return d.Fail("a form of mma that is not implemented");
  }
  in->list = d.List(places);
  const bool f32 = types[0] == "f32" && types[3] == "f32" && types[1] == types[2];
  if (d.Has("m16n8k16") && f32 && places.size() == 14) {
    if (types[1] == "bf16") in->run = MmaHalf<true, 16>;
    if (types[1] == "f16") in->run = MmaHalf<false, 16>;
  } else if (d.Has("m16n8k8") && f32 && places.size() == 11) {
    if (types[1] == "bf16") in->run = MmaHalf<true, 8>;
    if (types[1] == "f16") in->run = MmaHalf<false, 8>;
  } else if (d.Has("m16n8k32") && types[0] == "s32" && places.size() == 14 &&
             (types[1] == "u8" || types[1] == "s8") && (types[2] == "u8" || types[2] == "s8")) {
    in->flags = static_cast<uint16_t>((types[1] == "s8" ? 1 : 0) | (types[2] == "s8" ? 2 : 0));
    in->run = MmaBytes;
  }
  return true;
}

bool DecodeWgmma(Decoder& d) {
  Instruction* in = d.in;
  if (d.part(1) != "mma_async") {
    in->run = GatherOnly;  // fence, commit_group, wait_group
    return true;
  }
  int columns = 0;
  for (const std::string_view part : d.statement().op) {
    if (!part.starts_with("m64n") || !part.ends_with("k16")) continue;
    const std::string_view n = part.substr(4, part.size() - 7);
    std::from_chars(n.data(), n.data() + n.size(), columns);
  }
  const bool bf16 = d.Has("bf16");
  if (columns == 0 || !d.Has("f32") || (!bf16 && !d.Has("f16"))) {
    return d.Fail("a form of wgmma that is not implemented");
  }
  std::vector<uint32_t> places;
  AddPlaces(d, 0, 4, &places);
  if (places.size() != static_cast<size_t>(columns) / 2)
    return d.Fail("a wrong number of registers");
  const bool registers = d.operand_at(1).kind == Operand::Kind::kVector;
  AddPlaces(d, 1, registers ? 4 : 8, &places);
  places.push_back(d.Place(2, 8));
  uint16_t flags = static_cast<uint16_t>((bf16 ? 1 : 0) | (registers ? 2 : 0));
  uint64_t bits = 0;
  if (d.Immediate(3, &bits)) {
    if (bits == 0) flags |= 16;
    places.push_back(0);
  } else {
    places.push_back(d.Predicate(3));
  }
  const auto number = [&](size_t i) {
    uint64_t value = 0;
    if (!d.Immediate(i, &value)) d.Fail("a number was expected");
    return static_cast<int64_t>(value);
  };
  if (number(4) < 0) flags |= 32;
  if (number(5) < 0) flags |= 64;
  const size_t transpose = 6;
  if (!registers && number(transpose) != 0) flags |= 4;
  if (number(registers ? transpose : transpose + 1) != 0) flags |= 8;
  in->flags = flags;
  in->count = static_cast<uint8_t>(columns / 8);
  in->list = d.List(places);
  in->run = bf16 ? Wgmma<true> : Wgmma<false>;
  return true;
}

}  // namespace

bool DecodeTensor(Decoder& d) {
  const std::string_view op = d.part(0);
  Instruction* in = d.in;
  if (op == "mma") return DecodeMma(d);
  if (op == "wgmma") return DecodeWgmma(d);
  if (op == "movmatrix") {
    in->d = d.Place(0, 4);
    in->a = d.Place(1, 4);
    in->run = Transpose;
    return true;
  }
  if (op == "ldmatrix" || op == "stmatrix") {
    const bool store = op == "stmatrix";
    std::vector<uint32_t> places;
    AddPlaces(d, store ? 1 : 0, 4, &places);
    if (!d.Has("m8n8") || !d.Has("b16")) return d.Fail("only m8n8.b16 is implemented");
    in->flags = static_cast<uint16_t>((d.Has("trans") ? 1 : 0) | (store ? 4 : 0));
    if (d.Address(store ? 0 : 1, &in->a) == 8) in->flags |= 2;
    in->count = static_cast<uint8_t>(places.size());
    in->list = d.List(places);
    in->run = MoveMatrices;
    return true;
  }
  return false;
}

}  // namespace oscar::emulator
