#include "io/torch_file.h"

#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <zip.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "io/test_util.h"

namespace oscar {
namespace {

using testing::ElementsAre;
using testing::ElementsAreArray;
using testing::HasSubstr;

const std::filesystem::path kFixtures = std::filesystem::path(OSCAR_TEST_DATA) / "torch";
const std::filesystem::path kRotations =
    std::filesystem::path(OSCAR_TEST_DATA) / "rotations" / "qwen3-4b-thinking-2507-2-layers";

// Fixtures are written by the real torch: see tools/make_torch_fixtures.py for their values.
TorchValue Load(const std::filesystem::path& path) {
  auto value = ReadTorchFile(path);
  EXPECT_TRUE(value.has_value()) << MessageOf(value);
  return value.value_or(TorchValue());
}

std::vector<float> Floats(const TorchValue* value) {
  EXPECT_NE(value, nullptr);
  if (value == nullptr || value->AsTensor() == nullptr) return {};
  return *ToFloatVector(value->AsTensor()->View("t"));
}

std::vector<int64_t> Ints(const TorchValue* value) {
  std::vector<int64_t> ints;
  if (value == nullptr) return ints;
  const TorchList* items = value->AsTuple() != nullptr ? &value->AsTuple()->items : value->AsList();
  for (const TorchValue& item : *items) {
    EXPECT_NE(item.AsInt(), nullptr);
    ints.push_back(*item.AsInt());
  }
  return ints;
}

TEST(TorchFile, ViewsOfOneStorage) {
  const TorchValue root = Load(kFixtures / "shared.pt");
  std::vector<float> base(24);
  std::iota(base.begin(), base.end(), 0.0f);
  EXPECT_EQ(Floats(root.Find("base")), base);
  EXPECT_THAT(root.Find("base")->AsTensor()->shape, ElementsAre(4, 6));
  std::vector<float> transposed;
  for (int column = 0; column < 6; ++column) {
    for (int row = 0; row < 4; ++row) transposed.push_back(static_cast<float>(6 * row + column));
  }
  EXPECT_EQ(Floats(root.Find("transposed")), transposed);
  EXPECT_THAT(root.Find("transposed")->AsTensor()->shape, ElementsAre(6, 4));
  EXPECT_THAT(Floats(root.Find("rows")), ElementsAreArray(base.data() + 6, 12));
  EXPECT_THAT(Floats(root.Find("columns")), ElementsAre(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23));
  EXPECT_THAT(Floats(root.Find("element")), ElementsAre(15));
  EXPECT_TRUE(root.Find("element")->AsTensor()->shape.empty());
  EXPECT_THAT(Floats(root.Find("expanded")), ElementsAre(0, 0, 0, 6, 6, 6, 12, 12, 12, 18, 18, 18));
  EXPECT_THAT(root.Find("empty")->AsTensor()->shape, ElementsAre(0, 6));
  // Sharing is kept where it is free.
  EXPECT_EQ(root.Find("again")->AsTensor()->data.data(),
            root.Find("base")->AsTensor()->data.data());
  EXPECT_EQ(root.Find("rows")->AsTensor()->data.data(),
            root.Find("base")->AsTensor()->data.data() + 24);
}

TEST(TorchFile, DTypes) {
  const TorchValue root = Load(kFixtures / "dtypes.pt");
  for (const auto& [name, dtype] :
       std::initializer_list<std::pair<const char*, DType>>{{"float64", DType::kF64},
                                                            {"float32", DType::kF32},
                                                            {"float16", DType::kF16},
                                                            {"bfloat16", DType::kBf16}}) {
    EXPECT_EQ(root.Find(name)->AsTensor()->dtype, dtype);
    EXPECT_THAT(Floats(root.Find(name)), ElementsAre(0, 1, 2, 3, 100)) << name;
  }
  for (const auto& [name, dtype] :
       std::initializer_list<std::pair<const char*, DType>>{{"int64", DType::kI64},
                                                            {"int32", DType::kI32},
                                                            {"int16", DType::kI16},
                                                            {"int8", DType::kI8},
                                                            {"uint8", DType::kU8}}) {
    EXPECT_EQ(root.Find(name)->AsTensor()->dtype, dtype);
    EXPECT_THAT(*ToIntVector(root.Find(name)->AsTensor()->View(name)), ElementsAre(0, 1, 2, 3, 100))
        << name;
  }
  EXPECT_THAT(*ToIntVector(root.Find("bool")->AsTensor()->View("bool")),
              ElementsAre(0, 1, 1, 1, 1));
}

TEST(TorchFile, StateDictWithAttributes) {
  const TorchValue root = Load(kFixtures / "state_dict.pt");
  EXPECT_THAT(Floats(root.Find("weight")), ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_THAT(Floats(root.Find("bias")), ElementsAre(-1, -1));
}

TEST(TorchFile, Values) {
  const TorchValue root = Load(kFixtures / "values.pt");
  EXPECT_TRUE(root.Find("none")->is_none());
  EXPECT_TRUE(*root.Find("true")->AsBool());
  EXPECT_FALSE(*root.Find("false")->AsBool());
  EXPECT_THAT(Ints(root.Find("int")), ElementsAre(0, 255, 256, 65535, 65536, -1, 1LL << 31,
                                                  -(1LL << 31), 1LL << 40, -(1LL << 40)));
  EXPECT_EQ(*root.Find("float")->AsFloat(), 0.1);
  EXPECT_EQ(*root.Find("text")->AsString(), "d\xc3\xa9j\xc3\xa0 vu");
  const TorchTuple* tuple = root.Find("tuple")->AsTuple();
  ASSERT_NE(tuple, nullptr);
  EXPECT_EQ(tuple->items.size(), 3u);
  EXPECT_THAT(Ints(&tuple->items[1]), ElementsAre(2, 3));
  EXPECT_EQ(root.Find("list")->AsList()->size(), 2u);
  const TorchValue* nested = root.Find("nested");
  EXPECT_EQ(std::get<std::string>(nested->AsDict()->items[0].first), "z");  // order kept
  EXPECT_EQ(*nested->Find("a")->Find(5)->AsString(), "five");
  EXPECT_EQ(*nested->Find("a")->Find(-7)->AsString(), "minus seven");
  EXPECT_EQ(nested->Find("a")->Find("5"), nullptr);
  EXPECT_EQ(nested->Find("a")->Find(6), nullptr);
}

TEST(TorchFile, BareTensor) {
  const TorchValue root = Load(kFixtures / "bare_tensor.pt");
  EXPECT_EQ(root.KindName(), "tensor");
  EXPECT_THAT(*ToIntVector(root.AsTensor()->View("t")), ElementsAre(5, 7, 11));
}

TEST(TorchFile, RotationWithGapsOfDimension256) {
  const TorchValue root = Load(kFixtures / "rotation_gaps_d256.pt");
  const TorchDict* layers = root.Find("layers")->AsDict();
  ASSERT_NE(layers, nullptr);
  ASSERT_EQ(layers->items.size(), 3u);
  for (const int64_t id : {0, 3, 7}) {
    const TorchValue* layer = layers->Find(id);
    ASSERT_NE(layer, nullptr);
    EXPECT_EQ(*layer->Find("layer_id")->AsInt(), id);
    const std::vector<float> rotation = Floats(layer->Find("rotation"));
    ASSERT_EQ(rotation.size(), 256u * 256u);
    for (size_t i = 0; i < rotation.size(); ++i) {
      ASSERT_EQ(rotation[i], i / 256 + i % 256 == 255 ? 1.0f : 0.0f);
    }
  }
  const TorchValue strings = Load(kFixtures / "rotation_str_keys.pt");
  EXPECT_THAT(Floats(strings.Find("layers")->Find("1")->Find("rotation")),
              ElementsAre(0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0));
}

// Layers 0 and 1 of the published rotations of Qwen3-4B-Thinking-2507, written by WriteTorchFile.
TEST(TorchFile, PublishedRotationsAreOrthogonal) {
  for (const auto& [file, objective] : std::initializer_list<std::pair<const char*, const char*>>{
           {"k_rotation_qqt_r_h_pbr.pt", "qqt_r_h_pbr"},
           {"v_rotation_sst_r_h_pbr.pt", "sst_r_h_pbr"}}) {
    const TorchValue root = Load(kRotations / file);
    EXPECT_EQ(*root.Find("format_version")->AsInt(), 1);
    EXPECT_EQ(*root.Find("objective")->AsString(), objective);
    for (const int64_t id : {0, 1}) {
      const TorchValue* layer = root.Find("layers")->Find(id);
      const std::vector<float> r = Floats(layer->Find("rotation"));
      ASSERT_EQ(r.size(), 128u * 128u);
      double worst = 0;
      for (size_t i = 0; i < 128; ++i) {
        for (size_t j = 0; j <= i; ++j) {
          double dot = i == j ? -1 : 0;
          for (size_t k = 0; k < 128; ++k) dot += double{r[128 * i + k]} * r[128 * j + k];
          worst = std::max(worst, std::abs(dot));
        }
      }
      EXPECT_LT(worst, 1e-5) << file << " layer " << id;
      EXPECT_EQ(Floats(layer->Find("eigenvalues")).size(), 128u);
    }
  }
}

using TorchFiles = TempDirTest;

// The committed cut is what the reader and the writer make of the published file. Runs where
// OSCAR_ZOO_DIR names a directory with the originals.
TEST_F(TorchFiles, CutOfThePublishedFileIsReproducible) {
  const char* zoo = std::getenv("OSCAR_ZOO_DIR");
  if (zoo == nullptr) GTEST_SKIP() << "OSCAR_ZOO_DIR is not set";
  for (const char* file : {"k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt"}) {
    const TorchValue root = Load(std::filesystem::path(zoo) / "qwen3-4b-thinking-2507" / file);
    ASSERT_EQ(root.Find("layers")->AsDict()->items.size(), 36u);
    TorchDict cut;
    for (const auto& [key, value] : root.AsDict()->items) {
      TorchValue kept = value;
      if (const TorchDict* layers = value.AsDict()) {
        TorchDict two;
        two.items.assign(layers->items.begin(), layers->items.begin() + 2);
        kept = TorchValue(two);
      }
      cut.items.emplace_back(key, kept);
    }
    ASSERT_TRUE(WriteTorchFile(directory_ / file, TorchValue(cut)).ok());
    EXPECT_EQ(Slurp(directory_ / file), Slurp(kRotations / file));
  }
}

TorchValue Sample() {
  TorchDict inner;
  inner.Set(0, TorchValue(TorchTensor::FromFloats({2, 3}, std::vector<float>{1, 2, 3, 4, 5, 6})));
  inner.Set(-5, TorchValue(TorchTensor::FromInts32({2}, std::vector<int32_t>{-1, 7})));
  inner.Set(int64_t{1} << 40, TorchValue(TorchTensor::FromFloats({0, 4}, {})));
  inner.Set("scalar", TorchValue(TorchTensor::FromFloats({}, std::vector<float>{9})));
  TorchDict root;
  root.Set("format_version", TorchValue(1));
  root.Set("text", TorchValue("d\xc3\xa9j\xc3\xa0"));
  root.Set("flags", TorchValue(TorchList{TorchValue(true), TorchValue(false), TorchValue()}));
  root.Set("numbers",
           TorchValue(TorchTuple{{TorchValue(255), TorchValue(256), TorchValue(70000),
                                  TorchValue(-1), TorchValue(INT64_MIN), TorchValue(INT64_MAX)}}));
  root.Set("real", TorchValue(-0.1));
  root.Set("none", TorchValue(TorchList{}));
  root.Set("layers", TorchValue(inner));
  return TorchValue(root);
}

TEST_F(TorchFiles, RoundTrip) {
  const auto path = directory_ / "x.pt";
  ASSERT_TRUE(WriteTorchFile(path, Sample()).ok());
  const TorchValue root = Load(path);
  EXPECT_EQ(*root.Find("format_version")->AsInt(), 1);
  EXPECT_EQ(*root.Find("text")->AsString(), "d\xc3\xa9j\xc3\xa0");
  EXPECT_EQ(*root.Find("real")->AsFloat(), -0.1);
  EXPECT_TRUE(*root.Find("flags")->AsList()->at(0).AsBool());
  EXPECT_TRUE(root.Find("flags")->AsList()->at(2).is_none());
  EXPECT_THAT(Ints(root.Find("numbers")), ElementsAre(255, 256, 70000, -1, INT64_MIN, INT64_MAX));
  EXPECT_TRUE(root.Find("none")->AsList()->empty());
  const TorchValue* layers = root.Find("layers");
  EXPECT_THAT(Floats(layers->Find(0)), ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_THAT(*ToIntVector(layers->Find(-5)->AsTensor()->View("t")), ElementsAre(-1, 7));
  EXPECT_THAT(layers->Find(int64_t{1} << 40)->AsTensor()->shape, ElementsAre(0, 4));
  EXPECT_THAT(Floats(layers->Find("scalar")), ElementsAre(9));
}

TEST_F(TorchFiles, BytesAreDeterministicAlignedAndShared) {
  const std::vector<float> values(64, 1.5f);
  const TorchTensor tensor = TorchTensor::FromFloats({8, 8}, values);
  TorchDict dict;
  for (int i = 0; i < 3; ++i) dict.Set(i, TorchValue(tensor));
  ASSERT_TRUE(WriteTorchFile(directory_ / "a.pt", TorchValue(dict)).ok());
  ASSERT_TRUE(WriteTorchFile(directory_ / "b.pt", TorchValue(dict)).ok());
  const std::string bytes = Slurp(directory_ / "a.pt");
  EXPECT_EQ(bytes, Slurp(directory_ / "b.pt"));
  const std::string raw(reinterpret_cast<const char*>(values.data()), 256);
  const size_t at = bytes.find(raw);
  ASSERT_NE(at, std::string::npos);
  EXPECT_EQ(at % 64, 0u);
  EXPECT_EQ(bytes.find(raw, at + 1), std::string::npos);
}

TEST_F(TorchFiles, UnwritableValuesLeaveNoFile) {
  const auto write = [&](const TorchValue& value) {
    const Status status = WriteTorchFile(directory_ / "x.pt", value);
    EXPECT_EQ(NumFiles(), 0u);
    ExpectOneLineNaming(status, "x.pt: ");
    return status.message();
  };
  EXPECT_THAT(write(TorchValue("\xff")), HasSubstr("not UTF-8"));
  TorchDict dict;
  dict.Set(1, TorchValue());
  dict.Set(1, TorchValue());
  EXPECT_THAT(write(TorchValue(dict)), HasSubstr("two equal keys"));
  TorchTensor tensor = TorchTensor::FromFloats({2}, std::vector<float>{1, 2});
  tensor.shape = {3};
  EXPECT_THAT(write(TorchValue(tensor)), HasSubstr("F32 [3] does not take 8 bytes"));
  tensor.shape = {8};
  tensor.dtype = DType::kF8E4M3;
  EXPECT_THAT(write(TorchValue(tensor)), HasSubstr("F8_E4M3 cannot be written"));
  TorchValue deep;
  for (int i = 0; i < 70; ++i) deep = TorchValue(TorchList{deep});
  EXPECT_THAT(write(deep), HasSubstr("deeper than 64"));
}

TEST_F(TorchFiles, FullDiskLeavesTheOldFile) {
  const auto path = directory_ / "x.pt";
  ASSERT_TRUE(WriteTorchFile(path, Sample()).ok());
  const std::string old = Slurp(path);
  const std::vector<float> big(100000);
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit small{4096, limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const Status status = WriteTorchFile(path, TorchValue(TorchTensor::FromFloats({100000}, big)));
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status.ToString();
  EXPECT_EQ(Slurp(path), old);
  EXPECT_EQ(NumFiles(), 1u);
}

TEST(TorchFile, OtherFilesAreNamed) {
  const auto legacy = ReadTorchFile(kFixtures / "legacy.pt");
  ASSERT_FALSE(legacy.has_value());
  ExpectOneLineNaming(legacy.error(), "legacy.pt: not a zip archive");
  const auto module = ReadTorchFile(kFixtures / "whole_module.pt");
  ASSERT_FALSE(module.has_value());
  ExpectOneLineNaming(module.error(),
                      "whole_module/data.pkl: pickle byte 2: global "
                      "'torch.nn.modules.linear.Linear' is not allowed");
  const auto missing = ReadTorchFile(kFixtures / "no_such.pt");
  ASSERT_FALSE(missing.has_value());
  EXPECT_EQ(missing.error().code(), StatusCode::kNotFound);
}

// Every prefix is refused, and so is anything after the end. A flipped bit either leaves the values
// as they were (timestamps, padding) or is refused: the checksum covers pickle and tensors.
TEST_F(TorchFiles, CorruptionIsReported) {
  for (const char* fixture : {"shared.pt", "rotation_str_keys.pt"}) {
    const std::string bytes = Slurp(kFixtures / fixture);
    for (size_t size = 0; size < bytes.size(); ++size) {
      const auto value = ParseTorchFile(AsBytes(bytes).first(size), "m.pt");
      ASSERT_FALSE(value.has_value()) << size;
      ExpectOneLineNaming(value.error(), "m.pt: ");
    }
    for (const size_t extra : {1, 22, 4096}) {
      const std::string longer = bytes + std::string(extra, '\0');
      EXPECT_FALSE(ParseTorchFile(AsBytes(longer), "m.pt").has_value()) << extra;
    }
  }
  const auto path = directory_ / "x.pt";
  ASSERT_TRUE(WriteTorchFile(path, Sample()).ok());
  const std::string bytes = Slurp(path);
  size_t accepted = 0;
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    std::string flipped = bytes;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    const auto value = ParseTorchFile(AsBytes(flipped), "m.pt");
    if (!value) {
      ExpectOneLineNaming(value.error(), "m.pt: ");
      continue;
    }
    ++accepted;
    EXPECT_THAT(Floats(value->Find("layers")->Find(0)), ElementsAre(1, 2, 3, 4, 5, 6))
        << "bit " << bit;
    EXPECT_THAT(*ToIntVector(value->Find("layers")->Find(-5)->AsTensor()->View("t")),
                ElementsAre(-1, 7));
  }
  EXPECT_GT(accepted, 0u);
}

class TorchArchives : public TempDirTest {
 protected:
  struct File {
    std::string name, bytes;
    int method = ZIP_CM_STORE;
  };
  // Writes an archive with an independent writer and reads it.
  std::string ErrorOf(const std::vector<File>& files) {
    const std::string path = (directory_ / "x.pt").string();
    int code = 0;
    zip_t* zip = zip_open(path.c_str(), ZIP_CREATE | ZIP_TRUNCATE, &code);
    for (const File& file : files) {
      zip_source_t* source = zip_source_buffer(zip, file.bytes.data(), file.bytes.size(), 0);
      const zip_int64_t index = zip_file_add(zip, file.name.c_str(), source, 0);
      zip_set_file_compression(zip, static_cast<zip_uint64_t>(index), file.method, 0);
    }
    EXPECT_EQ(zip_close(zip), 0);
    const auto value = ReadTorchFile(path);
    if (!value) ExpectOneLineNaming(value.error(), "x.pt: ");
    return MessageOf(value);
  }
  const std::string none_ = "\x80\x02N.";
};

TEST_F(TorchArchives, Directory) {
  EXPECT_EQ(ErrorOf({{"a/data.pkl", none_}}), "ok");
  EXPECT_EQ(ErrorOf({{"a/data.pkl", none_}, {"a/byteorder", "little"}}), "ok");
  EXPECT_THAT(ErrorOf({{"a/data.pkl", none_}, {"a/byteorder", "big"}}),
              HasSubstr("'a/byteorder' says 'big'"));
  EXPECT_THAT(ErrorOf({{"a/data", none_}}), HasSubstr("no zip entry data.pkl"));
  EXPECT_THAT(ErrorOf({{"data.pkl", none_}}), HasSubstr("no zip entry data.pkl"));
  EXPECT_THAT(ErrorOf({{"a/data.pkl", none_}, {"b/data.pkl", none_}}),
              HasSubstr("two zip entries"));
  EXPECT_THAT(
      ErrorOf({{"a/data.pkl", none_}, {"a/data/0", std::string(1 << 20, '\0'), ZIP_CM_DEFLATE}}),
      HasSubstr("'a/data/0' is compressed"));
  EXPECT_THAT(ErrorOf({{"a\nb/data.pkl", "\x80\x02x."}}),
              HasSubstr("a\\x0ab/data.pkl: pickle byte 2: operation 0x78"));
}

std::string TensorPickle(std::string_view storage_class, int count,
                         std::string_view shape_and_stride) {
  std::string pickle =
      "\x80\x02"
      "ctorch._utils\n_rebuild_tensor_v2\n((";
  pickle += std::string("X\7\0\0\0storage", 12);
  pickle += fmt::format("ctorch\n{}\n", storage_class);
  pickle += std::string(
      "X\1\0\0\0"
      "0"
      "X\3\0\0\0cpuK",
      15);
  pickle += static_cast<char>(count);
  pickle += "tQ";
  pickle += shape_and_stride;
  pickle += "\x89}tR.";
  return pickle;
}

TEST_F(TorchArchives, StoragesMustMatchThePickle) {
  const std::string pickle = TensorPickle("FloatStorage", 2, std::string("K\0K\2\x85K\1\x85", 8));
  EXPECT_EQ(ErrorOf({{"a/data.pkl", pickle}, {"a/data/0", std::string(8, '\0')}}), "ok");
  EXPECT_THAT(ErrorOf({{"a/data.pkl", pickle}}),
              HasSubstr("at '/': zip entry 'a/data/0' is missing"));
  EXPECT_THAT(ErrorOf({{"a/data.pkl", pickle}, {"a/data/0", std::string(7, '\0')}}),
              HasSubstr("zip entry 'a/data/0' has 7 bytes, the pickle says 8"));
}

// 255 x 255 x 255 x 255 floats out of one: 17 GB asked of a file of a few hundred bytes.
TEST_F(TorchArchives, RepeatedElementsCannotMultiplyMemory) {
  const std::string pickle =
      TensorPickle("FloatStorage", 1, std::string("K\0(K\xffK\xffK\xffK\xfft(K\0K\0K\0K\0t", 22));
  EXPECT_THAT(ErrorOf({{"a/data.pkl", pickle}, {"a/data/0", std::string(4, '\0')}}),
              HasSubstr("more than"));
}

TEST(TorchFile, LimitsApply) {
  TorchLimits limits;
  limits.max_tensor_bytes = 95;
  EXPECT_EQ(ReadTorchFile(kFixtures / "shared.pt", limits).error().code(),
            StatusCode::kResourceExhausted);
  limits = {};
  limits.max_pickle_bytes = 10;
  EXPECT_EQ(ReadTorchFile(kFixtures / "shared.pt", limits).error().code(), StatusCode::kOutOfRange);
  limits = {};
  limits.max_values = 10;
  EXPECT_THAT(MessageOf(ReadTorchFile(kFixtures / "shared.pt", limits)),
              HasSubstr("more than 10 values"));
}

}  // namespace
}  // namespace oscar
