"""The panel of the live display, drawn from what `ProgressState` knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import ROUNDED
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pods_cluster.telemetry.catalog import STAGES
from pods_cluster.telemetry.number_format import compact, duration, percent, size, sparkline
from pods_cluster.types import Fate

if TYPE_CHECKING:
    from pods_cluster.telemetry.progress import ProgressState

STAGE_COLORS = {
    "generate": "cyan",
    "fetch": "bright_black",
    "update": "yellow",
    "publish": "green",
    "eval": "bright_blue",
    "checkpoint": "bright_magenta",
}
HEALTH_COLORS = {"info": "green", "warning": "yellow", "error": "bold red"}
FATE_COLORS = {Fate.TRAINED: "green", Fate.LOST: "red", Fate.STALE: "yellow", Fate.TOO_FEW_VALID: "yellow"}


def panel(state: ProgressState) -> RenderableType:
    """Everything at a glance; rows without a value yet are left out."""
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(ratio=1)
    for title, content in (
        ("health", _health(state)),
        ("step", _steps(state)),
        ("rates", _rates(state)),
        ("ratio", _ratio(state)),
        ("reward", _reward(state)),
        ("accuracy", _accuracy(state)),
        ("idle", _idle(state)),
        ("seconds", _stages(state)),
        ("groups", _groups(state)),
        ("weights", _weights(state)),
        ("events", _events(state)),
    ):
        if content is not None:
            grid.add_row(title, content)
    title = Text.assemble((f" {state.name} ", "bold"))
    subtitle = Text(f" {state.subtitle} ", style="dim") if state.subtitle else None
    return Panel(grid, box=ROUNDED, title=title, title_align="left", subtitle=subtitle, subtitle_align="right")


def _health(state: ProgressState) -> Text | None:
    """The health line, coloured by the worst finding; below it the pace, where the line has no room for it."""
    health = state.health
    if not health.window.records:
        return None
    text = Text.assemble((health.line, HEALTH_COLORS[health.level]))
    if health.level != "info" and health.pace:
        text.append(f"\n{health.pace}", style="dim")
    return text


def _steps(state: ProgressState) -> RenderableType:
    bar = ProgressBar(total=max(state.steps, 1), completed=min(state.step, state.steps), complete_style="green")
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    ahead = "done" if state.step >= state.steps else f"{duration(state.eta)} to go"
    if state.finished and state.step < state.steps:
        ahead = "ended"
    doing = f" · {state.stage}" if state.stage else ""
    row.add_row(Text(f"{state.step}/{state.steps}", style="bold"), bar, f"{duration(state.elapsed)} · {ahead}{doing}")
    return row


def _rates(state: ProgressState) -> Text | None:
    get = state.latest.get
    return _facts(
        ("rollouts/s", get("throughput/rollouts_generated")),
        ("updates/s", get("throughput/updates")),
        ("sampled tokens/s", get("throughput/tokens_sampled")),
        ("trained tokens/s", get("throughput/tokens_trained")),
    )


def _ratio(state: ProgressState) -> Text | None:
    """Rollouts per trained rollout, and the same in tokens, in the last step and over the run."""
    parts: list[Text] = []
    for title, name in (
        ("rollouts per trained rollout", "rollout_to_update_ratio"),
        ("in tokens", "rollout_to_update_ratio/tokens"),
    ):
        overall = "/cumulative" if name == "rollout_to_update_ratio" else "_cumulative"
        step, run = state.latest.get(name), state.latest.get(name + overall)
        if step is not None or run is not None:
            parts.append(
                Text.assemble((f"{title} ", "dim"), (compact(step), "bold"), (f" (run {compact(run)})", "dim"))
            )
    return Text("   ").join(parts) if parts else None


def _reward(state: ProgressState) -> Text | None:
    if not state.rewards:
        return None
    text = Text.assemble((compact(state.latest["reward"]), "bold"))
    if "reward/kept" in state.latest:
        text.append(f"  kept {compact(state.latest['reward/kept'])}", style="dim")
    if "reward_std/kept" in state.latest:
        text.append(f"  spread kept {compact(state.latest['reward_std/kept'])}", style="dim")
        if "reward_std" in state.latest:
            text.append(f" of all {compact(state.latest['reward_std'])}", style="dim")
    return text.append("  ").append(sparkline(list(state.rewards)), style="cyan")


def _accuracy(state: ProgressState) -> Text | None:
    parts: list[Text] = []
    for name, title in (("eval/greedy_accuracy", "greedy"), ("eval/sampled_accuracy", "sampled")):
        if name not in state.latest:
            continue
        before, now = state.first_eval[name], state.latest[name]
        style = "green" if now > before else "red" if now < before else "dim"
        arrow = f"{percent(before, 1)} → "
        parts.append(Text.assemble((f"{title} ", "dim"), arrow, (percent(now, 1), f"bold {style}")))
    return Text("   ").join(parts) if parts else None


def _idle(state: ProgressState) -> Text | None:
    text = Text()
    for pool in ("generator", "learner"):
        share = state.latest.get(f"{pool}/idle_share")
        if share is None:
            continue
        workers = state.latest.get(f"{pool}/workers")
        title = f"{pool}s" if workers is None else f"{int(workers)} {pool}{'s' if workers != 1 else ''}"
        filled = round(10 * min(max(share, 0.0), 1.0))
        text.append(f"{title} ", style="dim").append("█" * filled, style="yellow").append(
            "░" * (10 - filled), style="dim"
        )
        text.append(f" {percent(share)}   ")
    return text if text else None


class _StageBar:
    """One bar cut into the stages of the last step, as wide as there is room."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, total = options.max_width, sum(self.seconds.values())
        text, cumulative, drawn = Text(no_wrap=True), 0.0, 0
        for stage, value in self.seconds.items():
            cumulative += value
            cells = round(width * cumulative / total) - drawn
            text.append("━" * cells, style=STAGE_COLORS[stage])
            drawn += cells
        yield text


def _stages(state: ProgressState) -> RenderableType | None:
    seconds = {stage: state.stages.get(f"timing_s/{stage}", 0.0) for stage in STAGES}
    seconds = {stage: value for stage, value in seconds.items() if value > 0}
    if not seconds:
        return None
    legend = Text()
    for stage, value in seconds.items():
        legend.append("■ ", style=STAGE_COLORS[stage]).append(f"{stage} ", style="dim").append(
            f"{value:.2f}".rstrip("0").rstrip(".")
        )
        legend.append("   ")
    return Group(_StageBar(seconds), legend)


def _groups(state: ProgressState) -> Text | None:
    text = Text()
    for fate in Fate:
        count = state.fates.get(f"groups/{fate.value}", 0)
        if count or (fate is Fate.TRAINED and state.fates):
            text.append(f"{fate.value.replace('_', ' ')} ", style="dim")
            text.append(f"{count:,}   ", style=FATE_COLORS.get(fate, ""))
    return text if text else None


def _weights(state: ProgressState) -> Text | None:
    get = state.latest.get
    if "weights/version" not in state.latest:
        return None
    text = Text.assemble(("version ", "dim"), str(int(state.latest["weights/version"])))
    if get("weights/sync_seconds") is not None:
        text.append("   sync ", style="dim").append(duration(get("weights/sync_seconds")))
        if get("weights/bytes") is not None:
            text.append(f" ({size(get('weights/bytes'))})", style="dim")
    if "staleness/max" in state.latest:
        text.append("   staleness ", style="dim")
        text.append(f"{compact(get('staleness/mean'))} mean {compact(get('staleness/max'))} max")
    return text


def _events(state: ProgressState) -> RenderableType | None:
    if not state.events:
        return None
    styles = {"warning": "yellow", "error": "bold red"}
    lines: list[RenderableType] = []
    for level, message, elapsed in state.events:
        entry = Text(no_wrap=True, overflow="ellipsis")
        if elapsed is not None:
            entry.append(f"{duration(elapsed)}  ", style="dim")
        lines.append(entry.append(message, style=styles.get(level, "")))
    if state.warnings:
        plural = "s" if state.warnings != 1 else ""
        lines.append(Text(f"{state.warnings} warning{plural} so far", style="yellow"))
    return Group(*lines)


def _facts(*facts: tuple[str, float | None]) -> Text | None:
    """`title value` pairs; those without a value are left out."""
    known = [(title, value) for title, value in facts if value is not None]
    if not known:
        return None
    return Text("   ").join(Text.assemble((f"{title} ", "dim"), (compact(value), "bold")) for title, value in known)
