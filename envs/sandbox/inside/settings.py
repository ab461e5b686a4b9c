"""What a worker is told when it starts."""

import json
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Settings:
    """The worker's settings; they travel as JSON in its command line.

    Attributes:
        workspace: the folder in which code runs.
        folders: other folders that code may write to, wiped with the workspace.
        run_uid, session_uid, gid: whom code runs as; None where the worker has no right to become somebody else.
        rlimits: soft and hard limits of each process by the names of the resource module (``"RLIMIT_AS"``).
        nice: how much code yields to the worker: what many of its processes must not be able to starve.
        output: bytes kept of a stream.
        flood: bytes of output after which a run is stopped.
        lease: seconds without a word from the client after which the worker ends itself.
        preload: modules that the rich template has imported.
        environment: the environment variables of code.
        shell: the program that runs shell commands.
        confine: whether the worker is to confine itself in namespaces (local backend).
        visible: folders that stay visible when it does.
        kept: what lies in a folder that is wiped and is not code's: read-only, with visible folders in it.
        folder_bytes: sizes of its private folders then: ``workspace``, ``tmp`` and ``shm``.
    """

    workspace: str = "/workspace"
    folders: tuple[str, ...] = ("/tmp", "/dev/shm", "/dev/mqueue")
    run_uid: int | None = None
    session_uid: int | None = None
    gid: int | None = None
    rlimits: dict[str, int] = field(default_factory=dict)
    nice: int = 0
    output: int = 65_536
    flood: int = 8_388_608
    lease: float = 60.0
    preload: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    shell: str = "/bin/bash"
    confine: bool = False
    visible: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    folder_bytes: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        """The settings as one argument of a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        """The inverse of `to_json`."""
        entries = json.loads(text)
        for name in ("folders", "preload", "visible", "kept"):
            entries[name] = tuple(entries[name])
        return cls(**entries)
