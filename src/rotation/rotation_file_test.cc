#include "rotation/rotation_file.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <fstream>

#include "io/safetensors.h"
#include "io/torch_file.h"
#include "numeric/eigen.h"
#include "rotation/test_util.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;

// Random orthogonal matrices: eigenvectors of random symmetric ones.
Rotation RandomRotation(const std::vector<int>& layers, int dim, int heads, uint64_t seed) {
  Rotation rotation;
  rotation.head_dim = dim;
  rotation.info = {"qqt", "sst", "r_h_pbr", "fitted", "model-1", "xxh3:00", 1234};
  const Philox rng(seed, 0);
  uint64_t next = 0;
  for (const int layer : layers) {
    for (SideRotation* side : {&rotation.layers[layer].k, &rotation.layers[layer].v}) {
      for (int head = 0; head < heads; ++head) {
        Matrix m(dim, dim);
        for (double& x : m.data()) x = rng.Normal(next++);
        const auto eigen = DecomposeSymmetric(m).value();
        AppendHead(*side, eigen.vectors, eigen.values, 0.9f);
      }
    }
  }
  return rotation;
}

TEST(RotationFileTest, RoundTripKeepsEverything) {
  const TemporaryDirectory dir;
  for (const int heads : {1, 4}) {
    const Rotation rotation = RandomRotation({0, 3, 12}, 16, heads, 1);
    const fs::path path = dir.path() / kRotationFileName;
    const Status status = WriteRotationFile(path, rotation);
    ASSERT_TRUE(status.ok()) << status.ToString();
    for (const fs::path& from : {path, dir.path()}) {
      const auto read = LoadRotation(from);
      ASSERT_TRUE(read.has_value()) << read.error().ToString();
      EXPECT_EQ(read->head_dim, 16);
      EXPECT_EQ(read->layers, rotation.layers);
      EXPECT_EQ(read->info, rotation.info);
    }
    const std::string bytes = FileBytes(path);
    ASSERT_TRUE(WriteRotationFile(path, rotation).ok());
    EXPECT_EQ(FileBytes(path), bytes);
  }
}

TEST(RotationFileTest, TensorNamesAreThoseOfTheFormat) {
  const TemporaryDirectory dir;
  ASSERT_TRUE(WriteRotationFile(dir.path() / "r.safetensors", RandomRotation({5}, 16, 2, 2)).ok());
  const auto file = SafetensorsFile::Open(dir.path() / "r.safetensors");
  ASSERT_TRUE(file.has_value());
  EXPECT_EQ(file->tensors().size(), 6u);
  for (const std::string side : {"k", "v"}) {
    const auto matrices = file->Get("layers.5." + side + "_rotation");
    ASSERT_TRUE(matrices.has_value());
    EXPECT_EQ(matrices->dtype, DType::kF32);
    EXPECT_EQ(matrices->shape, (std::vector<int64_t>{2, 16, 16}));
    EXPECT_EQ(file->Get("layers.5." + side + "_eigenvalues")->shape, (std::vector<int64_t>{2, 16}));
    EXPECT_EQ(file->Get("layers.5." + side + "_clip")->shape, (std::vector<int64_t>{2}));
  }
  EXPECT_EQ(file->metadata().at("format_version"), "1");
  EXPECT_EQ(file->metadata().at("k_objective"), "qqt");
  EXPECT_EQ(file->metadata().at("model_fingerprint"), "model-1");
}

TEST(RotationFileTest, RefusesToWriteWhatItWouldNotRead) {
  const TemporaryDirectory dir;
  Rotation rotation = RandomRotation({0}, 16, 1, 3);
  rotation.layers[0].k.matrices[0] += 0.1f;
  EXPECT_FALSE(WriteRotationFile(dir.path() / "r.safetensors", rotation).ok());
  EXPECT_FALSE(fs::exists(dir.path() / "r.safetensors"));
  EXPECT_FALSE(WriteZooPair(dir.path(), rotation).has_value());
}

// Writes a file from tensors and metadata and reads it as a rotation.
class HostileFile : public testing::Test {
 protected:
  void SetUp() override {
    const std::vector<float> identity = Matrix::Identity(4).ToFloats();
    for (const std::string side : {"k", "v"}) {
      Put("layers.2." + side + "_rotation", {1, 4, 4}, identity);
      Put("layers.2." + side + "_eigenvalues", {1, 4}, std::vector<float>(4, 1.0f));
      Put("layers.2." + side + "_clip", {1}, {0.9f});
    }
    metadata_ = {{"format_version", "1"},  {"k_objective", "qqt"},     {"v_objective", "sst"},
                 {"composition", "plain"}, {"clip_source", "given"},   {"model_fingerprint", ""},
                 {"calibration_hash", ""}, {"calibration_tokens", "0"}};
  }
  void Put(const std::string& name, std::vector<int64_t> shape, std::vector<float> values) {
    tensors_[name] = {std::move(shape), std::move(values)};
  }
  Status Load() {
    std::vector<TensorView> views;
    for (const auto& [name, tensor] : tensors_) {
      views.push_back({name, DType::kF32, tensor.first, std::as_bytes(std::span(tensor.second))});
    }
    const fs::path path = dir_.path() / "r.safetensors";
    const Status written = WriteSafetensors(path, views, metadata_);
    EXPECT_TRUE(written.ok()) << written.ToString();
    const auto rotation = LoadRotation(path);
    if (rotation.has_value()) return {};
    EXPECT_NE(rotation.error().message().find(path.string()), std::string::npos)
        << rotation.error().message();
    return rotation.error();
  }

  TemporaryDirectory dir_;
  std::map<std::string, std::pair<std::vector<int64_t>, std::vector<float>>> tensors_;
  std::map<std::string, std::string> metadata_;
};

TEST_F(HostileFile, TheBaseIsSound) { EXPECT_TRUE(Load().ok()); }
TEST_F(HostileFile, OtherVersion) {
  metadata_["format_version"] = "2";
  EXPECT_EQ(Load().code(), StatusCode::kUnimplemented);
}
TEST_F(HostileFile, MissingMetadata) {
  metadata_.erase("composition");
  EXPECT_EQ(Load().code(), StatusCode::kDataLoss);
}
TEST_F(HostileFile, BadTokenCount) {
  metadata_["calibration_tokens"] = "-4";
  EXPECT_EQ(Load().code(), StatusCode::kDataLoss);
}
TEST_F(HostileFile, MissingTensor) {
  tensors_.erase("layers.2.v_clip");
  EXPECT_FALSE(Load().ok());
}
TEST_F(HostileFile, ForeignTensor) {
  Put("model.embed", {1}, {0});
  EXPECT_EQ(Load().code(), StatusCode::kDataLoss);
}
TEST_F(HostileFile, TwoSpellingsOfALayer) {
  Put("layers.02.k_rotation", {1, 4, 4}, Matrix::Identity(4).ToFloats());
  EXPECT_EQ(Load().code(), StatusCode::kDataLoss);
}
TEST_F(HostileFile, WrongShape) {
  Put("layers.2.k_eigenvalues", {4}, std::vector<float>(4, 1.0f));
  EXPECT_FALSE(Load().ok());
}
TEST_F(HostileFile, EmptyMatrices) {
  Put("layers.2.k_rotation", {0, 4, 4}, {});
  EXPECT_FALSE(Load().ok());
}
TEST_F(HostileFile, DimensionsThatDiffer) {
  Put("layers.2.v_rotation", {1, 2, 2}, Matrix::Identity(2).ToFloats());
  EXPECT_FALSE(Load().ok());
}
TEST_F(HostileFile, NotOrthogonal) {
  Put("layers.2.k_rotation", {1, 4, 4}, std::vector<float>(16, 0.5f));
  const Status status = Load();
  EXPECT_EQ(status.code(), StatusCode::kDataLoss);
  EXPECT_NE(status.message().find("max |R R^T - I| is 1"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("0.001"), std::string::npos) << status.message();
}

TEST(ZooTest, PublishedPairLoads) {
  // Two layers of the published pair of Qwen3-4B-Thinking-2507.
  const fs::path dir = fs::path(OSCAR_TEST_DATA) / "rotations" / "qwen3-4b-thinking-2507-2-layers";
  const auto rotation = LoadRotation(dir);
  ASSERT_TRUE(rotation.has_value()) << rotation.error().ToString();
  EXPECT_EQ(rotation->layers.size(), 2u);
  EXPECT_EQ(rotation->head_dim, 128);
  EXPECT_EQ(rotation->info.k_objective, "qqt");
  EXPECT_EQ(rotation->info.v_objective, "sst");
  EXPECT_EQ(rotation->info.composition, "r_h_pbr");
  EXPECT_LT(MeasureOrthogonality(*rotation).max_error, 5e-6);
  EXPECT_GT(MeasureOrthogonality(*rotation).max_error, 0);
  // The eigenvalues are ascending: the convention that the permutation rests on.
  for (const auto& [layer, sides] : rotation->layers) {
    EXPECT_TRUE(std::is_sorted(sides.k.eigenvalues.begin(), sides.k.eigenvalues.end()));
    EXPECT_TRUE(std::is_sorted(sides.v.eigenvalues.begin(), sides.v.eigenvalues.end()));
  }
  // .pt -> safetensors -> .pt: equal bits.
  const TemporaryDirectory out;
  ASSERT_TRUE(WriteRotationFile(out.path() / kRotationFileName, *rotation).ok());
  const auto ours = LoadRotation(out.path());
  ASSERT_TRUE(ours.has_value()) << ours.error().ToString();
  const auto pair = WriteZooPair(out.path() / "zoo", *ours);
  ASSERT_TRUE(pair.has_value()) << pair.error().ToString();
  EXPECT_EQ(pair->k.filename(), "k_rotation_qqt_r_h_pbr.pt");
  EXPECT_EQ(pair->v.filename(), "v_rotation_sst_r_h_pbr.pt");
  for (const fs::path& from : {out.path() / "zoo", pair->k, pair->v}) {
    const auto again = LoadRotation(from);
    ASSERT_TRUE(again.has_value()) << again.error().ToString();
    EXPECT_EQ(again->layers, rotation->layers);
    EXPECT_EQ(again->info, rotation->info);
  }
  // And the fields that the published loader looks at.
  const auto root = ReadTorchFile(pair->k);
  ASSERT_TRUE(root.has_value());
  EXPECT_EQ(*root->Find("format_version")->AsInt(), 1);
  EXPECT_EQ(*root->Find("objective")->AsString(), "qqt_r_h_pbr");
  EXPECT_EQ(*root->Find("source_grouping")->AsString(), "layer");
  const int layer = rotation->layers.begin()->first;
  const TorchValue* entry = root->Find("layers")->Find(int64_t{layer});
  ASSERT_NE(entry, nullptr);
  EXPECT_EQ(entry->Find("rotation")->AsTensor()->shape, (std::vector<int64_t>{128, 128}));
  EXPECT_EQ(entry->Find("eigenvalues")->AsTensor()->dtype, DType::kF32);
}

TEST(ZooTest, StringKeysAndMissingEigenvalues) {
  const TemporaryDirectory dir;
  const std::vector<float> identity = Matrix::Identity(4).ToFloats();
  for (const char side : {'k', 'v'}) {
    TorchDict entry;
    entry.Set("rotation", TorchValue(TorchTensor::FromFloats({4, 4}, identity)));
    TorchDict layers;
    layers.Set("11", TorchValue(std::move(entry)));
    TorchDict root;
    root.Set("format_version", TorchValue("identity-v1"));
    root.Set("layers", TorchValue(std::move(layers)));
    ASSERT_TRUE(WriteTorchFile(dir.path() / fmt::format("{}_identity.pt", side),
                               TorchValue(std::move(root)))
                    .ok());
  }
  const auto rotation = LoadRotation(dir.path());
  ASSERT_TRUE(rotation.has_value()) << rotation.error().ToString();
  ASSERT_NE(rotation->Find(11), nullptr);
  EXPECT_EQ(rotation->Find(11)->k.eigenvalues, std::vector<float>(4, 1.0f));
  EXPECT_EQ(rotation->Find(11)->v.clip, std::vector<float>{kPublishedVClip});
}

TEST(ZooTest, OtherVersionNumbersAreRefused) {
  const TemporaryDirectory dir;
  const auto pair = WriteZooPair(dir.path(), RandomRotation({0, 1}, 16, 1, 5));
  ASSERT_TRUE(pair.has_value());
  const auto root = ReadTorchFile(pair->v);
  ASSERT_TRUE(root.has_value());
  TorchDict other = *root->AsDict();
  for (auto& [key, value] : other.items) {
    if (std::get<std::string>(key) == "format_version") value = TorchValue(99);
  }
  const Status written = WriteTorchFile(pair->v, TorchValue(std::move(other)));
  ASSERT_TRUE(written.ok()) << written.ToString();
  const auto refused = LoadRotation(dir.path());
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code(), StatusCode::kUnimplemented);
  EXPECT_NE(refused.error().message().find(
                "v_rotation_sst_r_h_pbr.pt: format_version is 99; only 1 is known"),
            std::string::npos)
      << refused.error().message();
}

TEST(ZooTest, PerHeadMatricesAreRefusedWithTheReason) {
  const TemporaryDirectory dir;
  const auto pair = WriteZooPair(dir.path(), RandomRotation({0}, 16, 4, 4));
  ASSERT_FALSE(pair.has_value());
  EXPECT_EQ(pair.error().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(pair.error().message().find("4 matrices"), std::string::npos);
  EXPECT_NE(pair.error().message().find("one per layer"), std::string::npos);
  EXPECT_TRUE(fs::is_empty(dir.path()));
}

TEST(ZooTest, HalfAPairIsNotLeft) {
  const TemporaryDirectory dir;
  fs::create_directory(dir.path() / "v_rotation_sst_r_h_pbr.pt");  // in V's way
  const auto pair = WriteZooPair(dir.path(), RandomRotation({0, 1}, 16, 1, 5));
  ASSERT_FALSE(pair.has_value());
  EXPECT_NE(pair.error().message().find("v_rotation_sst_r_h_pbr.pt"), std::string::npos);
  size_t files = 0;
  for (const auto& entry : fs::directory_iterator(dir.path())) files += entry.is_regular_file();
  EXPECT_EQ(files, 0u);
}

TEST(ZooTest, PairsThatDoNotMatch) {
  const TemporaryDirectory dir;
  EXPECT_EQ(LoadRotation(dir.path()).error().code(), StatusCode::kNotFound);
  EXPECT_EQ(LoadRotation(dir.path() / "absent").error().code(), StatusCode::kNotFound);
  ASSERT_TRUE(WriteZooPair(dir.path() / "a", RandomRotation({0, 1}, 16, 1, 5)).has_value());
  ASSERT_TRUE(WriteZooPair(dir.path() / "b", RandomRotation({0, 2}, 16, 1, 6)).has_value());
  fs::copy_file(dir.path() / "b" / "v_rotation_sst_r_h_pbr.pt",
                dir.path() / "a" / "v_rotation_sst_r_h_pbr.pt",
                fs::copy_options::overwrite_existing);
  const auto mixed = LoadRotation(dir.path() / "a");
  ASSERT_FALSE(mixed.has_value());
  EXPECT_NE(mixed.error().message().find("only one of the two"), std::string::npos);
  // Two candidates: ask, do not guess.
  fs::copy_file(dir.path() / "b" / "v_rotation_sst_r_h_pbr.pt", dir.path() / "b" / "v_other.pt");
  const auto ambiguous = LoadRotation(dir.path() / "b");
  ASSERT_FALSE(ambiguous.has_value());
  EXPECT_NE(ambiguous.error().message().find("v_other.pt"), std::string::npos);
  // Half a pair.
  fs::remove(dir.path() / "b" / "k_rotation_qqt_r_h_pbr.pt");
  EXPECT_EQ(LoadRotation(dir.path() / "b").error().code(), StatusCode::kNotFound);
}

TEST(ZooTest, ANamedFileBringsItsNamesake) {
  const TemporaryDirectory dir;
  const std::vector<int> layers{0};
  const Rotation fitted = RandomRotation({0}, 16, 1, 10);
  const Rotation hadamard = MakeDataFreeRotation("hadamard", layers, 16).value();
  ASSERT_TRUE(WriteZooPair(dir.path(), fitted).has_value());
  ASSERT_TRUE(WriteZooPair(dir.path(), hadamard).has_value());
  EXPECT_FALSE(LoadRotation(dir.path()).has_value());  // two pairs
  for (const char side : {'k', 'v'}) {
    const auto loaded = LoadRotation(dir.path() / fmt::format("{}_rotation_hadamard.pt", side));
    ASSERT_TRUE(loaded.has_value()) << loaded.error().ToString();
    EXPECT_EQ(loaded->layers, hadamard.layers);
  }
  fs::copy_file(dir.path() / "k_rotation_hadamard.pt", dir.path() / "other.pt");
  EXPECT_EQ(LoadRotation(dir.path() / "other.pt").error().code(), StatusCode::kInvalidArgument);
}

TEST(ZooTest, ObjectivesFromFilesCannotLeaveTheDirectory) {
  const TemporaryDirectory dir;
  Rotation rotation = RandomRotation({0}, 16, 1, 7);
  rotation.info.k_objective = "../../evil";
  rotation.info.composition = "";
  const auto pair = WriteZooPair(dir.path() / "out", rotation);
  ASSERT_TRUE(pair.has_value());
  EXPECT_EQ(pair->k.parent_path(), dir.path() / "out");
  EXPECT_EQ(pair->k.filename(), "k_rotation_------evil.pt");
}

TEST(ZooTest, CorruptFilesAreErrors) {
  const TemporaryDirectory dir;
  ASSERT_TRUE(WriteZooPair(dir.path(), RandomRotation({0}, 16, 1, 8)).has_value());
  const fs::path path = dir.path() / "k_rotation_qqt_r_h_pbr.pt";
  const std::string good = FileBytes(path);
  for (const size_t size : {size_t{0}, size_t{10}, good.size() / 2, good.size() - 1}) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << good.substr(0, size);
    EXPECT_FALSE(LoadRotation(dir.path()).has_value()) << size;
  }
  TorchDict root;
  root.Set("layers", TorchValue(3));
  ASSERT_TRUE(WriteTorchFile(path, TorchValue(root)).ok());
  const auto loaded = LoadRotation(dir.path());
  ASSERT_FALSE(loaded.has_value());
  EXPECT_NE(loaded.error().message().find(path.string()), std::string::npos);
}

}  // namespace
}  // namespace oscar
