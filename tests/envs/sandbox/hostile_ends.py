"""Hostile cases: strange ends of programs and cells, and what they leave to those that follow."""

from toolgym.envs.sandbox.results import RunResult

from .hostile_cases import Hostile, Scene, a_cell_is_answered, the_session_lives, the_session_was_lost


def _one_answer_each(scene: Scene, result: RunResult) -> None:
    scene.says("cell", "print('next')", "next")
    scene.says("cell", "print('last')", "last")


def _codes(scene: Scene) -> None:
    for given, expected in (
        ("300", 44),
        ("-1", 255),
        ("True", 1),
        ("2 ** 70 + 5", 5),
        ("0", 0),
        ("None", 0),
        ("'', 1", 1),
    ):
        for kind in ("run", "cell"):
            result = scene.play(kind, f"raise SystemExit({given})")
            assert (result.exit_code, result.status) == (expected, "error" if expected else "ok"), (given, kind)


def _stdout_comes_back(scene: Scene, result: RunResult) -> None:
    scene.says("cell", "import sys\nsys.stdout = sys.__stdout__\nprint('back')", "back")


def _ended_between_cells(scene: Scene) -> None:
    code = "import os, signal\nkept = 5\nread, write = os.pipe()\nparent = os.getpid()\nif os.fork() == 0:\n"
    code += "    os.read(read, 1)\n    os.kill(parent, 9)\n    os._exit(0)\n"
    pid = scene.cell(
        code + "import threading\nthreading.Timer(0.1, os.write, (write, b'x')).start()\nprint(parent)"
    ).text
    assert scene.run(f"import os\nwhile os.path.exists('/proc/{pid}'): pass").ok
    result = scene.cell("kept")
    assert result.session_lost, f"nothing says why its variables are gone: {result.text}"
    scene.says("cell", "6 * 7", "42")


def _ended_for_a_run(scene: Scene) -> None:
    scene.says("cell", "kept = 5\nheld = bytearray(150 << 20)", "(no output)")
    ended = scene.run("held = bytearray(150 << 20)", timeout=5.0)
    assert ended.status in ("ok", "oom")
    result = scene.cell("kept")
    assert result.session_lost or result.text == "5", f"nothing says why its variables are gone: {result.text}"


def _broken_interpreter(scene: Scene) -> None:
    code = "import builtins, sys\nfor name in ('compile', 'exec', 'eval', 'print', 'repr', 'open', 'BaseException'):\n"
    code += "    setattr(builtins, name, None)\nfor name in list(sys.modules): sys.modules[name] = None"
    assert scene.cell(code).status in ("ok", "error", "timeout", "killed")
    assert scene.cell("print(1)", timeout=0.5).status in ("error", "timeout", "killed")
    scene.box.close_session()
    scene.says("cell", "print(1)", "1")


_SLY = "class Sly(%s):\n    def __str__(self): 1 / 0\n    __repr__ = __and__ = __index__ = __str__\n%s"


def _clean_attributes(scene: Scene) -> None:
    scene.says("run", "import os\nprint(os.listxattr('.'))", "[]")


ENDS = (
    Hostile("os._exit", "the end of Python", "import os\nos._exit(7)", ends="error", says="exit code 7"),
    Hostile(
        "os._exit in a cell",
        "the session's end",
        "import os\nos._exit(7)",
        kind="cell",
        ends="error",
        says="session was lost",
        then=the_session_was_lost,
    ),
    Hostile("SystemExit with text", "the exit code", "raise SystemExit('no more')", ends="error", says="^no more$"),
    Hostile("SystemExit with codes", "the exit code: large, negative, no number", _codes),
    Hostile(
        "SystemExit that cannot be told",
        "the report: __str__ raises",
        _SLY % ("object", "raise SystemExit(Sly())"),
        ends="error",
        says="ZeroDivisionError",
    ),
    Hostile(
        "SystemExit of a sly number",
        "the session's report: a number with methods of its own",
        _SLY % ("int", "raise SystemExit(Sly(3))"),
        kind="cell",
        ends="error",
        then=the_session_lives,
    ),
    Hostile(
        "exception that cannot be told",
        "the report: __str__ raises",
        _SLY % ("Exception", "raise Sly()"),
        kind="cell",
        ends="error",
        says="Sly",
        then=the_session_lives,
    ),
    Hostile(
        "exception that is told for ever",
        "the report: __str__ never returns",
        "class Slow(Exception):\n    def __str__(self):\n        while True: pass\nraise Slow()",
        ends="timeout",
        timeout=0.5,
    ),
    Hostile("segmentation fault", "the end of Python", "import ctypes\nctypes.string_at(0)", ends="killed"),
    Hostile(
        "segmentation fault in a cell",
        "the session's end",
        "import ctypes\nctypes.string_at(0)",
        kind="cell",
        ends="killed",
        then=the_session_was_lost,
    ),
    Hostile("abort", "the end of Python", "import os\nos.abort()", ends="killed", says="signal 6"),
    Hostile("recursion in Python", "the stack", "def f(): f()\nf()", ends="error", says="RecursionError"),
    Hostile(
        "recursion in C",
        "the stack, past Python's own limit",
        "import sys\nsys.setrecursionlimit(10 ** 9)\nx = []\nfor _ in range(200_000): x = [x]\nrepr(x)",
        ends="killed",
        local_ends="killed ok oom",  # it has as much stack as the client
    ),
    Hostile(
        "stdout replaced",
        "the flush at the end of a cell",
        "import sys\nsys.stdout = 42",
        kind="cell",
        then=_stdout_comes_back,
    ),
    Hostile(
        "stdout whose flush never returns",
        "the flush at the end",
        "import sys\nclass Out:\n    def flush(self):\n        while True: pass\nsys.stdout = Out()",
        ends="timeout",
        timeout=0.5,
    ),
    Hostile(
        "atexit that hangs",
        "the end of a program",
        "import atexit, threading\natexit.register(threading.Event().wait)\nprint('done')",
        ends="timeout",
        says="done",
        timeout=0.5,
    ),
    Hostile(
        "thread that never ends",
        "the end of a program",
        "import threading\nthreading.Thread(target=threading.Event().wait).start()\nprint('done')",
        ends="timeout",
        says="done",
        timeout=0.5,
    ),
    Hostile(
        "fork in a cell, both return",
        "the session's answer, given twice",
        "import os\nchild = os.fork()\nprint('me')\nif child: os.waitpid(child, 0)",
        kind="cell",
        says="^me\nme$",
        then=_one_answer_each,
    ),
    Hostile(
        "threads left after a cell",
        "the next cell",
        "import threading\ndef spin():\n    while True: pass\n"
        "for _ in range(4): threading.Thread(target=spin).start()\nprint('left')",
        kind="cell",
        says="left",
        then=_one_answer_each,
    ),
    Hostile(
        "session that ends between two cells",
        "what the next cell is told: its variables are gone",
        _ended_between_cells,
    ),
    Hostile(
        "session that is ended for a run",
        "the same: the kernel ends it when a run wants the memory that it holds",
        _ended_for_a_run,
    ),
    Hostile(
        "timers",
        "the end of a program: a signal every microsecond",
        "import signal\nsignal.signal(14, lambda *_: None)\nsignal.setitimer(signal.ITIMER_REAL, 1e-6, 1e-6)\n"
        "while True: pass",
        ends="timeout killed",
        timeout=0.5,
    ),
    Hostile("interpreter broken from within", "the session: no builtins, no modules", _broken_interpreter),
    Hostile(
        "attributes of the workspace",
        "what a reset does not remove: attributes of a folder that stays",
        "import os\nfor k in range(500):\n    try: os.setxattr('.', f'user.{k}', b'x' * 60_000)\n"
        "    except OSError: break\nprint('REACHED' if os.listxattr('.') else 'refused')",
        after=_clean_attributes,
    ),
    Hostile(
        "asynchronous I/O of the whole machine",
        "a bounded number that all of a machine share",
        "import ctypes\nlibc = ctypes.CDLL(None)\nmade = 0\nfor _ in range(70_000):\n"
        "    if libc.syscall(206, 1, ctypes.byref(ctypes.c_ulong(0))): break\n    made += 1\n"
        "print('REACHED' if made else 'refused')",
    ),
    Hostile(
        "descriptor handed to the worker",
        "the worker: a connection whose closing takes long, over the line of a session",
        "import os, socket\nfor fd in (3, 4, 5, 6):\n    try:\n"
        "        socket.send_fds(socket.socket(fileno=os.dup(fd)), [b'z'], [0])\n        print('REACHED')\n"
        "    except OSError as error: print(error)",
        kind="cell",
        then=a_cell_is_answered,
    ),
)
