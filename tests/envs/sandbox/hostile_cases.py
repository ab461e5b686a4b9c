"""The hostile corpus: what a case is, and all of them together.

A case's code says REACHED, on its output, where it got what it is after. So it must not, but where a backend is known
not to stop it: then it must, so that the documentation of that gap stays true.
"""

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from toolgym.envs.errors import ToolError
from toolgym.envs.sandbox.results import RunResult
from toolgym.envs.sandbox.sandbox import SyncSandbox

LATE = 1.0  # seconds beyond its deadline within which a call is answered: a promise of the software


class Late(AssertionError):
    """A call was answered too late."""


@dataclass
class Scene:
    """Where a case plays: a box to attack from, another one beside it, and things of the client to be after.

    Attributes:
        backend: of both boxes.
        box: the attacker's.
        neighbour: somebody else's, with a session.
        places: what code names by ``@NAME@``.
        gap: whether the backend is known not to stop it.
    """

    backend: str
    box: SyncSandbox
    neighbour: SyncSandbox
    places: Mapping[str, str]
    gap: bool = False

    def play(self, kind: str, code: str, *, timeout: float = 2.0, stdin: bytes = b"") -> RunResult:
        """Run code as a program, a cell or a shell command; it is answered in time, whatever it does."""
        for name, value in self.places.items():
            code = code.replace(f"@{name}@", value)
        begun = time.monotonic()
        if kind == "cell":
            result = self.box.exec(code, timeout=timeout)
        elif kind == "shell":
            result = self.box.shell(code, timeout=timeout, stdin=stdin)
        else:
            result = self.box.run(code, timeout=timeout, stdin=stdin)
        took = time.monotonic() - begun
        if took > timeout + LATE:
            raise Late(f"answered after {took:.2f} s, its deadline was {timeout} s: {result}")
        return result

    def run(self, code: str, *, timeout: float = 2.0) -> RunResult:
        return self.play("run", code, timeout=timeout)

    def cell(self, code: str, *, timeout: float = 2.0) -> RunResult:
        return self.play("cell", code, timeout=timeout)

    def says(self, kind: str, code: str, expected: str) -> None:
        """Code ends well and writes just this."""
        result = self.play(kind, code)
        assert (result.status, result.text) == ("ok", expected)

    def refused(self, work: Callable[[], object], *, why: str | None = None) -> None:
        """Something is refused with words for the model, not as a failure of ours."""
        with pytest.raises(ToolError, match=why):
            work()

    def judge(self, result: RunResult) -> None:
        """Whether it got what it was after, as the case says of this backend."""
        reached = b"REACHED" in result.stdout.head + result.stdout.tail + result.stderr.head + result.stderr.tail
        assert reached == self.gap, f"{'not ' * self.gap}stopped: {result.status}: {result.text[-1_500:]}"


Act = Callable[[Scene], None]
Then = Callable[[Scene, RunResult], None]


@dataclass(frozen=True)
class Hostile:
    """One kind of attack.

    Attributes:
        name: of the test.
        attacks: what it is after, one line.
        code: runs in the box; or what is done from the client's side.
        kind: of the code: ``run``, ``cell`` or ``shell``.
        ends: the statuses with which it may end, divided by blanks.
        local_ends: the same on the local backend, where they differ.
        says: a pattern that its text matches.
        timeout: seconds.
        stdin: of the code.
        then: what must hold afterwards, before the reset.
        after: what must hold after the reset.
        flood: whether the client's own memory is looked at.
        local_gap: what the local backend does not stop. The test proves it.
        local_skip: why it is not run on the local backend: it would harm this machine.
    """

    name: str
    attacks: str
    code: str | Act
    kind: str = "run"
    ends: str = "ok"
    local_ends: str = ""
    says: str = ""
    timeout: float = 2.0
    stdin: bytes = field(default=b"", repr=False)
    then: Then | None = None
    after: Act | None = None
    flood: bool = False
    local_gap: str = ""
    local_skip: str = ""

    def expected(self, backend: str) -> frozenset[str]:
        """The statuses with which it may end there."""
        return frozenset((self.local_ends if backend == "local" and self.local_ends else self.ends).split())

    def attack(self, scene: Scene) -> None:
        """Play it, up to the reset."""
        if not isinstance(self.code, str):
            self.code(scene)
            return
        result = scene.play(self.kind, self.code, timeout=self.timeout, stdin=self.stdin)
        assert result.status in self.expected(scene.backend), f"{result.status}: {result.text[-1_500:]}"
        scene.judge(result)
        assert re.search(self.says, result.text), result.text[-1_500:]
        if self.then is not None:
            self.then(scene, result)


def resident_peak() -> int:
    """Bytes that this process had resident at most since `forget_peak`."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def forget_peak() -> int:
    """Count the peak anew; bytes that are resident now."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- what holds afterwards, in many cases ---


def a_run_is_answered(scene: Scene, result: RunResult) -> None:
    scene.says("run", "print(6 * 7)", "42")


def a_cell_is_answered(scene: Scene, result: RunResult) -> None:
    scene.says("cell", "6 * 7", "42")


def the_session_was_lost(scene: Scene, result: RunResult) -> None:
    assert result.session_lost
    a_cell_is_answered(scene, result)


def the_session_lives(scene: Scene, result: RunResult) -> None:
    assert not result.session_lost
    a_cell_is_answered(scene, result)
