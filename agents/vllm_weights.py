"""The weights of a running vLLM engine: which version samples now, and how another set takes their place."""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any, get_args

from toolgym.agents.engine_gate import EngineGate
from toolgym.agents.policy import InFlight, PolicyFailure
from toolgym.agents.vllm_engine import answered, seen_through
from toolgym.agents.weights import WeightLayout, as_folder
from toolgym.envs.errors import ConfigurationError
from toolgym.envs.finite import as_int
from toolgym.envs.waiting import Overdue, within

_AGAIN = 0.05  # seconds after which requests that were not yet the engine's are aborted again


class EngineWeights:
    """Belongs to the engine's event loop; `version` may be read from any thread.

    Args:
        model: folder of the model that the engine starts with.
        gate: that every request passes.
        loadable: whether the engine's workers can load weights.

    Attributes:
        version: of the weights that sample now. It changes only while nobody is inside the gate, so a request may read
            it anywhere within.
    """

    def __init__(self, model: Path, gate: EngineGate, *, loadable: bool) -> None:
        self.version = 0
        self._gate, self._loadable = gate, loadable
        self._one_at_a_time = asyncio.Lock()
        self._doubt: str | None = None
        self._layout: WeightLayout | None = None
        self._unknown = ""
        try:
            self._layout = WeightLayout(model)  # now: the folder may be gone later
        except ConfigurationError as error:
            self._unknown = str(error)

    def check(self) -> None:
        """Refuse to sample from weights that may be half loaded, or from an engine that does not go on.

        Raises:
            PolicyFailure: an update has failed, and none has succeeded since.
        """
        if self._doubt is not None:
            raise PolicyFailure(self._doubt, permanent=True)

    async def update(self, engine: Any, source: Any, version: int | None, in_flight: InFlight, timeout: float) -> int:
        """See `VLLMPolicy.update_weights`."""
        async with self._one_at_a_time:
            version = self._checked(version, in_flight, timeout)
            layout = self._known_layout(engine)
            with contextlib.ExitStack() as stack:
                entering = asyncio.to_thread(stack.enter_context, as_folder(source, layout))
                folder = await seen_through(asyncio.ensure_future(entering))
                self._gate.close()
                try:
                    await self._emptied(engine, in_flight, timeout)
                    exchange = self._exchange(engine, folder, version, timeout)
                    await seen_through(asyncio.ensure_future(exchange))
                finally:
                    self._gate.open()
        return version

    def _checked(self, version: int | None, in_flight: InFlight, timeout: float) -> int:
        if in_flight not in get_args(InFlight):
            raise ConfigurationError(f"expected in_flight as one of {get_args(InFlight)}, actual {in_flight!r}")
        if not timeout > 0:
            raise ConfigurationError(f"expected a timeout above 0 s, actual {timeout!r}")
        if version is None:
            return self.version + 1
        number = as_int(version)
        if number is None or not self.version < number < 2**31:
            raise ConfigurationError(f"expected a version above {self.version} (and below 2**31), actual {version!r}")
        return number

    def _known_layout(self, engine: Any) -> WeightLayout:
        if self._layout is None:
            raise ConfigurationError(f"new weights have nothing to be compared with: {self._unknown}")
        if not self._loadable:
            raise ConfigurationError("a worker_extension_cls of your own leaves no way to load weights: leave it off")
        if missing := [name for name in ("pause_generation", "resume_generation") if not hasattr(engine, name)]:
            raise ConfigurationError(f"this vLLM has no {missing[0]}: weights cannot be updated, use a newer one")
        return self._layout

    async def _emptied(self, engine: Any, in_flight: InFlight, seconds: float) -> None:
        """Wait until nobody is inside the gate.

        Afterwards the engine has nothing to do: a request leaves the gate when it has ended.
        """
        ends = time.monotonic() + seconds
        while self._gate.inside:
            left = ends - time.monotonic()
            if left <= 0:
                raise PolicyFailure(
                    f"{self._gate.inside} samples did not end within {seconds:g} s; the weights are still version "
                    f"{self.version}"
                )
            if in_flight == "resume":
                await answered(engine, "breaking off requests", engine.abort(self._gate.names), left)
            with contextlib.suppress(Overdue):
                await within(self._gate.empty.wait(), min(left, _AGAIN) if in_flight == "resume" else left)

    async def _exchange(self, engine: Any, folder: Path, version: int, seconds: float) -> None:
        """Load weights into an engine without requests."""
        try:
            pause = engine.pause_generation(mode="abort", clear_cache=True)
            await answered(engine, "coming to rest", pause, seconds)
            self._doubt = f"the weights may be half loaded until an update succeeds: version {version} from {folder}"
            load = engine.collective_rpc("toolgym_load", args=(str(folder),))
            await answered(engine, f"loading the weights in {folder}", load, seconds)
            self.version, self._doubt = version, None
        finally:
            await self._resume(engine, seconds)

    async def _resume(self, engine: Any, seconds: float) -> None:
        """Let the engine go on. Where it does not, requests are refused: they would wait for an answer in vain."""
        try:
            await answered(engine, "resuming", engine.resume_generation(), seconds)
        except PolicyFailure as failure:
            if self._doubt is None:
                self._doubt = f"the engine stays paused until an update succeeds: weights of version {self.version}"
            raise PolicyFailure(f"{failure}; {self._doubt}", permanent=failure.permanent) from failure
