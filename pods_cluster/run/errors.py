"""What ends a run by its own judgement."""

from __future__ import annotations


class RunError(Exception):
    """The run cannot go on; the text says what it waited for, or why it failed."""


class TrainingFails(RunError):
    """Losses or gradients of too many updates in a row are not finite; the text names the last checkpoint."""


class SelectorLost(RunError):
    """The selector died or does not answer; what it knew of the groups in flight is gone, and they come again."""


class RewardsFail(RunError):
    """Rewards fail so that no step can be made; the text names the reward, how often it failed, and the cause."""
