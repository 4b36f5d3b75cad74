"""The end of a run: what it made of the model, what it cost, where everything lies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pods_cluster.telemetry.catalog import STAGES
from pods_cluster.telemetry.figure import save_figures, stages_overlap
from pods_cluster.telemetry.health import Health
from pods_cluster.telemetry.health_rules import RULES
from pods_cluster.telemetry.run_folder import RunFolder
from pods_cluster.telemetry.step_record import Record, merge_steps
from pods_cluster.types import Fate
from pods_cluster.wording import counted

EVALS = {
    "eval/greedy_accuracy": "greedy accuracy",
    "eval/sampled_accuracy": "sampled accuracy",
    "eval/pass_at_k": "pass@k",
    "eval/reward": "evaluation reward",
}


@dataclass(frozen=True, slots=True)
class BeforeAfter:
    """A held-out measure at the first and the last evaluation, and its best."""

    before: float
    after: float
    best: float
    best_step: int


@dataclass(slots=True)
class Summary:
    """The content of summary.json. Shares are of 1; `seconds` is the time that the run worked (`elapsed`)."""

    run: str
    status: str
    steps: int
    seconds: float
    evaluations: dict[str, BeforeAfter] = field(default_factory=dict)
    reward_first: float | None = None
    """Mean training reward of the first tenth of the steps."""
    reward_last: float | None = None
    rollouts: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, float] = field(default_factory=dict)
    ratio: float | None = None
    token_ratio: float | None = None
    rates: dict[str, float] = field(default_factory=dict)
    stage_seconds: dict[str, float] = field(default_factory=dict)
    stage_shares: dict[str, float] = field(default_factory=dict)
    """Share of each stage in the sum over all stages."""
    stages_overlap: bool = False
    idle_shares: dict[str, float] = field(default_factory=dict)
    fates: dict[str, int] = field(default_factory=dict)
    settled: int = 0
    staleness_max: float | None = None
    weights_version: int | None = None
    sync_seconds: float | None = None
    """Mean a version."""
    health: list[dict[str, str]] = field(default_factory=list)
    """Findings that held at the end: `rule`, `level`, `text`, `advice`, and `link` to the paragraph that explains it."""
    health_shares: dict[str, float] = field(default_factory=dict)
    """Share of the steps in which each rule held, where it held at all."""
    pace: str = ""
    """Which pool set the pace at the end, and what would change that."""
    warnings: int = 0
    errors: int = 0
    folder: str | None = None
    model: str | None = None
    figures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def trained_nothing(self) -> bool:
        """Whether the run made steps and not one update: its model is the one that it began with."""
        return self.steps > 0 and self.weights_version == 0

    def as_dict(self) -> dict[str, Any]:
        """The summary as JSON takes it: no NaN, no infinity."""
        return _finite(asdict(self))


def summarize(
    records: Iterable[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]] = (),
    *,
    run: str = "run",
    status: str = "finished",
) -> Summary:
    """The summary of a run's standing step records and its events."""
    merged = merge_steps(records)
    summary = Summary(
        run=run,
        status=status,
        steps=max((record["step"] for record in merged), default=0),
        seconds=max((record.get("elapsed", 0.0) for record in merged), default=0.0),
    )
    for name in EVALS:
        series = _series(merged, name)
        if series:
            best_step, best = max(series, key=lambda point: point[1])
            summary.evaluations[name] = BeforeAfter(series[0][1], series[-1][1], best, best_step)
    rewards = [value for _, value in _series(merged, "reward")]
    if rewards:
        tenth = max(len(rewards) // 10, 1)
        summary.reward_first, summary.reward_last = _mean(rewards[:tenth]), _mean(rewards[-tenth:])
    for kind in ("generated", "scored", "selected", "trained", "excluded", "aborted", "lost", "stale"):
        _put(summary.rollouts, kind, _total(merged, f"rollouts/{kind}"))
    for kind in ("sampled", "trained", "aborted", "saved", "prompt"):
        _put(summary.tokens, kind, _total(merged, f"tokens/{kind}"))
    summary.ratio = _ratio(summary.rollouts.get("scored"), summary.rollouts.get("trained"))
    summary.token_ratio = _ratio(summary.tokens.get("sampled"), summary.tokens.get("trained"))
    stepping = _total(merged, "timing_s/step")
    if stepping:
        _put(summary.rates, "rollouts_per_second", _ratio(summary.rollouts.get("generated"), stepping))
        _put(summary.rates, "updates_per_second", _ratio(_total(merged, "updates"), stepping))
    for stage in STAGES:
        _put(summary.stage_seconds, stage, _total(merged, f"timing_s/{stage}"))
    spent = sum(summary.stage_seconds.values())
    if spent:
        summary.stage_shares = {stage: seconds / spent for stage, seconds in summary.stage_seconds.items()}
    summary.stages_overlap = stages_overlap(merged)
    for pool in ("generator", "learner"):
        _put(summary.idle_shares, pool, _weighted(merged, f"{pool}/idle_share", "timing_s/step"))
    for fate in Fate:
        total = _total(merged, f"groups/{fate.value}")
        if total is not None:
            summary.fates[fate.value] = round(total)
    summary.settled = round(_total(merged, "groups/settled") or 0)
    stale = [value for _, value in _series(merged, "staleness/max")]
    summary.staleness_max = max(stale, default=None)
    versions = [value for _, value in _series(merged, "weights/version")]
    summary.weights_version = int(max(versions)) if versions else None
    syncs = [value for _, value in _series(merged, "weights/sync_seconds")]
    summary.sync_seconds = _mean(syncs) if syncs else None
    _add_health(summary, merged)
    summary.warnings = sum(event.get("level") == "warning" for event in events)
    summary.errors = sum(event.get("level") == "error" for event in events)
    summary.notes += _failed_rewards(merged, events)
    if summary.trained_nothing:
        fates = ", ".join(f"{count:,} {fate}" for fate, count in summary.fates.items() if count) or "none came"
        summary.notes.append(
            f"nothing was trained in {counted(summary.steps, 'step')} (groups: {fates}): the model is the one that the run "
            f"began with"
        )
    return summary


def _failed_rewards(records: Sequence[Record], events: Sequence[Mapping[str, Any]]) -> list[str]:
    """A note for each reward and kind of failure: how often, and the error that the newest event names."""
    prefix = "scoring/failures/"
    told = {
        f"{prefix}{event.get('failure')}/{event.get('reward')}": event
        for event in events
        if event.get("kind") == "reward_failed"
    }
    names = sorted({name for record in records for name in record if name.startswith(prefix)} | set(told))
    notes = []
    for name in names:
        kind, _, reward = name.removeprefix(prefix).partition("/")
        event = told.get(name, {})
        count = max(int(_total(records, name) or 0), int(event.get("count", 0)))
        if count:
            message = f": {event['message']}" if event.get("message") else ""
            notes.append(f"reward {reward!r} gave no number for {counted(count, 'rollout')} ({kind}){message}")
    return notes


def write_summary(folder: RunFolder, *, status: str = "finished") -> Summary:
    """Read the run's folder, draw its figures, write summary.json and return the summary.

    A figure or file that cannot be written is named in `notes`: a run that has ended well does not fail on its summary.
    """
    records = folder.read_metrics()
    summary = summarize(records, folder.read_events(), run=folder.name, status=status)
    summary.folder = str(folder.path)
    if folder.model.is_dir() and any(folder.model.iterdir()):
        summary.model = str(folder.model)
    try:
        summary.figures = [str(path) for path in save_figures(records, folder.figures, title=folder.name)]
    except Exception as error:  # a broken font cache, a full disk: nothing that the run did
        summary.notes.append(f"no figure: {type(error).__name__}: {error}")
    try:
        folder.write_summary(summary.as_dict())
    except OSError as error:
        summary.notes.append(f"summary.json could not be written: {error.strerror or error}")
    return summary


def _add_health(summary: Summary, records: Sequence[Record]) -> None:
    finite = [{name: value for name, value in record.items() if _is_finite(value)} for record in records]
    health = Health.after(finite)
    summary.health = [asdict(finding) | {"link": finding.link} for finding in health.findings]
    summary.pace = health.pace
    for rule in RULES:
        held = [value for _, value in _series(records, f"health/{rule.name}")]
        if any(held):
            summary.health_shares[rule.name] = _mean(held)


def _series(records: Sequence[Record], name: str) -> list[tuple[int, float]]:
    """(step, value) where the metric has a finite value."""
    return [(record["step"], float(record[name])) for record in records if _is_finite(record.get(name))]


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _total(records: Sequence[Record], name: str) -> float | None:
    values = [value for _, value in _series(records, name)]
    return sum(values) if values else None


def _weighted(records: Sequence[Record], name: str, weight: str) -> float | None:
    """Mean of a gauge over the time of its steps."""
    weights = dict(_series(records, weight))
    pairs = [(value, weights.get(step, 0.0)) for step, value in _series(records, name)]
    total = sum(weight for _, weight in pairs)
    if total > 0:
        return sum(value * weight for value, weight in pairs) / total
    return _mean([value for value, _ in pairs]) if pairs else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _ratio(made: float | None, trained: float | None) -> float | None:
    return made / trained if made is not None and trained else None


def _put(target: dict[str, float], name: str, value: float | None) -> None:
    if value is not None:
        target[name] = value


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
