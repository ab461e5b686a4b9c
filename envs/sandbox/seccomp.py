"""Which system calls code in a box may make: an allow-list for the kernel's seccomp filter, in Docker's JSON form.

It starts from the facts of Docker's own default profile (``seccomp/default.json`` of https://github.com/moby/profiles,
Apache-2.0: which calls ordinary programs need, the usual personalities, the mask of namespace flags), for 64-bit x86
and ARM, and gives less. Left out of what Docker allows are parts of the kernel that reach past the box's namespaces,
that have been the way out of containers before, or that nothing in a box needs:

- io_uring, userfaultfd, bpf, perf, keyrings, fanotify, file handles, ptrace and reading other processes' memory;
- sockets other than unix, TCP and UDP ones: with Docker's profile, vsock opened in spite of ``--network none``;
- new namespaces and mounts, also for those who would have the capability;
- SysV IPC, which outlives its processes and counts against nobody (POSIX semaphores and queues are there);
- every 32-bit entry into the kernel: their calls multiplex sockets and IPC, past any filter on arguments.

Whatever is not listed answers EPERM. A kernel's calls that are newer than all that are listed answer ENOSYS (runc does
that), as does clone3, so that the C library falls back to older ones.
"""

from typing import Any

# Without setxattr and its like: attributes of a folder that is never removed would outlive a reset.
_FILES = """
    access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 fadvise64
    fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fremovexattr
    fstat fstatfs fsync ftruncate futimesat getcwd getdents getdents64 getxattr getxattrat ioctl lchown lgetxattr link
    linkat listxattr listxattrat llistxattr lremovexattr lseek lstat mkdir mkdirat mknod mknodat newfstatat open openat
    openat2 pipe pipe2 pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv
    removexattr removexattrat rename renameat renameat2 rmdir sendfile splice stat statfs statx symlink symlinkat sync
    sync_file_range syncfs tee truncate umask unlink unlinkat utime utimensat utimes vmsplice write writev
"""

# Without io_setup and its like, of which a whole machine has a bounded number.
_WAITING_FOR_EVENTS = """
    epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 poll ppoll pselect6 select
    signalfd signalfd4
"""

_MEMORY = """
    brk cachestat madvise map_shadow_stack membarrier mincore mlock mlock2 mlockall mmap mprotect mremap mseal msync
    munlock munlockall munmap pkey_alloc pkey_free pkey_mprotect remap_file_pages
"""

# clone is listed below, with a condition. seccomp and landlock only ever take rights away.
_PROCESSES_AND_THREADS = """
    arch_prctl capget capset execve execveat exit exit_group fork futex futex_requeue futex_wait futex_waitv futex_wake
    get_robust_list get_thread_area getcpu getpgid getpgrp getpid getppid getpriority getrlimit getrusage getsid gettid
    ioprio_get ioprio_set kill landlock_add_rule landlock_create_ruleset landlock_restrict_self pidfd_open
    pidfd_send_signal prctl prlimit64 process_mrelease restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask
    rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max
    sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval
    sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield seccomp set_robust_list
    set_thread_area set_tid_address setpgid setpriority setrlimit setsid sigaltstack tgkill tkill vfork wait4 waitid
"""

# The worker becomes the user of a slot; capabilities, not this list, say who else may.
_USERS = """
    getegid geteuid getgid getgroups getresgid getresuid getuid setfsgid setfsuid setgid setgroups setregid setresgid
    setresuid setreuid setuid
"""

_TIME = """
    alarm clock_getres clock_gettime clock_nanosleep getitimer gettimeofday nanosleep pause setitimer time timer_create
    timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime times
"""

# socket and socketpair are listed below, with conditions.
_SOCKETS = """
    accept accept4 bind connect getpeername getsockname getsockopt listen recvfrom recvmmsg recvmsg sendmmsg sendmsg
    sendto setsockopt shutdown
"""

_POSIX_QUEUES = "mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink"

_THE_MACHINE = "getrandom sysinfo uname"

_ALLOWED = (
    _FILES,
    _WAITING_FOR_EVENTS,
    _MEMORY,
    _PROCESSES_AND_THREADS,
    _USERS,
    _TIME,
    _SOCKETS,
    _POSIX_QUEUES,
    _THE_MACHINE,
)

_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_STREAM, _DATAGRAM, _TYPE_MASK = 1, 2, 0xF  # the rest of a type is flags: SOCK_CLOEXEC, SOCK_NONBLOCK
_DEFAULT, _TCP, _UDP = 0, 6, 17
_CLONE_NEW = 0x7E02_0000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET
# Linux; 32 bits; an old version number; both; and the question which one it is.
_PERSONALITIES = (0x0, 0x8, 0x2_0000, 0x2_0008, 0xFFFF_FFFF)
_ENOSYS = 38


def profile() -> dict[str, Any]:
    """The profile, as ``security_opt=["seccomp=" + json.dumps(profile())]`` takes it.

    Returns:
        A new dict in the form of Docker's own profiles. Engines from 20.10 to 29 load it; names that an engine's
        libseccomp does not know are passed over.
    """
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        # Without sub-architectures: a 32-bit call ends the thread that makes it.
        "archMap": [
            {"architecture": "SCMP_ARCH_X86_64", "subArchitectures": []},
            {"architecture": "SCMP_ARCH_AARCH64", "subArchitectures": []},
        ],
        "syscalls": [
            _allow(*" ".join(_ALLOWED).split()),
            _allow("clone", args=(_masked(0, _CLONE_NEW, 0),)),
            # Its flags lie in memory, where a filter does not see them.
            {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": _ENOSYS, "args": []},
            *(_allow("personality", args=(_equal(0, value),)) for value in _PERSONALITIES),
            *_sockets(),
        ],
    }


def _sockets() -> list[dict[str, Any]]:
    """Unix sockets of every kind; TCP and UDP, by type and protocol too: else raw sockets and SCTP came with them."""
    rules = [_allow("socket", "socketpair", args=(_equal(0, _AF_UNIX),))]
    for family in (_AF_INET, _AF_INET6):
        for kind, protocol in ((_STREAM, _TCP), (_DATAGRAM, _UDP)):
            for named in (_DEFAULT, protocol):
                args = (_equal(0, family), _masked(1, _TYPE_MASK, kind), _equal(2, named))
                rules.append(_allow("socket", args=args))
    return rules


def _allow(*names: str, args: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {"names": list(names), "action": "SCMP_ACT_ALLOW", "args": list(args)}


def _equal(index: int, value: int) -> dict[str, Any]:
    return {"index": index, "value": value, "valueTwo": 0, "op": "SCMP_CMP_EQ"}


def _masked(index: int, mask: int, value: int) -> dict[str, Any]:
    return {"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}
