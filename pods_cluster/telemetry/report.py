"""The end-of-run summary as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pods_cluster.telemetry.number_format import compact, duration, percent
from pods_cluster.telemetry.panel import HEALTH_COLORS
from pods_cluster.telemetry.summary import EVALS, Summary
from pods_cluster.types import Fate


def render(summary: Summary) -> RenderableType:
    """The summary for a terminal."""
    head = Text.assemble(
        (summary.run, "bold"),
        f" {summary.status} after {summary.steps} step{'s' if summary.steps != 1 else ''} ",
        f"in {duration(summary.seconds)}",
    )
    parts: list[RenderableType] = [head, *_health(summary)]
    if summary.evaluations or summary.reward_first is not None:
        parts.append(_results_table(summary))
    parts.append(_facts_table(summary))
    if summary.stage_seconds:
        parts.append(_stages_table(summary))
    places = Table.grid(padding=(0, 2))
    places.add_column(style="dim")
    places.add_column(overflow="fold")
    for title, where in (
        ("model", summary.model),
        *(("figure", figure) for figure in summary.figures),
        ("run", summary.folder),
    ):
        if where:
            places.add_row(title, where)
    parts.append(places)
    parts += [Text(note, style="yellow") for note in summary.notes]
    return Group(*parts)


def _health(summary: Summary) -> list[RenderableType]:
    """The findings that held at the end, the worst first, with the share of steps in which each held; then those that
    held earlier."""
    shares, lines = summary.health_shares, []
    wrong = [found for found in summary.health if found["level"] != "info"]
    for found in sorted(wrong, key=lambda found: found["level"] != "error"):
        share = f"{percent(shares[found['rule']])} of the steps, " if found["rule"] in shares else ""
        line = Text.assemble((f"{found['text']}; {found['advice']}", HEALTH_COLORS[found["level"]]))
        lines.append(line.append(f" ({share}{found['link']})", style="dim"))
    now = {found["rule"] for found in summary.health}
    earlier = [f"{rule} in {percent(share)} of the steps" for rule, share in shares.items() if rule not in now]
    if earlier:
        lines.append(Text(f"held earlier: {', '.join(earlier)}", style="dim"))
    if summary.pace:
        lines.append(Text(f"{'' if wrong else 'healthy; '}{summary.pace}", style="dim" if wrong else "green"))
    return lines


def _results_table(summary: Summary) -> Table:
    table = Table(box=SIMPLE_HEAD, title_justify="left")
    table.add_column("")
    for title in ("before", "after", "change", "best"):
        table.add_column(title, justify="right")
    for name, values in summary.evaluations.items():
        share = name != "eval/reward"
        show = (lambda value: percent(value, 1)) if share else compact
        change = values.after - values.before
        style = "green" if change > 0 else "red" if change < 0 else "dim"
        difference = f"{100 * change:+.1f} points" if share else f"{change:+.3f}"
        best = f"{show(values.best)} (step {values.best_step})"
        table.add_row(EVALS[name], show(values.before), Text(show(values.after), "bold"), Text(difference, style), best)
    if summary.reward_first is not None and summary.reward_last is not None:
        change = summary.reward_last - summary.reward_first
        table.add_row(
            "training reward (first, last tenth)",
            compact(summary.reward_first),
            compact(summary.reward_last),
            f"{change:+.3f}",
            "",
        )
    return table


def _facts_table(summary: Summary) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()

    def counts(values: Mapping[str, float], order: Sequence[str]) -> str:
        return " · ".join(f"{compact(values[key])} {key.replace('_', ' ')}" for key in order if values.get(key))

    rollouts = counts(
        summary.rollouts, ("generated", "scored", "selected", "trained", "excluded", "aborted", "lost", "stale")
    )
    tokens = counts(summary.tokens, ("sampled", "trained", "aborted"))
    rows = [
        ("rollouts", rollouts.replace("generated", "made")),
        ("tokens", tokens),
        ("ratio", _ratio_text(summary)),
        (
            "rates",
            " · ".join(
                f"{compact(value)} {name.replace('_per_second', '/s')}" for name, value in summary.rates.items()
            ),
        ),
        ("idle", " · ".join(f"{pool}s {percent(share)}" for pool, share in summary.idle_shares.items())),
        ("groups", counts(summary.fates, [fate.value for fate in Fate])),
        ("weights", _weights_text(summary)),
        (
            "trouble",
            " · ".join(
                f"{n} {what}{'s' if n > 1 else ''}"
                for n, what in ((summary.errors, "error"), (summary.warnings, "warning"))
                if n
            ),
        ),
    ]
    for title, text in rows:
        if text:
            grid.add_row(title, text)
    return grid


def _ratio_text(summary: Summary) -> str:
    parts = []
    if summary.ratio is not None:
        parts.append(f"{compact(summary.ratio)} rollouts per trained rollout")
    if summary.token_ratio is not None:
        parts.append(f"{compact(summary.token_ratio)} in tokens")
    return " · ".join(parts)


def _weights_text(summary: Summary) -> str:
    parts = []
    if summary.weights_version is not None:
        parts.append(f"version {summary.weights_version}")
    if summary.sync_seconds is not None:
        parts.append(f"{duration(summary.sync_seconds)} a sync")
    if summary.staleness_max is not None:
        parts.append(f"staleness at most {compact(summary.staleness_max)}")
    return " · ".join(parts)


def _stages_table(summary: Summary) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("seconds by stage" + (" (they overlap)" if summary.stages_overlap else ""))
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    table.add_column("", no_wrap=True)
    for stage, seconds in summary.stage_seconds.items():
        share = summary.stage_shares.get(stage, 0.0)
        table.add_row(stage, duration(seconds), percent(share, 1), Text("█" * round(30 * share), style="cyan"))
    return table
