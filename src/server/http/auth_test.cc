#include "http/auth.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace oscar::server {
namespace {

using testing::HasSubstr;

HttpRequest With(const char* header, const char* value) {
  HttpRequest request;
  request.headers.emplace_back(header, value);
  return request;
}

TEST(KeyRing, AcceptsItsKeysAndNothingElse) {
  KeyRing keys;
  ASSERT_TRUE(keys.Add("alpha-1").ok());
  ASSERT_TRUE(keys.Add("beta-2").ok());
  const auto alpha = keys.Check(With("Authorization", "Bearer alpha-1"));
  const auto beta = keys.Check(With("x-api-key", "beta-2"));
  ASSERT_TRUE(alpha.has_value() && beta.has_value());
  EXPECT_NE(alpha->hash, beta->hash);
  EXPECT_EQ(alpha->hash.size(), 64u);
  EXPECT_EQ(alpha->id.find("alpha"), std::string::npos);
  EXPECT_TRUE(keys.Check(With("authorization", "bearer  beta-2 ")).has_value());
  for (const char* bad :
       {"Bearer alpha-", "Bearer alpha-12", "Bearer ", "Bearer", "alpha-1", "Basic alpha-1", ""}) {
    EXPECT_FALSE(keys.Check(With("Authorization", bad)).has_value()) << bad;
  }
  EXPECT_FALSE(keys.Check(HttpRequest{}).has_value());
  EXPECT_FALSE(keys.Add("").ok());
  EXPECT_FALSE(keys.Add("a b").ok());
}

TEST(KeyRing, ReadsFiles) {
  const auto path = std::filesystem::path(testing::TempDir()) / "oscar_keys.txt";
  std::ofstream(path) << "# ours\n\n  one \r\ntwo\n";
  KeyRing keys;
  ASSERT_TRUE(keys.AddFile(path).ok());
  EXPECT_EQ(keys.size(), 2u);
  EXPECT_TRUE(keys.Check(With("X-Api-Key", "one")).has_value());
  std::ofstream(path) << "ok\nnot ok\n";
  const Status status = KeyRing().AddFile(path);
  EXPECT_THAT(status.message(), HasSubstr(":2"));
  EXPECT_THAT(status.message(), testing::Not(HasSubstr("not ok")));
  std::ofstream(path) << "# none\n";
  EXPECT_FALSE(KeyRing().AddFile(path).ok());
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace oscar::server
