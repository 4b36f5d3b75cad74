"""A look at the rewards before a run: each is imported in a scorer process, and tried on one completion."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pods_cluster.config import RewardConfig, RewardConfigError, ScoringConfig
from pods_cluster.scoring.calling import MissingColumn
from pods_cluster.scoring.score import FailureKind, ScoreRequest
from pods_cluster.scoring.scorer_output import Printed
from pods_cluster.scoring.scorer_pool import START_GRACE_SECONDS, ScorerPool


@dataclass(frozen=True, slots=True)
class RewardTrial:
    """Result of a reward for one completion: `value`, or None with the `problem` (without one it does not apply)."""

    reward: str
    value: float | None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """The trials of all rewards (none without a completion to try), and what they printed."""

    trials: tuple[RewardTrial, ...]
    printed: Printed


def probe_rewards(
    rewards: Sequence[RewardConfig],
    scoring: ScoringConfig,
    columns: Collection[str] | None = None,
    request: ScoreRequest | None = None,
) -> Probe:
    """Import the rewards in one scorer process and, with a `request`, score it.

    `columns` are those of the dataset, `answer` among them when rows have one; None: not known. Takes at most
    `scoring.load_timeout` and each reward's `timeout`. Raises RewardConfigError for a reward that cannot be imported,
    or needs a column or an argument that the rows do not give. Any other failure is the trial's problem: a reward may
    refuse nonsense.
    """
    with ScorerPool(rewards, scoring.model_copy(update={"workers": 1}), columns=columns) as pool:
        score = None
        if request is not None:
            # A reward that kills its process has it loaded again for the next one.
            patience = sum(reward.timeout + scoring.load_timeout for reward in rewards) + START_GRACE_SECONDS
            score = pool.submit(request).result(patience)
    if score is None:
        return Probe((), pool.printed())
    problems = {failure.reward: failure for failure in score.failures}
    for index, reward in enumerate(rewards):
        failure = problems.get(reward.key)
        kind, _, what = failure.message.partition(": ") if failure is not None else ("", "", "")
        if failure is not None and failure.kind is FailureKind.ERROR and kind == MissingColumn.__name__:
            have = f"they have {', '.join(sorted(columns))}; " if columns else ""
            raise RewardConfigError(
                index, "name", reward.name, what, f"{have}correct the name, or add the column to every row"
            )
    trials = tuple(
        RewardTrial(name, value, f"{problems[name].kind}: {problems[name].message}" if name in problems else None)
        for name, value in score.parts.items()
    )
    return Probe(trials, pool.printed())
