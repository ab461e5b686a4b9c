"""The hostile corpus on both backends: every case is answered, stopped or declared, and leaves nothing behind."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from toolgym.envs.sandbox.sandbox import SandboxPool, SyncSandbox

from .conftest import Bait, confined
from .hostile_cases import Hostile, Late, Scene, forget_peak, resident_peak
from .hostile_ends import ENDS
from .hostile_processes import PROCESSES
from .hostile_reach import REACH
from .hostile_resources import RESOURCES
from .hostile_worker import WORKER

CASES = (*PROCESSES, *WORKER, *ENDS, *RESOURCES, *REACH)
BACKENDS = ("docker", "local")
GROWTH = 20 * 1024 * 1024  # bytes that the client may grow by while it is flooded
PAGE = Path(__file__).parents[3] / "docs" / "sandbox-local.md"


def _parameters() -> Iterator[object]:
    for backend in BACKENDS:
        for case in CASES:
            name = f"{backend}-{case.name.replace(' ', '-')}"
            marks = [pytest.mark.docker] if backend == "docker" else []
            if backend == "local" and case.local_skip:
                marks = [pytest.mark.skip(reason=f"it would harm this machine: {case.local_skip}")]
            yield pytest.param(backend, case, id=name, marks=marks)


@pytest.fixture(scope="session")
def neighbours() -> dict[str, SyncSandbox]:
    """Somebody's box on each backend, with a session, for as long as the corpus is played."""
    return {}


def _neighbour(backend: str, pool: SandboxPool, neighbours: dict[str, SyncSandbox]) -> SyncSandbox:
    if backend not in neighbours:
        neighbours[backend] = pool.sandbox(retries=0).sync
        assert neighbours[backend].exec("kept = 'untouched'").ok
    return neighbours[backend]


@pytest.mark.parametrize(("backend", "case"), list(_parameters()))
def test_hostile_code_is_stopped(
    backend: str,
    case: Hostile,
    bait: Bait,
    pools: Callable[[str], SandboxPool],
    neighbours: dict[str, SyncSandbox],
) -> None:
    pool = pools(backend)
    if backend == "local" and not confined(pool):
        pytest.skip("the local backend has no namespaces, or no users, of its own here")
    box, neighbour = pool.sandbox(retries=0).sync, _neighbour(backend, pool, neighbours)
    gap = backend == "local" and bool(case.local_gap)
    scene = Scene(backend, box, neighbour, bait.places, gap=gap)
    try:
        before = _identity(box)
        resident = forget_peak()
        _attack(case, scene)
        grown = resident_peak() - resident
        assert not case.flood or grown < GROWTH, f"the client grew by {grown} bytes"
        box.reset()
        if case.after is not None:
            case.after(scene)
            box.reset()
        assert box.run("print('alive')").stdout.text == "alive\n"
        _assert_nothing_lives(before, at_once=_identity(box) == before)
        assert neighbour.exec("kept").stdout.text == "'untouched'\n"
        assert bait.untouched()
    finally:
        box.release()


def _attack(case: Hostile, scene: Scene) -> None:
    """Play a case. The machine of the tests may be busy with something else: late is what is late three times."""
    for tries_left in (2, 1, 0):
        try:
            case.attack(scene)
        except Late:
            if not tries_left:
                raise
            scene.box.reset()
        else:
            return


def _identity(box: SyncSandbox) -> tuple[int, str]:
    """The uid of a box's runs (its session has the next one), and its namespace of processes."""
    uid, namespace = box.run("import os\nprint(os.getuid(), os.readlink('/proc/self/ns/pid'))").stdout.text.split()
    return int(uid), namespace


def _assert_nothing_lives(box: tuple[int, str], *, at_once: bool) -> None:
    """No process of a box's code is left; where the box was replaced, its removal may still be under way."""
    deadline = time.monotonic() + (0.0 if at_once else 10.0)
    while left := _processes(*box):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.02)


def _processes(uid: int, namespace: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = (entry / "status").read_text()
            uids = {int(word) for word in status.split("\nUid:\t", 1)[1].split("\n", 1)[0].split()}
            if uids & {uid, uid + 1} and os.readlink(entry / "ns" / "pid") == namespace:
                found.append(status.replace("\n", " ")[:200])
        except (OSError, IndexError):
            continue
    return found


# --- the documentation ---

HEAD = """\
# What the sandbox stops, case by case

This table is made from the hostile corpus in `tests/envs/sandbox/` by its test, which plays every case on both
backends; do not edit it. "stopped" means: the case is answered in time with one of the statuses in brackets, does not
get what it is after, leaves no process and no file after a reset, and a neighbour's session notices nothing. The local
column is true for Linux where namespaces are allowed and the client is root; else `unprotected` of every result names
more than what is listed here.

The local backend says of itself that it does not protect from:

"""


def _page(unprotected: tuple[str, ...]) -> str:
    lines = [f"- {words}\n" for words in unprotected]
    lines += ["\n| case | what it attacks | Docker | local |\n|---|---|---|---|\n"]
    for case in CASES:
        cells = (case.name, case.attacks, _verdict(case, "docker"), _verdict(case, "local"))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    gaps = sum(bool(case.local_gap) for case in CASES)
    lines.append(f"\n{len(CASES)} cases; {gaps} of them are not stopped by the local backend.\n")
    return HEAD + "".join(lines)


def _verdict(case: Hostile, backend: str) -> str:
    if backend == "local" and case.local_skip:
        return f"not run: {case.local_skip}"
    if backend == "local" and case.local_gap:
        return f"**not stopped**: {case.local_gap}"
    if not isinstance(case.code, str):
        return "stopped"
    return f"stopped ({', '.join(sorted(case.expected(backend)))})"


def test_names_are_told_apart() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_the_documentation_says_what_the_corpus_proves(pools: Callable[[str], SandboxPool]) -> None:
    pool = pools("local")
    if not confined(pool):
        pytest.skip("the local backend has no namespaces, or no users, of its own here")
    page = _page(pool._pool.backend.unprotected)
    if os.environ.get("TOOLGYM_WRITE_DOCS") == "1":
        PAGE.write_text(page)
    assert PAGE.exists(), f"there is no {PAGE.name}: run this test with TOOLGYM_WRITE_DOCS=1"
    assert PAGE.read_text() == page, f"{PAGE.name} is out of date: run this test with TOOLGYM_WRITE_DOCS=1"
