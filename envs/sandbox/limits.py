"""The limits of a box: one frozen object, checked when it is made."""

import math
from dataclasses import dataclass, fields

from toolgym.envs.errors import ConfigurationError

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What the code in one box may use. Every value is above zero.

    Attributes:
        timeout: seconds of wall time that a run may take where the call itself does not say.
        memory: bytes of memory of the whole box (there is no swap); files in its folders count.
        process_memory: bytes of address space of one process.
        cpus: CPU cores, e.g. 0.5.
        processes: processes and threads of a run, and as many of the session.
        open_files: file descriptors of one process.
        workspace: bytes of files in the workspace.
        tmp: bytes of files in /tmp.
        shm: bytes of shared memory in /dev/shm.
        file_size: bytes of one file.
        output: bytes kept of each output stream, half of its head and half of its tail.
        flood: bytes of output, both streams together, after which a run is stopped.

    Raises:
        ConfigurationError: a value that is not above zero or too small to work with, or folders that together have more
            than half of the memory.
    """

    timeout: float = 10.0
    memory: int = 512 * MIB
    process_memory: int = 1024 * MIB
    cpus: float = 1.0
    processes: int = 128
    open_files: int = 256
    workspace: int = 64 * MIB
    tmp: int = 64 * MIB
    shm: int = 16 * MIB
    file_size: int = 64 * MIB
    output: int = 64 * 1024
    flood: int = 8 * MIB

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            whole = entry.name not in ("timeout", "cpus")
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                kind = "an int" if whole else "a number"
                raise ConfigurationError(f"expected SandboxLimits.{entry.name} as {kind}, actual {value!r}")
            if not 0 < value < math.inf:
                raise ConfigurationError(f"expected SandboxLimits.{entry.name} above 0 and finite, actual {value}")
        if self.memory < 64 * MIB:
            raise ConfigurationError(f"expected SandboxLimits.memory of {64 * MIB} bytes or more, actual {self.memory}")
        if self.process_memory < 64 * MIB:
            raise ConfigurationError(
                f"expected SandboxLimits.process_memory of {64 * MIB} bytes or more, actual {self.process_memory}"
            )
        if self.cpus < 0.01:
            raise ConfigurationError(f"expected SandboxLimits.cpus of 0.01 or more, actual {self.cpus}")
        folders = self.workspace + self.tmp + self.shm
        if folders > self.memory // 2:
            raise ConfigurationError(
                f"the folders of a box live in its memory: workspace + tmp + shm are {folders} bytes, more than half "
                f"of SandboxLimits.memory ({self.memory}): lower the folders or raise the memory"
            )
        if self.output > 4 * MIB:
            raise ConfigurationError(f"expected SandboxLimits.output of at most {4 * MIB} bytes, actual {self.output}")
        if self.processes < 16:
            raise ConfigurationError(f"expected SandboxLimits.processes of 16 or more, actual {self.processes}")
        if self.open_files < 32:
            raise ConfigurationError(f"expected SandboxLimits.open_files of 32 or more, actual {self.open_files}")
