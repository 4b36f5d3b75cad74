"""The claims of docs/evidence.md, each beside what was measured: whether PODS is as much sooner as was wanted, and others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks._result_file import records
from benchmarks.evidence_sections import GPU_PARTS

Row = Mapping[str, Any]
REACH, REACH_OVERLAP = 1.7, 2.5
"""How many times sooner than grpo-ga grpo-pods is wanted to be: the paper's least, and where two pools overlap."""
OVERLAPPING = ("two", "math-two")
"""Parts on GPUs whose pools have cards of their own and work at the same time."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What an arm does beside its part's baseline, or beside the arm `other` at equal steps: `more` is above it (a speed-up
    above 1, a difference above 0), `less` below, `same` not below. `by`: own seconds (`sooner`), equal steps (`steps`), or a
    clock's name.
    """

    text: str
    part: str
    arm: str
    by: str
    wanted: Literal["more", "less", "same"]
    other: str | None = None


CLAIMS = (
    Claim("m = 8 of 64 loses nothing to all 64, at equal steps", "arms", "grpo-pods", "steps", "same"),
    Claim("n = 64 beats n = 8 at m = 8, at equal steps", "n", "n64", "steps", "more"),
    Claim("n = 64 is sooner than n = 8", "n", "n64", "sooner", "more"),
    Claim("n = 64 is sooner than n = 8, by the clock `0.5b-overlap`", "n", "n64", "0.5b-overlap", "more"),
    Claim("n = 64 is sooner than n = 8, by the clock `3b-overlap`", "n", "n64", "3b-overlap", "more"),
    Claim("m = 8 is sooner than m = 32 at n = 64", "m", "m8", "sooner", "more"),
    Claim("m = 2 is worse than m = 32, at equal steps", "m", "m2", "steps", "less"),
    Claim("max variance beats random, at equal steps", "rules", "max_variance", "steps", "more"),
    Claim("max reward is worse than random, at equal steps", "rules", "max_reward", "steps", "less"),
    Claim("with the group's advantages it does too, at equal steps", "rules", "max_variance-group", "steps", "more"),
    Claim("advantages over the kept rollouts beat those over the group, at equal steps", "rules", "max_variance", "steps", "more",
          "max_variance-group"),
    Claim("GRESO: skipping prompts without signal is sooner", "prompts", "revisit-adaptive", "sooner", "more"),
    Claim("rollouts of one update ago lose nothing, at equal steps", "staleness", "k1", "steps", "same"),
    *(
        Claim(f"the correction gains at staleness {k}, at equal steps", "staleness", f"k{k}", "steps", "more",
              f"k{k}-uncorrected")
        for k in range(1, 5)
    ),
    Claim("stopping decided groups by waves is sooner", "settling", "settle-waves", "sooner", "more"),
    Claim("stopping decided groups at once is sooner", "settling", "settle-abort", "sooner", "more"),
)  # fmt: skip
"""The paper's and others' claims of the CPU's parts, beside `REACH`."""


def reach_lines(result: Mapping[str, Any] | None, gpu: Mapping[str, Any] | None) -> Iterator[str]:
    """The table that says where grpo-pods was as much sooner than grpo-ga as was wanted; nothing where no arms were run."""
    rows: list[
        tuple[str, str, int, float, Row | None, float | None]
    ] = []  # last: the baseline's end, minutes of training
    if result is not None and "arms" in result["parts"]:
        part = result["parts"]["arms"]
        goal = _share_or(part.get("target"), result.get("target"))
        pairs = len(part["seeds"].get("grpo-pods", ())) if "seeds" in part else 0
        update = {row["arm"]: row["timing_s/update"] for row in records(part["explains"])} if "explains" in part else {}
        took = (
            f" (an update of all 64 took {update['grpo-ga']:.2f} s, of 8 {update['grpo-pods']:.2f} s)" if update else ""
        )
        rows.append((f"the hard task, its runs' own seconds{took}", goal, pairs, REACH, _of_pods(part["rows"]), None))
        if quick := (result.get("quick") or {}).get("arms"):
            all_, few = quick["update"]
            where = f"the hard task, own seconds of `--quick`, made later (of all 64 {all_:.2f} s, of 8 {few:.2f} s)"
            rows.append((where, "99 % of grpo-ga's best", quick["pairs"], REACH, quick, None))
        for clock, told in part["clocks"].items():
            wanted = REACH_OVERLAP if clock.endswith("-overlap") else REACH
            rows.append((f"the hard task, told by `{clock}`", goal, pairs, wanted, _of_pods(told), None))
    for name, (title, *_) in GPU_PARTS.items():
        if gpu is not None and name in gpu["parts"]:
            part, runs = gpu["parts"][name], gpu["runs"][name]
            wanted = REACH_OVERLAP if name in OVERLAPPING else REACH
            both = set(part["seeds"].get("grpo-pods", ())) & set(part["seeds"].get("grpo-ga", ()))
            goal = (
                f"{runs['target']:.0%}" if runs["gain"] is None else f"{100 * runs['gain']:.0f} points above the start"
            )
            end = max(x for curve in part["curves"] if _is_baseline(curve, part) for x in curve["x"])
            rows.append((f"{title}, H200", f"{goal}, named before", len(both), wanted, _of_pods(part["rows"]), end))
    if not rows:
        return
    yield "## Is PODS sooner?"
    yield ""
    yield (
        f"grpo-pods beside grpo-ga, in time to an accuracy. Wanted were {REACH:g} times (the paper's least), and "
        f"{REACH_OVERLAP:g} where two pools overlap. An interval over two pairs of seeds is too narrow."
    )
    yield ""
    yield "| where | to | pairs of seeds | times sooner, 95 % interval | wanted | holds |"
    yield "|---|---|---|---|---|---|"
    for where, goal, pairs, wanted, row, end in rows:
        yield f"| {where} | {goal} | {pairs} | {_times(row, end)} | {wanted:g} | {_holds(row, wanted)} |"
    yield ""


def claim_lines(result: Mapping[str, Any] | None) -> Iterator[str]:
    """The table of the other claims; nothing where none of their parts was run."""
    found = [(claim, row) for claim in CLAIMS if (row := _row_of(claim, result)) is not None]
    if not found:
        return
    yield "## What else is claimed"
    yield ""
    yield (
        "Each claim beside its part's table below. It holds where the whole 95 % interval is on its side, it does not where the "
        "whole interval is on the other side, and else nothing is shown. That nothing is lost is never shown by an interval that "
        "holds zero: there no loss was seen."
    )
    yield ""
    yield "| claim | here, 95 % interval | holds |"
    yield "|---|---|---|"
    for claim, row in found:
        steps = claim.by == "steps"
        shown = points(row) if steps else _times(row)
        yield f"| {claim.text} | {shown} | {_verdict(claim.wanted, row, steps)} |"
    yield ""


def did_not_hold(part: Mapping[str, Any], by_axis: Mapping[tuple[str, str], Mapping[str, Any]]) -> Iterator[str]:
    """What is not shown: arms whose interval holds 1, or that were not sooner, on own seconds; and later by a clock."""
    unclear, never, alone = [], [], []
    late: dict[str, list[str]] = {}
    told = [("", arm, row) for (arm, axis), row in by_axis.items() if axis == "training-minutes"]
    told += [(clock, row["arm"], row) for clock, rows in part["clocks"].items() for row in records(rows)]
    for clock, arm, row in told:
        if arm == part["baseline"]:
            continue
        if row["speed_up"] is None:
            never += [arm] if row["reaches_at"] is None and not clock else []
        elif row["speed_up_low"] is None:
            alone += [] if clock else [arm]
        elif row["speed_up_low"] <= 1.0 <= (row["speed_up_high"] or float("inf")):
            unclear += [] if clock else [arm]
        elif row["speed_up"] < 1.0:
            late.setdefault(clock, []).append(arm)
    later = late.pop("", [])
    for arms, text in (
        (never, "did not reach it in their time"),
        (later, "later than the baseline, by more than chance between seeds"),
        (unclear, "the interval holds 1, so neither sooner nor later is shown"),
        (alone, "one pair of seeds, so no interval, and nothing is shown"),
    ):
        if arms:
            yield f"- {', '.join(arms)}: {text}."
    for arms in dict.fromkeys(tuple(arms) for arms in late.values()):
        names = ", ".join(f"`{clock}`" for clock, those in late.items() if tuple(those) == arms)
        yield f"- {', '.join(arms)}: later than the baseline as told by {names}, by more than chance between seeds."
    if never or later or unclear or alone or late:
        yield ""


def points(row: Row | None) -> str:
    """The difference of a row in points, with its interval."""
    if row is None or row["difference"] is None:
        return "–"
    low, high = row["difference_low"], row["difference_high"]
    band = "" if low is None else f" [{100 * low:+.1f}, {100 * high:+.1f}]"
    return f"{100 * row['difference']:+.1f} points{band}"


def _row_of(claim: Claim, result: Mapping[str, Any] | None) -> Row | None:
    part = None if result is None else result["parts"].get(claim.part)
    if part is None:
        return None
    if claim.other is not None:
        pairs = records(part["beside"]) if "beside" in part else []
        return next((row for row in pairs if (row["arm"], row["other"]) == (claim.arm, claim.other)), None)
    axis = {"steps": "steps", "sooner": "training-minutes"}.get(claim.by)
    table = part["rows"] if axis else part["clocks"].get(claim.by)
    found = [] if table is None else records(table)
    return next((row for row in found if row["arm"] == claim.arm and (axis is None or row["axis"] == axis)), None)


def _verdict(wanted: str, row: Row, steps: bool) -> str:
    if steps:
        low, high, middle = row["difference_low"], row["difference_high"], 0.0
    else:
        low, high, middle = row["speed_up_low"], row["speed_up_high"], 1.0
        if row["speed_up"] is None and low == 0 and high == 0:
            return "no" if wanted == "more" else "yes"  # no resample of it got there
        high = float("inf") if high is None and low is not None else high
    if low is None or high is None:
        return "not shown"
    above, below = low > middle, high < middle
    if wanted == "same":
        return "no" if below else "yes" if above else "no loss seen"
    if wanted == "less":
        above, below = below, above
    return "yes" if above else "no" if below else "not shown"


def _share_or(target: float | None, named: float | None) -> str:
    if named:
        return f"{named:.1%}, named before"
    return "99 % of grpo-ga's best" + ("" if target is None else f" ({target:.1%})")


def _is_baseline(curve: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    return curve["label"] == part["baseline"] and curve["axis"] == "training-minutes"


def _times(row: Row | None, end: float | None = None) -> str:
    """How many times sooner; where the baseline never got there, its end (in minutes of training) bounds that from below."""
    if row is None or row["speed_up"] is None:
        if row is None or row["reaches_at"] is None:
            return "never reached"
        never = "the baseline never reached it"
        return f"more than {end / row['reaches_at']:.2f}: {never}" if end and row["reaches_at"] > 0 else never
    low, high = row["speed_up_low"], row["speed_up_high"]
    band = "" if low is None else f" [{low:.2f}, {'∞' if high is None else f'{high:.2f}'}]"
    return f"{row['speed_up']:.2f}{band}"


def _holds(row: Row | None, wanted: float) -> str:
    if row is None or row["speed_up"] is None:
        return "not shown"
    value, low, high = row["speed_up"], row["speed_up_low"], row["speed_up_high"]
    held = value >= wanted if low is None else low >= wanted
    open_ = low is None or high is None or high >= wanted
    return "yes" if held else "not shown" if open_ else "no"


def _of_pods(table: Mapping[str, Any]) -> Row | None:
    """The row of grpo-pods on training time."""
    found = [
        row
        for row in records(table)
        if row["arm"] == "grpo-pods" and row.get("axis", "training-minutes") == "training-minutes"
    ]
    return found[0] if found else None
