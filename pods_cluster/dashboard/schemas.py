"""Requests and responses of the API."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from pods_cluster.client.run_state import Status

Number = float | None


class Problem(BaseModel):
    """Why a request was refused."""

    detail: str


class Health(BaseModel):
    status: Literal["ok"] = "ok"
    version: str
    runs: int
    listeners: int


class RunItem(BaseModel):
    """A run in the list."""

    id: str
    folder: str
    status: Status
    status_text: str
    step: int | None
    steps: int | None = Field(description="Steps planned (`run.steps`).")
    updated: Number = Field(description="When the run last wrote, Unix time.")
    elapsed: Number = Field(description="Seconds that the run has been working.")
    reward: Number = None
    ratio: Number = Field(None, description="Rollouts per trained rollout, over the run.")


class RunList(BaseModel):
    runs: list[RunItem]


class MetricInfo(BaseModel):
    """A metric that the run has told."""

    name: str
    unit: str
    meaning: str
    kind: Literal["gauge", "count", "counter", "unknown"]
    section: str


class Nonfinite(BaseModel):
    """Values of a metric that were NaN or infinite."""

    metric: str
    count: int
    last_step: int


class Finding(BaseModel):
    """A finding of one of the health rules."""

    rule: str
    level: Literal["info", "warning", "error"]
    text: str
    advice: str
    link: str = Field(description="The rule's paragraph in the guide, on this server.")


class RunHealth(BaseModel):
    """The health rules' report on the newest ten steps, as in `pods status`."""

    line: str = Field(description="The worst finding and what to do about it, or that the run is healthy.")
    level: Literal["info", "warning", "error"]
    pace: str = Field(description="Which pool sets the pace, and what would change that; empty while it is not known.")
    findings: list[Finding]


class RewardFailure(BaseModel):
    """A reward that gave no number, by kind of failure."""

    reward: str
    failure: str
    count: int = Field(description="How often, when it was told last.")
    share: Number = Field(description="Share of all scorings until then.")
    message: str = Field(description="The newest error, with its file and line.")


class Live(BaseModel):
    """Values that change from step to step; the stream tells them too."""

    status: Status
    status_text: str
    step: int | None
    elapsed: Number
    updated: Number
    progress: float = Field(description="Share of the metrics file that was read; below 1 curves are a sample.")
    latest: dict[str, float] = Field(description="Newest value of each metric.")
    totals: dict[str, float] = Field(description="Sums of counts over the run.")
    rates: dict[str, float] = Field(description="Rates a second and the ratio over the last 20 steps.")
    health: RunHealth | None = Field(description="null before the first step.")
    reward_failures: list[RewardFailure]
    worker_events: list[dict[str, Any]] = Field(description="Newest events about workers that failed or were replaced.")
    samples: int
    events: int
    warnings: int
    errors: int


class RunDetail(Live):
    """One run."""

    id: str
    folder: str
    steps: int | None
    rows: int = Field(description="Steps with a record.")
    has_summary: bool = Field(description="The run has ended and left a summary.")
    bad_lines: int = Field(description="Lines that could not be read.")
    metrics: list[MetricInfo]
    nonfinite: list[Nonfinite]


class SeriesCurve(BaseModel):
    """Values by bucket, null where there is none; `low` and `high` only where a bucket holds several steps."""

    mean: list[Number]
    low: list[Number] | None = None
    high: list[Number] | None = None


class Series(BaseModel):
    """Curves over shared buckets."""

    run: str
    axis: Literal["step", "elapsed", "time", "num_tokens"]
    x: list[Number]
    bucket: int = Field(description="Steps a bucket.")
    rows: int = Field(description="Steps in the range.")
    last_step: int | None = Field(description="The newest step that is known, in the range or not.")
    progress: float = Field(description="Share of the metrics file that was read; below 1 the curves are a sample.")
    series: dict[str, SeriesCurve]


class Latest(BaseModel):
    """The newest step record."""

    run: str
    record: dict[str, float]


class Event(BaseModel):
    id: int = Field(description="Place in events.jsonl.")
    time: Number = None
    elapsed: Number = None
    step: int | None = None
    kind: str
    level: Literal["info", "warning", "error"]
    text: str
    fields: dict[str, Any] = Field(default_factory=dict)


class EventPage(BaseModel):
    """Newest first; pass the last one's id as `before` for older ones."""

    run: str
    total: int
    events: list[Event]
    more: bool


class SampleItem(BaseModel):
    """A sampled group in the list."""

    id: int = Field(description="Place in samples.jsonl.")
    step: int
    group: str
    rollouts: int
    kept: int
    reward_mean: Number
    reward_std: Number
    rule: str
    fate: str | None = Field(description="What became of the group; null in runs of older versions.")


class SamplePage(BaseModel):
    """Newest first; pass the last one's id as `before` for older ones."""

    run: str
    total: int
    samples: list[SampleItem]
    more: bool


class SampleRollout(BaseModel):
    index: int
    kept: bool
    reward: Number
    parts: dict[str, Number]
    errors: list[str] = Field(description="Rewards that gave no number, each with its error.")
    length: int
    finish_reason: str
    versions: list[int]
    text: str


class SampleDetail(BaseModel):
    """A whole group: every completion, kept or not. Texts are as the model wrote them: never treat them as markup."""

    id: int
    run: str
    step: int
    time: Number
    group: str
    prompt: str
    answer: str | None
    fate: str | None
    rule: str
    reason: str
    rollouts: list[SampleRollout]
    fields: dict[str, Any]


class RunConfigText(BaseModel):
    """The resolved configuration; values under names that tell of secrets are hidden."""

    run: str
    text: str
    config: dict[str, Any]


class RunSummary(BaseModel):
    run: str
    summary: dict[str, Any] = Field(description="summary.json as the run left it.")
