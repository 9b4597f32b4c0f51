// Helpers of this module's tests: temporary directories, synthetic captures, the golden file.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/half.h"
#include "base/rng.h"
#include "rotation/dump.h"
#include "rotation/statistics.h"

namespace oscar {

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "oscar_rotation_XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) ADD_FAILURE() << "mkdtemp " << name;
    path_ = name;
  }
  ~TemporaryDirectory() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

inline std::string FileBytes(const std::filesystem::path& path) {
  auto bytes = ReadFile(path, uint64_t{1} << 30);
  if (!bytes) ADD_FAILURE() << bytes.error().ToString();
  return bytes ? *bytes : std::string();
}

// Normal rows whose channels differ in size, rounded to BF16 as captures are.
inline DumpChunk SyntheticChunk(const QkvShape& shape, const std::vector<int32_t>& seq_lens,
                                uint64_t seed) {
  DumpChunk chunk;
  chunk.shape = shape;
  chunk.seq_lens = seq_lens;
  for (const int32_t length : seq_lens) chunk.num_tokens += length;
  const auto fill = [&](std::vector<float>& out, int heads, uint64_t stream) {
    const Philox rng(seed, stream);
    const auto dim = static_cast<size_t>(shape.head_dim);
    out.resize(static_cast<size_t>(chunk.num_tokens) * static_cast<size_t>(heads) * dim);
    for (size_t i = 0; i < out.size(); ++i) {
      const float size = std::exp(2.0f * std::sin(static_cast<float>(i % dim * (stream + 1))));
      out[i] = ToFloat(ToBf16(size * (rng.Normal(i) + 0.3f)));
    }
  };
  fill(chunk.q, shape.num_query_heads, 0);
  fill(chunk.k, shape.num_kv_heads, 1);
  fill(chunk.v, shape.num_kv_heads, 2);
  return chunk;
}

}  // namespace oscar
