"""Numbers of one step: what became of its groups, and the seconds of its stages."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from pods_cluster.generation.pool_stats import PoolStats
from pods_cluster.learning.reports import StepResult
from pods_cluster.selection.group_stats import GroupStats
from pods_cluster.selection.selector_core import Decision
from pods_cluster.sizing.idle import tokens_per_second
from pods_cluster.sizing.moves import Pools
from pods_cluster.sizing.step_measurement import StepMeasurement
from pods_cluster.telemetry.process_memory import ProcessMemory
from pods_cluster.types import Fate, Selection


class StageClock:
    """Adds up wall-clock seconds by stage: `with clock("publish"): …`."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - begin

    def total(self) -> float:
        """Seconds of the step so far."""
        return time.monotonic() - self.started

    def timings(self) -> dict[str, float]:
        """`timing_s/<stage>` of each stage so far."""
        return {f"timing_s/{stage}": seconds for stage, seconds in self.seconds.items()}


@dataclass(slots=True)
class Tally:
    """The fates of the groups that a step saw; `values` are the step's metrics by their registered names."""

    trained: list[GroupStats] = field(default_factory=list)
    others: list[GroupStats] = field(default_factory=list)
    selections: list[Selection] = field(default_factory=list)
    fates: Counter[Fate] = field(default_factory=Counter)
    replaced: int = 0
    overtaken: int = 0
    ready: int | None = None
    """Groups that were complete when the step first got an answer."""
    waited: float = 0.0
    """Seconds for which there were too few."""
    queued: int = 0
    """Groups that were complete and left in the selector."""
    select_seconds: float = 0.0
    """Seconds for which the selector computed."""
    selector_bytes: int = 0
    """Resident memory of the selector's process."""

    def answered(self, decision: Decision) -> None:
        """The selector gave an answer; its selections and fates are counted where they are dealt with."""
        self.overtaken = decision.overtaken
        self.waited += decision.waited
        self.select_seconds += decision.select_seconds
        self.selector_bytes = max(self.selector_bytes, decision.resident_bytes)
        self.queued = decision.ready
        if self.ready is None:
            self.ready = len(decision.selections) + decision.ready

    def selected(self, selections: Sequence[Selection], stats: Sequence[GroupStats]) -> None:
        self.selections.extend(selections)
        self.trained.extend(stats)

    def ended(self, fate: Fate, stats: GroupStats) -> None:
        self.fates[fate] += 1
        self.others.append(stats)

    @property
    def everyone(self) -> list[GroupStats]:
        """Groups of every fate."""
        return self.trained + self.others

    @property
    def generated(self) -> int:
        """Rollouts that finished on a generator by themselves."""
        return sum(group.n_finished - group.n_aborted for group in self.everyone)

    @property
    def sampled_tokens(self) -> int:
        """Completion tokens of all rollouts, aborted ones included."""
        return sum(group.tokens for group in self.everyone)

    @property
    def aborted_tokens(self) -> int:
        """Completion tokens of aborted rollouts."""
        return sum(group.aborted_tokens for group in self.everyone)

    def values(self, version: int) -> dict[str, float]:
        """Metrics of the step; `version` is the learner's at the step's assembly."""
        everyone = self.everyone
        values: dict[str, float] = {
            "rollouts/generated": self.generated,
            "rollouts/scored": sum(group.n_valid + group.n_stale for group in everyone),
            "rollouts/selected": sum(group.n_kept for group in self.trained),
            "rollouts/aborted": sum(group.n_aborted for group in everyone),
            "rollouts/lost": sum(group.n_lost for group in everyone),
            "rollouts/stale": sum(group.n_stale for group in everyone),
            "rollouts/excluded": sum(group.n_nan + group.n_infinite for group in everyone),
            "rollouts/excluded/missing": sum(group.n_nan for group in everyone),
            "rollouts/excluded/infinite": sum(group.n_infinite for group in everyone),
            "tokens/sampled": self.sampled_tokens,
            "tokens/aborted": self.aborted_tokens,
            "groups/replaced": self.replaced,
            "groups/overtaken": self.overtaken,
            "groups/queued": self.queued,
            "timing_s/select": self.select_seconds,
        } | ProcessMemory(self.selector_bytes).metrics("selector")
        for fate in Fate:
            values[f"groups/{fate.value}"] = self.fates[fate]
        scored = [group for group in everyone if math.isfinite(group.reward_mean)]
        whole = [group for group in everyone if group.n_whole]
        ended = [group for group in whole if group.n_terminated]
        values |= {
            "reward": _mean(scored, "reward_mean", "n_valid"),
            "reward_std": _mean(scored, "reward_std"),
            "reward/min": min((group.reward_min for group in scored), default=math.nan),
            "reward/max": max((group.reward_max for group in scored), default=math.nan),
            "frac_reward_zero_std": _share([group.reward_std <= 1e-8 for group in scored]),
            "reward/kept": _mean(self.trained, "kept_mean", "n_kept"),
            "reward_std/kept": _mean(self.trained, "kept_std"),
            "completions/mean_length": _mean(everyone, "length_mean", "n_whole"),
            "completions/min_length": min((group.length_min for group in whole), default=math.nan),
            "completions/max_length": max((group.length_max for group in whole), default=math.nan),
            "completions/mean_terminated_length": _mean(ended, "terminated_length_mean", "n_terminated"),
            "completions/min_terminated_length": min((g.terminated_length_min for g in ended), default=math.nan),
            "completions/max_terminated_length": max((g.terminated_length_max for g in ended), default=math.nan),
            "completions/clipped_ratio": _mean(everyone, "truncated_share", "n_whole"),
            "completions/kept_mean_length": _mean(self.trained, "kept_length_mean", "n_kept"),
            "completions/kept_max_length": max((group.kept_length_max for group in self.trained), default=math.nan),
            "completions/kept_clipped_ratio": _mean(self.trained, "kept_truncated_share", "n_kept"),
            "completions/stale_mean_length": _mean(everyone, "stale_length_mean", "n_stale"),
            "prompt_length/mean": _mean(everyone, "prompt_tokens"),
            "prompt_length/max": max((group.prompt_tokens for group in everyone), default=math.nan),
        }
        if any(group.settled or math.isfinite(group.first_mean) for group in everyone):
            values |= _censored(everyone)
        for name in sorted({name for group in everyone for name in group.parts_mean}):
            values[f"rewards/{name}/mean"], values[f"rewards/{name}/std"] = _spread(everyone, name)
            values[f"rewards/{name}/kept_mean"] = _mean_of(
                [group.kept_parts_mean.get(name, math.nan) for group in self.trained]
            )
        ages = [version - int(first) for selection in self.selections for first in selection.first_versions]
        if ages:
            values |= {"staleness/mean": sum(ages) / len(ages), "staleness/max": max(ages)}
        return {name: float(value) for name, value in values.items() if not math.isnan(value)}


def measure(
    seconds: float,
    clock: StageClock,
    tally: Tally,
    result: StepResult | None,
    stats: PoolStats,
    pools: Pools,
    in_flight: int,
) -> StepMeasurement:
    """The measurement of a step that took `seconds`; `result` is None where nothing was trained."""
    return StepMeasurement(
        seconds=seconds,
        generate_seconds=clock.seconds["generate"],
        fetch_seconds=result.fetch_seconds if result is not None else 0.0,
        update_seconds=result.update_seconds if result is not None else 0.0,
        publish_seconds=clock.seconds.get("publish", 0.0),
        generated_rollouts=tally.generated,
        trained_rollouts=result.trained_rollouts if result is not None else 0,
        sampled_tokens=tally.sampled_tokens,
        aborted_tokens=tally.aborted_tokens,
        trained_tokens=result.trained_tokens if result is not None else 0,
        generators=max(1, pools.serving),
        ranks=max(1, pools.learners),
        generator_rate=tokens_per_second(stats.generated_tokens, stats.seconds),
        best_generator_rate=stats.saturated,
        occupied_seconds=stats.occupied_seconds_mean,
        groups_in_flight=in_flight,
        learner_peak_bytes=result.memory.gpu_peak if result is not None else 0.0,
    )


def _censored(groups: Sequence[GroupStats]) -> dict[str, float]:
    """The tokens saved by stopping groups early, and how far they bias the means of the step."""
    settled = [group for group in groups if group.settled]
    return {
        "groups/settled": len(settled),
        "groups/settled_share": len(settled) / len(groups),
        "rollouts/unissued": sum(group.n_unissued for group in settled),
        "tokens/saved": sum(group.tokens_saved for group in settled),
        "reward/settled": _mean(settled, "reward_mean", "n_valid"),
        "reward/uncensored": _mean(groups, "first_mean", "first_valid"),
        "completions/settled_mean_length": _mean(settled, "length_mean", "n_whole"),
        "completions/settled_kept_mean_length": _mean(settled, "kept_length_mean", "n_kept"),
    }


def _mean(groups: Sequence[GroupStats], name: str, weight: str | None = None) -> float:
    return _mean_of(
        [getattr(group, name) for group in groups],
        None if weight is None else [getattr(group, weight) for group in groups],
    )


def _mean_of(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """Mean over what is a number, by weight; NaN where nothing is."""
    pairs = [
        (value, weight)
        for value, weight in zip(values, weights if weights is not None else [1.0] * len(values), strict=True)
        if not math.isnan(value) and weight > 0
    ]
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total else math.nan


def _spread(groups: Sequence[GroupStats], name: str) -> tuple[float, float]:
    """Mean and sample standard deviation of one reward over the rollouts of all groups; NaN without any."""
    parts = [
        (group.parts_count[name], group.parts_mean[name], group.parts_squares[name])
        for group in groups
        if group.parts_count.get(name)
    ]
    count = sum(number for number, _, _ in parts)
    if not count:
        return math.nan, math.nan
    mean = sum(number * group_mean for number, group_mean, _ in parts) / count
    squares = sum(squares + number * (group_mean - mean) ** 2 for number, group_mean, squares in parts)
    return mean, math.sqrt(squares / (count - 1)) if count > 1 else 0.0


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else math.nan
