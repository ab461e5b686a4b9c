"""Hostile cases: processes that multiply, do not end, or hide."""

from .hostile_cases import Hostile, Scene, a_cell_is_answered, a_run_is_answered, the_session_was_lost

_BOMB = """
import os, signal
def bomb():
    while True:
        try:
            if os.fork() == 0:
                %s
        except OSError:
            pass
%s
bomb()
"""
_DAEMONS = """
import os
def spawn(work):
    try:
        if os.fork() == 0:
            try: work()
            finally: os._exit(0)
    except OSError: pass
def middle():
    for _ in range(30): spawn(lambda: None)
def top():
    while True:
        spawn(middle)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]: pass
        except OSError: pass
for _ in range(10): spawn(top)
while True: pass
"""
_DAEMON = """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        %s
        while True: signal.pause()
    os._exit(0)
os.wait()
print("gone")
"""
_ZOMBIE_LEADER = """
import ctypes, os, threading
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        def stay():
            os.write(write, b"1")
            while True: pass
        threading.Thread(target=stay).start()
        ctypes.CDLL(None).syscall(60, 0)
    os._exit(0)
os.read(read, 1)
print("gone")
"""


def _bombs_of_both(scene: Scene) -> None:
    # Which of them gets the last process, and when, differs from time to time.
    for _ in range(4):
        scene.says("cell", _BEHIND, "armed")
        assert scene.run(_BOMB % ("pass", ""), timeout=0.5).status == "timeout"
        scene.says("run", "print(6 * 7)", "42")
        scene.box.reset()


_BEHIND = """
import os
if os.fork() == 0:
    os.setsid()
    while True:
        try: os.fork()
        except OSError: pass
print("armed")
"""
PROCESSES = (
    Hostile("fork bomb", "the number of processes", _BOMB % ("pass", ""), ends="timeout", timeout=1.0),
    Hostile(
        "fork bomb of sessions", "being killed by its group", _BOMB % ("os.setsid()", ""), ends="timeout", timeout=1.0
    ),
    Hostile(
        "fork bomb that ignores signals",
        "being ended politely",
        _BOMB
        % (
            "os.setsid()",
            "for number in set(signal.valid_signals()) - {9, 19, 32, 33}: signal.signal(number, signal.SIG_IGN)",
        ),
        ends="timeout",
        timeout=1.0,
    ),
    Hostile(
        "thread bomb",
        "the number of threads",
        "import threading\nstay = threading.Event()\nwhile True:\n    try: threading.Thread(target=stay.wait).start()\n"
        "    except RuntimeError: pass",
        ends="timeout",
        timeout=1.0,
    ),
    Hostile(
        "bomb of daemons",
        "being killed while its parents change: double forks without end",
        _DAEMONS,
        ends="timeout",
        timeout=1.0,
    ),
    Hostile(
        "fork bomb behind a session",
        "runs beside a session, from its background",
        _BEHIND,
        kind="cell",
        says="armed",
        then=a_run_is_answered,
    ),
    Hostile(
        "fork bombs behind a session and in a run",
        "the processes that the worker itself needs: two users, each with its own limit",
        _bombs_of_both,
    ),
    Hostile(
        "loop that ignores signals",
        "its time limit",
        "import signal\nfor number in (1, 2, 3, 15): signal.signal(number, signal.SIG_IGN)\nprint('deaf')\n"
        "while True: pass",
        ends="timeout",
        says="deaf",
        timeout=0.5,
    ),
    Hostile(
        "cell that swallows interrupts",
        "its time limit, in a session",
        "while True:\n    try:\n        while True: sum(range(100))\n    except BaseException: pass",
        kind="cell",
        ends="timeout",
        timeout=0.5,
        then=the_session_was_lost,
    ),
    Hostile(
        "stuck in C: a loop",
        "its time limit, where no signal is looked at",
        "sum(range(10 ** 12))",
        kind="cell",
        ends="timeout",
        timeout=0.5,
        then=the_session_was_lost,
    ),
    Hostile(
        "stuck in C: a huge power",
        "its time limit, in long arithmetic",
        "x = 3 ** (10 ** 8)",
        kind="cell",
        ends="timeout",
        timeout=0.5,
        then=a_cell_is_answered,
    ),
    Hostile(
        "stuck in C: a regular expression",
        "its time limit, in a pattern that backtracks",
        "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
        kind="cell",
        ends="timeout",
        timeout=0.5,
        then=a_cell_is_answered,
    ),
    Hostile(
        "process that stops itself",
        "its time limit, by SIGSTOP",
        "import os, signal\nos.fork()\nos.kill(os.getpid(), signal.SIGSTOP)",
        ends="timeout",
        timeout=0.5,
    ),
    Hostile(
        "cell that stops itself",
        "its time limit, where an interrupt is not even looked at",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
        kind="cell",
        ends="timeout",
        timeout=0.5,
        then=the_session_was_lost,
    ),
    Hostile(
        "daemon with stdout open",
        "the end of a run: somebody still holds its pipe",
        "import signal" + _DAEMON % "pass",
        says="gone",
    ),
    Hostile(
        "daemon with everything closed",
        "surviving a run unseen",
        "import signal" + _DAEMON % "os.closerange(0, 1024)",
        says="gone",
    ),
    Hostile(
        "exec with an empty environment",
        "being known by its environment",
        "import os, shutil\nsleep = shutil.which('sleep')\nif os.fork() == 0:\n    os.setsid()\n"
        "    os.execve(sleep, ['x', '600'], {})\n"
        "print('gone')",
        says="gone",
    ),
    Hostile(
        "shell command that leaves daemons",
        "surviving a run: setsid, nohup, a trap for every signal",
        "trap '' HUP INT TERM; (setsid sleep 600 &); (nohup sleep 600 >/dev/null 2>&1 &); sleep 600 & echo gone",
        kind="shell",
        says="gone",
    ),
    Hostile(
        "dead leader with living threads",
        "looking ended: its first thread is, another one runs",
        _ZOMBIE_LEADER,
        says="gone",
    ),
    Hostile(
        "name that looks like another user's",
        "being known by /proc: a name with newlines and 'Uid:'",
        "import ctypes, signal" + _DAEMON % r"""ctypes.CDLL(None).prctl(15, b"x)\nUid:\t0\nS 1", 0, 0, 0)""",
        says="gone",
    ),
    Hostile(
        "process that cannot be looked into",
        "being known by /proc: PR_SET_DUMPABLE 0",
        "import ctypes, os\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\nos.fork()\nwhile True: pass",
        ends="timeout",
        timeout=0.5,
    ),
    Hostile(
        "process that asks to be traced",
        "being waited for: PTRACE_TRACEME and a signal look like an exit",
        "import ctypes, os, signal\nctypes.CDLL(None).ptrace(0, 0, 0, 0)\nos.kill(os.getpid(), signal.SIGUSR1)\n"
        "print('on')",
        ends="killed timeout",
        timeout=0.5,
        then=a_run_is_answered,
    ),
    Hostile(
        "cell that asks to be traced",
        "the same in a session",
        "import ctypes, os, signal\nctypes.CDLL(None).ptrace(0, 0, 0, 0)\nos.kill(os.getpid(), signal.SIGUSR1)\n"
        "print('on')",
        kind="cell",
        ends="killed timeout",
        timeout=0.5,
        then=the_session_was_lost,
    ),
)
