"""Boxes as Docker containers: everything that isolates them is on by default."""

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Mapping
from typing import Any

from toolgym.envs.errors import ConfigurationError
from toolgym.envs.sandbox import seccomp
from toolgym.envs.sandbox.boot import IN_IMAGE, command
from toolgym.envs.sandbox.box import Box
from toolgym.envs.sandbox.box_users import GID, SLOTS, run_uid
from toolgym.envs.sandbox.connection import Connection
from toolgym.envs.sandbox.docker_engine import LABEL, OWNER, DockerEngine, attach
from toolgym.envs.sandbox.image import IMAGE_LABEL, ImageSpec, ensure_image
from toolgym.envs.sandbox.inside.settings import Settings
from toolgym.envs.sandbox.limits import SandboxLimits
from toolgym.envs.sandbox.owners import Owner
from toolgym.envs.sandbox.process_limits import ENVIRONMENT, process_limits, processes_of_a_box
from toolgym.envs.sandbox.results import SandboxFailure

LEASE = 60.0  # seconds
USER = "toolgym.user"
_UNRULED = (
    "code that fills the memory of its box making the kernel end the worker, and not the code: this kernel has no "
    "Landlock (Linux 5.13)",
)
_START = 60.0  # seconds
_BUILD = 900.0  # seconds
_STRANGER = 600.0  # seconds of age after which a container that does not run is swept, whoever made it


class DockerBackend:
    """Makes boxes on a Docker engine.

    Args:
        limits: of each box.
        image: what the boxes hold; built on first use if it is not there.
        base_url: of the engine; see `DockerEngine`.
        runtime: e.g. ``"runsc"`` for gVisor, if the engine has it.
        route: how the image is built; see `ensure_image`.
    """

    name = "docker"
    unprotected: tuple[str, ...] = ()

    def __init__(
        self,
        limits: SandboxLimits,
        *,
        image: ImageSpec | None = None,
        base_url: str | None = None,
        runtime: str | None = None,
        route: str = "auto",
    ) -> None:
        if image is not None and not isinstance(image, ImageSpec):
            raise ConfigurationError(f"expected image as an ImageSpec, actual {image!r:.100}")
        self.limits = limits
        self._spec, self._runtime, self._route = image or ImageSpec(), runtime, route
        self.engine = DockerEngine(base_url)
        self._tag: str | None = None
        self._building = asyncio.Lock()
        self._left: set[str] = set()
        self._users: dict[str, int] = {}  # slots of users by names of boxes

    async def prepare(self) -> None:
        """Build the image, if it is not there."""
        await self.image()

    async def create(self) -> Box:
        """A new container with its worker attached and ready.

        Raises:
            SandboxFailure: ``engine_gone``, ``start_failed`` or ``image_failed``.
        """
        from docker.errors import NotFound  # noqa: PLC0415 - heavy

        name = f"toolgym-{secrets.token_hex(8)}"
        try:
            try:
                return await self._start(name, await self.image())
            except NotFound:
                # The image was removed since it was last seen: build it anew, once.
                await self._remove(name)
                self._tag = None
                return await self._start(name, await self.image())
        except NotFound as error:
            await self._remove(name)
            raise SandboxFailure(f"the engine does not find it: {error.explanation}", kind="start_failed") from error
        except BaseException:
            await self._remove(name)
            raise

    async def sweep(self) -> int:
        """Remove the containers whose owners are dead; how many."""
        found: list[Any] = await self.engine.call(lambda api: api.containers(all=True, filters={"label": LABEL}))
        orphans = [entry for entry in found if _orphaned(entry["Labels"], entry["State"], entry["Created"])]
        await asyncio.gather(*(self._remove(entry["Id"]) for entry in orphans))
        return len(orphans)

    async def remove_images(self) -> int:
        """Remove all images of ours that no container uses; how many."""

        def remove(api: Any) -> int:
            found = api.images(filters={"label": IMAGE_LABEL}, quiet=True)
            count = 0
            for image in dict.fromkeys(found):
                with contextlib.suppress(APIError):  # in use
                    api.remove_image(image, force=len(api.inspect_image(image)["RepoTags"]) > 1)
                    count += 1
            return count

        from docker.errors import APIError  # noqa: PLC0415 - heavy

        self._tag = None
        return await self.engine.call(remove)

    async def close(self) -> None:
        """Let go of the engine."""
        await self.tidy()
        self.engine.close()

    async def image(self) -> str:
        """The tag of the image, which is built if it is not there."""
        async with self._building:
            if self._tag is None:
                built: str = await self.engine.call(
                    lambda api: ensure_image(api, self._spec, route=self._route), timeout=_BUILD
                )
                self._tag = built
            return self._tag

    async def _start(self, name: str, image: str) -> Box:
        user = self._take_user(name, await self.engine.call(_users_taken))
        settings = self._settings(user)
        line = command("python3", IN_IMAGE, settings)

        def make(api: Any) -> Any:
            # Name and label are given before: if the answer is lost, both still tell whose it is. That stdin is open
            # and nobody has detached makes the engine close it with its client: then the worker ends.
            made = api.create_container(
                image,
                line,
                name=name,
                hostname="box",
                stdin_open=True,
                detach=False,
                environment=settings.environment,
                working_dir="/",
                user="0:0",
                entrypoint=[],
                labels={LABEL: "1", OWNER: str(Owner.me()), USER: str(user), "toolgym.created": f"{time.time():.0f}"},
                network_disabled=True,
                stop_signal="SIGTERM",
                host_config=host_config(api, self.limits, self._runtime),
            )
            return attach(api, made["Id"])

        sock = await self.engine.call(make, _START)
        try:
            connection = Connection(docker=True)
            await asyncio.get_running_loop().create_connection(lambda: connection, sock=sock)
        except BaseException:
            sock.close()
            raise
        try:
            await self.engine.call(lambda api: api.start(name), _START)
            hello = await asyncio.wait_for(asyncio.shield(connection.hello), _START)
        except TimeoutError as error:
            connection.close()
            raise SandboxFailure(f"the worker said nothing within {_START:g} s", kind="start_failed") from error
        except SandboxFailure as failure:
            connection.close()
            if failure.kind == "sandbox_box_died":
                raise SandboxFailure(f"the worker did not start: {failure}", kind="start_failed") from failure
            raise
        except BaseException:
            connection.close()
            raise
        if not hello.get("ruled"):
            self.unprotected = _UNRULED
        return Box(name, connection, self.limits, lambda: self._remove(name), self.unprotected)

    async def _remove(self, name: str) -> None:
        """Remove a container for good, if it is there; what an engine that is gone cannot remove is kept in mind."""
        from docker.errors import NotFound  # noqa: PLC0415 - heavy

        self._users.pop(name, None)
        try:
            with contextlib.suppress(NotFound):
                await self.engine.call(lambda api: api.remove_container(name, force=True, v=True), 30.0)
        except SandboxFailure as failure:
            # It refuses where the removal is under way already, by the engine itself.
            if failure.kind == "sandbox_engine_gone":
                self._left.add(name)

    async def tidy(self) -> None:
        """Now that the engine may be back: remove what could not be removed before."""
        for name in list(self._left):
            self._left.discard(name)
            await self._remove(name)  # keeps it in mind again if it must

    def _take_user(self, name: str, taken: set[int]) -> int:
        """A slot of users that no box on this engine has: processes are counted by user, over all containers."""
        free = set(range(SLOTS)) - taken - {*self._users.values()}
        if not free:
            raise SandboxFailure(f"all {SLOTS} users that boxes can have are taken", kind="start_failed")
        self._users[name] = user = secrets.choice(sorted(free))
        return user

    def _settings(self, user: int) -> Settings:
        limits = self.limits
        uid = run_uid(user)
        return Settings(
            run_uid=uid,
            session_uid=uid + 1,
            gid=GID,
            rlimits=process_limits(limits),
            nice=19,
            output=limits.output,
            flood=limits.flood,
            lease=LEASE,
            preload=self._spec.modules,
            environment={**ENVIRONMENT, "PATH": "/usr/local/bin:/usr/bin:/bin"},
        )


def host_config(api: Any, limits: SandboxLimits, runtime: str | None) -> Any:
    """What isolates a box, in the engine's words. See SandboxLimits for the sizes."""
    from docker.types import LogConfig, Ulimit  # noqa: PLC0415 - heavy

    # Inodes and long names take memory of the box too: all of them together a part of it.
    inodes = f"nr_inodes={max(1_000, min(20_000, limits.memory // 24_576))}"
    return api.create_host_config(
        network_mode="none",
        read_only=True,
        tmpfs={
            "/workspace": f"rw,exec,nosuid,nodev,mode=0777,size={limits.workspace},{inodes}",
            "/tmp": f"rw,exec,nosuid,nodev,mode=1777,size={limits.tmp},{inodes}",
            # Not by shm_size, which bounds no inodes: empty files would fill the memory.
            "/dev/shm": f"rw,noexec,nosuid,nodev,mode=1777,size={limits.shm},{inodes}",
        },
        ipc_mode="private",
        cap_drop=["ALL"],
        cap_add=["SETUID", "SETGID", "KILL"],
        security_opt=["no-new-privileges:true", f"seccomp={json.dumps(seccomp.profile())}"],
        pids_limit=processes_of_a_box(limits),
        mem_limit=limits.memory,
        memswap_limit=limits.memory,
        cpu_period=100_000,
        cpu_quota=int(limits.cpus * 100_000),
        ulimits=[
            Ulimit(name="nofile", soft=1_024, hard=1_024),  # the worker's own; code has less
            Ulimit(name="core", soft=0, hard=0),
            Ulimit(name="fsize", soft=limits.file_size, hard=limits.file_size),
            # Without it, POSIX message queues of all boxes would share the host's per-user pool.
            Ulimit(name="msgqueue", soft=819_200, hard=819_200),
        ],
        log_config=LogConfig(type="none"),
        auto_remove=True,
        runtime=runtime,
    )


def _users_taken(api: Any) -> set[int]:
    found = [entry["Labels"].get(USER, "") for entry in api.containers(all=True, filters={"label": LABEL})]
    return {int(user) for user in found if user.isdigit()}


def _orphaned(labels: Mapping[str, str], state: str, created: float) -> bool:
    owner = Owner.parse(labels.get(OWNER, ""))
    if owner is not None and owner.known:
        return not owner.alive
    # Somebody on another machine, or before a reboot: what runs may be in use.
    return state != "running" and time.time() - created > _STRANGER
