"""What a forked child does: give up its rights, then run code or a shell command. It never returns to the worker."""

import atexit
import gc
import linecache
import os
import resource
import signal
import sys
import threading
import traceback
import types
from dataclasses import dataclass
from typing import Any, NoReturn

from toolgym.envs.sandbox.inside import landlock
from toolgym.envs.sandbox.inside.settings import Settings
from toolgym.envs.sandbox.inside.system import PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, drop_capabilities, prctl

SNIPPET = "snippet.py"
RULES = 1_000  # the descriptor of Landlock's rules: above all others
_rules: int | None = None


@dataclass(frozen=True)
class Pipes:
    """The descriptors of a child: its three streams, and for a session where it reads cells and writes answers.

    Those are pipes: over a socket code could hand the worker descriptors whose closing takes long.
    """

    stdin: int
    stdout: int
    stderr: int
    control: tuple[int, int] | None = None


def become(settings: Settings, uid: int | None, pipes: Pipes) -> None:
    """Turn a fresh fork of a template into an unprivileged process of its own session with bounded resources."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    keep = (pipes.stdin, pipes.stdout, pipes.stderr) + (pipes.control or ())
    for target, source in enumerate(keep):
        os.dup2(source, target, inheritable=target < 3)
    os.closerange(len(keep), RULES)
    # The worker cannot be looked into; this process can, also by its own /dev/stdout.
    prctl(PR_SET_DUMPABLE, 1)
    score = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    os.write(score, b"1000")  # the kernel ends the code before the worker
    os.close(score)
    if _rules is not None:
        landlock.restrict(_rules)
        os.close(_rules)
    os.nice(settings.nice)
    for name, value in settings.rlimits.items():
        _limit(getattr(resource, name), value)
    if uid is None:
        drop_capabilities()  # those of a user namespace
    else:
        assert settings.gid is not None
        os.setgroups([])
        os.setresgid(settings.gid, settings.gid, settings.gid)
        os.setresuid(uid, uid, uid)
        prctl(PR_SET_DUMPABLE, 1)  # becoming somebody else has cleared it
    os.chdir(settings.workspace)


def prepare(settings: Settings, *, network: bool) -> bool:
    """Once, in the worker: what all its forks are to inherit.

    Args:
        settings: of the worker.
        network: whether code may use the network that there is.

    Returns:
        Whether Landlock holds.
    """
    global _rules  # noqa: PLW0603 - of this process, which is one worker
    if (rules := landlock.make_rules((settings.workspace, *settings.folders), network=network)) is not None:
        _rules = RULES
        os.dup2(rules, RULES, inheritable=False)
        os.close(rules)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_DUMPABLE, 0)
    os.umask(0)  # runs and sessions have different uids and share the workspace
    if settings.run_uid is not None:
        os.chmod(settings.workspace, 0o777)  # an engine gives a mount the mode of the folder below it
    os.environ.clear()
    os.environ.update(settings.environment)
    sys.argv = [SNIPPET]
    sys.path.insert(0, "")
    for name in [name for name in sys.modules if name.split(".")[0] == "toolgym"]:
        del sys.modules[name]
    # Streams of their own, made over pipes: Python would seek in those of a file.
    ends = (*os.pipe(), *os.pipe())
    sys.stdin = sys.__stdin__ = _stream(ends[0], 0, "r")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _stream(ends[1], 1, "w")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(ends[3], 2, "w")  # type: ignore[misc]
    for end in ends:
        os.close(end)
    return _rules is not None


def _stream(pipe: int, fd: int, mode: str) -> Any:
    """A stream of a descriptor, written through by lines: what was printed before a kill is not lost."""
    kept = os.dup(fd)
    os.dup2(pipe, fd)
    errors = "surrogateescape" if mode == "r" else "backslashreplace"
    made = open(  # noqa: SIM115 - as long as the process lives
        fd, mode, buffering=-1 if mode == "r" else 1, encoding="utf-8", errors=errors, closefd=False
    )
    os.dup2(kept, fd)
    os.close(kept)
    return made


def run_command(settings: Settings, command: str) -> NoReturn:
    """Replace this process by a shell that runs a command."""
    try:
        os.execve(settings.shell, [os.path.basename(settings.shell), "-c", command], dict(os.environ))
    except (OSError, ValueError) as error:
        os.write(2, f"{settings.shell}: {error}\n".encode())
    os._exit(126)


def run_python(code: str) -> NoReturn:
    """Run code as a program, and end as Python would."""
    _fresh_interpreter()
    main = _new_main()
    try:
        _remember(SNIPPET, code)
        exec(compile(code, SNIPPET, "exec"), main.__dict__)
        status = 0
    except BaseException as raised:
        status = _report(raised)
    _finish(status)


def serve_cells(cells: int, answers: int) -> NoReturn:
    """Be a session: read cells from a pipe, run each, and write how it ended (``E`` or ``O``, and an exit code)."""
    _fresh_interpreter()
    main = _new_main()
    in_cell = False

    def interrupt(number: int, frame: object) -> None:
        if in_cell:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    count, mine = 0, os.getpid()
    while cell := _read_cell(cells):
        nonce, code = cell
        count += 1
        try:
            in_cell = True
            _run_cell(code.decode("utf-8", "surrogatepass"), f"cell-{count}.py", main)
            status = 0
        except BaseException as raised:
            in_cell = False
            status = _report(raised)
        in_cell = False
        _flush()
        if os.getpid() != mine:
            os._exit(status)  # a fork that has come to the end of its parent's cell
        try:
            os.write(answers, nonce + (b"E" if status else b"O") + status.to_bytes(2, "big"))
        except OSError:
            break
    _finish(0)


def give_up() -> NoReturn:
    """End a child that could not do what it was forked for, and say why."""
    try:
        traceback.print_exc()
        _flush()
    finally:
        os._exit(254)


def _run_cell(code: str, name: str, main: types.ModuleType) -> None:
    """Run a cell, and show the value of its last line as a notebook does."""
    import ast

    _remember(name, code)
    tree = compile(code, name, "exec", ast.PyCF_ONLY_AST)  # not by ast.parse, which the trace would show
    assert isinstance(tree, ast.Module)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    exec(compile(tree, name, "exec"), main.__dict__)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), name, "eval"), main.__dict__)
        if value is not None:
            print(repr(value))
            main.__dict__["_"] = value


def _read_cell(cells: int) -> tuple[bytes, bytes] | None:
    """The next cell: 16 bytes that its answer must begin with, 8 digits of length in hexadecimal, the code."""
    head = _read_exactly(cells, 24)
    return (head[:16], _read_exactly(cells, int(head[16:], 16))) if head else None


def _read_exactly(source: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        try:
            piece = os.read(source, min(count - len(data), 1 << 20))
        except BlockingIOError:  # code has set it so
            os.set_blocking(source, True)
            continue
        if not piece:
            return b""
        data += piece
    return data


def _fresh_interpreter() -> None:
    """Make a fork of the template look like a Python that has just started."""
    gc.enable()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(int.from_bytes(os.urandom(4)))  # else every fork would draw the same numbers


def _new_main() -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    return main


def _remember(name: str, code: str) -> None:
    """Let tracebacks and inspect find the lines of code that is in no file."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)


def _report(raised: BaseException) -> int:
    """Write an exception as Python would, without our own frames; the exit code that belongs to it."""
    if isinstance(raised, SystemExit):
        try:
            return _exit_code(raised.code)
        except BaseException as worse:  # what it was given to say raises in its turn
            raised = worse
    try:
        told = traceback.TracebackException(type(raised), raised, raised.__traceback__)
        _hide_ourselves(told)
        text = "".join(told.format())
    except BaseException:
        text = f"{type(raised).__name__}\n"
    _complain(text)
    return 130 if isinstance(raised, KeyboardInterrupt) else 1


def _hide_ourselves(told: traceback.TracebackException | None) -> None:
    """Take our own frames out of a trace, and out of those that led to it."""
    while told is not None:
        frames = [frame for frame in told.stack if not frame.filename.startswith(_HERE)]
        told.stack = traceback.StackSummary.from_list(frames)
        told = told.__cause__ or told.__context__


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return int.__and__(code, 0xFF)
    _complain(f"{code}\n")
    return 1


def _complain(text: str) -> None:
    _flush()
    data = text.encode("utf-8", "backslashreplace")
    try:
        while data:
            data = data[os.write(2, data) :]
    except OSError:  # it has closed its stderr
        pass


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # code may have closed or replaced them by anything
            continue


def _finish(status: int) -> NoReturn:
    """End as an interpreter does - threads joined, atexit run, output flushed - without tearing down its modules."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException as raised:
        status = status or _report(raised)
    _flush()
    os._exit(status)


def _limit(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


_HERE = os.path.dirname(os.path.abspath(__file__))
