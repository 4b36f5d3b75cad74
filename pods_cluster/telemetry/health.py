"""Health of a run: what goes wrong in it by the rules of `health_rules`, and which pool sets the pace (pure).

A run can look busy and learn nothing: most groups without signal, completions cut off, rewards that fail. Feed records
in order; what holds now is `findings`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pods_cluster.telemetry.health_rules import RULES, Finding, Record, Rule, Window


class Health:
    """The findings of a run that is followed record by record."""

    def __init__(self, rules: Sequence[Rule] = RULES) -> None:
        self.rules = tuple(rules)
        self.window = Window()
        self.findings: list[Finding] = []

    def add(self, record: Record) -> tuple[list[Finding], list[str]]:
        """Take in a step's record: the findings that are new with it, and the names of rules that hold no more.

        Records without a step's work (an evaluation before the first) change nothing.
        """
        if "timing_s/step" not in record:
            return [], []
        self.window.add(record)
        before = {finding.rule for finding in self.findings}
        checked = [rule.check(self.window, rule.threshold) for rule in self.rules]
        self.findings = [finding for finding in checked if finding is not None]
        now = {finding.rule for finding in self.findings}
        return [finding for finding in self.findings if finding.rule not in before], sorted(before - now)

    def tell(self, record: Record, recorder: Any) -> dict[str, float]:
        """Take in a step's record, record findings that begin and end by `recorder.event`, and return
        `metrics` for it; empty for a record without a step's work.
        """
        begun, ended = self.add(record)
        for finding in begun:
            text = f"{finding.text}: {finding.advice}"
            recorder.event(
                "health", text, level=finding.level, rule=finding.rule, advice=finding.advice, link=finding.link
            )
        for rule in ended:
            recorder.event("health_over", f"{rule}: holds no more", rule=rule)
        return self.metrics() if "timing_s/step" in record else {}

    def metrics(self) -> dict[str, float]:
        """`health/<rule>`: 1 where the rule speaks, 0 elsewhere."""
        speaking = {finding.rule for finding in self.findings}
        return {f"health/{rule.name}": float(rule.name in speaking) for rule in self.rules}

    @property
    def pace(self) -> str:
        """Which pool sets the pace, and what would change that; empty while it is not known."""
        window = self.window
        generate, update = window.mean("balance/generate_seconds"), window.mean("balance/update_seconds")
        step = window.mean("timing_s/step")
        if not (generate > 0 and update > 0 and step > 0):
            return ""
        waited = window.mean("timing_s/wait")
        if math.isnan(waited):
            return f"the pools take turns: generating {generate:.1f} s, updating {update:.1f} s a step (staleness: 0)"
        if generate > 1.15 * update:
            balanced = window.mean("balance/generators")
            enough = (
                f"; about {math.ceil(balanced)} generators would keep up with it" if math.isfinite(balanced) else ""
            )
            return f"the generators set the pace: the learner waits {max(waited, 0.0) / step:.0%} of a step{enough}"
        if update > 1.15 * generate:
            n = window.mean("balance/rollouts_per_prompt")
            more = f", or use the idle generators with {n:.0f} rollouts a prompt" if math.isfinite(n) else ""
            return f"the learner sets the pace: generating takes {generate / update:.0%} of its time; add ranks{more}"
        return "both pools are busy"

    @property
    def line(self) -> str:
        """The run's health in one line: the worst finding and what to do, or that nothing is wrong."""
        if not self.findings:
            return f"healthy; {self.pace}" if self.pace else "healthy"
        worst = min(self.findings, key=lambda finding: finding.level != "error")
        more = f" (+{len(self.findings) - 1} more)" if len(self.findings) > 1 else ""
        return f"{worst.text}: {worst.advice}{more}"
