"""Errors by which a run ends of its own judgement."""

from __future__ import annotations

from collections.abc import Sequence

from pods_cluster.config import Config
from pods_cluster.types import GroupId
from pods_cluster.wording import counted


class RunError(Exception):
    """The run cannot go on; the text says what it waited for, or why it failed."""


class TrainingFails(RunError):
    """Losses or gradients of too many updates in a row are not finite; the text names the last checkpoint."""


class SelectorLost(RunError):
    """The selector died or does not answer; what it knew of the groups in flight is gone, and they come again."""


class RewardsFail(RunError):
    """Rewards fail so that no step can be made; the text names the reward, how often it failed, and the cause."""


def step_overdue(
    config: Config, got: int, want: int, in_flight: Sequence[GroupId], workers: int, failures: str
) -> RunError:
    """The error of a step that is not full after `run.step_timeout`: `got` of `want` groups are there. `failures`: of rewards."""
    waiting = ", ".join(str(group) for group in in_flight[:8])
    return RunError(
        f"run.step_timeout: {config.run.step_timeout:g} s passed and the step has {got} of {want} groups; "
        f"waiting for {counted(len(in_flight) - got, 'group')} ({waiting} …) on {counted(workers, 'worker')}; "
        f"raise run.step_timeout, lower generator.max_tokens or add generators"
        + (f". Rewards: {failures}" if failures else "")
    )
