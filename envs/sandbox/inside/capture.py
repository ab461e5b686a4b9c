"""Keeping the head and the tail of a stream, whatever its length."""


class Capture:
    """Bytes of one output stream: the first and the last half of ``limit``, and how many there were in all."""

    def __init__(self, limit: int) -> None:
        self._head_room = limit // 2
        self._tail_room = limit - limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def feed(self, data: bytes) -> None:
        """Take the next piece."""
        self.total += len(data)
        if room := self._head_room - len(self._head):
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._tail_room:
            del self._tail[: -self._tail_room]

    @property
    def kept(self) -> tuple[bytes, bytes]:
        """Head and tail; together they are the whole stream where it fits."""
        tail = bytes(self._tail[-self._tail_room :])
        return bytes(self._head), tail
