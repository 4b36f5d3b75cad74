"""Pickled messages between a process with code of users and its owner: over a socket, or over the streams of asyncio."""

from __future__ import annotations

import pickle
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio  # not in scorer processes, which have no use for it

_HEADER = struct.Struct("!Q")
_JOINED_BYTES = 1 << 16


class Channel:
    """Pickled messages over one end of a socket, with a deadline in seconds on each call (None: no deadline).

    Raises EOFError when the other end is closed, TimeoutError when the deadline has passed.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = bytearray()

    def send(self, message: Any, timeout_s: float | None = None) -> None:
        """Pickle a message and send all of it."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._socket.settimeout(timeout_s)
        try:
            if len(data) < _JOINED_BYTES:
                self._socket.sendall(_HEADER.pack(len(data)) + data)
            else:  # a join would copy it
                self._socket.sendall(_HEADER.pack(len(data)))
                self._socket.sendall(data)
        except (BrokenPipeError, ConnectionError) as error:
            raise EOFError("the other end is gone") from error

    def receive(self, timeout_s: float | None = None) -> Any:
        """Wait for one whole message and return it."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._fill(_HEADER.size, deadline)
        size = _HEADER.unpack_from(self._buffer)[0]
        self._fill(_HEADER.size + size, deadline)
        with memoryview(self._buffer) as whole, whole[_HEADER.size : _HEADER.size + size] as body:
            message = pickle.loads(body)
        del self._buffer[: _HEADER.size + size]
        return message

    @property
    def ended(self) -> bool:
        """Whether the other end is closed and nothing is left to be read."""
        if self._buffer:
            return False
        self._socket.settimeout(0.0)
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close this end; the other end sees EOFError."""
        self._socket.close()

    def _fill(self, size: int, deadline: float | None) -> None:
        # Large reads: all small results that have piled up arrive with one wake-up of the reading thread.
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


def packed(message: Any) -> bytes:
    """A message as a `Channel` at the other end reads it."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(data)) + data


async def receive_from(reader: asyncio.StreamReader) -> Any:
    """One message of a `Channel` at the other end. Raises EOFError when that is closed."""
    (size,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    return pickle.loads(await reader.readexactly(size))
