"""`ToolVectorEnv`: N tool environments as one `gymnasium.vector.VectorEnv`, all their tools in flight together."""

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
import warnings
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Tuple
from gymnasium.vector import AutoresetMode

from toolgym.envs.errors import ConfigurationError, EnvironmentFailure, Failure, ResetNeededError, ToolgymError
from toolgym.envs.execution import Executor
from toolgym.envs.infos import batch_infos
from toolgym.envs.loop import LoopThread
from toolgym.envs.messages import AssistantMessage, Observation
from toolgym.envs.spaces import AssistantMessageSpace, MessagesSpace
from toolgym.envs.tasks import Task
from toolgym.envs.tool_env import Closer, Step, ToolEnv
from toolgym.envs.waiting import Overdue, described, within

_T = TypeVar("_T")
_CLOSING, _MAKING = 5.0, 60.0  # seconds
Action: TypeAlias = AssistantMessage | None
Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Batch: TypeAlias = tuple[tuple[Observation, ...], Floats, Bools, Bools, dict[str, Any]]


class ToolVectorEnv(gymnasium.vector.VectorEnv[tuple[Observation, ...], Sequence[Action], npt.NDArray[Any]]):
    """N slots on one event loop of its own, each with a `ToolEnv`.

    The full contract of Gymnasium's vector environments, with what chat needs beside it:

    - Observations are tuples of N deltas: what each slot said since its last action. A slot whose action is ``None``
      is left alone, and its observation stays what it was (but under NEXT_STEP a slot that has ended is reset).
    - A slot that fails (`EnvironmentFailure`) does not touch the others: its reward is NaN, it is truncated, and
      ``infos["failure"]`` holds the `Failure`.
    - ``reset(options={"reset_mask": mask})`` resets some slots; ``options["tasks"]`` gives the task of each slot.
    - `send` and `recv` step slots one by one, so that no slot waits for a slower one.

    Args:
        env_fns: a function for each slot that makes its environment.
        autoreset_mode: DISABLED by default, since NEXT_STEP would cost one model call an episode for nothing.

    Raises:
        ConfigurationError: no slots, or environments with different tools.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], ToolEnv]],
        *,
        autoreset_mode: str | AutoresetMode = AutoresetMode.DISABLED,
    ) -> None:
        if not env_fns:
            raise ConfigurationError("expected at least one environment, actual none: num_envs must be 1 or more")
        self.envs: list[ToolEnv] = [make() for make in env_fns]
        self._env_fns = tuple(env_fns)
        first = self.envs[0]
        if any(tuple(env.tools) != tuple(first.tools) for env in self.envs):
            raise ConfigurationError("all slots must have the same tools: the prompt names them")
        self.num_envs = len(self.envs)
        try:
            self.autoreset_mode = AutoresetMode(autoreset_mode)
        except ValueError as error:
            known = ", ".join(mode.value for mode in AutoresetMode)
            raise ConfigurationError(f"expected an autoreset_mode among {known}, actual {autoreset_mode!r}") from error
        self.metadata = {**first.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = first.render_mode
        self.tools, self.tasks = first.tools, first.tasks
        self.single_observation_space = MessagesSpace()
        self.single_action_space = AssistantMessageSpace(tuple(first.tools), optional=True)
        self.observation_space = Tuple([MessagesSpace() for _ in self.envs])
        names = tuple(first.tools)
        self.action_space = Tuple([AssistantMessageSpace(names, optional=True) for _ in self.envs])
        self.loop = LoopThread("the loop of the environments")
        self._last: list[Observation] = [()] * self.num_envs
        self._needs_reset = np.ones(self.num_envs, dtype=np.bool_)
        self._begun = False
        self._using = threading.Lock()  # for looking at who uses the slots, and noting it, in one
        self._holder: str | None = None
        self._retired: list[ToolEnv] = []
        self._in_flight: set[int] = set()
        self._arrived: queue.SimpleQueue[tuple[int, Step]] = queue.SimpleQueue()
        self._closers: list[Closer] = []
        self._finalizer = weakref.finalize(self, _shut_down, self.envs, self._retired, self.loop, self._closers)

    @classmethod
    def of(
        cls,
        env_class: Callable[..., ToolEnv],
        *,
        num_envs: int = 1,
        max_episode_steps: int | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.DISABLED,
        **options: Any,
    ) -> "ToolVectorEnv":
        """``num_envs`` slots of one environment class, in the form in which `gymnasium.make_vec` asks for them."""
        if not isinstance(num_envs, int | np.integer) or num_envs < 1:
            raise ConfigurationError(f"expected num_envs of 1 or more, actual {num_envs!r}")
        if max_episode_steps is not None:
            options["max_steps"] = max_episode_steps
        share = getattr(env_class, "shared", None)
        common, closers = (options, []) if share is None else share(int(num_envs), options)
        try:
            made = cls([lambda: env_class(**common)] * num_envs, autoreset_mode=autoreset_mode)
        except BaseException:
            for close in closers:
                close()
            raise
        made._closers.extend(closers)
        return made

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[Observation, ...], dict[str, Any]]:
        """Begin an episode in every slot, or in those of a mask.

        Args:
            seed: one seed (slot i gets ``seed + i``), one for each slot, or None.
            options: ``reset_mask``: (N,) bool array, at least one True; ``tasks``: N tasks or Nones. Never changed.
        """
        with self._used_by("reset"):
            return self._reset(seed, options)

    def _reset(
        self, seed: int | Sequence[int | None] | None, options: dict[str, Any] | None
    ) -> tuple[tuple[Observation, ...], dict[str, Any]]:
        chosen = self._reset_mask(options)
        seeds = self._seeds(seed)
        tasks: Sequence[Task | None] = (options or {}).get("tasks") or [None] * self.num_envs
        if len(tasks) != self.num_envs or not all(task is None or isinstance(task, Task) for task in tasks):
            raise ConfigurationError(
                f"expected {self.num_envs} Tasks or Nones in options['tasks'], actual {tasks!r:.200}"
            )
        slots = [int(i) for i in np.flatnonzero(chosen)]
        self._begun = True
        opened = self.loop.run(_gather(self._open(i, seeds[i], tasks[i]) for i in slots))
        infos: list[dict[str, Any] | None] = [None] * self.num_envs
        for i, (_, info) in zip(slots, opened, strict=True):
            infos[i] = info
        return tuple(self._last), batch_infos(infos)

    def step(self, actions: Sequence[Action]) -> Batch:
        """Take one action in every slot whose action is not None; all their tools run together.

        Returns:
            observations: N deltas.
            rewards: (N,) float64; NaN where the slot failed.
            terminations, truncations: (N,) bool.
            infos: as Gymnasium's, each key with its ``_key`` mask.
        """
        with self._used_by("step"):
            if not isinstance(actions, Sequence | np.ndarray) or len(actions) != self.num_envs:
                raise ConfigurationError(f"expected {self.num_envs} actions, one a slot, actual {actions!r:.200}")
            self._check_actions(dict(enumerate(actions)))
            results = self.loop.run(_gather(self._advance(i, action) for i, action in enumerate(actions)))
        return _batch(results)

    def send(self, actions: Sequence[Action], env_ids: Sequence[int]) -> None:
        """Start one action in each of the given slots and return at once; `recv` brings the results.

        Raises:
            ConfigurationError: unequal lengths, an unknown slot, or one whose last action has not been received yet.
        """
        if len(actions) != len(env_ids):
            raise ConfigurationError(f"expected as many actions as env_ids, actual {len(actions)} and {len(env_ids)}")
        with self._using:
            wrong = [i for i in env_ids if not 0 <= i < self.num_envs or i in self._in_flight]
            if wrong or len(set(env_ids)) < len(env_ids):
                raise ConfigurationError(f"env_ids must be idle slots below {self.num_envs}, each once; wrong: {wrong}")
            self._refuse_if_held("send")
            self._check_actions(dict(zip(env_ids, actions, strict=True)))
            self._in_flight.update(env_ids)
        for i, action in zip(env_ids, actions, strict=True):
            self.loop.submit(self._deliver(i, action))

    def recv(self, *, min_count: int = 1, timeout: float | None = None) -> tuple[*Batch, npt.NDArray[np.int64]]:
        """Wait for ``min_count`` of the sent actions, and take every other that is there already.

        Args:
            min_count: how many results to wait for; no more than are in flight.
            timeout: seconds to wait for each; None waits for as long as a step can take by the time-outs of the
                environment's tools and hooks.

        Returns:
            As `step`, for K slots in the order of their arrival, and their ids, (K,) int64.

        Raises:
            ConfigurationError: fewer than ``min_count`` actions are in flight.
            ToolgymError: nothing arrived in time.
        """
        if not self._in_flight:
            raise ConfigurationError("no slot is in flight: send() first")
        if not 1 <= min_count <= len(self._in_flight):
            raise ConfigurationError(f"expected min_count in [1, {len(self._in_flight)}], actual {min_count}")
        arrived: list[tuple[int, Step]] = []
        timeout = self.envs[0].longest_step + 10.0 if timeout is None else timeout
        try:
            while len(arrived) < min_count:
                arrived.append(self._arrived.get(timeout=timeout))
            while True:
                arrived.append(self._arrived.get_nowait())
        except queue.Empty as empty:
            if len(arrived) < min_count:
                for entry in arrived:
                    self._arrived.put(entry)
                waiting = sorted(self._in_flight)
                raise ToolgymError(f"no result within {timeout} s; slots in flight: {waiting}") from empty
        ids = [i for i, _ in arrived]
        with self._using:
            self._in_flight.difference_update(ids)
        return (*_batch([result for _, result in arrived]), np.asarray(ids, dtype=np.int64))

    def render(self) -> tuple[Any, ...] | None:
        """The text of every slot's conversation, in ``"ansi"`` mode."""
        return None if self.render_mode is None else tuple(env.render() for env in self.envs)

    def close_extras(self, **kwargs: Any) -> None:
        """Close all slots, cancel what runs, end the thread. `close` calls it, once."""
        self._finalizer()

    async def _open(self, i: int, seed: int | None, task: Task | None) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode in one slot; a failure is in the info."""
        observation: Observation = ()
        try:
            env = await self.fresh(i)
            observation, info = await env.areset(seed=seed, options=None if task is None else {"task": task})
        except EnvironmentFailure as failure:
            info = {"failure": Failure(failure.kind, "reset", str(failure))}
        except Exception as error:  # noqa: BLE001 - isolation: one slot never takes the others with it
            info = {"failure": Failure("reset_raised", "reset", described(error))}
        self._last[i], self._needs_reset[i] = observation, "failure" in info
        return observation, info

    async def _advance(self, i: int, action: Action) -> Step:
        """One slot's part of a step, with its autoreset."""
        if self._needs_reset[i] and self.autoreset_mode is not AutoresetMode.DISABLED:
            # The step after an end (NEXT_STEP), or after a reset that failed.
            observation, info = await self._open(i, None, None)
            return observation, float("nan") if "failure" in info else 0.0, False, "failure" in info, info
        if action is None:
            return self._last[i], 0.0, False, False, {}
        observation, reward, terminated, truncated, info = await self._act(i, action)
        self._last[i], self._needs_reset[i] = observation, terminated or truncated
        if self._needs_reset[i] and self.autoreset_mode is AutoresetMode.SAME_STEP:
            final = {"final_obs": observation, "final_info": info}
            failed = {"failure": info["failure"]} if "failure" in info else {}
            observation, info = await self._open(i, None, None)
            info = {**info, **final, **failed}
        return observation, reward, terminated, truncated, info

    async def _act(self, i: int, action: AssistantMessage) -> Step:
        try:
            return await self.envs[i].astep(action)
        except EnvironmentFailure as failure:
            return _failed(failure.kind, "step", str(failure))
        except Exception as error:  # noqa: BLE001 - isolation: one slot never takes the others with it
            return _failed("step_raised", "step", described(error))
        except asyncio.CancelledError:  # the caller was interrupted: the action is half done
            self._needs_reset[i] = True
            raise

    async def _deliver(self, i: int, action: Action) -> None:
        try:
            step = await self._advance(i, action)
        except BaseException as error:
            self._arrived.put((i, _failed("step_cancelled", "step", described(error))))
            raise
        self._arrived.put((i, step))

    def _check_actions(self, actions: dict[int, Action]) -> None:
        if not self._begun:
            raise ResetNeededError("no episode has begun: call reset() first")
        wrong = {i: type(action).__name__ for i, action in actions.items() if action not in self.single_action_space}
        if wrong:
            raise ConfigurationError(f"expected AssistantMessage or None as actions, actual by slot: {wrong}")
        if self.autoreset_mode is not AutoresetMode.DISABLED:
            return  # a slot that has ended begins anew by itself
        ended = [i for i, action in actions.items() if action is not None and self._needs_reset[i]]
        if ended:
            raise ResetNeededError(
                f"slots {ended} have no running episode: give them None, or reset them by options['reset_mask']"
            )

    @contextlib.contextmanager
    def held(self, holder: str) -> Iterator[None]:
        """Keep everybody else from stepping the slots.

        Args:
            holder: who does, for the error that others get.

        Raises:
            ToolgymError: somebody else holds or steps them, or actions are in flight.
        """
        with self._used_by(holder):
            # What the holder does to the slots is not known here: each of them needs a reset afterwards.
            self._needs_reset[:] = True
            yield

    async def fresh(self, i: int) -> ToolEnv:
        """The environment of a slot, ready for a new episode.

        If a tool of an earlier episode cannot be stopped, a new environment takes the slot: the old tool would act in
        the new episode. Awaited on `loop`.
        """
        try:
            await within(self.envs[i].adrain(), _CLOSING)
            busy = bool(self.envs[i].busy)
        except Exception as error:  # noqa: BLE001 - an author's override may raise anything
            warnings.warn(f"slot {i} could not be made ready: {described(error)}", ResourceWarning, 2)
            busy = True
        if busy:
            await self._replace(i)  # if none can be made, the old one fails its next episode by name
            await self._close_idle()
        return self.envs[i]

    async def renew(self, i: int) -> None:
        """Put a new environment into a slot, and close the one that was there, for a bounded time. Awaited on `loop`.

        If none can be made, the old one stays.
        """
        old = self.envs[i]
        if await self._replace(i):
            await _close_one(old)
            self._retired.remove(old)

    async def _close_idle(self) -> None:
        """Close the retired environments in which nothing runs any more: they may hold boxes and connections."""
        for env in [env for env in self._retired if not env.busy]:
            self._retired.remove(env)
            await _close_one(env)

    async def _replace(self, i: int) -> bool:
        """Put a new environment into a slot, and the old one among the retired. Returns whether one could be made.

        Constructors are an author's and may block: each runs in a thread of its own.
        """
        try:
            made = await _made(self._env_fns[i], f"making the environment of slot {i}")
            if not isinstance(made, ToolEnv) or tuple(made.tools) != tuple(self.tools):
                raise ConfigurationError(f"expected an environment with the tools of all others, actual {made!r:.100}")
        except Exception as error:  # noqa: BLE001 - an author's constructor may raise anything
            why = f"it took over {_MAKING:g} s" if isinstance(error, Overdue) else described(error)
            warnings.warn(f"no new environment for slot {i}, the old one stays: {why}", ResourceWarning, 2)
            return False
        self._retired.append(self.envs[i])
        self.envs[i] = made
        return True

    @contextlib.contextmanager
    def _used_by(self, holder: str) -> Iterator[None]:
        with self._using:
            self._refuse_if_held(holder)
            if self._in_flight:
                slots = sorted(self._in_flight)
                raise ToolgymError(f"{holder} while actions are in flight in slots {slots}: recv() first")
            self._holder = holder
        try:
            yield
        finally:
            self._holder = None

    def _refuse_if_held(self, what: str) -> None:
        if self._holder is not None:
            raise ToolgymError(f"{what} while the slots are used by {self._holder}: wait until it has ended")

    def _reset_mask(self, options: dict[str, Any] | None) -> Bools:
        if options is None or "reset_mask" not in options:
            return np.ones(self.num_envs, dtype=np.bool_)
        mask = options["reset_mask"]
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (self.num_envs,):
            given = f"{mask.dtype} array of shape {mask.shape}" if isinstance(mask, np.ndarray) else repr(mask)
            raise ConfigurationError(f"expected reset_mask as a bool array of shape ({self.num_envs},), actual {given}")
        if not mask.any():
            raise ConfigurationError("expected at least one True in reset_mask, actual none")
        return mask

    def _seeds(self, seed: int | Sequence[int | None] | None) -> Sequence[int | None]:
        if seed is None:
            return [None] * self.num_envs
        one = isinstance(seed, int | np.integer)
        seeds = [int(seed) + i for i in range(self.num_envs)] if one else list(seed)  # type: ignore[arg-type]
        if len(seeds) != self.num_envs:
            raise ConfigurationError(f"expected {self.num_envs} seeds, one a slot, actual {len(seeds)}")
        if wrong := [s for s in seeds if s is not None and (not isinstance(s, int | np.integer) or s < 0)]:
            raise ConfigurationError(f"expected seeds of 0 or more, actual {wrong}")
        return [None if s is None else int(s) for s in seeds]


def _failed(kind: str, where: str, message: str) -> Step:
    return (), float("nan"), False, True, {"failure": Failure(kind, where, message)}


def _batch(results: Sequence[Step]) -> Batch:
    observations, rewards, terminations, truncations, infos = zip(*results, strict=True)
    return (
        tuple(observations),
        np.asarray(rewards, dtype=np.float64),
        np.asarray(terminations, dtype=np.bool_),
        np.asarray(truncations, dtype=np.bool_),
        batch_infos(infos),
    )


async def _gather(work: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    return list(await asyncio.gather(*work))


async def _made(make: Callable[[], ToolEnv], name: str) -> ToolEnv:
    """Call a constructor in a thread. It cannot be stopped: what it makes too late is closed then.

    Raises:
        Overdue: it took too long.
        Exception: whatever it raised.
    """
    born: concurrent.futures.Future[ToolEnv] = concurrent.futures.Future()

    def bear() -> ToolEnv:
        env = make()
        born.set_result(env)
        return env

    try:
        made: ToolEnv = await Executor().call(bear, name, _MAKING)
    except BaseException:  # also if we are cancelled
        born.add_done_callback(_close_late)
        raise
    return made


def _close_late(born: "concurrent.futures.Future[ToolEnv]") -> None:
    """Close an environment that nobody waits for any more, in a thread: the loop may be closed by now."""
    env = born.result()
    name = "closing an environment that came late"
    threading.Thread(target=lambda: asyncio.run(_close_one(env)), name=name, daemon=True).start()


async def _close_one(env: ToolEnv) -> None:
    """Close one environment, whatever its author's `aclose` does: it never keeps others from being closed."""
    try:
        await within(env.aclose(), _CLOSING)
    except Overdue:
        warnings.warn(f"{type(env).__name__} took over {_CLOSING:g} s to close; left as it is", ResourceWarning, 2)
    except Exception as error:  # noqa: BLE001 - an author's aclose may raise anything
        warnings.warn(f"{type(env).__name__} failed to close: {described(error)}", ResourceWarning, 2)


def _shut_down(
    envs: Sequence[ToolEnv], retired: Sequence[ToolEnv], loop: LoopThread, closers: Sequence[Closer]
) -> None:
    """Close the slots and the loop; it refers to no ToolVectorEnv, so that a forgotten one can be collected."""
    try:
        # Each slot's close is bounded; the time-out is for a loop that is blocked by code that does not await.
        with contextlib.suppress(TimeoutError, ToolgymError):
            loop.run(_gather(_close_one(env) for env in (*envs, *retired)), timeout=2 * _CLOSING)
    finally:
        loop.close()
        for close in closers:
            close()
