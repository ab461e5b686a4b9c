"""Boxes as child processes of this machine: what there is where no Docker engine answers.

Each box is a worker in a process of its own, as in a container, which confines itself as far as this machine lets it.
What it does not protect from is said, once and in every result.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path

from toolgym.envs.errors import ConfigurationError
from toolgym.envs.sandbox.boot import INSIDE, command
from toolgym.envs.sandbox.box import Box
from toolgym.envs.sandbox.connection import Connection
from toolgym.envs.sandbox.inside.settings import Settings
from toolgym.envs.sandbox.limits import SandboxLimits
from toolgym.envs.sandbox.owners import Owner
from toolgym.envs.sandbox.process_limits import ENVIRONMENT, process_limits
from toolgym.envs.sandbox.results import SandboxFailure

_LEASE = 60.0  # seconds
_START = 30.0  # seconds
_PREFIX = "toolgym-box-"
_FIRST_UID, _GID, _SLOTS = 1_900_000_000, 1_900_000_000, 100_000  # far from anybody's
_ALWAYS = ("use of memory and CPU by many processes together (each process is limited, not all of them)",)
_UNFILTERED = ("attacks on the kernel: every system call is allowed", "System V shared memory left behind")
_CONFINED = (
    "reading files of this machine outside of homes",
    "talking to unix sockets outside of homes, /run and /tmp",
)
_UNCONFINED = (
    "reading every file that this user can read, and writing where this user can",
    "the network",
    "seeing, signalling and reading the memory of other processes of this user",
    "filling the disk",
)


class LocalBackend:
    """Makes boxes that are child processes.

    Args:
        limits: of each box; ``memory`` and ``cpus`` cannot be held to.
        packages: modules that are imported beforehand, if this interpreter has them.
        confine: whether to use namespaces where the kernel lets us.

    Raises:
        ConfigurationError: this is not Linux.
    """

    name = "local"

    def __init__(
        self, limits: SandboxLimits, *, packages: tuple[str, ...] = ("numpy", "sympy"), confine: bool = True
    ) -> None:
        if sys.platform != "linux":
            raise ConfigurationError("the local sandbox needs Linux; elsewhere use sandbox='docker'")
        self.limits = limits
        self.unprotected: tuple[str, ...] = (*_ALWAYS, *_UNCONFINED)
        self._packages, self._confine = packages, confine

    async def probe(self) -> None:
        """Find out what holds on this machine, by making a box."""
        await (await self.create()).close()

    async def prepare(self) -> None:
        """Nothing takes long."""

    async def tidy(self) -> None:
        """Nothing can fail to be removed."""

    async def create(self) -> Box:
        """A new child process with its worker ready.

        Raises:
            SandboxFailure: ``start_failed``.
        """
        folder = await asyncio.to_thread(_new_folder)
        ours, theirs = socket.socketpair()
        try:
            process = await self._spawn(self._settings(folder), theirs)
        except BaseException:
            ours.close()
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            raise
        finally:
            theirs.close()
        connection = Connection(docker=False)

        async def destroy() -> None:
            await _destroy(process, folder)

        try:
            ours.setblocking(False)
            await asyncio.get_running_loop().create_connection(lambda: connection, sock=ours)
            hello = await asyncio.wait_for(asyncio.shield(connection.hello), _START)
        except BaseException as error:
            connection.close()
            await destroy()
            if isinstance(error, TimeoutError | SandboxFailure):
                raise SandboxFailure(f"the local worker did not start: {error}", kind="start_failed") from error
            raise
        kernel = () if hello["filtered"] and hello["ruled"] else _UNFILTERED
        self.unprotected = (*kernel, *_ALWAYS, *(_CONFINED if hello["confined"] else _UNCONFINED))
        return Box(folder.name, connection, self.limits, destroy, self.unprotected)

    async def sweep(self) -> int:
        """Remove folders whose owners are dead; their processes have ended with them."""
        return await asyncio.to_thread(_sweep)

    async def close(self) -> None:
        """Nothing is held."""

    async def _spawn(self, settings: Settings, end: socket.socket) -> asyncio.subprocess.Process:
        line = command(sys.executable, str(INSIDE), settings)
        keep = {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}
        try:
            return await asyncio.create_subprocess_exec(
                *line,
                stdin=end.fileno(),
                stdout=end.fileno(),
                stderr=asyncio.subprocess.DEVNULL,
                env=keep,
                start_new_session=True,
                cwd="/",
            )
        except OSError as error:
            raise SandboxFailure(f"the local worker did not start: {error}", kind="start_failed") from error

    def _settings(self, folder: Path) -> Settings:
        limits = self.limits
        uid = None if os.getuid() else _FIRST_UID + 2 * secrets.randbelow(_SLOTS)
        places = {"HOME": str(folder / "workspace"), "TMPDIR": str(folder / "tmp"), "PATH": os.defpath}
        rlimits = process_limits(limits)
        if uid is None:
            del rlimits["RLIMIT_NPROC"]  # it would count all processes of this user
        return Settings(
            workspace=str(folder / "workspace"),
            folders=(str(folder / "tmp"),),
            run_uid=uid,
            session_uid=None if uid is None else uid + 1,
            gid=None if uid is None else _GID,
            rlimits=rlimits,
            nice=5,
            output=limits.output,
            flood=limits.flood,
            lease=_LEASE,
            preload=self._packages,
            environment={**ENVIRONMENT, **places},
            shell=shutil.which("bash") or "/bin/sh",
            confine=self._confine,
            visible=(sys.base_prefix, sys.prefix, str(INSIDE)),
            folder_bytes={"workspace": limits.workspace, "tmp": limits.tmp, "shm": limits.shm},
        )


def _new_folder() -> Path:
    owner = str(Owner.me()).replace("/", "_")
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{owner}_"))
    folder.chmod(0o711)
    for name in ("workspace", "tmp"):
        (folder / name).mkdir()
        (folder / name).chmod(0o1777 if name == "tmp" else 0o777)
    return folder


async def _destroy(process: asyncio.subprocess.Process, folder: Path) -> None:
    """The worker has been hung up on, and ends everything; then its folder goes."""
    try:
        await asyncio.wait_for(process.wait(), 15.0)
    except TimeoutError:
        await asyncio.to_thread(_kill_children, process.pid)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 5.0)
    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _kill_children(pid: int) -> None:
    """The worker is the child of the process that is known, and the first of its namespace: all ends with it."""
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)


def _sweep() -> int:
    found = 0
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        owner = Owner.parse("/".join(folder.name.removeprefix(_PREFIX).split("_")[:4]))
        if owner is not None and owner.known and not owner.alive:
            shutil.rmtree(folder, ignore_errors=True)
            found += 1
    return found
