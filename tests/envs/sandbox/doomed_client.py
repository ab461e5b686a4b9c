"""A client of the sandbox that gets into a state, says so, and stays there until it is killed.

Usage: python doomed_client.py STATE BASE_URL
"""

import sys
import threading
import time
from collections.abc import Callable

from toolgym.envs.sandbox import docker_backend
from toolgym.envs.sandbox.sandbox import Sandbox, SandboxPool


def stay(what: str = "ready") -> None:
    print(what, flush=True)
    threading.Event().wait()


def aside(work: Callable[[], object]) -> None:
    threading.Thread(target=work, daemon=True).start()


def until_it_runs(pool: SandboxPool) -> None:
    """Until a worker has said that it begins what it was asked for."""
    while not any(pending.began for box in pool._pool._leased for pending in list(box._connection._pending.values())):
        time.sleep(0.01)


def creating(pool: SandboxPool, sandbox: Sandbox) -> None:
    """Made, attached to, but not started."""
    attach = docker_backend.attach

    def hang(api: object, container: str) -> None:
        attach(api, container)
        stay(f"ready {container}")

    docker_backend.attach = hang  # type: ignore[assignment]
    sandbox.sync.run("1")


def idle(pool: SandboxPool, sandbox: Sandbox) -> None:
    sandbox.sync.run("1")
    sandbox.sync.release()
    stay()


def running(pool: SandboxPool, sandbox: Sandbox) -> None:
    code = "import os, signal\nsignal.signal(15, signal.SIG_IGN)\nos.fork()\nos.setsid()\nwhile True: pass"
    aside(
        lambda: sandbox.sync.run(f"import os\nif os.fork() == 0:\n    exec({code!r})\nwhile True: pass", timeout=600.0)
    )
    until_it_runs(pool)
    stay()


def session(pool: SandboxPool, sandbox: Sandbox) -> None:
    sandbox.sync.exec("import subprocess; sleeper = subprocess.Popen(['sleep', '600'], start_new_session=True)")
    stay()


def resetting(pool: SandboxPool, sandbox: Sandbox) -> None:
    sandbox.sync.run("for k in range(15_000): open(f'/tmp/{k}', 'w').close()")
    aside(sandbox.sync.reset)
    stay()


if __name__ == "__main__":
    state, url = sys.argv[1:]
    made = SandboxPool("docker", size=1, base_url=url)
    globals()[state](made, made.sandbox())
