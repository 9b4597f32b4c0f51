#include "io/gzip.h"

#include <fmt/core.h>
#include <zlib.h>

#include <algorithm>
#include <vector>

namespace oscar {

Result<std::string> Gunzip(std::string data, std::string_view what, uint64_t max_bytes) {
  if (data.size() < 2 || data[0] != '\x1f' || data[1] != '\x8b') return data;
  z_stream stream{};
  if (inflateInit2(&stream, 16 + MAX_WBITS) != Z_OK) {
    return Unexpected(ResourceExhausted("zlib could not be set up"));
  }
  std::string out;
  std::vector<char> buffer(size_t{1} << 16);
  size_t given = 0;
  int state = Z_OK;
  while (state == Z_OK && out.size() <= max_bytes) {
    if (stream.avail_in == 0) {  // in pieces, since zlib counts in 32 bits
      const size_t count = std::min<size_t>(data.size() - given, size_t{1} << 30);
      if (count == 0) break;
      stream.next_in = reinterpret_cast<Bytef*>(data.data() + given);
      stream.avail_in = static_cast<uInt>(count);
      given += count;
    }
    stream.next_out = reinterpret_cast<Bytef*>(buffer.data());
    stream.avail_out = static_cast<uInt>(buffer.size());
    state = inflate(&stream, Z_NO_FLUSH);
    out.append(buffer.data(), buffer.size() - stream.avail_out);
  }
  inflateEnd(&stream);
  if (out.size() > max_bytes) {
    return Unexpected(OutOfRange(fmt::format("{}: holds more than {} bytes", what, max_bytes)));
  }
  if (state != Z_STREAM_END) {
    return Unexpected(DataLoss(fmt::format("{}: not a whole gzip file", what)));
  }
  return out;
}

}  // namespace oscar
