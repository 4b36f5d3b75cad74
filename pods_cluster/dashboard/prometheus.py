"""`/metrics`: the newest values of runs that are being written, for Prometheus."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from pods_cluster import __version__
from pods_cluster.client.run_state import Status
from pods_cluster.dashboard.watcher import RunWatcher
from pods_cluster.telemetry.catalog import registry
from pods_cluster.telemetry.metric_registry import Kind, Metric

RECENT_SECONDS = 900.0
MAX_RUNS = 20
_PLACE = re.compile(r"<([a-z_]+)>")
_OTHER = re.compile(r"[^a-zA-Z0-9_]+")


def exposition(runs: RunWatcher, now: float) -> bytes:
    """The text of `/metrics`: of runs that are running, or were written within 15 minutes."""
    collector = CollectorRegistry(auto_describe=False)
    collector.register(_Runs(runs, now))
    return generate_latest(collector)


def series_name(name: str) -> tuple[str, dict[str, str], Metric | None]:
    """Prometheus name and labels of a metric; what stands in a family's places becomes labels.

    `rewards/math/mean` is `pods_rewards_mean{name="math"}`.
    """
    metric = registry.find(name)
    if metric is None or not metric.is_family:
        return "pods_" + _OTHER.sub("_", name).strip("_"), {}, metric
    places = _PLACE.findall(metric.name)
    parts = [re.escape(text) if index % 2 == 0 else r"(\S+)" for index, text in enumerate(_PLACE.split(metric.name))]
    if places and places[0] in metric.choices and len(places) > 1:
        parts[1] = "(" + "|".join(map(re.escape, metric.choices[places[0]])) + ")"
    found = re.fullmatch("".join(parts), name)
    labels = dict(zip(places, found.groups(), strict=True)) if found else {}
    return "pods_" + _OTHER.sub("_", _PLACE.sub("", metric.name)).strip("_"), labels, metric


class _Runs(Collector):
    def __init__(self, runs: RunWatcher, now: float) -> None:
        self._runs = runs
        self._now = now

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        build = GaugeMetricFamily("pods_dashboard_info", "Version of the dashboard.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build
        states = self._runs.states()
        yield GaugeMetricFamily("pods_dashboard_runs", "Runs that the dashboard sees.", value=len(states))
        recent = [
            found
            for found in states
            if found.status == "running" or (found.updated is not None and self._now - found.updated < RECENT_SECONDS)
        ][:MAX_RUNS]
        state = GaugeMetricFamily("pods_run_state", "1 for the state that the run is in.", labels=["run", "state"])
        updated = GaugeMetricFamily("pods_run_updated_seconds", "When the run last wrote, Unix time.", labels=["run"])
        events = CounterMetricFamily("pods_run_events", "Events of the run by level.", labels=["run", "level"])
        restarts = CounterMetricFamily(
            "pods_run_restarts", "Times that the run began to put another learner group, selector or pool in place of a "
            "lost one.", labels=["run"]
        )  # fmt: skip
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for found in recent:
            try:
                view = self._runs.get(found.id)
            except KeyError:  # went away since
                continue
            with view.lock:
                latest = view.history.columns.latest()
                counts = [name for name in latest if (m := registry.find(name)) is not None and m.kind is Kind.COUNT]
                totals = view.history.totals(counts)
                status, levels = view.status()[0], dict(view.levels)
                restarts.add_metric([found.id], view.kinds["restarting"])
            for name in get_args(Status):
                state.add_metric([found.id, name], float(name == status))
            if found.updated is not None:
                updated.add_metric([found.id], found.updated)
            for level in ("info", "warning", "error"):
                events.add_metric([found.id, level], levels.get(level, 0))
            for name, value in {**latest, "step": view.history.columns.last_step or 0}.items():
                self._add(families, found.id, name, totals.get(name), value)
        yield from (state, updated, events, restarts)
        yield from families.values()

    def _add(
        self,
        families: dict[str, GaugeMetricFamily | CounterMetricFamily],
        run: str,
        name: str,
        total: float | None,
        value: float,
    ) -> None:
        series, labels, metric = series_name(name)
        counts = metric is not None and metric.kind is Kind.COUNT
        if counts and total is None:  # not all steps are read yet: no counter at all rather than a wrong one
            return
        family = families.get(series)
        if family is None:
            kind = CounterMetricFamily if counts else GaugeMetricFamily
            meaning = (metric.meaning if metric is not None else "") or name
            family = families[series] = kind(series, meaning, labels=["run", *labels])
        if tuple(family._labelnames) == ("run", *labels):  # two metrics may fall together; the first one stands
            family.add_metric([run, *labels.values()], total if counts and total is not None else value)
