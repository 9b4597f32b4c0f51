// Frames on a socket: numbers of 64 bits in the machine's order, then bytes. First the vocabulary,
// then one spec and one answer after another.
#include "grammar/worker.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <malloc.h>
#include <poll.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "base/log.h"
#include "grammar/local_compiler.h"
#include "grammar/thread_time.h"

extern char** environ;  // NOLINT(readability-redundant-declaration)

namespace oscar {
namespace {

// Of starting the process and reading the vocabulary there.
constexpr auto kStartTime = std::chrono::seconds(30);
constexpr uint64_t kMaxMessageBytes = 64 << 10;

void PutNumber(uint64_t value, std::string* out) {
  out->append(reinterpret_cast<const char*>(&value), sizeof(value));
}
void PutBytes(std::string_view bytes, std::string* out) {
  PutNumber(bytes.size(), out);
  out->append(bytes);
}

// What a worker is told first.
std::string Greeting(const GrammarVocabulary& vocabulary, const GrammarLimits& limits) {
  std::string out;
  PutNumber(limits.worker_bytes, &out);
  PutNumber(static_cast<uint64_t>(limits.mask_seconds * 1e6), &out);
  PutNumber(vocabulary.tokens.size(), &out);
  for (const std::string& token : vocabulary.tokens) PutBytes(token, &out);
  PutNumber(vocabulary.stop_tokens.size(), &out);
  for (const int32_t token : vocabulary.stop_tokens) PutNumber(static_cast<uint64_t>(token), &out);
  return out;
}

// The worker's own side: its parent is trusted, and all reads wait.
class Pipe {
 public:
  bool Read(char* bytes, size_t count) {
    while (count > 0) {
      const ssize_t got = ::read(STDIN_FILENO, bytes, count);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return false;
      bytes += got;
      count -= static_cast<size_t>(got);
    }
    return true;
  }
  std::optional<uint64_t> Number() {
    uint64_t value = 0;
    if (!Read(reinterpret_cast<char*>(&value), sizeof(value))) return std::nullopt;
    return value;
  }
  std::optional<std::string> Bytes() {
    const auto size = Number();
    if (!size.has_value() || *size > (uint64_t{1} << 30)) return std::nullopt;
    std::string bytes(*size, '\0');
    if (!Read(bytes.data(), bytes.size())) return std::nullopt;
    return bytes;
  }
  bool Write(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(STDOUT_FILENO, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(sent));
    }
    return true;
  }
};

std::optional<GrammarVocabulary> ReadVocabulary(Pipe& pipe) {
  GrammarVocabulary vocabulary;
  const auto count = pipe.Number();
  if (!count.has_value() || *count > uint64_t{1} << 24) return std::nullopt;
  for (uint64_t i = 0; i < *count; ++i) {
    auto token = pipe.Bytes();
    if (!token.has_value()) return std::nullopt;
    vocabulary.tokens.push_back(std::move(*token));
  }
  const auto stops = pipe.Number();
  if (!stops.has_value() || *stops > *count) return std::nullopt;
  for (uint64_t i = 0; i < *stops; ++i) {
    const auto token = pipe.Number();
    if (!token.has_value()) return std::nullopt;
    vocabulary.stop_tokens.push_back(static_cast<int32_t>(*token));
  }
  return vocabulary;
}

std::optional<GrammarSpec> ReadSpec(Pipe& pipe) {
  GrammarSpec spec;
  const auto kind = pipe.Number();
  if (!kind.has_value() || *kind > static_cast<uint64_t>(GrammarSpec::Kind::kTextCalls)) {
    return std::nullopt;
  }
  spec.kind = static_cast<GrammarSpec::Kind>(*kind);
  auto text = pipe.Bytes();
  const auto count = pipe.Number();
  if (!text.has_value() || !count.has_value() || *count > kMaxChoices) return std::nullopt;
  spec.text = std::move(*text);
  for (uint64_t i = 0; i < *count; ++i) {
    auto choice = pipe.Bytes();
    if (!choice.has_value()) return std::nullopt;
    spec.choices.push_back(std::move(*choice));
  }
  return spec;
}

// Sanitizers reserve terabytes of addresses.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kBoundsMemory = false;
#else
constexpr bool kBoundsMemory = true;
#endif

void BoundMemory(uint64_t bytes) {
  // Nothing is written to disk after a crash, and the parent's end is ours.
  const rlimit none{0, 0};
  setrlimit(RLIMIT_CORE, &none);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  // Each further arena would reserve 64 MB of addresses.
  mallopt(M_ARENA_MAX, 1);
  const rlimit memory{bytes, bytes};
  if (kBoundsMemory) setrlimit(RLIMIT_AS, &memory);
}

// Grammars that compile in no time can have masks that take a second each, which would be taken
// from everybody's steps. Follows one answer of tokens that are allowed, whichever.
Status TryMasks(const CompiledGrammar& grammar, size_t vocab_size, double mask_seconds) {
  constexpr int kSteps = 24;
  const auto matcher = grammar.NewMatcher();
  std::vector<uint32_t> mask((vocab_size + 31) / 32);
  double spent = 0.0;
  for (uint32_t step = 0; step < kSteps && !matcher->finished(); ++step) {
    const double begun = ThreadSeconds();
    const Status filled = matcher->Fill(mask);
    spent += ThreadSeconds() - begun;
    if (spent > kSteps * mask_seconds) {
      return InvalidArgument(fmt::format(
          "the grammar is too complex: its masks take {:.0f} ms each, and the limit is {:.0f} ms",
          spent * 1e3 / (step + 1), mask_seconds * 1e3));
    }
    if (!filled.ok()) return {};  // a dead end, which no answer has to take
    // The first that is allowed from some place on.
    const uint32_t from = step * 2654435761u % static_cast<uint32_t>(vocab_size);
    for (uint32_t i = 0; i < vocab_size; ++i) {
      const auto token = static_cast<uint32_t>((from + uint64_t{i}) % vocab_size);
      if ((mask[token / 32] >> (token % 32) & 1) == 0) continue;
      if (!matcher->Accept(static_cast<int32_t>(token))) return {};
      break;
    }
  }
  return {};
}

}  // namespace

int RunGrammarWorker() {
  Pipe pipe;
  const auto memory = pipe.Number();
  const auto mask_microseconds = pipe.Number();
  if (!memory.has_value() || !mask_microseconds.has_value()) return 1;
  BoundMemory(*memory);
  const auto vocabulary = ReadVocabulary(pipe);
  if (!vocabulary.has_value()) return 1;
  const double mask_seconds = static_cast<double>(*mask_microseconds) * 1e-6;
  auto compiler = MakeLocalCompiler(*vocabulary, mask_seconds);
  if (!compiler.has_value()) return 1;
  std::string ready;
  PutNumber(0, &ready);
  if (!pipe.Write(ready)) return 1;
  while (true) {
    const auto spec = ReadSpec(pipe);
    if (!spec.has_value()) return 0;
    const auto compiled = (*compiler)->Compile(*spec);
    const Status status = compiled.has_value()
                              ? TryMasks(**compiled, vocabulary->tokens.size(), mask_seconds)
                              : compiled.error();
    std::string answer;
    PutNumber(static_cast<uint64_t>(status.code()), &answer);
    PutNumber(compiled.has_value() ? (*compiled)->bytes() : 0, &answer);
    PutBytes(status.message(), &answer);
    if (!pipe.Write(answer)) return 1;
  }
}

GrammarWorker::GrammarWorker(const std::string& program, const GrammarVocabulary& vocabulary,
                             const GrammarLimits& limits)
    : program_(program), vocabulary_(vocabulary), limits_(limits) {}

GrammarWorker::~GrammarWorker() { End(); }

void GrammarWorker::End() {
  if (socket_ >= 0) ::close(std::exchange(socket_, -1));
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
}

Status GrammarWorker::Start() {
  int sockets[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) {
    return Unavailable(fmt::format("a socket for the grammar compiler: {}", std::strerror(errno)));
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, sockets[1], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, sockets[1], STDOUT_FILENO);
  // A signal that the server blocks or ignores must still end the worker.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  // Not in the terminal's group: an interrupt is the server's to deal with.
  posix_spawnattr_setpgroup(&attributes, 0);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP);
  std::string name = "oscar", argument = kGrammarWorkerArgument;
  char* const arguments[] = {name.data(), argument.data(), nullptr};
  const int error =
      ::posix_spawn(&pid_, program_.c_str(), &actions, &attributes, arguments, environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  ::close(sockets[1]);
  if (error != 0) {
    pid_ = -1;
    ::close(sockets[0]);
    return Unavailable(
        fmt::format("the grammar compiler {} does not start: {}", program_, std::strerror(error)));
  }
  socket_ = sockets[0];
  const auto deadline = Clock::now() + kStartTime;
  uint64_t ready = 1;
  Status status = Send(Greeting(vocabulary_, limits_), deadline);
  if (status.ok()) status = Receive({reinterpret_cast<char*>(&ready), sizeof(ready)}, deadline);
  if (status.ok() && ready == 0) return {};
  End();
  return Unavailable("the grammar compiler does not start: see its limits of memory");
}

Status GrammarWorker::Send(std::string_view bytes, Clock::time_point deadline) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      bytes.remove_prefix(static_cast<size_t>(sent));
      continue;
    }
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK) return Unavailable("ended");
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return {StatusCode::kDeadlineExceeded, "late"};
    pollfd waited{socket_, POLLOUT, 0};
    ::poll(&waited, 1, static_cast<int>(std::min<int64_t>(left, 1000)));
  }
  return {};
}

Status GrammarWorker::Receive(std::span<char> bytes, Clock::time_point deadline) {
  while (!bytes.empty()) {
    const ssize_t got = ::recv(socket_, bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got > 0) {
      bytes = bytes.subspan(static_cast<size_t>(got));
      continue;
    }
    if (got == 0) return Unavailable("ended");
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) return Unavailable("ended");
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return {StatusCode::kDeadlineExceeded, "late"};
    pollfd waited{socket_, POLLIN, 0};
    ::poll(&waited, 1, static_cast<int>(std::min<int64_t>(left, 1000)));
  }
  return {};
}

Status GrammarWorker::Exchange(const GrammarSpec& spec) {
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(limits_.seconds));
  std::string request;
  PutNumber(static_cast<uint64_t>(spec.kind), &request);
  PutBytes(spec.text, &request);
  PutNumber(spec.choices.size(), &request);
  for (const std::string& choice : spec.choices) PutBytes(choice, &request);
  OSCAR_RETURN_IF_ERROR(Send(request, deadline));
  uint64_t head[3] = {};  // code, bytes compiled, bytes of the message
  OSCAR_RETURN_IF_ERROR(Receive({reinterpret_cast<char*>(head), sizeof(head)}, deadline));
  if (head[2] > kMaxMessageBytes) return Unavailable("its answer is malformed");
  std::string message(head[2], '\0');
  OSCAR_RETURN_IF_ERROR(Receive(message, deadline));
  if (head[1] > limits_.compiled_bytes) {
    return InvalidArgument(
        fmt::format("the grammar is too complex: compiled it has {} MB, and the limit is {} MB",
                    head[1] / 1'000'000, limits_.compiled_bytes / 1'000'000));
  }
  return {static_cast<StatusCode>(head[0]), std::move(message)};
}

Status GrammarWorker::Try(const GrammarSpec& spec) {
  // One that somebody else has ended is no fault of the spec.
  if (pid_ >= 0 && ::waitpid(pid_, nullptr, WNOHANG) == pid_) {
    pid_ = -1;
    End();
  }
  if (pid_ < 0) OSCAR_RETURN_IF_ERROR(Start());
  Status status = Exchange(spec);
  switch (status.code()) {
    case StatusCode::kOk:
    case StatusCode::kInvalidArgument:
      return status;  // its own word: it is ready for the next
    case StatusCode::kDeadlineExceeded:
      End();
      return InvalidArgument(fmt::format(
          "the grammar is too complex: it was not compiled within {:g} s", limits_.seconds));
    default:
      // Out of memory, or out of stack.
      End();
      LogWarning("the grammar compiler was ended: {}", status.message());
      return InvalidArgument(
          fmt::format("the grammar is too complex: compiling it needs more than {} MB",
                      limits_.worker_bytes / 1'000'000));
  }
}

}  // namespace oscar
