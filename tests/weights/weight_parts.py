"""A model's parameters as a weight source, and learner rank and worker as Ray actors, around the real transport."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import ray
import torch

from pods_cluster.weights.fingerprint import fingerprints
from pods_cluster.weights.protocol import Invitation, TensorSpec, WeightTransferError, WeightUpdate, plan_buckets
from pods_cluster.weights.receiver import Receiver
from pods_cluster.weights.relay_plan import WorkerLocation
from pods_cluster.weights.sender import WeightSender

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    # Odd sizes of two dtypes in one bucket: a float32 tensor then starts at an address that is not its own multiple.
    "embed": ((301, 33), torch.bfloat16),
    "norm": ((33,), torch.float32),
    "up": ((77, 33), torch.float32),
    "scale": ((), torch.bfloat16),
    "down": ((33, 77), torch.bfloat16),
    "empty": ((0, 4), torch.float32),
    "head": ((301, 33), torch.float32),
}
BUCKET = 12_000


def make_tensors(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, (shape, dtype) in SHAPES.items()}


def make_update(version: int, timeout: float, specs: tuple[TensorSpec, ...] | None = None) -> WeightUpdate:
    specs = TensorSource(version).specs() if specs is None else specs
    return WeightUpdate(version, specs, plan_buckets(specs, BUCKET), timeout)


class TensorSource:
    """Whole tensors on one rank."""

    def __init__(self, version: int = 0) -> None:
        self.tensors = make_tensors(version)
        self.gathered: list[tuple[int, int]] = []

    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self.tensors.items()
        )

    def gather(self, start: int, stop: int) -> list[torch.Tensor]:
        self.gathered.append((start, stop))
        return list(self.tensors.values())[start:stop]


class ShardedSource(TensorSource):
    """Every rank holds each world_size-th tensor; `gather` is a collective of the default group, as under ZeRO-3."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size
        self.sleep = 0.0

    def gather(self, start: int, stop: int) -> list[torch.Tensor]:
        time.sleep(self.sleep)
        self.gathered.append((start, stop))
        full = []
        for place, tensor in list(enumerate(self.tensors.values()))[start:stop]:
            mine = place % self.world_size == self.rank
            part = (tensor.clone() if mine else torch.zeros_like(tensor)).reshape(-1)
            if part.numel():
                torch.distributed.all_reduce(part)
            full.append(part.reshape(tensor.shape))
        return full if self.rank == 0 else []


class Rank:
    """A learner rank: the weight part of its calls."""

    def __init__(self, rank: int, world_size: int, store: tuple[str, int] | None = None) -> None:
        self.rank, self.world_size = rank, world_size
        self.source = ShardedSource(rank, world_size)
        self.sender = WeightSender(self.source, rank, "127.0.0.1")

    def listen(self) -> int:
        from pods_cluster.weights.transport import bind

        with bind("127.0.0.1") as probe:
            return probe.getsockname()[1]

    def join(self, port: int) -> None:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=60),
        )

    def step(self, version: int, sleep: float = 0.0, odd: bool = False) -> None:
        """An optimiser step: other weights. `sleep`: how long each gather takes; `odd`: one is not as announced."""
        self.source.tensors = make_tensors(version)
        self.source.sleep = sleep
        if odd:
            self.source.tensors["up"] = self.source.tensors["up"].double()

    def gathers(self) -> int:
        return len(self.source.gathered)

    def pid(self) -> int:
        return os.getpid()

    def weights_specs(self) -> tuple[TensorSpec, ...]:
        return self.sender.specs()

    def weights_location(self) -> WorkerLocation:
        return WorkerLocation.current()

    def weights_open(self, *args: Any) -> tuple[str, int]:
        return self.sender.open(*args)

    def weights_connect(self, timeout: float) -> None:
        self.sender.connect(timeout)

    def weights_send(self, update: WeightUpdate) -> None:
        self.sender.send(update)

    @ray.method(concurrency_group="control")
    def weights_close(self) -> None:
        self.sender.close()

    def weights_fingerprints(self) -> dict[str, str]:
        return self.sender.fingerprints()


class Worker:
    """A generator worker: the weight part of its calls, and faults that a test asks for.

    `faults`: `at` (bucket), `act` ("die", "stop", "raise", "corrupt", "sleep"), `times` (how many updates), `seconds`.
    """

    def __init__(self) -> None:
        self.receiver: Receiver | None = None
        self.weights: dict[str, torch.Tensor] = {}
        self.version, self.closed = -1, True
        self.faults: dict[str, Any] = {}
        self.joined: list[str] = []
        self.location: WorkerLocation | None = None

    def fault(self, **faults: Any) -> None:
        self.faults = faults

    def pid(self) -> int:
        return os.getpid()

    def state(self) -> tuple[int, bool]:
        return self.version, self.closed

    def groups(self) -> list[str]:
        return self.joined

    def weights_location(self) -> WorkerLocation:
        return WorkerLocation.current() if self.location is None else self.location

    def move(self, location: WorkerLocation | None) -> None:
        self.location = location

    def role(self) -> tuple[int, str, tuple[int, ...]]:
        """Rank, hub and followers of the last invitation."""
        assert self.receiver is not None
        invitation = self.receiver.invitation
        return invitation.rank, invitation.hub, invitation.followers

    def connect(self, invitation: Invitation) -> None:
        self.disconnect()
        if self.faults.get("act") == "absent":
            raise WeightTransferError("this worker has no network")
        self.receiver = Receiver(invitation)
        self.receiver.connect()
        self.joined.append(invitation.name)

    def receive(self, update: WeightUpdate) -> None:
        if self.receiver is None:
            raise WeightTransferError("not connected")
        self.closed = True
        faulty = self.faults.get("times", 0) > 0
        if faulty:
            self.faults["times"] -= 1
        count = 0

        def sink(rows: list[tuple[TensorSpec, torch.Tensor]]) -> None:
            nonlocal count
            if faulty and count == self.faults["at"]:
                self.misbehave(rows)
            count += 1
            self.weights.update((spec.name, tensor.clone()) for spec, tensor in rows)

        self.receiver.receive(update, sink)
        self.version, self.closed = update.version, False

    def misbehave(self, rows: list[tuple[TensorSpec, torch.Tensor]]) -> None:
        match self.faults["act"]:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise MemoryError("no room for this bucket")
            case "corrupt":
                rows[0][1].view(torch.uint8).bitwise_xor_(1)
            case "sleep":
                time.sleep(self.faults["seconds"])

    def disconnect(self) -> None:
        receiver, self.receiver = self.receiver, None
        if receiver is not None:
            receiver.close()

    def fingerprints(self) -> dict[str, str]:
        return fingerprints(self.weights)
