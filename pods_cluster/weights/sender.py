"""Sending end of a weight update: every learner rank gathers the parameters in step, rank 0 sends them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pods_cluster.weights import buckets
from pods_cluster.weights.fingerprint import fingerprints
from pods_cluster.weights.protocol import (
    TensorSpec,
    WeightSource,
    WeightTransferError,
    WeightUpdate,
    plan_buckets,
)
from pods_cluster.weights.transport import (
    Closed,
    Deadline,
    Listener,
    Pending,
    TransferGroup,
    call_within,
    local_address,
)
from pods_cluster.weights.transport_factory import listen

if TYPE_CHECKING:
    import torch
    from jaxtyping import Shaped, UInt8
    from torch import Tensor

_FINGERPRINT_BUCKET = 256 * 2**20


class WeightSender:
    """Sender in each learner rank; that of rank 0 holds at most one broadcast group.

    `host` is the address at which receivers reach this rank (the node's routable one); by default that of the default
    route. `device` is the GPU that NCCL sends from. `computed` are the parameters that an engine computes with after it
    has received those of `source`, and of which fingerprints are taken: the same, or base and adapter merged. `open`,
    `connect`, `send` and `fingerprints` belong to the rank's own thread; `close` may be called from another one while
    `connect` or `send` waits, and ends that wait.
    """

    def __init__(
        self,
        source: WeightSource,
        rank: int,
        host: str | None = None,
        device: torch.device | None = None,
        *,
        computed: WeightSource | None = None,
    ) -> None:
        self._source = source
        self._computed = computed if computed is not None else source
        self._rank = rank
        self._host = host
        self._device = device
        self._listener: Listener | None = None
        self._name = ""
        self._receivers = 0
        self._group: TransferGroup | None = None
        self._buffers: list[UInt8[Tensor, " bytes"]] = []

    def specs(self) -> tuple[TensorSpec, ...]:
        """Specs of the tensors that are sent."""
        return self._source.specs()

    def open(
        self,
        transport: str,
        name: str,
        receivers: int,
        timeout: float,
        hub: str = "",
        followers: tuple[int, ...] = (),
    ) -> tuple[str, int]:
        """Leave the old group and listen for `receivers` ranks of a new one (rank 0). Returns host and port.

        `followers` (their ranks), on this process's card or host, connect to `hub` instead (see `relay`).
        """
        self._require_rank_0("open")
        if receivers < (0 if followers else 1):
            raise ValueError(f"receivers: {receivers} is below 1")
        self.close()
        host = self._host or local_address()
        what = f"weights group {name}: to listen on {host}"

        def open_listener() -> Listener:
            return listen(transport, host, self._device, members=receivers > 0, hub=hub, followers=followers)

        listener = call_within(open_listener, Deadline(timeout), Closed(), what)
        self._listener, self._name, self._receivers = listener, name, receivers
        return listener.host, listener.port

    def connect(self, timeout: float) -> None:
        """Meet the receivers (rank 0). Raises WeightTransferError, at the deadline at the latest, and stops listening."""
        self._require_rank_0("connect")
        listener = self._listener
        if listener is None:
            raise WeightTransferError("connect: nothing is open; call open first")
        try:
            group = listener.meet(self._name, self._receivers, timeout)
        except WeightTransferError:
            self.close()
            raise
        self._group = group
        if self._listener is not listener:  # closed in the meantime, from another thread
            self.close()
            raise WeightTransferError(f"weights group {self._name}: closed during its rendezvous")

    def send(self, update: WeightUpdate) -> None:
        """Gather every bucket of `update` (all ranks); rank 0 sends each while the next is gathered.

        Every rank takes part in every gather even if sending fails. The failure (WeightTransferError, on rank 0 only)
        is raised after the last gather, and closes the group.
        """
        if self._rank != 0:
            for start, stop in update.buckets:
                self._source.gather(start, stop)
            return
        transfer = _OutgoingUpdate(self._group, update, self._buffers)
        failure: WeightTransferError | None = None
        try:
            transfer.begin()
        except WeightTransferError as error:
            failure = error
        for turn, (start, stop) in enumerate(update.buckets):
            tensors = self._source.gather(start, stop)
            if failure is None:
                try:
                    transfer.send(turn, tensors)
                except WeightTransferError as error:
                    failure = error
            del tensors
        if failure is None:
            try:
                transfer.finish()
            except WeightTransferError as error:
                failure = error
        if failure is not None:
            self.close()
            raise failure
        self._buffers = transfer.buffers if transfer.on_cpu else []

    def fingerprints(self) -> dict[str, str]:
        """Gather the parameters that an engine computes with (all ranks). Returns their fingerprints by name on rank 0,
        {} on the others."""
        specs = self._computed.specs()
        found: dict[str, str] = {}
        for start, stop in plan_buckets(specs, _FINGERPRINT_BUCKET):
            tensors = self._computed.gather(start, stop)
            if self._rank == 0:
                names = (spec.name for spec in specs[start:stop])
                found.update(fingerprints(zip(names, tensors, strict=True)))
        return found

    def close(self) -> None:
        """Leave the group or stop listening, and free the buffers. Safe to call twice and from another thread."""
        listener, group = self._listener, self._group
        self._listener = self._group = None
        self._buffers = []
        if group is not None:
            group.close()
        if listener is not None:
            listener.close()

    def _require_rank_0(self, call: str) -> None:
        if self._rank != 0:
            raise ValueError(f"{call}: rank {self._rank} sends nothing; only rank 0 opens and meets a broadcast group")


class _OutgoingUpdate:
    """Transfer of one update from rank 0, through two buffers in turn."""

    def __init__(
        self, group: TransferGroup | None, update: WeightUpdate, buffers: list[UInt8[Tensor, " bytes"]]
    ) -> None:
        self._group = group
        self._update = update
        self._deadline = Deadline(update.timeout)
        self._pending: list[Pending] = []
        self.buffers = buffers

    @property
    def on_cpu(self) -> bool:
        """Whether the buffers lie in host memory."""
        return self._group is not None and self._group.device.type == "cpu"

    def begin(self) -> None:
        """Allocate the buffers, and send the digest if the group checks it."""
        import torch

        if self._group is None:
            raise WeightTransferError(f"version {self._update.version}: the learner is in no broadcast group")
        size = buckets.largest_bucket(self._update)
        if any(buffer.numel() < size or buffer.device != self._group.device for buffer in self.buffers):
            self.buffers = []
        while len(self.buffers) < min(2, len(self._update.buckets)):
            self.buffers.append(torch.empty(size, dtype=torch.uint8, device=self._group.device))
        if self._group.checks_updates:
            header = torch.tensor(list(buckets.digest(self._update)), dtype=torch.uint8, device=self._group.device)
            self._group.start(header, self._deadline).wait(self._deadline)

    def send(self, turn: int, tensors: list[Shaped[Tensor, "*shape"]]) -> None:
        """Start to send bucket `turn`, once its buffer is free."""
        assert self._group is not None
        if turn >= 2:
            self._pending[turn - 2].wait(self._deadline)
        bucket = self._update.buckets[turn]
        buffer = self.buffers[turn % 2][: buckets.bucket_bytes(self._update, bucket)]
        buckets.pack(tensors, self._update.tensors[bucket[0] : bucket[1]], buffer)
        self._pending.append(self._group.start(buffer, self._deadline))

    def finish(self) -> None:
        """Wait for the last buckets."""
        for pending in self._pending[-2:]:
            pending.wait(self._deadline)
