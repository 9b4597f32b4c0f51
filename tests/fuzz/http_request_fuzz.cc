// However the bytes of a connection are cut into reads, the same requests come out: heads, bodies
// by length and by chunks, pipelined. What comes out keeps the limits, and a refusal is a complete
// one.
#include <fmt/core.h>

#include <algorithm>
#include <string>

#include "fuzz_util.h"
#include "http/request_reader.h"

namespace {

using oscar::server::HttpRequest;
using oscar::server::ReaderLimits;
using oscar::server::RequestReader;
using State = RequestReader::State;

constexpr uint64_t kMaxBody = 4096;
constexpr uint64_t kMaxHeader = 2048;
constexpr int kMaxFields = 16;

void CheckRequest(const RequestReader& reader, const HttpRequest& request) {
  OSCAR_CHECK(request.body.size() <= kMaxBody);
  OSCAR_CHECK(request.headers.size() <= static_cast<size_t>(kMaxFields));
  OSCAR_CHECK(!request.path.empty() && (request.path[0] == '/' || request.path == "*"));
  const auto control = [](unsigned char c) { return (c < 0x20 && c != '\t') || c == 0x7f; };
  for (const auto& [name, value] : request.headers) {
    OSCAR_CHECK(!name.empty() && std::none_of(name.begin(), name.end(), control));
    OSCAR_CHECK(name.find(' ') == std::string::npos);
    OSCAR_CHECK(std::none_of(value.begin(), value.end(), control));
  }
  OSCAR_CHECK(std::none_of(request.path.begin(), request.path.end(), control));
  OSCAR_CHECK(reader.state() == State::kDone);
}

// All requests as text, and how it ended.
std::string Read(std::string_view wire, size_t step) {
  RequestReader reader(ReaderLimits{kMaxBody, kMaxHeader, kMaxFields});
  std::string out;
  for (size_t at = 0; at < wire.size(); at += step) {
    State state = reader.Feed(wire.substr(at, step));
    while (state == State::kHeadDone || state == State::kDone) {
      if (state == State::kHeadDone) {
        state = reader.ReadBody();
        continue;
      }
      const HttpRequest& request = reader.request();
      CheckRequest(reader, request);
      out += fmt::format("{} {} {} {} {}\n", request.method, request.path, request.query,
                         reader.wants_close(), request.body);
      for (const auto& [name, value] : request.headers) out += fmt::format("{}: {}\n", name, value);
      state = reader.Reset();
    }
    if (state == State::kFailed) {
      OSCAR_CHECK(reader.status() >= 400 && reader.status() < 500 && !reader.message().empty());
      OSCAR_CHECK(reader.message().size() < 1000);
      return out + fmt::format("refused {}", reader.status());
    }
  }
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  // The first byte says how the rest is cut.
  const std::string_view wire = oscar::FuzzText(data + 1, size - 1);
  if (wire.empty()) return 0;
  const std::string whole = Read(wire, wire.size());
  const size_t step = 1 + data[0] % 32;
  const std::string cut = Read(wire, step);
  OSCAR_CHECK(cut == whole, "in pieces of {}: {} not {}", step, cut, whole);
  return 0;
}
