"""The learner's end of a weight transfer, for tests: a model, a sender and what an engine on the other end is told."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from pods_cluster.weights.protocol import (
    Invitation,
    TensorSpec,
    WeightSource,
    WeightTransferError,
    WeightUpdate,
    plan_buckets,
)
from pods_cluster.weights.sender import WeightSender

TIMEOUT = 30.0


class ModelSource:
    """The parameters of an unsharded model; `leave_out` is not sent."""

    def __init__(self, model: PreTrainedModel, leave_out: str = "") -> None:
        self._tensors = {name: p.detach() for name, p in model.named_parameters() if name != leave_out}

    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(name, tuple(t.shape), str(t.dtype).split(".")[1]) for name, t in self._tensors.items())

    def gather(self, start: int, stop: int) -> list[torch.Tensor]:
        return list(self._tensors.values())[start:stop]


class Learner:
    """Sends the weights of a model (or those of a source) over gloo, or (`relay`) to a neighbour, to `ranks` receivers
    that one engine is."""

    def __init__(
        self,
        model: PreTrainedModel | WeightSource,
        leave_out: str = "",
        *,
        computed: WeightSource | None = None,
        relay: bool = False,
        ranks: int = 1,
    ) -> None:
        self.relay = relay
        self.ranks = ranks
        self.source = ModelSource(model, leave_out) if isinstance(model, PreTrainedModel) else model
        self.sender = WeightSender(self.source, 0, host="127.0.0.1", computed=computed)

    def invite(self, name: str = "test/weights/0") -> Invitation:
        if self.relay:
            self.sender.open("gloo", name, 0, TIMEOUT, name, (1,))
            return Invitation("gloo", "", 0, 1, 1, name, TIMEOUT, hub=name)
        host, port = self.sender.open("gloo", name, self.ranks, TIMEOUT)
        return Invitation("gloo", host, port, self.ranks + 1, 1, name, TIMEOUT)

    def update(self, version: int, timeout: float = TIMEOUT) -> WeightUpdate:
        specs = self.source.specs()
        return WeightUpdate(version, specs, plan_buckets(specs, 8192), timeout)

    def publish(
        self, version: int, connect: Callable[[Invitation], None], receive: Callable[[WeightUpdate], None]
    ) -> None:
        """One version to one receiver, whose two calls run in this thread."""
        invitation, update = self.invite(), self.update(version)
        sending = threading.Thread(target=self._send, args=(update,), daemon=True)
        sending.start()
        try:
            connect(invitation)
            receive(update)
            sending.join(TIMEOUT)
        finally:
            self.sender.close()
            sending.join(TIMEOUT)

    def _send(self, update: WeightUpdate) -> None:
        with contextlib.suppress(WeightTransferError):  # the receiver's side is what is tested
            self.sender.connect(TIMEOUT)
            self.sender.send(update)
