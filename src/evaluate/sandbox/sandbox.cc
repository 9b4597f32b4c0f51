#include "sandbox/sandbox.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <semaphore>
#include <string_view>
#include <thread>

#include "sandbox/confinement.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr int kMaxDescriptors = 64;
constexpr int kMaxDepth = 32;          // of directories
constexpr int kLookMilliseconds = 20;  // between looks at what a program uses

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

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() { Close(); }
  void Close() {
    if (number_ >= 0) close(number_);
    number_ = -1;
  }
  int get() const { return number_; }

 private:
  int number_ = -1;
};

struct Pipe {
  Descriptor read, write;
  static Result<Pipe> Make() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) {
      return Unexpected(Unavailable(fmt::format("no pipe: {}", std::strerror(errno))));
    }
    return Pipe{Descriptor(ends[0]), Descriptor(ends[1])};
  }
};

void Limit(__rlimit_resource what, uint64_t value) {
  const rlimit limit{value, value};
  setrlimit(what, &limit);
}

// What the child needs, made before fork: afterwards nothing may be allocated.
struct ChildPlan {
  std::string python, directory, program;
  std::vector<std::string> environment;
  std::vector<char*> arguments, variables;
  SandboxLimits limits;
  pid_t parent;
  int input, output, secret, trouble;  // descriptors
};

[[noreturn]] void Fail(const ChildPlan& plan, const char* step) {
  // A pipe takes so little at once.
  [[maybe_unused]] const ssize_t count = write(plan.trouble, step, std::strlen(step));
  _exit(126);
}

// After fork, before exec: calls that are safe there alone.
[[noreturn]] void BecomePython(ChildPlan& plan, Confinement& confinement) {
  setsid();
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);  // the calling thread may have blocked some
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != plan.parent) _exit(126);
  if (chdir(plan.directory.c_str()) != 0) Fail(plan, "its directory");
  // Above the numbers that are overwritten below.
  const int input = fcntl(plan.input, F_DUPFD, 16);
  const int output = fcntl(plan.output, F_DUPFD, 16);
  const int secret = fcntl(plan.secret, F_DUPFD, 16);
  const int trouble = fcntl(plan.trouble, F_DUPFD, 16);
  plan.trouble = trouble;
  constexpr int kTrouble = kSecretDescriptor + 1;
  if (dup2(input, 0) < 0 || dup2(output, 1) < 0 || dup2(output, 2) < 0 ||
      dup2(secret, kSecretDescriptor) < 0 || dup3(trouble, kTrouble, O_CLOEXEC) < 0) {
    Fail(plan, "dup2");
  }
  plan.trouble = kTrouble;
  if (syscall(SYS_close_range, kTrouble + 1, ~0u, 0) != 0) {  // a kernel before 5.9
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    const int end = static_cast<int>(std::min<rlim_t>(limit.rlim_cur, 1 << 20));
    for (int i = kTrouble + 1; i < end; ++i) close(i);
  }
  const SandboxLimits& limits = plan.limits;
  Limit(RLIMIT_CPU, static_cast<uint64_t>(std::ceil(limits.seconds)) + 1);
  Limit(RLIMIT_AS, limits.memory_bytes);
  Limit(RLIMIT_FSIZE, limits.file_bytes);
  Limit(RLIMIT_CORE, 0);
  Limit(RLIMIT_NOFILE, kMaxDescriptors);
  if (const char* step = confinement.Enter(plan.directory.c_str()); step != nullptr) {
    Fail(plan, step);
  }
  execve(plan.python.c_str(), plan.arguments.data(), plan.variables.data());
  Fail(plan, "starting python3");
}

Result<std::string> MakeSecret() {
  std::array<unsigned char, kSecretBytes / 2> bytes;
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    return Unexpected(
        Unavailable(fmt::format("no random bytes of the system: {}", std::strerror(errno))));
  }
  std::string out;
  for (const unsigned char byte : bytes) out += fmt::format("{:02x}", byte);
  return out;
}

// A directory that goes away with everything in it.
class TemporaryDirectory {
 public:
  static Result<TemporaryDirectory> Make() {
    std::error_code error;
    const fs::path parent = fs::temp_directory_path(error);
    if (error) {
      return Unexpected(Unavailable(fmt::format(
          "no directory for temporary files ({}); name one with TMPDIR", error.message())));
    }
    std::string pattern = (parent / "oscar-sandbox-XXXXXX").string();
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
    if (path_.empty()) return;
    const Descriptor top(open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    // A tree may be deeper than descriptors and path lengths reach, and its directories closed to
    // us: their children move up to the top until none is left. The program has ended, and could
    // not know their names there.
    const std::string names = MakeSecret().value_or(".moved");
    int64_t moved = 0;
    while (EmptyOnce(top.get(), top.get(), names, moved)) {
    }
    rmdir(path_.c_str());
  }
  const std::string& path() const { return path_; }

 private:
  TemporaryDirectory() = default;

  // Removes the files of `directory`, and moves its directories to `top` or, where it is the top,
  // empties and removes them. True where it got any further.
  static bool EmptyOnce(int top, int directory, const std::string& new_names, int64_t& moved) {
    DIR* const list = fdopendir(openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (list == nullptr) return false;
    std::vector<std::string> names;
    while (const dirent* entry = readdir(list)) names.emplace_back(entry->d_name);
    closedir(list);
    bool progress = false;
    for (const std::string& name : names) {
      if (name == "." || name == "..") continue;
      if (unlinkat(directory, name.c_str(), 0) == 0) {
        progress = true;
        continue;
      }
      fchmodat(directory, name.c_str(), 0700, 0);  // a directory: all else is gone
      if (directory != top) {
        const std::string unique = fmt::format("{}-{}", new_names, moved++);
        progress |= renameat(directory, name.c_str(), top, unique.c_str()) == 0;
        continue;
      }
      const Descriptor child(
          openat(top, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
      if (child.get() >= 0) EmptyOnce(top, child.get(), new_names, moved);
      progress |= unlinkat(top, name.c_str(), AT_REMOVEDIR) == 0;
    }
    return progress;
  }

  std::string path_;
};

// Programs have limits of time, so no more of them run at once than there are processors, however
// many threads ask.
class ProcessorSlot {
 public:
  ProcessorSlot() { Slots().acquire(); }
  ~ProcessorSlot() { Slots().release(); }
  ProcessorSlot(const ProcessorSlot&) = delete;
  ProcessorSlot& operator=(const ProcessorSlot&) = delete;

 private:
  static std::counting_semaphore<>& Slots() {
    static std::counting_semaphore<> slots(
        std::max(static_cast<int>(std::thread::hardware_concurrency()), 1));
    return slots;
  }
};

// Runs that are not over, so that the end of the process can wait for them to clear up.
class RunningSandbox {
 public:
  RunningSandbox() {
    std::unique_lock lock(Shared().mutex);
    StayIfEnding(lock);
    ++Shared().running;
  }
  ~RunningSandbox() {
    std::unique_lock lock(Shared().mutex);
    --Shared().running;
    Shared().changed.notify_all();
    StayIfEnding(lock);
  }
  RunningSandbox(const RunningSandbox&) = delete;
  RunningSandbox& operator=(const RunningSandbox&) = delete;

  static bool IsEnding() { return Shared().is_ending.load(std::memory_order_relaxed); }
  static void EndAll() {
    // A kill takes moments; a file system that hangs must not keep the process.
    constexpr auto kPatience = std::chrono::seconds(5);
    std::unique_lock lock(Shared().mutex);
    Shared().is_ending.store(true, std::memory_order_relaxed);
    Shared().changed.wait_for(lock, kPatience, [] { return Shared().running == 0; });
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    int running = 0;
    std::atomic<bool> is_ending{false};
  };
  // Never destroyed: threads stay in it when the process ends.
  static State& Shared() {
    static State& state = *new State;
    return state;
  }
  static void StayIfEnding(std::unique_lock<std::mutex>& lock) {
    while (IsEnding()) Shared().changed.wait(lock);
  }
};

struct Usage {
  int64_t files = 0;
  uint64_t bytes = 0;
  bool hidden = false;  // something cannot be counted
};

// Beneath `directory`, which it closes; what changes meanwhile is counted at the next look.
void CountFiles(Descriptor directory, int depth, int64_t max_files, Usage& usage) {
  if (directory.get() < 0) {
    usage.hidden |= errno != ENOENT && errno != ENOTDIR && errno != ELOOP;
    return;
  }
  if (depth > kMaxDepth) {
    usage.hidden = true;
    return;
  }
  DIR* const list = fdopendir(fcntl(directory.get(), F_DUPFD_CLOEXEC, 0));
  if (list == nullptr) return;
  while (const dirent* entry = readdir(list)) {
    const std::string_view name = entry->d_name;
    if (name == "." || name == "..") continue;
    struct stat status;
    if (fstatat(directory.get(), entry->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0) continue;
    usage.bytes += static_cast<uint64_t>(status.st_blocks) * 512;
    if (++usage.files > max_files || usage.hidden) break;
    if (S_ISDIR(status.st_mode)) {
      CountFiles(Descriptor(openat(directory.get(), entry->d_name,
                                   O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)),
                 depth + 1, max_files, usage);
    }
  }
  closedir(list);
}

// Bytes that the process has given to write and its like; 0 where the kernel does not count them.
uint64_t WrittenBytes(pid_t child) {
  std::ifstream file(fmt::format("/proc/{}/io", child));
  std::string name;
  uint64_t value = 0;
  while (file >> name >> value) {
    if (name == "wchar:") return value;
  }
  return 0;
}

int64_t CountThreads(pid_t child) {
  struct stat status;
  const std::string path = fmt::format("/proc/{}/task", child);
  return stat(path.c_str(), &status) == 0 ? static_cast<int64_t>(status.st_nlink) - 2 : 0;
}

bool IsOverLimit(pid_t child, const std::string& directory, const SandboxLimits& limits) {
  Usage usage;
  CountFiles(Descriptor(open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)), 0,
             limits.files, usage);
  return usage.hidden || usage.files > limits.files || usage.bytes > limits.directory_bytes ||
         WrittenBytes(child) > limits.written_bytes || CountThreads(child) > limits.threads;
}

// Reads what is there, at most until `limit` is kept; closes at the end of the stream.
void Drain(Descriptor& from, size_t limit, std::string& kept) {
  std::array<char, 4096> buffer;
  const ssize_t count = read(from.get(), buffer.data(), buffer.size());
  if (count < 0 && errno == EINTR) return;
  if (count <= 0) return from.Close();
  const size_t room = limit - std::min(limit, kept.size());
  kept.append(buffer.data(), std::min(room, static_cast<size_t>(count)));
}

// Until the child has ended, and ends it where it has to.
SandboxResult Watch(pid_t child, Descriptor output, Descriptor answer, const std::string& secret,
                    const std::string& directory, const SandboxLimits& limits) {
  SandboxResult result;
  std::string said;
  const auto start = Clock::now();
  const auto deadline = start + std::chrono::duration_cast<Clock::duration>(
                                    std::chrono::duration<double>(limits.seconds));
  const auto pause = std::chrono::milliseconds(kLookMilliseconds);
  auto next_look = start + pause;
  int status = 0;
  bool ended = false;
  while (!ended) {
    // A program may close its output and run on.
    const bool silent = output.get() < 0 && answer.get() < 0;
    std::array<pollfd, 2> streams = {{{output.get(), POLLIN, 0}, {answer.get(), POLLIN, 0}}};
    const int ready = poll(streams.data(), streams.size(), silent ? 1 : kLookMilliseconds);
    if (ready > 0 && streams[0].revents != 0) Drain(output, limits.output_bytes, result.output);
    if (ready > 0 && streams[1].revents != 0) Drain(answer, kSecretBytes + 1, said);
    result.confirmed = said == secret;
    const auto now = Clock::now();
    if (now >= next_look) {
      result.over_limit = IsOverLimit(child, directory, limits);
      next_look = Clock::now() + pause;
    }
    result.timed_out = !result.confirmed && now >= deadline;
    if (result.confirmed || result.over_limit || result.timed_out || RunningSandbox::IsEnding()) {
      kill(child, SIGKILL);
      waitpid(child, &status, 0);
      ended = true;
    } else if (silent) {
      ended = waitpid(child, &status, WNOHANG) != 0;
    }
  }
  if (WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGXCPU) result.timed_out = true;
  return result;
}

}  // namespace

Result<SandboxResult> RunPython(const std::vector<std::pair<std::string, std::string>>& files,
                                const SandboxLimits& limits) {
  if (!Confinement::IsSupported()) {
    return Unexpected(Unimplemented("code cannot be run safely on this processor architecture"));
  }
  static const std::string python = FindPython();
  if (python.empty()) {
    return Unexpected(NotFound(
        "python3 is not on the PATH, and the tests of this task are Python: install it, or leave "
        "the task out"));
  }
  const ProcessorSlot slot;
  const RunningSandbox running;
  OSCAR_ASSIGN_OR_RETURN(const TemporaryDirectory directory, TemporaryDirectory::Make());
  for (const auto& [name, content] : files) {
    std::ofstream file(fs::path(directory.path()) / name, std::ios::binary);
    file << content;
    if (!file.flush()) {
      return Unexpected(
          Unavailable(fmt::format("{}/{}: cannot be written", directory.path(), name)));
    }
  }
  OSCAR_ASSIGN_OR_RETURN(const std::string secret, MakeSecret());
  OSCAR_ASSIGN_OR_RETURN(Pipe input, Pipe::Make());
  OSCAR_ASSIGN_OR_RETURN(Pipe output, Pipe::Make());
  OSCAR_ASSIGN_OR_RETURN(Pipe answer, Pipe::Make());
  OSCAR_ASSIGN_OR_RETURN(Pipe trouble, Pipe::Make());
  if (write(input.write.get(), secret.data(), secret.size()) !=
      static_cast<ssize_t>(secret.size())) {
    return Unexpected(Unavailable(fmt::format("no pipe: {}", std::strerror(errno))));
  }
  input.write.Close();

  static const int landlock = LandlockVersion();
  Confinement confinement(std::min(landlock, limits.landlock.value_or(landlock)));
  ChildPlan plan;
  plan.python = python;
  plan.directory = directory.path();
  plan.program = files.front().first;
  // The order of a set of strings is the same in every run. A thread's own heap would take much of
  // the address space, which is what is limited.
  plan.environment = {"PATH=/usr/bin:/bin",     "LC_ALL=C.UTF-8",     "OPENBLAS_NUM_THREADS=1",
                      "OMP_NUM_THREADS=1",      "PYTHONHASHSEED=0",   "PYTHONSAFEPATH=1",
                      "HOME=" + plan.directory, "MALLOC_ARENA_MAX=1", "TMPDIR=" + plan.directory};
  static char no_site[] = "-s", no_bytecode[] = "-B";
  plan.arguments = {plan.python.data(), no_site, no_bytecode, plan.program.data(), nullptr};
  for (std::string& variable : plan.environment) plan.variables.push_back(variable.data());
  plan.variables.push_back(nullptr);
  plan.limits = limits;
  plan.parent = getpid();
  plan.input = input.read.get();
  plan.output = output.write.get();
  plan.secret = answer.write.get();
  plan.trouble = trouble.write.get();
  const pid_t child = fork();
  if (child < 0) {
    return Unexpected(Unavailable(fmt::format("no child process: {}", std::strerror(errno))));
  }
  if (child == 0) BecomePython(plan, confinement);
  input.read.Close();
  output.write.Close();
  answer.write.Close();
  trouble.write.Close();
  std::string failed;
  while (trouble.read.get() >= 0) Drain(trouble.read, 256, failed);  // to exec, which closes it
  if (!failed.empty()) {
    waitpid(child, nullptr, 0);
    return Unexpected(Unimplemented(fmt::format(
        "the system does not let a child be confined ({} failed), and code that a model wrote is "
        "not run without",
        failed)));
  }
  return Watch(child, std::move(output.read), std::move(answer.read), secret, directory.path(),
               limits);
}

void EndSandboxes() { RunningSandbox::EndAll(); }

std::string SandboxWarning(std::optional<int> landlock) {
  if (landlock.value_or(LandlockVersion()) > 0) return {};
  return "this kernel has no Landlock (Linux 5.13, not forbidden by the container): code that a "
         "model wrote runs without the right to open any file for writing, so that a solution that "
         "writes files fails";
}

}  // namespace oscar
