"""Reward functions beside an environment's own score: named, weighted, and called together, once a moment."""

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from toolgym.envs.errors import ConfigurationError, EnvironmentFailure
from toolgym.envs.execution import Executor
from toolgym.envs.finite import as_finite
from toolgym.envs.rewards import Episode, Score, ScoreLike, StepView, as_score
from toolgym.envs.waiting import Overdue, located

_T = TypeVar("_T")
Rewarding: TypeAlias = Callable[[Any], Any]
"""A plain or async function of one `Episode`, or of one `StepView`, that returns a `ScoreLike`."""
PLAIN = "reward"  # the component that a score without names becomes


class RewardFunction:
    """A function that judges episodes, or their steps, with its name and weight.

    A number that it returns is the component ``name``. Named parts, as a mapping or a `Score`, are the components
    ``name.part``, and a `Score`'s weights are multiplied by ``weight``.

    Args:
        function: called with the `Episode` at its end, or, with ``each_step``, with the `StepView` of every step. A
            plain ``def`` runs in a thread of its own and may block; an ``async def`` must not. It is never called
            twice for one moment, but all slots of a vector call the same one, at the same time.
        name: the name of the component; by default the function's.
        weight: its weight in the reward; 0 records it without rewarding it.
        each_step: whether it judges every step, not the whole.

    Raises:
        ConfigurationError: no function of one argument, no name, or no finite weight.
    """

    def __init__(
        self, function: Rewarding, name: str | None = None, weight: float = 1.0, each_step: bool = False
    ) -> None:
        if not callable(function) or isinstance(function, type):
            raise ConfigurationError(f"expected a reward function, actual {function!r:.200}")
        self.name = _name_of(function) if name is None else name
        if not isinstance(self.name, str) or not self.name or self.name[0] == "_":
            raise ConfigurationError(
                f"expected the name of a reward function as a text not beginning with '_', actual {self.name!r:.100}; "
                "RewardFunction(function, name=...) gives it another"
            )
        inner = _inner(function)
        if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
            raise ConfigurationError(f"reward function {self.name!r} is a generator: return the score as one value")
        if not _takes_one(function):
            raise ConfigurationError(
                f"reward function {self.name!r} cannot be called with one argument: it gets the "
                f"{'StepView' if each_step else 'Episode'} and nothing else"
            )
        finite = None if isinstance(weight, bool) else as_finite(weight)
        if finite is None:
            raise ConfigurationError(f"expected the weight of {self.name!r} as a finite number, actual {weight!r:.100}")
        if not isinstance(each_step, bool):
            raise ConfigurationError(f"expected each_step of {self.name!r} as a bool, actual {each_step!r:.100}")
        self.function, self.weight, self.each_step = function, finite, each_step

    def __repr__(self) -> str:
        return f"RewardFunction({self.name!r}, weight={self.weight:g}, each_step={self.each_step})"


def as_reward_functions(rewards: Sequence[Rewarding | RewardFunction] | None) -> tuple[RewardFunction, ...]:
    """Reward functions from what an author has at hand: a list of them, or of bare functions.

    Raises:
        ConfigurationError: no list, what makes no reward function, or two of one name.
    """
    if rewards is None:
        return ()
    if isinstance(rewards, str) or not isinstance(rewards, Sequence):
        raise ConfigurationError(f"expected rewards as a list of functions, actual {rewards!r:.200}")
    made = tuple(entry if isinstance(entry, RewardFunction) else RewardFunction(entry) for entry in rewards)
    names = [entry.name for entry in made]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigurationError(
            f"several reward functions are named {twice[0]!r}: RewardFunction(function, name=...) renames one"
        )
    return made


class Judge:
    """Judges one kind of moment - the steps of an episode, or its end - by all that has a say in it.

    Args:
        own_name: the name of the environment's own hook.
        own: the hook; None if it has none.
        functions: the reward functions.
        executor: runs them all.
        timeout: seconds that each of them may take. As they run together, this bounds the whole as well.

    Raises:
        ConfigurationError: a reward function has the name of the hook's own plain score.
    """

    def __init__(
        self,
        own_name: str,
        own: Rewarding | None,
        functions: Sequence[RewardFunction],
        executor: Executor,
        timeout: float,
    ) -> None:
        if own is not None and any(function.name == PLAIN for function in functions):
            raise ConfigurationError(
                f"a reward function is named {PLAIN!r}, as is what {own_name}() of the environment returns: "
                "RewardFunction(function, name=...) gives it another name"
            )
        self._own_name, self._own, self._functions = own_name, own, tuple(functions)
        self._executor, self._timeout = executor, timeout

    @property
    def has_say(self) -> bool:
        """Whether anything judges these moments."""
        return self._own is not None or bool(self._functions)

    async def judge(self, view: Episode | StepView) -> Score:
        """Call everything once, together, and add up what it says.

        Returns:
            The components, the environment's own first, with their weights. Its success is that of the environment's
            own score; where there is none, what those functions say that say so (all of them must); else None.

        Raises:
            EnvironmentFailure: something raised, took too long or returned no score; the others are not waited for.
        """
        work: list[Coroutine[Any, Any, Score | None]] = [] if self._own is None else [self._ask_own(self._own, view)]
        work += [self._ask(function, view) for function in self._functions]
        scores = await together(work)
        own = None if self._own is None else scores.pop(0)
        return _added_up(own, [(f, s) for f, s in zip(self._functions, scores, strict=True) if s is not None])

    async def _ask_own(self, own: Rewarding, view: Episode | StepView) -> Score | None:
        value = await run_hook(self._executor, functools.partial(own, view), self._own_name, self._timeout)
        return None if value is None and isinstance(view, StepView) else as_score(value)

    async def _ask(self, function: RewardFunction, view: Episode | StepView) -> Score:
        name = f"reward function {function.name!r}"
        work = functools.partial(function.function, view)
        try:
            return _renamed(function, await run_hook(self._executor, work, name, self._timeout, kind="reward"))
        except EnvironmentFailure as failure:
            raise EnvironmentFailure(f"{name}: {failure}", kind=failure.kind) from failure


async def run_hook(
    executor: Executor, hook: Callable[[], Any], name: str, timeout: float, *, kind: str | None = None
) -> Any:
    """Run an author's hook within its time; whatever it raises is a failure of the environment.

    Raises:
        EnvironmentFailure: of the kinds ``{kind}_raised`` and ``{kind}_timeout``, where the kind is by default the
            name; or the one that the hook raised.
    """
    try:
        return await executor.call(hook, name, timeout)
    except EnvironmentFailure:
        raise
    except Overdue as error:
        raise EnvironmentFailure(f"{name} took over {timeout:g} s", kind=f"{kind or name}_timeout") from error
    except Exception as error:  # an author's hook may raise anything: a failure, never a reward
        raise EnvironmentFailure(located(error), kind=f"{kind or name}_raised") from error


async def together(work: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Await all, in their order; if one raises, or the caller is cancelled, the others are cancelled."""
    running = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*running))
    finally:
        for task in running:
            task.cancel()


def _renamed(function: RewardFunction, value: ScoreLike) -> Score:
    """What a reward function returned, under its name and with its weight."""
    score = as_score(value)
    named = isinstance(value, Score | Mapping)
    names = {part: f"{function.name}.{part}" if named else function.name for part in score.components}
    return Score(
        {names[part]: number for part, number in score.components.items()},
        {names[part]: score.weights.get(part, 1.0) * function.weight for part in score.components},
        score.success,
    )


def _added_up(own: Score | None, others: Sequence[tuple[RewardFunction, Score]]) -> Score:
    components = {} if own is None else dict(own.components)
    weights = {} if own is None else dict(own.weights)
    for function, score in others:
        if clash := components.keys() & score.components.keys():
            raise EnvironmentFailure(
                f"component {min(clash)!r} of reward function {function.name!r} is there already: "
                "RewardFunction(function, name=...) gives it another name",
                kind="bad_reward",
            )
        components |= score.components
        weights |= score.weights
    said = [score.success for _, score in others if score.success is not None]
    success = own.solved if own is not None else all(said) if said else None
    return as_score(Score(components, weights, success)) if components else Score({}, success=success)


def _inner(function: Any) -> Any:
    """The function behind a partial or a callable object, which shows whether it is a generator."""
    if isinstance(function, functools.partial):
        return _inner(function.func)
    return function if inspect.isroutine(function) else type(function).__call__


def _name_of(function: Any) -> str:
    if isinstance(function, functools.partial):
        return _name_of(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


def _takes_one(function: Rewarding) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # a function without a signature, as some written in C
        pass
    return True
