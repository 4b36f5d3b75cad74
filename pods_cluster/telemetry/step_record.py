"""Records of a run: step records, events and samples of rollouts, and how lines of a resumed run are read."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pods_cluster.telemetry.metric_registry import MetricValueError
from pods_cluster.types import Fate, GroupId, Rollout

Record = dict[str, Any]
"""A step record as it is written: `step`, `time`, `elapsed`, and metrics by name."""

RESERVED = ("step", "time", "elapsed", "nonfinite", "marker")
MAX_TEXT = 20_000
"""Longest text of a sample, in characters; longer ones are cut in the middle."""


class Feed(NamedTuple):
    """Answer of `Recorder.poll`: pass `cursor` to the next call. `items` are ("step" | "event", record) pairs in order;
    `missed` counts those that were forgotten before this call.
    """

    cursor: int
    items: list[tuple[str, Record]]
    missed: int


def number(name: str, value: Any) -> int | float | None:
    """A metric's value as a plain number (None stays None: no value this step).

    Takes ints, bools, floats and whatever converts by itself (numpy and torch scalars). Floats keep nine digits: enough
    for every curve, and lines half as long. Raises MetricValueError.
    """
    if value is None:
        return None
    if isinstance(value, str):
        raise MetricValueError(f"{name}: {value!r} is a text; a metric is a number")
    with contextlib.suppress(TypeError):
        return operator.index(value)  # whole numbers keep all their digits
    try:
        result = float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise MetricValueError(f"{name}: {value!r} is a {type(value).__name__}; a metric is a number") from None
    if not math.isfinite(result):
        return result
    return float(f"{result:.9g}")


def step_record(step: int, values: Mapping[str, Any], *, time: float, elapsed: float) -> Record:
    """The line of one step. Values that are None are left out; NaN and infinities become null, named in `nonfinite`.

    Raises MetricValueError for a value that is no number, and for a value under a reserved name.
    """
    record: Record = {"step": int(step), "time": round(time, 3), "elapsed": round(elapsed, 3)}
    nonfinite: dict[str, str] = {}
    for name, raw in values.items():
        if name in RESERVED:
            raise MetricValueError(f"{name}: is set by the recorder; leave it out of the values")
        value = number(name, raw)
        if value is None:
            continue
        if isinstance(value, float) and not math.isfinite(value):
            nonfinite[name] = str(value)
            value = None
        record[name] = value
    if nonfinite:
        record["nonfinite"] = nonfinite
    return record


def restore(record: Mapping[str, Any]) -> Record:
    """A line as read, its NaN and infinities put back."""
    nonfinite = record.get("nonfinite")
    restored = {name: value for name, value in record.items() if name != "nonfinite"}
    if isinstance(nonfinite, dict):
        restored |= {name: float(text) for name, text in nonfinite.items()}
    return restored


def resume_marker(step: int, time: float) -> Record:
    """The line that takes back all earlier ones of steps above `step`."""
    return {"marker": "resumed_from", "step": int(step), "time": round(time, 3)}


def drop_superseded(lines: Iterable[Mapping[str, Any]]) -> list[Record]:
    """The lines that stand, in order: what a resume took back is left out, and the markers with it."""
    standing: list[Record] = []
    for line in lines:
        if "marker" in line:
            if line["marker"] == "resumed_from":
                standing = [old for old in standing if old.get("step", 0) <= line["step"]]
        elif isinstance(line.get("step"), int):
            standing.append(restore(line))
    return standing


def merge_steps(records: Iterable[Mapping[str, Any]]) -> list[Record]:
    """One record a step, in rising step: a step may be told in parts (its training, then its evaluation)."""
    merged: dict[int, Record] = {}
    for record in records:
        merged.setdefault(record["step"], {}).update(record)
    return [merged[step] for step in sorted(merged)]


@dataclass(slots=True)
class SampleGroup:
    """A whole group for people to read: prompt, completions, rewards by part, which were kept and why.

    `kept` are indices; `fate` is None while it is not known yet; `reason` says in words why these were kept.
    """

    group: GroupId
    prompt: str
    rollouts: Sequence[Rollout]
    kept: Collection[int] = ()
    answer: str | None = None
    fate: Fate | None = None
    rule: str = ""
    reason: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


def sample_record(step: int, sample: SampleGroup, *, time: float, elapsed: float) -> Record:
    """The line of one group in `samples.jsonl`."""
    kept = set(sample.kept)
    return {
        "step": int(step),
        "time": round(time, 3),
        "elapsed": round(elapsed, 3),
        "group": str(sample.group),
        "prompt": cut(sample.prompt),
        "answer": None if sample.answer is None else cut(sample.answer),
        "fate": None if sample.fate is None else sample.fate.value,
        "rule": sample.rule,
        "reason": sample.reason,
        "rollouts": [
            {
                "index": rollout.index,
                "kept": rollout.index in kept,
                "reward": _finite(rollout.reward),
                "parts": {name: _finite(value) for name, value in rollout.reward_parts.items()},
                **({"errors": [cut(text) for text in rollout.reward_errors]} if rollout.reward_errors else {}),
                "length": rollout.sampled_tokens,
                **({"turns": rollout.turns} if rollout.turns > 1 else {}),
                "finish_reason": rollout.finish_reason.value,
                "versions": [rollout.first_version, rollout.last_version],
                **({"spans": rollout.spans} if len(rollout.spans) > 1 else {}),
                "text": cut(rollout.text),
            }
            for rollout in sorted(sample.rollouts, key=lambda rollout: rollout.index)
        ],
        **sample.fields,
    }


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def cut(text: str, limit: int = MAX_TEXT) -> str:
    """The text, its middle left out where it is longer than `limit` characters; lone surrogates replaced."""
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"
    return text.encode("utf-8", "replace").decode("utf-8")
