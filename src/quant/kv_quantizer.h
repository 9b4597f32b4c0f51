// KvQuantizer: one side (K or V) of a KV-cache method as a codec between rows and real bytes. Every
// method is measured through this one interface, so that bits and distortion mean the same for all.
//
// A tile is [tokens, kv_heads, D] fp32, widened from BF16 and already rotated as the method's
// recipe asks (quant/kv_method.h): a rotation is orthogonal and its inverse is folded into queries,
// weights or outputs, so it belongs to the recipe and no codec contains one. Row methods take any
// number of tokens; methods with groups along tokens take whole blocks of tokens_per_run().
//
// Input: NaN counts as 0, values beyond +-65504 saturate, and Encode returns how many there were
// (Bf16Rows alone keeps every value). Decode accepts any bytes of the right size without harm;
// kDataLoss for another size and where they contradict themselves.
//
// Immutable after construction; safe from any thread. Scalar and unhurried: this is the reference.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "oscar/status.h"

namespace oscar {

struct TileShape {
  int tokens = 0;
  int kv_heads = 0;
  int head_dim = 0;

  size_t rows() const { return static_cast<size_t>(tokens) * static_cast<size_t>(kv_heads); }
  size_t elements() const { return rows() * static_cast<size_t>(head_dim); }
};

class KvQuantizer {
 public:
  virtual ~KvQuantizer() = default;
  KvQuantizer(const KvQuantizer&) = delete;
  KvQuantizer& operator=(const KvQuantizer&) = delete;

  // A few words with every parameter, for reports: "KIVI keys, 2 bits, 32 tokens per channel, ...".
  virtual std::string description() const = 0;
  // Tokens that are encoded together; a tile holds a multiple.
  virtual int tokens_per_run() const { return 1; }
  // OK, or why a tile of this shape cannot be encoded.
  Status CheckShape(const TileShape& shape) const;
  // Size of an encoded tile. REQUIRES (here and below): CheckShape(shape).ok().
  virtual size_t EncodedBytes(const TileShape& shape) const = 0;
  // Storage cost by the method's own formula; 8 EncodedBytes / elements for every shape.
  virtual double BitsPerElement(const TileShape& shape) const = 0;

  // rows: shape.elements() numbers, [tokens, kv_heads, D]. bytes: EncodedBytes(shape), all written.
  // Returns the number of values that were NaN or saturated.
  int Encode(const TileShape& shape, std::span<const float> rows, std::span<std::byte> bytes) const;
  Status Decode(const TileShape& shape, std::span<const std::byte> bytes,
                std::span<float> rows) const;

 protected:
  KvQuantizer() = default;
  // Whether `head_dim` suits the method's groups; the base has checked 16 | D <= kMaxHeadDim.
  virtual Status CheckHeadDim(int head_dim) const;
  // `rows` are finite and within +-65504.
  virtual void EncodeTile(const TileShape& shape, std::span<const float> rows,
                          std::span<std::byte> bytes) const = 0;
  virtual Status DecodeTile(const TileShape& shape, std::span<const std::byte> bytes,
                            std::span<float> rows) const = 0;
  // False for a codec that stores any value as it is.
  virtual bool saturates() const { return true; }
};

class ByteReader;
class ByteWriter;

// A codec whose tiles are runs one after another: tokens_per_run() tokens of one KV head (one row
// where that is 1), by token, then by head, each of the same size.
class GroupedQuantizer : public KvQuantizer {
 public:
  size_t EncodedBytes(const TileShape& shape) const final {
    return shape.rows() / static_cast<size_t>(tokens_per_run()) * RunBytes(shape.head_dim);
  }

 protected:
  virtual size_t RunBytes(int head_dim) const = 0;
  // Tokens [first, first + tokens_per_run()) of `head`.
  virtual void EncodeRun(const TileShape& shape, std::span<const float> rows, int first, int head,
                         ByteWriter& writer) const = 0;
  virtual Status DecodeRun(const TileShape& shape, int first, int head, ByteReader& reader,
                           std::span<float> rows) const = 0;

 private:
  void EncodeTile(const TileShape& shape, std::span<const float> rows,
                  std::span<std::byte> bytes) const final;
  Status DecodeTile(const TileShape& shape, std::span<const std::byte> bytes,
                    std::span<float> rows) const final;
};

// Where row (token, head) of a tile begins.
inline size_t RowAt(const TileShape& shape, int token, int head) {
  return (static_cast<size_t>(token) * static_cast<size_t>(shape.kv_heads) +
          static_cast<size_t>(head)) *
         static_cast<size_t>(shape.head_dim);
}

// How one channel of one block lies in a tile: element t of `channel` is row (first + t, head),
// dim.
std::vector<float> GatherChannel(const TileShape& shape, std::span<const float> rows, int first,
                                 int count, int head, int dim);
void ScatterChannel(const TileShape& shape, std::span<const float> channel, int first, int head,
                    int dim, std::span<float> rows);

}  // namespace oscar
