"""The stages of a run as its loop sees them: protocols, so that any implementation of them can drive the loop.

What a stage answers is a dataclass of its own room, never a dict. Actor handles (`WorkerHandle`, `RankHandle`) are
opaque: the loop only passes them from a pool to the publisher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from pods_cluster.generation.messages import EvalRow, Failure, Portion
from pods_cluster.generation.pool_stats import PoolStats
from pods_cluster.learning.reports import RankInfo, StepResult
from pods_cluster.scoring.scoring_totals import ScoringTotals
from pods_cluster.selection.selector_core import Decision
from pods_cluster.selection.stopping import Instructions
from pods_cluster.sizing.pools import ResizableLearners, ScalablePool, WeightPublisher, WorkerHandle
from pods_cluster.types import GroupId, Prompt, Rollout, SamplingParams, Selection
from pods_cluster.weights.broadcast import PublishReport


class Generators(ScalablePool, Protocol):
    """The generator pool; see `pods_cluster/generation/pool.py`."""

    @property
    def workers(self) -> Mapping[str, WorkerHandle]: ...

    @property
    def scoring(self) -> ScoringTotals: ...

    async def submit(self, portions: Sequence[Portion]) -> None: ...

    async def wait_for_room(self, places: int, timeout: float) -> int: ...

    async def abort(self, groups: Sequence[GroupId]) -> None: ...

    async def keep(self, selections: Sequence[Selection]) -> None: ...

    async def drop(self, groups: Sequence[GroupId]) -> None: ...

    async def sample(self, group: GroupId) -> list[Rollout]: ...

    async def evaluate(self, prompts: Sequence[Prompt], sampling: SamplingParams, samples: int) -> list[EvalRow]: ...

    async def check(self) -> list[Failure]: ...

    async def observe(self) -> None: ...

    async def fail(self, worker: str, reason: str) -> list[Failure]: ...

    async def replace(self, worker: str) -> str: ...

    async def stats(self) -> PoolStats: ...

    async def close(self) -> None: ...


class Selector(Protocol):
    """The selector; see `pods_cluster/run/selector_handle.py`."""

    async def expect(self, groups: Sequence[tuple[GroupId, int]]) -> list[int]: ...

    async def instructions(self, timeout: float) -> Instructions: ...

    async def collect(self, want: int, version: int, timeout: float) -> Decision: ...

    async def mark_lost(self, worker: str) -> None: ...

    async def cancel(self, groups: Sequence[GroupId]) -> None: ...


class Learners(ResizableLearners, Protocol):
    """The learner group; see `pods_cluster/learning/learner_group.py`."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def infos(self) -> Sequence[RankInfo]: ...

    async def train(self, selections: list[Selection], step: int) -> StepResult: ...

    async def save(self, path: Path) -> None: ...

    async def load(self, path: Path) -> None: ...

    async def export(self, path: Path) -> list[str]: ...

    async def close(self) -> None: ...


class Publisher(WeightPublisher, Protocol):
    """The broadcaster of weights; see `pods_cluster/weights/broadcast.py`."""

    async def catch_up(self, version: int, name: str, worker: WorkerHandle) -> PublishReport: ...
