// Captured Q, K and V on disk, in the layout of the published calibration:
//
//   <dir>/layer_<i>/{q,k,v,seq_lens}/<chunk>.pt
//
// q [T, H_q, D], k and v [T, H_kv, D], BF16, post-norm and post-RoPE; seq_lens int32: the lengths
// of the sequences packed into the chunk. The published fitter drops chunk 0, where its server's
// warm-up request lies. DumpWriter therefore writes a chunk 0 of no tokens, so that every reader
// sees the same data whether it drops that chunk or not; DumpReader reads all chunks unless told.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <vector>

#include "base/progress.h"
#include "base/thread_pool.h"
#include "oscar/status.h"
#include "rotation/statistics.h"

namespace oscar {

// One chunk of one layer, widened to fp32.
struct DumpChunk {
  QkvShape shape;
  int64_t num_tokens = 0;
  std::vector<float> q, k, v;
  std::vector<int32_t> seq_lens;  // empty where the dump has none
  QkvChunk View() const { return {num_tokens, q, k, v, seq_lens}; }
};

// Thread-safe: holds a listing only.
class DumpReader {
 public:
  // Lists the dump; chunks in `skip_chunks` are left out. Fails where q, k and v, or two layers, do
  // not have the same chunks, or nothing is left.
  static Result<DumpReader> Open(const std::filesystem::path& directory,
                                 std::span<const int> skip_chunks = {});

  // Layer id -> chunk ids, both ascending.
  const std::map<int, std::vector<int>>& layers() const { return layers_; }
  const std::filesystem::path& directory() const { return directory_; }
  Result<DumpChunk> Read(int layer, int chunk) const;

 private:
  DumpReader() = default;
  std::filesystem::path directory_;
  std::map<int, std::vector<int>> layers_;
};

// Writes a dump, chunk after chunk. One thread at a time.
class DumpWriter {
 public:
  // Whether a dump can be written to `directory`, which need not be there: none is, and it or what
  // is there of its path can be written to.
  static Status CheckDirectory(const std::filesystem::path& directory);
  // The directory is made where missing; a dump that is already there is refused.
  static Result<DumpWriter> Create(const std::filesystem::path& directory, const QkvShape& shape);
  // Appends the next chunk of a layer, rounded to BF16.
  Status Write(int layer, const QkvChunk& chunk);

 private:
  DumpWriter() = default;
  Status WriteChunk(int layer, int chunk_id, const QkvChunk& chunk) const;
  std::filesystem::path directory_;
  QkvShape shape_;
  std::map<int, int> next_chunk_;  // by layer
};

// Fits every layer of a dump, one layer and one chunk in memory at a time. sst and clips take their
// passes over the files, so that the moments are those of the whole data, as published.
// `progress`, where given, counts chunks: layers x chunks x passes (see DumpSteps).
Result<Rotation> FitDump(const DumpReader& reader, const FitOptions& options, ThreadPool& pool,
                         Progress* progress = nullptr);
uint64_t DumpSteps(const DumpReader& reader, const FitOptions& options);

}  // namespace oscar
