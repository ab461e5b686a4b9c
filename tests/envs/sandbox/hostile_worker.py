"""Hostile cases: attacks on the worker, its line to its client, and the line to a session."""

from toolgym.envs.sandbox.results import RunResult

from .hostile_cases import (
    Hostile,
    Scene,
    a_cell_is_answered,
    a_run_is_answered,
    the_session_lives,
    the_session_was_lost,
)

_TRY = """
import ctypes, os, resource
libc = ctypes.CDLL(None, use_errno=True)
def attempt(work):
    try: answer = work()
    except (OSError, ValueError) as error: print("refused", error)
    else: print("REACHED", answer)
def system(*arguments):
    answer = libc.syscall(*arguments)
    if answer < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return answer
"""
_TERM = """
import os
for _ in range(20):
    if os.fork() == 0: break
while True:
    try: os.kill(1, 15)
    except OSError: pass
"""
_SLOW = """
import os
for _ in range(20):
    if os.fork() == 0: break
calls = (
    lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
    lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
    lambda: os.sched_setaffinity(1, {0}),
)
while True:
    for call in calls:
        try: call()
        except OSError: pass
"""
_GARBAGE = """
import os
for fd in range(3, 256):
    try:
        os.set_blocking(fd, False)
        for _ in range(20): os.write(fd, os.urandom(8_192))
    except OSError: pass
print("written")
"""
_FORGE = """
import os
for _ in range(8):
    if os.fork() == 0:
        while True:
            try: os.write(4, b"O\\0\\0" * 20_000)
            except OSError: pass
print("armed")
"""
_KNOWN_ANSWER = """
import os, sys
frame = sys._getframe()
while frame is not None:
    if "nonce" in frame.f_locals: os.write(4, frame.f_locals["nonce"] + b"O\\0\\0")
    frame = frame.f_back
while True: pass
"""


def _the_worker_is_as_fast(scene: Scene, result: RunResult) -> None:
    code = "import os\nfor pid in (0, 1): print(os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid),"
    mine, workers = scene.run(code + " os.sched_getaffinity(pid))").text.splitlines()
    # Of code's own it is only the priority that differs: code yields to the worker.
    assert workers.split(" ", 1) == ["0", mine.split(" ", 1)[1]]


def _kill_everything(scene: Scene) -> None:
    scene.says("cell", "kept = 5", "(no output)")
    scene.says(
        "run",
        "import os, signal\nif os.fork() == 0: signal.pause()\n"
        "try: os.kill(-1, 9)\nexcept OSError: pass\nprint('fired')",
        "fired",
    )
    scene.says("cell", "kept", "5")
    scene.says("cell", "import os\ntry: os.kill(-1, 9)\nexcept OSError: pass\nkept + 1", "6")


def _after_forgery(scene: Scene, result: RunResult) -> None:
    following = scene.cell("print(2)", timeout=1.0)
    # Whoever closes or blocks the line of its session has lost it; but nothing else is ever taken for an answer.
    assert following.status in ("ok", "timeout") or following.session_lost
    assert following.status != "ok" or following.stdout.text == "2\n"
    scene.box.close_session()
    a_cell_is_answered(scene, result)


def _after_an_answer_too_early(scene: Scene, result: RunResult) -> None:
    # What it still does is on the account of the next cell, whose own answer it does not know.
    assert scene.cell("print(2)", timeout=0.5).status == "timeout"
    a_cell_is_answered(scene, result)


def _a_long_cell_is_answered(scene: Scene, result: RunResult) -> None:
    following = scene.cell("x = 1\n" + "#" * 900_000, timeout=0.5)
    assert (following.status in ("killed", "timeout"), following.session_lost) == (True, True)
    a_cell_is_answered(scene, result)


WORKER = (
    Hostile(
        "every signal to PID 1",
        "the worker: kill -9 1, and all others",
        _TRY + "for number in range(65): attempt(lambda: os.kill(1, number))",
    ),
    Hostile(
        "SIGTERM to PID 1 without end",
        "the worker while it kills, and takes on the code's uid to do so",
        _TERM,
        ends="timeout",
        timeout=0.3,
        then=a_run_is_answered,
    ),
    Hostile(
        "PID 1 made slow",
        "the worker while it has the code's uid: its priority, its policy, its cores",
        _SLOW,
        ends="timeout",
        timeout=0.3,
        then=_the_worker_is_as_fast,
    ),
    Hostile("kill -1", "a session from a run, and the worker from both", _kill_everything),
    Hostile(
        "prlimit of PID 1",
        "the worker: no descriptors, no memory, no processes",
        _TRY
        + "for name in ('NOFILE', 'AS', 'NPROC', 'CPU'):\n"
        + "    attempt(lambda: resource.prlimit(1, getattr(resource, 'RLIMIT_' + name), (0, 0)))",
    ),
    Hostile(
        "ptrace of PID 1",
        "the worker: attach, seize, read its memory, take its descriptors",
        _TRY
        + "attempt(lambda: system(101, 16, 1, 0, 0))\nattempt(lambda: system(101, 0x4206, 1, 0, 0))\n"
        + "here = ctypes.create_string_buffer(8)\nroom = (ctypes.c_size_t * 2)(ctypes.addressof(here), 8)\n"
        + "for number in (310, 311): attempt(lambda: system(number, 1, room, 1, room, 1, 0))\n"
        + "attempt(lambda: system(438, os.pidfd_open(1), 0, 0))",
    ),
    Hostile(
        "/proc/1/mem",
        "the worker's memory, to read and to write",
        _TRY
        + "for mode in ('rb', 'r+b'): attempt(lambda: open('/proc/1/mem', mode, 0))\n"
        + "attempt(lambda: open('/proc/1/maps').read(1))",
    ),
    Hostile(
        "/proc/1/fd",
        "the worker's line to its client",
        _TRY
        + "attempt(lambda: os.listdir('/proc/1/fd'))\n"
        + "for fd in range(32): attempt(lambda: open(f'/proc/1/fd/{fd}', 'wb', 0).write(b'x'))",
    ),
    Hostile(
        "/proc/1/environ",
        "what the worker was given: environment, root, working folder",
        _TRY
        + "attempt(lambda: open('/proc/1/environ').read())\nattempt(lambda: os.listdir('/proc/1/root'))\n"
        + "attempt(lambda: os.listdir('/proc/1/cwd'))",
    ),
    Hostile(
        "everything of the templates",
        "the processes from which all others are forked",
        _TRY
        + "found = [p for p in os.listdir('/proc') if p.isdigit() and os.stat('/proc/' + p).st_uid != os.getuid()]\n"
        + "for pid in map(int, found):\n    attempt(lambda: os.kill(pid, 9))\n"
        + "    attempt(lambda: open(f'/proc/{pid}/mem', 'rb'))\n"
        + "    attempt(lambda: os.listdir(f'/proc/{pid}/fd'))\nprint(len(found) >= 2)",
        says="True",
    ),
    Hostile(
        "garbage to every descriptor",
        "whatever a program has inherited",
        _GARBAGE,
        says="written",
    ),
    Hostile(
        "garbage to every descriptor of a session",
        "the socket over which cells come",
        _GARBAGE,
        kind="cell",
        says="written",
        then=_after_forgery,
    ),
    Hostile(
        "forged answers of cells",
        "the next cell's result, and the worker, by a flooded socket",
        _FORGE,
        kind="cell",
        ends="ok timeout",
        then=_after_forgery,
    ),
    Hostile(
        "answer before the end",
        "a cell that says it has ended, with the secret of its own answer, and goes on",
        _KNOWN_ANSWER,
        kind="cell",
        then=_after_an_answer_too_early,
    ),
    Hostile(
        "session that does not take its next cell",
        "the worker, which must not wait for it: it has answered too early, and stops itself",
        _KNOWN_ANSWER.replace("while True: pass", "os.kill(os.getpid(), 19)"),
        kind="cell",
        then=_a_long_cell_is_answered,
    ),
    Hostile(
        "closed descriptors",
        "the end of a program that has closed everything",
        "import os\nos.closerange(0, 1024)\nraise ValueError('unheard')",
        ends="error",
    ),
    Hostile(
        "closed descriptors in a cell",
        "the session's socket",
        "import os\nos.closerange(0, 1024)",
        kind="cell",
        ends="ok error killed",
        then=the_session_was_lost,
    ),
    Hostile(
        "exhausted descriptors",
        "the report of an exception without a descriptor to spare",
        "import os\nheld = []\nwhile True: held.append(os.dup(0))",
        kind="cell",
        ends="error",
        says="Too many open files",
        then=the_session_lives,
    ),
    Hostile(
        "raised limits",
        "the limits of its own process",
        _TRY
        + "free = (resource.RLIM_INFINITY,) * 2\nfor name in ('AS', 'NPROC', 'NOFILE', 'FSIZE', 'CORE'):\n"
        + "    attempt(lambda: resource.setrlimit(getattr(resource, 'RLIMIT_' + name), free))\n"
        + "attempt(lambda: os.setpriority(os.PRIO_PROCESS, 0, -20))\n"
        + "attempt(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))",
    ),
)
