"""The health of a run as its folder shows it, live or ended: read from the newest records and events alone."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from pods_cluster.telemetry.health import LEVELS, Health, health_line, worst_level
from pods_cluster.telemetry.health_rules import RULES, Finding, Level
from pods_cluster.telemetry.line_tail import last_objects
from pods_cluster.telemetry.run_folder import RunFolder
from pods_cluster.telemetry.step_record import drop_superseded

READ_BYTES = 512 * 1024
"""Read of the end of each file: more than ten steps, whatever a step's record holds."""


@dataclass(frozen=True, slots=True)
class HealthReport:
    """The findings of the rules in a run's newest steps, which pool sets the pace, and both in one line."""

    line: str
    level: Level
    pace: str = ""
    findings: list[Finding] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON takes it; each finding with the link to its paragraph."""
        found = [asdict(finding) | {"link": finding.link} for finding in self.findings]
        return {"line": self.line, "level": self.level, "pace": self.pace, "findings": found}


def read_health(folder: RunFolder) -> HealthReport | None:
    """The health at the newest step of a run's folder; None before its first step.

    The recorder's verdict on each rule stands in the newest record. The numbers are computed again from the last steps;
    rules that look back further than what is read (trends of the whole run) have theirs from the event that told them.
    """
    records = [_numbers(record) for record in drop_superseded(last_objects(folder.metrics, READ_BYTES))]
    steps = [record for record in records if "timing_s/step" in record]
    if not steps:
        return None
    fresh = Health.after(steps)
    found = {finding.rule: finding for finding in fresh.findings}
    newest = steps[-1]
    if any(f"health/{rule.name}" in newest for rule in RULES):
        told = _told(folder)
        found = {
            rule.name: finding
            for rule in RULES
            if newest.get(f"health/{rule.name}") and (finding := found.get(rule.name) or told.get(rule.name))
        }
    findings = list(found.values())
    return HealthReport(health_line(findings, fresh.pace), worst_level(findings), fresh.pace, findings)


def _told(folder: RunFolder) -> dict[str, Finding]:
    """The newest finding of each rule among the run's events."""
    found: dict[str, Finding] = {}
    for event in last_objects(folder.events, READ_BYTES):
        rule, advice, level = event.get("rule"), str(event.get("advice", "")), event.get("level")
        if event.get("kind") == "health" and isinstance(rule, str) and level in LEVELS:
            found[rule] = Finding(rule, level, str(event.get("text", "")).removesuffix(f"; {advice}"), advice)
    return found


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in record.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }
