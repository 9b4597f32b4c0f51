#include "oscar/status.h"

#include <gtest/gtest.h>

namespace oscar {
namespace {

Status Fails() { return NotFound("model.bin"); }
Result<int> Half(int x) {
  if (x % 2 != 0) return Unexpected(InvalidArgument("odd"));
  return x / 2;
}
Status StatusFromResult(int x) {
  OSCAR_ASSIGN_OR_RETURN(const int half, Half(x));
  return half == 1 ? Status() : Internal("not 1");
}
Result<std::string> ResultFromStatus() {
  OSCAR_RETURN_IF_ERROR(Fails());
  return std::string("unreachable");
}

TEST(Status, MacrosPassErrorsThroughBothReturnTypes) {
  EXPECT_TRUE(StatusFromResult(2).ok());
  EXPECT_EQ(StatusFromResult(3).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(StatusFromResult(4).code(), StatusCode::kInternal);
  EXPECT_EQ(ResultFromStatus().error().message(), "model.bin");
}

TEST(Status, EveryCodeHasOneRow) {
  for (int i = 0; i <= static_cast<int>(StatusCode::kInternal); ++i) {
    const StatusCodeInfo& info = InfoOf(static_cast<StatusCode>(i));
    EXPECT_FALSE(info.name.empty());
    EXPECT_EQ(info.exit_code == 0, i == 0);
    EXPECT_EQ(info.http_status == 200, i == 0);
  }
  EXPECT_EQ(InfoOf(StatusCode::kInvalidArgument).exit_code, 2);
  EXPECT_EQ(InfoOf(StatusCode::kCancelled).exit_code, 130);
}

TEST(Status, ContextKeepsCodeAndParam) {
  const Status status = OutOfRange("too long").WithParam("max_tokens");
  const Status with = status.WithContext("request 7");
  EXPECT_EQ(with.code(), StatusCode::kOutOfRange);
  EXPECT_EQ(with.param(), "max_tokens");
  EXPECT_EQ(with.message(), "request 7: too long");
  EXPECT_EQ(with.ToString(), "out of range: request 7: too long");
}

}  // namespace
}  // namespace oscar
