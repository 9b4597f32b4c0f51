#include "sandbox/confinement.h"

#include <fcntl.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>

#include "base/check.h"

namespace oscar {
namespace {

#if defined(__x86_64__)
constexpr uint32_t kArchitecture = AUDIT_ARCH_X86_64;
#elif defined(__aarch64__)
constexpr uint32_t kArchitecture = AUDIT_ARCH_AARCH64;
#else
constexpr uint32_t kArchitecture = 0;
#endif

// Computing, memory, threads, time, and reading: nothing here reaches another process, and what
// writes needs a descriptor that could be had only by the rules of AllowOpen.
constexpr long kAllowed[] = {
    SYS_read,
    SYS_write,
    SYS_futex,
    SYS_mprotect,
    SYS_munmap,
    SYS_mremap,
    SYS_brk,
    SYS_madvise,
    SYS_mincore,
    SYS_msync,
    SYS_membarrier,
    SYS_readv,
    SYS_writev,
    SYS_pread64,
    SYS_pwrite64,
    SYS_preadv,
    SYS_pwritev,
    SYS_preadv2,
    SYS_pwritev2,
    SYS_lseek,
    SYS_close,
    SYS_close_range,
    SYS_fstat,
    SYS_newfstatat,
    SYS_statx,
    SYS_statfs,
    SYS_fstatfs,
    SYS_faccessat,
    SYS_faccessat2,
    SYS_getdents64,
    SYS_readlinkat,
    SYS_getcwd,
    SYS_chdir,
    SYS_fchdir,
    SYS_umask,
    SYS_getxattr,
    SYS_lgetxattr,
    SYS_fgetxattr,
    SYS_listxattr,
    SYS_llistxattr,
    SYS_flistxattr,
    SYS_ftruncate,
    SYS_fsync,
    SYS_fdatasync,
    SYS_fadvise64,
    SYS_flock,
    SYS_sendfile,
    SYS_copy_file_range,
    SYS_memfd_create,
    SYS_dup,
    SYS_dup3,
    SYS_pipe2,
    SYS_ppoll,
    SYS_pselect6,
    SYS_epoll_create1,
    SYS_epoll_ctl,
    SYS_epoll_pwait,
    SYS_epoll_pwait2,
    SYS_eventfd2,
    SYS_execve,
    SYS_exit,
    SYS_exit_group,
    SYS_wait4,
    SYS_waitid,
    SYS_set_robust_list,
    SYS_get_robust_list,
    SYS_set_tid_address,
    SYS_rseq,
    SYS_restart_syscall,
    SYS_sched_yield,
    SYS_sched_getaffinity,
    SYS_sched_getparam,
    SYS_sched_getscheduler,
    SYS_sched_get_priority_max,
    SYS_sched_get_priority_min,
    SYS_sched_rr_get_interval,
    SYS_getpriority,
    SYS_getcpu,
    SYS_rt_sigaction,
    SYS_rt_sigprocmask,
    SYS_rt_sigreturn,
    SYS_rt_sigpending,
    SYS_rt_sigtimedwait,
    SYS_rt_sigsuspend,
    SYS_sigaltstack,
    SYS_getitimer,
    SYS_setitimer,
    SYS_nanosleep,
    SYS_clock_nanosleep,
    SYS_clock_gettime,
    SYS_clock_getres,
    SYS_gettimeofday,
    SYS_times,
    SYS_getrusage,
    SYS_getrlimit,
    SYS_getpid,
    SYS_gettid,
    SYS_getppid,
    SYS_getuid,
    SYS_geteuid,
    SYS_getgid,
    SYS_getegid,
    SYS_getgroups,
    SYS_getresuid,
    SYS_getresgid,
    SYS_getpgid,
    SYS_getsid,
    SYS_uname,
    SYS_sysinfo,
    SYS_getrandom,
#if defined(__x86_64__)
    SYS_stat,
    SYS_lstat,
    SYS_access,
    SYS_getdents,
    SYS_readlink,
    SYS_dup2,
    SYS_pipe,
    SYS_poll,
    SYS_select,
    SYS_epoll_create,
    SYS_epoll_wait,
    SYS_eventfd,
    SYS_arch_prctl,
    SYS_getpgrp,
    SYS_pause,
    SYS_alarm,
    SYS_time,
#endif
};

// Changes of the tree, by path: where Landlock says which.
constexpr long kAllowedWithLandlock[] = {
    SYS_mkdirat, SYS_unlinkat, SYS_renameat, SYS_renameat2, SYS_symlinkat,
#if defined(__x86_64__)
    SYS_mkdir,   SYS_rmdir,    SYS_unlink,   SYS_rename,    SYS_symlink,   SYS_creat,
#endif
};

// F_SETOWN and F_SETSIG, which are not here, would have the kernel signal any process.
constexpr uint32_t kFileCommands[] = {F_DUPFD,     F_DUPFD_CLOEXEC, F_GETFD, F_SETFD,  F_GETFL,
                                      F_SETFL,     F_GETLK,         F_SETLK, F_SETLKW,
                                      36,  // F_OFD_GETLK
                                      37,  // F_OFD_SETLK
                                      38,  // F_OFD_SETLKW
                                      F_GETPIPE_SZ};
constexpr uint32_t kDeviceCommands[] = {0x5401,      // TCGETS, by which isatty asks
                                        0x802c542a,  // TCGETS2, by newer libraries
                                        0x5413,      // TIOCGWINSZ
                                        0x541b,      // FIONREAD
                                        0x5421,      // FIONBIO
                                        0x5450,      // FIONCLEX
                                        0x5451};     // FIOCLEX
constexpr uint32_t kProcessCommands[] = {PR_SET_NAME, PR_GET_NAME, PR_CAPBSET_READ,
                                         0x53564d41};  // PR_SET_VMA: names of mappings

constexpr uint32_t kSelf[] = {0};  // the caller, where a call takes the id of a process

// Numbers that the kernel headers of the last years do not know get ENOSYS, as from an old kernel:
// libraries then do without.
constexpr uint32_t kFirstUnknown = 451;

// Landlock's interface, whose newer parts Debian's headers lack.
constexpr uint64_t kWriteFile = 1u << 1;
constexpr uint64_t kTree = 0x1ff0;  // removing, and making of every kind
constexpr uint64_t kMakeDevice = 1u << 6 | 1u << 9 | 1u << 10 | 1u << 11;  // and sockets and FIFOs
constexpr uint64_t kRefer = 1u << 13;          // version 2: links and moves between directories
constexpr uint64_t kTruncate = 1u << 14;       // 3
constexpr uint64_t kDeviceControl = 1u << 15;  // 5
constexpr uint64_t kNetwork = 3;               // 4: bind, connect
constexpr uint64_t kScopes = 3;                // 6: abstract sockets, signals
constexpr int kTruncateVersion = 3;
struct RulesetAttributes {
  uint64_t files;
  uint64_t network;
  uint64_t scopes;
};
struct [[gnu::packed]] PathRule {
  uint64_t allowed;
  int32_t parent;
};

int CreateRuleset(const RulesetAttributes* attributes, size_t size, uint32_t flags) {
#if defined(SYS_landlock_create_ruleset)
  return static_cast<int>(syscall(SYS_landlock_create_ruleset, attributes, size, flags));
#else
  (void)attributes, (void)size, (void)flags;
  return -1;
#endif
}

bool ConfineWrites(const char* directory, int version) {
#if defined(SYS_landlock_create_ruleset)
  RulesetAttributes attributes{};
  attributes.files = kWriteFile | kTree | (version >= 2 ? kRefer : 0) |
                     (version >= kTruncateVersion ? kTruncate : 0) |
                     (version >= 5 ? kDeviceControl : 0);
  attributes.network = version >= 4 ? kNetwork : 0;
  attributes.scopes = version >= 6 ? kScopes : 0;
  const size_t size = version >= 6 ? 24 : version >= 4 ? 16 : 8;
  const int rules = CreateRuleset(&attributes, size, 0);
  const PathRule own{attributes.files & ~(kMakeDevice | kDeviceControl),
                     open(directory, O_PATH | O_CLOEXEC)};
  const PathRule null{attributes.files & (kWriteFile | kTruncate),
                      open("/dev/null", O_PATH | O_CLOEXEC)};
  constexpr int kPathBeneath = 1;
  return rules >= 0 && own.parent >= 0 && null.parent >= 0 &&
         syscall(SYS_landlock_add_rule, rules, kPathBeneath, &own, 0) == 0 &&
         syscall(SYS_landlock_add_rule, rules, kPathBeneath, &null, 0) == 0 &&
         syscall(SYS_landlock_restrict_self, rules, 0) == 0;
#else
  (void)directory, (void)version;
  return false;
#endif
}

// Root's files stay root's, but not everybody else's, nor may it raise its own limits. With
// PR_SET_NO_NEW_PRIVS exec does not bring capabilities back.
bool DropCapabilities() {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct none[2] = {};
  return syscall(SYS_capset, &header, none) == 0;
}

}  // namespace

int LandlockVersion() {
  constexpr uint32_t kAskVersion = 1;
  return std::max(CreateRuleset(nullptr, 0, kAskVersion), 0);
}

bool Confinement::IsSupported() { return kArchitecture != 0; }

void Confinement::Give(uint32_t verdict) { filter_.push_back(BPF_STMT(BPF_RET | BPF_K, verdict)); }

void Confinement::Load(size_t offset) {
  filter_.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<uint32_t>(offset)));
}

// The low word: all that the kernel reads of an int or a set of flags on these processors.
void Confinement::LoadArgument(int index) {
  Load(offsetof(seccomp_data, args) + sizeof(uint64_t) * static_cast<size_t>(index));
}

void Confinement::JumpIfEqual(uint32_t value, uint8_t yes, uint8_t no) {
  filter_.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, yes, no));
}

void Confinement::Allow(long number) {
  JumpIfEqual(static_cast<uint32_t>(number), 0, 1);
  Give(SECCOMP_RET_ALLOW);
}

void Confinement::AllowIfArgument(long number, int index, std::span<const uint32_t> values) {
  JumpIfEqual(static_cast<uint32_t>(number), 0, static_cast<uint8_t>(3 + values.size()));
  LoadArgument(index);
  for (size_t i = 0; i < values.size(); ++i) {
    JumpIfEqual(values[i], static_cast<uint8_t>(values.size() - i), 0);
  }
  Give(SECCOMP_RET_ERRNO | EPERM);
  Give(SECCOMP_RET_ALLOW);
}

void Confinement::AllowForSelf(long number) {
  own_ids_.push_back(filter_.size() + 2);
  AllowIfArgument(number, 0, kSelf);
}

// Writing where Landlock decides about paths; truncation only with writing, which versions before
// kTruncateVersion do decide about. Without Landlock nothing but reading.
void Confinement::AllowOpen(long number, int index) {
  const size_t start = filter_.size();
  JumpIfEqual(static_cast<uint32_t>(number), 0, 0);
  LoadArgument(index);
  if (landlock_ == 0) {
    constexpr uint32_t kWriting =
        O_WRONLY | O_RDWR | O_CREAT | O_TRUNC | (O_TMPFILE & ~O_DIRECTORY);
    filter_.push_back(BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, kWriting, 0, 1));
  } else {
    filter_.push_back(BPF_STMT(BPF_ALU | BPF_AND | BPF_K, O_ACCMODE | O_TRUNC));
    JumpIfEqual(O_RDONLY | O_TRUNC, 2, 0);
    JumpIfEqual(O_ACCMODE, 1, 0);  // neither reads nor writes, for ioctl; Landlock lets it pass
    JumpIfEqual(O_ACCMODE | O_TRUNC, 0, 1);
  }
  Give(SECCOMP_RET_ERRNO | EPERM);
  Give(SECCOMP_RET_ALLOW);
  filter_[start].jf = static_cast<uint8_t>(filter_.size() - start - 1);
}

Confinement::Confinement(int landlock) : landlock_(landlock) {
  constexpr uint32_t kX32 = 0x40000000;  // numbers of x86's third interface start here
  Load(offsetof(seccomp_data, arch));
  JumpIfEqual(kArchitecture, 1, 0);
  Give(SECCOMP_RET_KILL_PROCESS);
  Load(offsetof(seccomp_data, nr));
  filter_.push_back(BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, kX32, 0, 1));
  Give(SECCOMP_RET_ERRNO | EPERM);
  filter_.push_back(BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, kFirstUnknown, 0, 1));
  Give(SECCOMP_RET_ERRNO | ENOSYS);
  for (const long number : kAllowed) Allow(number);
  if (landlock_ > 0) {
    for (const long number : kAllowedWithLandlock) Allow(number);
  }
  if (landlock_ >= kTruncateVersion) Allow(SYS_truncate);
  AllowOpen(SYS_openat, 2);
#if defined(SYS_open)
  AllowOpen(SYS_open, 1);
#endif
  AllowIfArgument(SYS_fcntl, 1, kFileCommands);
  AllowIfArgument(SYS_ioctl, 1, kDeviceCommands);
  AllowIfArgument(SYS_prctl, 0, kProcessCommands);
  AllowIfArgument(SYS_prlimit64, 0, kSelf);
  AllowForSelf(SYS_kill);
  AllowForSelf(SYS_tgkill);
  // A shared mapping of a file writes it past every count of what was written.
  JumpIfEqual(SYS_mmap, 0, 5);
  LoadArgument(3);
  filter_.push_back(BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, MAP_ANONYMOUS, 2, 0));
  filter_.push_back(BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, MAP_SHARED, 0, 1));
  Give(SECCOMP_RET_ERRNO | EPERM);
  Give(SECCOMP_RET_ALLOW);
  JumpIfEqual(SYS_clone3, 0, 1);
  Give(SECCOMP_RET_ERRNO | ENOSYS);  // the library then takes clone, whose flags can be seen
  JumpIfEqual(SYS_clone, 0, 3);
  LoadArgument(0);
  filter_.push_back(BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, CLONE_THREAD, 0, 1));
  Give(SECCOMP_RET_ALLOW);
  Give(SECCOMP_RET_ERRNO | EPERM);
  OSCAR_CHECK(filter_.size() <= BPF_MAXINSNS);
}

const char* Confinement::Enter(const char* directory) {
  for (const size_t at : own_ids_) filter_[at].k = static_cast<uint32_t>(getpid());
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return "PR_SET_NO_NEW_PRIVS";
  if (landlock_ > 0 && !ConfineWrites(directory, landlock_)) return "Landlock";
  if (!DropCapabilities()) return "dropping capabilities";
  const sock_fprog program{static_cast<unsigned short>(filter_.size()), filter_.data()};
  if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) return "seccomp";
  return nullptr;
}

}  // namespace oscar
