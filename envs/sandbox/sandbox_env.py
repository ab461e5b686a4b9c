"""`SandboxEnv`: a `ToolEnv` with a sandbox, for tools that run code."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from toolgym.envs.errors import ConfigurationError
from toolgym.envs.messages import Observation
from toolgym.envs.sandbox.choice import BackendName
from toolgym.envs.sandbox.limits import SandboxLimits
from toolgym.envs.sandbox.sandbox import Lease, Sandbox, SandboxPool
from toolgym.envs.tasks import Task, TaskSource
from toolgym.envs.tool_env import Closer, ToolEnv

_SHARED = 32  # boxes at most for a vector whose calls take a box each


class SandboxEnv(ToolEnv):
    """A `ToolEnv` whose tools have ``self.sandbox``.

    ::

        class PythonEnv(SandboxEnv):
            @tool
            async def python(self, code: str) -> str:
                \"\"\"Run Python.\"\"\"
                return (await self.sandbox.run(code)).text

    Every episode begins in a clean box, which is taken when it is first needed and given back at the end. What fails
    in the sandbox itself ends the episode as a `SandboxFailure`, without a reward; the model is never told of it.

    Args:
        tasks: as `ToolEnv`.
        sandbox: ``"auto"``, ``"docker"``, ``"local"``, or a `SandboxPool` that others use too. Of one that is given by
            name, a vector makes one for all its slots, and closes it.
        sandbox_limits: of each box; the pool's own if a pool is given.
        sandbox_retries: how often a call is tried again on a fresh box, if its box fails before any code has run.
        tool_timeout: seconds a tool call may take; by default as long as one run may take with all its waiting. Shorter
            than that, a sandbox that is slow to come would be told to the model as its own time-out.
        **options: as `ToolEnv`.

    Raises:
        ConfigurationError: limits beside a pool that has its own, or a ``tool_timeout`` that is too short.

    Attributes:
        lease: ``"episode"``: the box is kept for the episode, with its files and session. ``"call"``: each call gets
            a clean one, so that few boxes serve many slots. Set on the class, or before ``super().__init__``.
        sandbox: the sandbox.
    """

    lease: Lease = "episode"

    def __init__(
        self,
        tasks: TaskSource | Sequence[Task | str],
        *,
        sandbox: BackendName | SandboxPool = "auto",
        sandbox_limits: SandboxLimits | None = None,
        sandbox_retries: int = 1,
        tool_timeout: float | None = None,
        **options: Any,
    ) -> None:
        pool, self._own_pool = _as_pool(sandbox, sandbox_limits, size=1)
        try:
            self.sandbox = Sandbox(pool, lease=self.lease, retries=sandbox_retries)
            longest = self.sandbox.longest_run
            if tool_timeout is not None and tool_timeout < longest:
                raise ConfigurationError(
                    f"expected tool_timeout of {longest:g} s or more, actual {tool_timeout}: so long may one run take "
                    "with waiting for a box; lower the sandbox's time-outs (SandboxLimits.timeout bounds the code)"
                )
            options.setdefault("hook_timeout", max(60.0, 2 * longest))
            super().__init__(tasks, tool_timeout=longest if tool_timeout is None else tool_timeout, **options)
            self.least_call = longest
        except BaseException:
            if self._own_pool is not None:
                self._own_pool.close()
            raise

    @classmethod
    def shared(cls, num_envs: int, options: Mapping[str, Any]) -> tuple[dict[str, Any], list[Closer]]:
        """One pool for all slots of a vector; see `ToolEnv.shared`."""
        given = options.get("sandbox", "auto")
        size = num_envs if cls.lease == "episode" else min(num_envs, _SHARED)
        pool, own = _as_pool(given, options.get("sandbox_limits"), size=size)
        kept = {name: value for name, value in options.items() if name != "sandbox_limits"}
        return {**kept, "sandbox": pool}, [] if own is None else [own.close]

    async def areset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """As `ToolEnv.areset`, in a clean box."""
        await self.adrain()
        await self.sandbox.release()
        return await super().areset(seed=seed, options=options)

    async def aclose(self) -> None:
        """As `ToolEnv.aclose`; the box is given back."""
        await super().aclose()
        await self.sandbox.release()
        if self._own_pool is not None:
            await asyncio.to_thread(self._own_pool.close)

    def close(self) -> None:
        """As `ToolEnv.close`; a pool of this environment's own is closed."""
        super().close()
        if self._own_pool is not None:
            self._own_pool.close()

    async def _end(self, *, truncated: bool) -> tuple[float, bool, bool, dict[str, Any]]:
        try:
            return await super()._end(truncated=truncated)
        finally:
            # Now, not at the next reset: other slots may wait for a box.
            await self.sandbox.release()


def _as_pool(
    sandbox: BackendName | SandboxPool, limits: SandboxLimits | None, *, size: int
) -> tuple[SandboxPool, SandboxPool | None]:
    """The pool to use, and again if it is to be closed by whoever asked."""
    if limits is not None and not isinstance(limits, SandboxLimits):
        raise ConfigurationError(f"expected sandbox_limits as SandboxLimits, actual {limits!r:.100}")
    if isinstance(sandbox, SandboxPool):
        if limits is not None and limits != sandbox.limits:
            raise ConfigurationError("the sandbox pool has limits of its own: give them to it, not beside it")
        return sandbox, None
    made = SandboxPool(sandbox, size=size, limits=limits)
    return made, made
