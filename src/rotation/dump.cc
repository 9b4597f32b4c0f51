#include "rotation/dump.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <numeric>
#include <optional>
#include <set>
#include <string_view>

#include "base/check.h"
#include "base/file.h"
#include "base/half.h"
#include "io/torch_file.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;

constexpr int kMaxId = 1'000'000;
constexpr std::string_view kLayerPrefix = "layer_";

std::optional<int> ParseId(std::string_view text) {
  int value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || value < 0 || value > kMaxId ||
      (text.size() > 1 && text[0] == '0')) {
    return std::nullopt;
  }
  return value;
}

// Chunks that were left out are added to `skipped`.
Result<std::vector<int>> ListChunks(const fs::path& directory, std::span<const int> skip_chunks,
                                    std::set<int>& skipped) {
  std::vector<int> chunks;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    if (it->path().extension() != ".pt") continue;
    const std::optional<int> id = ParseId(it->path().stem().string());
    if (!id) {
      return Unexpected(
          DataLoss(fmt::format("{}: the name is not a chunk number", it->path().string())));
    }
    if (std::find(skip_chunks.begin(), skip_chunks.end(), *id) == skip_chunks.end()) {
      chunks.push_back(*id);
    } else {
      skipped.insert(*id);
    }
  }
  if (error) {
    return Unexpected(
        NotFound(fmt::format("{}: cannot list: {}", directory.string(), error.message())));
  }
  std::sort(chunks.begin(), chunks.end());
  return chunks;
}

std::string DescribeChunks(const std::vector<int>& chunks) {
  const int first = chunks.front(), last = chunks.back();
  if (last - first + 1 == static_cast<int>(chunks.size())) {
    return fmt::format("chunks {} to {}", first, last);
  }
  return fmt::format("{} of the chunks {} to {}", chunks.size(), first, last);
}

struct Loaded {
  std::vector<int64_t> shape;
  std::vector<float> values;
};

Result<Loaded> ReadHeads(const fs::path& path) {
  OSCAR_ASSIGN_OR_RETURN(const TorchValue value, ReadTorchFile(path));
  if (value.AsTensor() == nullptr) {
    return Unexpected(
        DataLoss(fmt::format("{}: is a {}; expected a tensor", path.string(), value.KindName())));
  }
  const TensorView view = value.AsTensor()->View(path.string());
  OSCAR_RETURN_IF_ERROR(ExpectShape(view, std::array<int64_t, 3>{-1, -1, -1}));
  if (view.shape[1] < 1 || view.shape[1] > kMaxRotationHeads || view.shape[2] < 1 ||
      view.shape[2] > kMaxRotationDim) {
    return Unexpected(DataLoss(
        fmt::format("{}: shape {} is not [tokens, heads, head_dim] with at most {} heads of "
                    "dimension at most {}",
                    path.string(), ShapeToString(view.shape), kMaxRotationHeads, kMaxRotationDim)));
  }
  OSCAR_ASSIGN_OR_RETURN(std::vector<float> values, ToFloatVector(view));
  const auto bad =
      std::find_if_not(values.begin(), values.end(), [](float x) { return std::isfinite(x); });
  if (bad != values.end()) {
    const int64_t at = bad - values.begin(), row = at / view.shape[2];
    return Unexpected(DataLoss(fmt::format(
        "{}: {} at token {}, head {}, dimension {}; a dump must be finite", path.string(), *bad,
        row / view.shape[1], row % view.shape[1], at % view.shape[2])));
  }
  return Loaded{view.shape, std::move(values)};
}

TorchValue Bf16Tensor(std::span<const float> values, std::vector<int64_t> shape) {
  auto bits = std::make_shared<std::vector<Bf16>>(values.size());
  std::transform(values.begin(), values.end(), bits->begin(), [](float x) { return ToBf16(x); });
  TorchTensor tensor;
  tensor.dtype = DType::kBf16;
  tensor.shape = std::move(shape);
  tensor.data = std::as_bytes(std::span(*bits));
  tensor.owner = std::move(bits);
  return TorchValue(std::move(tensor));
}

}  // namespace

Result<DumpReader> DumpReader::Open(const fs::path& directory, std::span<const int> skip_chunks) {
  DumpReader reader;
  reader.directory_ = directory;
  std::set<int> skipped;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (!name.starts_with(kLayerPrefix)) continue;
    const std::optional<int> layer = ParseId(std::string_view(name).substr(kLayerPrefix.size()));
    if (!layer) {
      return Unexpected(
          DataLoss(fmt::format("{}: the name has no layer number", it->path().string())));
    }
    OSCAR_ASSIGN_OR_RETURN(std::vector<int> chunks,
                           ListChunks(it->path() / "q", skip_chunks, skipped));
    for (const char* part : {"k", "v"}) {
      OSCAR_ASSIGN_OR_RETURN(const std::vector<int> other,
                             ListChunks(it->path() / part, skip_chunks, skipped));
      if (other != chunks) {
        return Unexpected(
            DataLoss(fmt::format("{}: q has {} chunks, {} has {} or others; the dump is incomplete",
                                 it->path().string(), chunks.size(), part, other.size())));
      }
    }
    if (chunks.empty()) {
      return Unexpected(NotFound(fmt::format("{}: no chunks to read{}", it->path().string(),
                                             skip_chunks.empty() ? "" : " besides skipped ones")));
    }
    reader.layers_.emplace(*layer, std::move(chunks));
  }
  if (error) {
    return Unexpected(
        NotFound(fmt::format("{}: cannot list: {}", directory.string(), error.message())));
  }
  if (reader.layers_.empty()) {
    return Unexpected(
        NotFound(fmt::format("{}: no layer_<i> directories: not a dump", directory.string())));
  }
  for (const int chunk : skip_chunks) {
    if (skipped.contains(chunk)) continue;
    return Unexpected(InvalidArgument(fmt::format("--skip-chunk {}: no such chunk; {} has {}",
                                                  chunk, directory.string(),
                                                  DescribeChunks(reader.layers_.begin()->second))));
  }
  // A capture that was stopped has chunks of some layers only: each would be fitted to other text.
  const auto& [first, expected] = *reader.layers_.begin();
  for (const auto& [layer, chunks] : reader.layers_) {
    if (chunks == expected) continue;
    return Unexpected(DataLoss(fmt::format(
        "{}: layer_{} has {}, layer_{} has {}: the dump is incomplete; capture it again, or leave "
        "out what some layers lack with --skip-chunk",
        directory.string(), layer, DescribeChunks(chunks), first, DescribeChunks(expected))));
  }
  return reader;
}

Result<DumpChunk> DumpReader::Read(int layer, int chunk) const {
  const fs::path base = directory_ / fmt::format("{}{}", kLayerPrefix, layer);
  const std::string name = fmt::format("{}.pt", chunk);
  OSCAR_ASSIGN_OR_RETURN(Loaded q, ReadHeads(base / "q" / name));
  OSCAR_ASSIGN_OR_RETURN(Loaded k, ReadHeads(base / "k" / name));
  OSCAR_ASSIGN_OR_RETURN(Loaded v, ReadHeads(base / "v" / name));
  if (k.shape != v.shape || q.shape[0] != k.shape[0] || q.shape[2] != k.shape[2] ||
      q.shape[1] % k.shape[1] != 0) {
    return Unexpected(DataLoss(fmt::format(
        "{} chunk {}: shapes q {}, k {}, v {} do not fit together", base.string(), chunk,
        ShapeToString(q.shape), ShapeToString(k.shape), ShapeToString(v.shape))));
  }
  DumpChunk out;
  out.shape = {static_cast<int>(q.shape[1]), static_cast<int>(k.shape[1]),
               static_cast<int>(q.shape[2])};
  out.num_tokens = q.shape[0];
  out.q = std::move(q.values);
  out.k = std::move(k.values);
  out.v = std::move(v.values);

  const fs::path lengths_path = base / "seq_lens" / name;
  std::error_code error;
  if (!fs::exists(lengths_path, error)) return out;
  OSCAR_ASSIGN_OR_RETURN(const TorchValue value, ReadTorchFile(lengths_path));
  if (value.AsTensor() == nullptr) {
    return Unexpected(DataLoss(
        fmt::format("{}: is a {}; expected a tensor", lengths_path.string(), value.KindName())));
  }
  OSCAR_ASSIGN_OR_RETURN(const std::vector<int64_t> lengths,
                         ToIntVector(value.AsTensor()->View(lengths_path.string())));
  int64_t sum = 0;
  for (const int64_t length : lengths) {
    if (length < 0 || length > out.num_tokens) {
      return Unexpected(DataLoss(fmt::format("{}: length {} in a chunk of {} tokens",
                                             lengths_path.string(), length, out.num_tokens)));
    }
    sum += length;
    out.seq_lens.push_back(static_cast<int32_t>(length));
  }
  if (sum != out.num_tokens) {
    return Unexpected(DataLoss(fmt::format("{}: lengths sum to {}, the chunk has {} tokens",
                                           lengths_path.string(), sum, out.num_tokens)));
  }
  return out;
}

Status DumpWriter::CheckDirectory(const fs::path& directory) {
  if (const Status status = CheckCanWriteBelow(directory); !status.ok()) {
    return status.WithContext(directory.string());
  }
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    if (it->path().filename().string().starts_with(kLayerPrefix)) {
      return InvalidArgument(fmt::format("{}: already holds a dump ({}); give an empty directory",
                                         directory.string(), it->path().filename().string()));
    }
  }
  return {};
}

Result<DumpWriter> DumpWriter::Create(const fs::path& directory, const QkvShape& shape) {
  OSCAR_RETURN_IF_ERROR(CheckDirectory(directory));
  std::error_code error;
  fs::create_directories(directory, error);
  if (error) {
    return Unexpected(InvalidArgument(
        fmt::format("{}: cannot make the directory: {}", directory.string(), error.message())));
  }
  DumpWriter writer;
  writer.directory_ = directory;
  writer.shape_ = shape;
  return writer;
}

Status DumpWriter::WriteChunk(int layer, int chunk_id, const QkvChunk& chunk) const {
  const fs::path base = directory_ / fmt::format("{}{}", kLayerPrefix, layer);
  const std::string name = fmt::format("{}.pt", chunk_id);
  for (const char* part : {"q", "k", "v", "seq_lens"}) {
    std::error_code error;
    fs::create_directories(base / part, error);
    if (error) {
      return InvalidArgument(fmt::format("{}: cannot make the directory: {}",
                                         (base / part).string(), error.message()));
    }
  }
  const int64_t dim = shape_.head_dim;
  const int64_t tokens = chunk.num_tokens;
  OSCAR_RETURN_IF_ERROR(WriteTorchFile(base / "q" / name,
                                       Bf16Tensor(chunk.q, {tokens, shape_.num_query_heads, dim})));
  OSCAR_RETURN_IF_ERROR(
      WriteTorchFile(base / "k" / name, Bf16Tensor(chunk.k, {tokens, shape_.num_kv_heads, dim})));
  OSCAR_RETURN_IF_ERROR(
      WriteTorchFile(base / "v" / name, Bf16Tensor(chunk.v, {tokens, shape_.num_kv_heads, dim})));
  const auto lengths = static_cast<int64_t>(chunk.seq_lens.size());
  return WriteTorchFile(base / "seq_lens" / name,
                        TorchValue(TorchTensor::FromInts32({lengths}, chunk.seq_lens)));
}

Status DumpWriter::Write(int layer, const QkvChunk& chunk) {
  const int64_t key = chunk.num_tokens * shape_.num_kv_heads * shape_.head_dim;
  OSCAR_CHECK(static_cast<int64_t>(chunk.q.size()) == key * shape_.group() &&
              static_cast<int64_t>(chunk.k.size()) == key &&
              static_cast<int64_t>(chunk.v.size()) == key);
  OSCAR_CHECK(std::accumulate(chunk.seq_lens.begin(), chunk.seq_lens.end(), int64_t{0}) ==
              chunk.num_tokens);
  int& next = next_chunk_[layer];
  if (next == 0) {
    OSCAR_RETURN_IF_ERROR(WriteChunk(layer, 0, {}));
    next = 1;
  }
  OSCAR_RETURN_IF_ERROR(WriteChunk(layer, next, chunk));
  ++next;
  return {};
}

uint64_t DumpSteps(const DumpReader& reader, const FitOptions& options) {
  uint64_t chunks = 0;
  for (const auto& [layer, ids] : reader.layers()) chunks += ids.size();
  return chunks * static_cast<uint64_t>(LayerStatistics::NumPasses(options));
}

Result<Rotation> FitDump(const DumpReader& reader, const FitOptions& options, ThreadPool& pool,
                         Progress* progress) {
  std::map<int, FittedLayer> fitted;
  std::optional<QkvShape> shape;
  for (const auto& [layer, chunks] : reader.layers()) {
    std::optional<LayerStatistics> statistics;
    for (int pass = 0; pass < LayerStatistics::NumPasses(options); ++pass) {
      for (const int chunk_id : chunks) {
        OSCAR_ASSIGN_OR_RETURN(const DumpChunk chunk, reader.Read(layer, chunk_id));
        if (!shape) {
          shape = chunk.shape;
          OSCAR_RETURN_IF_ERROR(CheckFitOptions(options, *shape));
        }
        if (chunk.shape != *shape) {
          return Unexpected(DataLoss(fmt::format(
              "{}: layer {} chunk {} has {} query and {} KV heads of dimension {}; what came "
              "before has {}, {} and {}",
              reader.directory().string(), layer, chunk_id, chunk.shape.num_query_heads,
              chunk.shape.num_kv_heads, chunk.shape.head_dim, shape->num_query_heads,
              shape->num_kv_heads, shape->head_dim)));
        }
        if (!statistics) statistics.emplace(layer, *shape, options);
        OSCAR_RETURN_IF_ERROR(statistics->Add(chunk.View(), pool));
        if (progress != nullptr) progress->Add(1);
      }
      OSCAR_RETURN_IF_ERROR(statistics->EndPass());
    }
    const auto [added, is_new] = fitted.emplace(layer, statistics->TakeResult());
    const auto& [first_layer, first] = *fitted.begin();
    if (added->second.num_tokens != first.num_tokens) {
      return Unexpected(DataLoss(
          fmt::format("{}: layer {} has {} tokens, layer {} has {}: the dump is incomplete; "
                      "capture it again",
                      reader.directory().string(), layer, added->second.num_tokens, first_layer,
                      first.num_tokens)));
    }
  }
  return AssembleRotation(*shape, options, fitted);
}

}  // namespace oscar
