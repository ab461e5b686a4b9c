"""Frames between client and worker: a JSON message and any number of binary parts, each with its length before it.

On the wire: two unsigned 32-bit big-endian lengths (of the JSON, of all parts together), the JSON in ASCII, the parts
one after the other. The JSON's own ``"parts"`` holds the length of each part.
"""

import json
import struct
from typing import Any

_HEAD = struct.Struct(">II")
Frame = tuple[dict[str, Any], list[bytes]]


class FrameError(Exception):
    """What arrived is no frame."""


def encode(message: dict[str, Any], *parts: bytes) -> bytes:
    """One frame."""
    if parts:
        message = {**message, "parts": [len(part) for part in parts]}
    text = json.dumps(message, separators=(",", ":")).encode("ascii")
    return b"".join((_HEAD.pack(len(text), sum(map(len, parts))), text, *parts))


class FrameReader:
    """Puts frames together again from pieces of any size.

    Args:
        limit: bytes that one frame may have.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that this piece completes.

        Raises:
            FrameError: a frame that is too long, whose JSON is none, or whose parts do not add up. Nothing that comes
                after it can be trusted.
        """
        self._buffer += data
        frames: list[Frame] = []
        while len(self._buffer) >= _HEAD.size:
            text, binary = _HEAD.unpack_from(self._buffer)
            if text + binary > self._limit:
                raise FrameError(f"a frame of {text + binary} bytes; at most {self._limit} are allowed")
            end = _HEAD.size + text + binary
            if len(self._buffer) < end:
                break
            frames.append(_decode(bytes(self._buffer[_HEAD.size : end]), text))
            del self._buffer[:end]
        return frames


def _decode(body: bytes, text: int) -> Frame:
    try:
        message = json.loads(body[:text])
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a message that is no JSON: {error}") from error
    lengths = message.pop("parts", []) if isinstance(message, dict) else None
    whole = isinstance(lengths, list) and all(type(n) is int and n >= 0 for n in lengths)
    if lengths is None or not whole or sum(lengths) != len(body) - text:
        raise FrameError("a message whose parts do not add up")
    parts, at = [], text
    for length in lengths:
        parts.append(body[at : at + length])
        at += length
    return message, parts
