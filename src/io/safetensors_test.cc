#include "io/safetensors.h"

#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>

#include "io/test_util.h"

namespace oscar {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// A file from a header and `data_bytes` bytes 0, 1, 2, ...
std::string MakeFile(std::string_view header, size_t data_bytes) {
  const uint64_t length = header.size();
  std::string file(reinterpret_cast<const char*>(&length), 8);
  file += header;
  for (size_t i = 0; i < data_bytes; ++i) file += static_cast<char>(i);
  return file;
}

std::string Entry(std::string_view name, std::string_view dtype, std::string_view shape,
                  std::string_view offsets) {
  return fmt::format(R"("{}":{{"dtype":"{}","shape":{},"data_offsets":{}}})", name, dtype, shape,
                     offsets);
}

// The error for a header over `data_bytes` bytes of data; it must be one line naming the file.
std::string ErrorOf(std::string_view header, size_t data_bytes = 0) {
  const std::string bytes = MakeFile(header, data_bytes);
  const auto file = SafetensorsFile::FromBytes(AsBytes(bytes), "m.safetensors");
  if (!file) {
    EXPECT_EQ(file.error().code(), StatusCode::kDataLoss);
    ExpectOneLineNaming(file.error(), "m.safetensors: ");
  }
  return MessageOf(file);
}

TEST(Safetensors, ReadsTensorsInDataOrder) {
  const std::string bytes =
      MakeFile("{" + Entry("b", "U8", "[3]", "[8,11]") + "," + Entry("a", "F32", "[1,2]", "[0,8]") +
                   R"(,"__metadata__":{"format":"pt"},)" + Entry("none", "F32", "[0,7]", "[8,8]") +
                   "," + Entry("scalar", "I16", "[]", "[11,13]") + "}   ",
               13);
  const auto file = SafetensorsFile::FromBytes(AsBytes(bytes), "x");
  ASSERT_TRUE(file.has_value()) << MessageOf(file);
  std::vector<std::string> names;
  for (const StoredTensor& tensor : file->tensors()) names.push_back(tensor.name);
  EXPECT_THAT(names, ElementsAre("a", "none", "b", "scalar"));
  EXPECT_THAT(file->metadata(),
              ElementsAre(std::pair<const std::string, std::string>("format", "pt")));
  const StoredTensor* b = file->Find("b");
  ASSERT_NE(b, nullptr);
  EXPECT_THAT(b->shape, ElementsAre(3));
  EXPECT_THAT(*ToIntVector(*b), ElementsAre(8, 9, 10));
  EXPECT_EQ(file->Find("scalar")->num_elements(), 1u);
  EXPECT_EQ(file->Find("none")->num_bytes, 0u);
  EXPECT_EQ(file->Find("c"), nullptr);
  EXPECT_EQ(MessageOf(file->Get("c")), "x: no tensor 'c'");
}

TEST(Safetensors, AnEmptyFileOfTensorsIsValid) {
  EXPECT_EQ(ErrorOf("{}"), "ok");
  EXPECT_EQ(ErrorOf(R"({"__metadata__":{}})"), "ok");
}

TEST(Safetensors, DamagedLengths) {
  for (size_t size = 0; size < 8; ++size) {
    const std::string bytes(size, '\0');
    EXPECT_THAT(MessageOf(SafetensorsFile::FromBytes(AsBytes(bytes), "x")),
                HasSubstr(fmt::format("x: truncated: {} bytes", size)));
  }
  std::string bytes = MakeFile("{}", 0);
  const auto with_length = [&](uint64_t length) {
    std::memcpy(bytes.data(), &length, 8);
    return MessageOf(SafetensorsFile::FromBytes(AsBytes(bytes), "x"));
  };
  EXPECT_EQ(with_length(2), "ok");
  EXPECT_EQ(with_length(3), "x: truncated: the header ends at byte 11, the file at byte 10");
  EXPECT_THAT(with_length(100'000'001), HasSubstr("above the limit"));
  EXPECT_THAT(with_length(UINT64_MAX), HasSubstr("above the limit"));
  EXPECT_THAT(with_length(0), HasSubstr("does not start with '{'"));
  EXPECT_THAT(with_length(1), HasSubstr("header: invalid JSON at byte"));
}

TEST(Safetensors, HostileHeaders) {
  EXPECT_THAT(ErrorOf(" {}"), HasSubstr("does not start with '{'"));
  EXPECT_THAT(ErrorOf("{"), HasSubstr("invalid JSON"));
  EXPECT_THAT(ErrorOf("{}}"), HasSubstr("invalid JSON"));
  EXPECT_THAT(ErrorOf("{\"\xff\":1}"), HasSubstr("invalid JSON"));
  EXPECT_THAT(ErrorOf(R"({"a":1})"), HasSubstr("tensor 'a': must be an object, found a number"));
  EXPECT_THAT(ErrorOf(R"({"a":null})"), HasSubstr("tensor 'a': must be an object, found null"));
  EXPECT_THAT(ErrorOf(R"({"a":[[]]})"), HasSubstr("tensor 'a': must be an object, found an array"));
  EXPECT_THAT(ErrorOf(R"({"a":{}})"), HasSubstr("tensor 'a': no dtype"));
  EXPECT_THAT(ErrorOf(R"({"a":{"dtype":"F32"}})"), HasSubstr("tensor 'a': no shape"));
  EXPECT_THAT(ErrorOf(R"({"a":{"dtype":"F32","shape":[]}})"), HasSubstr("no data_offsets"));
  EXPECT_THAT(ErrorOf(R"({"a":{"dtype":"F32","x":1}})"), HasSubstr("unknown field 'x'"));
  EXPECT_THAT(ErrorOf(R"({"a":{"dtype":"F32","dtype":"F32"}})"),
              HasSubstr("duplicate field 'dtype'"));
  EXPECT_THAT(ErrorOf(R"({"a":{"dtype":7}})"), HasSubstr("dtype must be a string"));
  EXPECT_THAT(ErrorOf("{" + Entry("a", "F7", "[1]", "[0,4]") + "}", 4),
              HasSubstr("unknown dtype 'F7'"));
  EXPECT_THAT(ErrorOf("{" + Entry("a\\n", "F32", "[-1]", "[0,4]") + "}", 4),
              HasSubstr("tensor 'a\\x0a': negative number -1"));
  EXPECT_THAT(ErrorOf("{" + Entry("a", "F32", "[1.0]", "[0,4]") + "}", 4),
              HasSubstr("'1.0' is not an integer"));
  EXPECT_THAT(ErrorOf("{" + Entry("a", "F32", "[1e99]", "[0,4]") + "}", 4),
              HasSubstr("is not an integer"));
  EXPECT_THAT(ErrorOf("{" + Entry("a", "F32", "[\"1\"]", "[0,4]") + "}", 4),
              HasSubstr("shape must be an array of integers, found a string"));
  EXPECT_THAT(ErrorOf("{" + Entry("a", "F32", "[[1]]", "[0,4]") + "}", 4),
              HasSubstr("found an array"));
  EXPECT_THAT(ErrorOf("{" + Entry("a", "F32", "[18446744073709551615]", "[0,4]") + "}", 4),
              HasSubstr("is too large"));
  EXPECT_THAT(ErrorOf("{" + Entry("a", "F32", "[99999999999999999999]", "[0,4]") + "}", 4),
              HasSubstr("is not an integer"));
  EXPECT_THAT(ErrorOf("{" + Entry("a", "F32", "[4294967296,4294967296]", "[0,0]") + "}"),
              HasSubstr("tensor 'a': shape [4294967296, 4294967296] of F32 overflows"));
  EXPECT_THAT(ErrorOf("{" + Entry("a", "F32", "[1]", "[0]") + "}", 4),
              HasSubstr("needs two entries"));
  EXPECT_THAT(ErrorOf("{" + Entry("a", "F32", "[1]", "[0,4,8]") + "}", 4),
              HasSubstr("more than two"));
  EXPECT_THAT(ErrorOf("{" + Entry("a", "F32", "[1]", "[4,0]") + "}", 4),
              HasSubstr("[4, 0] do not lie"));
  EXPECT_THAT(ErrorOf("{" + Entry("a", "F32", "[2]", "[0,8]") + "}", 7),
              HasSubstr("tensor 'a': data_offsets [0, 8] do not lie in the 7 bytes of data; the "
                        "file is truncated"));
  EXPECT_THAT(ErrorOf("{" + Entry("a", "F32", "[1]", "[0,18446744073709551615]") + "}", 4),
              HasSubstr("do not lie"));
  EXPECT_THAT(ErrorOf("{" + Entry("a", "F32", "[2]", "[0,4]") + "}", 4),
              HasSubstr("tensor 'a': F32 [2] takes 8 bytes, data_offsets [0, 4] hold 4"));
  const std::string one = Entry("a", "U8", "[4]", "[0,4]");
  EXPECT_THAT(ErrorOf("{" + one + "," + one + "}", 4), HasSubstr("duplicate key 'a'"));
  EXPECT_THAT(ErrorOf("{" + one + "," + Entry("b", "U8", "[4]", "[2,6]") + "}", 6),
              HasSubstr("tensors 'a' and 'b' overlap at data byte 2"));
  EXPECT_THAT(ErrorOf("{" + one + "," + Entry("b", "U8", "[4]", "[0,4]") + "}", 4),
              HasSubstr("overlap"));
  EXPECT_THAT(ErrorOf("{" + one + "," + Entry("b", "U8", "[1]", "[5,6]") + "}", 6),
              HasSubstr("data bytes [4, 5) before tensor 'b' belong to no tensor"));
  EXPECT_THAT(ErrorOf("{" + one + "}", 5), HasSubstr("1 bytes after the last tensor"));
  EXPECT_THAT(ErrorOf("{}", 1), HasSubstr("1 bytes after the last tensor"));
  EXPECT_THAT(ErrorOf(R"({"__metadata__":{"a":1}})"),
              HasSubstr("'a' of __metadata__ must be a string"));
  EXPECT_THAT(ErrorOf(R"({"__metadata__":[]})"), HasSubstr("__metadata__ must be an object"));
  EXPECT_THAT(ErrorOf(R"({"__metadata__":{"a":"1","a":"2"}})"),
              HasSubstr("duplicate key 'a' in __metadata__"));
  EXPECT_THAT(ErrorOf(R"({"__metadata__":{},"__metadata__":{}})"), HasSubstr("duplicate key"));
  std::string ones = "1";
  for (int i = 0; i < 40; ++i) ones += ",1";
  EXPECT_THAT(ErrorOf("{" + Entry("a", "U8", "[" + ones + "]", "[0,1]") + "}", 1),
              HasSubstr("more than 32 dimensions"));
  EXPECT_THAT(ErrorOf("{\"a\":" + std::string(1 << 20, '[')), HasSubstr("tensor 'a'"));
}

class SafetensorsFiles : public TempDirTest {
 protected:
  void SetUp() override {
    TempDirTest::SetUp();
    std::mt19937 rng(7);
    for (float& x : floats_) x = std::normal_distribution<float>()(rng);
    tensors_ = {{"odd", DType::kU8, {3}, std::as_bytes(std::span(bytes_))},
                {"w", DType::kF32, {2, 5}, std::as_bytes(std::span(floats_))},
                {"half", DType::kBf16, {4}, std::as_bytes(std::span(halves_))},
                {"empty", DType::kF32, {0}, {}},
                {"A", DType::kF32, {10}, std::as_bytes(std::span(floats_))}};
  }

  uint8_t bytes_[3] = {1, 2, 3};
  uint16_t halves_[4] = {0x3f80, 0, 1, 0xffff};
  float floats_[10];
  std::vector<TensorView> tensors_;
};

TEST_F(SafetensorsFiles, RoundTripIsAlignedAndDeterministic) {
  const std::map<std::string, std::string> metadata = {{"format", "pt"},
                                                       {"a", "d\xc3\xa9j\xc3\xa0 \"x\"\n"}};
  const auto path = directory_ / "m.safetensors";
  ASSERT_TRUE(WriteSafetensors(path, tensors_, metadata).ok());
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.has_value()) << MessageOf(file);
  EXPECT_EQ(file->metadata(), metadata);
  ASSERT_EQ(file->tensors().size(), tensors_.size());
  for (const TensorView& want : tensors_) {
    const StoredTensor* got = file->Find(want.name);
    ASSERT_NE(got, nullptr);
    EXPECT_EQ(got->dtype, want.dtype);
    EXPECT_EQ(got->shape, want.shape);
    const auto loaded = Load(*got);
    ASSERT_TRUE(loaded.has_value());
    EXPECT_TRUE(std::ranges::equal(loaded->bytes, want.data));
    EXPECT_EQ(got->offset % SizeOf(got->dtype), 0u) << want.name;
  }
  const std::string bytes = Slurp(path);
  uint64_t header = 0;
  std::memcpy(&header, bytes.data(), 8);
  EXPECT_EQ(header % 8, 0u);
  std::reverse(tensors_.begin(), tensors_.end());
  ASSERT_TRUE(WriteSafetensors(path, tensors_, metadata).ok());
  EXPECT_EQ(Slurp(path), bytes);
  EXPECT_EQ(NumFiles(), 1u);
}

// The bytes themselves, so that a change of layout cannot pass unnoticed.
TEST_F(SafetensorsFiles, WritesTheseBytes) {
  const std::vector<TensorView> tensors(tensors_.begin(), tensors_.begin() + 1);
  ASSERT_TRUE(WriteSafetensors(directory_ / "m", tensors, {{"k", "v"}}).ok());
  const std::string header =
      R"({"__metadata__":{"k":"v"},"odd":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})";
  EXPECT_EQ(Slurp(directory_ / "m"), std::string("\x50\0\0\0\0\0\0\0", 8) + header +
                                         std::string(80 - header.size(), ' ') + "\1\2\3");
}

TEST_F(SafetensorsFiles, BadArgumentsLeaveNoFile) {
  const auto write = [&](const std::vector<TensorView>& tensors,
                         const std::map<std::string, std::string>& metadata = {}) {
    const Status status = WriteSafetensors(directory_ / "m", tensors, metadata);
    EXPECT_EQ(NumFiles(), 0u);
    return status.message();
  };
  EXPECT_THAT(write({tensors_[0], tensors_[0]}), HasSubstr("two tensors are named 'odd'"));
  TensorView wrong = tensors_[0];
  wrong.shape = {4};
  EXPECT_THAT(write({wrong}), HasSubstr("tensor 'odd': U8 [4] does not take 3 bytes"));
  wrong = tensors_[0];
  wrong.name = "__metadata__";
  EXPECT_THAT(write({wrong}), HasSubstr("cannot name a tensor"));
  wrong.name = "\xff";
  EXPECT_THAT(write({wrong}), HasSubstr("not UTF-8"));
  EXPECT_THAT(write({tensors_[0]}, {{"k", "\xff"}}), HasSubstr("not UTF-8"));
}

TEST_F(SafetensorsFiles, FullDiskLeavesTheOldFile) {
  const auto path = directory_ / "m";
  ASSERT_TRUE(WriteSafetensors(path, tensors_).ok());
  const std::string old = Slurp(path);
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit small{1024, limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::vector<float> big(10000);
  const Status status = WriteSafetensors(
      path, std::vector<TensorView>{{"b", DType::kF32, {10000}, std::as_bytes(std::span(big))}});
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status.ToString();
  EXPECT_EQ(Slurp(path), old);
  EXPECT_EQ(NumFiles(), 1u);
}

// Every prefix is refused; every over-long file is refused; a flipped bit is refused or changes a
// value, and never breaks an invariant.
TEST_F(SafetensorsFiles, CorruptionIsReportedOrHarmless) {
  const auto path = directory_ / "m";
  ASSERT_TRUE(WriteSafetensors(path, tensors_, {{"k", "v"}}).ok());
  const std::string bytes = Slurp(path);
  for (size_t size = 0; size < bytes.size(); ++size) {
    const auto file = SafetensorsFile::FromBytes(AsBytes(bytes).first(size), "m.st");
    ASSERT_FALSE(file.has_value()) << size;
    ExpectOneLineNaming(file.error(), "m.st: ");
  }
  for (const size_t extra : {1, 7, 8, 4096}) {
    const std::string longer = bytes + std::string(extra, '\0');
    const auto file = SafetensorsFile::FromBytes(AsBytes(longer), "m.st");
    ASSERT_FALSE(file.has_value()) << extra;
    EXPECT_THAT(file.error().message(), HasSubstr("belong to no tensor"));
  }
  size_t refused = 0;
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    std::string flipped = bytes;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    const auto file = SafetensorsFile::FromBytes(AsBytes(flipped), "m.st");
    if (!file) {
      ExpectOneLineNaming(file.error(), "m.st: ");
      ++refused;
      continue;
    }
    for (const StoredTensor& tensor : file->tensors()) {
      EXPECT_EQ(*CheckedNumBytes(tensor.dtype, tensor.shape), tensor.num_bytes);
    }
  }
  EXPECT_GT(refused, 1000u);
}

// Opening costs the header, not the data: 4 GiB that lie in a hole of the file are never touched.
TEST_F(SafetensorsFiles, OpeningDoesNotReadTheData) {
  const uint64_t size = uint64_t{4} << 30;
  std::string header =
      "{" + Entry("w", "U8", fmt::format("[{}]", size), fmt::format("[0,{}]", size)) + "}";
  const auto path = directory_ / "big.safetensors";
  Spill(path, MakeFile(header, 0));
  std::filesystem::resize_file(path, 8 + header.size() + size);
  rusage before{};
  rusage after{};
  ::getrusage(RUSAGE_SELF, &before);
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.has_value()) << MessageOf(file);
  EXPECT_EQ(file->Find("w")->num_bytes, size);
  std::byte last{1};
  EXPECT_TRUE(file->Find("w")->Read(size - 1, {&last, 1}).ok());
  EXPECT_EQ(last, std::byte{0});
  ::getrusage(RUSAGE_SELF, &after);
  EXPECT_LT(after.ru_maxrss - before.ru_maxrss, 16 << 10);  // KiB
}

class Checkpoints : public SafetensorsFiles {
 protected:
  void WriteShard(const std::string& name, const std::vector<size_t>& which) {
    std::vector<TensorView> tensors;
    for (const size_t i : which) tensors.push_back(tensors_[i]);
    ASSERT_TRUE(WriteSafetensors(directory_ / name, tensors).ok());
  }
  void WriteIndex(const nlohmann::json& map) {
    Spill(directory_ / "model.safetensors.index.json", nlohmann::json{{"weight_map", map}}.dump());
  }
  std::string Error() {
    const auto checkpoint = Checkpoint::Open(directory_);
    if (!checkpoint) ExpectOneLineNaming(checkpoint.error(), directory_.string());
    return MessageOf(checkpoint);
  }
};

TEST_F(Checkpoints, OneFile) {
  WriteShard("model.safetensors", {0, 1, 2, 3, 4});
  const auto checkpoint = Checkpoint::Open(directory_);
  ASSERT_TRUE(checkpoint.has_value()) << MessageOf(checkpoint);
  EXPECT_EQ(checkpoint->tensors().size(), 5u);
  EXPECT_EQ(checkpoint->total_bytes(), 3u + 40 + 8 + 40);
  EXPECT_THAT(*ToFloatVector(*checkpoint->Get("w")), testing::ElementsAreArray(floats_));
}

TEST_F(Checkpoints, Shards) {
  WriteShard("s1.safetensors", {0, 1});
  WriteShard("s2.safetensors", {2, 4});
  WriteIndex({{"odd", "s1.safetensors"}, {"w", "s1.safetensors"}, {"A", "s2.safetensors"}});
  auto opened = Checkpoint::Open(directory_);
  ASSERT_TRUE(opened.has_value()) << MessageOf(opened);
  const Checkpoint checkpoint = std::move(*opened);  // views survive a move
  std::vector<std::string> names;
  for (const StoredTensor& tensor : checkpoint.tensors()) names.push_back(tensor.name);
  EXPECT_THAT(names, ElementsAre("A", "odd", "w"));
  EXPECT_THAT(checkpoint.path_of(0), HasSubstr("s2.safetensors"));
  EXPECT_THAT(checkpoint.path_of(1), HasSubstr("s1.safetensors"));
  EXPECT_EQ(checkpoint.Find("half"), nullptr);  // in a shard, not in the index
  EXPECT_THAT(*ToFloatVector(*checkpoint.Find("A")), testing::ElementsAreArray(floats_));
  EXPECT_THAT(MessageOf(checkpoint.Get("half")), HasSubstr(": no tensor 'half'"));
}

TEST_F(Checkpoints, ErrorsNameFileAndTensor) {
  EXPECT_THAT(Error(), HasSubstr("neither model.safetensors nor model.safetensors.index.json"));
  WriteShard("s1.safetensors", {0, 1});
  WriteIndex({{"odd", "s1.safetensors"}, {"w", "s2.safetensors"}});
  EXPECT_THAT(Error(), HasSubstr("index.json: shard 's2.safetensors' is missing"));
  WriteShard("s2.safetensors", {2});
  EXPECT_THAT(Error(),
              HasSubstr("tensor 'w' is listed in " + (directory_ / "s2.safetensors").string()));
  WriteShard("s2.safetensors", {1});
  EXPECT_THAT(Error(), HasSubstr("tensor 'w' is both in "));
  Spill(directory_ / "s2.safetensors", "garbage");
  EXPECT_THAT(Error(), HasSubstr("s2.safetensors: truncated"));
  for (const char* name : {"../s1.safetensors", "/etc/passwd", "a/b", "..", ".", "", "a\\b"}) {
    WriteIndex({{"odd", name}});
    EXPECT_THAT(Error(), HasSubstr("which is not a plain file name")) << name;
  }
  WriteIndex({{"odd", std::string("s1.safetensors\0x", 16)}});
  EXPECT_THAT(Error(), HasSubstr("which is not a plain file name"));
  WriteIndex({{"odd", 3}});
  EXPECT_THAT(Error(), HasSubstr("the file of tensor 'odd' is not a string"));
  Spill(directory_ / "model.safetensors.index.json",
        R"({"weight_map":{"odd":"s1.safetensors","odd":"s2.safetensors"}})");
  EXPECT_THAT(Error(), HasSubstr("duplicate key 'odd'"));
  Spill(directory_ / "model.safetensors.index.json", "[]");
  EXPECT_THAT(Error(), HasSubstr("no object 'weight_map'"));
  Spill(directory_ / "model.safetensors.index.json", "{");
  EXPECT_THAT(Error(), HasSubstr("invalid JSON"));
}

}  // namespace
}  // namespace oscar
