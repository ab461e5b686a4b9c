"""`SandboxPool` and `Sandbox`: what environments and their authors hold. Usable from any event loop and any thread."""

import asyncio
import contextlib
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

from toolgym.envs.errors import ConfigurationError, ToolError, ToolgymError
from toolgym.envs.loop import LoopThread
from toolgym.envs.sandbox.backend import Backend
from toolgym.envs.sandbox.box import BEGIN, GRACE, Box, Listing, with_files
from toolgym.envs.sandbox.choice import BackendName, choose
from toolgym.envs.sandbox.limits import SandboxLimits
from toolgym.envs.sandbox.pool import BoxPool, PoolState
from toolgym.envs.sandbox.results import RunResult, SandboxFailure

_T = TypeVar("_T")
_CLOSING = 60.0  # seconds
Lease = Literal["episode", "call"]
Content = str | bytes


class SandboxPool:
    """A pool of boxes in which code runs isolated, with an event loop in a thread of its own.

    One pool serves any number of environments, vectors and threads. Boxes are made when they are first needed (or
    ``warm`` of them at once), reset in place between two users, and removed when the pool is closed - or, if this
    process dies, by themselves.

    Args:
        backend: ``"docker"``; ``"local"``, child processes of this one, for where no engine is; ``"auto"``, Docker
            where an engine answers, else local with a warning; or a backend of one's own.
        size: boxes at most.
        warm: boxes that are made at once.
        limits: of each box.
        acquire_timeout: seconds to wait for a free box.
        episodes: after so many leases a box is replaced by a new one.
        **options: of the backend, e.g. ``image=ImageSpec(packages=(...))`` or ``runtime="runsc"`` for Docker.

    Raises:
        ConfigurationError: an unknown backend, or a value out of its range.
    """

    def __init__(
        self,
        backend: BackendName | Backend = "auto",
        *,
        size: int = 8,
        warm: int = 0,
        limits: SandboxLimits | None = None,
        acquire_timeout: float = 20.0,
        episodes: int = 500,
        **options: Any,
    ) -> None:
        if limits is not None and not isinstance(limits, SandboxLimits):
            raise ConfigurationError(f"expected limits as SandboxLimits, actual {limits!r:.100}")
        if not isinstance(backend, str) and not hasattr(backend, "create"):
            raise ConfigurationError(
                f"expected sandbox among auto, docker, local, or a backend, actual {backend!r:.100}"
            )
        if not isinstance(backend, str) and (limits is not None or options):
            raise ConfigurationError("a backend of one's own has its limits and options already: give them to it")
        self.limits = (limits or SandboxLimits()) if isinstance(backend, str) else backend.limits
        self.acquire_timeout = acquire_timeout
        self.size = size
        self.loop = LoopThread("the loop of the sandboxes")

        async def begin() -> BoxPool:
            made = await choose(backend, self.limits, options) if isinstance(backend, str) else backend
            pool = BoxPool(made, size=size, warm=warm, acquire_timeout=acquire_timeout, episodes=episodes)
            await pool.open()
            return pool

        try:
            self._pool = self.loop.run(begin())
        except BaseException:
            self.loop.close()
            raise
        self.backend = self._pool.backend.name
        self._finalizer = weakref.finalize(self, _shut_down, self._pool, self.loop)

    @property
    def state(self) -> PoolState:
        """How many boxes there are, and in what state."""
        return self._pool.state

    def sandbox(self, *, lease: Lease = "episode", retries: int = 1) -> "Sandbox":
        """A sandbox of this pool; see there."""
        return Sandbox(self, lease=lease, retries=retries)

    def close(self) -> None:
        """Remove all boxes. May be called again; what still runs in them ends with a failure."""
        self._finalizer()

    def __enter__(self) -> "SandboxPool":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def _acquire(self) -> Box:
        return await self._pool.acquire()

    async def _release(self, box: Box) -> None:
        await self._pool.release(box)


class Sandbox:
    """A box for as long as it is needed, taken from a pool when it is first used.

    With ``lease="episode"`` the box is kept, with its files and its session, until `release`. With ``lease="call"``
    every call takes a clean box and gives it back: nothing is kept, and few boxes serve many callers.

    A box that fails before code of this lease has run is replaced by a fresh one, and the call is made again there
    (files that were put are put again), up to ``retries`` times. Otherwise `SandboxFailure` is raised: what the code
    had done is lost.

    All methods are awaited, from any event loop; `sync` has the same ones for code without a loop.

    Args:
        pool: lends the boxes.
        lease: see above.
        retries: tries on a fresh box.
    """

    def __init__(self, pool: SandboxPool, *, lease: Lease = "episode", retries: int = 1) -> None:
        if lease not in get_args(Lease):
            raise ConfigurationError(f"expected lease among {', '.join(get_args(Lease))}, actual {lease!r}")
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise ConfigurationError(f"expected sandbox retries as an int of 0 or more, actual {retries!r}")
        self.pool, self.lease, self._retries = pool, lease, retries
        self._box: Box | None = None
        self._ran = False
        self._missing = False  # whether files must be put again, into a fresh box
        self._files: dict[str, bytes] = {}
        self._turn = asyncio.Lock()  # of the pool's loop

    @property
    def sync(self) -> "SyncSandbox":
        """The same methods, blocking."""
        return SyncSandbox(self)

    @property
    def longest_run(self) -> float:
        """Seconds that a run with the default time-out may take at most, waiting for boxes and retries included."""
        tries = self._retries + 1
        return tries * (self.pool.acquire_timeout + BEGIN) + self.pool.limits.timeout + GRACE

    async def run(
        self,
        code: str,
        *,
        stdin: Content = b"",
        files: Mapping[str, Content] | None = None,
        fetch: Sequence[str] = (),
        timeout: float | None = None,
    ) -> RunResult:
        """Run a Python program in a process of its own, in the workspace.

        Args:
            code: the program.
            stdin: what it can read; up to 16 MiB. The program itself may have up to 1 MiB.
            files: written into the workspace before.
            fetch: plain files to bring back afterwards, in ``result.files`` where there are such, of up to 16 MiB.
            timeout: seconds of wall time; the pool's ``limits.timeout`` by default.

        Raises:
            SandboxFailure: the sandbox failed; never because of what the code does.
            ToolError: files that cannot be written, e.g. outside of the workspace.
        """
        return await self._run("python", code, stdin, files, fetch, timeout)

    async def shell(
        self,
        command: str,
        *,
        stdin: Content = b"",
        files: Mapping[str, Content] | None = None,
        fetch: Sequence[str] = (),
        timeout: float | None = None,
    ) -> RunResult:
        """Run a command line with bash, in the workspace. Arguments and errors as `run`."""
        return await self._run("shell", command, stdin, files, fetch, timeout)

    async def exec(self, code: str, *, timeout: float | None = None) -> RunResult:
        """Run a cell in the Python session of this lease: variables are kept, the last line's value is shown.

        Raises:
            SandboxFailure: the sandbox failed.
            ConfigurationError: with ``lease="call"`` there is no session.
        """
        self._keeps("session")
        return await self._call(lambda box: box.execute(code, timeout=timeout), runs=True)

    async def put(self, files: Mapping[str, Content]) -> None:
        """Write files into the workspace, by paths relative to it.

        Raises:
            ToolError: a path that leaves the workspace, or no room.
            SandboxFailure: the sandbox failed.
        """
        self._keeps("files")
        ready = _as_bytes(files)
        await self._call(lambda box: box.put(ready), runs=False)
        if not self._ran:
            self._files.update(ready)

    async def get(self, path: str) -> bytes:
        """The content of a file. Raises ToolError if there is none, or it is too large."""
        self._keeps("files")
        return await self._call(lambda box: box.get(_path(path)), runs=False)

    async def list(self, path: str = ".") -> Listing:
        """Everything below a folder, recursively. Raises ToolError if there is none."""
        self._keeps("files")
        return await self._call(lambda box: box.list(_path(path)), runs=False)

    async def close_session(self) -> None:
        """End the session, if there is one; files stay."""
        await self._call(lambda box: box.close_session(), runs=False)

    async def reset(self) -> None:
        """End every process and remove every file: the box is as new."""
        await self._on_loop(self._reset())

    async def release(self) -> None:
        """Give the box back to the pool. The next call takes another one."""
        with contextlib.suppress(SandboxFailure):  # a pool that is closed has taken its boxes back
            await self._on_loop(self._release())

    async def _run(  # noqa: PLR0917
        self,
        kind: str,
        code: str,
        stdin: Content,
        files: Mapping[str, Content] | None,
        fetch: Sequence[str],
        timeout: float | None,
    ) -> RunResult:
        if not isinstance(code, str):
            raise ConfigurationError(f"expected code or a command as text, actual {type(code).__name__}")
        if isinstance(fetch, str) or not all(isinstance(path, str) for path in fetch):
            raise ConfigurationError(f"expected fetch as a list of paths, actual {fetch!r:.100}")
        ready, data = _as_bytes(files or {}), _content("stdin", stdin)

        def on(box: Box) -> Awaitable[RunResult]:
            def work() -> Awaitable[RunResult]:
                return box.run(code, stdin=data, kind=kind, timeout=timeout)

            return with_files(box, ready, fetch, work) if ready or fetch else work()

        return await self._call(on, runs=True)

    def _keeps(self, what: str) -> None:
        if self.lease == "call":
            raise ConfigurationError(
                f"a sandbox with lease='call' keeps no {what}: make one with lease='episode', or give files to run()"
            )

    def __enter__(self) -> "SyncSandbox":
        return self.sync

    def __exit__(self, *exc: object) -> None:
        self.sync.release()

    async def __aenter__(self) -> "Sandbox":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.release()

    def __del__(self) -> None:
        # One that is forgotten gives its box back all the same.
        box = getattr(self, "_box", None)
        if box is not None:
            with contextlib.suppress(ToolgymError, RuntimeError):
                self.pool.loop.submit(self.pool._release(box))

    async def _call(self, work: Callable[[Box], Awaitable[_T]], *, runs: bool) -> _T:
        return await self._on_loop(self._with_a_box(work) if self.lease == "call" else self._in_turn(work, runs=runs))

    async def _on_loop(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Everything that touches the state of a lease or a box is done on the pool's loop."""
        with _closed_is_a_failure():
            return await self.pool.loop.call(work)

    async def _in_turn(self, work: Callable[[Box], Awaitable[_T]], *, runs: bool) -> _T:
        """Do something with this lease's box; on a fresh one if it fails before any code has run."""
        async with self._turn:
            for tries_left in range(self._retries, -1, -1):
                try:
                    return await self._with_my_box(work, runs=runs)
                except SandboxFailure as failure:
                    if failure.began or self._ran or not tries_left or not _may_pass(failure):
                        raise
            raise AssertionError("unreachable")

    async def _with_my_box(self, work: Callable[[Box], Awaitable[_T]], *, runs: bool) -> _T:
        if self._box is None:
            if self._ran:
                raise SandboxFailure("the box of this episode died in an earlier call", kind="state_lost")
            self._box = await self.pool._acquire()
        try:
            if self._missing:
                await self._box.put(self._files)
                self._missing = False
            result = await work(self._box)
        except SandboxFailure as failure:
            self._ran = self._ran or failure.began
            self._missing = bool(self._files)
            await self._release_box()
            raise
        except (ToolError, asyncio.CancelledError):
            self._ran = self._ran or runs  # it may have
            raise
        self._ran = self._ran or runs
        return result

    async def _with_a_box(self, work: Callable[[Box], Awaitable[_T]]) -> _T:
        for tries_left in range(self._retries, -1, -1):
            box = await self.pool._acquire()
            try:
                return await work(box)
            except SandboxFailure as failure:
                if failure.began or not tries_left or not _may_pass(failure):
                    raise
            finally:
                await self.pool._release(box)
        raise AssertionError("unreachable")

    async def _reset(self) -> None:
        async with self._turn:
            self._forget()
            if self._box is not None:
                try:
                    await self._box.reset()
                except SandboxFailure:
                    await self._release_box()  # the next call takes a fresh one, which is as new as this was to be

    async def _release(self) -> None:
        async with self._turn:
            self._forget()
            await self._release_box()

    def _forget(self) -> None:
        self._ran, self._missing, self._files = False, False, {}

    async def _release_box(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            await self.pool._release(box)


class SyncSandbox:
    """The methods of a `Sandbox` for code without an event loop, such as plain ``def`` tools. Each of them blocks."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def run(self, code: str, **options: Any) -> RunResult:
        """See `Sandbox.run`."""
        return self._wait(self._sandbox.run(code, **options))

    def shell(self, command: str, **options: Any) -> RunResult:
        """See `Sandbox.shell`."""
        return self._wait(self._sandbox.shell(command, **options))

    def exec(self, code: str, *, timeout: float | None = None) -> RunResult:
        """See `Sandbox.exec`."""
        return self._wait(self._sandbox.exec(code, timeout=timeout))

    def put(self, files: Mapping[str, Content]) -> None:
        """See `Sandbox.put`."""
        self._wait(self._sandbox.put(files))

    def get(self, path: str) -> bytes:
        """See `Sandbox.get`."""
        return self._wait(self._sandbox.get(path))

    def list(self, path: str = ".") -> Listing:
        """See `Sandbox.list`."""
        return self._wait(self._sandbox.list(path))

    def close_session(self) -> None:
        """See `Sandbox.close_session`."""
        self._wait(self._sandbox.close_session())

    def reset(self) -> None:
        """See `Sandbox.reset`."""
        self._wait(self._sandbox.reset())

    def release(self) -> None:
        """See `Sandbox.release`."""
        self._wait(self._sandbox.release())

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        with _closed_is_a_failure():
            return self._sandbox.pool.loop.run(work)


@contextlib.contextmanager
def _closed_is_a_failure() -> Iterator[None]:
    try:
        yield
    except ToolgymError as error:
        if type(error) is ToolgymError:  # what a loop says that is closed
            raise SandboxFailure(f"the pool is closed: {error}", kind="closed") from error
        raise


def _may_pass(failure: SandboxFailure) -> bool:
    """Whether a fresh box may help."""
    return failure.kind not in (
        "sandbox_pool_exhausted",
        "sandbox_closed",
        "sandbox_state_lost",
        "sandbox_image_failed",
    )


def _as_bytes(files: Mapping[str, Content]) -> dict[str, bytes]:
    if not isinstance(files, Mapping):
        raise ConfigurationError(f"expected files as a mapping of path and content, actual {files!r:.100}")
    return {_path(path): _content(f"file {path!r}", data) for path, data in files.items()}


def _path(path: str) -> str:
    if not isinstance(path, str):
        raise ConfigurationError(f"expected a path in the workspace as text, actual {path!r:.100}")
    return path


def _content(what: str, data: Content) -> bytes:
    if isinstance(data, str):
        return data.encode("utf-8", "surrogateescape")
    if not isinstance(data, bytes):
        raise ConfigurationError(f"expected {what} as text or bytes, actual {type(data).__name__}")
    return data


def _shut_down(pool: BoxPool, loop: LoopThread) -> None:
    """It refers to no SandboxPool, so that a forgotten one can be collected."""
    try:
        with contextlib.suppress(TimeoutError, ToolgymError):
            loop.run(pool.close(), timeout=_CLOSING)
    finally:
        loop.close()
