#include "base/file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <thread>

namespace oscar {
namespace {

namespace fs = std::filesystem;

class FileTest : public testing::Test {
 protected:
  void SetUp() override {
    directory_ = fs::path(testing::TempDir()) /
                 ("file_test_" + std::to_string(::getpid()) + "_" +
                  testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::create_directories(directory_);
  }
  void TearDown() override { fs::remove_all(directory_); }
  size_t NumFiles() const {
    return static_cast<size_t>(
        std::distance(fs::directory_iterator(directory_), fs::directory_iterator()));
  }
  fs::path directory_;
};

TEST_F(FileTest, WritesThenReadsTheSameBytes) {
  const fs::path path = directory_ / "a";
  ASSERT_TRUE(WriteFileAtomically(path, "hello").ok());
  auto file = InputFile::Open(path);
  ASSERT_TRUE(file.has_value()) << file.error().ToString();
  EXPECT_EQ(file->size(), 5u);
  std::string text(3, ' ');
  ASSERT_TRUE(file->Read(1, std::as_writable_bytes(std::span(text))).ok());
  EXPECT_EQ(text, "ell");
  const std::string memory = "hello";
  const InputFile bytes = InputFile::FromBytes(std::as_bytes(std::span(memory)), "memory");
  ASSERT_TRUE(bytes.Read(2, std::as_writable_bytes(std::span(text))).ok());
  EXPECT_EQ(text, "llo");
  EXPECT_EQ(*ReadFile(path, 5), "hello");
  EXPECT_EQ(NumFiles(), 1u);
}

TEST_F(FileTest, SaysWhatLiesThereWithoutThrowing) {
  const fs::path file = directory_ / "f";
  ASSERT_TRUE(WriteFileAtomically(file, "x").ok());
  EXPECT_TRUE(Exists(file) && IsRegularFile(file) && !IsDirectory(file));
  EXPECT_TRUE(Exists(directory_) && IsDirectory(directory_) && !IsRegularFile(directory_));
  for (const fs::path& none :
       {directory_ / "none", file / "below", fs::path(std::string(5000, 'a'))}) {
    EXPECT_FALSE(Exists(none) || IsRegularFile(none) || IsDirectory(none));
  }
}

TEST_F(FileTest, ABrokenLinkIsThereAndNamesItsTarget) {
  const fs::path link = directory_ / "link";
  EXPECT_FALSE(IsThere(link));
  fs::create_symlink("blobs/1234", link);
  EXPECT_TRUE(IsThere(link) && !Exists(link));
  const Status status = ReadFile(link, 100).error();
  EXPECT_EQ(status.code(), StatusCode::kDataLoss);  // broken, not absent
  EXPECT_NE(status.message().find("link: a link to blobs/1234, which is not there"),
            std::string::npos)
      << status.message();
}

TEST_F(FileTest, AnEmptyFileHasNothingToRead) {
  ASSERT_TRUE(WriteFileAtomically(directory_ / "e", "").ok());
  auto file = InputFile::Open(directory_ / "e");
  ASSERT_TRUE(file.has_value());
  EXPECT_EQ(file->size(), 0u);
  EXPECT_TRUE(file->Read(0, {}).ok());
}

// Shorter, longer, or other bytes of the same number: an error that names the file.
TEST_F(FileTest, SaysWhenAFileChangesWhileItIsRead) {
  const fs::path path = directory_ / "w";
  std::string text(10, ' ');
  for (const char* now : {"123", "", "1234567890abcdef", "0987654321"}) {
    ASSERT_TRUE(WriteFileAtomically(path, "1234567890").ok());
    fs::last_write_time(path, fs::file_time_type::clock::now() - std::chrono::hours(1));
    const auto file = InputFile::Open(path);
    ASSERT_TRUE(file.has_value());
    EXPECT_TRUE(file->Read(0, std::as_writable_bytes(std::span(text))).ok());
    std::ofstream(path, std::ios::trunc) << now;
    const Status status = file->Read(0, std::as_writable_bytes(std::span(text)));
    EXPECT_EQ(status.code(), StatusCode::kDataLoss) << now;
    EXPECT_NE(status.message().find("w: changed while it was read"), std::string::npos)
        << status.message();
  }
  // What takes the name of the file does not touch what is open.
  ASSERT_TRUE(WriteFileAtomically(path, "1234567890").ok());
  const auto file = InputFile::Open(path);
  ASSERT_TRUE(WriteFileAtomically(path, "x").ok());
  EXPECT_TRUE(file->Read(0, std::as_writable_bytes(std::span(text))).ok());
  EXPECT_EQ(text, "1234567890");
}

TEST_F(FileTest, ErrorsNamePathAndCause) {
  auto missing = InputFile::Open(directory_ / "none");
  ASSERT_FALSE(missing.has_value());
  EXPECT_EQ(missing.error().code(), StatusCode::kNotFound);
  EXPECT_NE(missing.error().message().find("none: cannot open"), std::string::npos);
  EXPECT_EQ(InputFile::Open(directory_).error().code(), StatusCode::kInvalidArgument);
  ASSERT_TRUE(WriteFileAtomically(directory_ / "big", "123456").ok());
  EXPECT_EQ(ReadFile(directory_ / "big", 5).error().code(), StatusCode::kOutOfRange);
  EXPECT_EQ(WriteFileAtomically(directory_ / "no" / "such", "x").code(), StatusCode::kNotFound);
}

TEST_F(FileTest, RefusesAPipeThatNobodyWritesTo) {
  const fs::path pipe = directory_ / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  ::alarm(20);  // ends the test where opening waits for a writer
  for (const Status& status : {InputFile::Open(pipe).error(), ReadFile(pipe, 100).error()}) {
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("pipe: not a regular file"), std::string::npos);
  }
  ::alarm(0);
}

TEST_F(FileTest, ReadsInputFromFilesAndPipes) {
  const fs::path file = directory_ / "file", pipe = directory_ / "pipe";
  const std::string text(100'000, 'x');  // more than a pipe holds
  ASSERT_TRUE(WriteFileAtomically(file, text).ok());
  EXPECT_EQ(*ReadInput(file, text.size()), text);
  EXPECT_EQ(ReadInput(file, text.size() - 1).error().code(), StatusCode::kOutOfRange);

  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  for (const size_t limit : {text.size(), text.size() - 1}) {
    std::thread writer(
        [&] { std::ofstream(pipe) << text.substr(0, 10) << std::flush << text.substr(10); });
    const Result<std::string> read = ReadInput(pipe, limit);
    writer.join();
    ASSERT_EQ(read.has_value(), limit == text.size());
    if (read.has_value()) {
      EXPECT_EQ(*read, text);
    } else {
      EXPECT_EQ(read.error().code(), StatusCode::kOutOfRange);
    }
  }
  EXPECT_EQ(ReadInput(directory_ / "none", 1).error().code(), StatusCode::kNotFound);
  for (const fs::path& other : {directory_, fs::path("/dev/null")}) {
    const Status status = ReadInput(other, 1).error();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("neither a file nor a pipe"), std::string::npos);
  }
}

TEST_F(FileTest, AbandonedWriterLeavesOldFileAndNoTemporary) {
  const fs::path path = directory_ / "a";
  ASSERT_TRUE(WriteFileAtomically(path, "old").ok());
  {
    auto writer = AtomicFileWriter::Create(path);
    ASSERT_TRUE(writer.has_value());
    ASSERT_TRUE(writer->Write("new").ok());
  }
  EXPECT_EQ(*ReadFile(path, 100), "old");
  EXPECT_EQ(NumFiles(), 1u);
}

TEST_F(FileTest, FullDiskIsAStatusAndLeavesNothing) {
  // A file-size limit stands in for a full disk: write fails half way in the same manner.
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit old{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
  const rlimit small{4096, old.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const Status status = WriteFileAtomically(directory_ / "big", std::string(100000, 'x'));
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old), 0);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status.ToString();
  EXPECT_EQ(NumFiles(), 0u);
}

}  // namespace
}  // namespace oscar
