"""Whatever happens to the client or to the engine: nothing is left behind, and what was in flight ends with a name."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import docker
import gymnasium
import psutil
import pytest

from toolgym.agents.chat import ChatFormat
from toolgym.agents.policy import SampleRequest
from toolgym.agents.scripted_policy import ScriptedPolicy
from toolgym.envs import AssistantMessage, Task, ToolCall
from toolgym.envs.catalog import code_math
from toolgym.envs.sandbox.docker_engine import LABEL, OWNER
from toolgym.envs.sandbox.owners import Owner
from toolgym.envs.sandbox.results import SandboxFailure
from toolgym.envs.sandbox.sandbox import SandboxPool
from toolgym.rollout.collector import Collector
from toolgym.rollout.limits import Limits

pytestmark = pytest.mark.docker
CLIENT = Path(__file__).with_name("doomed_client.py")
SOCKET = "unix:///var/run/docker.sock"


def boxes_of(api: docker.APIClient, pid: int | None = None) -> list[dict[str, Any]]:
    """The containers of our product that a process has made (or anybody)."""
    found = api.containers(all=True, filters={"label": LABEL})
    owners = [(entry, Owner.parse(entry["Labels"][OWNER])) for entry in found]
    return [entry for entry, owner in owners if pid is None or (owner is not None and owner.pid == pid)]


def gone_within(api: docker.APIClient, pid: int, seconds: float, but: Sequence[dict[str, Any]] = ()) -> bool:
    """Whether all containers of a process but some are removed in time; waits by the engine's own events."""
    deadline = time.monotonic() + seconds
    kept = {entry["Id"] for entry in but}
    while left := [entry for entry in boxes_of(api, pid) if entry["Id"] not in kept]:
        if time.monotonic() > deadline:
            return False
        with contextlib.suppress(Exception):  # it is gone already, or the time is up: the loop asks again
            api.wait(left[0]["Id"], timeout=max(0.1, deadline - time.monotonic()), condition="removed")
    return True


@pytest.fixture
def api(docker_engine: None) -> Iterator[docker.APIClient]:
    client = docker.APIClient(version="auto")
    yield client
    client.close()


@contextlib.contextmanager
def doomed(state: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen([sys.executable, CLIENT, state, SOCKET], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline().split()
        assert said[:1] == ["ready"]
        yield process, said[-1]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("state", ["idle", "running", "session", "resetting"])
def test_a_killed_client_leaves_no_box(api: docker.APIClient, state: str) -> None:
    before = {name: len(found or []) for name, found in (("v", api.volumes()["Volumes"]), ("n", api.networks()))}
    with doomed(state) as (process, _):
        assert boxes_of(api, process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert gone_within(api, process.pid, 5.0)
    after = {name: len(found or []) for name, found in (("v", api.volumes()["Volumes"]), ("n", api.networks()))}
    assert after == before


def test_what_a_client_killed_while_creating_leaves_goes_with_the_next_start(api: docker.APIClient) -> None:
    with doomed("creating") as (process, _):
        assert boxes_of(api, process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with SandboxPool("docker", size=1):
            assert gone_within(api, process.pid, 5.0)


def test_living_owners_keep_their_boxes_in_a_sweep(api: docker.APIClient) -> None:
    with SandboxPool("docker", size=1) as mine:
        sandbox = mine.sandbox()
        sandbox.sync.exec("x = 6")
        with SandboxPool("docker", size=1) as other:
            other.sandbox().sync.run("1")
        assert sandbox.sync.exec("x * 7").stdout.text == "42\n"


def test_a_closed_pool_leaves_no_box(api: docker.APIClient) -> None:
    others = boxes_of(api, os.getpid())
    pool = SandboxPool("docker", size=3, warm=3)
    sandbox = pool.sandbox()
    sandbox.sync.run("1")
    pool.close()
    pool.close()
    assert gone_within(api, os.getpid(), 5.0, others)
    with pytest.raises(SandboxFailure) as caught:
        sandbox.sync.run("1")
    assert caught.value.kind == "sandbox_closed"


def test_32_boxes_at_once_are_made_and_removed(api: docker.APIClient) -> None:
    """A burst of threads: none is lost, none leaks."""
    others = boxes_of(api, os.getpid())
    with SandboxPool("docker", size=16) as pool:
        results: list[str] = []
        callers = [pool.sandbox(lease="call") for _ in range(32)]
        threads = [
            threading.Thread(target=lambda box=box, k=k: results.append(box.sync.run(f"print({k})").stdout.text))
            for k, box in enumerate(callers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(map(int, results)) == list(range(32))
        assert pool.state.made <= 16
    assert gone_within(api, os.getpid(), 5.0, others)


class Daemon:
    """A second engine, of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"unix://{folder}/docker.sock"
        self.start()

    def start(self) -> None:
        folder = self.folder
        command = ["dockerd", "--iptables=false", "--bridge=none", "--host", self.url, "--pidfile", f"{folder}/pid"]
        command += ["--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec"]
        with (folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 60.0
        while True:
            try:
                self.api = docker.APIClient(self.url, version="auto", timeout=10)
                self.api.ping()
                return
            except Exception:  # noqa: BLE001 - whatever a client says while nobody answers
                assert time.monotonic() < deadline, (folder / "log").read_text()[-2_000:]
                time.sleep(0.1)

    def stop(self, number: int) -> None:
        self.process.send_signal(number)
        self.process.wait(30)
        known = self.folder / "exec" / "containerd" / "containerd.pid"
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            containerd = psutil.Process(int(known.read_text()))
            containerd.kill()  # it ends with its engine, in a while
            while containerd.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
            # Where nobody reaps orphans, it looks alive to the next engine, which would wait for it.
            known.unlink()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            for entry in self.api.containers(all=True):
                self.api.remove_container(entry["Id"], force=True)
        if self.process.poll() is None:
            self.stop(signal.SIGTERM)


def left(daemon: Daemon) -> str:
    """What there still is, and the last words of the engine."""
    states = [(entry["Names"], entry["State"], entry["Status"]) for entry in boxes_of(daemon.api)]
    return f"{states}\n{(daemon.folder / 'log').read_text()[-3_000:]}"


@pytest.fixture(scope="module")
def daemon(docker_engine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    if os.getuid() != 0 or subprocess.run(["which", "dockerd"], check=False, capture_output=True).returncode:
        pytest.skip("a second engine needs root and dockerd")
    # Not below /tmp: sockets' paths are short, and a file system of layers does not lie on another one.
    folder = Path("/var/lib") / f"toolgym-test-{os.getpid()}"
    folder.mkdir()
    made = Daemon(folder)
    yield made
    made.close()
    # A killed engine leaves its mounts behind.
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if str(folder) in line]
    for mount in reversed(mounts):
        subprocess.run(["umount", "--lazy", mount], check=False)
    subprocess.run(["rm", "-rf", folder], check=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["terminated", "killed"])
def test_an_engine_that_goes_and_comes_back(daemon: Daemon, number: signal.Signals) -> None:
    with SandboxPool("docker", size=3, base_url=daemon.url, acquire_timeout=60.0) as pool:
        busy, idle, holder = pool.sandbox(), pool.sandbox(), pool.sandbox()
        idle.sync.run("1")
        holder.sync.exec("x = 1")
        outcome: list[object] = []

        def work() -> None:
            try:
                outcome.append(busy.sync.run("while True: pass", timeout=50.0))
            except SandboxFailure as failure:
                outcome.append(failure)

        thread = threading.Thread(target=work)
        thread.start()
        while not any(p.began for box in list(pool._pool._leased) for p in list(box._connection._pending.values())):
            time.sleep(0.01)
        daemon.stop(number)
        thread.join(30.0)
        assert isinstance(outcome[0], SandboxFailure)
        assert outcome[0].kind == "sandbox_box_died"
        with pytest.raises(SandboxFailure) as lost:
            holder.sync.exec("x")
        assert lost.value.kind in ("sandbox_box_died", "sandbox_state_lost")
        idle.sync.release()
        # While nobody answers, a fresh box is waited for, not given up.
        waiter = threading.Thread(target=lambda: outcome.append(idle.sync.run("print(42)").stdout.text))
        waiter.start()
        daemon.start()
        waiter.join(60.0)
        assert outcome[1] == "42\n"
        for sandbox in (busy, holder):
            sandbox.sync.release()
        assert busy.sync.run("print(1)").ok
    with SandboxPool("docker", size=1, base_url=daemon.url):
        pass
    assert gone_within(daemon.api, os.getpid(), 10.0), left(daemon)


def test_a_collection_outlives_its_engine(daemon: Daemon, chat: ChatFormat) -> None:
    """Episodes in flight when the engine is killed fail by name; those after them run on fresh boxes."""

    def play(request: SampleRequest, member: int) -> AssistantMessage:
        assert request.task is not None
        if request.task.data["waits"] and not request.turn:
            return AssistantMessage("", (ToolCall("python", {"code": "while True: pass"}),))
        return code_math.solve(request.task, request.messages)

    with SandboxPool("docker", size=4, base_url=daemon.url, acquire_timeout=60.0) as pool:
        envs = gymnasium.make_vec("toolgym/CodeMath-v0", num_envs=4, sandbox=pool, mode="session")
        drawn = enumerate(envs.tasks.take(12))  # type: ignore[attr-defined]
        tasks = [Task(task.id, task.prompt, {**task.data, "waits": k < 4}) for k, task in drawn]

        def restart() -> None:
            while sum(p.began for b in list(pool._pool._leased) for p in list(b._connection._pending.values())) < 4:
                time.sleep(0.01)
            daemon.stop(signal.SIGKILL)
            daemon.start()

        thread = threading.Thread(target=restart)
        thread.start()
        limits = Limits(max_trajectory_tokens=8_192, max_completion_tokens=2_048, step_timeout=300.0)
        trajectories = Collector(envs, ScriptedPolicy(chat, play), chat, limits).collect(tasks)
        thread.join()
        envs.close()
    assert [t.failure.kind for t in trajectories[:4] if t.failure] == ["sandbox_box_died"] * 4
    assert [t.reward for t in trajectories] == [None] * 4 + [1.0] * 8
    assert gone_within(daemon.api, os.getpid(), 10.0), left(daemon)


def test_an_engine_that_never_comes_back_is_named(daemon: Daemon) -> None:
    daemon.stop(signal.SIGTERM)
    try:
        with SandboxPool("docker", size=1, base_url=daemon.url, acquire_timeout=2.0) as pool:
            with pytest.raises(SandboxFailure, match="no Docker engine answers") as caught:
                pool.sandbox().sync.run("1")
            assert caught.value.kind == "sandbox_engine_gone"
    finally:
        daemon.start()


def test_an_image_that_was_removed_is_built_anew(daemon: Daemon) -> None:
    with SandboxPool("docker", size=2, base_url=daemon.url) as pool:
        first, second = pool.sandbox(), pool.sandbox()
        assert first.sync.run("1").ok
        tag = asyncio.run(_tag(pool))
        daemon.api.remove_image(tag, force=True)
        assert second.sync.run("1").ok


async def _tag(pool: SandboxPool) -> str:
    return await pool.loop.call(pool._pool.backend.image())  # type: ignore[attr-defined, no-any-return]


def test_a_box_that_is_removed_in_mid_call(api: docker.APIClient) -> None:
    with SandboxPool("docker", size=2) as pool:
        sandbox, neighbour = pool.sandbox(), pool.sandbox()
        neighbour.sync.exec("x = 5")
        outcome: list[object] = []

        def work() -> None:
            try:
                outcome.append(sandbox.sync.run("while True: pass", timeout=30.0))
            except SandboxFailure as failure:
                outcome.append(failure)

        thread = threading.Thread(target=work)
        thread.start()
        while not any(p.began for box in list(pool._pool._leased) for p in list(box._connection._pending.values())):
            time.sleep(0.01)
        box = next(box for box in pool._pool._leased if box._connection._pending)
        api.remove_container(box.name, force=True)
        thread.join(10.0)
        assert isinstance(outcome[0], SandboxFailure)
        assert (outcome[0].kind, outcome[0].began) == ("sandbox_box_died", True)
        assert neighbour.sync.exec("x").stdout.text == "5\n"
        with pytest.raises(SandboxFailure, match="an earlier call"):
            sandbox.sync.run("1")
        sandbox.sync.release()
        assert sandbox.sync.run("1").ok


def test_a_box_that_died_before_anything_ran_is_replaced_without_a_word(api: docker.APIClient) -> None:
    with SandboxPool("docker", size=2) as pool:
        sandbox = pool.sandbox()
        sandbox.sync.put({"data.txt": "kept"})
        (box,) = pool._pool._leased
        api.remove_container(box.name, force=True)
        assert sandbox.sync.run("print(open('data.txt').read())").stdout.text == "kept\n"
        assert pool.state.replaced == 1


def test_a_hung_worker_is_found_out_and_replaced(api: docker.APIClient) -> None:
    with SandboxPool("docker", size=1) as pool:
        sandbox = pool.sandbox()
        assert sandbox.sync.run("1").ok
        (box,) = pool._pool._leased
        sandbox.sync.release()
        os.kill(api.inspect_container(box.name)["State"]["Pid"], signal.SIGSTOP)
        assert sandbox.sync.run("print('fresh')").stdout.text == "fresh\n"
        assert pool.state.replaced == 1
    with pytest.raises(docker.errors.NotFound):
        api.inspect_container(box.name)


def test_a_pool_that_is_exhausted_says_so(api: docker.APIClient) -> None:
    with SandboxPool("docker", size=1, acquire_timeout=0.5) as pool:
        holder = pool.sandbox()
        holder.sync.run("1")
        with pytest.raises(SandboxFailure, match="all 1 are in use: enlarge the pool") as caught:
            pool.sandbox().sync.run("1")
        assert caught.value.kind == "sandbox_pool_exhausted"
        assert holder.sync.run("1").ok
