"""What a transport (gloo, NCCL) offers to sender and receiver, and the deadlines that both live by."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from pods_cluster.weights.protocol import Invitation, WeightTransferError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_POLL_SECONDS = 0.02

T = TypeVar("T")


class Deadline:
    """A point in time; `left()` never falls below a millisecond, as transports read 0 as 'for ever'."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return max(0.001, self._end - time.monotonic())

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end


class Pending(Protocol):
    """A broadcast on its way."""

    def wait(self, deadline: Deadline) -> None:
        """Until the buffer may be read (receiver) or written again (sender). Raises WeightTransferError."""
        ...


class TransferGroup(Protocol):
    """One broadcast group: rank 0 sends, all others receive. `device` is where its buffers lie."""

    device: torch.device
    world_size: int
    checks_updates: bool
    """Whether a digest of the update goes ahead of its buckets (not where a foreign receiver would not expect it)."""

    def start(self, buffer: Tensor, deadline: Deadline) -> Pending:
        """Broadcast a contiguous uint8 buffer from rank 0; returns at once. They run in the order of their start."""
        ...

    def close(self) -> None:
        """Leave the group: a `wait` in another thread raises soon. Never blocks long, may be called twice."""
        ...


class Listener(Protocol):
    """Rank 0 before the others have come."""

    host: str
    port: int

    def meet(self, name: str, receivers: int, timeout: float) -> TransferGroup:
        """Wait for all receiver ranks. Raises WeightTransferError (with the missing ranks where they are known)."""
        ...

    def close(self) -> None:
        """Stop listening; a `meet` in another thread raises soon."""
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
    """Run a call that may block for ever in a daemon thread; give up on it at the deadline or once `closed`.

    A call that was given up on ends whenever it ends, and its result is dropped then.
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
    """A listening socket on a free port of this address (not of every interface: a store has no password)."""
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
    """This host's address on the way to `peer` (no packet is sent); loopback where there is no way.

    Several interfaces, or a hostname that resolves to loopback, make gloo's own guess wrong; the routing table knows.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(peer, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def listen(
    transport: str,
    host: str,
    device: torch.device | None = None,
    *,
    members: bool = True,
    hub: str = "",
    followers: tuple[int, ...] = (),
) -> Listener:
    """Open rank 0's door on an address of this host. `device` is the GPU that NCCL sends from.

    `followers` on this card or host come to `hub` instead; without `members` there is nobody else.
    """
    if transport not in ("gloo", "nccl"):
        raise WeightTransferError(f"transport: {transport!r} is not known; one of gloo, nccl")
    inner: Listener | None = None
    if members and transport == "gloo":
        from pods_cluster.weights.gloo import GlooListener

        inner = GlooListener(host)
    elif members:
        from pods_cluster.weights.nccl import NcclListener

        inner = NcclListener(host, device)
    if not followers:
        assert inner is not None
        return inner
    from pods_cluster.weights.relay import HubListener

    return HubListener(hub, followers, inner, transport, host, device)


def join(invitation: Invitation, closed: Closed, device: torch.device | None = None) -> TransferGroup:
    """Come to the group as rank `invitation.rank`; blocks until all met, at most `invitation.timeout`."""
    if not invitation.hub:
        return join_members(invitation, closed, device)
    from pods_cluster.weights.relay import follow, lead

    return (follow if invitation.follows else lead)(invitation, closed, device)


def join_members(invitation: Invitation, closed: Closed, device: torch.device | None) -> TransferGroup:
    """Into the broadcast group itself."""
    if invitation.transport == "gloo":
        from pods_cluster.weights.gloo import join_gloo

        return join_gloo(invitation, closed)
    if invitation.transport == "nccl":
        from pods_cluster.weights.nccl import join_nccl

        return join_nccl(invitation, closed, device)
    raise WeightTransferError(f"transport: {invitation.transport!r} is not known; one of gloo, nccl")
