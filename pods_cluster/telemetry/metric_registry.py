"""Metrics, and a registry of them that refuses other names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    """The kinds of a metric: how values of several steps go together."""

    GAUGE = "gauge"
    """A value of this step; means make sense, sums do not."""
    COUNT = "count"
    """The amount of this step alone; the sum over the steps is the run's."""
    COUNTER = "counter"
    """The run's amount so far; only grows."""


class UnknownMetric(ValueError):
    """A name that is not in the registry. The text names the closest ones."""


class MetricValueError(ValueError):
    """A value that is not a number."""


_PLACEHOLDER = re.compile(r"<([a-z_]+)>")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, or with `<place>`s in its name a family of them.

    `choices` lists what may stand in a place; a place without choices takes any text without white space.
    `origin` says whose name it is where it is not ours (TRL, verl, prime-rl).
    """

    name: str
    unit: str
    meaning: str
    kind: Kind = Kind.GAUGE
    origin: str = ""
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def is_family(self) -> bool:
        return "<" in self.name

    def expression(self) -> re.Pattern[str]:
        """The pattern of the family's names."""
        parts = _PLACEHOLDER.split(self.name)
        for index, text in enumerate(parts):
            if index % 2 == 0:
                parts[index] = re.escape(text)
            elif text in self.choices:
                parts[index] = "(?:" + "|".join(re.escape(choice) for choice in self.choices[text]) + ")"
            else:
                parts[index] = r"\S+"
        return re.compile("".join(parts))


class Registry:
    """Metrics by name. Sections order the documentation."""

    def __init__(self, sections: Mapping[str, Iterable[Metric]]) -> None:
        self.sections: dict[str, list[Metric]] = {}
        self._exact: dict[str, Metric] = {}
        self._families: list[tuple[re.Pattern[str], Metric]] = []
        self._known: dict[str, Metric | None] = {}
        for title, metrics in sections.items():
            for metric in metrics:
                self.register(metric, section=title)

    def register(self, metric: Metric, *, section: str = "Other") -> None:
        """Add a metric, as a plug-in does. Raises ValueError if the name is taken or documents too little."""
        if not re.fullmatch(r"[A-Za-z0-9_<>/.:-]+", metric.name):
            raise ValueError(f"{metric.name!r} cannot name a metric: use letters, digits and _ / . : -")
        if not metric.meaning:
            raise ValueError(f"{metric.name}: a metric needs a meaning; say what it measures, over what")
        if metric.name in self._exact or any(other.name == metric.name for _, other in self._families):
            raise ValueError(f"{metric.name}: is registered already; give the new metric another name")
        if metric.is_family:
            self._families.append((metric.expression(), metric))
        else:
            self._exact[metric.name] = metric
        self.sections.setdefault(section, []).append(metric)
        self._known.clear()

    def find(self, name: str) -> Metric | None:
        """The metric or family of a name; None if there is none."""
        exact = self._exact.get(name)
        if exact is not None:
            return exact
        if name not in self._known:
            if len(self._known) > 10_000:  # names come from users' rewards: do not grow for ever
                self._known.clear()
            self._known[name] = next((m for pattern, m in self._families if pattern.fullmatch(name)), None)
        return self._known[name]

    def __getitem__(self, name: str) -> Metric:
        metric = self.find(name)
        if metric is None:
            raise UnknownMetric(self._explain(name))
        return metric

    def __contains__(self, name: str) -> bool:
        return self.find(name) is not None

    def __iter__(self) -> Iterator[Metric]:
        for metrics in self.sections.values():
            yield from metrics

    def unknown(self, record: Mapping[str, object]) -> list[str]:
        """The names of a record that no metric has."""
        return [name for name in record if self.find(name) is None]

    def check(self, record: Mapping[str, object]) -> None:
        """Raise UnknownMetric if a name of the record is not registered."""
        names = self.unknown(record)
        if names:
            raise UnknownMetric("; ".join(self._explain(name) for name in names))

    def _explain(self, name: str) -> str:
        close = difflib.get_close_matches(name, [metric.name for metric in self], n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "add it to pods_cluster/telemetry/catalog.py"
        return f"{name!r} is not a registered metric; {hint}"

    def markdown(self) -> str:
        """The reference page: one table a section."""
        lines = [
            "# Metrics",
            "",
            "<!-- Made by `python -m pods_cluster.telemetry.catalog > docs/metrics.md`; do not edit. -->",
            "",
            "Every line of a run's `metrics.jsonl` is one JSON object with some of these names. A **gauge** is a value "
            "of the step, a **count** the amount of that step alone (sum the steps for the run's), a **counter** the "
            "run's amount so far. A value that is not finite is `null` and named under `nonfinite`. After `--resume` a "
            'line `{"marker": "resumed_from", "step": s}` takes back the earlier lines of steps above s.',
            "",
        ]
        for title, metrics in self.sections.items():
            lines += [f"## {title}", "", "| name | unit | kind | meaning | name from |", "|---|---|---|---|---|"]
            for metric in metrics:
                meaning = metric.meaning
                for place, choices in metric.choices.items():
                    meaning += f" {place}: " + ", ".join(f"`{choice}`" for choice in choices) + "."
                cells = (f"`{metric.name}`", metric.unit, metric.kind.value, meaning, metric.origin)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
            lines.append("")
        return "\n".join(lines).rstrip() + "\n"
