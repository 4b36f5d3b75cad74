"""From one receiver to its neighbours: a bucket that came to a card is passed on to the other processes there.

NCCL refuses two ranks on one card. So of the processes that share one, a single process is a member of the broadcast
group (or the learner's rank 0 itself lies there): the hub. It tells the others, its followers, over a Unix socket where
a bucket lies; each copies it within the card (CUDA IPC) and says that it has. Where a card's memory cannot be shared
between the processes (containers apart), and on the CPU, the bytes travel through the socket itself.

To sender and receiver this is a transport as any other: the same calls, deadlines, and way out from another thread.
"""

from __future__ import annotations

import socket
import time

import torch

from pods_cluster.weights import relay_socket as wire
from pods_cluster.weights.protocol import Invitation, WeightTransferError
from pods_cluster.weights.transport import (
    Closed,
    Deadline,
    Listener,
    Pending,
    TransferGroup,
    join_members,
)

_POLL_SECONDS = 0.02


class Hub:
    """The passing end: opens its socket at once, so that followers find it; `meet` waits for all of them.

    `ranks` are the followers' numbers in the invitation, by which those that stay away are named.
    """

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.label = f"weights group {name}: passing on"
        self._ranks = ranks
        self._followers: dict[int, socket.socket] = {}
        self._by_handle: dict[int, bool] = {}
        self._listener = wire.open_socket()
        self._listener.settimeout(_POLL_SECONDS)
        try:
            self._listener.bind(wire.address(name))
            self._listener.listen(len(ranks))
        except OSError as error:
            self._listener.close()
            raise WeightTransferError(f"{self.label}: cannot listen ({error.strerror})") from error

    def meet(self, deadline: Deadline, closed: Closed) -> None:
        """Until all followers have come. Raises WeightTransferError with those that are missing."""
        while absent := tuple(rank for rank in self._ranks if rank not in self._followers):
            if closed:
                raise WeightTransferError(f"{self.label}: the group was closed")
            if deadline.over:
                raise WeightTransferError(
                    f"{self.label}: {len(absent)} neighbour(s) (ranks {list(absent)}) did not come in "
                    f"{deadline.seconds:g} s",
                    absent,
                )
            try:
                follower, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # closed from another thread: the next turn says so
                time.sleep(_POLL_SECONDS)
                continue
            if (rank := wire.greeted(follower, deadline)) in absent:
                self._followers[rank] = follower
                self._by_handle[rank] = True
            else:
                follower.close()

    def share(self, buffer: torch.Tensor, deadline: Deadline) -> None:
        """Returns when every follower has its own copy of `buffer` (uint8). Raises WeightTransferError."""
        if buffer.is_cuda:
            torch.cuda.ipc_collect()  # what followers let go of since the last bucket
            torch.cuda.current_stream(buffer.device).synchronize()
        for rank, follower in self._followers.items():
            handle = wire.handle_of(buffer) if self._by_handle[rank] else None
            self._by_handle[rank] = handle is not None
            wire.within(deadline, follower, self.label, rank, lambda to, handle=handle: wire.tell(to, buffer, handle))
        for rank, follower in self._followers.items():
            if wire.within(deadline, follower, self.label, rank, lambda of: wire.exactly(of, 1)) == wire.CANNOT_MAP:
                self._by_handle[rank] = False
                wire.within(deadline, follower, self.label, rank, lambda to: wire.tell(to, buffer, None))
                wire.within(deadline, follower, self.label, rank, lambda of: wire.exactly(of, 1))

    def close(self) -> None:
        """Leave; whoever waits on either end is told. Safe to call twice and from another thread."""
        for each in (self._listener, *self._followers.values()):
            wire.hang_up(each)


class _Shared:
    """A bucket on its way to the hub (`arrival`; None: it is there) and on from it, once somebody waits for it."""

    def __init__(self, hub: Hub, buffer: torch.Tensor, arrival: Pending | None) -> None:
        self._hub = hub
        self._buffer = buffer
        self._arrival = arrival

    def wait(self, deadline: Deadline) -> None:
        if self._arrival is not None:
            self._arrival.wait(deadline)
        self._hub.share(self._buffer, deadline)


class HubGroup:
    """A member of a broadcast group that passes on what comes (or, without `inner`, what it has). A `TransferGroup`."""

    def __init__(self, hub: Hub, inner: TransferGroup | None, device: torch.device, *, checks_updates: bool) -> None:
        self._hub = hub
        self._inner = inner
        self.device = device
        self.world_size = 1 if inner is None else inner.world_size
        self.checks_updates = checks_updates

    def start(self, buffer: torch.Tensor, deadline: Deadline) -> Pending:
        return _Shared(self._hub, buffer, None if self._inner is None else self._inner.start(buffer, deadline))

    def close(self) -> None:
        self._hub.close()
        if self._inner is not None:
            self._inner.close()


class _Coming:
    def __init__(self, group: FollowerGroup, buffer: torch.Tensor) -> None:
        self._group = group
        self._buffer = buffer

    def wait(self, deadline: Deadline) -> None:
        self._group.take(self._buffer, deadline)


class FollowerGroup:
    """The taking end. A `TransferGroup` whose buckets come when they are waited for."""

    def __init__(self, hub: socket.socket, invitation: Invitation, device: torch.device, closed: Closed) -> None:
        self._socket = hub
        self._closed = closed
        self._rank = invitation.rank
        self.label = f"weights group {invitation.name}, follower {invitation.rank}"
        self.device = device
        self.world_size = invitation.world_size
        self.checks_updates = invitation.transport == "gloo"

    def start(self, buffer: torch.Tensor, deadline: Deadline) -> _Coming:
        del deadline  # `wait` keeps it
        return _Coming(self, buffer)

    def take(self, buffer: torch.Tensor, deadline: Deadline) -> None:
        """The next bucket into `buffer`. Raises WeightTransferError."""
        if self._closed:
            raise WeightTransferError(f"{self.label}: closed while a bucket was on its way")
        wire.within(deadline, self._socket, self.label, None, lambda hub: wire.take(hub, buffer))

    def close(self) -> None:
        self._closed.set()
        wire.hang_up(self._socket)


class HubListener:
    """Rank 0 before its followers, and the members behind `inner` (None: there are none), have come. A `Listener`."""

    def __init__(
        self,
        hub: str,
        followers: tuple[int, ...],
        inner: Listener | None,
        transport: str,
        host: str,
        device: torch.device | None,
    ) -> None:
        self._inner = inner
        self._transport = transport
        self._device = device
        self._closed = Closed()
        self.host, self.port = (host, 0) if inner is None else (inner.host, inner.port)
        try:
            self._hub = Hub(hub, followers)
        except WeightTransferError:
            if inner is not None:
                inner.close()
            raise

    def meet(self, name: str, receivers: int, timeout: float) -> HubGroup:
        deadline = Deadline(timeout)
        inner = None if self._inner is None else self._inner.meet(name, receivers, timeout)
        return _lead(self._hub, inner, self._transport, self._device, deadline, self._closed)

    def close(self) -> None:
        self._closed.set()
        self._hub.close()
        if self._inner is not None:
            self._inner.close()


def lead(invitation: Invitation, closed: Closed, device: torch.device | None) -> HubGroup:
    """Join the broadcast group and meet this place's followers, who find the hub from the start."""
    deadline = Deadline(invitation.timeout)
    hub = Hub(invitation.hub, invitation.followers)
    try:
        inner = join_members(invitation, closed, device)
    except BaseException:
        hub.close()
        raise
    return _lead(hub, inner, invitation.transport, device, deadline, closed)


def _lead(
    hub: Hub,
    inner: TransferGroup | None,
    transport: str,
    device: torch.device | None,
    deadline: Deadline,
    closed: Closed,
) -> HubGroup:
    place = _device(transport, device) if inner is None else inner.device
    group = HubGroup(hub, inner, place, checks_updates=transport == "gloo")
    try:
        hub.meet(deadline, closed)
    except BaseException:
        group.close()
        raise
    return group


def follow(invitation: Invitation, closed: Closed, device: torch.device | None) -> FollowerGroup:
    """Come to the hub of this card. Raises WeightTransferError, at the invitation's deadline at the latest."""
    deadline = Deadline(invitation.timeout)
    what = f"weights group {invitation.name}: follower {invitation.rank}"
    place = _device(invitation.transport, device)
    while True:
        if closed:
            raise WeightTransferError(f"{what}: the group was closed")
        if deadline.over:
            raise WeightTransferError(
                f"{what}: its neighbour, which passes the weights on, was not there in {deadline.seconds:g} s"
            )
        hub = wire.open_socket()
        try:
            hub.settimeout(deadline.left())
            hub.connect(wire.address(invitation.hub))
            wire.same_user(hub)
            hub.sendall(wire.HELLO.pack(invitation.rank))
        except OSError:  # not there yet
            hub.close()
            time.sleep(_POLL_SECONDS)
            continue
        return FollowerGroup(hub, invitation, place, closed)


def _device(transport: str, device: torch.device | None) -> torch.device:
    """Where buffers lie."""
    if transport == "gloo":
        return torch.device("cpu")
    if device is not None:
        return device
    if not torch.cuda.is_available():
        raise WeightTransferError("weights over NCCL: this process sees no GPU; use weights.transport: gloo")
    return torch.device("cuda", torch.cuda.current_device())
