"""What a sandbox answers: results of runs, and the failure that is ours and never the model's."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from toolgym.envs.errors import EnvironmentFailure


class SandboxFailure(EnvironmentFailure):
    """The sandbox itself failed: a box died, the engine is gone, no box was free.

    It ends an episode without a reward and is never shown to the model.

    Attributes:
        kind: ``"sandbox_"`` and one of ``box_died``, ``box_hung``, ``protocol``, ``worker_failed``, ``unclean``,
            ``engine_gone``, ``image_failed``, ``start_failed``, ``pool_exhausted``, ``state_lost``, ``closed``.
        began: whether code of the episode may have begun to run in the call that failed; if not, the call may be
            tried again on a fresh box.
    """

    def __init__(self, message: str, *, kind: str, began: bool = False) -> None:
        super().__init__(message, kind=f"sandbox_{kind}")
        self.began = began


class RunStatus(StrEnum):
    """How a run ended. A failure of ours is no status: it is raised as `SandboxFailure`."""

    OK = "ok"  # exit code 0
    ERROR = "error"  # an exception, or another exit code
    TIMEOUT = "timeout"  # its time was up
    OOM = "oom"  # it wanted more memory than there is
    OUTPUT_LIMIT = "output_limit"  # it flooded its output and was stopped
    KILLED = "killed"  # a signal ended it


@dataclass(frozen=True, slots=True)
class Output:
    """What a run wrote to one stream: its head and its tail.

    Attributes:
        head: the first bytes.
        tail: the last bytes; empty where the head is all there is.
        total: how many bytes were written in all (counted until the run was stopped).
    """

    head: bytes = b""
    tail: bytes = b""
    total: int = 0

    @property
    def dropped(self) -> int:
        """How many bytes between head and tail were dropped."""
        return self.total - len(self.head) - len(self.tail)

    @property
    def text(self) -> str:
        """Head and tail decoded as UTF-8 (anything else shows as U+FFFD), a marker where bytes were dropped."""
        if not self.dropped:
            return (self.head + self.tail).decode("utf-8", "replace")
        head, tail = self.head.decode("utf-8", "replace"), self.tail.decode("utf-8", "replace")
        return f"{head}\n[... {self.dropped} bytes dropped ...]\n{tail}"


@dataclass(frozen=True, slots=True)
class RunResult:
    """How one run went.

    Attributes:
        status: see `RunStatus`.
        exit_code: None where a signal ended it, or where a session lives on.
        signal: the number of the signal that ended it, or None.
        stdout, stderr: what it wrote.
        wall: seconds of wall time.
        cpu: seconds of CPU time, user and system, of the process and those it waited for.
        peak_memory: bytes of resident memory at most, of the process (shared pages of the template included).
        session_lost: whether the session's state is gone (it had to be killed, or ended itself).
        files: the files that were asked for and exist, by the names that were asked for.
        unprotected: what this sandbox does not protect from, in words; empty for Docker.
    """

    status: RunStatus
    exit_code: int | None = None
    signal: int | None = None
    stdout: Output = field(default_factory=Output)
    stderr: Output = field(default_factory=Output)
    wall: float = 0.0
    cpu: float = 0.0
    peak_memory: int = 0
    session_lost: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict)
    unprotected: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the run ended by itself and without an error."""
        return self.status is RunStatus.OK

    @property
    def text(self) -> str:
        """The run as a model is told of it: its output, its errors, and how it ended if not well. Never empty."""
        parts = [self.stdout.text.rstrip("\n"), self.stderr.text.rstrip("\n"), self._ending()]
        return "\n".join(part for part in parts if part) or "(no output)"

    def _ending(self) -> str:
        match self.status:
            case RunStatus.TIMEOUT:
                text = f"[stopped: time limit reached after {self.wall:.1f} s]"
            case RunStatus.OOM:
                text = "[stopped: out of memory]"
            case RunStatus.OUTPUT_LIMIT:
                text = f"[stopped: it wrote {self.stdout.total + self.stderr.total} bytes, too much output]"
            case RunStatus.KILLED:
                text = f"[ended by signal {self.signal}]"
            case RunStatus.ERROR if self.exit_code not in (None, 0, 1) or not self.stderr.total:
                text = f"[exit code {self.exit_code}]" if self.exit_code is not None else ""
            case _:
                text = ""
        lost = "[the session was lost: variables and imports are gone]" if self.session_lost else ""
        return "\n".join(part for part in (text, lost) if part)


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file in the workspace.

    Attributes:
        path: relative to the workspace.
        size: bytes.
        is_dir: whether it is a folder.
    """

    path: str
    size: int
    is_dir: bool = False
