#include "model/weights.h"

#include <fmt/core.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

#include <cstring>

#include "base/rng.h"

namespace oscar {
namespace {

class CheckpointWeights : public WeightSource {
 public:
  explicit CheckpointWeights(Checkpoint checkpoint) : checkpoint_(std::move(checkpoint)) {}

  Status Load(const std::string& name, std::span<const int64_t> shape,
              std::span<float> out) const override {
    OSCAR_ASSIGN_OR_RETURN(const TensorView tensor, Find(name, shape));
    OSCAR_RETURN_IF_ERROR(ConvertToFloat(tensor, out));
    Forget(tensor);
    return {};
  }

  Status LoadBf16(const std::string& name, std::span<const int64_t> shape,
                  std::span<Bf16> out) const override {
    OSCAR_ASSIGN_OR_RETURN(const TensorView tensor, Find(name, shape));
    if (tensor.dtype == DType::kBf16) {
      std::memcpy(out.data(), tensor.data.data(), tensor.data.size());
      Forget(tensor);
      return {};
    }
    // In pieces, so that a float copy of a large tensor never exists.
    constexpr size_t kPiece = size_t{1} << 20;
    std::vector<float> piece;
    const size_t width = SizeOf(tensor.dtype);
    for (size_t at = 0; at < out.size(); at += kPiece) {
      const size_t count = std::min(kPiece, out.size() - at);
      piece.resize(count);
      TensorView part = tensor;
      part.data = tensor.data.subspan(at * width, count * width);
      part.shape = {static_cast<int64_t>(count)};
      OSCAR_RETURN_IF_ERROR(ConvertToFloat(part, piece));
      for (size_t i = 0; i < count; ++i) out[at + i] = ToBf16(piece[i]);
    }
    Forget(tensor);
    return {};
  }

  bool Has(const std::string& name) const override { return checkpoint_.Find(name) != nullptr; }

  uint64_t Fingerprint() const override {
    // Names, shapes and a sample of every tensor: cheap, and any two real models differ in it.
    XXH3_state_t* state = XXH3_createState();
    XXH3_64bits_reset(state);
    for (const TensorView& tensor : checkpoint_.tensors()) {
      XXH3_64bits_update(state, tensor.name.data(), tensor.name.size());
      XXH3_64bits_update(state, tensor.shape.data(), tensor.shape.size() * sizeof(int64_t));
      const size_t sample = std::min<size_t>(tensor.data.size(), 4096);
      XXH3_64bits_update(state, tensor.data.data(), sample);
    }
    const uint64_t hash = XXH3_64bits_digest(state);
    XXH3_freeState(state);
    return hash;
  }

 private:
  Result<TensorView> Find(const std::string& name, std::span<const int64_t> shape) const {
    OSCAR_ASSIGN_OR_RETURN(TensorView tensor, checkpoint_.Get(name));
    OSCAR_RETURN_IF_ERROR(ExpectShape(tensor, shape).WithContext(checkpoint_.directory()));
    return tensor;
  }

  // Drops the mapped pages that lie wholly inside the tensor: they are clean, and would otherwise
  // count as ours until the kernel wants them back.
  static void Forget(const TensorView& tensor) {
    const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
    const auto begin = (reinterpret_cast<uintptr_t>(tensor.data.data()) + page - 1) / page * page;
    const auto end =
        reinterpret_cast<uintptr_t>(tensor.data.data() + tensor.data.size()) / page * page;
    if (begin >= end) return;
    // NOLINTNEXTLINE(performance-no-int-to-ptr): page arithmetic is on numbers
    ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
  }

  Checkpoint checkpoint_;
};

class RandomWeights : public WeightSource {
 public:
  explicit RandomWeights(uint64_t seed) : seed_(seed) {}

  Status Load(const std::string& name, std::span<const int64_t> shape,
              std::span<float> out) const override {
    const Philox rng(seed_, RandomStream(name)->second);
    // Four 8-bit uniforms a number: near enough to Gaussian, and quick for billions of them.
    for (size_t i = 0; i < out.size(); i += 4) {
      const auto block = rng.Block(i / 4);
      for (size_t j = i; j < std::min(i + 4, out.size()); ++j) {
        if (shape.size() == 1) {
          out[j] = 1.0f;
          continue;
        }
        const uint32_t bits = block[j - i];
        const auto sum = static_cast<int>((bits & 255) + ((bits >> 8) & 255) +
                                          ((bits >> 16) & 255) + (bits >> 24));
        out[j] = static_cast<float>(sum - 510) * (0.02f / 147.8f);
      }
    }
    return {};
  }

  Status LoadBf16(const std::string& name, std::span<const int64_t> shape,
                  std::span<Bf16> out) const override {
    std::vector<float> values(out.size());
    OSCAR_RETURN_IF_ERROR(Load(name, shape, values));
    for (size_t i = 0; i < out.size(); ++i) out[i] = ToBf16(values[i]);
    return {};
  }

  bool Has(const std::string&) const override { return true; }
  std::optional<std::pair<uint64_t, uint64_t>> RandomStream(
      const std::string& name) const override {
    return std::pair{seed_, XXH3_64bits(name.data(), name.size())};
  }
  uint64_t Fingerprint() const override { return seed_; }

 private:
  uint64_t seed_;
};

}  // namespace

Result<std::unique_ptr<WeightSource>> OpenCheckpointWeights(const std::string& directory) {
  OSCAR_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(directory));
  return std::make_unique<CheckpointWeights>(std::move(checkpoint));
}

std::unique_ptr<WeightSource> MakeRandomWeights(uint64_t seed) {
  return std::make_unique<RandomWeights>(seed);
}

}  // namespace oscar
