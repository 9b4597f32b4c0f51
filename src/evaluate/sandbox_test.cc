#include "evaluate/sandbox.h"

#include <gtest/gtest.h>

#include <filesystem>

namespace oscar {
namespace {

SandboxResult RunProgram(const std::string& program, double seconds = 5) {
  SandboxLimits limits;
  limits.seconds = seconds;
  limits.memory_bytes = uint64_t{512} << 20;
  const auto result = RunPython({{"program.py", program}}, limits);
  EXPECT_TRUE(result.has_value()) << result.error().ToString();
  return result.has_value() ? *result : SandboxResult{};
}

class SandboxTest : public testing::Test {
 protected:
  void SetUp() override {
    if (std::system("python3 -c pass") != 0) GTEST_SKIP() << "no python3";
  }
};

TEST_F(SandboxTest, RunsAndReports) {
  const SandboxResult good = RunProgram("print(6 * 7)");
  EXPECT_EQ(good.exit_code, 0);
  EXPECT_EQ(good.output, "42\n");
  const SandboxResult bad = RunProgram("assert False, 'wrong'");
  EXPECT_EQ(bad.exit_code, 1);
  EXPECT_NE(bad.output.find("wrong"), std::string::npos);
  EXPECT_FALSE(bad.timed_out);
}

TEST_F(SandboxTest, StopsEndlessLoops) {
  EXPECT_TRUE(RunProgram("while True: pass", 0.5).timed_out);
  EXPECT_TRUE(RunProgram("import time\ntime.sleep(60)", 0.5).timed_out);
  EXPECT_TRUE(
      RunProgram("import os,time\nos.close(1)\nos.close(2)\ntime.sleep(60)", 0.5).timed_out);
}

TEST_F(SandboxTest, BoundsMemoryAndOutput) {
  const SandboxResult memory = RunProgram("x = bytearray(1 << 30)");
  EXPECT_NE(memory.exit_code, 0);
  EXPECT_NE(memory.output.find("MemoryError"), std::string::npos);
  const SandboxResult output = RunProgram("import sys\nfor i in range(20000): print('x' * 100)");
  EXPECT_EQ(output.exit_code, 0);
  EXPECT_EQ(output.output.size(), SandboxLimits{}.output_bytes);
}

TEST_F(SandboxTest, HasNoNetworkAndNoChildren) {
  for (const char* program :
       {"import socket\nsocket.socket()", "import socket\nsocket.socketpair()",
        "import os\nos.fork()", "import os\nos.kill(1, 0)",
        "import subprocess\nsubprocess.run(['true'])"}) {
    const SandboxResult result = RunProgram(program);
    EXPECT_EQ(result.exit_code, 1) << program << "\n" << result.output;
    EXPECT_NE(result.output.find("PermissionError"), std::string::npos) << result.output;
  }
  const SandboxResult threads = RunProgram(
      "import threading\nt = threading.Thread(target=print, args=('ok',))\nt.start()\nt.join()");
  EXPECT_EQ(threads.output, "ok\n");
}

TEST_F(SandboxTest, WritesOnlyIntoItsOwnDirectory) {
  EXPECT_EQ(RunProgram("open('here', 'w').write('x'); print(open('here').read())").output, "x\n");
  const auto outside = std::filesystem::temp_directory_path() / "oscar_sandbox_test_outside";
  std::filesystem::remove(outside);
  const SandboxResult result = RunProgram("open('" + outside.string() + "', 'w').write('x')");
  if (result.exit_code == 0) GTEST_SKIP() << "the kernel has no Landlock";
  EXPECT_FALSE(std::filesystem::exists(outside));
}

}  // namespace
}  // namespace oscar
