#include "sandbox/sandbox.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace oscar {
namespace {

namespace fs = std::filesystem;

class SandboxTest : public testing::Test {
 protected:
  void SetUp() override {
    if (std::system("python3 -c pass") != 0) GTEST_SKIP() << "no python3";
    limits_.seconds = 5;
    limits_.memory_bytes = uint64_t{512} << 20;
    victim_ = fs::temp_directory_path() / fmt::format("oscar_sandbox_test_{}", getpid());
    std::ofstream(victim_) << "precious";
    ASSERT_EQ(chmod(victim_.c_str(), 0640), 0);
    const timespec times[2] = {{1000, 0}, {1000, 0}};
    ASSERT_EQ(utimensat(AT_FDCWD, victim_.c_str(), times, 0), 0);
  }
  void TearDown() override { fs::remove(victim_); }

  SandboxResult RunProgram(const std::string& program) const {
    const auto result = RunPython({{"program.py", program}}, limits_);
    EXPECT_TRUE(result.has_value()) << result.error().ToString();
    return result.has_value() ? *result : SandboxResult{};
  }
  SandboxResult RunProgram(const std::string& program, double seconds) {
    limits_.seconds = seconds;
    return RunProgram(program);
  }

  // Every statement must end in an OSError; `victim` is a path in them.
  void ExpectRefused(const std::vector<std::string>& statements) const {
    std::string program =
        "import ctypes, fcntl, os, resource, signal\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "def call(*numbers):\n"
        "    if libc.syscall(*numbers) < 0: raise OSError(ctypes.get_errno(), 'refused')\n"
        "def attempt(statement):\n"
        "    try: exec(statement)\n"
        "    except OSError: pass\n"
        "    except Exception as error: print(statement, repr(error))\n"
        "    else: print('not refused:', statement)\n"
        "victim = '" +
        victim_.string() + "'\n";
    for (const std::string& statement : statements) {
      program += "attempt(r\"\"\"" + statement + "\"\"\")\n";
    }
    const SandboxResult result = RunProgram(program + "print('end')\n");
    EXPECT_EQ(result.output, "end\n");
  }
  void ExpectVictimIsWhole() const {
    std::ifstream file(victim_);
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), "precious");
    struct stat status;
    ASSERT_EQ(stat(victim_.c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 07777u, 0640u);
    EXPECT_EQ(status.st_mtime, 1000);
    EXPECT_EQ(status.st_nlink, 1u);
  }

  SandboxLimits limits_;
  fs::path victim_;
};

TEST_F(SandboxTest, RunsAndReports) {
  const SandboxResult good = RunProgram("print(6 * 7)");
  EXPECT_EQ(good.exit_code, 0);
  EXPECT_EQ(good.output, "42\n");
  const SandboxResult bad = RunProgram("assert False, 'wrong'");
  EXPECT_EQ(bad.exit_code, 1);
  EXPECT_NE(bad.output.find("wrong"), std::string::npos);
  EXPECT_FALSE(bad.timed_out);
  for (const int code : {125, 126, 127}) {  // a program's own, no word on the sandbox
    EXPECT_EQ(RunProgram(fmt::format("import sys\nsys.exit({})", code)).exit_code, code);
  }
}

TEST_F(SandboxTest, RunsTheSameWayEveryTime) {
  const std::string program = "print(hash('a'), list({'a', 'b', 'c', 'd', 'e', 'f', 'g'}))";
  EXPECT_EQ(RunProgram(program).output, RunProgram(program).output);
}

TEST_F(SandboxTest, StopsEndlessLoops) {
  EXPECT_TRUE(RunProgram("while True: pass", 0.2).timed_out);
  EXPECT_TRUE(RunProgram("import time\ntime.sleep(60)", 0.2).timed_out);
  EXPECT_TRUE(
      RunProgram("import os,time\nos.close(1)\nos.close(2)\ntime.sleep(60)", 0.2).timed_out);
  EXPECT_TRUE(RunProgram("import os,signal\nos.kill(os.getpid(), signal.SIGSTOP)", 0.2).timed_out);
}

TEST_F(SandboxTest, BoundsMemoryAndOutput) {
  const SandboxResult memory = RunProgram("x = bytearray(1 << 30)");
  EXPECT_NE(memory.exit_code, 0);
  EXPECT_NE(memory.output.find("MemoryError"), std::string::npos);
  const SandboxResult output = RunProgram("import sys\nfor i in range(20000): print('x' * 100)");
  EXPECT_EQ(output.exit_code, 0);
  EXPECT_EQ(output.output.size(), SandboxLimits{}.output_bytes);
  // Root could raise its own limits.
  const SandboxResult raised = RunProgram(
      "import resource\n"
      "resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))");
  EXPECT_EQ(raised.exit_code, 1) << raised.output;
}

TEST_F(SandboxTest, HasNoNetworkAndNoChildren) {
  for (const char* program :
       {"import socket\nsocket.socket()", "import socket\nsocket.socketpair()",
        "import os\nos.fork()", "import os\nos.kill(1, 0)",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.posix_spawn('/bin/true', ['true'], {})",
        "import multiprocessing as m\nm.get_context('fork').Process(target=print).start()"}) {
    const SandboxResult result = RunProgram(program);
    EXPECT_EQ(result.exit_code, 1) << program << "\n" << result.output;
    EXPECT_NE(result.output.find("PermissionError"), std::string::npos) << result.output;
  }
  const SandboxResult threads = RunProgram(
      "import threading\nt = threading.Thread(target=print, args=('ok',))\nt.start()\nt.join()");
  EXPECT_EQ(threads.output, "ok\n");
}

// As the kernel has it, as Debian 12's has it, and without.
TEST_F(SandboxTest, LeavesOtherFilesAlone) {
  const std::vector<std::optional<int>> versions = {{}, 2, 0};
  for (const std::optional<int>& version : versions) {
    limits_.landlock = version;
    SCOPED_TRACE(version.value_or(-1));
    ExpectRefused({"open(victim, 'w')",
                   "open(victim, 'a')",
                   "open(victim, 'r+')",
                   "os.truncate(victim, 0)",
                   "os.open(victim, os.O_RDONLY | os.O_TRUNC)",
                   "os.open(victim, 3 | os.O_TRUNC)",
                   "os.unlink(victim)",
                   "os.rename(victim, 'mine')",
                   "open('mine', 'w'); os.rename('mine', victim)",
                   "os.link(victim, 'mine')",
                   "os.symlink('x', victim + '.link')",
                   "os.mkdir(victim + '.d')",
                   "os.chmod(victim, 0)",
                   "os.chmod(os.open(victim, os.O_RDONLY), 0)",
                   "os.chown(victim, os.getuid(), os.getgid())",
                   "os.utime(victim)",
                   "os.setxattr(victim, 'user.x', b'y')",
                   "os.mkfifo(victim + '.fifo')",
                   "os.symlink(victim, 'way'); open('way', 'w')",
                   "open('/dev/shm/oscar_sandbox_test', 'w')"});
    ExpectVictimIsWhole();
  }
}

TEST_F(SandboxTest, WritesIntoItsOwnDirectory) {
  if (!SandboxWarning().empty()) GTEST_SKIP() << SandboxWarning();
  const std::string program =
      "import os, shutil, tempfile\n"
      "open('here', 'w').write('x'); open('here', 'a').write('y'); print(open('here').read())\n"
      "os.mkdir('d'); os.rename('here', 'there'); print(os.path.exists('there'))\n"
      "with tempfile.TemporaryFile() as f: f.write(b'1'); f.seek(0); print(f.read())\n"
      "with tempfile.TemporaryDirectory() as d: open(d + '/a', 'w').write('2')\n"
      "open(os.devnull, 'w').write('x'); shutil.rmtree('d'); print(sorted(os.listdir('.')))\n";
  const std::string expected = "xy\nTrue\nb'1'\n['program.py', 'there']\n";
  EXPECT_EQ(RunProgram(program).output, expected);
  limits_.landlock = 1;
  EXPECT_EQ(RunProgram(program).output, expected);
  limits_.landlock = 0;
  const SandboxResult none = RunProgram(program);
  EXPECT_NE(none.output.find("PermissionError"), std::string::npos) << none.output;
}

TEST_F(SandboxTest, SaysWhatItLacks) {
  EXPECT_EQ(SandboxWarning(1), "");
  EXPECT_NE(SandboxWarning(0).find("no Landlock"), std::string::npos);
}

TEST_F(SandboxTest, BoundsFilesAndThreads) {
  if (!SandboxWarning().empty()) GTEST_SKIP() << SandboxWarning();
  limits_.directory_bytes = uint64_t{8} << 20;
  limits_.written_bytes = uint64_t{16} << 20;
  limits_.files = 100;
  limits_.threads = 20;
  limits_.seconds = 60;  // the watch ends these, not the time
  const std::string sleep = "\nimport time\ntime.sleep(60)";
  std::vector<std::string> programs = {
      "for i in range(9): open(f'f{i}', 'wb').write(b'x' * (1 << 20))",
      "for i in range(101): open(f'f{i}', 'wb')",
      "import os\nfor i in range(40): os.mkdir('d'); os.chdir('d')",
      "import threading, time\nthreading.stack_size(1 << 16)\n"
      "for i in range(30): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"};
  if (std::ifstream("/proc/self/io").good()) {  // the kernel counts what a process writes
    programs.emplace_back("for i in range(20): print('x' * (1 << 20))");
    // Removed, but held by a mapping.
    programs.emplace_back(
        "import mmap, os\nfor i in range(40):\n"
        "    f = open('f', 'w+b'); f.write(b'x' * (1 << 20)); f.flush()\n"
        "    globals()[f'm{i}'] = mmap.mmap(f.fileno(), 4096, mmap.MAP_PRIVATE)\n"
        "    f.close(); os.unlink('f')");
  }
  for (const std::string& program : programs) {
    const SandboxResult result = RunProgram(program + sleep);
    EXPECT_TRUE(result.over_limit) << program << "\n" << result.output;
    EXPECT_FALSE(result.timed_out);
  }
  EXPECT_EQ(RunProgram("for i in range(7): open(f'f{i}', 'wb').write(b'x' * (1 << 20))").exit_code,
            0);
  // Shared mappings would write without being counted.
  const SandboxResult mapped = RunProgram(
      "import mmap\nf = open('f', 'w+b')\nf.truncate(4096)\nmmap.mmap(f.fileno(), 4096)");
  EXPECT_NE(mapped.output.find("PermissionError"), std::string::npos) << mapped.output;
}

// Deeper than paths and descriptors reach, and closed to their owner.
TEST_F(SandboxTest, RemovesWhatItLeft) {
  if (!SandboxWarning().empty()) GTEST_SKIP() << SandboxWarning();
  const SandboxResult result = RunProgram(
      "import os\nprint(os.getcwd(), flush=True)\nos.mkdir('closed', 0o300)\n"
      "open('closed/file', 'w')\nname = 'd' * 200\n"
      "for i in range(1500): os.mkdir(name, 0o700); os.chdir(name)\n");
  const size_t line = result.output.find('\n');
  ASSERT_NE(line, std::string::npos) << result.output;
  EXPECT_FALSE(fs::exists(result.output.substr(0, line)));
}

// Names that the removal might give itself are in its way, listed in either order.
TEST_F(SandboxTest, RemovesWhatStandsInItsWay) {
  if (!SandboxWarning().empty()) GTEST_SKIP() << SandboxWarning();
  for (const char* make : {"os.makedirs('.moved-0'); os.makedirs('.moved-1/d')\n",
                           "os.makedirs('.moved-1/d'); os.makedirs('.moved-0')\n"}) {
    const SandboxResult result =
        RunProgram(std::string("import os\nprint(os.getcwd(), flush=True)\n") + make +
                   "open('.moved-0/f', 'w')\n");
    const size_t line = result.output.find('\n');
    ASSERT_NE(line, std::string::npos) << result.output;
    EXPECT_FALSE(fs::exists(result.output.substr(0, line)));
  }
}

TEST_F(SandboxTest, NeedsADirectoryForTemporaryFiles) {
  const char* const before = std::getenv("TMPDIR");
  const std::string kept = before == nullptr ? "" : before;
  setenv("TMPDIR", "/nonexistent", 1);
  const auto result = RunPython({{"program.py", "pass"}}, limits_);
  before == nullptr ? unsetenv("TMPDIR") : setenv("TMPDIR", kept.c_str(), 1);
  ASSERT_FALSE(result.has_value());
  EXPECT_NE(result.error().message().find("TMPDIR"), std::string::npos);
}

// Else their limits of time would be those of a share of a processor.
TEST_F(SandboxTest, RunsNoMoreAtOnceThanThereAreProcessors) {
  const int processors = std::max(static_cast<int>(std::thread::hardware_concurrency()), 1);
  const int count = 3 * processors + 1;
  std::vector<std::pair<double, int>> changes(2 * static_cast<size_t>(count));
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      const auto result = RunPython({{"program.py",
                                      "import time\nbegin = time.monotonic()\ntime.sleep(0.3)\n"
                                      "print(begin, time.monotonic())"}},
                                    limits_);
      double begin = 0, end = 0;
      if (result.has_value()) std::istringstream(result->output) >> begin >> end;
      EXPECT_GT(end, begin);
      changes[2 * static_cast<size_t>(i)] = {begin, 1};
      changes[2 * static_cast<size_t>(i) + 1] = {end, -1};
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::sort(changes.begin(), changes.end());
  int running = 0, most = 0;
  for (const auto& [time, change] : changes) most = std::max(most, running += change);
  EXPECT_LE(most, processors);
}

TEST_F(SandboxTest, OnlyTheSecretConfirms) {
  const SandboxResult good =
      RunProgram("import os, time\nos.write(3, os.read(0, 64))\ntime.sleep(60)");
  EXPECT_TRUE(good.confirmed);
  EXPECT_FALSE(good.timed_out);
  EXPECT_FALSE(RunProgram("print(open(0).read())").confirmed);
  EXPECT_FALSE(RunProgram("import os\nos.write(3, b'0' * 32)").confirmed);
  EXPECT_FALSE(RunProgram("import os\nos.write(3, os.read(0, 64) + b'x')").confirmed);
}

TEST_F(SandboxTest, LeavesOtherProcessesAlone) {
  const auto call = [](long number, const char* arguments) {
    return fmt::format("call({}, {})", number, arguments);
  };
  ExpectRefused(
      {"os.kill(os.getppid(), 0)",
       "os.kill(0, 0)",
       "os.kill(-1, 0)",
       "os.killpg(os.getpgid(os.getppid()), 0)",
       call(SYS_tgkill, "os.getppid(), os.getppid(), 0"),
       call(SYS_tkill, "os.getppid(), 0"),
       call(SYS_rt_sigqueueinfo, "os.getppid(), 0, b'\\0' * 8 + b'\\xff' * 4 + b'\\0' * 116"),
       call(SYS_rt_tgsigqueueinfo,
            "os.getppid(), os.getppid(), 0, b'\\0' * 8 + b'\\xff' * 4 + b'\\0' * 116"),
       call(SYS_pidfd_open, "os.getppid(), 0"),
       "fcntl.fcntl(1, fcntl.F_SETOWN, os.getppid())",
       "fcntl.fcntl(1, 10, 9)",               // F_SETSIG
       "fcntl.ioctl(1, 0x8901, b'\\0' * 4)",  // FIOSETOWN
       "resource.prlimit(os.getppid(), resource.RLIMIT_CORE)",
       "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
       "os.sched_setaffinity(os.getppid(), os.sched_getaffinity(0))",
       "os.sched_setscheduler(os.getppid(), os.SCHED_OTHER, os.sched_param(0))",
       call(SYS_ioprio_set, "1, os.getppid(), 0"),
       call(SYS_shmget, "0x5151, 4096, 0o1600"),
       call(SYS_msgget, "0x5151, 0o1600"),
       call(SYS_semget, "0x5151, 1, 0o1600"),
       call(SYS_ptrace, "16, os.getppid(), 0, 0"),
       call(SYS_process_vm_readv, "os.getppid(), 0, 0, 0, 0, 0"),
       call(SYS_unshare, "0x10000000"),
       call(SYS_io_uring_setup, "1, b'\\0' * 120"),
       call(SYS_userfaultfd, "1"),
       call(SYS_keyctl, "0, -3, 1"),
       call(SYS_add_key, "b'user', b'x', b'y', 1, -3"),
       call(SYS_bpf, "0, 0, 0"),
       call(SYS_perf_event_open, "0, 0, 0, 0, 0"),
       call(SYS_setsid, "0"),
       "libc.prctl(1, 0) and call(-1)"});  // PR_SET_PDEATHSIG
  EXPECT_EQ(RunProgram("import os, signal, threading\n"
                       "signal.signal(signal.SIGUSR1, lambda *_: print('signal'))\n"
                       "os.kill(os.getpid(), signal.SIGUSR1)\n"
                       "signal.raise_signal(signal.SIGUSR1)\n"
                       "signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)\n")
                .output,
            "signal\nsignal\nsignal\n");
  EXPECT_EQ(RunProgram("import os\nos.abort()").exit_code, -1);
}

TEST_F(SandboxTest, OrdinaryPrograms) {
  const SandboxResult result = RunProgram(
      "import array, ast, asyncio.events, base64, bisect, collections, concurrent.futures, "
      "contextlib\n"
      "import copy, csv, ctypes, dataclasses, datetime, decimal, difflib, enum, fractions, "
      "functools\n"
      "import glob, hashlib, heapq, html, inspect, io, itertools, json, locale, logging, math\n"
      "import operator, os, pathlib, pickle, platform, pprint, queue, random, re, secrets, select\n"
      "import shutil, signal, statistics, string, struct, sys, tempfile, textwrap, threading, "
      "time\n"
      "import traceback, types, typing, unittest, urllib.parse, uuid, zlib, zoneinfo\n"
      "random.shuffle(list(range(9))); random.SystemRandom().random(); uuid.uuid4()\n"
      "decimal.Decimal(1) / 3, fractions.Fraction(1, 3), datetime.datetime.now(), "
      "time.localtime()\n"
      "hashlib.sha256(b'').hexdigest(), platform.platform(), os.cpu_count(), os.getcwd()\n"
      "with concurrent.futures.ThreadPoolExecutor(4) as pool:\n"
      "    assert sum(pool.map(abs, range(-9, 9))) == 81\n"
      "class Case(unittest.TestCase):\n"
      "    def test(self): self.assertEqual(pathlib.Path('program.py').is_file(), True)\n"
      "assert unittest.main(argv=['x'], exit=False).result.wasSuccessful()\n"
      "signal.setitimer(signal.ITIMER_REAL, 0.01)\n"
      "signal.signal(signal.SIGALRM, lambda *_: print('fine'))\n"
      "signal.pause()\n");
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_TRUE(result.output.ends_with("fine\n")) << result.output;
  limits_.memory_bytes = SandboxLimits{}.memory_bytes;
  limits_.seconds = 20;
  if (std::system("python3 -c 'import numpy' 2>/dev/null") != 0) return;
  const SandboxResult numpy = RunProgram(
      "import numpy as np\nx = np.random.default_rng(0).random((64, 64))\n"
      "print(np.allclose(np.linalg.inv(x) @ x, np.eye(64)))\n");
  EXPECT_EQ(numpy.output, "True\n");
}

}  // namespace
}  // namespace oscar
