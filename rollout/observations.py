"""Fitting what an environment said into the tokens that are left, by cutting tool output; exact, and always ending."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from toolgym.envs.messages import Message, ToolMessage

Keep = Literal["head", "tail", "ends"]
CUT_AWAY = "(cut)"  # no template can see more than text in it


def fit(
    messages: Sequence[Message], encode: Callable[[Sequence[Message]], list[int]], room: int, keep: Keep
) -> tuple[tuple[Message, ...], list[int]] | None:
    """Messages and their tokens, the tool output among them cut to the longest that fits.

    One length in characters for all messages is searched by halving, so the search always ends, after at most
    log2(longest) + 3 encodings. Where not even markers that say how much is missing fit, all output is `cut_away`: so
    whatever fits when it is cut away, fits.

    Args:
        messages: what the environment said.
        encode: the observation delta of messages.
        room: how many tokens it may have.
        keep: which part of over-long text is kept.

    Returns:
        The messages as they are to be shown, and their tokens, at most ``room``; None if they do not fit even with
        all tool output cut away.
    """
    ids = encode(messages)
    if len(ids) <= room:
        return tuple(messages), ids
    longest = max((len(message.content) for message in messages if isinstance(message, ToolMessage)), default=0)
    best = None
    low, high = 0, longest - 1
    while low <= high:
        middle = (low + high) // 2
        shown = tuple(_cut(message, middle, keep) for message in messages)
        ids = encode(shown)
        if len(ids) <= room:
            best, low = (shown, ids), middle + 1
        else:
            high = middle - 1
    if best is not None:
        return best
    shown = cut_away(messages)
    ids = encode(shown)
    return (shown, ids) if len(ids) <= room else None


def cut_away(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Messages with nothing left of the tool output among them, in the fewest tokens that they can have."""
    return tuple(
        replace(message, content=CUT_AWAY) if isinstance(message, ToolMessage) else message for message in messages
    )


def _cut(message: Message, limit: int, keep: Keep) -> Message:
    if not isinstance(message, ToolMessage) or len(message.content) <= limit:
        return message
    text = message.content
    marker = f"[... {len(text) - limit} characters cut ...]"
    head = {"head": limit, "tail": 0, "ends": limit // 2}[keep]
    tail = limit - head
    parts = (text[:head], marker, text[len(text) - tail :] if tail else "")
    return replace(message, content="\n".join(part for part in parts if part))
