#include "io/hub_cache.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

namespace oscar {
namespace {

namespace fs = std::filesystem;

TEST(HubNameTest, NamesAndRevisions) {
  const auto plain = ParseHubName("Qwen/Qwen3-0.6B");
  ASSERT_TRUE(plain.has_value());
  EXPECT_EQ(plain->repository, "Qwen/Qwen3-0.6B");
  EXPECT_EQ(plain->RevisionOr("main"), "main");
  const auto tagged = ParseHubName("a/b@refs/pr/1");
  ASSERT_TRUE(tagged.has_value());
  EXPECT_EQ(tagged->repository, "a/b");
  EXPECT_EQ(tagged->RevisionOr("main"), "refs/pr/1");
  for (const char* text :
       {"",       "a",      "a/",       "/a",     "a/b/c",  "../b",     "a/..",
        "./a",    "a/b@",   "a/b@../x", "a/b@/x", "a/b@x/", "a/b@x//y", "a/b@x..y",
        "a/b@.x", "a/b@@x", "a b/c",    "a/b\n",  "~/x",    "-a/b",     "a/b@-x"}) {
    EXPECT_FALSE(ParseHubName(text).has_value()) << text;
  }
}

TEST(HubNameTest, PathsOfAListing) {
  for (const char* path :
       {"config.json", "rotation/rotation.safetensors", "a b/ü (1).pt", "a..b"}) {
    EXPECT_TRUE(IsSafeRelativePath(path)) << path;
  }
  for (const char* path : {"", "/etc/passwd", "../x", "a/../b", "a/./b", "a//b", "a/", ".", "..",
                           "a\\..\\b", "a\nb", "a/..", "\x7f"}) {
    EXPECT_FALSE(IsSafeRelativePath(path)) << path;
  }
  EXPECT_FALSE(IsSafeRelativePath(std::string(256, 'a')));
  EXPECT_FALSE(IsSafeRelativePath(std::string("a\0b", 3)));
}

class HubCacheTest : public testing::Test {
 protected:
  HubCacheTest()
      : root_(fs::path(testing::TempDir()) /
              testing::UnitTest::GetInstance()->current_test_info()->name()) {
    for (const char* name : kNames) {
      const char* value = std::getenv(name);
      before_.emplace_back(name, value == nullptr ? "" : value);
      ::unsetenv(name);
    }
    fs::remove_all(root_);
  }
  ~HubCacheTest() override {
    for (const auto& [name, value] : before_) {
      ::unsetenv(name.c_str());
      if (!value.empty()) ::setenv(name.c_str(), value.c_str(), 1);
    }
    fs::remove_all(root_);
  }
  void Write(const fs::path& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  static constexpr const char* kNames[] = {"HOME", "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME",
                                           "HUGGINGFACE_HUB_CACHE"};
  const fs::path root_;
  std::vector<std::pair<std::string, std::string>> before_;
};

TEST_F(HubCacheTest, TheOrderOfVariables) {
  ::setenv("HOME", "/h", 1);
  EXPECT_EQ(HubCache(), "/h/.cache/huggingface/hub");
  ::setenv("XDG_CACHE_HOME", "/x", 1);
  EXPECT_EQ(HubCache(), "/x/huggingface/hub");
  ::setenv("HF_HOME", "~/hf", 1);
  EXPECT_EQ(HubHome(), "/h/hf");
  EXPECT_EQ(HubCache(), "/h/hf/hub");
  ::setenv("HUGGINGFACE_HUB_CACHE", "/old", 1);
  EXPECT_EQ(HubCache(), "/old");
  ::setenv("HF_HUB_CACHE", "/new", 1);
  EXPECT_EQ(HubCache(), "/new");
  ::setenv("HF_HUB_CACHE", "", 1);  // empty is unset
  EXPECT_EQ(HubCache(), "/old");
}

TEST_F(HubCacheTest, RevisionsOfASnapshot) {
  const std::string one(40, 'a'), two(40, 'b');
  Write("snapshots/" + one + "/config.json", "{}");
  Write("snapshots/" + two + "/config.json", "{}");
  EXPECT_FALSE(FindSnapshot(root_, "").has_value()) << "two, and none is named";
  Write("refs/main", one);
  Write("refs/refs/pr/1", two);
  EXPECT_EQ(FindSnapshot(root_, ""), root_ / "snapshots" / one);
  EXPECT_EQ(FindSnapshot(root_, "refs/pr/1"), root_ / "snapshots" / two);
  EXPECT_EQ(FindSnapshot(root_, two), root_ / "snapshots" / two);
  EXPECT_FALSE(FindSnapshot(root_, "v1").has_value()) << "never another one than was asked for";
}

TEST_F(HubCacheTest, WhatAnInterruptedDownloadLacks) {
  EXPECT_EQ(FindMissing(root_, ModelParts::kConfig).name, "config.json");
  Write("config.json", "{}");
  EXPECT_EQ(FindMissing(root_, ModelParts::kConfig).name, "");
  EXPECT_EQ(FindMissing(root_, ModelParts::kText).name, "tokenizer.json");
  EXPECT_TRUE(FindMissing(root_, ModelParts::kText).unsure);
  Write("tokenizer.json", "{}");
  EXPECT_EQ(FindMissing(root_, ModelParts::kText).name, "");
  EXPECT_EQ(FindMissing(root_, ModelParts::kWeights).name, "model.safetensors");
  Write("model.safetensors.index.json",
        R"({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})");
  Write("1.safetensors", "");
  EXPECT_EQ(FindMissing(root_, ModelParts::kWeights).name, "2.safetensors");
  EXPECT_FALSE(FindMissing(root_, ModelParts::kWeights).unsure);
  // A link whose blob is gone counts as missing.
  fs::create_symlink("nowhere", root_ / "2.safetensors");
  EXPECT_EQ(FindMissing(root_, ModelParts::kWeights).name, "2.safetensors");
  fs::remove(root_ / "2.safetensors");
  Write("2.safetensors", "");
  EXPECT_EQ(FindMissing(root_, ModelParts::kWeights).name, "");
}

}  // namespace
}  // namespace oscar
