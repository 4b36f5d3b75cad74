"""Weight versions of the engines that compute in the worker's own process: named, or received over a broadcast group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from pods_cluster.generation.engine import EngineError, require_open
from pods_cluster.weights.protocol import Invitation, WeightLoadError, WeightTransferError, WeightUpdate
from pods_cluster.weights.receiver import Receiver, Sink
from pods_cluster.weights.staging import StagedVersion, stage


class WeightReceiving:
    """`adopt_version`, `connect`, `stage` and `disconnect` of `Engine`, and the part of `receive` that is the same for all.

    `version` is the last one that arrived in full; `closed` is true from the start of a transfer to its good end.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.version = -1
        self.closed = False
        self._receiver: Receiver | None = None
        self._staged: StagedVersion | None = None
        self._home = device if device is not None else torch.device("cpu")
        self._device = device if device is not None and device.type == "cuda" else None

    def adopt_version(self, version: int) -> None:
        require_open(self.closed, "adopt_version")
        self.version = version

    def connect(self, invitation: Invitation) -> None:
        self.disconnect()
        self._staged = None
        # Kept before it connects, so that `disconnect` from another thread ends a rendezvous that hangs.
        self._receiver = receiver = Receiver(invitation, self._device)
        try:
            receiver.connect()
        except BaseException:
            self.disconnect()
            raise

    def disconnect(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    def stage(self, update: WeightUpdate, *, check_memory: bool = True) -> bool:
        self._staged = stage(self._connected(update), update, self._home, check_memory=check_memory)
        return self._staged is not None

    def _connected(self, update: WeightUpdate) -> Receiver:
        receiver = self._receiver
        if receiver is None:
            raise WeightTransferError(f"version {update.version}: no broadcast group is open here; connect first")
        return receiver

    @contextlib.contextmanager
    def _receiving(self, update: WeightUpdate, sink: Sink) -> Iterator[None]:
        """Load `update`, from where it is staged or as it arrives; the body runs then, and the version counts after it."""
        staged, self._staged = self._staged, None
        if staged is not None and staged.holds(update):
            self.closed = True
            staged.load(sink)
        else:
            receiver = self._connected(update)
            self.closed = True
            receiver.receive(update, sink)
        try:
            yield
        except EngineError as error:
            raise WeightLoadError(f"version {update.version}: {error}") from error
        self.version = update.version
        self.closed = False
