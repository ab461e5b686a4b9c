"""Hostile cases: memory, folders, output, files that are hard to handle, and input that is none."""

from collections.abc import Callable

from toolgym.envs.sandbox.results import RunResult

from .hostile_cases import Hostile, Scene

_MIB = 1024 * 1024

# --- memory ---

_MANY = """
import os, signal
read, write = os.pipe()
signal.signal(signal.SIGCHLD, lambda number, frame: os._exit(3))
for _ in range(4):
    if os.fork() == 0:
        held = bytearray(120 << 20)
        os.write(write, b"1")
        while True: pass
for _ in range(4): os.read(read, 1)
print("REACHED: 480 MiB are held")
"""
_MEMFD = """
import os
try: open("/proc/self/oom_score_adj", "w").write("0")
except OSError: pass
held, piece = [], bytes(1 << 20)
for _ in range(30):
    held.append(os.memfd_create("x"))
    for _ in range(16): os.write(held[-1], piece)
print("REACHED: 480 MiB are held")
"""
_SOCKETS = """
import os, signal, socket
read, write = os.pipe()
signal.signal(signal.SIGCHLD, lambda number, frame: os._exit(3))
for _ in range(16):
    if os.fork() == 0:
        held, piece = [], bytes(1 << 16)
        for _ in range(100):
            pair = socket.socketpair()
            held.append(pair)
            for end in pair:
                end.setblocking(False)
                try:
                    while True: end.send(piece)
                except BlockingIOError: pass
        os.write(write, b"1")
        while True: signal.pause()
for _ in range(16): os.read(read, 1)
print("REACHED: some 600 MiB are held")
"""
MEMORY = (
    Hostile("memory at once", "the memory of the box", "x = bytearray(10 ** 9)", ends="oom"),
    Hostile("memory bit by bit", "the same", "x = []\nwhile True: x.append(bytearray(1 << 20))", ends="oom"),
    Hostile(
        "memory of a session",
        "the same, in a cell",
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
        kind="cell",
        ends="oom",
    ),
    Hostile(
        "memory of many processes",
        "the memory of the box, each of them within its own limit",
        _MANY,
        ends="oom",
        local_ends="ok",
        timeout=5.0,
        local_gap="the memory of all processes together is not limited",
    ),
    Hostile(
        "memory files",
        "memory that belongs to no process, by one that the kernel is told to spare",
        _MEMFD,
        ends="error oom",
        timeout=5.0,
    ),
    Hostile(
        "memory in sockets",
        "memory of the kernel that belongs to no process",
        _SOCKETS,
        ends="oom",
        local_ends="ok",
        timeout=5.0,
        local_gap="what waits in sockets is not limited for all processes together",
    ),
    Hostile(
        "spared by the kernel",
        "the choice for lack of memory: a score below the worker's",
        "try: open('/proc/self/oom_score_adj', 'w').write('0')\nexcept OSError as error: print(error)\n"
        "if int(open('/proc/self/oom_score_adj').read()) < 1000: print('REACHED')",
    ),
    Hostile(
        "lack of memory in the compiler",
        "the report of a program that does not even begin",
        "compile('x = [' + '(a, b), ' * 3_000_000 + ']', 'x', 'exec')",
        ends="oom timeout",
        timeout=3.0,
    ),
)

# --- folders ---

_FILL = """
import os
written, piece, full = 0, bytes(1 << 20), False
for k in range(8):
    try:
        with open(f"%s/{k}", "wb", 0) as file:
            for _ in range(20): written += file.write(piece)
    except OSError as error: print(error); break
print("REACHED" if written > %d << 20 else "stopped", written)
"""
_INODES = """
import os
made = 0
try:
    for folder in range(6):
        os.mkdir(f"%s/{folder}")
        for k in range(5_000):
            os.close(os.open(f"%s/{folder}/{k}", os.O_CREAT)); made += 1
except OSError as error: print(error)
print("REACHED" if made > 20_100 else "stopped", made)
"""
_QUEUES = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
made = 0
while made < 300 and libc.mq_open(b"/queue%d" % made, os.O_CREAT | os.O_RDWR, 0o600, None) >= 0: made += 1
print("REACHED" if made > 256 else "stopped", made, os.strerror(ctypes.get_errno()))
"""


def _fill(name: str, folder: str, mebibytes: int) -> Hostile:
    return Hostile(f"{name} filled", "the room in it", _FILL % (folder, mebibytes), says="stopped", timeout=5.0)


FOLDERS = (
    _fill("workspace", ".", 32),
    _fill("/tmp", "/tmp", 32),
    _fill("/dev/shm", "/dev/shm", 8),
    Hostile("message queues", "the kernel's memory for them", _QUEUES, says="stopped"),
    Hostile(
        "empty files in the workspace", "the memory of their names", _INODES % (".", "."), timeout=5.0, says="stopped"
    ),
    Hostile(
        "empty files in /dev/shm",
        "the same, where Docker's own shm_size does not limit them",
        _INODES % ("/dev/shm", "/dev/shm"),
        timeout=5.0,
        says="stopped",
    ),
    Hostile(
        "workspace without rights",
        "the folder itself",
        "import os\nfor work in (lambda: os.chmod('.', 0), lambda: os.rmdir(os.getcwd()),\n"
        "             lambda: os.rename('.', '/tmp/x'), lambda: os.chown('.', os.getuid(), -1)):\n"
        "    try: work()\n    except OSError as error: print(error)\n    else: print('REACHED')",
    ),
)

# --- output ---


def _kept_bounded(scene: Scene, result: RunResult) -> None:
    kept = sum(len(piece) for stream in (result.stdout, result.stderr) for piece in (stream.head, stream.tail))
    assert kept <= 2 * 64 * 1024
    assert result.stdout.total + result.stderr.total <= 8 * _MIB


def _flood(name: str, code: str, ends: str = "output_limit", kind: str = "run") -> Hostile:
    return Hostile(name, "the memory of worker and client", code, kind, ends, flood=True, then=_kept_bounded)


OUTPUT = (
    _flood("one line of 16 MB", "print('x' * (16 << 20))"),
    _flood("flood of stdout", "import os\nwhile True: os.write(1, b'x' * 65_536)"),
    _flood("flood of stderr", "import os\nwhile True: os.write(2, b'x' * 65_536)"),
    _flood("flood of both", "import os\nos.fork()\nwhile True: os.write(1, b'x' * 4_096); os.write(2, b'y' * 4_096)"),
    _flood("flood of a cell", "while True: print('x' * 1_000)", kind="cell"),
    _flood(
        "flood of those left behind",
        "import os\nfor _ in range(20):\n    if os.fork() == 0:\n        os.setsid()\n"
        "        while True: os.write(1, b'x' * 65_536)",
        ends="ok output_limit",
    ),
    _flood(
        "flood of a thread between cells",
        "import os, threading\ndef flood():\n    while True: os.write(1, b'x' * 65_536)\n"
        "threading.Thread(target=flood).start()",
        ends="ok output_limit",
        kind="cell",
    ),
    Hostile(
        "bytes that are no UTF-8",
        "the text for the model",
        "import os\nos.write(1, bytes(range(128, 256)) * 1_000)\nos.write(2, b'\\xed\\xa0\\x80 \\xf4\\x90\\x80\\x80')",
        says="\ufffd",
    ),
    Hostile("NULs", "the text for the model", "import os\nos.write(1, bytes(100_000))", says="\0"),
    Hostile(
        "lone surrogates in the output",
        "the text for the model",
        "import sys\nprint('\\ud800')\nprint('\\udfff', file=sys.stderr)",
        says=r"\\ud800",
    ),
)

# --- files that are hard to handle ---


def _strange_names(scene: Scene) -> None:
    scene.says(
        "run", "for n in (b'a\\nb', b'\\xff\\xfe', b'\\x1b[2J', b'  ', b'-rf'): open(n, 'w').write('x')", "(no output)"
    )
    assert {entry.path for entry in scene.box.list()} == {"a\nb", "\udcff\udcfe", "\x1b[2J", "  ", "-rf"}
    for entry in scene.box.list():
        assert scene.box.get(entry.path) == b"x"


def _long_names(scene: Scene) -> None:
    code = "import os\nfor k in range(9_900): os.close(os.open(b'%05d' % k + b'\\xff' * 245, os.O_CREAT))"
    assert scene.run(code, timeout=4.0).ok
    scene.refused(scene.box.list, why="too much")


def _link_out(scene: Scene) -> None:
    code = "import os\nos.symlink('@CANARY@', 'link')\nos.symlink('/', 'top')\nos.symlink('/tmp', 'tmp')\n"
    code += "os.symlink('/etc/passwd', 'users')\nos.symlink('/proc/self/environ', 'mine')\nos.symlink('link', 'twice')"
    assert scene.run(code).ok
    for path in ("link", "top@CANARY@", "users", "mine", "twice", "top/etc/passwd", "tmp/x"):
        scene.refused(lambda path=path: scene.box.get(path.replace("@CANARY@", scene.places["CANARY"])))
        scene.refused(lambda path=path: scene.box.list(path.replace("@CANARY@", scene.places["CANARY"])))
    for path in ("top/tmp/x", "tmp/x"):
        scene.refused(lambda path=path: scene.box.put({path: b"x"}))
    scene.box.put({"link": b"mine"})  # the link is replaced, not followed
    scene.says(
        "run",
        "import os\nleft = [n for n in os.listdir('/tmp') if os.lstat('/tmp/' + n).st_uid]\n"
        "print(os.path.islink('link'), open('link').read(), left)",
        "False mine []",
    )


def _links_that_change(scene: Scene) -> None:
    code = "import os\nos.mkdir('real')\nif os.fork() == 0:\n    os.symlink('/tmp', 'link')\n    while True:\n"
    code += "        for name in ('real', 'link'):\n            os.rename(name, 'd'); os.rename('d', name)\n"
    scene.says("cell", code, "(no output)")
    for k in range(300):
        try:
            scene.box.put({f"d/{k}": b"x"})
        except Exception as error:  # noqa: BLE001 - any but a refusal fails the case
            scene.refused(lambda error=error: _raise(error))
    scene.says("run", "import os\nprint([n for n in os.listdir('/tmp') if os.lstat('/tmp/' + n).st_uid])", "[]")


def _raise(error: Exception) -> None:
    raise error


def _no_plain_files(scene: Scene) -> None:
    code = "import os, socket\nos.mkfifo('pipe')\nsocket.socket(socket.AF_UNIX).bind('socket')\nos.mkdir('folder')"
    assert scene.run(code).ok
    for path in ("pipe", "socket", "folder"):
        scene.refused(lambda path=path: scene.box.get(path))
    for path in ("pipe", "socket"):
        scene.box.put({path: b"x"})
        assert scene.box.get(path) == b"x"
    scene.refused(lambda: scene.box.put({"folder": b"x"}))


def _nothing_is_left(scene: Scene) -> None:
    code = "import os\nfolders = ('.', '/tmp', '/dev/shm')\n"
    code += "print([n for f in folders for n in os.listdir(f) if os.lstat(f + '/' + n).st_uid])"
    scene.says("run", code, "[]")


def _trees_without_rights(scene: Scene) -> None:
    code = "import os\nfor k in range(5):\n    os.makedirs(f'{k}/a/b')\n    open(f'{k}/a/b/c', 'w').close()\n"
    code += "    for path in (f'{k}/a/b/c', f'{k}/a/b', f'{k}/a', f'{k}'): os.chmod(path, 0)"
    assert scene.run(code).ok
    scene.refused(lambda: scene.box.get("0/a/b/c"))
    scene.refused(lambda: scene.box.put({"0/x": b"x"}))
    scene.box.list()


def _mixed_owners(scene: Scene) -> None:
    nest = "import os\nos.umask(0o77)\nfor k in range(4):\n    os.makedirs(f'{base}/{k}/x', exist_ok=True)\n"
    nest += "    open(f'{base}/{k}/x/y', 'w').close()\n"
    for kind, base in (("run", "one"), ("cell", "two")):
        assert scene.play(kind, f"base = {base!r}\n{nest}os.chmod(base, 0o1777)").ok
    for kind, base in (("run", "two"), ("cell", "one")):
        assert scene.play(kind, f"base = '{base}/theirs'\n{nest}").ok
    scene.box.list()


def _deep(width: int) -> Callable[[Scene], None]:
    def dig(scene: Scene) -> None:
        code = f"import os\nfor _ in range(1_000):\n    os.mkdir('d' * {width}); os.chdir('d' * {width})"
        assert scene.run(code, timeout=5.0).ok
        scene.refused(scene.box.list, why="levels|too much")

    return dig


def _upload(scene: Scene) -> None:
    data = bytes(100 * _MIB)
    scene.refused(lambda: scene.box.put({"big": data}), why="cannot be written")


def _sparse(scene: Scene) -> None:
    code = "import os\nfile = open('big', 'wb')\ntry: file.truncate(1 << 40)\nexcept OSError as error: print(error)\n"
    result = scene.run(code + "file.truncate(30 << 20)")
    assert result.ok
    assert "too large" in result.text
    scene.refused(lambda: scene.box.get("big"), why="at most")
    assert scene.box.run("1", fetch=["big"]).files == {}


_PATHS = ("", ".", "/", "..", "../x", "a/../../x", "/etc/passwd", "//etc/passwd", "\ud800", "a\ud800/b", "x\0y", "./..")


def _paths(scene: Scene) -> None:
    for path in (*_PATHS, "x" * 300):
        scene.refused(lambda path=path: scene.box.put({path: b"x"}))
        scene.refused(lambda path=path: scene.box.get(path))
        if path not in ("", "."):
            scene.refused(lambda path=path: scene.box.list(path))
    assert scene.box.list() == scene.box.list(".") == scene.box.list("")
    scene.box.put({"x/" * 3_000 + "x": b"deep"})
    assert scene.box.get("x/" * 3_000 + "x") == b"deep"
    scene.refused(scene.box.list, why="levels")


def _shadows(scene: Scene) -> None:
    names = ("ast", "json", "linecache", "traceback", "struct", "codeop", "encodings", "sitecustomize", "usercustomize")
    scene.box.put({f"{name}.py": "raise SystemExit('shadowed')" for name in names})
    scene.says("run", "import json, ast\nprint(1)", "1")
    scene.says("cell", "x = 1\nx + 1", "2")
    assert "ZeroDivisionError" in scene.cell("1 / 0").text
    scene.box.list()


FILES = (
    Hostile("strange names", "list and get: newlines, bytes that are no text, escapes", _strange_names),
    Hostile("9,900 long names", "the length of a listing", _long_names, flood=True, after=_nothing_is_left),
    Hostile("links out of the workspace", "files outside, by get, list and put", _link_out, after=_nothing_is_left),
    Hostile("links that change meanwhile", "files outside, by put, between look and open", _links_that_change),
    Hostile(
        "pipes, sockets, folders", "the worker, which must not wait for them", _no_plain_files, after=_nothing_is_left
    ),
    Hostile("trees without rights", "the wipe of a reset", _trees_without_rights, after=_nothing_is_left),
    Hostile(
        "trees of two owners", "the wipe of a reset, in each other's folders", _mixed_owners, after=_nothing_is_left
    ),
    Hostile("1,000 folders deep", "list, and the wipe of a reset", _deep(1), after=_nothing_is_left),
    Hostile("1,000 folders deep with long names", "paths of 250 KB", _deep(250), after=_nothing_is_left),
    Hostile("100 MB upload", "the room in the workspace, by put", _upload, after=_nothing_is_left),
    Hostile("huge sparse file", "the client's memory, by get", _sparse, flood=True, after=_nothing_is_left),
    Hostile("paths that are none", "files outside, by '..', absolute and broken paths", _paths, after=_nothing_is_left),
    Hostile("modules in the workspace", "what the worker and the session import", _shadows, after=_nothing_is_left),
)

# --- input that is none ---


def _eight_megabytes(scene: Scene) -> None:
    for play in (scene.box.run, scene.box.exec, scene.box.shell):
        scene.refused(lambda play=play: play("#" + "\U0001f600" * 2_000_000), why="at most")
    scene.says("run", "print(1)", "1")


def _surrogates(scene: Scene) -> None:
    for kind in ("run", "cell", "shell"):
        result = scene.play(kind, "x = '\ud800'")
        assert result.status in ("ok", "error")
    scene.says("cell", "print(1)", "1")


def _bad_bytes(scene: Scene) -> None:
    assert scene.play("run", "print(ascii(input()))", stdin=b"\xff\xfe\n").text == r"'\udcff\udcfe'"


INPUT = (
    Hostile("8 MB of code", "the worker's memory", _eight_megabytes),
    Hostile("no code", "the parser", "", kind="cell", says="no output"),
    Hostile("NULs as code", "the parser", "\0" * 10_000, ends="error", says="null bytes"),
    Hostile("NULs as a command", "the shell", "echo \0 x", kind="shell", ends="error", says="null"),
    Hostile("lone surrogates as code", "the encoding of what is sent", _surrogates),
    Hostile("parse bomb", "the parser's stack", "-" * 500_000 + "1", ends="error oom killed"),
    Hostile("nested brackets", "the parser's stack", "(" * 500_000, ends="error", says="too many nested"),
    Hostile(
        "1 MB on stdin",
        "the worker, which must not wait for a reader",
        "import sys\nprint(len(sys.stdin.buffer.read()))",
        stdin=bytes(_MIB),
        says="1048576",
    ),
    Hostile("1 MB that nobody reads", "the same", "print('done')", stdin=bytes(_MIB), says="done"),
    Hostile("stdin that is no text", "the program's input", _bad_bytes),
)

RESOURCES = (*MEMORY, *FOLDERS, *OUTPUT, *FILES, *INPUT)
