#include "weights/source.h"

#include <fmt/core.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <set>
#include <type_traits>

#include "base/check.h"
#include "base/error_text.h"
#include "base/fp8.h"
#include "base/log.h"
#include "base/mxfp4.h"
#include "base/rng.h"
#include "weights/expert_names.h"

namespace oscar {

Result<std::optional<Fp8Tiles>> WeightSource::Fp8Of(const std::string&, int64_t, int64_t) const {
  return std::optional<Fp8Tiles>();
}
Status WeightSource::LoadFp8(const std::string& name, int64_t, int64_t, std::span<uint8_t>,
                             std::span<float>) const {
  return Internal(fmt::format("tensor {} is not FP8", name));
}

Status WeightSource::LoadMxfp4(const std::string& name, int64_t, int64_t, std::span<uint8_t>,
                               std::span<uint8_t>) const {
  return Internal(fmt::format("tensor {} is not MXFP4", name));
}

namespace {

// Values of all codes.
const std::array<float, 256>& Fp8Values() {
  static const auto values = [] {
    std::array<float, 256> table{};
    for (int i = 0; i < 256; ++i) {
      table[static_cast<size_t>(i)] = F8E4M3ToFloat(static_cast<uint8_t>(i));
    }
    return table;
  }();
  return values;
}

// Weights of one row from its codes and the scales of its blocks.
template <typename T, typename Convert>
void MultiplyOut(std::span<const uint8_t> codes, std::span<const float> scales, int64_t columns,
                 std::span<T> out, const Convert& convert) {
  const std::array<float, 256>& values = Fp8Values();
  for (size_t i = 0; i < codes.size(); ++i) {
    out[i] = convert(values[codes[i]] * scales[i / static_cast<size_t>(columns)]);
  }
}
// Rows from `first_row` on; `scales` are the whole matrix's.
template <typename T, typename Convert>
void MultiplyOut(std::span<const uint8_t> codes, std::span<const float> scales, Fp8Tiles blocks,
                 int64_t inputs, int64_t first_row, std::span<T> out, const Convert& convert) {
  const auto width = static_cast<size_t>(inputs);
  const auto per_row = static_cast<size_t>(blocks.NumColumns(inputs));
  size_t row = static_cast<size_t>(first_row);
  for (size_t at = 0; at < codes.size(); at += width, ++row) {
    MultiplyOut<T>(codes.subspan(at, width),
                   scales.subspan(row / static_cast<size_t>(blocks.rows) * per_row, per_row),
                   blocks.columns, out.subspan(at, width), convert);
  }
}

// `columns` columns from `first` on of rows of `width` elements -> their codes, and one scale.
float QuantizeTileToFp8(std::span<const Bf16> rows, std::span<uint8_t> codes, size_t width,
                        size_t first, size_t columns) {
  float largest = 0.0f;
  const auto for_each = [&](const auto& visit) {
    for (size_t row = first; row < rows.size(); row += width) {
      for (size_t i = row; i < row + columns; ++i) visit(i);
    }
  };
  for_each([&](size_t i) { largest = std::max(largest, std::fabs(ToFloat(rows[i]))); });
  const float scale = largest > 0.0f ? largest / kF8E4M3Max : 1.0f;
  for_each([&](size_t i) { codes[i] = ToF8E4M3(ToFloat(rows[i]) / scale); });
  return scale;
}

// Elements of a row; checks what callers promise.
size_t RowWidth(std::span<const int64_t> shape, WeightRows rows, size_t room) {
  size_t width = 1;
  for (size_t i = 1; i < shape.size(); ++i) width *= static_cast<size_t>(shape[i]);
  OSCAR_CHECK(!shape.empty() && rows.first >= 0 && rows.count >= 0 &&
              rows.first <= shape[0] - rows.count &&
              room == width * static_cast<size_t>(rows.count));
  return width;
}

// One line on what a checkpoint has beside the decoder.
void ReportSkipped(const Checkpoint& checkpoint) {
  constexpr std::array<std::string_view, 5> kVision = {"model.visual.", "visual.", "vision_tower.",
                                                       "model.vision_tower.", "audio_tower."};
  constexpr std::array<std::string_view, 2> kPrediction = {"mtp.", "model.mtp."};
  const auto count = [&](const auto& prefixes) {
    return std::ranges::count_if(checkpoint.tensors(), [&](const StoredTensor& tensor) {
      return std::ranges::any_of(prefixes, [&](std::string_view prefix) {
        return std::string_view(tensor.name).starts_with(prefix);
      });
    });
  };
  const auto vision = count(kVision), prediction = count(kPrediction);
  if (vision + prediction == 0) return;
  LogInfo(
      "{}: text alone: {} tensors of vision or audio and {} of multi-token prediction are not "
      "read",
      checkpoint.directory(), vision, prediction);
}

// Of names, shapes and the beginning of every tensor: cheap, and any two real models differ in it.
Result<uint64_t> FingerprintOf(const Checkpoint& checkpoint) {
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(),
                                                                       &XXH3_freeState);
  XXH3_64bits_reset(state.get());
  std::array<std::byte, 4096> buffer{};
  for (const StoredTensor& tensor : checkpoint.tensors()) {
    XXH3_64bits_update(state.get(), tensor.name.data(), tensor.name.size());
    XXH3_64bits_update(state.get(), tensor.shape.data(), tensor.shape.size() * sizeof(int64_t));
    const auto sample =
        std::span(buffer).first(std::min<uint64_t>(tensor.num_bytes, buffer.size()));
    OSCAR_RETURN_IF_ERROR(tensor.Read(0, sample));
    XXH3_64bits_update(state.get(), sample.data(), sample.size());
  }
  return XXH3_64bits_digest(state.get());
}

class CheckpointWeights : public WeightSource {
 public:
  CheckpointWeights(Checkpoint checkpoint, Fp8Tiles blocks, uint64_t fingerprint)
      : checkpoint_(std::move(checkpoint)), blocks_(blocks), fingerprint_(fingerprint) {}

  Status LoadRows(const std::string& name, std::span<const int64_t> shape, WeightRows rows,
                  std::span<float> out) const override {
    return LoadAs(name, shape, rows, out, [](float x) { return x; });
  }

  Status LoadBf16Rows(const std::string& name, std::span<const int64_t> shape, WeightRows rows,
                      std::span<Bf16> out) const override {
    return LoadAs(name, shape, rows, out, [](float x) { return ToBf16(x); });
  }

  Result<std::optional<Fp8Tiles>> Fp8Of(const std::string& name, int64_t outputs,
                                        int64_t inputs) const override {
    OSCAR_ASSIGN_OR_RETURN(const auto part, FindExpertPart(checkpoint_, name));
    if (part.has_value()) return std::optional<Fp8Tiles>();
    OSCAR_ASSIGN_OR_RETURN(const StoredTensor tensor,
                           Find(name, std::vector<int64_t>{outputs, inputs}));
    if (tensor.dtype != DType::kF8E4M3) return std::optional<Fp8Tiles>();
    OSCAR_ASSIGN_OR_RETURN(const Scales scales, ScalesOf(tensor));
    return std::optional(scales.blocks);
  }

  Status LoadFp8(const std::string& name, int64_t outputs, int64_t inputs, std::span<uint8_t> codes,
                 std::span<float> scales) const override {
    OSCAR_ASSIGN_OR_RETURN(const StoredTensor tensor,
                           Find(name, std::vector<int64_t>{outputs, inputs}));
    OSCAR_ASSIGN_OR_RETURN(const Scales found, ScalesOf(tensor));
    if (codes.size() != tensor.num_bytes || scales.size() != found.values.size()) {
      return Internal(fmt::format("tensor {}: wrong room for its codes or scales", name));
    }
    OSCAR_RETURN_IF_ERROR(tensor.Read(0, std::as_writable_bytes(codes)));
    std::ranges::copy(found.values, scales.begin());
    return CheckCodes(codes, tensor, 0);
  }

  Result<bool> IsMxfp4(const std::string& name, int64_t outputs, int64_t inputs) const override {
    OSCAR_ASSIGN_OR_RETURN(const auto part, FindExpertPart(checkpoint_, name));
    if (!part.has_value() || !part->block_scales.has_value()) return false;
    OSCAR_RETURN_IF_ERROR(CheckPart(*part, std::vector<int64_t>{outputs, inputs}));
    return true;
  }
  Status LoadMxfp4(const std::string& name, int64_t outputs, int64_t inputs,
                   std::span<uint8_t> codes, std::span<uint8_t> scales) const override {
    OSCAR_ASSIGN_OR_RETURN(const auto part, FindExpertPart(checkpoint_, name));
    OSCAR_CHECK(part.has_value() && part->block_scales.has_value());
    OSCAR_RETURN_IF_ERROR(CheckPart(*part, std::vector<int64_t>{outputs, inputs}));
    return ReadBlocks(*part, {0, outputs}, codes, scales);
  }

  bool Has(const std::string& name) const override {
    const auto found = FindTensor(checkpoint_, name);
    return found.has_value() && found->has_value();
  }
  Status CheckShape(const std::string& name, std::span<const int64_t> shape) const override {
    OSCAR_ASSIGN_OR_RETURN(const auto part, FindExpertPart(checkpoint_, name));
    if (part.has_value()) return CheckPart(*part, shape);
    OSCAR_ASSIGN_OR_RETURN(const StoredTensor found, Find(name, shape));
    if (found.dtype != DType::kF8E4M3) return {};
    const auto scales = FindScales(found);
    return scales.has_value() ? Status() : scales.error();
  }

  uint64_t Fingerprint() const override { return fingerprint_; }

 private:
  struct Scales {
    Fp8Tiles blocks;
    std::vector<float> values;
  };

  // One broken weight makes every answer meaningless, and none of them says so. `first` is the
  // element of the tensor that `values` begin at.
  template <typename T>
  Status CheckFinite(const StoredTensor& tensor, std::span<const T> values, size_t first) const {
    using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
    constexpr Bits kExponent = sizeof(T) == 2 ? 0x7f80 : 0x7f800000;
    const auto is_broken = [](T value) {
      return (std::bit_cast<Bits>(value) & kExponent) == kExponent;
    };
    Bits broken = 0;  // without a branch, for the vectoriser
    for (const T value : values) broken |= is_broken(value) ? 1 : 0;
    if (broken == 0) return {};
    const auto at = std::ranges::find_if(values, is_broken) - values.begin();
    return DataLoss(fmt::format("{}: tensor {} is not a finite number at element {}",
                                checkpoint_.directory(), Quote(tensor.name),
                                first + static_cast<size_t>(at)));
  }

  Status CheckCodes(std::span<const uint8_t> codes, const StoredTensor& tensor,
                    size_t first) const {
    const auto bad =
        std::ranges::find_if(codes, [](uint8_t code) { return (code & 0x7f) == kF8E4M3Nan; });
    if (bad == codes.end()) return {};
    return DataLoss(fmt::format("{}: tensor {} is not a number at element {}",
                                checkpoint_.directory(), tensor.name,
                                first + static_cast<size_t>(bad - codes.begin())));
  }

  // The scales beside an FP8 matrix, and what they are for: blocks, each output, or all of it.
  Result<std::pair<StoredTensor, Fp8Tiles>> FindScales(const StoredTensor& tensor) const {
    OSCAR_ASSIGN_OR_RETURN(std::optional<StoredTensor> found,
                           FindTensor(checkpoint_, tensor.name + "_scale_inv"));
    if (!found.has_value()) {
      OSCAR_ASSIGN_OR_RETURN(found, FindTensor(checkpoint_, tensor.name + "_scale"));
    }
    if (tensor.shape.size() != 2 || !found.has_value()) {
      return Unexpected(DataLoss(fmt::format(
          "{}: tensor {} is F8_E4M3; expected a matrix with {}_scale_inv or {}_scale beside it",
          checkpoint_.directory(), tensor.name, tensor.name, tensor.name)));
    }
    const int64_t outputs = tensor.shape[0], inputs = tensor.shape[1];
    Fp8Tiles tiles;
    const std::vector<int64_t>& shape = found->shape;
    const uint64_t count = found->num_elements();
    const std::vector<int64_t> blocks = {blocks_.NumRows(outputs), blocks_.NumColumns(inputs)};
    if (shape == blocks) {
      tiles = blocks_;
    } else if (count == 1) {
      tiles = {outputs, inputs};
    } else if (!shape.empty() && shape[0] == outputs && count == static_cast<uint64_t>(outputs)) {
      tiles = {1, inputs};
    } else {
      return Unexpected(DataLoss(fmt::format(
          "{}: tensor {} has shape {}; expected one scale for all of {} {}, one for each of its "
          "rows, or {} for blocks of {} x {}",
          checkpoint_.directory(), found->name, ShapeToString(shape), tensor.name,
          ShapeToString(tensor.shape), ShapeToString(blocks), blocks_.rows, blocks_.columns)));
    }
    return std::pair(*std::move(found), tiles);
  }

  Result<Scales> ScalesOf(const StoredTensor& tensor) const {
    OSCAR_ASSIGN_OR_RETURN(const auto found, FindScales(tensor));
    Scales scales{found.second, {}};
    OSCAR_ASSIGN_OR_RETURN(scales.values, ToFloatVector(found.first));
    for (const float scale : scales.values) {
      if (!std::isfinite(scale)) {
        return Unexpected(DataLoss(fmt::format("{}: tensor {} holds a scale that is not finite",
                                               checkpoint_.directory(), found.first.name)));
      }
    }
    return scales;
  }

  // Whether a part of gpt-oss's experts is what a tensor of this shape comes from.
  Status CheckPart(const ExpertPart& part, std::span<const int64_t> shape) const {
    std::vector<int64_t> expected(shape.rbegin(), shape.rend());  // of input-major ones
    if (!part.block_scales.has_value()) {
      if (part.tensor.dtype == DType::kF8E4M3) {
        return DataLoss(fmt::format("{}: tensor {} is F8_E4M3; expected BF16, F16 or F32",
                                    checkpoint_.directory(), part.tensor.name));
      }
      return ExpectShape(part.tensor, expected).WithContext(checkpoint_.directory());
    }
    OSCAR_CHECK(shape.size() == 2);
    if (shape[1] % kMxfp4Block != 0) {
      return DataLoss(fmt::format("{}: tensor {}: {} inputs do not divide into blocks of {}",
                                  checkpoint_.directory(), part.tensor.name, shape[1],
                                  kMxfp4Block));
    }
    expected = {shape[0], shape[1] / kMxfp4Block, kMxfp4Block / 2};
    OSCAR_RETURN_IF_ERROR(ExpectShape(part.tensor, expected).WithContext(checkpoint_.directory()));
    expected.pop_back();
    return ExpectShape(*part.block_scales, expected).WithContext(checkpoint_.directory());
  }

  // Rows of codes and scales of MXFP4. REQUIRES: CheckPart.
  Status ReadBlocks(const ExpertPart& part, WeightRows rows, std::span<uint8_t> codes,
                    std::span<uint8_t> scales) const {
    constexpr size_t kBytes = kMxfp4Block / 2;
    const auto per_row = static_cast<size_t>(part.block_scales->shape[1]);
    const auto first = static_cast<size_t>(rows.first) * per_row;
    if (scales.size() != static_cast<size_t>(rows.count) * per_row ||
        codes.size() != scales.size() * kBytes) {
      return Internal(
          fmt::format("tensor {}: wrong room for its codes or scales", part.tensor.name));
    }
    OSCAR_RETURN_IF_ERROR(part.tensor.Read(first * kBytes, std::as_writable_bytes(codes)));
    OSCAR_RETURN_IF_ERROR(part.block_scales->Read(first, std::as_writable_bytes(scales)));
    for (size_t i = 0; i < scales.size(); ++i) {
      if (scales[i] >= kMxfp4MinScale && scales[i] <= kMxfp4MaxScale) continue;
      const std::span<const uint8_t> block = codes.subspan(i * kBytes, kBytes);
      const bool zero = std::ranges::all_of(block, [](uint8_t two) { return (two & 0x77) == 0; });
      if (zero && scales[i] != kMxfp4NanScale) continue;
      return DataLoss(fmt::format(
          "{}: tensor {} holds the block scale {} at element {} of an expert: {}",
          checkpoint_.directory(), part.block_scales->name, scales[i], first + i,
          scales[i] == kMxfp4NanScale
              ? std::string("it is not a number")
              : fmt::format("out of range; {} to {} are read", kMxfp4MinScale, kMxfp4MaxScale)));
    }
    return {};
  }

  // A bias, an input-major matrix or MXFP4.
  template <typename T, typename Convert>
  Status LoadPart(const ExpertPart& part, std::span<const int64_t> shape, WeightRows rows,
                  std::span<T> out, const Convert& convert) const {
    OSCAR_RETURN_IF_ERROR(CheckPart(part, shape));
    const auto count = static_cast<size_t>(rows.count);
    if (part.block_scales.has_value()) {
      const auto inputs = static_cast<size_t>(shape[1]);
      std::vector<uint8_t> codes(count * inputs / 2), scales(count * inputs / kMxfp4Block);
      OSCAR_RETURN_IF_ERROR(ReadBlocks(part, rows, codes, scales));
      for (size_t i = 0; i < out.size(); ++i) {
        const auto code = static_cast<uint8_t>(codes[i / 2] >> (i % 2 * 4) & 15);
        out[i] = convert(ToFloat(Mxfp4ToBf16(code, scales[i / kMxfp4Block])));
      }
      return {};
    }
    // Columns of [inputs, outputs], or a run of a bias.
    const size_t inputs = shape.size() == 2 ? static_cast<size_t>(shape[1]) : 1;
    const auto outputs = static_cast<size_t>(shape[0]), each = SizeOf(part.tensor.dtype);
    std::vector<std::byte> stored(count * each);
    std::vector<float> values(count);
    for (size_t i = 0; i < inputs; ++i) {
      const size_t first = i * outputs + static_cast<size_t>(rows.first);
      OSCAR_RETURN_IF_ERROR(part.tensor.Read(first * each, stored));
      const TensorView view{
          part.tensor.name, part.tensor.dtype, {static_cast<int64_t>(count)}, stored};
      OSCAR_RETURN_IF_ERROR(ConvertToFloat(view, values).WithContext(checkpoint_.directory()));
      OSCAR_RETURN_IF_ERROR(CheckFinite<float>(part.tensor, values, first));
      for (size_t row = 0; row < count; ++row) out[row * inputs + i] = convert(values[row]);
    }
    return {};
  }

  template <typename T, typename Convert>
  Status LoadAs(const std::string& name, std::span<const int64_t> shape, WeightRows rows,
                std::span<T> out, const Convert& convert) const {
    const size_t width = RowWidth(shape, rows, out.size());
    OSCAR_ASSIGN_OR_RETURN(const auto expert, FindExpertPart(checkpoint_, name));
    if (expert.has_value()) return LoadPart<T>(*expert, shape, rows, out, convert);
    OSCAR_ASSIGN_OR_RETURN(const StoredTensor tensor, Find(name, shape));
    const size_t first = static_cast<size_t>(rows.first) * width;
    if (tensor.dtype == DType::kF8E4M3) return LoadScaled<T>(tensor, rows.first, out, convert);
    // In pieces that are still in a core's cache when they are checked.
    constexpr size_t kPiece = size_t{1} << 16;
    const size_t bytes_each = SizeOf(tensor.dtype);
    std::vector<std::byte> stored;
    std::vector<float> piece;
    for (size_t at = 0; at < out.size(); at += kPiece) {
      const size_t count = std::min(kPiece, out.size() - at);
      const std::span<T> to = out.subspan(at, count);
      const uint64_t begin = (first + at) * bytes_each;
      if (std::is_same_v<T, Bf16> && tensor.dtype == DType::kBf16) {
        OSCAR_RETURN_IF_ERROR(tensor.Read(begin, std::as_writable_bytes(to)));
      } else {
        stored.resize(count * bytes_each);
        OSCAR_RETURN_IF_ERROR(tensor.Read(begin, stored));
        const TensorView part{name, tensor.dtype, {static_cast<int64_t>(count)}, stored};
        std::span<float> values;
        if constexpr (std::is_same_v<T, float>) {
          values = to;
        } else {
          piece.resize(count);
          values = piece;
        }
        OSCAR_RETURN_IF_ERROR(ConvertToFloat(part, values).WithContext(checkpoint_.directory()));
        if constexpr (!std::is_same_v<T, float>)
          std::ranges::transform(values, to.begin(), convert);
      }
      OSCAR_RETURN_IF_ERROR(CheckFinite<T>(tensor, to, first + at));
    }
    return {};
  }

  template <typename T, typename Convert>
  Status LoadScaled(const StoredTensor& tensor, int64_t first_row, std::span<T> out,
                    const Convert& convert) const {
    OSCAR_ASSIGN_OR_RETURN(const Scales scales, ScalesOf(tensor));
    const auto width = static_cast<size_t>(tensor.shape[1]);
    // Whole rows, about a megabyte at a time.
    const size_t piece =
        std::max<size_t>((size_t{1} << 20) / std::max<size_t>(width, 1), 1) * width;
    std::vector<uint8_t> codes;
    for (size_t at = 0; at < out.size(); at += piece) {
      codes.resize(std::min(piece, out.size() - at));
      const size_t first = static_cast<size_t>(first_row) * width + at;
      OSCAR_RETURN_IF_ERROR(tensor.Read(first, std::as_writable_bytes(std::span(codes))));
      OSCAR_RETURN_IF_ERROR(CheckCodes(codes, tensor, first));
      MultiplyOut<T>(codes, scales.values, scales.blocks, tensor.shape[1],
                     static_cast<int64_t>(first / width), out.subspan(at, codes.size()), convert);
    }
    return {};
  }

  Result<StoredTensor> Find(const std::string& name, std::span<const int64_t> shape) const {
    OSCAR_ASSIGN_OR_RETURN(const std::optional<StoredTensor> found, FindTensor(checkpoint_, name));
    if (!found.has_value()) return checkpoint_.Get(name);  // says what is missing
    const StoredTensor& tensor = *found;
    OSCAR_RETURN_IF_ERROR(ExpectShape(tensor, shape).WithContext(checkpoint_.directory()));
    return tensor;
  }

  Checkpoint checkpoint_;
  Fp8Tiles blocks_;
  uint64_t fingerprint_;
};

class RandomWeights : public WeightSource {
 public:
  RandomWeights(uint64_t seed, bool mxfp4_experts) : seed_(seed), mxfp4_experts_(mxfp4_experts) {}

  Status LoadRows(const std::string& name, std::span<const int64_t> shape, WeightRows rows,
                  std::span<float> out) const override {
    SampleToken(name, shape, rows, out, [](float x) { return x; });
    return {};
  }

  Status LoadBf16Rows(const std::string& name, std::span<const int64_t> shape, WeightRows rows,
                      std::span<Bf16> out) const override {
    SampleToken(name, shape, rows, out, [](float x) { return ToBf16(x); });
    return {};
  }

  Result<bool> IsMxfp4(const std::string& name, int64_t, int64_t) const override {
    return HasBlocks(name);
  }
  Status LoadMxfp4(const std::string& name, int64_t, int64_t, std::span<uint8_t> codes,
                   std::span<uint8_t> scales) const override {
    const Philox rng(seed_, XXH3_64bits(name.data(), name.size()));
    for (size_t i = 0; i < codes.size(); i += kBlockBytes) {
      const auto block = rng.Block(i / kBlockBytes);
      std::memcpy(codes.data() + i, block.data(), std::min(kBlockBytes, codes.size() - i));
    }
    std::ranges::fill(scales, kRandomMxfp4Scale);
    return {};
  }
  std::optional<std::pair<uint64_t, uint64_t>> RandomMxfp4Stream(
      const std::string& name) const override {
    if (!HasBlocks(name)) return std::nullopt;
    return std::pair{seed_, XXH3_64bits(name.data(), name.size())};
  }
  bool Has(const std::string&) const override { return true; }
  std::optional<std::pair<uint64_t, uint64_t>> RandomStream(
      const std::string& name) const override {
    if (HasBlocks(name)) return std::nullopt;
    return std::pair{seed_, XXH3_64bits(name.data(), name.size())};
  }
  uint64_t Fingerprint() const override { return seed_; }

 private:
  static constexpr size_t kBlockBytes = 16;  // of codes: what a block of random words holds
  bool HasBlocks(const std::string& name) const {
    return mxfp4_experts_ && name.find(".experts.") != std::string::npos &&
           !name.ends_with("_bias");
  }
  static uint8_t CodesAt(const Philox& rng, size_t byte) {
    return static_cast<uint8_t>(rng.Block(byte / kBlockBytes)[byte / 4 % 4] >> (byte % 4 * 8));
  }
  template <typename T, typename Convert>
  void SampleToken(const std::string& name, std::span<const int64_t> shape, WeightRows rows,
                   std::span<T> out, const Convert& convert) const {
    const size_t width = RowWidth(shape, rows, out.size());
    if (shape.size() == 1) {
      std::ranges::fill(out, convert(1.0f));
      return;
    }
    if (HasBlocks(name)) {
      const Philox rng(seed_, XXH3_64bits(name.data(), name.size()));
      const size_t begin = static_cast<size_t>(rows.first) * width;
      for (size_t i = 0; i < out.size(); ++i) {
        const size_t at = begin + i;
        const auto code = static_cast<uint8_t>(CodesAt(rng, at / 2) >> (at % 2 * 4) & 15);
        out[i] = convert(ToFloat(Mxfp4ToBf16(code, kRandomMxfp4Scale)));
      }
      return;
    }
    const Philox rng(seed_, RandomStream(name)->second);
    // Four 8-bit uniforms a number: near enough to Gaussian, and quick for billions of them.
    const size_t first = static_cast<size_t>(rows.first) * width, end = first + out.size();
    for (size_t i = first / 4 * 4; i < end; i += 4) {
      const auto block = rng.Block(i / 4);
      for (size_t j = std::max(i, first); j < std::min(i + 4, end); ++j) {
        const uint32_t bits = block[j - i];
        const auto sum = static_cast<int>((bits & 255) + ((bits >> 8) & 255) +
                                          ((bits >> 16) & 255) + (bits >> 24));
        out[j - first] = convert(static_cast<float>(sum - 510) * (0.02f / 147.8f));
      }
    }
  }

  uint64_t seed_;
  bool mxfp4_experts_;
};

class QuantizedWeights : public WeightSource {
 public:
  QuantizedWeights(std::unique_ptr<WeightSource> source, const ModelSpec& spec,
                   std::optional<Fp8Tiles> blocks)
      : source_(std::move(source)), blocks_(blocks) {
    const TensorTable table(spec);
    for (const TensorDecl& tensor : table.tensors()) {
      if (tensor.kind == TensorKind::kMatrix) matrices_.insert(tensor.name);
    }
  }

  Status LoadRows(const std::string& name, std::span<const int64_t> shape, WeightRows rows,
                  std::span<float> out) const override {
    if (!Quantizes(name, shape)) return source_->LoadRows(name, shape, rows, out);
    return LoadQuantized<float>(name, shape, rows, out, [](float x) { return x; });
  }
  Status LoadBf16Rows(const std::string& name, std::span<const int64_t> shape, WeightRows rows,
                      std::span<Bf16> out) const override {
    if (!Quantizes(name, shape)) return source_->LoadBf16Rows(name, shape, rows, out);
    return LoadQuantized<Bf16>(name, shape, rows, out, [](float x) { return ToBf16(x); });
  }
  Result<std::optional<Fp8Tiles>> Fp8Of(const std::string& name, int64_t outputs,
                                        int64_t inputs) const override {
    const std::vector<int64_t> shape = {outputs, inputs};
    return Quantizes(name, shape) ? std::optional<Fp8Tiles>(TilesOf(inputs)) : std::nullopt;
  }
  Status LoadFp8(const std::string& name, int64_t outputs, int64_t inputs, std::span<uint8_t> codes,
                 std::span<float> scales) const override {
    return Quantize(name, std::vector<int64_t>{outputs, inputs}, {0, outputs}, codes, scales);
  }
  // What is smaller already stays.
  Result<bool> IsMxfp4(const std::string& name, int64_t outputs, int64_t inputs) const override {
    return source_->IsMxfp4(name, outputs, inputs);
  }
  Status LoadMxfp4(const std::string& name, int64_t outputs, int64_t inputs,
                   std::span<uint8_t> codes, std::span<uint8_t> scales) const override {
    return source_->LoadMxfp4(name, outputs, inputs, codes, scales);
  }
  bool Has(const std::string& name) const override { return source_->Has(name); }
  Status CheckShape(const std::string& name, std::span<const int64_t> shape) const override {
    return source_->CheckShape(name, shape);
  }
  std::optional<std::pair<uint64_t, uint64_t>> RandomStream(
      const std::string& name) const override {
    return source_->RandomStream(name);
  }
  std::optional<std::pair<uint64_t, uint64_t>> RandomMxfp4Stream(
      const std::string& name) const override {
    return source_->RandomMxfp4Stream(name);
  }
  uint64_t Fingerprint() const override {
    const uint64_t inner = source_->Fingerprint();
    return XXH3_64bits_withSeed(&inner, sizeof(inner), /*seed=*/8);
  }

 private:
  bool Quantizes(const std::string& name, std::span<const int64_t> shape) const {
    return shape.size() == 2 && matrices_.contains(name);
  }
  Fp8Tiles TilesOf(int64_t inputs) const { return blocks_.value_or(Fp8Tiles{1, inputs}); }
  // Codes of these rows, which are whole tiles but at the matrix's end, and their scales.
  Status Quantize(const std::string& name, std::span<const int64_t> shape, WeightRows rows,
                  std::span<uint8_t> codes, std::span<float> scales) const {
    const Fp8Tiles tiles = TilesOf(shape[1]);
    const auto width = static_cast<size_t>(shape[1]);
    const auto columns = static_cast<size_t>(tiles.columns);
    const int64_t at_once =
        std::max<int64_t>((int64_t{1} << 20) / shape[1] / tiles.rows, 1) * tiles.rows;
    std::vector<Bf16> values(static_cast<size_t>(std::min(at_once, rows.count)) * width);
    for (int64_t at = 0; at < rows.count; at += at_once) {
      const int64_t count = std::min(at_once, rows.count - at);
      const std::span<Bf16> some = std::span(values).first(static_cast<size_t>(count) * width);
      OSCAR_RETURN_IF_ERROR(source_->LoadBf16Rows(name, shape, {rows.first + at, count}, some));
      const std::span<uint8_t> to =
          codes.subspan(static_cast<size_t>(at) * width, static_cast<size_t>(count) * width);
      size_t scale = static_cast<size_t>(at / tiles.rows * tiles.NumColumns(shape[1]));
      for (int64_t row = 0; row < count; row += tiles.rows) {
        const size_t first = static_cast<size_t>(row) * width;
        const size_t end = first + static_cast<size_t>(std::min(tiles.rows, count - row)) * width;
        for (size_t column = 0; column < width; column += columns) {
          scales[scale++] =
              QuantizeTileToFp8(some.subspan(first, end - first), to.subspan(first, end - first),
                                width, column, std::min(columns, width - column));
        }
      }
    }
    return {};
  }
  template <typename T, typename Convert>
  Status LoadQuantized(const std::string& name, std::span<const int64_t> shape, WeightRows rows,
                       std::span<T> out, const Convert& convert) const {
    const Fp8Tiles tiles = TilesOf(shape[1]);
    WeightRows whole;  // of the tiles that these rows are in
    whole.first = rows.first / tiles.rows * tiles.rows;
    whole.count =
        std::min(tiles.NumRows(rows.first + rows.count) * tiles.rows, shape[0]) - whole.first;
    const auto width = static_cast<size_t>(shape[1]);
    std::vector<uint8_t> codes(static_cast<size_t>(whole.count) * width);
    std::vector<float> scales(
        static_cast<size_t>(tiles.NumRows(whole.count) * tiles.NumColumns(shape[1])));
    OSCAR_RETURN_IF_ERROR(Quantize(name, shape, whole, codes, scales));
    const int64_t skipped = rows.first - whole.first;
    const std::span<const uint8_t> wanted =
        std::span(codes).subspan(static_cast<size_t>(skipped) * width, out.size());
    MultiplyOut<T>(wanted, scales, tiles, shape[1], skipped, out, convert);
    return {};
  }

  std::unique_ptr<WeightSource> source_;
  std::optional<Fp8Tiles> blocks_;  // none: whole rows
  std::set<std::string, std::less<>> matrices_;
};

}  // namespace

float QuantizeRowToFp8(std::span<const Bf16> row, std::span<uint8_t> codes) {
  return QuantizeTileToFp8(row, codes, row.size(), 0, row.size());
}

Result<std::unique_ptr<WeightSource>> OpenCheckpointWeights(const std::string& directory,
                                                            Fp8Tiles blocks) {
  OSCAR_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(directory));
  OSCAR_ASSIGN_OR_RETURN(const uint64_t fingerprint, FingerprintOf(checkpoint));
  ReportSkipped(checkpoint);
  return std::make_unique<CheckpointWeights>(std::move(checkpoint), blocks, fingerprint);
}

Status CheckTensors(const WeightSource& source, const TensorTable& table) {
  for (const TensorDecl& tensor : table.tensors()) {
    OSCAR_RETURN_IF_ERROR(source.CheckShape(tensor.name, tensor.shape));
  }
  return {};
}

Result<int64_t> ScaleInputsOf(const WeightSource& source,
                              std::span<const TensorDecl* const> tensors) {
  int64_t columns = 0;
  for (const TensorDecl* tensor : tensors) {
    const int64_t inputs = tensor->shape[1];
    OSCAR_ASSIGN_OR_RETURN(const std::optional<Fp8Tiles> tiles,
                           source.Fp8Of(tensor->name, tensor->shape[0], inputs));
    if (!tiles.has_value() || (tiles->columns % 32 != 0 && tiles->columns < inputs) ||
        (columns != 0 && columns != tiles->columns)) {
      return int64_t{0};
    }
    columns = tiles->columns;
  }
  return std::min(columns, tensors[0]->shape[1]);
}

Result<bool> FollowCheckpoint(const WeightSource& source, ModelSpec* spec) {
  const std::string& head_name = spec->name(Role::kHead);
  if (!spec->tied_head || !source.Has(head_name)) return false;
  if (!source.Has(spec->name(Role::kEmbedding))) {
    spec->name(Role::kEmbedding) = head_name;
    return false;
  }
  const std::vector<int64_t> shape = {spec->vocab_size, spec->hidden};
  const int64_t at_once = std::max<int64_t>((int64_t{1} << 18) / spec->hidden, 1);
  std::vector<Bf16> embedding, head;
  for (int64_t row = 0; row < shape[0]; row += at_once) {
    const WeightRows rows{row, std::min(at_once, shape[0] - row)};
    embedding.resize(static_cast<size_t>(rows.count * shape[1]));
    head.resize(embedding.size());
    OSCAR_RETURN_IF_ERROR(
        source.LoadBf16Rows(spec->name(Role::kEmbedding), shape, rows, embedding));
    OSCAR_RETURN_IF_ERROR(source.LoadBf16Rows(head_name, shape, rows, head));
    if (embedding == head) continue;
    LogWarning(
        "config.json ties the head to the embedding, but the checkpoint has {}, which differs: it "
        "is used; set tie_word_embeddings to false to say so",
        head_name);
    spec->tied_head = false;
    return true;
  }
  return false;
}

std::unique_ptr<WeightSource> QuantizeWeights(std::unique_ptr<WeightSource> source,
                                              const ModelSpec& spec,
                                              std::optional<Fp8Tiles> blocks) {
  return std::make_unique<QuantizedWeights>(std::move(source), spec, blocks);
}

std::unique_ptr<WeightSource> MakeRandomWeights(uint64_t seed, bool mxfp4_experts) {
  return std::make_unique<RandomWeights>(seed, mxfp4_experts);
}

}  // namespace oscar
