// What oscar bench serve refuses before it starts or asks a server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/command_test_util.h"

namespace oscar::cli {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

class BenchServeCommand : public CommandTest {
 protected:
  BenchServeCommand() : CommandTest(AddBenchCommand, "bench") {}
  std::string Error(const std::string& arguments) {
    return std::string(Run("serve " + arguments).message());
  }
};

TEST_F(BenchServeCommand, OptionsThatWouldDoNothingAreRefused) {
  const std::string url = "--url http://127.0.0.1:1 ";
  EXPECT_THAT(Error(url), HasSubstr("connect"));
  for (const std::string option : {"--methods oscar+", "--budget-tokens 64", "--kv-memory 1MiB",
                                   "--together", "--chunk 64", "--device cpu"}) {
    EXPECT_THAT(Error(url + option), StartsWith(option.substr(0, option.find(' ')) + ": for a"));
  }
  EXPECT_THAT(Error("--api-key x"), StartsWith("--api-key: only with --url"));
  EXPECT_THAT(Error(url + "--rate 1 --clients 2"), StartsWith("--clients: --rate says"));
  EXPECT_THAT(Error(url + "--requests 5"), StartsWith("--requests: only with --rate"));
  EXPECT_THAT(Error(url + "--dataset sharegpt-like --max-tokens 5"), StartsWith("--max-tokens: "));
  EXPECT_THAT(Error(url + "--beside-max-tokens 5"), HasSubstr("only with --beside"));
  EXPECT_THAT(Error(url + "--rate 0"), StartsWith("--rate 0: requests per second"));
  EXPECT_THAT(Error("--url ftp://x"), HasSubstr("expected http://HOST:PORT"));
}

}  // namespace
}  // namespace oscar::cli
