"""Calls to the Docker engine, off the event loop, each within its time, with failures in our own words."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from toolgym.envs.errors import ConfigurationError
from toolgym.envs.sandbox.results import SandboxFailure

_T = TypeVar("_T")
_THREADS = 8
_HTTP_TIMEOUT = 60  # seconds
LABEL = "toolgym.sandbox"
OWNER = "toolgym.owner"


class DockerEngine:
    """A connection to one engine.

    Args:
        base_url: e.g. ``unix:///var/run/docker.sock``; None takes the environment's DOCKER_HOST, or the usual socket.
    """

    def __init__(self, base_url: str | None = None) -> None:
        self._base_url = base_url
        self._api: Any = None
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="docker")

    @property
    def api(self) -> Any:
        """docker-py's low-level client, made when it is first asked for. Blocks.

        Raises:
            SandboxFailure: (``engine_gone``) no engine answers.
        """
        with self._lock:
            if self._api is None:
                self._api = self._connect()
            return self._api

    def _connect(self) -> Any:
        import docker  # noqa: PLC0415 - heavy, and only needed where boxes are made
        from docker.utils import kwargs_from_env  # noqa: PLC0415

        settings = kwargs_from_env() if self._base_url is None else {"base_url": self._base_url}
        with told():
            _knock(settings.get("base_url") or "unix:///var/run/docker.sock")
            # As many pools and connections as threads: a burst would otherwise fail after the engine has acted.
            return docker.APIClient(
                version="auto", timeout=_HTTP_TIMEOUT, num_pools=_THREADS, max_pool_size=2 * _THREADS, **settings
            )

    async def call(self, function: Callable[[Any], _T], timeout: float = _HTTP_TIMEOUT + 5.0) -> _T:
        """Run a function of docker-py's client in a thread.

        Raises:
            SandboxFailure: ``engine_gone`` if nobody answers, ``start_failed`` if the engine refuses.
            docker.errors.NotFound: what was asked for is not there.
        """

        def work() -> _T:
            with told():
                return function(self.api)

        try:
            future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        except RuntimeError as error:  # the interpreter is ending
            raise SandboxFailure(f"the connection to the Docker engine is closed: {error}", kind="closed") from error
        try:
            return await asyncio.wait_for(asyncio.shield(future), timeout)
        except asyncio.CancelledError:
            # The engine acts on in any case: whoever cleans up after this must find what it has made.
            await asyncio.wait({future}, timeout=min(timeout, _HTTP_TIMEOUT))
            raise
        except TimeoutError as error:
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise SandboxFailure(
                f"the Docker engine did not answer within {timeout:g} s", kind="engine_gone"
            ) from error

    async def answers(self, timeout: float = 3.0) -> bool:
        """Whether an engine answers."""
        try:
            return bool(await self.call(lambda api: api.ping(), timeout))
        except SandboxFailure:
            return False

    def close(self) -> None:
        """Let go of the connections. Threads that still wait end with their calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._api is not None:
            self._api.close()


def _knock(url: str) -> None:
    """Raise OSError where nobody is behind a unix socket; docker-py would leave its own end of it open."""
    if "unix://" in url:
        with socket.socket(socket.AF_UNIX) as end:
            end.settimeout(5.0)
            end.connect("/" + url.partition("unix://")[2].lstrip("/"))


def attach(api: Any, container: str) -> socket.socket:
    """A socket to a container's three streams, to be opened before it is started, so that nothing is missed.

    Raises:
        ConfigurationError: the engine is reached by TLS or SSH, which has no plain socket.
    """
    wrapped = api.attach_socket(container, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
    raw = getattr(wrapped, "_sock", wrapped)
    if type(raw) is not socket.socket:
        raise ConfigurationError(
            f"the sandbox needs a Docker engine at a unix or tcp socket, not one behind {type(raw).__name__}: "
            "run Toolgym where the engine runs, or forward its socket"
        )
    # docker-py's response object closes the socket when it is collected: take the descriptor from it.
    mine = socket.socket(fileno=raw.detach())
    mine.setblocking(False)
    return mine


@contextmanager
def told() -> Iterator[None]:
    """Turn what docker-py and its HTTP library raise into our own words; NotFound passes."""
    import requests  # noqa: PLC0415 - comes with docker
    from docker import errors  # noqa: PLC0415

    try:
        yield
    except errors.NotFound:
        raise
    except errors.APIError as error:
        text = error.explanation or str(error)
        raise SandboxFailure(f"the Docker engine refuses: {text}", kind="start_failed") from error
    except (errors.DockerException, requests.exceptions.RequestException, OSError) as error:
        raise SandboxFailure(f"no Docker engine answers: {error}", kind="engine_gone") from error
