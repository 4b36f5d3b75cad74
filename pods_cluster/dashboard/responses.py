"""Answers of the API, made from views of runs."""

from __future__ import annotations

from typing import Any

from pods_cluster.client.run_state import last_written
from pods_cluster.dashboard import guide, schemas
from pods_cluster.dashboard.journal import EventEntry, SampleEntry
from pods_cluster.dashboard.run_view import RunView
from pods_cluster.telemetry.catalog import registry
from pods_cluster.telemetry.health_report import HealthReport
from pods_cluster.telemetry.metric_registry import Kind

_SECTIONS = {metric.name: title for title, metrics in registry.sections.items() for metric in metrics}


def live(view: RunView) -> dict[str, Any]:
    """The fields of `schemas.Live`."""
    with view.lock:
        columns = view.history.columns
        status, text = view.status()
        values = columns.latest()
        return {
            "status": status,
            "status_text": text,
            "step": columns.last_step,
            "elapsed": values.get("elapsed"),
            "updated": last_written(view.folder),
            "progress": view.history.progress,
            "latest": values,
            "totals": view.history.totals([name for name in columns.names if _is_count(name)]),
            "rates": view.history.rates(),
            "health": health(view.history.health()),
            "reward_failures": [reward_failure(event) for event in view.reward_failures.values()],
            "worker_events": view.worker_events[-20:],
            "samples": len(view.samples.entries),
            "events": len(view.events.entries),
            "warnings": view.levels["warning"],
            "errors": view.levels["error"],
        }


def health(report: HealthReport | None) -> dict[str, Any] | None:
    """The fields of `schemas.RunHealth`; links lead to the guide that this server has."""
    if report is None:
        return None
    found = report.as_dict()
    for finding in found["findings"]:
        finding["link"] = f"{guide.PATH}#{finding['rule']}"
    return found


def reward_failure(event: dict[str, Any]) -> dict[str, Any]:
    """The fields of `schemas.RewardFailure`."""
    return {
        "reward": text(event.get("reward")),
        "failure": text(event.get("failure")),
        "count": whole(event.get("count")),
        "share": number(event.get("share")),
        "message": text(event.get("message")),
    }


def _is_count(name: str) -> bool:
    metric = registry.find(name)
    return metric is not None and metric.kind is Kind.COUNT


def metric(name: str) -> schemas.MetricInfo:
    metric = registry.find(name)
    if metric is None:
        return schemas.MetricInfo(name=name, unit="", meaning="", kind="unknown", section="Other")
    section = _SECTIONS.get(metric.name, "Other")
    return schemas.MetricInfo(
        name=name, unit=metric.unit, meaning=metric.meaning, kind=metric.kind.value, section=section
    )


def event(entry: EventEntry, line: dict[str, Any]) -> schemas.Event:
    known = ("time", "elapsed", "step", "kind", "level", "text")
    return schemas.Event(
        id=entry.offset,
        time=number(line.get("time")),
        elapsed=number(line.get("elapsed")),
        step=entry.step,
        kind=entry.kind,
        level=entry.level,  # type: ignore[arg-type]
        text=text(line.get("text")),
        fields={name: value for name, value in line.items() if name not in known},
    )


def sample(entry: SampleEntry) -> schemas.SampleItem:
    return schemas.SampleItem(
        id=entry.offset,
        step=entry.step,
        group=entry.group,
        rollouts=entry.rollouts,
        kept=entry.kept,
        reward_mean=entry.mean,
        reward_std=entry.spread,
        rule=entry.rule,
        fate=entry.fate,
    )


def rollout(row: dict[str, Any]) -> schemas.SampleRollout:
    parts, versions, errors = row.get("parts"), row.get("versions"), row.get("errors")
    return schemas.SampleRollout(
        index=whole(row.get("index")),
        kept=row.get("kept") is True,
        reward=number(row.get("reward")),
        parts={str(name): number(value) for name, value in parts.items()} if isinstance(parts, dict) else {},
        errors=[text(error) for error in errors] if isinstance(errors, list) else [],
        length=whole(row.get("length")),
        finish_reason=text(row.get("finish_reason")),
        versions=[whole(version) for version in versions] if isinstance(versions, list) else [],
        text=text(row.get("text")),
    )


def number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e300 else None


def whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def text(value: Any) -> str:
    return "" if value is None else str(value)
