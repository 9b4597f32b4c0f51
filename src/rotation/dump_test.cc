#include "rotation/dump.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "io/torch_file.h"
#include "rotation/rotation_file.h"
#include "rotation/test_util.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;

constexpr QkvShape kShape{4, 2, 16};

// Layers 0 and 5, three chunks each.
std::vector<DumpChunk> WriteDump(const fs::path& path) {
  std::vector<DumpChunk> chunks;
  auto writer = DumpWriter::Create(path, kShape);
  EXPECT_TRUE(writer.has_value());
  for (const int layer : {0, 5}) {
    for (int i = 0; i < 3; ++i) {
      const auto seed = static_cast<uint64_t>(layer * 10 + i);
      chunks.push_back(SyntheticChunk(kShape, {5 + i, 20, 1}, seed));
      const Status status = writer->Write(layer, chunks.back().View());
      EXPECT_TRUE(status.ok()) << status.ToString();
    }
  }
  return chunks;
}

TEST(DumpTest, WhatIsWrittenIsRead) {
  const TemporaryDirectory dir;
  const std::vector<DumpChunk> chunks = WriteDump(dir.path());
  const auto reader = DumpReader::Open(dir.path());
  ASSERT_TRUE(reader.has_value()) << reader.error().ToString();
  // Chunk 0 stands in for the warm-up that the published fitter drops; it has no tokens.
  EXPECT_EQ(reader->layers(),
            (std::map<int, std::vector<int>>{{0, {0, 1, 2, 3}}, {5, {0, 1, 2, 3}}}));
  const auto warm_up = reader->Read(5, 0);
  ASSERT_TRUE(warm_up.has_value()) << warm_up.error().ToString();
  EXPECT_EQ(warm_up->num_tokens, 0);
  EXPECT_EQ(warm_up->shape, kShape);
  for (int layer_idx = 0; layer_idx < 2; ++layer_idx) {
    for (int i = 0; i < 3; ++i) {
      const auto chunk = reader->Read(layer_idx * 5, i + 1);
      ASSERT_TRUE(chunk.has_value()) << chunk.error().ToString();
      const DumpChunk& expected = chunks[static_cast<size_t>(layer_idx * 3 + i)];
      EXPECT_EQ(chunk->shape, kShape);
      EXPECT_EQ(chunk->q, expected.q);
      EXPECT_EQ(chunk->k, expected.k);
      EXPECT_EQ(chunk->v, expected.v);
      EXPECT_EQ(chunk->seq_lens, expected.seq_lens);
    }
  }
  // The types that the published fitter expects.
  const auto q = ReadTorchFile(dir.path() / "layer_5" / "q" / "2.pt");
  ASSERT_TRUE(q.has_value());
  EXPECT_EQ(q->AsTensor()->dtype, DType::kBf16);
  const auto lengths = ReadTorchFile(dir.path() / "layer_5" / "seq_lens" / "2.pt");
  ASSERT_TRUE(lengths.has_value());
  EXPECT_EQ(lengths->AsTensor()->dtype, DType::kI32);
}

TEST(DumpTest, FitIsTheStreamingFitAndItsBytesAreFixed) {
  const TemporaryDirectory dir;
  const std::vector<DumpChunk> chunks = WriteDump(dir.path() / "dump");
  FitOptions options;
  options.per_head_k = options.per_head_v = true;
  options.fit_clip = true;
  options.objectives = ParseObjectives("qqt_sst").value();

  std::string first;
  for (const int threads : {1, 1, 4}) {
    for (const bool skip : {false, true}) {  // the warm-up is empty: skipping it changes nothing
      const std::vector<int> skipped(skip ? 1 : 0, 0);
      const auto reader = DumpReader::Open(dir.path() / "dump", skipped);
      ASSERT_TRUE(reader.has_value());
      ThreadPool pool(threads);
      const auto rotation = FitDump(*reader, options, pool);
      ASSERT_TRUE(rotation.has_value()) << rotation.error().ToString();
      const fs::path path = dir.path() / "out.safetensors";
      ASSERT_TRUE(WriteRotationFile(path, *rotation).ok());
      if (first.empty()) first = FileBytes(path);
      EXPECT_EQ(FileBytes(path), first) << threads << " threads";
    }
  }

  ThreadPool pool(2);
  QkvStatistics statistics(kShape, options);
  for (int pass = 0; pass < statistics.num_passes(); ++pass) {
    for (size_t i = 0; i < chunks.size(); ++i) {
      ASSERT_TRUE(statistics.Add(i < 3 ? 0 : 5, chunks[i].View(), pool).ok());
    }
    ASSERT_TRUE(statistics.EndPass().ok());
  }
  const auto streamed = statistics.Fit();
  ASSERT_TRUE(streamed.has_value());
  ASSERT_TRUE(WriteRotationFile(dir.path() / "streamed.safetensors", *streamed).ok());
  EXPECT_EQ(FileBytes(dir.path() / "streamed.safetensors"), first);
}

TEST(DumpTest, SkippingAChunkLeavesItOut) {
  const TemporaryDirectory dir;
  WriteDump(dir.path());
  const std::vector<int> skip{0, 2};
  const auto reader = DumpReader::Open(dir.path(), skip);
  ASSERT_TRUE(reader.has_value());
  EXPECT_EQ(reader->layers().at(0), (std::vector<int>{1, 3}));
  ThreadPool pool(1);
  const auto fewer = FitDump(*reader, {}, pool);
  const auto all = FitDump(*DumpReader::Open(dir.path()), {}, pool);
  ASSERT_TRUE(fewer.has_value() && all.has_value());
  EXPECT_EQ(fewer->info.calibration_tokens, 26 + 28);
  EXPECT_EQ(all->info.calibration_tokens, 26 + 27 + 28);
  EXPECT_NE(fewer->layers, all->layers);
  EXPECT_EQ(DumpSteps(*reader, {}), 2u * 2 * 2);  // layers, chunks, passes
  const auto absent = DumpReader::Open(dir.path(), std::vector<int>{2, 7});
  ASSERT_FALSE(absent.has_value());
  EXPECT_NE(absent.error().message().find("--skip-chunk 7: no such chunk"), std::string::npos)
      << absent.error().message();
}

// What is left of a capture that was stopped: some layers have more tokens than others.
TEST(DumpTest, LayersWithOtherTokensAreErrors) {
  const TemporaryDirectory dir;
  const fs::path dump = dir.path() / "dump";
  WriteDump(dump);
  for (const char* part : {"q", "k", "v", "seq_lens"}) {
    fs::remove(dump / "layer_5" / part / "3.pt");
  }
  const auto missing = DumpReader::Open(dump);
  ASSERT_FALSE(missing.has_value());
  EXPECT_EQ(missing.error().code(), StatusCode::kDataLoss);
  EXPECT_NE(missing.error().message().find("layer_5 has chunks 0 to 2"), std::string::npos)
      << missing.error().message();
  EXPECT_NE(missing.error().message().find("--skip-chunk"), std::string::npos);
  const std::vector<int> skip{3};
  EXPECT_TRUE(DumpReader::Open(dump, skip).has_value());

  // As many chunks, and one of them shorter.
  for (const char* part : {"q", "k", "v", "seq_lens"}) {
    fs::copy_file(dump / "layer_5" / part / "1.pt", dump / "layer_5" / part / "3.pt");
  }
  ThreadPool pool(1);
  const auto shorter = FitDump(*DumpReader::Open(dump), {}, pool);
  ASSERT_FALSE(shorter.has_value());
  EXPECT_NE(shorter.error().message().find("layer 5 has 79 tokens, layer 0 has 81"),
            std::string::npos)
      << shorter.error().message();
}

TEST(DumpTest, IncompleteAndForeignDumpsAreErrors) {
  const TemporaryDirectory dir;
  EXPECT_EQ(DumpReader::Open(dir.path() / "none").error().code(), StatusCode::kNotFound);
  EXPECT_EQ(DumpReader::Open(dir.path()).error().code(), StatusCode::kNotFound);
  const fs::path dump = dir.path() / "dump";
  WriteDump(dump);
  EXPECT_FALSE(DumpWriter::Create(dump, kShape).has_value());  // not over another dump

  const std::vector<int> all{0, 1, 2, 3};
  EXPECT_FALSE(DumpReader::Open(dump, all).has_value());

  fs::rename(dump / "layer_5" / "v" / "3.pt", dump / "moved.pt");
  const auto incomplete = DumpReader::Open(dump);
  ASSERT_FALSE(incomplete.has_value());
  EXPECT_NE(incomplete.error().message().find("layer_5"), std::string::npos);
  fs::rename(dump / "moved.pt", dump / "layer_5" / "v" / "3.pt");

  // K and V of different lengths.
  fs::copy_file(dump / "layer_5" / "v" / "2.pt", dump / "layer_5" / "v" / "3.pt",
                fs::copy_options::overwrite_existing);
  EXPECT_FALSE(DumpReader::Open(dump)->Read(5, 3).has_value());
  ThreadPool pool(1);
  EXPECT_FALSE(FitDump(*DumpReader::Open(dump), {}, pool).has_value());

  // Lengths that do not add up to the chunk.
  const std::vector<int32_t> lengths{1, 2};
  ASSERT_TRUE(WriteTorchFile(dump / "layer_0" / "seq_lens" / "1.pt",
                             TorchValue(TorchTensor::FromInts32({2}, lengths)))
                  .ok());
  const auto chunk = DumpReader::Open(dump)->Read(0, 1);
  ASSERT_FALSE(chunk.has_value());
  EXPECT_NE(chunk.error().message().find("sum to 3"), std::string::npos);

  // A number that is none is found where it lies.
  std::vector<float> values(static_cast<size_t>(27 * kShape.num_kv_heads * kShape.head_dim), 1.0f);
  values[static_cast<size_t>((3 * kShape.num_kv_heads + 1) * kShape.head_dim + 2)] = NAN;
  ASSERT_TRUE(WriteTorchFile(dump / "layer_0" / "k" / "2.pt",
                             TorchValue(TorchTensor::FromFloats(
                                 {27, kShape.num_kv_heads, kShape.head_dim}, values)))
                  .ok());
  const auto broken = DumpReader::Open(dump)->Read(0, 2);
  ASSERT_FALSE(broken.has_value());
  EXPECT_NE(broken.error().message().find("k/2.pt: nan at token 3, head 1, dimension 2"),
            std::string::npos)
      << broken.error().message();

  std::ofstream(dump / "layer_0" / "q" / "extra.pt") << "x";
  EXPECT_FALSE(DumpReader::Open(dump).has_value());
}

}  // namespace
}  // namespace oscar
