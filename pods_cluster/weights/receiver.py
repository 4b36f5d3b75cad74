"""Receiving end of a weight update: joins a broadcast group and takes a full version bucket by bucket."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from pods_cluster.weights import buckets
from pods_cluster.weights.protocol import (
    Invitation,
    TensorSpec,
    WeightLoadError,
    WeightTransferError,
    WeightUpdate,
)
from pods_cluster.weights.transport import Closed, Deadline, Pending, TransferGroup, first_line
from pods_cluster.weights.transport_factory import join

if TYPE_CHECKING:
    import torch
    from jaxtyping import Shaped
    from torch import Tensor

Sink = Callable[[list[tuple[TensorSpec, "Shaped[Tensor, '*shape']"]]], None]
"""Consumer of one bucket: its tensors in the update's order, as views that are valid only during the call (on the CPU
with gloo)."""


def make_receiver(invitation: Invitation, device: torch.device | None = None) -> Receiver:
    """Receiver that has joined its group. Raises WeightTransferError, at the invitation's deadline at the latest."""
    receiver = Receiver(invitation, device)
    receiver.connect()
    return receiver


class Receiver:
    """Receiver in one broadcast group. `close` may be called from any thread, at any time.

    After any WeightTransferError the receiver is closed, because a group that failed cannot be used any more.
    """

    def __init__(self, invitation: Invitation, device: torch.device | None = None) -> None:
        self.invitation = invitation
        self._device = device
        self._closed = Closed()
        self._group: TransferGroup | None = None

    def connect(self) -> None:
        """Meet all members, within `invitation.timeout` seconds. Raises WeightTransferError."""
        group = join(self.invitation, self._closed, self._device)
        self._group = group
        if self._closed:
            group.close()
            raise WeightTransferError(f"weights group {self.invitation.name}: closed during its rendezvous")

    def receive(self, update: WeightUpdate, sink: Sink) -> None:
        """Receive all buckets of `update`, passing each to `sink` in this thread while the next one is in transit.

        Raises WeightLoadError if `sink` raises, else WeightTransferError (a peer gone, `close`, the deadline). A
        watchdog closes the group soon after the deadline, whatever this thread is stuck in.
        """
        group = self._group
        if group is None or self._closed:
            raise WeightTransferError(f"weights group {self.invitation.name}: not connected")
        watchdog = threading.Timer(update.timeout + 0.2, self.close)
        watchdog.daemon = True
        watchdog.start()
        try:
            self._receive(group, update, sink, Deadline(update.timeout))
        except BaseException:
            self.close()
            raise
        finally:
            watchdog.cancel()

    def _receive(self, group: TransferGroup, update: WeightUpdate, sink: Sink, deadline: Deadline) -> None:
        import torch

        if group.checks_updates:
            self._check_digest(group, update, deadline)
        largest = buckets.largest_bucket(update)
        buffers = [torch.empty(largest, dtype=torch.uint8, device=group.device) for _ in update.buckets[:2]]
        views = [
            buffers[turn % 2][: buckets.bucket_bytes(update, bucket)] for turn, bucket in enumerate(update.buckets)
        ]
        pending: Pending | None = group.start(views[0], deadline) if views else None
        for turn, (start, stop) in enumerate(update.buckets):
            assert pending is not None
            pending.wait(deadline)
            # The other buffer is free: its bucket was loaded in the last round.
            pending = group.start(views[turn + 1], deadline) if turn + 1 < len(views) else None
            if self._closed:
                raise WeightTransferError(f"weights group {self.invitation.name}: closed")
            try:
                sink(buckets.unpack(views[turn], update.tensors[start:stop]))
            except WeightTransferError:
                raise
            except Exception as error:
                names = f"{update.tensors[start].name} … {update.tensors[stop - 1].name}"
                raise WeightLoadError(f"version {update.version}, bucket {names}: {first_line(error)}") from error
        if deadline.over:
            raise WeightTransferError(
                f"version {update.version}: loaded, but only after its deadline of {update.timeout:g} s"
            )

    def _check_digest(self, group: TransferGroup, update: WeightUpdate, deadline: Deadline) -> None:
        import torch

        sent = torch.empty(buckets.DIGEST_BYTES, dtype=torch.uint8, device=group.device)
        group.start(sent, deadline).wait(deadline)
        if bytes(sent.tolist()) != buckets.digest(update):
            raise WeightTransferError(
                f"weights group {self.invitation.name}: the learner sends another update than the version {update.version} "
                "that was announced here"
            )

    def close(self) -> None:
        """Leave the group; a `connect` or `receive` in another thread then raises. Safe to call twice."""
        self._closed.set()
        group = self._group
        if group is not None:
            group.close()
