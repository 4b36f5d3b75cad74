"""Broadcast groups on a CPU network: rank 0's TCPStore, and a gloo process group beside torch's default one.

gloo cannot be interrupted: its `abort` does not end a blocked receive. So no call here blocks in gloo itself. Waits
are cut into slices, between which the deadline and `close` are checked, and a closed group is dropped in a thread of
its own (its destructor joins gloo's threads, which end at their operation's deadline at the latest).
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from pods_cluster.weights.protocol import Invitation, WeightTransferError
from pods_cluster.weights.transport import Closed, Deadline, bind, call_within, first_line, local_address

_SLICE = timedelta(milliseconds=50)
_POLL_SECONDS = 0.01


class GlooPending:
    """A gloo broadcast in progress. Satisfies `Pending`."""

    def __init__(self, group: GlooGroup, work: Any) -> None:
        self._group = group
        self._work = work

    def wait(self, deadline: Deadline) -> None:
        group = self._group
        while True:
            if group.closed:
                raise WeightTransferError(f"{group.label}: closed while a bucket was in transit")
            try:
                self._work.wait(_SLICE)
                return
            except RuntimeError:
                # A slice that ran out and a failed broadcast both raise RuntimeError; only the latter is complete.
                if self._work.is_completed():
                    self._finish()
                    return
                if deadline.over:
                    raise WeightTransferError(
                        f"{group.label}: the transfer was not done within {deadline.seconds:g} s"
                    ) from None

    def _finish(self) -> None:
        """Raise the error of a complete broadcast, if it has one; its `wait` returns at once."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise WeightTransferError(f"{self._group.label}: {first_line(error)}") from error


class GlooGroup:
    """Connected gloo group. Satisfies `TransferGroup`."""

    device = torch.device("cpu")
    checks_updates = True

    def __init__(self, process_group: Any, store: Any, name: str, rank: int, world_size: int) -> None:
        self._process_group = process_group
        self._store = store
        self._lock = threading.Lock()
        self.closed = Closed()
        self.label = f"weights group {name}, rank {rank} of {world_size}"
        self.world_size = world_size

    def start(self, buffer: UInt8[Tensor, " bytes"], deadline: Deadline) -> GlooPending:
        with self._lock:
            if self._process_group is None:
                raise WeightTransferError(f"{self.label}: closed")
            try:
                work = self._process_group.broadcast(buffer, 0, timeout=timedelta(seconds=deadline.left()))
            except RuntimeError as error:
                raise WeightTransferError(f"{self.label}: {first_line(error)}") from error
        return GlooPending(self, work)

    def close(self) -> None:
        self.closed.set()
        with self._lock:
            leaving = [self._process_group, self._store]
            self._process_group = self._store = None
        if leaving[0] is not None:
            threading.Thread(target=leaving.clear, name=f"{self.label}: leaving", daemon=True).start()


class GlooListener:
    """Rank 0's store, open on one address. Satisfies `Listener`."""

    def __init__(self, host: str) -> None:
        listener = bind(host)
        self.host = host
        self.port = int(listener.getsockname()[1])
        self._closed = Closed()
        # The store owns the descriptor from here on.
        self._store: Any = TCPStore(
            host, self.port, None, True, timedelta(seconds=30), False, master_listen_fd=listener.detach()
        )

    def meet(self, name: str, receivers: int, timeout: float) -> GlooGroup:
        return _connect(self._store, self.host, name, 0, receivers + 1, Deadline(timeout), self._closed)

    def close(self) -> None:
        self._closed.set()
        self._store = None


def join_gloo(invitation: Invitation, closed: Closed) -> GlooGroup:
    """Join the group. Raises WeightTransferError, at the invitation's deadline at the latest."""
    deadline = Deadline(invitation.timeout)
    where = f"{invitation.host}:{invitation.port}"

    def reach() -> tuple[Any, str]:
        wait = timedelta(seconds=deadline.left())
        store = TCPStore(invitation.host, invitation.port, None, False, wait, False)
        return store, local_address(invitation.host, invitation.port)  # may wait for a name server

    what = f"weights group {invitation.name}: rank {invitation.rank} to reach the learner at {where}"
    store, address = call_within(reach, deadline, closed, what)
    return _connect(store, address, invitation.name, invitation.rank, invitation.world_size, deadline, closed)


def _connect(
    store: Any, address: str, name: str, rank: int, world_size: int, deadline: Deadline, closed: Closed
) -> GlooGroup:
    """Meet at the store, then connect all members to each other, before the deadline."""
    if not 0 <= rank < world_size or world_size < 2:
        raise WeightTransferError(f"weights group {name}: rank {rank} of {world_size} cannot be")
    what = f"weights group {name}: rendezvous of rank {rank} of {world_size}"
    absent = list(range(world_size))

    def meet() -> None:
        met = PrefixStore(f"{name}/met", store)
        met.set(str(rank), address)
        while not closed and not deadline.over:
            absent[:] = [other for other in absent if not met.check([str(other)])]
            if not absent:
                return
            time.sleep(_POLL_SECONDS)
        raise WeightTransferError(f"{what}: the group was closed" if closed else f"{what}: too late")

    def connect() -> Any:
        options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._timeout = timedelta(seconds=deadline.left())
        options._threads = 1  # one: broadcasts run in the order they are started
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        return ProcessGroupGloo(PrefixStore(f"{name}/gloo", store), rank, world_size, options)

    try:
        call_within(meet, deadline, closed, what)
    except WeightTransferError as error:
        missing = tuple(other for other in absent if other != rank)
        if closed or not deadline.over or not missing:
            raise
        raise WeightTransferError(
            f"{what}: ranks {list(missing)} did not come in {deadline.seconds:g} s", missing
        ) from error.__cause__
    return GlooGroup(call_within(connect, deadline, closed, what), store, name, rank, world_size)
