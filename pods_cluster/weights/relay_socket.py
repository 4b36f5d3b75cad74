"""Connections between a relay hub and its followers over a Unix socket: greeting, buckets, receipts. Used by `relay`."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from pods_cluster.weights.protocol import WeightTransferError
from pods_cluster.weights.transport import Deadline, first_line

GREETING = struct.Struct("<I")
"""A follower's rank, its first message."""
_RECEIVED, _CANNOT_MAP = b"\x01", b"\x00"
_HEADER = struct.Struct("<BQ")
"""Kind of a bucket's message (its bytes, or the handle of its buffer), and the size of what follows."""
_BYTES, _HANDLE = 0, 1
_CREDENTIALS = struct.Struct("3i")
"""Pid, uid and gid of the other end (Linux's SO_PEERCRED)."""
_GREETING_SECONDS = 5.0


def open_socket() -> socket.socket:
    """Unbound Unix socket. Raises WeightTransferError where the system has no abstract namespace."""
    if not sys.platform.startswith("linux"):
        raise WeightTransferError("weights can be passed on between processes on Linux only; use weights.relay: off")
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def address(name: str) -> str:
    """Address of hub `name` in Linux's abstract namespace, where a process that dies leaves no file behind."""
    return f"\0pods-{name}"


def shut_down(other: socket.socket) -> None:
    """Close a socket, also while another thread waits in it."""
    with contextlib.suppress(OSError):
        other.shutdown(socket.SHUT_RDWR)  # wakes that thread, which `close` does not
    other.close()


def greet(hub: socket.socket, rank: int) -> None:
    """Tell the hub a follower's rank."""
    _require_same_user(hub)
    hub.sendall(GREETING.pack(rank))


def read_greeting(follower: socket.socket, deadline: Deadline) -> int:
    """Rank of the follower that has connected; -1 for any other process."""
    try:
        _require_same_user(follower)
        greeting = _receive_exactly(follower, GREETING.size, Deadline(min(deadline.left(), _GREETING_SECONDS)))
        return int(GREETING.unpack(greeting)[0])
    except OSError:
        return -1


class FollowerConnection:
    """The hub's connection to one follower. Its methods raise WeightTransferError, at the deadline at the latest."""

    def __init__(self, follower: socket.socket, label: str) -> None:
        self._socket = follower
        self._label = label
        self._can_map = True

    def send(self, buffer: UInt8[Tensor, " bytes"], deadline: Deadline) -> None:
        """Send a bucket: the CUDA IPC handle of its buffer, or its bytes where the follower cannot map that."""
        handle = ipc_handle(buffer) if self._can_map else None
        self._can_map = handle is not None
        with _named_errors(self._label, deadline):
            _send_bucket(self._socket, buffer, handle, deadline)

    def confirm(self, buffer: UInt8[Tensor, " bytes"], deadline: Deadline) -> None:
        """Wait until the follower has its own copy of the bucket that was sent last."""
        with _named_errors(self._label, deadline):
            if _receive_exactly(self._socket, 1, deadline) == _CANNOT_MAP:
                self._can_map = False
                _send_bucket(self._socket, buffer, None, deadline)
                _receive_exactly(self._socket, 1, deadline)

    def close(self) -> None:
        """Close the connection, also while another thread waits in it."""
        shut_down(self._socket)


class HubConnection:
    """A follower's connection to its hub."""

    def __init__(self, hub: socket.socket, label: str) -> None:
        self._socket = hub
        self._label = label

    def receive(self, buffer: UInt8[Tensor, " bytes"], deadline: Deadline) -> None:
        """Receive the next bucket into `buffer`. Raises WeightTransferError, at the deadline at the latest."""
        with _named_errors(self._label, deadline):
            _receive_bucket(self._socket, buffer, deadline)

    def close(self) -> None:
        """Close the connection, also while another thread waits in it."""
        shut_down(self._socket)


def ipc_handle(buffer: UInt8[Tensor, " bytes"]) -> bytes | None:
    """CUDA IPC handle by which another process on this card maps `buffer`; None where there is none."""
    if not buffer.is_cuda:
        return None
    from torch.multiprocessing.reductions import reduce_tensor

    try:
        return pickle.dumps(reduce_tensor(buffer))
    except RuntimeError:
        return None


def _map(payload: bytes, device: torch.device) -> UInt8[Tensor, " bytes"]:
    """The hub's buffer that a CUDA IPC handle leads to."""
    rebuild, arguments = pickle.loads(payload)  # from a process of our own user
    # The seventh argument is the card's index in the hub's process, which may be another one here.
    return rebuild(*arguments[:6], device.index or 0, *arguments[7:])


def _send_bucket(
    follower: socket.socket, buffer: UInt8[Tensor, " bytes"], handle: bytes | None, deadline: Deadline
) -> None:
    if handle is not None:
        _send(follower, _HEADER.pack(_HANDLE, len(handle)) + handle, deadline)
        return
    _send(follower, _HEADER.pack(_BYTES, buffer.numel()), deadline)
    content: Any = buffer.cpu().numpy()
    _send(follower, memoryview(content), deadline)


def _receive_bucket(hub: socket.socket, buffer: UInt8[Tensor, " bytes"], deadline: Deadline) -> None:
    """Receive a bucket and confirm it; where its handle cannot be mapped, ask for the bytes."""
    kind, size = _HEADER.unpack(_receive_exactly(hub, _HEADER.size, deadline))
    if kind == _HANDLE:
        payload = _receive_exactly(hub, size, deadline)
        try:
            mapped = _map(payload, buffer.device)
            buffer.copy_(mapped)
            torch.cuda.current_stream(buffer.device).synchronize()
            del mapped
        except Exception:  # torch and CUDA raise many kinds; each means that the bytes must come another way
            _send(hub, _CANNOT_MAP, deadline)
            kind, size = _HEADER.unpack(_receive_exactly(hub, _HEADER.size, deadline))
        else:
            _send(hub, _RECEIVED, deadline)
            return
    if size != buffer.numel():
        raise WeightTransferError(f"a bucket of {size} bytes came where {buffer.numel()} were expected")
    host = buffer if not buffer.is_cuda else torch.empty(size, dtype=torch.uint8)
    array: Any = host.numpy()
    _receive_into(hub, memoryview(array), deadline)
    if host is not buffer:
        buffer.copy_(host)
    _send(hub, _RECEIVED, deadline)


def _receive_exactly(other: socket.socket, size: int, deadline: Deadline) -> bytes:
    content = bytearray(size)
    _receive_into(other, memoryview(content), deadline)
    return bytes(content)


def _receive_into(other: socket.socket, view: memoryview, deadline: Deadline) -> None:
    """Fill `view`. Raises TimeoutError, or ConnectionResetError if the other end has left."""
    while view:
        _set_timeout(other, deadline)  # for each part: a peer that sends byte by byte must not outlast the deadline
        size = other.recv_into(view)
        if not size:
            raise ConnectionResetError("the other end has left")
        view = view[size:]


def _send(other: socket.socket, content: bytes | memoryview, deadline: Deadline) -> None:
    _set_timeout(other, deadline)
    other.sendall(content)  # the timeout bounds the whole call


def _set_timeout(other: socket.socket, deadline: Deadline) -> None:
    if deadline.over:
        raise TimeoutError
    other.settimeout(deadline.left())


@contextlib.contextmanager
def _named_errors(label: str, deadline: Deadline) -> Iterator[None]:
    """Context that turns a socket's errors into WeightTransferErrors that begin with `label`."""
    try:
        yield
    except TimeoutError:
        raise WeightTransferError(f"{label}: the transfer was not done within {deadline.seconds:g} s") from None
    except OSError as error:
        raise WeightTransferError(f"{label}: {first_line(error)}") from error


def _require_same_user(other: socket.socket) -> None:
    """Raise PermissionError unless the other end runs as our user, as any user of the host can reach the address."""
    _, user, _ = _CREDENTIALS.unpack(other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.getuid():
        raise PermissionError(f"the process at the other end belongs to user {user}")
