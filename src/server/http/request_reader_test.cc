#include "http/request_reader.h"

#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace oscar::server {
namespace {

using State = RequestReader::State;
using testing::HasSubstr;

// Reads everything in pieces of `step` bytes: "METHOD path body" of each request, or "status".
std::string Read(std::string_view wire, size_t step, const ReaderLimits& limits = {}) {
  RequestReader reader(limits);
  std::string out;
  const auto settle = [&](State state) {
    while (true) {
      if (state == State::kHeadDone) {
        state = reader.ReadBody();
      } else if (state == State::kDone) {
        const HttpRequest& request = reader.request();
        out += fmt::format("{} {} {}\n", request.method, request.path, request.body);
        state = reader.Reset();
      } else {
        return state;
      }
    }
  };
  for (size_t at = 0; at < wire.size(); at += step) {
    if (settle(reader.Feed(wire.substr(at, step))) == State::kFailed) {
      return out + std::to_string(reader.status());
    }
  }
  return out;
}

// However the bytes are cut, the same is read.
std::string ReadAnyhow(const std::string& wire, const ReaderLimits& limits = {}) {
  const std::string whole = Read(wire, wire.size(), limits);
  for (const size_t step : {1, 2, 3, 7}) EXPECT_EQ(Read(wire, step, limits), whole) << wire;
  return whole;
}

std::string Post(const std::string& headers, const std::string& body) {
  return "POST /a HTTP/1.1\r\nHost: x\r\n" + headers + "\r\n" + body;
}
constexpr const char* kChunked = "Transfer-Encoding: chunked\r\n";

TEST(RequestReader, ReadsPipelinedRequests) {
  EXPECT_EQ(
      ReadAnyhow("GET /%41%2f?q=%41 HTTP/1.1\r\nHost: x\r\n\r\n" +
                 Post("Content-Length: 5\r\n", "hello") +
                 Post(kChunked, "3\r\nabc\r\nA;n=v;q=\"a b\"\r\n0123456789\r\n0\r\nT: v\r\n\r\n") +
                 "\r\nGET http://host:80/b HTTP/1.0\r\n\r\n"),
      "GET /A/ \nPOST /a hello\nPOST /a abc0123456789\nGET /b \n");
}

TEST(RequestReader, RefusesWhatTwoPartiesMayReadDifferently) {
  for (const std::string& headers : {
           std::string("Transfer-Encoding : chunked\r\n"),
           std::string("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n"),
           std::string("Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n"),
           std::string("Transfer-Encoding: gzip, chunked\r\n"),
           std::string("Transfer-Encoding: identity\r\n"),
           std::string("Transfer-Encoding:\r\n chunked\r\n"),
           std::string("Transfer-Encoding: chunked\r\nContent-Length: 3\r\n"),
           std::string("Content-Length: 3\r\nContent-Length: 3\r\n"),
           std::string("Content-Length: 3, 3\r\n"),
           std::string("Content-Length: +3\r\n"),
           std::string("Content-Length: 3\r\nX: a\r\n b\r\n"),
           std::string("Content-Length: 3\r\n X: a\r\n"),
           std::string("Content-Length: 3\r\nNo colon here\r\n"),
           std::string("Content-Length: 3\r\n: empty\r\n"),
           std::string("Content-Length: 3\r\nA\0b: c\r\n", 28),
           std::string("Content-Length: 3\r\nA: b\0c\r\n", 28),
           std::string("Content-Length: 3\r\nA: b\rc\r\n"),
           std::string("Content-Length: 3\r\nA: b\nC: d\r\n"),
           std::string("Content-Length: 3\r\nHost: y\r\n"),
       }) {
    EXPECT_EQ(ReadAnyhow(Post(headers, "abc\r\n0\r\n\r\n")), "400") << headers;
  }
  EXPECT_EQ(ReadAnyhow("GET / HTTP/1.1\r\n\r\n"), "400");  // no Host
  EXPECT_EQ(ReadAnyhow("GET / HTTP/1.1\nHost: x\n\n\r\n\r\n"), "400");
  EXPECT_EQ(ReadAnyhow("POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"), "400");
  EXPECT_EQ(ReadAnyhow("GET /%00 HTTP/1.1\r\nHost: x\r\n\r\n"), "400");
  EXPECT_EQ(ReadAnyhow("GET nowhere HTTP/1.1\r\nHost: x\r\n\r\n"), "400");
  EXPECT_EQ(ReadAnyhow("GET / HTTP/2.0\r\nHost: x\r\n\r\n"), "400");
}

TEST(RequestReader, RefusesOddChunks) {
  for (const std::string& body : {
           std::string("0x3\r\nabc\r\n0\r\n\r\n"),
           std::string("+3\r\nabc\r\n0\r\n\r\n"),
           std::string("3zz\r\nabc\r\n0\r\n\r\n"),
           std::string(" 3\r\nabc\r\n0\r\n\r\n"),
           std::string("3\nabc\r\n0\r\n\r\n"),
           std::string("3\r\nabcXX0\r\n\r\n"),
           std::string("3\r\nabc\n0\r\n\r\n\r\n"),
           std::string("\r\nabc\r\n0\r\n\r\n"),
           std::string("-1\r\nabc\r\n0\r\n\r\n"),
           std::string("3;\r\nabc\r\n0\r\n\r\n"),
           std::string("3;a=\"\n\"\r\nabc\r\n0\r\n\r\n"),
           std::string("10000000000000000\r\nabc\r\n0\r\n\r\n"),
           "3;a=" + std::string(300, 'x') + "\r\nabc\r\n0\r\n\r\n",
       }) {
    const std::string read = ReadAnyhow(Post(kChunked, body));
    EXPECT_TRUE(read == "400" || read == "413") << body << read;
  }
  // A line, or a trailer, without an end.
  EXPECT_EQ(Read(Post(kChunked, "3;" + std::string(100'000, 'a')), 1000), "400");
  std::string trailer = "0\r\n";
  for (int i = 0; i < 5000; ++i) trailer += "a: b\r\n";
  EXPECT_EQ(Read(Post(kChunked, trailer), 1000), "400");
}

TEST(RequestReader, HoldsItsLimits) {
  ReaderLimits limits;
  limits.max_body_bytes = 10;
  limits.max_header_bytes = 200;
  limits.max_headers = 3;
  EXPECT_EQ(ReadAnyhow(Post("Content-Length: 10\r\n", "0123456789"), limits),
            "POST /a 0123456789\n");
  EXPECT_EQ(ReadAnyhow(Post("Content-Length: 11\r\n", "0123456789a"), limits), "413");
  EXPECT_EQ(ReadAnyhow(Post(kChunked, "6\r\nabcdef\r\n6\r\nabcdef\r\n0\r\n\r\n"), limits), "413");
  EXPECT_EQ(ReadAnyhow(Post("A: b\r\nC: d\r\nContent-Length: 0\r\n", ""), limits), "431");
  EXPECT_EQ(ReadAnyhow("GET /" + std::string(300, 'a'), limits), "431");
  EXPECT_EQ(ReadAnyhow("POST / HTTP/1.1\r\nHost: x\r\n\r\n", limits), "411");
  limits.max_header_bytes = 1 << 20;
  EXPECT_EQ(Read("GET /" + std::string(9000, 'a') + " HTTP/1.1\r\nHost: x\r\n\r\n", 100, limits),
            "414");
}

TEST(RequestReader, ConnectionIsAList) {
  for (const auto& [value, closes] : {std::pair{"close", true},
                                      {"foo, Close", true},
                                      {"keep-alive", false},
                                      {"closed", false},
                                      {"a,close ,b", true}}) {
    RequestReader reader({});
    const std::string wire =
        fmt::format("GET / HTTP/1.1\r\nHost: x\r\nConnection: {}\r\n\r\n", value);
    ASSERT_EQ(reader.Feed(wire), State::kHeadDone) << reader.message();
    EXPECT_EQ(reader.wants_close(), closes) << value;
  }
}

}  // namespace
}  // namespace oscar::server
