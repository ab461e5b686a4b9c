"""Arenas for the hostile corpus: a pool of boxes for each backend, and things of this machine to be after."""

import contextlib
import os
import secrets
import shutil
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from toolgym.envs.sandbox.boot import INSIDE
from toolgym.envs.sandbox.choice import SandboxWarning
from toolgym.envs.sandbox.limits import MIB, SandboxLimits
from toolgym.envs.sandbox.sandbox import SandboxPool

TIGHT = SandboxLimits(
    timeout=2.0,
    memory=256 * MIB,
    process_memory=512 * MIB,
    workspace=32 * MIB,
    tmp=32 * MIB,
    shm=8 * MIB,
    processes=64,
    flood=4 * MIB,
    file_size=32 * MIB,
)
CANARY = "sings\n"
OPTIONS = {"docker": {"route": "host"}, "local": {}}
UNCONFINED = "the network"  # what a local pool says not to protect from, where it has no namespaces


@dataclass
class Bait:
    """Things of this machine that hostile code is after.

    Attributes:
        places: where they are, by the names that code gives them.
        canary: a file that everybody may read and write.
        datagrams: a UDP socket that nothing from a box must reach.
    """

    places: dict[str, str]
    canary: Path
    datagrams: socket.socket

    def untouched(self) -> bool:
        """Whether nothing has reached them."""
        with contextlib.suppress(BlockingIOError):
            self.datagrams.recv(100)
            return False
        files = sorted(path.name for path in self.canary.parent.iterdir())
        return self.canary.read_text() == CANARY and files == ["canary", "socket"]


@pytest.fixture(scope="session")
def bait() -> Iterator[Bait]:
    # Not below /tmp: a local box sees nothing of that.
    top = Path("/var/lib") if os.access("/var/lib", os.W_OK) else Path("/tmp")
    folder = top / f"toolgym-hostile-{os.getpid()}"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with contextlib.ExitStack() as held:
        held.callback(shutil.rmtree, folder)
        canary = folder / "canary"
        canary.write_text(CANARY)
        canary.chmod(0o666)
        abstract = f"toolgym-hostile-{os.getpid()}"
        tcp = held.enter_context(socket.create_server(("0.0.0.0", 0)))
        port = tcp.getsockname()[1]
        udp = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("0.0.0.0", port))
        udp.setblocking(False)
        for name in (f"\0{abstract}", str(folder / "socket")):
            unix = held.enter_context(socket.socket(socket.AF_UNIX))
            unix.bind(name)
            unix.listen()
        (folder / "socket").chmod(0o777)
        head, tail = secrets.token_hex(8), secrets.token_hex(8)
        os.environ["TOOLGYM_HOSTILE_SECRET"] = f"{head}-{tail}"
        held.callback(os.environ.pop, "TOOLGYM_HOSTILE_SECRET")
        places = {
            "CANARY": str(canary),
            "FOLDER": str(folder),
            "SOCKET": str(folder / "socket"),
            "ABSTRACT": abstract,
            "PORT": str(port),
            "HOSTS": repr(_addresses()),
            "SECRET_HEAD": head,
            "SECRET_TAIL": tail,
            "CLIENT": str(os.getpid()),
            "INSIDE": str(INSIDE),
        }
        yield Bait(places, canary, udp)


def _addresses() -> list[str]:
    """The addresses of this machine."""
    found = {"127.0.0.1", "172.17.0.1"}
    with contextlib.suppress(OSError):
        found |= {str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    return sorted(found)


@pytest.fixture(scope="session")
def pools(bait: Bait) -> Iterator[Callable[[str], SandboxPool]]:
    """A pool of each backend, made when it is first asked for."""
    made: dict[str, SandboxPool] = {}

    def pool(backend: str) -> SandboxPool:
        if backend not in made:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SandboxWarning)
                made[backend] = SandboxPool(backend, size=3, limits=TIGHT, **OPTIONS[backend])  # type: ignore[arg-type]
        return made[backend]

    yield pool
    for one in made.values():
        one.close()


def confined(pool: SandboxPool) -> bool:
    """Whether a local pool has namespaces and users of its own, as this corpus takes for granted."""
    pool.sandbox(lease="call").sync.run("1")
    return (
        sys.platform == "linux"
        and os.getuid() == 0
        and not any(UNCONFINED in words for words in pool._pool.backend.unprotected)
    )
