"""New weights in a generator worker: its part in a broadcast, beside its engine's steps and between two of them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from pods_cluster.generation.engine import Engine
from pods_cluster.generation.engine_thread import EngineCalls
from pods_cluster.weights.protocol import Invitation, WeightLoadError, WeightTransferError, WeightUpdate
from pods_cluster.weights.relay_plan import WorkerLocation

log = logging.getLogger(__name__)

_WATCHDOG_GRACE = 2.0
"""Seconds after the deadline of a transfer at which it is broken off from outside the engine's thread."""
_GIVE_UP_GRACE = 15.0
"""Seconds after the deadline of a rendezvous or transfer at which this worker stops to wait for its engine: later than
whatever has the deadline itself, and than the controller's own patience (`Broadcaster.grace`)."""


class WeightCalls(EngineCalls):
    """The calls of a worker that bring it new weights; the worker itself has the engine."""

    _staging_works = True
    staged = 0
    """Weight versions that were taken beside the engine's steps, in `staging_seconds`."""
    staging_seconds = 0.0

    def weights_location(self) -> WorkerLocation:
        """The node and card of this worker: neighbours get weights from one another."""
        return WorkerLocation.current()

    def connect(self, invitation: Invitation) -> None:
        """Join a broadcast group; see `Engine.connect`."""
        self._check()
        patience = invitation.timeout + _GIVE_UP_GRACE
        self._engine.call("connect", lambda engine: engine.connect(invitation), patience, "weights.rendezvous_timeout")

    def receive(self, update: WeightUpdate) -> None:
        """Take one version: beside the steps where that is possible (`Engine.stage`, in this thread), and load it between
        two of them (`Engine.receive`). A watchdog ends a transfer that hangs."""
        self._check()
        engine = self._engine.engine
        if engine is not None and self.config.stages_weights and self._staging_works:
            self._stage(engine, update)
        patience = update.timeout + _GIVE_UP_GRACE
        self._engine.call("receive", lambda engine: self._receive(engine, update), patience, "weights.transfer_timeout")

    def disconnect(self) -> None:
        """Leave the broadcast group, also while a transfer hangs in the engine's thread."""
        if self._engine.engine is not None:
            self._engine.engine.disconnect()

    def adopt_version(self, version: int) -> None:
        """Serve the weights of `model.path` as `version`; see `Engine.adopt_version`."""
        self._check()
        self._call("adopt_version", lambda engine: engine.adopt_version(version))

    def fingerprints(self) -> dict[str, str]:
        """See `Engine.fingerprints`: beside the engine's steps where it allows that, in this thread."""
        self._check()
        engine = self._engine.engine
        if engine is not None and engine.fingerprints_beside:
            return engine.fingerprints()
        return self._call("fingerprints", lambda engine: engine.fingerprints())

    def _stage(self, engine: Engine, update: WeightUpdate) -> None:
        """Have it take one version beside its steps. Where that fails for another reason than a peer that is gone, later
        versions are loaded as they arrive."""
        began = time.perf_counter()
        try:
            with _watched(engine, update):
                self.staged += engine.stage(update, check_memory=self.config.weights.staged == "auto")
            self.staging_seconds += time.perf_counter() - began
        except Exception as error:
            if not isinstance(error, WeightTransferError) or isinstance(error, WeightLoadError):
                self._staging_works = False
                log.warning("new weights stop the engine from now on: taking them beside its steps failed: %s", error)
            raise

    @staticmethod
    def _receive(engine: Engine, update: WeightUpdate) -> None:
        with _watched(engine, update):
            engine.receive(update)


@contextlib.contextmanager
def _watched(engine: Engine, update: WeightUpdate) -> Iterator[None]:
    """Break a transfer off that hangs beyond its deadline."""
    watchdog = threading.Timer(update.timeout + _WATCHDOG_GRACE, engine.disconnect)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()
