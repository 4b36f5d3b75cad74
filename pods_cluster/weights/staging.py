"""A weight version that arrives beside an engine at work: it is kept apart, and the engine stops for the copy alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from pods_cluster.free_memory import free_memory
from pods_cluster.weights.buckets import torch_dtype
from pods_cluster.weights.protocol import Invitation, TensorSpec, WeightLoadError, WeightTransferError, WeightUpdate
from pods_cluster.weights.receiver import Receiver, Sink
from pods_cluster.weights.transport import first_line

if TYPE_CHECKING:
    import torch
    from jaxtyping import Shaped, UInt8
    from torch import Tensor

FREE = 2.0
"""Free memory that a version is kept apart in, in sizes of it: the engine, and others on its card, go on allocating."""
ALIGNED = 256
"""Bytes at whose multiples tensors begin."""


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """All tensors of an update, on the engine's device, not yet loaded: `rows` are views of `memory`."""

    update: WeightUpdate
    memory: UInt8[Tensor, " bytes"]
    rows: list[tuple[TensorSpec, Shaped[Tensor, "*shape"]]]

    def holds(self, update: WeightUpdate) -> bool:
        """Whether this is what `update` describes."""
        return self.update.version == update.version and self.update.tensors == update.tensors

    def load(self, sink: Sink) -> None:
        """Hand all of it to the sink. Raises WeightLoadError if that fails, as a `Receiver` does."""
        import torch

        if self.memory.is_cuda:  # made on another stream: freed no sooner than this one has read it
            self.memory.record_stream(torch.cuda.current_stream(self.memory.device))
        try:
            sink(self.rows)
        except WeightTransferError:
            raise
        except Exception as error:
            raise WeightLoadError(f"version {self.update.version}: {first_line(error)}") from error


class GroupEnd:
    """An engine's end of the broadcast groups that it joins one after another, on its device. A version that was kept apart
    there is loaded from where it is."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside: torch.cuda.Stream | None = None
        self._receiver: Receiver | None = None
        self._staged: StagedVersion | None = None

    @property
    def connected(self) -> bool:
        """Whether it has joined a group, or is about to."""
        return self._receiver is not None

    def connect(self, invitation: Invitation) -> None:
        """Leave the group before, and join another one. Raises WeightTransferError."""
        self.disconnect()
        self._staged = None
        # Kept before it connects, so that `disconnect` from another thread ends a rendezvous that hangs.
        self._receiver = receiver = Receiver(invitation, self._device if self._device.type == "cuda" else None)
        try:
            receiver.connect()
        except BaseException:
            self.disconnect()
            raise

    def disconnect(self) -> None:
        """Leave the group; a transfer that is under way fails. From any thread."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    def stage(self, update: WeightUpdate, *, check_memory: bool) -> bool:
        """Keep `update` apart, as `stage` does; whether it is."""
        receiver = self._joined(update)
        if self._device.type == "cuda" and self._beside is None:
            import torch

            self._beside = torch.cuda.Stream(self._device)
        self._staged = None  # a version that was never loaded gives its memory to this one
        self._staged = stage(receiver, update, self._device, check_memory=check_memory, stream=self._beside)
        return self._staged is not None

    def source_of(self, update: WeightUpdate) -> Callable[[Sink], None]:
        """A function that hands all of `update` to a sink: from where it is kept apart, else as it arrives."""
        staged, self._staged = self._staged, None
        if staged is not None and staged.holds(update):
            return staged.load
        return partial(self._joined(update).receive, update)

    def _joined(self, update: WeightUpdate) -> Receiver:
        receiver = self._receiver
        if receiver is None:
            raise WeightTransferError(f"version {update.version}: no broadcast group is open here; connect first")
        return receiver


def stage(
    receiver: Receiver,
    update: WeightUpdate,
    device: torch.device,
    *,
    check_memory: bool = True,
    stream: torch.cuda.Stream | None = None,
) -> StagedVersion | None:
    """Receive `update` in this thread, while another one computes on `device`; nothing is loaded.

    None where less than `FREE` times its size is free there (`check_memory`), or the memory cannot be had: nothing was
    received then. `stream`: on a card, the one that does it, and from whose memory the version's comes; the same for all
    versions, since what was freed on one stream is not given out on another. Raises WeightTransferError as
    `Receiver.receive` does.
    """
    if check_memory and free_bytes(device) < FREE * update.nbytes:
        return None
    with _beside(stream):
        staged = _empty(update, device)
        if staged is None:
            return None
        places = {spec.name: place for spec, place in staged.rows}

        def keep(tensors: list[tuple[TensorSpec, Tensor]]) -> None:
            for spec, tensor in tensors:
                places[spec.name].copy_(tensor)

        receiver.receive(update, keep)
    return staged


def _empty(update: WeightUpdate, device: torch.device) -> StagedVersion | None:
    """Memory for a version, in one piece: it can be had as a whole or not at all."""
    import torch

    starts = list(accumulate((-(-spec.nbytes // ALIGNED) * ALIGNED for spec in update.tensors), initial=0))
    try:
        memory = torch.empty(starts[-1], dtype=torch.uint8, device=device)
    except RuntimeError:
        return None
    rows = [
        (spec, memory[start : start + spec.nbytes].view(torch_dtype(spec)).view(spec.shape))
        for spec, start in zip(update.tensors, starts, strict=False)
    ]
    return StagedVersion(update, memory, rows)


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on the device now, those that this process has freed and kept included."""
    if device.type != "cuda":
        return free_memory()
    import torch

    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept


@contextlib.contextmanager
def _beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """On a card: a stream of its own, so that nothing here waits for the engine's kernels; it is empty at the end."""
    if stream is None:
        yield
        return
    import torch

    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield
        stream.synchronize()
