// Small PTX programs with known results.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "emulator/decoder.h"
#include "emulator/machine.h"
#include "emulator/tensor_map.h"

namespace oscar::emulator {
namespace {

using testing::HasSubstr;

// Device memory of the tests.
Memory& DeviceMemory() {
  static Memory memory;
  return memory;
}

template <typename T>
class Buffer {
 public:
  explicit Buffer(size_t size)
      : data_(static_cast<T*>(DeviceMemory().Allocate(size * sizeof(T), true))), size_(size) {}
  Buffer(const Buffer&) = delete;
  ~Buffer() { DeviceMemory().Free(data_, true); }
  T& operator[](size_t i) { return data_[i]; }
  uint64_t address() const { return reinterpret_cast<uint64_t>(data_); }
  size_t size() const { return size_; }

 private:
  T* data_;
  size_t size_;
};

// A kernel of up to three pointers, in %rd0 to %rd2; %r0 is the thread. Returns what went wrong.
struct Shape {
  uint32_t threads = 32, blocks = 1, shared = 0, cluster = 1;
  int host_threads = 1;
  bool late_copies = false;
};
std::string Execute(const std::string& code, std::vector<uint64_t> pointers, Shape shape = {},
                    const std::string& before = "") {
  const std::string text = R"(
.version 9.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
)" + before + R"(
.visible .entry kernel(.param .u64 p0, .param .u64 p1, .param .u64 p2)
{
.reg .pred %p<16>; .reg .b16 %rs<32>; .reg .b32 %r<128>; .reg .f32 %f<160>; .reg .b64 %rd<32>;
ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1]; ld.param.u64 %rd2, [p2];
mov.u32 %r0, %tid.x;
)" + code + "\nret;\n}\n";
  Module module;
  Program program;
  std::string error;
  if (!ScanModule(text, &module, &error)) return error;
  if (!MakeProgram(module, module.functions.at("kernel"), &program, &error)) return error;
  Launch launch;
  launch.program = &program;
  launch.grid = {shape.blocks, 1, 1};
  launch.block = {shape.threads, 1, 1};
  launch.dynamic_shared = shape.shared;
  launch.cluster = shape.cluster;
  launch.late_copies = shape.late_copies;
  pointers.resize(3);
  launch.parameters.resize(24);
  std::memcpy(launch.parameters.data(), pointers.data(), 24);
  uint64_t instructions = 0;
  return RunLaunch(launch, DeviceMemory(), shape.host_threads, &instructions);
}

// Code that stores %r1 of every thread to the first pointer.
constexpr char kStore[] =
    "mad.lo.s32 %r100, %ctaid.x, %ntid.x, %r0; mul.wide.u32 %rd30, %r100, 4; add.s64 %rd31, %rd0, "
    "%rd30; st.global.u32 [%rd31], %r1;\n";

uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

TEST(Emulator, LanesThatDivergeMeetAgain) {
  Buffer<uint32_t> out(32);
  // Lane i loops i times; then all add what their neighbour counted.
  ASSERT_EQ(Execute(std::string(R"(
mov.u32 %r2, 0;
LOOP: setp.ge.u32 %p1, %r2, %r0; @%p1 bra DONE; add.u32 %r2, %r2, 1; bra LOOP;
DONE: shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1; add.u32 %r1, %r2, %r3;
)") + kStore,
                    {out.address()}),
            "");
  for (uint32_t i = 0; i < 32; ++i) EXPECT_EQ(out[i], i + (i ^ 1));
}

TEST(Emulator, LabelsAndRegistersBelongToTheirBraces) {
  Buffer<uint32_t> out(32);
  ASSERT_EQ(Execute(std::string(R"(
mov.u32 %r1, 1;
{ .reg .b32 %r1; mov.u32 %r1, 7; bra SKIP; mov.u32 %r1, 9; SKIP: }
{ .reg .pred p; setp.eq.u32 p, %r0, 3; @!p bra SKIP; add.u32 %r1, %r1, 1; SKIP: }
)") + kStore,
                    {out.address()}),
            "");
  for (uint32_t i = 0; i < 32; ++i) EXPECT_EQ(out[i], i == 3 ? 2u : 1u);
}

TEST(Emulator, FunctionsAreInlined) {
  Buffer<uint32_t> out(32);
  const std::string twice = R"(
.func (.param .b32 result) twice(.param .b32 x)
{ .reg .b32 %a<3>; .reg .pred %q; ld.param.u32 %a0, [x]; setp.lt.u32 %q, %a0, 16; @%q bra SMALL;
  st.param.b32 [result], %a0; ret;
  SMALL: add.u32 %a1, %a0, %a0; st.param.b32 [result], %a1; ret; }
)";
  ASSERT_EQ(Execute(std::string(R"(
{ .param .b32 in; .param .b32 back; st.param.b32 [in], %r0; call.uni (back), twice, (in);
  ld.param.b32 %r1, [back]; }
)") + kStore,
                    {out.address()}, {}, twice),
            "");
  for (uint32_t i = 0; i < 32; ++i) EXPECT_EQ(out[i], i < 16 ? 2 * i : i);
}

TEST(Emulator, ShufflesVotesAndReductions) {
  Buffer<uint32_t> out(32);
  const auto run = [&](const std::string& code) {
    ASSERT_EQ(Execute(code + kStore, {out.address()}), "");
  };
  run("shfl.sync.up.b32 %r1, %r0, 1, 0, -1;");
  for (uint32_t i = 0; i < 32; ++i) EXPECT_EQ(out[i], i == 0 ? 0 : i - 1);
  run("shfl.sync.down.b32 %r1|%p1, %r0, 4, 0x181f, -1; @!%p1 mov.u32 %r1, 99;");  // in eights
  for (uint32_t i = 0; i < 32; ++i) EXPECT_EQ(out[i], i % 8 < 4 ? i + 4 : 99);
  run("setp.gt.u32 %p1, %r0, 29; vote.sync.ballot.b32 %r1, %p1, -1;");
  EXPECT_EQ(out[5], 0xc0000000u);
  run("redux.sync.add.s32 %r1, %r0, -1;");
  EXPECT_EQ(out[7], 31u * 16);
  run("and.b32 %r2, %r0, 3; match.any.sync.b32 %r1, %r2, -1;");
  EXPECT_EQ(out[2], 0x44444444u);
}

TEST(Emulator, RoundsAsTheDevice) {
  Buffer<uint32_t> out(32);
  const auto result = [&](const std::string& code) {
    EXPECT_EQ(Execute(code + kStore, {out.address()}), "");
    return out[0];
  };
  // To nearest even, and the only NaN there is.
  EXPECT_EQ(result("mov.f32 %f1, 0F3f808000; cvt.rn.bf16x2.f32 %r1, %f1, %f1;"), 0x3f803f80u);
  EXPECT_EQ(result("mov.f32 %f1, 0F3f818000; cvt.rn.bf16x2.f32 %r1, %f1, %f1;"), 0x3f823f82u);
  EXPECT_EQ(result("mov.f32 %f1, 0F477fefff; cvt.rn.f16x2.f32 %r1, %f1, %f1;"), 0x7bff7bffu);
  EXPECT_EQ(result("mov.f32 %f1, 0F477ff000; cvt.rn.f16x2.f32 %r1, %f1, %f1;"), 0x7c007c00u);
  EXPECT_EQ(result("mov.f32 %f1, 0Fffc00001; add.f32 %f2, %f1, %f1; mov.b32 %r1, %f2;"),
            0x7fffffffu);
  // Floats to integers saturate.
  EXPECT_EQ(result("mov.f32 %f1, 0F4f800000; cvt.rzi.s32.f32 %r1, %f1;"), 0x7fffffffu);
  EXPECT_EQ(result("mov.f32 %f1, 0Fbf800000; cvt.rzi.u32.f32 %r1, %f1;"), 0u);
  EXPECT_EQ(result("mov.f32 %f1, 0F7fffffff; cvt.rni.s32.f32 %r1, %f1;"), 0u);
  EXPECT_EQ(result("mov.f32 %f1, 0F40200000; cvt.rni.s32.f32 %r1, %f1;"), 2u);
  // One rounding: (1 + 2^-10)^2 - (1 + 2^-9) is 2^-20 in fp16.
  EXPECT_EQ(
      result("mov.u32 %r2, 0x3c013c01; mov.u32 %r3, 0xbc02bc02; fma.rn.f16x2 %r1, %r2, %r2, %r3;"),
      0x00100010u);
  // BF16: 1 + 2^-8 is half way; a product far below decides.
  EXPECT_EQ(result("mov.u32 %r2, 0x3b803b80; mov.u32 %r3, 0x3f803f80; mov.u32 %r4, 0x00800080;"
                   "fma.rn.bf16x2 %r1, %r2, %r3, %r3;"),
            0x3f803f80u);
  EXPECT_EQ(result("mov.f32 %f1, 0F3fc00000; mov.f32 %f2, 0Fbfc00000; cvt.rn.satfinite.e4m3x2.f32 "
                   "%rs1, %f1, %f2; cvt.u32.u16 %r1, %rs1;"),
            0x3cbcu);
  // max takes the number, and +0 over -0.
  EXPECT_EQ(result("mov.f32 %f1, 0F80000000; mov.f32 %f2, 0F00000000; max.f32 %f3, %f1, %f2; "
                   "mov.b32 %r1, %f3;"),
            0u);
  EXPECT_EQ(result("mov.f32 %f1, 0F7fc00000; mov.f32 %f2, 0Fbf800000; max.f32 %f3, %f1, %f2; "
                   "mov.b32 %r1, %f3;"),
            BitsOf(-1.0f));
}

// Halves once gave twice the result.
TEST(Emulator, PowersOfTwoAreExactEnough) {
  Buffer<float> in(32);
  Buffer<uint32_t> out(32);
  for (int base = -130; base < 128; base += 7) {
    for (uint32_t i = 0; i < 32; ++i)
      in[i] = static_cast<float>(base) + static_cast<float>(i) * 0.25f;
    ASSERT_EQ(
        Execute(std::string("mul.wide.u32 %rd3, %r0, 4; add.s64 %rd4, %rd1, %rd3; ld.global.f32 "
                            "%f1, [%rd4]; ex2.approx.f32 %f2, %f1; mov.b32 %r1, %f2;") +
                    kStore,
                {out.address(), in.address()}),
        "");
    for (uint32_t i = 0; i < 32; ++i) {
      float got;
      std::memcpy(&got, &out[i], 4);
      EXPECT_FLOAT_EQ(got, static_cast<float>(std::exp2(static_cast<double>(in[i])))) << in[i];
    }
  }
}

TEST(Emulator, BitOperations) {
  Buffer<uint32_t> out(32);
  const auto result = [&](const std::string& code) {
    EXPECT_EQ(Execute(code + kStore, {out.address()}), "");
    return out[0];
  };
  EXPECT_EQ(result("lop3.b32 %r1, 0xf0f0f0f0, 0xcccccccc, 0xaaaaaaaa, 0xea;"), 0xeaeaeaeau);
  EXPECT_EQ(
      result("mov.u32 %r2, 0x44332211; mov.u32 %r3, 0x88776655; prmt.b32 %r1, %r2, %r3, 0xf504;"),
      0xff661155u);
  EXPECT_EQ(result("mov.u32 %r2, 0x12345678; bfe.u32 %r1, %r2, 8, 8;"), 0x56u);
  EXPECT_EQ(result("mov.u32 %r2, 0x0000f800; bfe.s32 %r1, %r2, 8, 8;"), 0xfffffff8u);
  EXPECT_EQ(result("mov.u32 %r2, 0xf; mov.u32 %r3, 0; bfi.b32 %r1, %r2, %r3, 12, 8;"), 0xf000u);
  EXPECT_EQ(result("mov.u32 %r2, 40; shl.b32 %r1, 1, %r2;"), 0u);
  EXPECT_EQ(result("mov.u32 %r2, -8; shr.s32 %r1, %r2, 40;"), 0xffffffffu);
  EXPECT_EQ(
      result(
          "mov.u32 %r2, 0xfffe0003; mov.u32 %r3, 0x0000ff02; dp2a.lo.s32.s32 %r1, %r2, %r3, 10;"),
      10u + 6 + 2);
  EXPECT_EQ(result("mov.u32 %r2, 0x80000000; shf.l.wrap.b32 %r1, %r2, 1, 1;"), 3u);
}

// ---- matrices ----

constexpr char kLoadOperands[] = R"(
mul.wide.u32 %rd3, %r0, 24; add.s64 %rd4, %rd1, %rd3;
ld.global.u32 %r2, [%rd4]; ld.global.u32 %r3, [%rd4+4]; ld.global.u32 %r4, [%rd4+8];
ld.global.u32 %r5, [%rd4+12]; ld.global.u32 %r6, [%rd4+16]; ld.global.u32 %r7, [%rd4+20];
mul.wide.u32 %rd5, %r0, 16; add.s64 %rd6, %rd0, %rd5;
)";

uint32_t Bf16Of(int x) { return BitsOf(static_cast<float>(x)) >> 16; }

TEST(Emulator, MmaOfBf16) {
  int a[16][16], b[16][8];
  for (int i = 0; i < 16; ++i) {
    for (int k = 0; k < 16; ++k) a[i][k] = (i * 7 + k * 3) % 11 - 5;
    for (int n = 0; n < 8; ++n) b[i][n] = (i * 5 + n) % 13 - 6;
  }
  Buffer<uint32_t> in(32 * 6);
  Buffer<float> out(32 * 4);
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = 2 * (lane % 4);
    const auto pair = [](int low, int high) { return Bf16Of(low) | Bf16Of(high) << 16; };
    uint32_t* r = &in[static_cast<size_t>(lane) * 6];
    r[0] = pair(a[g][t], a[g][t + 1]);
    r[1] = pair(a[g + 8][t], a[g + 8][t + 1]);
    r[2] = pair(a[g][t + 8], a[g][t + 9]);
    r[3] = pair(a[g + 8][t + 8], a[g + 8][t + 9]);
    r[4] = pair(b[t][g], b[t + 1][g]);
    r[5] = pair(b[t + 8][g], b[t + 9][g]);
  }
  ASSERT_EQ(Execute(std::string(kLoadOperands) + R"(
mov.f32 %f1, 0F3f800000; mov.f32 %f2, %f1; mov.f32 %f3, %f1; mov.f32 %f4, %f1;
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1,%f2,%f3,%f4}, {%r2,%r3,%r4,%r5}, {%r6,%r7}, {%f1,%f2,%f3,%f4};
st.global.v4.f32 [%rd6], {%f1,%f2,%f3,%f4};
)",
                    {out.address(), in.address()}),
            "");
  for (int lane = 0; lane < 32; ++lane) {
    for (int r = 0; r < 4; ++r) {
      const int row = lane / 4 + (r / 2) * 8, column = 2 * (lane % 4) + r % 2;
      int sum = 1;
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
      EXPECT_EQ(out[static_cast<size_t>(lane * 4 + r)], static_cast<float>(sum));
    }
  }
}

TEST(Emulator, MmaOfBytes) {
  int a[16][32], b[32][8];
  for (int i = 0; i < 32; ++i) {
    for (int k = 0; k < 16; ++k) a[k][i] = (i * 37 + k * 91) % 256;
    for (int n = 0; n < 8; ++n) b[i][n] = (i * 53 + n * 29) % 256 - 128;
  }
  Buffer<uint32_t> in(32 * 6);
  Buffer<int32_t> out(32 * 4);
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = 4 * (lane % 4);
    uint32_t* r = &in[static_cast<size_t>(lane) * 6];
    std::fill_n(r, 6, 0u);
    for (int k = 0; k < 4; ++k) {
      r[0] |= static_cast<uint32_t>(a[g][t + k]) << (8 * k);
      r[1] |= static_cast<uint32_t>(a[g + 8][t + k]) << (8 * k);
      r[2] |= static_cast<uint32_t>(a[g][t + k + 16]) << (8 * k);
      r[3] |= static_cast<uint32_t>(a[g + 8][t + k + 16]) << (8 * k);
      r[4] |= static_cast<uint32_t>(b[t + k][g] & 0xff) << (8 * k);
      r[5] |= static_cast<uint32_t>(b[t + k + 16][g] & 0xff) << (8 * k);
    }
  }
  ASSERT_EQ(Execute(std::string(kLoadOperands) + R"(
mov.u32 %r8, 5; mov.u32 %r9, 5; mov.u32 %r10, 5; mov.u32 %r11, 5;
mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%r8,%r9,%r10,%r11}, {%r2,%r3,%r4,%r5}, {%r6,%r7}, {%r8,%r9,%r10,%r11};
st.global.v4.u32 [%rd6], {%r8,%r9,%r10,%r11};
)",
                    {out.address(), in.address()}),
            "");
  for (int lane = 0; lane < 32; ++lane) {
    for (int r = 0; r < 4; ++r) {
      int sum = 5;
      for (int k = 0; k < 32; ++k)
        sum += a[lane / 4 + (r / 2) * 8][k] * b[k][2 * (lane % 4) + r % 2];
      EXPECT_EQ(out[static_cast<size_t>(lane * 4 + r)], sum);
    }
  }
}

// Thread t writes 16 bytes of the first pointer's memory to shared memory, from `bytes` on.
std::string CopyIn(int bytes, int threads) {
  std::string code =
      "mov.u32 %r120, smem; shl.b32 %r121, %r0, 4; add.u32 %r122, %r120, %r121; "
      "cvt.u64.u32 %rd20, %r121; add.s64 %rd21, %rd1, %rd20;\n";
  for (int at = 0; at < bytes; at += threads * 16) {
    code += "ld.global.v4.u32 {%r123,%r124,%r125,%r126}, [%rd21+" + std::to_string(at) +
            "]; st.shared.v4.u32 [%r122+" + std::to_string(at) + "], {%r123,%r124,%r125,%r126};\n";
  }
  return code + "bar.sync 0;\n";
}

TEST(Emulator, LdmatrixAndItsTranspose) {
  Buffer<uint16_t> in(256);
  for (size_t i = 0; i < 256; ++i) in[i] = static_cast<uint16_t>(i);
  for (const bool transposed : {false, true}) {
    Buffer<uint32_t> out(32 * 4);
    ASSERT_EQ(Execute(CopyIn(512, 32) +
                          "mul.wide.u32 %rd5, %r0, 16; add.s64 %rd6, %rd0, %rd5;"
                          "ldmatrix.sync.aligned.m8n8.x4" +
                          (transposed ? ".trans" : "") +
                          ".shared.b16 {%r2,%r3,%r4,%r5}, [%r122];"
                          "movmatrix.sync.aligned.m8n8.trans.b16 %r5, %r5;"
                          "st.global.v4.u32 [%rd6], {%r2,%r3,%r4,%r5};",
                      {out.address(), in.address()}, {.shared = 512}),
              "");
    for (uint32_t lane = 0; lane < 32; ++lane) {
      for (uint32_t m = 0; m < 4; ++m) {
        const bool flipped = transposed != (m == 3);
        for (uint32_t k = 0; k < 2; ++k) {
          const uint32_t row = lane / 4, column = 2 * (lane % 4) + k;
          const uint32_t expected = 64 * m + (flipped ? 8 * column + row : 8 * row + column);
          EXPECT_EQ((out[lane * 4 + m] >> (16 * k)) & 0xffff, expected);
        }
      }
    }
  }
}

// D = A B with A [64, 16] and B [16, 64] in shared memory, as descriptors of all swizzles say.
class WgmmaTest : public testing::TestWithParam<int> {};

TEST_P(WgmmaTest, ReadsSwizzledTiles) {
  const auto mode = static_cast<uint64_t>(GetParam());  // 0: none, 1: 128 bytes, 2: 64, 3: 32
  const uint64_t row_bytes = mode == 0 ? 16 : uint64_t{256} >> mode;
  int a[64][16], b[16][64];
  for (int i = 0; i < 64; ++i) {
    for (int k = 0; k < 16; ++k) {
      a[i][k] = (i * 7 + k * 3) % 11 - 5;
      b[k][i] = (k * 5 + i * 2) % 13 - 6;
    }
  }
  // Atoms of 8 rows stand behind each other; the 16-byte pieces of a row change places by its
  // number.
  constexpr size_t kB = 16384;
  Buffer<uint16_t> in(kB);  // 32 KiB
  std::memset(&in[0], 0, 2 * kB);
  const auto place = [&](uint64_t row, uint64_t byte) {
    if (mode == 0) return row / 8 * 256 + byte / 16 * 128 + row % 8 * 16 + byte % 16;
    const uint64_t line = row * row_bytes + byte;  // swizzles repeat every 128 bytes of address
    return line ^ ((line / 128 % (uint64_t{8} >> (mode - 1))) << 4);
  };
  for (size_t i = 0; i < 64; ++i) {
    for (size_t k = 0; k < 16; ++k) {
      in[place(i, 2 * k) / 2] = static_cast<uint16_t>(Bf16Of(a[i][k]));
      in[kB / 2 + place(i, 2 * k) / 2] = static_cast<uint16_t>(Bf16Of(b[k][i]));
    }
  }
  const uint64_t stride = mode == 0 ? 256 : 8 * row_bytes;
  const auto descriptor = [&](uint64_t at) {
    return std::to_string((kSharedBase + at) >> 4 | (uint64_t{128} >> 4) << 16 |
                          (stride >> 4) << 32 | mode << 62);
  };
  std::string registers;
  for (int i = 0; i < 32; ++i) registers += (i > 0 ? ", %f" : "%f") + std::to_string(i);
  std::string code =
      CopyIn(32768, 128) + "mov.b64 %rd3, " + descriptor(0) + "; mov.b64 %rd4, " + descriptor(kB) +
      ";\nwgmma.fence.sync.aligned;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" +
      registers +
      "}, %rd3, %rd4, 0, 1, 1, 0, 0;\nwgmma.commit_group.sync.aligned;\n"
      "wgmma.wait_group.sync.aligned 0;\nmul.wide.u32 %rd5, %r0, 128; add.s64 %rd6, %rd0, %rd5;\n";
  for (int i = 0; i < 32; ++i) {
    code += "st.global.f32 [%rd6+" + std::to_string(4 * i) + "], %f" + std::to_string(i) + ";\n";
  }
  Buffer<float> out(128 * 32);
  ASSERT_EQ(Execute(code, {out.address(), in.address()}, {.threads = 128, .shared = 32768}), "");
  for (int thread = 0; thread < 128; ++thread) {
    for (int r = 0; r < 32; ++r) {
      const int row = thread / 32 * 16 + thread % 32 / 4 + (r % 4 / 2) * 8;
      const int column = r / 4 * 8 + thread % 4 * 2 + r % 2;
      int sum = 0;
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
      ASSERT_EQ(out[static_cast<size_t>(thread * 32 + r)], static_cast<float>(sum))
          << row << ' ' << column;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Swizzles, WgmmaTest, testing::Values(0, 1, 2, 3));

// ---- barriers and copies ----

TEST(Emulator, BulkCopiesCompleteTheirBarriers) {
  Buffer<uint32_t> in(64), out(64);
  for (size_t i = 0; i < 64; ++i) in[i] = static_cast<uint32_t>(100 + i);
  // Thread 0 copies; both warps wait for the bytes.
  ASSERT_EQ(Execute(std::string(R"(
mov.u32 %r2, smem; add.u32 %r3, %r2, 256;
setp.ne.u32 %p1, %r0, 0;
@!%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
bar.sync 0;
@%p1 bra WAITING;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 256;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 256, [%r3];
WAITING: { .reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%r3], 0; @p bra D; bra W; D: }
shl.b32 %r4, %r0, 2; add.u32 %r4, %r4, %r2; ld.shared.u32 %r1, [%r4];
)") + kStore,
                    {out.address(), in.address()}, {.threads = 64, .shared = 512}),
            "");
  for (size_t i = 0; i < 64; ++i) EXPECT_EQ(out[i], 100 + i);
}

TEST(Emulator, BlocksOfAClusterShareMemory) {
  Buffer<uint32_t> out(128);
  // Each block writes into the other one of its cluster.
  ASSERT_EQ(Execute(std::string(R"(
mov.u32 %r2, smem; mov.u32 %r3, %cluster_ctarank; xor.b32 %r3, %r3, 1;
mapa.shared::cluster.u32 %r4, %r2, %r3; shl.b32 %r5, %r0, 2; add.u32 %r4, %r4, %r5;
mov.u32 %r6, %ctaid.x; mad.lo.u32 %r6, %r6, 100, %r0; st.shared::cluster.u32 [%r4], %r6;
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
add.u32 %r2, %r2, %r5; ld.shared.u32 %r1, [%r2];
)") + kStore,
                    {out.address()}, {.blocks = 4, .shared = 128, .cluster = 2}),
            "");
  for (size_t i = 0; i < 128; ++i) EXPECT_EQ(out[i], (i / 32 ^ 1) * 100 + i % 32);
}

TEST(Emulator, TensorCopiesSwizzleAndReachACluster) {
  // The box at column 32, row 6 of 12 rows of 64 numbers of 16 bits: rows 12 and 13 are zeros.
  Buffer<uint16_t> in(12 * 64 + 64);
  for (size_t i = 0; i < 12 * 64; ++i) in[i] = static_cast<uint16_t>(i);
  Buffer<uint32_t> out(512);
  alignas(64) TensorMap map{};
  map.magic = TensorMap::kMagic;
  map.base = in.address();
  map.size[0] = 64, map.size[1] = 12, map.pitch = 128;
  map.box[0] = 64, map.box[1] = 8, map.element_bytes = 2, map.swizzled = 1;
  Buffer<TensorMap> device_map(1);
  device_map[0] = map;
  for (const bool late : {false, true}) {
    ASSERT_EQ(
        Execute(std::string(R"(
mov.u32 %r2, smem; add.u32 %r3, %r2, 1024; setp.ne.u32 %p1, %r0, 0;
@!%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
@!%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 1024;
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
mov.u32 %r4, %cluster_ctarank; or.b32 %r4, %r4, %r0; setp.ne.u32 %p2, %r4, 0;
mov.u32 %r5, 32; mov.u32 %r6, 6; mov.u16 %rs1, 3; @%p2 bra WAITING;
cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r2], [%rd2, {%r5, %r6}], [%r3], %rs1;
WAITING: { .reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%r3], 0; @p bra D; bra W; D: }
shl.b32 %r7, %r0, 2; add.u32 %r7, %r7, %r2; ld.shared.u32 %r1, [%r7];
)") + kStore,
                {out.address(), in.address(), device_map.address()},
                {.threads = 256, .blocks = 2, .shared = 2048, .cluster = 2, .late_copies = late}),
        "");
    for (size_t i = 0; i < 512; ++i) {
      const size_t row = i % 256 / 32, chunk = i % 32 / 4 ^ row,
                   column = 32 + chunk * 8 + i % 4 * 2;
      const bool inside = row + 6 < 12 && column < 64;
      const size_t first = (row + 6) * 64 + column;
      EXPECT_EQ(out[i], inside ? first | (first + 1) << 16 : 0) << i;
    }
  }
}

TEST(Emulator, NamedBarriersAndVotesOfBlocks) {
  Buffer<uint32_t> out(96);
  ASSERT_EQ(Execute(std::string(R"(
mov.u32 %r2, smem; setp.lt.u32 %p1, %r0, 32; @%p1 bra FIRST;
bar.sync 3, 64; ld.shared.u32 %r1, [%r2]; bra JOIN;
FIRST: mov.u32 %r3, 5; st.shared.u32 [%r2], %r3; bar.arrive 3, 64; mov.u32 %r1, 1;
JOIN: setp.eq.u32 %p2, %r0, 63; bar.red.or.pred %p3, 0, %p2; @%p3 add.u32 %r1, %r1, 10;
bar.red.popc.u32 %r5, 0, %p1; add.u32 %r1, %r1, %r5;
)") + kStore,
                    {out.address()}, {.threads = 64, .shared = 64}),
            "");
  EXPECT_EQ(out[0], 1u + 10 + 32);
  EXPECT_EQ(out[40], 5u + 10 + 32);
}

TEST(Emulator, AtomicsOfBlocksOnTwoThreads) {
  Buffer<uint32_t> out(2);
  out[0] = out[1] = 0;
  ASSERT_EQ(Execute("atom.global.add.u32 %r2, [%rd0], 1; red.global.max.u32 [%rd0+4], %r2;",
                    {out.address()}, {.threads = 128, .blocks = 50, .host_threads = 2}),
            "");
  EXPECT_EQ(out[0], 6400u);
  EXPECT_EQ(out[1], 6399u);
}

// ---- what it finds ----

TEST(EmulatorFinds, AccessesOutOfBounds) {
  Buffer<uint32_t> out(31);
  EXPECT_THAT(Execute(std::string("mov.u32 %r1, 1;") + kStore, {out.address()}),
              testing::AllOf(HasSubstr("illegal access, lane 31"), HasSubstr("allocation of 124")));
  EXPECT_THAT(Execute("mov.u32 %r2, smem; st.shared.u32 [%r2+64], %r0;", {}, {.shared = 64}),
              HasSubstr("shared address"));
}
TEST(EmulatorFinds, AddressesOfOtherBlocksInOwnMemory) {
  EXPECT_THAT(Execute("mov.u32 %r2, smem; mov.u32 %r3, 1; mapa.shared::cluster.u32 %r4, %r2, %r3; "
                      "st.shared.u32 [%r4], %r0;",
                      {}, {.blocks = 2, .shared = 64, .cluster = 2}),
              HasSubstr("shared address"));
  EXPECT_THAT(Execute("mov.u32 %r2, smem; mov.u32 %r3, 2; mapa.shared::cluster.u32 %r4, %r2, %r3; "
                      "st.shared::cluster.u32 [%r4], %r0;",
                      {}, {.blocks = 2, .shared = 64, .cluster = 2}),
              HasSubstr("cluster-shared address"));
}
TEST(EmulatorFinds, MisalignedAccesses) {
  Buffer<uint32_t> out(64);
  EXPECT_THAT(Execute("st.global.v2.u32 [%rd0+4], {%r0, %r0};", {out.address()}),
              HasSubstr("misaligned access, lane 0"));
}
TEST(EmulatorFinds, Deadlocks) {
  EXPECT_THAT(
      Execute("setp.lt.u32 %p1, %r0, 32; @%p1 bra OUT; bar.sync 1, 64; OUT:", {}, {.threads = 64}),
      testing::AllOf(HasSubstr("deadlock"), HasSubstr("waits for barrier 1")));
  EXPECT_THAT(Execute(R"(mov.u32 %r2, smem; mbarrier.init.shared::cta.b64 [%r2], 1;
W: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r2], 0; @!%p1 bra W;)",
                      {}, {.threads = 1, .shared = 64}),
              testing::AllOf(HasSubstr("deadlock"), HasSubstr("mbarrier.try_wait")));
}
TEST(EmulatorFinds, BarriersThatNobodyMade) {
  EXPECT_THAT(
      Execute("mov.u32 %r2, smem; mbarrier.arrive.shared::cta.b64 _, [%r2];", {}, {.shared = 64}),
      HasSubstr("not initialised"));
}
// The wait is forgotten: copies made at once hide it, late ones do not.
TEST(EmulatorFinds, CopiesThatNobodyWaitsFor) {
  Buffer<uint32_t> in(64), out(32);
  for (size_t i = 0; i < 64; ++i) in[i] = 7;
  for (const bool late : {false, true}) {
    const std::string code = R"(
mov.u32 %r2, smem; add.u32 %r3, %r2, 256; setp.ne.u32 %p1, %r0, 0;
@!%p1 mbarrier.init.shared::cta.b64 [%r3], 1; bar.sync 0;
@!%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 256;
@!%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 256, [%r3];
bar.warp.sync -1; ld.shared.u32 %r1, [%r2];
)";
    const std::string fault =
        Execute(code + kStore, {out.address(), in.address()}, {.shared = 512, .late_copies = late});
    EXPECT_EQ(fault.find("under way") != std::string::npos, late) << fault;
    EXPECT_EQ(out[0] == 7, !late);
  }
}
TEST(EmulatorFinds, InstructionsItDoesNotKnow) {
  EXPECT_THAT(Execute("tcgen05.fence::before_thread_sync;", {}), HasSubstr("tcgen05"));
  EXPECT_THAT(Execute("add.rz.f32 %f1, %f2, %f3;", {}), HasSubstr("add.rz.f32"));
}

}  // namespace
}  // namespace oscar::emulator
