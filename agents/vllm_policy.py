"""`VLLMPolicy`: an in-process vLLM engine as a policy, token ids in and out."""

import asyncio
import contextlib
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from toolgym.agents.chat import check_model_folder
from toolgym.agents.engine_gate import EngineGate
from toolgym.agents.policy import Completion, EngineLoad, FinishReason, InFlight, PolicyFailure, SampleRequest
from toolgym.agents.vllm_engine import LoadWatch, check_length, start, stop
from toolgym.agents.vllm_weights import EngineWeights
from toolgym.envs.errors import ToolgymError
from toolgym.envs.loop import LoopThread
from toolgym.envs.waiting import Overdue

_STARTING = 900.0  # seconds


class VLLMPolicy:
    """Samples from a model in a vLLM ``AsyncLLM`` engine of this process's own.

    Continuous batching and prefix caching are on. The engine lives on an event loop of its own, so `sample` may be
    awaited from any loop. Logprobs are those of the distribution that was sampled from (vLLM's
    ``processed_logprobs``): after temperature, renormalised over what top-p and top-k keep; at temperature 0, those of
    the unscaled distribution.

    Args:
        model: a model folder.
        max_model_len: longest prompt plus completion, in tokens; None takes the model's own limit.
        max_num_seqs: how many sequences the engine runs at once.
        seeds: whether requests are sampled with their seeds. False leaves them out, with a `SeedWarning`, and allows
            chunked prefill on vLLM's CPU engine, which dies of it where a request has a seed.
        update_timeout: seconds that a request waits at most while weights are exchanged.
        **engine: further arguments of vLLM's ``AsyncEngineArgs``.

    Attributes:
        max_model_len: in tokens.
        description: of the policy, for the record, JSON-ready.

    Raises:
        ConfigurationError: no such folder, vLLM is not installed, or arguments that vLLM or its CPU engine refuse.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        max_model_len: int | None = None,
        max_num_seqs: int = 128,
        seeds: bool = True,
        update_timeout: float = 600.0,
        **engine: Any,
    ) -> None:
        self.model = check_model_folder(model)
        check_length(self.model, max_model_len)
        self._seeds, self._patience = seeds, update_timeout
        self._gate, self._watch = EngineGate(), LoadWatch()
        self._weights = EngineWeights(self.model, self._gate, loadable="worker_extension_cls" not in engine)
        self._loop = LoopThread("toolgym vllm")
        # In a box, so that closing leaves no reference: vLLM's own __del__ fails while the interpreter shuts down.
        self._box: list[Any] = []
        try:
            options = {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs, **engine}
            starting = start(str(self.model), self._watch, seeds=seeds, **options)
            self._box.append(self._loop.run(starting, timeout=_STARTING))
            self._loop.run(self._warm_up(), timeout=_STARTING)
        except BaseException:  # an interrupt, too, must leave no process behind
            stop(self._box, self._loop)
            raise
        self.max_model_len = int(self._box[0].model_config.max_model_len)
        self.description = self._describe()
        self._finalizer = weakref.finalize(self, stop, self._box, self._loop)

    @property
    def version(self) -> int:
        """The version of the weights that sample now, 0 at first."""
        return self._weights.version

    def _describe(self) -> dict[str, Any]:
        """What a run should remember of its policy, JSON-ready."""
        import vllm  # noqa: PLC0415 - heavy

        config = self._box[0].model_config
        return {
            "kind": "vllm",
            "vllm": vllm.__version__,
            "dtype": str(config.dtype),
            "max_model_len": self.max_model_len,
            "logprobs_mode": str(config.logprobs_mode),
            "seeds": self._seeds,
        }

    async def sample(self, request: SampleRequest) -> list[Completion]:
        """See `Policy.sample`. Cancelling it aborts the request in the engine.

        A request waits while weights are exchanged. One that an update breaks off returns what was sampled so far,
        maybe nothing, as `FinishReason.ABORT`; its samples may have got differently far, and some may be whole.

        Raises:
            PolicyFailure: the engine is dead or closed, refused the request, or returned what does not add up; an
                update took too long, or failed.
        """
        with self._closing_told():
            return await self._loop.call(self._sample(request))

    def load(self) -> EngineLoad:
        """How busy the engine is, by its last step; any thread may ask.

        Returns:
            ``waiting`` counts also what waits for an update of the weights. ``running`` and ``kv_usage`` are None
            until the engine has taken its first step with what it was given.
        """
        inside, held_up, seen = self._gate.inside, self._gate.waiting, self._watch.latest()
        if not inside:  # the engine takes no more steps that would tell
            return EngineLoad(0, held_up, 0.0)
        if seen is None:
            return EngineLoad(None, None, None)
        running = min(seen[0], inside)
        return EngineLoad(running, inside - running + held_up, seen[1])

    def update_weights(
        self,
        source: str | Path | Mapping[str, Any],
        *,
        version: int | None = None,
        in_flight: InFlight = "resume",
        timeout: float = 600.0,
    ) -> int:
        """Exchange the weights, between requests or while they run; blocks until it is done.

        What is wrong with the source is found before the engine is touched. New requests wait until it is done. The
        prefix cache is emptied: nothing that old weights have computed is used under new ones. Interrupted before the
        weights are touched, nothing changes; after that, the exchange is seen through all the same. Updates at the
        same time come one after the other.

        Args:
            source: a model folder with safetensors, or a mapping of the names therein to torch tensors, which is
                written to a temporary folder (``TMPDIR``). Floats of another width are converted.
            version: of these weights, above the present one; None counts one up.
            in_flight: ``"resume"`` breaks off the requests that run (see `sample`); ``"finish"`` awaits their end.
            timeout: seconds for each of: the running requests' end, the engine's coming to rest, the load.

        Returns:
            The version, which every token sampled from now on bears.

        Raises:
            ConfigurationError: the source is not there, broken, or another model's; or a version that is not above the
                present one. The policy goes on with its weights.
            PolicyFailure: the requests did not end in time, and the policy goes on with its weights; or the engine
                failed at the load, and the policy refuses to sample until an update succeeds; or it is dead or closed.
        """
        with self._closing_told():
            return self._loop.run(self._update(source, version, in_flight, timeout))

    async def aupdate_weights(
        self,
        source: str | Path | Mapping[str, Any],
        *,
        version: int | None = None,
        in_flight: InFlight = "resume",
        timeout: float = 600.0,
    ) -> int:
        """As `update_weights`, awaited from any event loop."""
        with self._closing_told():
            return await self._loop.call(self._update(source, version, in_flight, timeout))

    def close(self) -> None:
        """Shut the engine down and end its process and thread. May be called again."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _closing_told(self) -> Iterator[None]:
        """Whoever asks a closed policy, or one that is closed meanwhile, hears so by a PolicyFailure."""
        if not self._finalizer.alive:
            raise PolicyFailure("the policy is closed", permanent=True)
        try:
            yield
        except (ToolgymError, asyncio.CancelledError) as raised:
            if self._finalizer.alive or isinstance(raised, PolicyFailure):
                raise
            if isinstance(raised, asyncio.CancelledError) and (task := asyncio.current_task()) and task.cancelling():
                raise
            raise PolicyFailure("the policy was closed", permanent=True) from raised

    async def _warm_up(self) -> None:
        """The first requests of an engine take seconds; they belong to its start, not to anybody's episode."""
        await self._sample(SampleRequest((0,), max_tokens=2, n=2, seed=0))

    async def _update(self, source: Any, version: int | None, in_flight: InFlight, timeout: float) -> int:
        return await self._weights.update(self._engine(), source, version, in_flight, timeout)

    def _engine(self) -> Any:
        if not self._box:
            raise PolicyFailure("the policy is closed", permanent=True)
        return self._box[0]

    async def _sample(self, request: SampleRequest) -> list[Completion]:
        # vLLM refuses n > 1 at temperature 0, where all samples are one and the same: it is drawn once.
        drawn = 1 if request.sampling.temperature == 0 else request.n
        try:
            async with self._gate.passing(drawn, self._patience) as name:
                self._weights.check()
                completions = await self._drawn(request, drawn, name)
        except Overdue as overdue:
            raise PolicyFailure(f"an update of the weights took over {self._patience:g} s") from overdue
        return completions if drawn == request.n else completions * request.n

    async def _drawn(self, request: SampleRequest, n: int, name: str) -> list[Completion]:
        from vllm.exceptions import VLLMClientError, VLLMError  # noqa: PLC0415 - heavy
        from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415 - heavy

        prompt = {"prompt_token_ids": np.asarray(request.prompt_ids).tolist()}
        final = None
        try:
            async for output in self._engine().generate(prompt, self._params(request, n), name):
                final = output
        except EngineDeadError as error:
            raise PolicyFailure(f"the vLLM engine is dead: {error}", permanent=True) from error
        except (VLLMClientError, ValueError) as error:
            raise PolicyFailure(f"vLLM refused the request: {error}") from error
        except VLLMError as error:
            raise PolicyFailure(f"vLLM failed on the request: {error.__cause__ or error}") from error
        if final is None or not final.finished or len(final.outputs) != n:
            raise PolicyFailure(f"vLLM ended the request without {n} finished samples")
        fed = np.asarray(final.prompt_token_ids, dtype=np.int32)
        ordered = sorted(final.outputs, key=lambda output: output.index)
        return [_completion(output, fed, self.version) for output in ordered]

    def _params(self, request: SampleRequest, n: int) -> Any:
        from vllm import SamplingParams  # noqa: PLC0415 - heavy
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415 - heavy

        return SamplingParams(
            n=n,
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            top_k=request.sampling.top_k,
            seed=request.seed if self._seeds else None,  # sample k is drawn with seed + k, as SampleRequest promises
            max_tokens=request.max_tokens,
            stop_token_ids=list(request.stop_token_ids),
            ignore_eos=True,  # the chat format says what stops, not the model's configuration
            logprobs=0,  # of the sampled token alone
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,  # of an aborted request, too, with all tokens so far
        )


def _completion(output: Any, fed: Any, version: int) -> Completion:
    ids = np.asarray(output.token_ids, dtype=np.int32)
    entries = output.logprobs or []
    if len(entries) != len(ids):
        raise PolicyFailure(f"vLLM returned {len(ids)} tokens and {len(entries)} logprobs")
    logprobs = np.asarray([entry[int(token)].logprob for token, entry in zip(ids, entries, strict=True)], np.float32)
    finish = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}.get(output.finish_reason, FinishReason.ABORT)
    return Completion(ids, logprobs, np.full(len(ids), version, dtype=np.int32), finish, fed)
