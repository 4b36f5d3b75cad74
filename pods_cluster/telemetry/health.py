"""Health of a run: what goes wrong in it by the rules of `health_rules`, and which pool sets the pace (pure).

A run can look busy and learn nothing: most groups without signal, completions cut off, rewards that fail. Feed records
in order; what holds now is `findings`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pods_cluster.telemetry.health_rules import RULES, Finding, Level, Rule
from pods_cluster.telemetry.health_window import Record, Window
from pods_cluster.telemetry.pace import pace_of

LEVELS: tuple[Level, ...] = ("info", "warning", "error")


class Health:
    """The findings of a run that is followed record by record."""

    def __init__(self, rules: Sequence[Rule] = RULES) -> None:
        self.rules = tuple(rules)
        self.window = Window()
        self.findings: list[Finding] = []

    @classmethod
    def after(cls, records: Iterable[Record]) -> Health:
        """The health after these records, judged once, at their end."""
        health = cls()
        health.remember(records)
        health._judge()
        return health

    def remember(self, records: Iterable[Record]) -> None:
        """Take in records without judging them: those of a run that goes on, whose findings are then told anew."""
        for record in records:
            if "timing_s/step" in record:
                self.window.add(record)

    def add(self, record: Record) -> tuple[list[Finding], list[str]]:
        """Take in a step's record: the findings that are new with it, and the names of rules that hold no more.

        Records without a step's work (an evaluation before the first) change nothing.
        """
        if "timing_s/step" not in record:
            return [], []
        self.window.add(record)
        before = {finding.rule for finding in self.findings}
        self._judge()
        now = {finding.rule for finding in self.findings}
        return [finding for finding in self.findings if finding.rule not in before], sorted(before - now)

    def tell(self, record: Record, recorder: Any) -> dict[str, float]:
        """Take in a step's record, record warnings that begin and end by `recorder.event`, and return
        `metrics` for it; empty for a record without a step's work. Hints are in the metrics alone.
        """
        hints = {finding.rule for finding in self.findings if finding.level == "info"}
        begun, ended = self.add(record)
        for finding in begun:
            if finding.level == "info":
                continue
            text = f"{finding.text}; {finding.advice}"
            recorder.event(
                "health", text, level=finding.level, rule=finding.rule, advice=finding.advice, link=finding.link
            )
        for rule in ended:
            if rule in hints:
                continue
            recorder.event("health_over", f"{rule}: holds no more", rule=rule)
        return self.metrics() if "timing_s/step" in record else {}

    def metrics(self) -> dict[str, float]:
        """`health/<rule>`: 1 where the rule speaks, 0 elsewhere."""
        speaking = {finding.rule for finding in self.findings}
        return {f"health/{rule.name}": float(rule.name in speaking) for rule in self.rules}

    def _judge(self) -> None:
        checked = [rule.check(self.window, rule.threshold) for rule in self.rules]
        self.findings = [finding for finding in checked if finding is not None]

    @property
    def pace(self) -> str:
        """Which pool sets the pace, and what would change that; empty while it is not known."""
        pace = pace_of(self.window)
        return "; ".join(part for part in (pace.text, pace.advice) if part) if pace is not None else ""

    @property
    def level(self) -> Level:
        """The worst level of the findings; `info` of a healthy run."""
        return worst_level(self.findings)

    @property
    def line(self) -> str:
        """The run's health in one line: the worst finding and what to do, or that nothing is wrong."""
        return health_line(self.findings, self.pace)


def worst_level(findings: Sequence[Finding]) -> Level:
    """The worst level of some findings; `info` where there is none."""
    return LEVELS[max((LEVELS.index(finding.level) for finding in findings), default=0)]


def health_line(findings: Sequence[Finding], pace: str = "") -> str:
    """One line on these findings: the worst with its advice and how many more there are, or `healthy` and the pace."""
    wrong = sorted(
        (finding for finding in findings if finding.level != "info"), key=lambda found: -LEVELS.index(found.level)
    )
    if not wrong:
        return f"healthy; {pace}" if pace else "healthy"
    more = f" (+{len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return f"{wrong[0].text}; {wrong[0].advice}{more}"
