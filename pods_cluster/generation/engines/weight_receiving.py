"""Weight versions of the engines that compute in the worker's own process: named, or received over a broadcast group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from pods_cluster.generation.engine import EngineError, require_open
from pods_cluster.weights.protocol import Invitation, WeightLoadError, WeightUpdate
from pods_cluster.weights.receiver import Sink
from pods_cluster.weights.staging import GroupEnd


class WeightReceiving:
    """`adopt_version`, `connect`, `stage` and `disconnect` of `Engine`, and the part of `receive` that is the same for all.

    Their parameters can be read while steps are made (`fingerprints_beside`). `version` is the last one that arrived in full;
    `closed` is true from the start of a transfer to its good end.
    """

    fingerprints_beside = True

    def __init__(self, device: torch.device | None = None) -> None:
        self.version = -1
        self.closed = False
        self._group = GroupEnd(device if device is not None else torch.device("cpu"))

    def adopt_version(self, version: int) -> None:
        require_open(self.closed, "adopt_version")
        self.version = version

    def connect(self, invitation: Invitation) -> None:
        self._group.connect(invitation)

    def disconnect(self) -> None:
        self._group.disconnect()

    def stage(self, update: WeightUpdate, *, check_memory: bool = True) -> bool:
        return self._group.stage(update, check_memory=check_memory)

    @contextlib.contextmanager
    def _receiving(self, update: WeightUpdate, sink: Sink) -> Iterator[None]:
        """Load `update`, from where it is staged or as it arrives; the body runs then, and the version counts after it."""
        load = self._group.source_of(update)
        self.closed = True
        load(sink)
        try:
            yield
        except EngineError as error:
            raise WeightLoadError(f"version {update.version}: {error}") from error
        self.version = update.version
        self.closed = False
