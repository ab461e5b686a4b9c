"""What every process of the code is given, whatever its box is: resource limits and environment."""

from collections.abc import Mapping

from toolgym.envs.sandbox.limits import SandboxLimits

_OURS = 16  # processes of a box that are not code's: the worker, its templates, their forks ahead
ENVIRONMENT: Mapping[str, str] = {
    "HOME": "/workspace",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "TZ": "UTC",
    "PYTHONDONTWRITEBYTECODE": "1",
    # One thread each: boxes share the machine's cores.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def process_limits(limits: SandboxLimits) -> dict[str, int]:
    """The limits of one process, by the names of the resource module."""
    return {
        "RLIMIT_AS": limits.process_memory,
        "RLIMIT_CORE": 0,
        "RLIMIT_FSIZE": limits.file_size,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_NPROC": limits.processes,
    }


def processes_of_a_box(limits: SandboxLimits) -> int:
    """How many processes a box must have room for: a run's, its session's, and ours, which must never lack one."""
    return 2 * limits.processes + _OURS
