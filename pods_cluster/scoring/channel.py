"""Pickled messages over a socket, with a deadline on each of both directions."""

from __future__ import annotations

import pickle
import socket
import struct
import time
from typing import Any

_HEADER = struct.Struct("!Q")


class Channel:
    """One end. A closed other end shows as EOFError, a passed deadline as TimeoutError."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = bytearray()

    def send(self, message: Any, timeout_s: float | None = None) -> None:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(_HEADER.pack(len(data)) + data)
        except (BrokenPipeError, ConnectionError) as error:
            raise EOFError("the other end is gone") from error

    def receive(self, timeout_s: float | None = None) -> Any:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._fill(_HEADER.size, deadline)
        size = _HEADER.unpack_from(self._buffer)[0]
        self._fill(_HEADER.size + size, deadline)
        message = pickle.loads(bytes(self._buffer[_HEADER.size : _HEADER.size + size]))
        del self._buffer[: _HEADER.size + size]
        return message

    def close(self) -> None:
        self._socket.close()

    def _fill(self, size: int, deadline: float | None) -> None:
        # Large reads: whatever small results have piled up come in with one wake-up of this thread.
        while len(self._buffer) < size:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError("no message in time")
            self._socket.settimeout(left)
            try:
                data = self._socket.recv(1 << 16)
            except ConnectionError as error:
                raise EOFError("the other end is gone") from error
            if not data:
                raise EOFError("the other end is gone")
            self._buffer += data
