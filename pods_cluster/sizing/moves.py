"""Decisions of live scaling: the moves that bring the pools to the sizes asked for (pure: no ray, no clock)."""

from __future__ import annotations

from dataclasses import dataclass

from pods_cluster.config import Config
from pods_cluster.config.base import MOST_WORKERS
from pods_cluster.wording import counted


class ScaleError(Exception):
    """A size that the run cannot have; the text names the field and the fix."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Workers of the two pools."""

    generators: int
    learners: int

    def __str__(self) -> str:
        return f"{counted(self.generators, 'generator')} and {counted(self.learners, 'learner rank')}"


@dataclass(frozen=True, slots=True)
class Pools:
    """The pools as they are: generators that take groups, newcomers that do not serve yet, and learner ranks.

    `reserved` is the size that the learner group has room for beyond its own, or is finding room for (None: neither).
    """

    serving: int
    coming: int
    learners: int
    reserved: int | None = None


@dataclass(frozen=True, slots=True)
class Moves:
    """Steps to take now: generators to start, to call off before they serve (`withdraw`) or to retire; room for a larger
    learner group to look for (`reserve`) or to give back (`release`).
    """

    start: int = 0
    withdraw: int = 0
    retire: int = 0
    reserve: int | None = None
    release: bool = False


def check_request(config: Config, generators: int | None, learners: int | None) -> None:
    """Raise ScaleError for sizes that no cluster could make right."""
    if generators is None and learners is None:
        raise ScaleError("scale: give generators, learners, or both")
    for name, count in (("generators", generators), ("learners", learners)):
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ScaleError(f"{name}: {count!r} workers; each pool has at least 1")
        if count is not None and count > MOST_WORKERS:
            raise ScaleError(f"{name}: {count:,} workers; a pool has at most {MOST_WORKERS:,}")
    if learners is None or learners == config.learner.workers:
        return
    sequences = config.trained_per_step // config.learner.updates_per_batch
    if learners > sequences:
        raise ScaleError(
            f"learners: {learners} ranks cannot share the {sequences} rollouts of an optimiser step "
            f"(learner.prompts_per_step x selector.keep); ask for {sequences} or fewer"
        )
    if not config.learner.resizable:
        raise ScaleError(
            f"learners: a run with learner.optimizer: {config.learner.optimizer} keeps its {config.learner.workers} "
            f"rank(s): its state comes in blocks that no other number of ranks can read; generators can change"
        )


def moves(target: Sizes, pools: Pools) -> Moves:
    """The moves that bring the pools nearer to the target; applied again and again they end, with none left.

    A learner group changes its size between two steps (`rebuild_due`); here only its room is seen to.
    """
    lacking = target.generators - pools.serving - pools.coming
    withdraw = min(pools.coming, max(0, -lacking))
    wanted = target.learners if target.learners > pools.learners else None
    return Moves(
        start=max(0, lacking),
        withdraw=withdraw,
        retire=max(0, -lacking - withdraw),
        reserve=wanted if wanted is not None and pools.reserved != wanted else None,
        release=wanted is None and pools.reserved is not None,
    )


def rebuild_due(target: Sizes, pools: Pools, room: bool) -> bool:
    """Whether the learner group is to be rebuilt at this step's boundary; `room`: what it lacks is reserved."""
    if target.learners == pools.learners:
        return False
    return target.learners < pools.learners or (room and pools.reserved == target.learners)


def describe(sizes: Sizes, pools: Pools) -> str:
    """A sentence about the changes that a request leads to."""
    parts = []
    for name, wanted, there in (
        ("generators", sizes.generators, pools.serving),
        ("learner ranks", sizes.learners, pools.learners),
    ):
        if wanted != there:
            parts.append(f"{name} go from {there} to {wanted}")
    if not parts:
        return f"the run has {sizes} already"
    return ", ".join(parts) + "; each change takes effect between two steps"
