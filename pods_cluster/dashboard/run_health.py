"""The health of a run from its columns: the rules of `telemetry.health_rules` on the newest steps."""

from __future__ import annotations

import numpy as np

from pods_cluster.dashboard.columns import Columns
from pods_cluster.telemetry.health import Health, health_line, worst_level
from pods_cluster.telemetry.health_report import HealthReport
from pods_cluster.telemetry.health_rules import RULES
from pods_cluster.telemetry.health_window import WINDOW

_WORK = "timing_s/step"
"""A row with this metric is a step; one without is an evaluation before the first."""


def health_of(columns: Columns) -> HealthReport | None:
    """The health at the newest step; None before the first one.

    Where the record has the recorder's own verdicts, `health/<rule>`, these say which rules hold.
    """
    work = columns.column(_WORK)
    steps = np.flatnonzero(np.isfinite(work)) if work is not None else np.zeros(0, np.int64)
    if not steps.size:
        return None
    earlier, last = steps[:-WINDOW], [columns.record(int(row)) for row in steps[-WINDOW:]]
    health = Health()
    for name, values in (("reward", health.window.rewards), ("entropy", health.window.entropies)):
        column = columns.column(name)
        if column is not None:
            before = column[earlier]
            values.extend(before[np.isfinite(before)].tolist())
    for record in last[:-1]:
        health.window.add(record)
    health.add(last[-1])
    findings = health.findings
    if any(f"health/{rule.name}" in last[-1] for rule in RULES):
        findings = [finding for finding in findings if last[-1].get(f"health/{finding.rule}")]
    return HealthReport(health_line(findings, health.pace), worst_level(findings), health.pace, findings)
