"""The live display of a run: a panel on a terminal, one line a step elsewhere. Fed with records and events alone."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live

from pods_cluster.telemetry.health import Health
from pods_cluster.telemetry.number_format import compact, duration, percent, plain_text
from pods_cluster.telemetry.panel import panel

logger = logging.getLogger(__name__)

HISTORY = 512
"""Values kept for a sparkline."""


@dataclass(slots=True)
class ProgressState:
    """The state of the display: the last value of every metric, the first and last evaluation, and recent events."""

    name: str
    steps: int
    subtitle: str = ""
    step: int = 0
    latest: dict[str, float] = field(default_factory=dict)
    first_eval: dict[str, float] = field(default_factory=dict)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    stages: dict[str, float] = field(default_factory=dict)
    fates: dict[str, int] = field(default_factory=dict)
    events: deque[tuple[str, str, float | None]] = field(default_factory=lambda: deque(maxlen=3))
    warnings: int = 0
    stage: str = ""
    health: Health = field(default_factory=Health)
    finished: bool = False
    _marks: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=20))
    _elapsed: float = 0.0
    _seen_at: float = field(default_factory=monotonic)

    def update(self, record: Mapping[str, Any]) -> None:
        """Take a step record (or a part of one); what is no finite number is passed over."""
        values = {name: float(value) for name, value in record.items() if _is_number(value)}
        step = int(values.get("step", self.step))
        if step != self.step:
            self.stages.clear()
        self.step = max(self.step, step)
        self.latest.update(values)
        if "elapsed" in values:
            self._elapsed, self._seen_at = values["elapsed"], monotonic()
            if not self._marks or self._marks[-1][0] != self.step:
                self._marks.append((self.step, values["elapsed"]))
        self.health.add(values)
        if "reward" in values:
            self.rewards.append(values["reward"])
        for name, value in values.items():
            if name.startswith("eval/"):
                self.first_eval.setdefault(name, value)
            elif name.startswith("groups/"):
                self.fates[name] = self.fates.get(name, 0) + int(value)
            elif name.startswith("timing_s/"):
                self.stages[name] = value

    def event(self, kind: str, text: str, *, level: str = "info", elapsed: float | None = None) -> None:
        self.events.append((level, plain_text(text) or plain_text(kind), elapsed))
        self.warnings += level != "info"

    @property
    def elapsed(self) -> float:
        """Seconds that the run has worked; runs on between records until `finished`."""
        return self._elapsed if self.finished else self._elapsed + monotonic() - self._seen_at

    @property
    def eta(self) -> float | None:
        """Seconds to the last step at the pace of the latest twenty; None before two steps."""
        if len(self._marks) < 2 or self.step >= self.steps:
            return None
        (first, then), (last, now) = self._marks[0], self._marks[-1]
        if last <= first:
            return None
        pace = (now - then) / (last - first)
        return max(pace * (self.steps - self.step) - (self.elapsed - self._elapsed), 0.0)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield panel(self)


def line(state: ProgressState, record: Mapping[str, Any]) -> str:
    """One readable line of a step record, for logs."""
    value = {name: float(item) for name, item in record.items() if _is_number(item)}
    parts = [f"step {int(value.get('step', state.step))}/{state.steps}"]
    if "reward" in value:
        parts.append(f"reward {compact(value['reward'])}")
    for name, title in (("eval/greedy_accuracy", "greedy"), ("eval/sampled_accuracy", "sampled")):
        if name in value:
            parts.append(f"{title} accuracy {percent(value[name], 1)}")
    if "loss" in record:
        parts.append(f"loss {compact(value.get('loss', math.nan))}")
    if "rollouts/generated" in value or "rollouts/trained" in value:
        made, trained = value.get("rollouts/generated"), value.get("rollouts/trained")
        parts.append(f"rollouts {compact(made)} made {compact(trained)} trained")
    if "rollout_to_update_ratio" in value:
        overall = value.get("rollout_to_update_ratio/cumulative")
        parts.append(
            f"{compact(value['rollout_to_update_ratio'])} rollouts per trained rollout (run {compact(overall)})"
        )
    if "throughput/rollouts_generated" in value:
        parts.append(f"{compact(value['throughput/rollouts_generated'])} rollouts/s")
    stages = [
        f"{stage} {duration(value[f'timing_s/{stage}'])}"
        for stage in ("generate", "update", "publish", "eval")
        if value.get(f"timing_s/{stage}")
    ]
    if stages:
        parts.append(" ".join(stages))
    if "generator/idle_share" in value or "learner/idle_share" in value:
        idle = [percent(value.get(f"{pool}/idle_share")) for pool in ("generator", "learner")]
        parts.append(f"idle {idle[0]} / {idle[1]}")
    if "elapsed" in value:
        parts.append(duration(value["elapsed"]))
    return " · ".join(parts)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


class Progress:
    """Shows a run while it goes: `with Progress("gsm8k", 200) as progress: progress.update(record)`.

    On a terminal a panel that renews itself; otherwise (a file, a job's log, `live=False`) one line a step and event.
    When the output is gone (a closed pipe) it goes quiet: a display never ends a run.
    """

    def __init__(
        self, name: str, steps: int, *, subtitle: str = "", console: Console | None = None, live: bool | None = None
    ) -> None:
        """`subtitle`: a few words beside the name, such as the model and the pools."""
        self.console = console or Console()
        self.state = ProgressState(plain_text(name), steps, plain_text(subtitle))
        terminal = self.console.is_terminal and not self.console.is_dumb_terminal
        self._live = (
            Live(self.state, console=self.console, refresh_per_second=4, transient=False)
            if (terminal if live is None else live)
            else None
        )
        self._quiet = False

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._shown(self._live.start)
        return self

    def __exit__(self, *_: object) -> None:
        self.state.finished = True
        self.state.stage = ""
        if self._live is not None:
            self._shown(self._live.stop)

    def update(self, record: Mapping[str, Any]) -> None:
        """Show a step record."""
        self.state.update(record)
        if self._live is None:
            self._print(line(self.state, record))

    def event(self, kind: str, text: str, *, level: str = "info", elapsed: float | None = None, **fields: Any) -> None:
        """Show an event; takes the fields of an event record, so `event(**record)` works."""
        self.state.event(kind, text, level=level, elapsed=elapsed)
        if self._live is None:
            link = f" ({plain_text(fields['link'])})" if fields.get("link") else ""
            self._print((plain_text(text) if level == "info" else f"{level}: {plain_text(text)}") + link)

    def stage(self, stage: str) -> None:
        """Say what the run is doing now (shown on the panel only)."""
        self.state.stage = plain_text(stage, 60)

    def feed(self, items: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Show what `Recorder.poll` returned."""
        for what, record in items:
            if what == "step":
                self.update(record)
            else:
                self.event(**{"kind": "", "text": "", **record})

    def _print(self, text: str) -> None:
        self._shown(lambda: self.console.print(text, markup=False, highlight=False, soft_wrap=True))

    def _shown(self, show: Any) -> None:
        if self._quiet:
            return
        try:
            show()
        # ValueError: the stream was closed; SystemExit: rich's answer to a broken pipe
        except (OSError, ValueError, SystemExit) as error:
            self._quiet = True
            logger.warning("the progress display has lost its output (%s); the run goes on", error)
