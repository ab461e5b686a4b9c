"""What a sandbox promises to those who use it, whatever makes its boxes."""

import asyncio
import os
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from toolgym.envs import (
    AssistantMessage,
    ConfigurationError,
    Episode,
    SandboxEnv,
    SandboxFailure,
    SandboxLimits,
    SandboxPool,
    ToolCall,
    ToolError,
    ToolVectorEnv,
    tool,
)
from toolgym.envs.sandbox.box import Box
from toolgym.envs.sandbox.choice import SandboxWarning
from toolgym.envs.sandbox.limits import MIB
from toolgym.envs.sandbox.local_backend import LocalBackend
from toolgym.envs.sandbox.results import Output, RunResult, RunStatus
from toolgym.envs.sandbox.sandbox import Sandbox, SyncSandbox

NOWHERE = "unix:///nowhere/docker.sock"


def made(backend: str, **options: Any) -> SandboxPool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SandboxWarning)
        return SandboxPool(backend, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=[pytest.param("docker", marks=pytest.mark.docker), "local"])
def pool(request: pytest.FixtureRequest) -> Iterator[SandboxPool]:
    if request.param == "docker":
        request.getfixturevalue("docker_engine")
    with made(request.param, size=3) as some:
        yield some


@pytest.fixture
def box(pool: SandboxPool) -> Iterator[SyncSandbox]:
    sandbox = pool.sandbox()
    yield sandbox.sync
    sandbox.sync.release()


def test_a_program_is_run_and_told_of(box: SyncSandbox) -> None:
    result = box.run("import sys\nprint('out')\nprint('err', file=sys.stderr)")
    assert (result.status, result.exit_code, result.signal) == (RunStatus.OK, 0, None)
    assert (result.stdout.text, result.stderr.text) == ("out\n", "err\n")
    assert result.text == "out\nerr"
    assert 0 < result.cpu < 5
    assert result.peak_memory > MIB


def test_an_error_is_a_traceback_of_the_code_alone(box: SyncSandbox) -> None:
    result = box.run("def f():\n    return 1 / 0\nf()")
    assert (result.status, result.exit_code) == (RunStatus.ERROR, 1)
    lines = result.stderr.text.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert {line.split('"')[1] for line in lines if line.startswith("  File")} == {"snippet.py"}
    assert "    return 1 / 0" in lines


@pytest.mark.parametrize(
    ("code", "status", "exit_code"),
    [
        ("raise SystemExit", RunStatus.OK, 0),
        ("raise SystemExit(3)", RunStatus.ERROR, 3),
        ("import os; os._exit(7)", RunStatus.ERROR, 7),
        ("def f(:", RunStatus.ERROR, 1),
        ("import os; os.kill(os.getpid(), 9)", RunStatus.KILLED, None),
        ("x = bytearray(10**12)", RunStatus.OOM, 1),
    ],
)
def test_how_it_ended_is_said(box: SyncSandbox, code: str, status: RunStatus, exit_code: int | None) -> None:
    result = box.run(code)
    assert (result.status, result.exit_code) == (status, exit_code)


def test_time_is_up_and_what_was_printed_is_kept(box: SyncSandbox) -> None:
    result = box.run("print('before')\nwhile True: pass", timeout=0.3)
    assert result.status is RunStatus.TIMEOUT
    assert result.text.startswith("before\n[stopped: time limit reached after 0.")


def test_a_flood_is_stopped_and_its_head_and_tail_are_kept(pool: SandboxPool) -> None:
    sandbox = pool.sandbox().sync
    result = sandbox.run("print('first')\nwhile True: print('x' * 1000)")
    sandbox.release()
    assert result.status is RunStatus.OUTPUT_LIMIT
    assert result.stdout.text.startswith("first\nxxx")
    assert result.stdout.dropped > MIB
    assert len(result.text) < 70_000


def test_programs_read_stdin_and_files_and_bring_files_back(box: SyncSandbox) -> None:
    code = "open('b/out', 'w').write(input() + open('a/in').read())"
    result = box.run(code, stdin="hello ", files={"a/in": "world", "b/x": b"\xff"}, fetch=["b/out", "b/x", "none"])
    assert dict(result.files) == {"b/out": b"hello world", "b/x": b"\xff"}
    assert [(entry.path, entry.size, entry.is_dir) for entry in box.list("b")] == [
        ("b/out", 11, False),
        ("b/x", 1, False),
    ]
    assert box.get("b/out") == b"hello world"
    big = os.urandom(3 * MIB + 1)
    box.put({"big": big})
    assert box.get("big") == big
    with pytest.raises(ToolError, match="'nothing' cannot be read"):
        box.get("nothing")
    with pytest.raises(ToolError, match="no path inside the workspace"):
        box.put({"../x": ""})


def test_a_session_keeps_its_variables_and_shows_its_last_value(box: SyncSandbox) -> None:
    assert box.exec("import math\nx = 40").text == "(no output)"
    assert box.exec("x + 2").text == "42"
    assert box.exec("_ * 2").text == "84"
    broken = box.exec("y = 1\nx / 0")
    assert broken.status is RunStatus.ERROR
    assert "cell-4.py" in broken.text
    assert box.exec("y").text == "1"


def test_a_session_outlives_its_time_being_up_with_its_state(box: SyncSandbox) -> None:
    box.exec("x = 1")
    late = box.exec("x = 2\nwhile True: pass", timeout=0.3)
    assert (late.status, late.session_lost) == (RunStatus.TIMEOUT, False)
    assert box.exec("x").text == "2"
    deaf = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
    stubborn = box.exec(deaf, timeout=0.3)
    assert (stubborn.status, stubborn.session_lost) == (RunStatus.TIMEOUT, True)
    assert "the session was lost" in stubborn.text
    assert "NameError" in box.exec("x").text


def test_runs_and_the_session_share_the_workspace_and_nothing_else(box: SyncSandbox) -> None:
    box.exec("x = 5\nopen('of_session', 'w').write('s')")
    assert "NameError" in box.run("x").text
    assert box.run("open('of_session', 'a').write('r'); import os; os.remove('of_session')").ok
    assert box.exec("x").text == "5"


def test_a_shell_command(box: SyncSandbox) -> None:
    result = box.shell("echo one > f; cat f - | sort; exit 3", stdin="another\n")
    assert (result.status, result.exit_code, result.stdout.text) == (RunStatus.ERROR, 3, "another\none\n")
    assert result.text.endswith("[exit code 3]")


def test_nothing_of_one_lease_is_found_in_the_next(pool: SandboxPool) -> None:
    first = pool.sandbox().sync
    first.exec("secret = 1\nimport subprocess\nsubprocess.Popen(['sleep', '61'], start_new_session=True)")
    assert "sleep" in first.shell("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").text
    first.put({"a/b/c": "x"})
    first.shell("touch /tmp/left /dev/shm/left; echo left > ~/left")
    first.reset()
    assert first.list() == []
    assert "NameError" in first.exec("secret").text
    assert "sleep" not in first.shell("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").text
    assert first.shell("find /tmp /dev/shm ~ -maxdepth 2 -name left").text == "(no output)"
    first.release()


def test_forks_of_a_template_draw_other_random_numbers(box: SyncSandbox) -> None:
    code = "import random, numpy; print(random.random(), numpy.random.rand())"
    drawn = [box.run(code).text.split() for _ in range(3)]
    assert len({a for a, _ in drawn}) == len({b for _, b in drawn}) == 3


def test_one_call_a_box(pool: SandboxPool) -> None:
    lender = pool.sandbox(lease="call").sync
    assert lender.run("print(open('given').read())", files={"given": "x"}).text == "x"
    assert lender.shell("ls").text == "(no output)"
    with pytest.raises(ConfigurationError, match="lease='call' keeps no session"):
        lender.exec("1")
    with pytest.raises(ConfigurationError, match="lease='call' keeps no files"):
        lender.put({"kept": "?"})


def test_a_sandbox_that_is_forgotten_gives_its_box_back() -> None:
    with made("local", size=1, acquire_timeout=5.0) as pool:
        for k in range(3):
            assert pool.sandbox().sync.run(f"print({k})").text == str(k)
        with pool.sandbox() as box:
            assert box.exec("1").text == "1"
        assert pool.sandbox().sync.run("print(2)").text == "2"


@pytest.mark.parametrize(
    "call",
    [
        lambda box: box.run(5),
        lambda box: box.run("1", timeout=1e9),
        lambda box: box.run("1", stdin=3),
        lambda box: box.run("1", files=["a"]),
        lambda box: box.run("1", files={"a": 1}),
        lambda box: box.run("1", fetch="name"),
        lambda box: box.get(3),
        lambda box: box.put({3: "x"}),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(box: SyncSandbox, call: Any) -> None:
    box.exec("kept = 1")
    with pytest.raises(ConfigurationError, match="expected"):
        call(box)
    assert box.exec("kept").text == "1"


def test_many_callers_on_many_loops_and_threads(pool: SandboxPool) -> None:
    async def callers(first: int) -> list[str]:
        lender = pool.sandbox(lease="call")
        results = await asyncio.gather(*(lender.run(f"print({first + k})") for k in range(10)))
        return [result.stdout.text for result in results]

    outcomes: dict[int, list[str]] = {}
    threads = [
        threading.Thread(target=lambda n=n: outcomes.update({n: asyncio.run(callers(n))})) for n in (0, 100, 200)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {n: [f"{n + k}\n" for k in range(10)] for n in (0, 100, 200)}


def test_a_call_that_is_cancelled_ends_in_the_box_too(pool: SandboxPool) -> None:
    sandbox = pool.sandbox()

    async def main() -> RunResult:
        await sandbox.exec("x = 1")
        running = asyncio.create_task(sandbox.run("open('began', 'w')\nwhile True: pass", timeout=60.0))
        (box,) = pool._pool._leased
        while not any(pending.began for pending in list(box._connection._pending.values())):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled()
        return await sandbox.exec("x")

    assert asyncio.run(main()).text == "1"
    sandbox.sync.release()


class PythonEnv(SandboxEnv):
    """Runs what it is told."""

    @tool
    async def python(self, code: str) -> str:
        """Run Python."""
        return (await self.sandbox.run(code)).text

    @tool
    def blocking(self, code: str) -> str:
        """Run Python, from a plain function."""
        return self.sandbox.sync.run(code).text

    def score(self, episode: Episode) -> float:
        return 1.0


def say(name: str, code: str) -> AssistantMessage:
    return AssistantMessage("", (ToolCall(name, {"code": code}),))


def test_an_author_needs_two_lines(pool: SandboxPool) -> None:
    envs = ToolVectorEnv.of(PythonEnv, num_envs=2, tasks=["?"], sandbox=pool)
    envs.reset(seed=0)
    observations, *_ = envs.step([say("python", "print(1)"), say("blocking", "print(2)")])
    assert [messages[0].content for messages in observations] == ["1", "2"]
    envs.step([AssistantMessage("done")] * 2)
    assert pool.state.leased == 0
    envs.close()
    assert pool.sandbox(lease="call").sync.run("print(3)").text == "3"


def test_a_vector_shares_one_pool_and_closes_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SandboxWarning)
        envs = ToolVectorEnv.of(PythonEnv, num_envs=3, tasks=["?"], sandbox="local")
    pools = {env.sandbox.pool for env in envs.envs}  # type: ignore[attr-defined]
    assert len(pools) == 1
    envs.reset(seed=0)
    envs.step([say("python", "1")] * 3)
    envs.close()
    with pytest.raises(SandboxFailure, match="closed"):
        pools.pop().sandbox().sync.run("1")


def test_a_pool_that_is_exhausted_is_a_failure_and_not_a_message() -> None:
    with made("local", size=1, acquire_timeout=0.3) as pool:
        holder = pool.sandbox()
        holder.sync.run("1")
        envs = ToolVectorEnv.of(PythonEnv, num_envs=1, tasks=["?"], sandbox=pool)
        envs.reset(seed=0)
        _, rewards, _, truncations, infos = envs.step([say("python", "1")])
        assert truncations[0]
        assert rewards[0] != rewards[0]
        assert infos["failure"][0].kind == "sandbox_pool_exhausted"
        envs.close()


def test_without_an_engine_auto_is_local_and_says_what_it_is_not() -> None:
    with pytest.warns(SandboxWarning, match="no Docker engine answers, so code runs in child processes"):
        pool = SandboxPool("auto", size=1, base_url=NOWHERE)
    result = pool.sandbox().sync.run("print(1)")
    assert pool.backend == "local"
    assert result.text == "1"
    assert result.unprotected
    pool.close()


def test_docker_without_an_engine_is_a_failure_that_names_it() -> None:
    with (
        SandboxPool("docker", size=1, base_url=NOWHERE, acquire_timeout=0.5) as pool,
        pytest.raises(SandboxFailure, match="no Docker engine answers"),
    ):
        pool.sandbox().sync.run("1")


def test_local_boxes_without_namespaces_still_write_nowhere_else(tmp_path: Any) -> None:
    with made("local", size=1, confine=False) as pool:
        box = pool.sandbox().sync
        target = tmp_path / "escaped"
        tmp_path.chmod(0o777)
        refused = box.run(f"open({str(target)!r}, 'w')")
        assert "PermissionError" in refused.text
        assert any("the network" in text for text in refused.unprotected)
        assert box.run("open('inside', 'w').write('x'); print(open('inside').read())").text == "x"
        folder = box.run("import os; print(os.getcwd())").text
    assert not target.exists()
    assert not os.path.exists(folder)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SandboxPool("podman"), "sandbox among auto, docker, local, actual 'podman'"),  # type: ignore[arg-type]
        (lambda: SandboxPool("local", size=0), "size of the pool as an int of 1 or more, actual 0"),
        (lambda: SandboxPool("local", size=2, warm=3), r"warm in \[0, size=2\]"),
        (lambda: SandboxPool("local", acquire_timeout=0), "acquire_timeout above 0"),
        (lambda: SandboxPool("local", colour="red"), "options of the local sandbox"),
        (lambda: SandboxLimits(memory=0), "SandboxLimits.memory above 0"),
        (lambda: SandboxLimits(timeout="3"), "SandboxLimits.timeout as a number"),  # type: ignore[arg-type]
        (lambda: SandboxLimits(workspace=400 * MIB), "live in its memory"),
        (lambda: SandboxLimits(processes=3), "processes of 16 or more"),
        (lambda: PythonEnv(["?"], sandbox="local", tool_timeout=1.0), "tool_timeout of .* or more, actual 1.0"),
        (lambda: PythonEnv(["?"], sandbox="local", sandbox_retries=-1), "retries as an int of 0 or more"),
    ],
)
def test_what_is_wrong_is_refused_by_name(make: Any, text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SandboxWarning)
        with pytest.raises(ConfigurationError, match=text):
            make()


def test_a_pool_has_its_own_limits(pool: SandboxPool) -> None:
    with pytest.raises(ConfigurationError, match="has limits of its own"):
        PythonEnv(["?"], sandbox=pool, sandbox_limits=SandboxLimits(timeout=1.0))
    with pytest.raises(ConfigurationError, match="timeout above 0 seconds and up to 86,400, actual -1"):
        pool.sandbox().sync.run("1", timeout=-1)
    with pytest.raises(ConfigurationError, match="lease among episode, call, actual 'week'"):
        Sandbox(pool, lease="week")  # type: ignore[arg-type]


class Unsteady:
    """A backend of one's own around the local one: the first starts fail, pings hang when told to."""

    def __init__(self, failures: int) -> None:
        self.inner, self.failures, self.hang = LocalBackend(SandboxLimits(timeout=7.0)), failures, False
        self.name, self.limits, self.unprotected = "unsteady", self.inner.limits, ("everything",)

    async def prepare(self) -> None: ...
    async def tidy(self) -> None: ...
    async def close(self) -> None: ...
    async def sweep(self) -> int:
        return 0

    async def create(self) -> Box:
        if self.failures:
            self.failures -= 1
            raise SandboxFailure("not now", kind="start_failed")
        box = await self.inner.create()
        ping = box.ping

        async def maybe(timeout: float = 10.0) -> None:
            await (asyncio.sleep(60) if self.hang else ping(timeout))

        box.ping = maybe  # type: ignore[method-assign]
        return box


def test_a_start_that_fails_fails_one_caller_and_not_those_behind() -> None:
    with SandboxPool(Unsteady(failures=1), size=1) as pool:

        async def main() -> list[object]:
            callers = [pool.sandbox(lease="call", retries=0).run("print(1)") for _ in range(3)]
            return list(await asyncio.gather(*callers, return_exceptions=True))

        outcomes = asyncio.run(main())
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["RunResult", "RunResult", "SandboxFailure"]


def test_a_caller_that_leaves_while_it_is_handed_a_box_does_not_keep_it() -> None:
    backend = Unsteady(failures=0)
    with SandboxPool(backend, size=1, acquire_timeout=5.0) as pool:
        assert pool.sandbox(lease="call").sync.run("1").ok
        backend.hang = True

        async def leave() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pool.sandbox().run("1"), 0.3)

        asyncio.run(leave())
        backend.hang = False
        assert pool.sandbox().sync.run("print(2)").text == "2"


def test_a_backend_of_ones_own_has_its_own_limits() -> None:
    with SandboxPool(Unsteady(failures=0), size=1) as pool:
        assert pool.limits.timeout == 7.0
    with pytest.raises(ConfigurationError, match="has its limits and options already"):
        SandboxPool(Unsteady(failures=0), limits=SandboxLimits())


@pytest.mark.docker
def test_boxes_that_start_together_have_users_of_their_own() -> None:
    with SandboxPool("docker", size=6) as pool:

        async def users() -> list[str]:
            boxes = [pool.sandbox() for _ in range(6)]
            return [result.text for result in await asyncio.gather(*(box.shell("id -u") for box in boxes))]

        assert len(set(asyncio.run(users()))) == 6


def test_what_a_result_says_is_never_empty() -> None:
    assert RunResult(RunStatus.OK).text == "(no output)"
    assert RunResult(RunStatus.ERROR, exit_code=3).text == "[exit code 3]"
    assert RunResult(RunStatus.KILLED, signal=11).text == "[ended by signal 11]"
    assert Output(b"ab", b"yz", 10).text == "ab\n[... 6 bytes dropped ...]\nyz"
