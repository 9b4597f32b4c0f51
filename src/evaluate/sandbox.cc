#include "evaluate/sandbox.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/landlock.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/check.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

#if defined(__x86_64__)
constexpr uint32_t kArchitecture = AUDIT_ARCH_X86_64;
#elif defined(__aarch64__)
constexpr uint32_t kArchitecture = AUDIT_ARCH_AARCH64;
#else
constexpr uint32_t kArchitecture = 0;
#endif

// Refused with EPERM: networks, other processes, the system's state.
constexpr std::array kRefused = {
    SYS_socket,
    SYS_socketpair,
    SYS_ptrace,
    SYS_kill,
    SYS_process_vm_readv,
    SYS_process_vm_writev,
    SYS_mount,
    SYS_umount2,
    SYS_unshare,
    SYS_setns,
    SYS_chroot,
    SYS_pivot_root,
    SYS_bpf,
    SYS_perf_event_open,
    SYS_add_key,
    SYS_keyctl,
    SYS_request_key,
    SYS_reboot,
    SYS_init_module,
    SYS_finit_module,
    SYS_kexec_load,
    SYS_io_uring_setup,
    SYS_pidfd_open,
    SYS_pidfd_send_signal,
#if defined(SYS_fork)
    SYS_fork,
    SYS_vfork,
#endif
};

constexpr size_t kFilterSize = 13 + 2 * kRefused.size();
constexpr uint32_t kX32 = 0x40000000;  // numbers of x86's third interface start here
using Filter = std::array<sock_filter, kFilterSize>;

Filter MakeFilter() {
  Filter out{};
  size_t at = 0;
  const auto load = [&](size_t offset) {
    out[at++] = BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<uint32_t>(offset));
  };
  const auto skip_unless = [&](uint32_t value, uint8_t count) {
    out[at++] = BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, count);
  };
  const auto give = [&](uint32_t verdict) { out[at++] = BPF_STMT(BPF_RET | BPF_K, verdict); };
  load(offsetof(seccomp_data, arch));
  out[at++] = BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kArchitecture, 1, 0);
  give(SECCOMP_RET_KILL_PROCESS);
  load(offsetof(seccomp_data, nr));
  out[at++] = BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, kX32, 0, 1);
  give(SECCOMP_RET_ERRNO | EPERM);
  for (const long number : kRefused) {
    skip_unless(static_cast<uint32_t>(number), 1);
    give(SECCOMP_RET_ERRNO | EPERM);
  }
  skip_unless(SYS_clone3, 1);
  give(SECCOMP_RET_ERRNO | ENOSYS);  // the library then takes clone, whose flags can be seen
  skip_unless(SYS_clone, 3);
  load(offsetof(seccomp_data, args));  // the low word of the flags
  out[at++] = BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, CLONE_THREAD, 1, 0);
  give(SECCOMP_RET_ERRNO | EPERM);
  give(SECCOMP_RET_ALLOW);
  OSCAR_CHECK(at == out.size());
  return out;
}

// Writing only beneath `directory`. Without Landlock in the kernel it does nothing.
void ConfineWrites(const char* directory) {
#if defined(SYS_landlock_create_ruleset)
  landlock_ruleset_attr attributes{};
  attributes.handled_access_fs = LANDLOCK_ACCESS_FS_WRITE_FILE | LANDLOCK_ACCESS_FS_REMOVE_DIR |
                                 LANDLOCK_ACCESS_FS_REMOVE_FILE | LANDLOCK_ACCESS_FS_MAKE_CHAR |
                                 LANDLOCK_ACCESS_FS_MAKE_DIR | LANDLOCK_ACCESS_FS_MAKE_REG |
                                 LANDLOCK_ACCESS_FS_MAKE_SOCK | LANDLOCK_ACCESS_FS_MAKE_FIFO |
                                 LANDLOCK_ACCESS_FS_MAKE_BLOCK | LANDLOCK_ACCESS_FS_MAKE_SYM;
  const int rules =
      static_cast<int>(syscall(SYS_landlock_create_ruleset, &attributes, sizeof(attributes), 0));
  if (rules < 0) return;
  landlock_path_beneath_attr beneath{};
  beneath.allowed_access = attributes.handled_access_fs;
  beneath.parent_fd = open(directory, O_PATH | O_CLOEXEC);
  landlock_path_beneath_attr null{};
  null.allowed_access = LANDLOCK_ACCESS_FS_WRITE_FILE;
  null.parent_fd = open("/dev/null", O_PATH | O_CLOEXEC);
  if (beneath.parent_fd < 0 || null.parent_fd < 0 ||
      syscall(SYS_landlock_add_rule, rules, LANDLOCK_RULE_PATH_BENEATH, &beneath, 0) != 0 ||
      syscall(SYS_landlock_add_rule, rules, LANDLOCK_RULE_PATH_BENEATH, &null, 0) != 0 ||
      syscall(SYS_landlock_restrict_self, rules, 0) != 0) {
    _exit(126);
  }
#else
  (void)directory;
#endif
}

// The interpreter itself: a python3 on the PATH may be a script that chooses one, which would need
// children of its own.
std::string FindPython() {
  std::string out;
  std::FILE* pipe =
      popen("python3 -I -c 'import sys; print(sys.executable)' 2>/dev/null", "r");  // NOLINT
  if (pipe == nullptr) return out;
  std::array<char, 512> buffer;
  while (std::fgets(buffer.data(), buffer.size(), pipe) != nullptr) out += buffer.data();
  if (pclose(pipe) != 0) return {};
  while (!out.empty() && out.back() == '\n') out.pop_back();
  return out;
}

void Limit(__rlimit_resource what, uint64_t value) {
  const rlimit limit{value, value};
  setrlimit(what, &limit);
}

// After fork, before exec: calls that are safe there alone.
[[noreturn]] void BecomePython(const char* python, const char* directory, const char* program,
                               int output, const SandboxLimits& limits, const Filter& filter) {
  setsid();
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const int null = open("/dev/null", O_RDONLY);
  if (chdir(directory) != 0 || null < 0 || dup2(null, 0) < 0 || dup2(output, 1) < 0 ||
      dup2(output, 2) < 0) {
    _exit(126);
  }
  syscall(SYS_close_range, 3, ~0u, 0);
  Limit(RLIMIT_CPU, static_cast<uint64_t>(std::ceil(limits.seconds)) + 1);
  Limit(RLIMIT_AS, limits.memory_bytes);
  Limit(RLIMIT_FSIZE, limits.file_bytes);
  Limit(RLIMIT_CORE, 0);
  Limit(RLIMIT_NOFILE, 64);
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) _exit(126);
  ConfineWrites(directory);
  const sock_fprog rules{static_cast<unsigned short>(filter.size()),
                         const_cast<sock_filter*>(filter.data())};
  if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &rules) != 0) _exit(126);
  const char* const arguments[] = {python, "-I", "-B", program, nullptr};
  const char* const environment[] = {"PATH=/usr/bin:/bin", "OPENBLAS_NUM_THREADS=1",
                                     "PYTHONHASHSEED=0", nullptr};
  execve(python, const_cast<char* const*>(arguments), const_cast<char* const*>(environment));
  _exit(126);
}

// A directory that goes away with everything in it.
class TemporaryDirectory {
 public:
  static Result<TemporaryDirectory> Make() {
    std::string pattern = (fs::temp_directory_path() / "oscar-sandbox-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) {
      return Unexpected(
          Unavailable(fmt::format("{}: cannot be made: {}", pattern, std::strerror(errno))));
    }
    TemporaryDirectory out;
    out.path_ = pattern;
    return out;
  }
  TemporaryDirectory(TemporaryDirectory&& other) noexcept { path_.swap(other.path_); }
  TemporaryDirectory& operator=(TemporaryDirectory&&) = delete;
  ~TemporaryDirectory() {
    std::error_code error;
    if (!path_.empty()) fs::remove_all(path_, error);
  }
  const std::string& path() const { return path_; }

 private:
  TemporaryDirectory() = default;
  std::string path_;
};

}  // namespace

Result<SandboxResult> RunPython(const std::vector<std::pair<std::string, std::string>>& files,
                                const SandboxLimits& limits) {
  if (kArchitecture == 0) {
    return Unexpected(Unimplemented("code cannot be run safely on this processor architecture"));
  }
  static const std::string python = FindPython();
  if (python.empty()) {
    return Unexpected(NotFound(
        "python3 is not on the PATH, and the tests of this task are Python: install it, or leave "
        "the task out"));
  }
  OSCAR_ASSIGN_OR_RETURN(const TemporaryDirectory directory, TemporaryDirectory::Make());
  for (const auto& [name, content] : files) {
    std::ofstream file(fs::path(directory.path()) / name, std::ios::binary);
    file << content;
    if (!file.flush()) {
      return Unexpected(
          Unavailable(fmt::format("{}/{}: cannot be written", directory.path(), name)));
    }
  }
  int pipes[2];
  if (pipe2(pipes, O_CLOEXEC) != 0) {
    return Unexpected(Unavailable(fmt::format("no pipe: {}", std::strerror(errno))));
  }
  const Filter filter = MakeFilter();
  const std::string& program = files.front().first;
  const pid_t child = fork();
  if (child < 0) {
    close(pipes[0]), close(pipes[1]);
    return Unexpected(Unavailable(fmt::format("no child process: {}", std::strerror(errno))));
  }
  if (child == 0) {
    BecomePython(python.c_str(), directory.path().c_str(), program.c_str(), pipes[1], limits,
                 filter);
  }
  close(pipes[1]);
  SandboxResult result;
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(limits.seconds));
  while (true) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) {
      result.timed_out = true;
      break;
    }
    pollfd wait{pipes[0], POLLIN, 0};
    const int ready = poll(&wait, 1, static_cast<int>(std::min<long>(left, 60000)));
    if (ready < 0 && errno != EINTR) break;
    if (ready <= 0) continue;
    std::array<char, 4096> buffer;
    const ssize_t count = read(pipes[0], buffer.data(), buffer.size());
    if (count <= 0) break;  // the child has closed both ends, which it does by ending
    const size_t room = limits.output_bytes - std::min(limits.output_bytes, result.output.size());
    result.output.append(buffer.data(), std::min(room, static_cast<size_t>(count)));
  }
  close(pipes[0]);
  int status = 0;
  if (!result.timed_out) {
    // A program may close its output and run on.
    while (waitpid(child, &status, WNOHANG) == 0) {
      if (Clock::now() >= deadline) {
        result.timed_out = true;
        break;
      }
      usleep(2000);
    }
  }
  if (result.timed_out) {
    kill(-child, SIGKILL);
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
  }
  if (WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGXCPU) result.timed_out = true;
  if (result.exit_code == 126) {
    return Unexpected(Unimplemented(
        "the system does not let a child be confined (seccomp or Landlock was refused), and code "
        "that a model wrote is not run without"));
  }
  return result;
}

}  // namespace oscar
