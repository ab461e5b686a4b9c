"""How the worker is started: the same files, under the same names, without the rest of the package."""

from pathlib import Path

from toolgym.envs.sandbox.inside.settings import Settings

INSIDE = Path(__file__).with_name("inside")
IN_IMAGE = "/opt/toolgym"

# The parents of the worker's package are empty modules: importing the real ones would load Gymnasium and more.
_BOOT = """\
import sys, types
for name in ("toolgym", "toolgym.envs", "toolgym.envs.sandbox", "toolgym.envs.sandbox.inside"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
sys.modules[name].__path__ = [sys.argv[1]]
from toolgym.envs.sandbox.inside.worker import main
main(sys.argv[2])
"""


def command(python: str, folder: str, settings: Settings) -> list[str]:
    """The command line that starts a worker.

    Args:
        python: the interpreter. It runs isolated from the environment and the user's own packages.
        folder: where the worker's files lie.
        settings: see there.
    """
    return [python, "-I", "-X", "utf8", "-c", _BOOT, folder, settings.to_json()]
