// Helpers of this module's tests.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <string>
#include <string_view>

#include "oscar/status.h"

namespace oscar {

// A fresh directory for each test, removed at its end.
class TempDirTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    directory_ = std::filesystem::path(testing::TempDir()) /
                 (std::string(info->test_suite_name()) + "_" + info->name() + "_" +
                  std::to_string(::getpid()));
    std::filesystem::create_directories(directory_);
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  size_t NumFiles() const {
    return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(directory_),
                                             std::filesystem::directory_iterator()));
  }

  std::filesystem::path directory_;
};

inline std::string Slurp(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in.good()) << path;
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

inline void Spill(const std::filesystem::path& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

inline std::span<const std::byte> AsBytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// A Result's error message, or "ok".
template <typename T>
std::string MessageOf(const Result<T>& result) {
  return result.has_value() ? "ok" : result.error().message();
}

// What every error about a file must be: one printable line that names the file.
inline void ExpectOneLineNaming(const Status& status, std::string_view file) {
  EXPECT_FALSE(status.ok());
  const std::string& message = status.message();
  EXPECT_NE(message.find(file), std::string::npos) << message;
  EXPECT_LT(message.size(), 1000u) << message;
  for (const char c : message) {
    EXPECT_TRUE(c >= 0x20 && c < 0x7f) << "byte " << static_cast<int>(c) << " in: " << message;
  }
}

}  // namespace oscar
