"""`rollout` and `arollout`: all that was asked for, told on the way, and kept whatever happens."""

import asyncio
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
from control import BOTH, OURS, answer, nothing_left
from helpers import EchoEnv, echo_twice, vector

from toolgym.agents.chat import ChatFormat
from toolgym.agents.scripted_policy import ScriptedPolicy
from toolgym.envs import ConfigurationError, EpisodeContext, Task, ToolVectorEnv
from toolgym.rollout import (
    Collector,
    Filters,
    Recovery,
    RolloutFailed,
    RolloutInterrupted,
    StopReason,
    Trajectory,
    arollout,
    rollout,
)
from toolgym.rollout.dumps import DumpFolder
from toolgym.rollout.progress import Progress
from toolgym.rollout.store import RunFolder
from toolgym.rollout.traces import TraceFolder


def test_all_of_it_comes_back_in_order_and_is_told_on_the_way(chat: ChatFormat) -> None:
    envs = vector(3)
    told: list[Trajectory] = []
    counts: list[Progress] = []
    with nothing_left(envs):
        collector = Collector(envs, ScriptedPolicy(chat, echo_twice), chat)
        found = rollout(collector, 4, 2, first_index=10, on_trajectory=told.append, on_progress=counts.append)
        assert [(t.task_index, t.member) for t in found.trajectories] == [(10 + k // 2, k % 2) for k in range(8)]
        assert sorted(t.id for t in told) == sorted(t.id for t in found.trajectories)
        assert [(p.finished, p.total) for p in counts] == [(k + 1, 8) for k in range(8)]
        assert counts[-1] == found.progress
        assert (found.progress.solved, found.progress.turns) == (8, 24)
        assert found.progress.sampled_tokens == sum(int(t.loss_mask.sum()) for t in found.trajectories)
        assert [group.complete for group in found.groups] == [True] * 4
        assert found.seconds > 0
        assert rollout(collector, 0).trajectories == []
        again = asyncio.run(arollout(collector, 4, 2, first_index=10))
        assert again.trajectories == found.trajectories


def test_run_folder_traces_and_dumps_are_written_together(chat: ChatFormat, tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {})
    traces, dumps = TraceFolder(tmp_path / "traces"), DumpFolder(tmp_path, "exp", "trial", chat)
    envs = vector(trouble=lambda k: "tool breaks" if k == 1 else None)
    filters = Filters(lambda t: t.task_index != 2)
    collector = Collector(envs, ScriptedPolicy(chat, echo_twice, version=7), chat, filters=filters, evaluation=True)
    with nothing_left(envs):
        found = rollout(collector, 4, 2, on_trajectory=[run.append, traces.write, dumps.write])
    stored = sorted(run.trajectories(), key=lambda t: (t.task_index, t.member))
    assert stored == found.trajectories
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == sorted(
        [f"ok-{k}.{m}.json" for k in (0, 3) for m in (0, 1)] + [f"fail-1.{m}.json" for m in (0, 1)]
    )
    lines = {p.relative_to(dumps.path).as_posix(): len(p.read_text().splitlines()) for p in dumps.path.rglob("*.jsonl")}
    assert lines == {f"eval-rollout/7/t{k}.jsonl": 2 for k in (0, 1, 3)}


def _told_then(at: int, error: BaseException) -> tuple[list[str], Any]:
    told: list[str] = []

    def callback(what: Any) -> None:
        told.append(getattr(what, "id", ""))
        if len(told) == at:
            raise error

    return told, callback


@BOTH
@pytest.mark.parametrize("which", ["on_trajectory", "on_progress"])
@pytest.mark.parametrize("at", [1, 5, 12])
@pytest.mark.parametrize("awaited", [False, True])
def test_a_callback_that_raises_ends_it_and_the_others_hear_of_all(
    chat: ChatFormat, which: str, at: int, schedule: Any, awaited: bool
) -> None:
    told, bad = _told_then(at, OSError("disk full"))
    others: list[str] = []
    calls: dict[str, Any] = {"on_trajectory": [lambda t: others.append(t.id)]}
    calls[which] = [bad, *calls["on_trajectory"]] if which == "on_trajectory" else bad
    envs = vector(3)
    collector = Collector(envs, ScriptedPolicy(chat, echo_twice), chat, schedule=schedule)
    with nothing_left(envs):
        with pytest.raises(RolloutFailed, match="callback raised OSError: disk full") as caught:
            asyncio.run(arollout(collector, 6, 2, **calls)) if awaited else rollout(collector, 6, 2, **calls)
        found = caught.value.rollout
        assert len(told) == at, "one that raises is not called again"
        assert len(found.trajectories) == 12
        assert sorted(others) == sorted(t.id for t in found.trajectories if t.stop_reason != "cancelled")
        assert all(t.solved or t.stop_reason is StopReason.CANCELLED for t in found.trajectories)
        assert found.progress.solved >= 1
        assert isinstance(caught.value.__cause__, OSError)


def test_coroutine_functions_are_awaited_or_refused(chat: ChatFormat) -> None:
    heard: list[Any] = []

    async def hear(what: Any) -> None:
        await asyncio.sleep(0)
        heard.append(what)

    envs = vector()
    collector = Collector(envs, ScriptedPolicy(chat, answer), chat)
    with nothing_left(envs):
        asyncio.run(arollout(collector, 3, on_trajectory=[hear, heard.append], on_progress=lambda p: hear(what=p)))
        assert len(heard) == 9
        for wrong in ({"on_trajectory": hear}, {"on_progress": hear}):
            with pytest.raises(ConfigurationError, match="await arollout"):
                rollout(collector, 3, **wrong)
        with pytest.raises(RolloutFailed, match=r"something to be awaited: await arollout"):
            rollout(collector, 3, on_trajectory=lambda t: hear(what=t))
        for wrong in ({"on_trajectory": 5}, {"on_trajectory": [print, "x"]}, {"on_progress": "x"}):
            with pytest.raises(ConfigurationError, match=r"expected on_.* function"):
                rollout(collector, 3, **wrong)  # type: ignore[arg-type]


def test_cancelling_arollout_cancels_what_runs(chat: ChatFormat) -> None:
    envs = vector(2, trouble=lambda k: "tool hangs" if k > 0 else None)
    collector = Collector(envs, ScriptedPolicy(chat, echo_twice), chat)
    told: list[str] = []

    async def main() -> None:
        first = asyncio.Event()
        running = asyncio.create_task(
            arollout(collector, 6, on_trajectory=lambda t: (told.append(t.id), first.set()))  # type: ignore[func-returns-value]
        )
        await first.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    with nothing_left(envs):
        asyncio.run(main())
        assert told == ["0.0"]
        envs.reset()


def test_slots_that_are_in_use_are_a_clear_error(chat: ChatFormat) -> None:
    envs = vector(2, trouble=lambda k: "tool hangs" if k > 0 else None)
    collector = Collector(envs, ScriptedPolicy(chat, echo_twice), chat)
    stream = collector.stream(4)
    next(stream)
    with nothing_left(envs):
        with pytest.raises(RolloutFailed, match="used by a collection") as caught:
            rollout(collector, 2)
        assert caught.value.rollout.trajectories == []
        stream.close()  # type: ignore[attr-defined]


def test_closing_the_environments_is_a_clear_error_with_what_is_finished(chat: ChatFormat) -> None:
    envs = vector(2, trouble=lambda k: "tool hangs" if k > 0 else None)
    collector = Collector(envs, ScriptedPolicy(chat, echo_twice), chat)
    with pytest.raises(RolloutFailed, match="closed while a collection ran") as caught:
        rollout(collector, 4, on_trajectory=lambda t: envs.close() if t.task_index == 0 else None)
    assert len(caught.value.rollout.trajectories) == 4
    assert caught.value.rollout.progress.solved == 1


class NotingEnv(EchoEnv):
    """Notes its contexts; the first attempt of each episode fails."""

    contexts: list[tuple[EpisodeContext, int | None]]

    def __init__(self, contexts: Any, **options: Any) -> None:
        self.contexts = contexts
        super().__init__(**options)

    async def setup(self, task: Task) -> None:
        first = not any(
            (c.task_index, c.member) == (self.context.task_index, self.context.member) for c, _ in self.contexts
        )
        self.contexts.append((self.context, self.context.policy_version))
        self.context.stats.add("attempts", 1)
        if first:
            raise OSError("cold")


@BOTH
@pytest.mark.parametrize("evaluation", [False, True])
def test_environments_are_told_what_their_episode_is_part_of_also_when_it_is_begun_anew(
    chat: ChatFormat, schedule: Any, evaluation: bool
) -> None:
    contexts: list[tuple[EpisodeContext, int | None]] = []
    envs = ToolVectorEnv.of(NotingEnv, num_envs=2, contexts=contexts)
    policy = ScriptedPolicy(chat, answer, version=5)
    collector = Collector(
        envs, policy, chat, schedule=schedule, evaluation=evaluation, recovery=Recovery("retry", backoff=0.0)
    )
    with nothing_left(envs):
        found = rollout(collector, 3, 2, first_index=4)
    expected = [(f"t{4 + k // 2}", 4 + k // 2, k % 2, evaluation, 5) for k in range(6)]
    told = [(c.task_id, c.task_index, c.member, c.evaluation, version) for c, version in contexts]
    assert sorted(told) == sorted(expected * 2)
    assert len({id(context) for context, _ in contexts}) == 12, "an attempt has a context of its own"
    scope = "eval-rollout" if evaluation else "rollout"
    assert {t.scope for t in found.trajectories} == {scope}
    assert {key: summary.count for key, summary in found.stats.items()} == {f"{scope}/attempts": 6}
    assert found.progress.retried == 6


def test_an_interrupt_that_another_handler_raises_is_handled_too(chat: ChatFormat) -> None:
    _, interrupt = _told_then(2, KeyboardInterrupt())
    envs = vector(2, trouble=lambda k: "tool hangs" if k > 2 else None)
    collector = Collector(envs, ScriptedPolicy(chat, echo_twice), chat)
    with nothing_left(envs):
        with pytest.raises(RolloutInterrupted, match=r"interrupted: \d of 6") as caught:
            rollout(collector, 6, on_trajectory=interrupt)
        assert len(caught.value.rollout.trajectories) == 6


def test_off_the_main_thread_no_signal_is_touched(chat: ChatFormat) -> None:
    envs = vector(2)
    collector = Collector(envs, ScriptedPolicy(chat, echo_twice), chat)
    before = signal.getsignal(signal.SIGINT)
    found: list[Any] = []
    with nothing_left(envs):
        thread = threading.Thread(target=lambda: found.append(rollout(collector, 2)))
        thread.start()
        thread.join()
        assert len(found[0].trajectories) == 2
        rollout(collector, 2, on_trajectory=lambda t: found.append(signal.getsignal(signal.SIGINT)))
        assert found[-1] is not before or before is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is before


# Ctrl-C for real.

PROGRAM = """
    import asyncio, os, signal, sys, threading, time, warnings
    import toolgym.envs as tg
    from toolgym.agents.chat import load_chat_format
    from toolgym.agents.scripted_policy import ScriptedPolicy
    from toolgym.agents.tiny import TINY_MODEL
    from toolgym.rollout import Collector, RolloutInterrupted, rollout

    WHERE = sys.argv[1]
    say = lambda *words: print(*words, flush=True)
    in_flight, release = threading.Semaphore(0), threading.Event()

    class SlowEnv(tg.ToolEnv):
        def __init__(self, **options):
            super().__init__([tg.Task(f"t{k}", f"task {k}", {"k": k}) for k in range(8)], **options)

        @tg.tool
        async def wait(self) -> str:
            "Wait on the loop."
            in_flight.release()
            await asyncio.sleep(600)

        @tg.tool
        def block(self) -> str:
            "Wait in a thread."
            in_flight.release()
            release.wait(600)

        def score(self, episode):
            return 1.0

    def script(request, member):
        k = request.task.data["k"]
        if k < 2 or request.turn:
            return "done"
        return tg.AssistantMessage("", (tg.ToolCall("wait" if k % 2 else "block", {}),))

    def announce():
        for _ in range(4):
            in_flight.acquire()
        say("READY")

    torn = []

    def callback(trajectory):
        torn.append(trajectory.id)
        if WHERE != "tools" and len(torn) == 1:
            say("READY")
            while envs._holder is not None:  # until the interrupt has ended the collection
                time.sleep(0.01)
            while WHERE == "twice":
                say("HEARD")
                time.sleep(600)
        torn.pop()
        told.append(trajectory.id)

    if __name__ == "__main__":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal
        chat, told = load_chat_format(TINY_MODEL), []
        envs = tg.ToolVectorEnv.of(SlowEnv, num_envs=4, tool_timeout=700.0)
        from toolgym.rollout import Limits
        collector = Collector(envs, ScriptedPolicy(chat, script), chat, Limits(step_timeout=800.0))
        if WHERE == "tools":
            threading.Thread(target=announce, daemon=True).start()
        try:
            rollout(collector, 8, on_trajectory=callback)
        except RolloutInterrupted as interrupt:
            found = interrupt.rollout
            say("KEPT", " ".join(f"{t.task_index}:{t.stop_reason.value}" for t in found.trajectories))
            say("TOLD", *sorted(told), "TORN", *torn)
        say("HANDLER", signal.getsignal(signal.SIGINT) is signal.default_int_handler)

        async def others():
            left = asyncio.all_tasks() - {asyncio.current_task()}
            return sorted(t.get_name() for t in (await asyncio.wait(left, timeout=20))[1]) if left else []

        say("TASKS", envs.loop.run(others()))
        if WHERE == "tools":
            collector.collect(2)  # the slots can be used again, though tools still hold their threads
            say("AGAIN", any(t.name == "tool block" for t in threading.enumerate()))
        release.set()
        warnings.simplefilter("ignore")
        envs.close()
        for thread in threading.enumerate():
            if thread.name == "tool block":
                thread.join()
        names = sorted(t.name for t in threading.enumerate() if not t.name.startswith("toolgym chat"))
        say("THREADS", names)
"""


def _interrupted(where: str, tmp_path: Path, times: int = 1) -> dict[str, str]:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    with subprocess.Popen(
        [sys.executable, str(path), where], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=OURS
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline() == "READY\n"
            process.send_signal(signal.SIGINT)
            if times == 2:
                assert process.stdout.readline() == "HEARD\n"
                process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, err
    return {line.partition(" ")[0]: line.partition(" ")[2] for line in out.splitlines()}


def test_ctrl_c_with_tools_in_flight_keeps_what_is_finished_and_leaves_nothing(tmp_path: Path) -> None:
    said = _interrupted("tools", tmp_path)
    assert said["KEPT"].split() == ["0:answered", "1:answered", *(f"{k}:cancelled" for k in range(2, 8))]
    assert said["TOLD"].split() == ["0.0", "1.0", "TORN"]
    assert said["HANDLER"] == "True"
    assert said["TASKS"] == "[]"
    assert said["THREADS"] == "['MainThread']"
    assert said["AGAIN"] == "True"


def test_ctrl_c_in_a_callback_lets_it_end_first(tmp_path: Path) -> None:
    said = _interrupted("callback", tmp_path)
    kept = dict(entry.split(":") for entry in said["KEPT"].split())
    assert len(kept) == 8
    ended = [f"{k}.0" for k, reason in sorted(kept.items()) if reason != "cancelled"]
    assert said["TOLD"].split() == [*ended, "TORN"], "all were told whole"
    assert said["TASKS"] == "[]"
    assert said["THREADS"] == "['MainThread']"


def test_a_second_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    said = _interrupted("twice", tmp_path, times=2)
    assert said["KEPT"].split()[0].endswith(":answered")
    assert said["TOLD"].split()[0] == "TORN", "the callback that hung was broken off"
    assert said["HANDLER"] == "True"
    assert said["TASKS"] == "[]"
    assert said["THREADS"] == "['MainThread']"


def test_a_later_rollout_takes_later_tasks(chat: ChatFormat) -> None:
    """The source begins anew behind its last task; another index is another seed."""
    envs = vector(2, count=5)
    collector = Collector(envs, ScriptedPolicy(chat, answer), chat)
    with nothing_left(envs):
        found = [rollout(collector, 2, first_index=2 * step).trajectories for step in range(3)]
    assert [[t.task_id for t in step] for step in found] == [["t0", "t1"], ["t2", "t3"], ["t4", "t0"]]
    assert [[t.task_index for t in step] for step in found] == [[0, 1], [2, 3], [4, 5]]
