"""Interface of a transport (gloo, NCCL, relay) to sender and receiver, and what all of them share: deadlines, sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from pods_cluster.weights.protocol import WeightTransferError

if TYPE_CHECKING:
    import torch
    from jaxtyping import UInt8
    from torch import Tensor

_POLL_SECONDS = 0.02

T = TypeVar("T")


class Deadline:
    """A point in time, `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until then, at least a millisecond, because transports take 0 for 'no limit'."""
        return max(0.001, self._end - time.monotonic())

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end


class Pending(Protocol):
    """A broadcast in progress."""

    def wait(self, deadline: Deadline) -> None:
        """Block until the buffer may be read (receiver) or written again (sender). Raises WeightTransferError."""
        ...


class TransferGroup(Protocol):
    """One broadcast group, in which rank 0 sends and all others receive."""

    device: torch.device
    """Device on which its buffers lie."""
    world_size: int
    checks_updates: bool
    """Whether a digest of the update is sent before its buckets (not to vLLM's receivers, which do not expect it)."""

    def start(self, buffer: UInt8[Tensor, " bytes"], deadline: Deadline) -> Pending:
        """Start to broadcast a contiguous buffer from rank 0, and return at once. Broadcasts run in this order."""
        ...

    def close(self) -> None:
        """Leave the group; a `wait` in another thread then raises. Blocks for seconds at most; safe to call twice."""
        ...


class Listener(Protocol):
    """Rank 0 of a broadcast group before its receivers have come."""

    host: str
    port: int

    def meet(self, name: str, receivers: int, timeout: float) -> TransferGroup:
        """Wait for all receiver ranks. Raises WeightTransferError (with the missing ranks where they are known)."""
        ...

    def close(self) -> None:
        """Stop listening; a `meet` in another thread then raises."""
        ...


class Closed:
    """A flag that `close` sets from any thread."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def __bool__(self) -> bool:
        return self._event.is_set()


def call_within(call: Callable[[], T], deadline: Deadline, closed: Closed, what: str) -> T:
    """Result of a call that may block for ever: it runs in a daemon thread, and is abandoned at the deadline or once
    `closed`.

    Raises WeightTransferError, which begins with `what`. The result of an abandoned call is dropped.
    """
    done = threading.Event()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name=f"weights: {what}", daemon=True).start()
    while not done.wait(_POLL_SECONDS):
        if closed:
            raise WeightTransferError(f"{what}: the group was closed")
        if deadline.over:
            raise WeightTransferError(f"{what}: not done within {deadline.seconds:g} s")
    if errors:
        if isinstance(errors[0], WeightTransferError):
            raise errors[0]
        raise WeightTransferError(f"{what}: {first_line(errors[0])}") from errors[0]
    return results.pop()


def bind(host: str) -> socket.socket:
    """Listening socket on a free port of this address (not of all interfaces, because a store has no password)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, 0))
        listener.listen(512)
    except OSError as error:
        listener.close()
        raise WeightTransferError(f"cannot listen on {host}: {error.strerror}; give an address of this host") from error
    return listener


def local_address(peer: str = "198.51.100.1", port: int = 9) -> str:
    """Address of this host from which `peer` is routed (no packet is sent); loopback where there is no route.

    On hosts with several interfaces, or a hostname that resolves to loopback, gloo's own guess is wrong.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(peer, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"


def first_line(error: BaseException) -> str:
    """Type of an error and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
