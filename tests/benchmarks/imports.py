"""What importing the package costs."""

import subprocess
import sys

from figures import Figure, best


def figures() -> list[Figure]:
    """Fresh interpreters: ours against Gymnasium's own import."""

    def importing(what: str) -> float:
        return best(lambda: subprocess.run([sys.executable, "-c", f"import {what}"], check=True))

    bare, theirs, package, ours = (importing(what) for what in ("sys", "gymnasium", "toolgym", "toolgym.envs"))
    return [
        Figure("import toolgym", f"{package - bare:.2f} s", "under 0.5 s"),
        Figure("import toolgym.envs", f"{ours - bare:.2f} s, {(ours - bare) / (theirs - bare):.1f}x gymnasium alone"),
    ]
