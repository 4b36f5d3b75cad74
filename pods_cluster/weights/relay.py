"""Relay transport: one process of a card receives the weights and passes them on to the other processes there.

NCCL refuses two ranks on one card. So of the processes that share a card only one, the **hub**, is a member of the
broadcast group (or it is the learner's rank 0, if that shares the card). The others are its **followers**: over a Unix
socket the hub sends them the CUDA IPC handle of each bucket, and every follower copies the bucket within the card and
confirms it. Where the processes cannot share a card's memory (separate containers), and on the CPU, the bytes
themselves travel through the socket.

Sender and receiver use it like any other transport: with the same calls and deadlines, and `close` from any thread.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import torch
from jaxtyping import UInt8
from torch import Tensor

from pods_cluster.weights.protocol import Invitation, WeightTransferError
from pods_cluster.weights.relay_socket import (
    FollowerConnection,
    HubConnection,
    address,
    greet,
    open_socket,
    read_greeting,
    shut_down,
)
from pods_cluster.weights.transport import Closed, Deadline, Listener, Pending, TransferGroup

JoinMembers = Callable[[Invitation, Closed, "torch.device | None"], TransferGroup]
"""Joins the broadcast group behind a hub, over the invitation's own transport."""

_POLL_SECONDS = 0.02


class RelayHub:
    """Sending end of a relay. It listens from the start, so that followers find it; `meet` waits for all of them.

    `ranks` are the followers' ranks in their invitations; an error names those that did not come.
    """

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.label = f"weights group {name}: relay"
        self._ranks = ranks
        self._followers: dict[int, FollowerConnection] = {}
        self._listener = open_socket()
        self._listener.settimeout(_POLL_SECONDS)
        try:
            self._listener.bind(address(name))
            self._listener.listen(len(ranks))
        except OSError as error:
            self._listener.close()
            raise WeightTransferError(f"{self.label}: cannot listen ({error.strerror})") from error

    def meet(self, deadline: Deadline, closed: Closed) -> None:
        """Wait for all followers. Raises WeightTransferError with the missing ranks."""
        while absent := tuple(rank for rank in self._ranks if rank not in self._followers):
            if closed:
                raise WeightTransferError(f"{self.label}: the group was closed")
            if deadline.over:
                raise WeightTransferError(
                    f"{self.label}: {len(absent)} follower(s) (ranks {list(absent)}) did not come in "
                    f"{deadline.seconds:g} s",
                    absent,
                )
            try:
                follower, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # closed from another thread, which the next turn of the loop reports
                time.sleep(_POLL_SECONDS)
                continue
            if (rank := read_greeting(follower, deadline)) in absent:
                self._followers[rank] = FollowerConnection(follower, f"{self.label} to rank {rank}")
            else:
                follower.close()

    def send(self, buffer: UInt8[Tensor, " bytes"], deadline: Deadline) -> None:
        """Send `buffer` to every follower; returns when each has its own copy. Raises WeightTransferError."""
        if buffer.is_cuda:
            torch.cuda.ipc_collect()  # handles that followers have released since the last bucket
            torch.cuda.current_stream(buffer.device).synchronize()
        for follower in self._followers.values():
            follower.send(buffer, deadline)
        for follower in self._followers.values():
            follower.confirm(buffer, deadline)

    def close(self) -> None:
        """Close all sockets, which ends every wait on either end. Safe to call twice and from another thread."""
        shut_down(self._listener)
        for follower in self._followers.values():
            follower.close()


class _HubPending:
    """A bucket that the hub sends on when it is waited for, after its own `arrival` (None: it is the sender's own)."""

    def __init__(self, hub: RelayHub, buffer: UInt8[Tensor, " bytes"], arrival: Pending | None) -> None:
        self._hub = hub
        self._buffer = buffer
        self._arrival = arrival

    def wait(self, deadline: Deadline) -> None:
        if self._arrival is not None:
            self._arrival.wait(deadline)
        self._hub.send(self._buffer, deadline)


class HubGroup:
    """Membership of a hub in its broadcast group `members`, whose buckets it passes on to its followers.

    Without `members` the hub is the sender itself, and nobody but its followers receives. A `TransferGroup`.
    """

    def __init__(
        self, hub: RelayHub, members: TransferGroup | None, device: torch.device, *, checks_updates: bool
    ) -> None:
        self._hub = hub
        self._members = members
        self.device = device
        self.world_size = 1 if members is None else members.world_size
        self.checks_updates = checks_updates

    def start(self, buffer: UInt8[Tensor, " bytes"], deadline: Deadline) -> Pending:
        arrival = None if self._members is None else self._members.start(buffer, deadline)
        return _HubPending(self._hub, buffer, arrival)

    def close(self) -> None:
        self._hub.close()
        if self._members is not None:
            self._members.close()


class _FollowerPending:
    """A bucket that the follower receives when it is waited for."""

    def __init__(self, group: FollowerGroup, buffer: UInt8[Tensor, " bytes"]) -> None:
        self._group = group
        self._buffer = buffer

    def wait(self, deadline: Deadline) -> None:
        self._group.receive(self._buffer, deadline)


class FollowerGroup:
    """Receiving end of a relay, connected to its hub. A `TransferGroup`."""

    def __init__(self, hub: socket.socket, invitation: Invitation, device: torch.device, closed: Closed) -> None:
        self.label = f"weights group {invitation.name}, follower {invitation.rank}"
        self._hub = HubConnection(hub, self.label)
        self._closed = closed
        self.device = device
        self.world_size = invitation.world_size
        self.checks_updates = invitation.transport == "gloo"

    def start(self, buffer: UInt8[Tensor, " bytes"], deadline: Deadline) -> _FollowerPending:
        del deadline  # `wait` keeps it
        return _FollowerPending(self, buffer)

    def receive(self, buffer: UInt8[Tensor, " bytes"], deadline: Deadline) -> None:
        """Receive the next bucket into `buffer`. Raises WeightTransferError."""
        if self._closed:
            raise WeightTransferError(f"{self.label}: closed while a bucket was in transit")
        self._hub.receive(buffer, deadline)

    def close(self) -> None:
        self._closed.set()
        self._hub.close()


class HubListener:
    """Rank 0 as a hub, before its followers and the members of its group have come. A `Listener`.

    `members` listens for the latter; None: there are none.
    """

    def __init__(
        self,
        hub: str,
        followers: tuple[int, ...],
        members: Listener | None,
        transport: str,
        host: str,
        device: torch.device | None,
    ) -> None:
        self._members = members
        self._transport = transport
        self._device = device
        self._closed = Closed()
        self.host, self.port = (host, 0) if members is None else (members.host, members.port)
        try:
            self._hub = RelayHub(hub, followers)
        except WeightTransferError:
            if members is not None:
                members.close()
            raise

    def meet(self, name: str, receivers: int, timeout: float) -> HubGroup:
        deadline = Deadline(timeout)
        members = None if self._members is None else self._members.meet(name, receivers, timeout)
        return _meet_followers(self._hub, members, self._transport, self._device, deadline, self._closed)

    def close(self) -> None:
        self._closed.set()
        self._hub.close()
        if self._members is not None:
            self._members.close()


def join_as_hub(
    invitation: Invitation, closed: Closed, device: torch.device | None, join_members: JoinMembers
) -> HubGroup:
    """Join the broadcast group by `join_members`, then meet the followers, who can connect from the start.

    Raises WeightTransferError, at the invitation's deadline at the latest.
    """
    deadline = Deadline(invitation.timeout)
    hub = RelayHub(invitation.hub, invitation.followers)
    try:
        members = join_members(invitation, closed, device)
    except BaseException:
        hub.close()
        raise
    return _meet_followers(hub, members, invitation.transport, device, deadline, closed)


def _meet_followers(
    hub: RelayHub,
    members: TransferGroup | None,
    transport: str,
    device: torch.device | None,
    deadline: Deadline,
    closed: Closed,
) -> HubGroup:
    buffer_device = _buffer_device(transport, device) if members is None else members.device
    group = HubGroup(hub, members, buffer_device, checks_updates=transport == "gloo")
    try:
        hub.meet(deadline, closed)
    except BaseException:
        group.close()
        raise
    return group


def join_as_follower(invitation: Invitation, closed: Closed, device: torch.device | None) -> FollowerGroup:
    """Connect to the hub of this card. Raises WeightTransferError, at the invitation's deadline at the latest."""
    deadline = Deadline(invitation.timeout)
    what = f"weights group {invitation.name}: follower {invitation.rank}"
    buffer_device = _buffer_device(invitation.transport, device)
    while True:
        if closed:
            raise WeightTransferError(f"{what}: the group was closed")
        if deadline.over:
            raise WeightTransferError(
                f"{what}: its hub, which passes the weights on, was not there in {deadline.seconds:g} s"
            )
        hub = open_socket()
        try:
            hub.settimeout(deadline.left())
            hub.connect(address(invitation.hub))
            greet(hub, invitation.rank)
        except OSError:  # not there yet
            hub.close()
            time.sleep(_POLL_SECONDS)
            continue
        return FollowerGroup(hub, invitation, buffer_device, closed)


def _buffer_device(transport: str, device: torch.device | None) -> torch.device:
    """Device on which buffers lie."""
    if transport == "gloo":
        return torch.device("cpu")
    if device is not None:
        return device
    if not torch.cuda.is_available():
        raise WeightTransferError("weights over NCCL: this process sees no GPU; use weights.transport: gloo")
    return torch.device("cuda", torch.cuda.current_device())
