"""Who made a box: a process that can be told from every other, also from a later one with its number."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Owner:
    """A process.

    Attributes:
        boot: the boot of the machine it runs on.
        namespace: its namespace of process numbers.
        pid: its number there.
        started: when it started, in clock ticks since boot.
    """

    boot: str
    namespace: str
    pid: int
    started: int

    @classmethod
    def me(cls) -> "Owner":
        """This process."""
        pid = os.getpid()
        return cls(_boot(), _namespace(), pid, _started(pid) or 0)

    @classmethod
    def parse(cls, text: str) -> "Owner | None":
        """An owner from its label; None if it is none."""
        parts = text.split("/")
        if len(parts) != 4 or not parts[2].isdigit() or not parts[3].isdigit():
            return None
        return cls(parts[0], parts[1], int(parts[2]), int(parts[3]))

    @property
    def known(self) -> bool:
        """Whether this process can tell if the owner is alive: it is on the same machine, in the same namespace."""
        return self.boot == _boot() and self.namespace == _namespace()

    @property
    def alive(self) -> bool:
        """Whether the owner is alive; only to be asked where it is `known`."""
        return _started(self.pid) == self.started

    def __str__(self) -> str:
        return f"{self.boot}/{self.namespace}/{self.pid}/{self.started}"


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid").strip("pid:[]")


def _started(pid: int) -> int | None:
    """Field 22 of proc(5)'s stat; None where no such process lives."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
