"""Calls to vLLM's workers for new weights, from the engine's thread or another one."""

from __future__ import annotations

import threading
import uuid
from typing import Any

from pods_cluster.generation.engine import EngineError
from pods_cluster.generation.engines.vllm import compat
from pods_cluster.generation.engines.vllm.core import Core
from pods_cluster.weights.protocol import Invitation, WeightTransferError, WeightUpdate
from pods_cluster.weights.sharded_fingerprint import combine_shard_sums
from pods_cluster.weights.transport import Closed, Deadline, call_within

_GRACE_SECONDS = 10.0
FINGERPRINT_SECONDS = 600.0
"""Time for workers with processes of their own to take the fingerprints of a model."""


class WorkerWeights:
    """All workers of one core as members of a broadcast group, through vLLM's weight-transfer interface."""

    def __init__(self, core: Core, native: bool, loading: str = "auto") -> None:
        self._core = core
        self._native = native
        self._loading = loading
        self._thread = threading.get_ident()
        self._token = uuid.uuid4().hex
        self._invitation: Invitation | None = None

    def connect(self, invitation: Invitation) -> None:
        from pods_cluster.generation.engines.vllm import weight_transfer, worker_extension

        self.disconnect()
        if self._native and invitation.transport != "nccl":
            raise WeightTransferError(
                f"generator.engine_options.transfer: native moves weights over NCCL only, not {invitation.transport}; "
                "use transfer: pods"
            )
        if self._native and invitation.hub:
            raise WeightTransferError(
                "generator.engine_options.transfer: native cannot share a card with another engine or a learner rank; "
                "use transfer: pods, or whole cards (gpus_per_worker)"
            )
        info = compat.native_init_info(invitation) if self._native else weight_transfer.init_info(invitation)
        outcomes = self._call(invitation.timeout, "pods_connect", self._token, info)
        worker_extension.raise_failure(outcomes, f"weights group {invitation.name}")
        self._invitation = invitation

    def disconnect(self) -> None:
        """Does nothing: workers in processes of their own cannot be reached from another thread. Their own watchdogs end a
        transfer at its deadline, and the next `connect` leaves the old group."""
        from pods_cluster.generation.engines.vllm import weight_transfer

        if not self._core.process:
            weight_transfer.close_transfer(self._token)
        elif threading.get_ident() == self._thread and self._invitation is not None:
            self._call(_GRACE_SECONDS, "pods_disconnect", self._token)
        self._invitation = None

    def check(self, update: WeightUpdate) -> Invitation:
        """Raises WeightTransferError where no group is open."""
        if self._invitation is None:
            raise WeightTransferError(f"version {update.version}: no broadcast group is open here; connect first")
        return self._invitation

    def stage(self, update: WeightUpdate, *, check_memory: bool) -> bool:
        """Take `update` beside the steps, from another thread than theirs; False where the workers have processes of their
        own, which answer between two steps, or the receiver is vLLM's."""
        from pods_cluster.generation.engines.vllm import weight_transfer

        self.check(update)
        if self._core.process or self._native:
            return False
        return weight_transfer.stage_transfer(self._token, update, check_memory=check_memory)

    def receive(self, update: WeightUpdate) -> None:
        """Into the model of every worker. Raises WeightTransferError; the models are unusable then."""
        from pods_cluster.generation.engines.vllm import weight_transfer, worker_extension

        invitation = self.check(update)
        if self._native:
            info = compat.native_update_info(update, invitation.bucket_bytes)
        else:
            info = weight_transfer.update_info(update)
        outcomes = self._call(update.timeout, "pods_receive", info, self._loading)
        if any(outcomes):
            self._invitation = None
        worker_extension.raise_failure(outcomes, f"version {update.version}")

    def fingerprints(self) -> dict[str, str]:
        try:
            return combine_shard_sums(self._call(FINGERPRINT_SECONDS, "pods_fingerprints"))
        except Exception as error:
            raise EngineError(f"fingerprints: {error}") from error

    def _call(self, timeout: float, method: str, *args: Any) -> list[Any]:
        """The method's results on all workers. Raises WeightTransferError soon after `timeout` seconds where they have
        processes of their own, one of which may die or hang meanwhile."""
        if not self._core.process:
            return self._core.call_workers(method, *args)
        deadline = Deadline(timeout + _GRACE_SECONDS)
        return call_within(lambda: self._core.call_workers(method, *args), deadline, Closed(), f"vLLM: {method}")
