"""How long heavy-tailed tools and a bounded engine take together, by schedule, against the least that they could."""

import statistics
import time

from figures import Figure
from formats import real_format
from ideal import Machine, bounds, lockstep, overlap
from simulated import SimulatedEngine, WaitingEnv, Workload

from toolgym.envs import Task, ToolVectorEnv
from toolgym.rollout.collector import Collector
from toolgym.rollout.limits import Limits
from toolgym.rollout.schedules import ScheduleName

NOTES = """\
Makespan: 512 trajectories of 1 to 8 turns (uniform), turns of 150 tokens on average (log-normal), 50 tokens a second
for each sequence, 16 sequences at once, 64 slots: the engine is always full, but at the end. Tools: log-normal, median
0.2 s; 1 % of 20 s. All times run eight times faster than told, so that both schedules fit into some minutes: what the
collector itself costs weighs eight times as much. Measured is the workload whose simulated ratio is the median of
eleven draws. The bound is the largest of three: all sequence-seconds / batch; the longest trajectory's own time; all
trajectories' own times / slots. It cannot be much sharper: a schedule that knows all times beforehand comes as near to
it as the table says. Nobody knows them, so what is begun last may draw long turns and a slow tool, and the engine runs
empty for about as long as one trajectory takes, whatever the workload's size. That is what stays of the ratio where the
collector costs nothing, and it weighs the more the fewer trajectories there are for each place in the engine: with a
batch of 32, half as many, overlap misses 1.05 on most draws though nothing is wasted that could be known."""
MACHINE = Machine(slots=64, batch=16, rate=Workload.rate)
LIMITS = Limits(max_trajectory_tokens=16_384, max_completion_tokens=1_024)
_SPEED = 8.0
_DRAWS = 11  # workloads for the simulated ratios; the real ones are of their median


def figures() -> list[Figure]:
    """Both schedules on the same workload, in real time."""
    draws = [Workload().draw(seed) for seed in range(_DRAWS)]
    # The middle one, so that no luck of the draw flatters.
    tasks = sorted(draws, key=lambda d: overlap(d, MACHINE) / bounds(d, MACHINE).largest)[_DRAWS // 2]
    least = bounds(tasks, MACHINE)
    named = {"overlap": overlap, "lockstep": lockstep}
    ideal = {
        name: (run(tasks, MACHINE) / least.largest, [run(d, MACHINE) / bounds(d, MACHINE).largest for d in draws])
        for name, run in named.items()
    }
    knowing = [overlap(d, MACHINE, clairvoyant=True) / bounds(d, MACHINE).largest for d in draws]
    wide = Machine(MACHINE.slots, 2 * MACHINE.batch, MACHINE.rate)
    shallow = [overlap(d, wide) / bounds(d, wide).largest for d in draws]
    rows = [
        Figure(
            "makespan: lower bound",
            f"{least.largest:.0f} s of the workload's (engine {least.engine:.0f}, longest trajectory "
            f"{least.longest:.0f}, slots {least.slots:.0f})",
        )
    ]
    for schedule, goal in (("overlap", "1.05"), ("lockstep", "")):
        ratio = measure(tasks, schedule) * _SPEED / least.largest
        here, drawn = ideal[schedule]
        rows.append(Figure(f"makespan: {schedule}", f"{ratio:.3f} of the bound", goal))
        text = f"{here:.3f}; {_spread(drawn)} over {_DRAWS} workloads"
        rows.append(Figure("of that, without any cost of the collector's", text))
    rows.append(Figure("makespan, simulated: who knew all times", f"{_spread(knowing)} of the bound"))
    rows.append(Figure("makespan, simulated: overlap with a batch of 32", f"{_spread(shallow)} of the bound"))
    return rows


def measure(tasks: list[Task], schedule: ScheduleName) -> float:
    """Seconds that a real collection of a workload takes."""
    chat = real_format()
    envs = ToolVectorEnv.of(WaitingEnv, num_envs=MACHINE.slots, tasks=tasks, speed=_SPEED)
    policy = SimulatedEngine(chat, batch=MACHINE.batch, rate=MACHINE.rate * _SPEED)
    collector = Collector(envs, policy, chat, LIMITS, schedule=schedule, env_id="waiting")
    collector.collect(Workload(trajectories=8, turns=2).draw(seed=_DRAWS))  # threads and caches
    began = time.perf_counter()
    trajectories = collector.collect(tasks)
    took = time.perf_counter() - began
    envs.close()
    for trajectory, task in zip(trajectories, tasks, strict=True):
        sampled = [turn.completion_tokens for turn in trajectory.turns]
        if sampled != task.data["tokens"]:
            raise AssertionError(f"{task.id} sampled {sampled}, not as drawn: {trajectory.failure or task.data}")
    return took


def _spread(ratios: list[float]) -> str:
    return f"{statistics.mean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
