"""Requests to generator workers and their answers: plain values that travel between processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from pods_cluster.generation.engine import EngineStats
from pods_cluster.generation.thread_seconds import ThreadSeconds
from pods_cluster.scoring.scorer_stats import ScorerStats
from pods_cluster.telemetry.process_memory import ProcessMemory
from pods_cluster.types import GroupId, Prompt, RolloutRequest, SamplingParams


class GeneratorError(Exception):
    """A generator worker cannot serve, or cannot serve this; the text has the cause and the fix, if there is one."""


class WorkerFailed(GeneratorError):
    """The engine, the scorers or the reports of a generator worker have failed: another one has to take its place."""


class NoRoom(GeneratorError):
    """The cluster has no place for a worker."""


class NodeLost(GeneratorError):
    """A worker was lost while it started, with its node: Ray places workers on a node until it knows that it is gone."""


@dataclass(frozen=True, slots=True)
class Portion:
    """Rollouts start … stop - 1 of a group of `size`, to be made now; `length` tokens each are expected, if known."""

    group: GroupId
    prompt: Prompt
    size: int
    start: int
    stop: int
    length: float | None = None

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Rollouts `indices` of a group of `size`; the other indices may be with other workers."""

    group: GroupId
    prompt: Prompt
    indices: tuple[int, ...]
    size: int
    sampling: SamplingParams

    def requests(self) -> list[RolloutRequest]:
        return [RolloutRequest(self.group, index, self.prompt.token_ids, self.sampling) for index in self.indices]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker that has started."""

    name: str
    node: str
    pid: int
    engine: str
    version: int
    kind: str = ""
    """Kind of its node: the card's type and the labels that it was started with. Workers of one kind are as fast."""


class WorkerPhase(StrEnum):
    """The phases of a generator worker from its creation to its end, in the words that people read."""

    WAITING = "waiting for room"
    STARTING = "starting"
    READY = "ready"
    SERVING = "serving"
    LEAVING = "leaving"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker of the pool; `info` is None until it has started. `generated_tokens` are those since its start, `rate` the
    best tokens a second that it has kept up, both as of its last answer."""

    phase: WorkerPhase
    info: WorkerInfo | None = None
    generated_tokens: int = 0
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class EvalSample:
    """One scored completion. `text` may be cut; `tokens` counts the whole."""

    text: str
    reward: float | None
    parts: dict[str, float | None]
    tokens: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class EvalRow:
    """The completions of one held-out prompt, all made by weight version `version`."""

    epoch: int
    row: int
    version: int
    samples: tuple[EvalSample, ...]


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """A worker as it is now; counters since its start.

    `stored` rollouts (`stored_tokens` completion tokens) are finished and neither taken nor dropped; `scoring` ones
    wait for their reward. `tokens_per_second` is over the last second, `saturated` the best kept up while generating
    (see `RateMeter`). `occupied_seconds` is how long rollouts were in the engine or at the scorers,
    `only_scoring_seconds` how long at the scorers alone, `stalled_seconds` how long a busy engine has not finished one.
    `seconds` is what its engine's thread did; `staged` weight versions were taken beside its steps, in `staging_seconds`.
    `error` is what ended it. `turns` are the counts of `Turns`, empty without an environment.
    """

    name: str
    version: int
    closed: bool
    engine: EngineStats
    groups: int
    stored: int
    stored_tokens: int
    scoring: int
    reported: int
    scorers: ScorerStats | None
    scoring_seconds_mean: float
    scoring_seconds_max: float
    tokens_per_second: float
    saturated: float
    stalled_seconds: float
    occupied_seconds: float
    error: str | None
    only_scoring_seconds: float = 0.0
    seconds: ThreadSeconds = field(default_factory=ThreadSeconds)
    staged: int = 0
    staging_seconds: float = 0.0
    turns: dict[str, int] = field(default_factory=dict)
    memory: ProcessMemory = field(default_factory=ProcessMemory)


ENGINE_FAILED = "the engine failed"
"""The words with which a worker tells of an engine that raised."""


@dataclass(slots=True)
class Failure:
    """A generator worker that is gone or hangs: why, and which groups had rollouts in its memory or engine."""

    worker: str
    cause: str
    groups: list[GroupId] = field(default_factory=list)
    leaving: bool = False
    """It was on its way out of the pool: nobody takes its place."""

    @property
    def engine_raised(self) -> bool:
        """Whether the engine raised an error, which it may raise again, rather than lose its process by whatever chance."""
        return ENGINE_FAILED in self.cause
