"""What a pool asks of a backend: boxes."""

from typing import Protocol

from toolgym.envs.sandbox.box import Box
from toolgym.envs.sandbox.limits import SandboxLimits


class Backend(Protocol):
    """Makes boxes. All of it is awaited on the pool's event loop.

    Attributes:
        name: ``"docker"`` or ``"local"``.
        limits: of its boxes.
        unprotected: what its boxes do not protect from; known after the first is made.
    """

    name: str
    limits: SandboxLimits
    unprotected: tuple[str, ...]

    async def prepare(self) -> None:
        """What takes long and is done once, such as building an image. Raises as `create`."""
        ...

    async def create(self) -> Box:
        """A new box, ready to run code.

        Raises:
            SandboxFailure: it cannot be made; ``engine_gone`` if that may pass by itself.
        """
        ...

    async def sweep(self) -> int:
        """Remove what owners that are dead have left behind; how many boxes."""
        ...

    async def tidy(self) -> None:
        """Make up for removals that have failed. Called from time to time; does not raise."""
        ...

    async def close(self) -> None:
        """Let go of everything but the boxes, which are closed by then."""
        ...
