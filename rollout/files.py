"""Files that a kill, a full disk or somebody's free text cannot spoil: names, folders, whole files, whole lines."""

import hashlib
import os
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from toolgym.envs.errors import ConfigurationError

_LONGEST = 120  # characters of a name: with an ending it fits file systems that take 143
_DIGITS = 16


def safe_name(text: str) -> str:
    """A file name for any text, at most 120 characters of ``A-Z a-z 0-9 _ . - ~ % +``: one for each text.

    It is percent-encoded, a leading dot too, so no name is hidden or leads out of its folder. What is empty or too long
    is cut, and a ``+`` and a hash of the whole take its place; no other name has a ``+``. Texts that differ in case
    alone have names that differ in case alone.
    """
    quoted = quote(text, safe="", errors="surrogatepass")
    if quoted.startswith("."):
        quoted = f"%2E{quoted[1:]}"
    if 0 < len(quoted) <= _LONGEST:
        return quoted
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
    return f"{quoted[: _LONGEST - _DIGITS - 1]}+{digest}"


def make_folder(path: str | Path, what: str) -> Path:
    """A folder, made with its parents if it is not there.

    Args:
        path: of the folder.
        what: it is for, for the message.

    Raises:
        ConfigurationError: it cannot be made, or is no path.
    """
    if not isinstance(path, str | Path) or path == "":
        raise ConfigurationError(f"expected the folder of {what} as a path, actual {path!r:.100}")
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"no folder of {what} can be made at {str(path)!r:.200}: {error}") from error
    return Path(path)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file as a whole: whoever looks sees the old one or the new one, never a part."""
    fresh = path.with_name(f"{path.name}.new")
    try:
        fresh.write_bytes(content)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)  # there still, if something went wrong


def drop_cut_off_line(file: BinaryIO) -> None:
    """Leave a file of lines at its end, behind the last complete line; what a kill cut off is removed."""
    end = file.seek(0, os.SEEK_END)
    step = 1
    while end > 0:
        file.seek(max(0, end - step))
        tail = file.read(min(step, end))
        found = tail.rfind(b"\n")
        if found >= 0:
            end = max(0, end - step) + found + 1
            break
        if step >= end:
            end = 0
            break
        step *= 4_096
    file.seek(end)
    file.truncate()
