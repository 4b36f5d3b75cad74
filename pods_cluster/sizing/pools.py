"""The pools as live scaling sees them: protocols of what it asks of the generators, the learners and the publisher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from pods_cluster.generation.messages import Failure, WorkerStatus
from pods_cluster.telemetry.recorder import Level
from pods_cluster.weights.broadcast import PublishReport

WorkerHandle: TypeAlias = Any
"""Actor handle of a generator worker: passed on to the publisher, and otherwise opaque."""
RankHandle: TypeAlias = Any
"""Actor handle of a learner rank: passed on to the publisher, and otherwise opaque."""


class Notice(Protocol):
    """Tells people that something happened: an event of the run."""

    def __call__(self, kind: str, text: str, *, level: Level = "info") -> None: ...


class ScalablePool(Protocol):
    """The membership of the generator pool; see `pods_cluster/generation/members.py`."""

    @property
    def serving(self) -> Sequence[str]: ...

    def states(self) -> Mapping[str, WorkerStatus]: ...

    async def prepare(self, placement: float) -> str: ...

    def prepared_worker(self, name: str) -> WorkerHandle: ...

    def admit(self, name: str) -> None: ...

    def withdraw(self, name: str) -> None: ...

    def retire(self, count: int) -> list[str]: ...

    def retire_workers(self, names: Sequence[str]) -> None: ...

    async def warned(self) -> Mapping[str, float | None]: ...

    async def drain(self, name: str, timeout: float) -> None: ...

    async def dismiss(self, name: str) -> Failure | None: ...


class ResizableLearners(Protocol):
    """A learner group that can get another size; see `pods_cluster/learning/learner_group.py`."""

    @property
    def workers(self) -> int: ...

    @property
    def handles(self) -> Sequence[RankHandle]: ...

    async def reserve(self, workers: int, timeout: float) -> None: ...

    def release(self) -> None: ...

    async def resize(self, workers: int, folder: Path) -> None: ...


class WeightPublisher(Protocol):
    """Sends weight versions from the learner ranks to generators; see `pods_cluster/weights/broadcast.py`."""

    async def publish(self, version: int, workers: Mapping[str, WorkerHandle]) -> PublishReport: ...

    async def use_ranks(self, ranks: Sequence[RankHandle]) -> None: ...

    async def close(self) -> None: ...
