#include "io/model_path.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

namespace oscar {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class ModelPathTest : public testing::Test {
 protected:
  ModelPathTest()
      : root_(fs::path(testing::TempDir()) /
              testing::UnitTest::GetInstance()->current_test_info()->name()) {
    fs::remove_all(root_);
    fs::create_directories(root_);
    ::setenv("HF_HUB_CACHE", (root_ / "hub").c_str(), 1);
  }
  ~ModelPathTest() override {
    ::unsetenv("HF_HUB_CACHE");
    fs::remove_all(root_);
  }
  void Write(const fs::path& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  static std::string ErrorOf(const fs::path& given) {
    const auto found = FindModel(given);
    return found.has_value() ? "" : found.error().message();
  }
  const fs::path root_;
};

TEST_F(ModelPathTest, FindsTheSnapshotThatMainNames) {
  const fs::path repository = "hub/models--Qwen--Qwen3-0.6B";
  Write(repository / "snapshots/aaa/config.json", "{}");
  EXPECT_EQ(FindModel("Qwen/Qwen3-0.6B").value(), root_ / repository / "snapshots/aaa");
  Write(repository / "snapshots/bbb/config.json", "{}");
  EXPECT_THAT(ErrorOf("Qwen/Qwen3-0.6B"), HasSubstr("oscar pull Qwen/Qwen3-0.6B"));
  Write(repository / "refs/main", "bbb\n");
  EXPECT_EQ(FindModel("Qwen/Qwen3-0.6B").value(), root_ / repository / "snapshots/bbb");
  EXPECT_EQ(ModelName(root_ / repository / "snapshots/bbb"), "Qwen/Qwen3-0.6B");
  EXPECT_EQ(ModelName("models/demo/"), "demo");
  // A ref is a file that anyone may have written.
  Write(repository / "refs/main", "../../../../etc");
  EXPECT_FALSE(FindModel("Qwen/Qwen3-0.6B").has_value());
  // Half a download.
  fs::remove(root_ / repository / "snapshots/bbb/config.json");
  Write(repository / "refs/main", "bbb");
  EXPECT_THAT(ErrorOf("Qwen/Qwen3-0.6B"), HasSubstr("no config.json"));
}

TEST_F(ModelPathTest, SaysHowToGetWhatIsNotThere) {
  EXPECT_THAT(ErrorOf("Qwen/Qwen3-8B"), HasSubstr("oscar pull Qwen/Qwen3-8B"));
  for (const char* path : {"./Qwen/Qwen3-8B", "../x/y", "/no/where", "a/b/c", "../y", "a/.."}) {
    EXPECT_THAT(ErrorOf(path), HasSubstr("no such file or model directory")) << path;
  }
}

TEST_F(ModelPathTest, NamesWhatIsNotAModel) {
  Write("a/model.gguf", "GGUF\3");
  EXPECT_THAT(ErrorOf(root_ / "a/model.gguf"), HasSubstr("GGUF file"));
  EXPECT_THAT(ErrorOf(root_ / "a"), HasSubstr("model.gguf: a GGUF file"));
  Write("renamed.bin", "GGUF\3");
  EXPECT_THAT(ErrorOf(root_ / "renamed.bin"), HasSubstr("GGUF file"));
  Write("b/adapter_config.json", R"({"base_model_name_or_path": "meta/Llama"})");
  EXPECT_THAT(ErrorOf(root_ / "b"), HasSubstr("adapter"));
  EXPECT_THAT(ErrorOf(root_ / "b"), HasSubstr("\"meta/Llama\""));
  Write("b/adapter_config.json", "{");
  EXPECT_THAT(ErrorOf(root_ / "b"), HasSubstr("its base model"));
  // A model directory may hold an adapter or a GGUF file besides.
  Write("a/config.json", "{}");
  EXPECT_EQ(FindModel(root_ / "a").value(), root_ / "a");
}

}  // namespace
}  // namespace oscar
