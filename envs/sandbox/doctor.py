"""The isolation self-test: what holds in a box on this machine, found out by trying it."""

from collections.abc import Iterator
from dataclasses import dataclass

from toolgym.envs.errors import ToolError
from toolgym.envs.sandbox.results import RunResult, SandboxFailure
from toolgym.envs.sandbox.sandbox import Sandbox, SandboxPool


@dataclass(frozen=True, slots=True)
class Check:
    """One promise, and code that prints ``held`` if it is kept.

    Attributes:
        name: what is promised.
        code: a Python program; ``attempt(f, *args)`` in it prints ``held`` if the call is refused by an OSError.
    """

    name: str
    code: str


@dataclass(frozen=True, slots=True)
class Finding:
    """What came out of a check.

    Attributes:
        name: what is promised.
        held: whether it is kept.
        detail: what was seen if not.
    """

    name: str
    held: bool
    detail: str = ""


_HEAD = """\
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def attempt(function, *args):
    try:
        value = function(*args)
    except OSError as error:
        print("held", error)
    else:
        print("not held:", value)
def syscall(number, *args):
    libc.syscall(number, *args)
    if ctypes.get_errno() in (1, 38):  # EPERM, ENOSYS: it is refused; anything else, the kernel has looked at it
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return f"system call {number} is allowed"
def status(name):
    with open("/proc/self/status") as file:
        return next(line.split()[1] for line in file if line.startswith(name))
def say(held, seen=""):
    print("held" if held else "not held:", seen)
"""
_SYSCALLS = {  # of x86-64, then of aarch64, from the kernel's tables
    "io_uring_setup": (425, 425),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "keyctl": (250, 219),
    "userfaultfd": (323, 282),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mount": (165, 40),
    "setns": (308, 268),
    "kexec_load": (246, 104),
    "open_by_handle_at": (304, 265),
}
CHECKS = (
    Check("code is not root", "say(os.getuid() != 0, os.getuid())"),
    Check("no capabilities", "say(int(status('CapEff:'), 16) == 0 and int(status('CapPrm:'), 16) == 0)"),
    Check("no new privileges", "say(status('NoNewPrivs:') == '1')"),
    Check("system calls are filtered", "say(status('Seccomp:') == '2', status('Seccomp:'))"),
    Check("root file system is read-only", "attempt(open, '/usr/probe', 'w')"),
    Check(
        "no network interface but loopback",
        "say(all(line.split(':')[0].strip() == 'lo' for line in open('/proc/net/dev').readlines()[2:]))",
    ),
    Check("no connection to the outside", "s = socket.socket(); s.settimeout(2); attempt(s.connect, ('1.1.1.1', 53))"),
    Check("no AF_PACKET sockets", "attempt(socket.socket, 17, socket.SOCK_RAW)"),
    Check("no AF_VSOCK sockets", "attempt(socket.socket, 40, socket.SOCK_STREAM)"),
    Check("no AF_ALG sockets", "attempt(socket.socket, 38, socket.SOCK_SEQPACKET)"),
    Check("no AF_NETLINK sockets", "attempt(socket.socket, 16, socket.SOCK_RAW)"),
    Check("no user namespace", "attempt(syscall, 272 if os.uname().machine == 'x86_64' else 97, 0x10000000)"),
    *(
        Check(f"no {name}", f"attempt(syscall, {amd} if os.uname().machine == 'x86_64' else {arm}, 0, 0, 0, 0, 0)")
        for name, (amd, arm) in _SYSCALLS.items()
    ),
    Check("the worker cannot be signalled", "attempt(os.kill, 1, 0)"),
    Check("the worker's memory cannot be read", "attempt(open, '/proc/1/mem')"),
    Check("processes outside are not seen", "say(len([p for p in os.listdir('/proc') if p.isdigit()]) < 10)"),
    Check("no Docker socket", "say(not any(map(os.path.exists, ('/var/run/docker.sock', '/run/docker.sock'))))"),
    Check("no environment of the host", "say(len(os.environ) < 16 and 'SSH_AUTH_SOCK' not in os.environ)"),
    Check("memory is bounded", "try:\n bytearray(1 << 40)\nexcept MemoryError: print('held')"),
    Check(
        "files are bounded",
        "def fill():\n with open('fill', 'wb') as f:\n  while True: f.write(bytes(1 << 20))\nattempt(fill)",
    ),
    Check(
        "processes are bounded",
        "import time\ndef many():\n while True:\n  if os.fork() == 0: time.sleep(60)\nattempt(many)",
    ),
    Check("writing outside its folders is refused", "attempt(open, '/proc/self/oom_score_adj', 'w')"),
    Check(
        "no raw devices", "say(not any(n.startswith(('sd', 'vd', 'nvme', 'mem', 'kmsg')) for n in os.listdir('/dev')))"
    ),
    Check("kernel settings are read-only", "attempt(open, '/proc/sys/kernel/hostname', 'w')"),
)


def examine(pool: SandboxPool) -> Iterator[Finding]:
    """Try everything in a box of a pool.

    Raises:
        SandboxFailure: no box can be made.
    """
    sandbox = pool.sandbox()
    try:
        for check in CHECKS:
            yield _find(sandbox, check)
        yield _ends_everything(sandbox)
    finally:
        sandbox.sync.release()


def _find(sandbox: Sandbox, check: Check) -> Finding:
    try:
        result: RunResult = sandbox.sync.run(_HEAD + check.code, timeout=5.0)
        sandbox.sync.reset()
    except ToolError as error:
        return Finding(check.name, False, str(error))
    except SandboxFailure as failure:
        if failure.kind.removeprefix("sandbox_") in ("engine_gone", "start_failed", "image_failed", "pool_exhausted"):
            raise  # there is no box to examine
        sandbox.sync.release()
        return Finding(check.name, False, f"the box failed: {failure}")
    if result.stdout.text.startswith("held"):
        return Finding(check.name, True)
    return Finding(check.name, False, result.text.splitlines()[-1][:200])


def _ends_everything(sandbox: Sandbox) -> Finding:
    """A daemon that has left its session, with an empty environment, must not outlive its run."""
    name = "nothing outlives its run"
    daemon = "import os\nif os.fork() == 0:\n os.setsid()\n os.execve('/bin/sh', ['sh', '-c', 'sleep 99'], {})\n"
    sandbox.sync.run(daemon)
    alive = (
        "import os\n"
        "print(sum('sleep' in open(f'/proc/{p}/cmdline').read() for p in os.listdir('/proc') if p.isdigit()))"
    )
    found = sandbox.sync.run(alive).stdout.text.strip()
    return Finding(name, found == "0", "" if found == "0" else f"{found} processes")
