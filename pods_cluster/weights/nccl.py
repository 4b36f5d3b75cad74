"""Broadcast groups between GPUs, over vLLM's PyNccl (`StatelessProcessGroup` + `PyNcclCommunicator`).

Wire-compatible with vLLM's native "nccl" weight-transfer engine in packed mode (0.25 to 0.33): the same rendezvous,
then one uint8 broadcast per chunk. The buckets must be cut by vLLM's rule (`plan_buckets(..., overfill=True)`, with
the `bucket_bytes` that the engine was told), because the receiver works out the chunks from shapes alone. vLLM's own
producer is not used: it pulls tensors inside side streams, where a ZeRO-3 gather deadlocks. Here a bucket is gathered
and packed before it is sent.

NCCL calls may block for ever and cannot be interrupted from Python, so they run in a daemon thread; waits poll a CUDA
event, and `close` aborts the communicator, which frees a stuck kernel and thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from pods_cluster.weights.protocol import Invitation, WeightTransferError
from pods_cluster.weights.transport import Closed, Deadline, bind, call_within, first_line

_POLL_SECONDS = 0.0002
# Beyond vLLM's own limit for an abort (5 s).
_ABORT_SECONDS = 6.0


class NcclPending:
    """A broadcast handed to the group's thread; `issued` is set once NCCL has queued it on the stream. A `Pending`."""

    def __init__(self, group: NcclGroup, buffer: UInt8[Tensor, " bytes"]) -> None:
        self._group = group
        self.buffer = buffer
        self.issued = threading.Event()
        self.error: BaseException | None = None
        self.ready = torch.cuda.Event()
        self.done = torch.cuda.Event()
        self.ready.record(torch.cuda.current_stream(group.device))

    def wait(self, deadline: Deadline) -> None:
        group = self._group
        while not (self.issued.is_set() and (self.error is not None or self.done.query())):
            if group.closed:
                raise WeightTransferError(f"{group.label}: closed while a bucket was in transit")
            if deadline.over:
                group.close()
                raise WeightTransferError(f"{group.label}: the transfer was not done within {deadline.seconds:g} s")
            time.sleep(_POLL_SECONDS)
        if self.error is not None:
            raise WeightTransferError(f"{group.label}: {first_line(self.error)}") from self.error
        if group.closed:
            # An abort completes the kernel as well, with whatever had arrived.
            raise WeightTransferError(f"{group.label}: closed while a bucket was in transit")
        torch.cuda.current_stream(group.device).wait_event(self.done)


class NcclGroup:
    """NCCL communicator over all members. Satisfies `TransferGroup`."""

    checks_updates = False

    def __init__(self, communicator: Any, store_group: Any, name: str, rank: int, world_size: int) -> None:
        self._communicator = communicator
        self._store_group = store_group
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[NcclPending | None] = queue.SimpleQueue()
        self.closed = Closed()
        self.device: torch.device = communicator.device
        self.label = f"weights group {name}, rank {rank} of {world_size}"
        self.world_size = world_size
        threading.Thread(target=self._issue, name=f"{self.label}: NCCL", daemon=True).start()

    def start(self, buffer: UInt8[Tensor, " bytes"], deadline: Deadline) -> NcclPending:
        del deadline  # NCCL has none; `wait` keeps it
        if self.closed:
            raise WeightTransferError(f"{self.label}: closed")
        pending = NcclPending(self, buffer)
        self._jobs.put(pending)
        return pending

    def _issue(self) -> None:
        torch.cuda.set_device(self.device)
        stream = torch.cuda.Stream(self.device)
        while (pending := self._jobs.get()) is not None:
            try:
                communicator = self._communicator
                if communicator is None:
                    raise WeightTransferError(f"{self.label}: closed")
                stream.wait_event(pending.ready)
                pending.buffer.record_stream(stream)
                with torch.cuda.stream(stream):
                    communicator.broadcast(pending.buffer, src=0, stream=stream)
                    pending.done.record(stream)
            except BaseException as error:
                pending.error = error
            finally:
                pending.issued.set()

    def close(self) -> None:
        """Abort the communicator (ncclCommAbort), in a thread: it may itself wait for a stuck peer."""
        self.closed.set()
        with self._lock:
            communicator, self._communicator = self._communicator, None
            self._store_group = None
        if communicator is None:
            return
        self._jobs.put(None)
        abort = threading.Thread(target=communicator.destroy, name=f"{self.label}: abort", daemon=True)
        abort.start()
        abort.join(_ABORT_SECONDS)


class NcclListener:
    """A bound socket that becomes the rendezvous store of rank 0. Satisfies `Listener`."""

    def __init__(self, host: str, device: torch.device | None) -> None:
        self._socket = bind(host)
        self._device = device
        self._closed = Closed()
        self._meeting = False
        self.host = host
        self.port = int(self._socket.getsockname()[1])

    def meet(self, name: str, receivers: int, timeout: float) -> NcclGroup:
        deadline = Deadline(timeout)
        self._meeting = True

        def create() -> Any:
            try:
                return _vllm("StatelessProcessGroup").create(
                    self.host,
                    self.port,
                    rank=0,
                    world_size=receivers + 1,
                    store_timeout=_whole_seconds(deadline),
                    listen_socket=self._socket,
                )
            finally:
                # The store owns the descriptor from here on, whether this vLLM detached the socket or not.
                self._socket.detach()

        return _connect(create, name, 0, receivers + 1, self._device, deadline, self._closed)

    def close(self) -> None:
        self._closed.set()
        if not self._meeting:
            self._socket.close()


def join_nccl(invitation: Invitation, closed: Closed, device: torch.device | None = None) -> NcclGroup:
    """Join the group from a process of our own; vLLM's workers join through vLLM's weight-transfer engine."""
    deadline = Deadline(invitation.timeout)

    def create() -> Any:
        return _vllm("StatelessProcessGroup").create(
            invitation.host,
            invitation.port,
            rank=invitation.rank,
            world_size=invitation.world_size,
            store_timeout=_whole_seconds(deadline),
        )

    return _connect(create, invitation.name, invitation.rank, invitation.world_size, device, deadline, closed)


def _connect(
    create: Callable[[], Any],
    name: str,
    rank: int,
    world_size: int,
    device: torch.device | None,
    deadline: Deadline,
    closed: Closed,
) -> NcclGroup:
    what = f"weights group {name}: rendezvous of rank {rank} of {world_size} (NCCL)"
    if not torch.cuda.is_available():
        raise WeightTransferError(f"{what}: this process sees no GPU; use weights.transport: gloo")
    target = torch.device("cuda", torch.cuda.current_device()) if device is None else device

    def connect() -> tuple[Any, Any]:
        torch.cuda.set_device(target)
        store_group = create()
        communicator = _vllm("PyNcclCommunicator")(store_group, target)
        if communicator.disabled:
            # PyNccl turns itself off silently, and every broadcast is then a no-op.
            raise WeightTransferError(f"{what}: PyNccl is off (VLLM_DISABLE_PYNCCL, or libnccl cannot be loaded)")
        if closed or deadline.over:
            communicator.destroy()
        return communicator, store_group

    communicator, store_group = call_within(connect, deadline, closed, what)
    return NcclGroup(communicator, store_group, name, rank, world_size)


def _vllm(name: str) -> Any:
    """A class of vLLM's; where releases keep it is known to the engine's `compat` alone, which is light to import."""
    from pods_cluster.generation.engines.vllm import compat

    try:
        return compat.lookup(name)
    except ImportError as error:
        raise WeightTransferError(
            f"{name}: cannot be imported ({error}); weights.transport: nccl needs vllm in this process's environment"
        ) from error


def _whole_seconds(deadline: Deadline) -> int:
    return max(1, round(deadline.left()))
