"""What a hub and its followers say to each other over a Unix socket, for `relay`."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from pods_cluster.weights.protocol import WeightTransferError
from pods_cluster.weights.transport import Deadline, first_line

HELLO = struct.Struct("<I")
TAKEN, CANNOT_MAP = b"\x01", b"\x00"
_HEADER = struct.Struct("<BQ")
_BYTES, _HANDLE = 0, 1
# Of Linux's socket(7): pid, uid and gid of the other end.
_CREDENTIALS = struct.Struct("3i")

T = TypeVar("T")


def open_socket() -> socket.socket:
    if not sys.platform.startswith("linux"):
        raise WeightTransferError("weights can be passed on between processes on Linux only; use weights.relay: off")
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def address(name: str) -> str:
    """In Linux's abstract namespace: no file is left behind by a process that dies."""
    return f"\0pods-{name}"


def same_user(other: socket.socket) -> None:
    """An abstract address is open to every user of the host: only our own processes may send or take weights."""
    _, user, _ = _CREDENTIALS.unpack(other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.getuid():
        raise PermissionError(f"the process at the other end belongs to user {user}")


def greeted(follower: socket.socket, deadline: Deadline) -> int:
    """The follower's rank; -1 of a stranger."""
    try:
        follower.settimeout(min(deadline.left(), 5.0))
        same_user(follower)
        return int(HELLO.unpack(exactly(follower, HELLO.size))[0])
    except OSError:
        return -1


def handle_of(buffer: torch.Tensor) -> bytes | None:
    """By which another process of this card reaches `buffer`; None where that is not possible."""
    if not buffer.is_cuda:
        return None
    from torch.multiprocessing.reductions import reduce_tensor

    try:
        return pickle.dumps(reduce_tensor(buffer))
    except RuntimeError:
        return None


def _mapped(payload: bytes, device: torch.device) -> torch.Tensor:
    rebuild, arguments = pickle.loads(payload)  # from a process of our own user
    # The seventh is the card's number in the hub's own counting, which need not be ours.
    return rebuild(*arguments[:6], device.index or 0, *arguments[7:])


def tell(follower: socket.socket, buffer: torch.Tensor, handle: bytes | None) -> None:
    if handle is not None:
        follower.sendall(_HEADER.pack(_HANDLE, len(handle)) + handle)
        return
    follower.sendall(_HEADER.pack(_BYTES, buffer.numel()))
    content: Any = buffer.cpu().numpy()
    follower.sendall(memoryview(content))


def take(hub: socket.socket, buffer: torch.Tensor) -> None:
    kind, size = _HEADER.unpack(exactly(hub, _HEADER.size))
    if kind == _HANDLE:
        payload = exactly(hub, size)
        try:
            there = _mapped(payload, buffer.device)
            buffer.copy_(there)
            torch.cuda.current_stream(buffer.device).synchronize()
            del there
        except Exception:  # torch and CUDA raise many kinds; each means that the bytes must come another way
            hub.sendall(CANNOT_MAP)
            kind, size = _HEADER.unpack(exactly(hub, _HEADER.size))
        else:
            hub.sendall(TAKEN)
            return
    if size != buffer.numel():
        raise WeightTransferError(f"a bucket of {size} bytes came where {buffer.numel()} were expected")
    host = buffer if not buffer.is_cuda else torch.empty(size, dtype=torch.uint8)
    array: Any = host.numpy()
    view = memoryview(array)
    while view:
        view = view[_some(hub.recv_into(view)) :]
    if host is not buffer:
        buffer.copy_(host)
    hub.sendall(TAKEN)


def exactly(other: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = other.recv(size - len(parts))
        _some(len(part))
        parts += part
    return bytes(parts)


def _some(size: int) -> int:
    if not size:
        raise ConnectionResetError("the other end has left")
    return size


def within(
    deadline: Deadline, other: socket.socket, label: str, rank: int | None, call: Callable[[socket.socket], T]
) -> T:
    who = "" if rank is None else f" to rank {rank}"
    try:
        other.settimeout(deadline.left())
        return call(other)
    except TimeoutError:
        raise WeightTransferError(f"{label}{who}: the transfer was not done within {deadline.seconds:g} s") from None
    except OSError as error:
        raise WeightTransferError(f"{label}{who}: {first_line(error)}") from error


def hang_up(other: Any) -> None:
    with contextlib.suppress(OSError):
        other.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in it, which `close` does not
    other.close()
