"""Assembly of one group from the shards that arrive, and its evaluation for a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np
from jaxtyping import Bool, Float64, Int32

from pods_cluster.group_shard import GroupShard
from pods_cluster.selection.decision_packing import make_locators
from pods_cluster.selection.group_stats import GroupStats, Mask, group_stats
from pods_cluster.selection.policy import SelectionPolicy
from pods_cluster.selection.select import Outcome, select
from pods_cluster.types import Fate, GroupId, Selection

_PENDING = -1
_LOST = -2


class ShardError(ValueError):
    """A shard that contradicts itself or its group, by a fault of the worker that sent it."""


@dataclass(slots=True)
class GroupEvaluation:
    """The evaluation of a complete group at one learner version: a selection to train on, or None and the fate."""

    fate: Fate
    stats: GroupStats
    selection: Selection | None


@dataclass(slots=True)
class GroupAssembler:
    """Collects the numbers of one group's rollouts by rollout index, so that the order of arrival does not matter.

    Rollouts 0 to `issued` - 1 of the `size` have been asked for, `first` of them in the first wave. The group is
    complete when finished and lost rollouts account for all issued ones; `n_worker_lost` were lost with a worker after
    they had arrived, `reported_lost` before. `settled`: the group was stopped early. `holder` is the position in
    `workers` of the worker that holds a rollout, -1 before it arrives, -2 when it is lost.
    """

    group: GroupId
    size: int
    issued: int = 0
    """0 at the start: all of them."""
    first: int = field(init=False)
    settled: bool = False
    prompt_tokens: int = 0
    workers: list[str] = field(default_factory=list)
    reported_lost: int = 0
    n_finished: int = 0
    n_worker_lost: int = 0
    holder: Int32[np.ndarray, " size"] = field(init=False)
    rewards: Float64[np.ndarray, " size"] = field(init=False)
    lengths: Int32[np.ndarray, " size"] = field(init=False)
    first_versions: Int32[np.ndarray, " size"] = field(init=False)
    truncated: Bool[np.ndarray, " size"] = field(init=False)
    aborted: Bool[np.ndarray, " size"] = field(init=False)
    parts: dict[str, Float64[np.ndarray, " size"]] = field(default_factory=dict)
    environment_tokens: Int32[np.ndarray, " size"] | None = None

    def __post_init__(self) -> None:
        n = self.size
        self.first = self.issued = self.issued or n
        self.holder = np.full(n, _PENDING, dtype=np.int32)
        self.rewards = np.full(n, np.nan)
        self.lengths = np.zeros(n, dtype=np.int32)
        self.first_versions = np.zeros(n, dtype=np.int32)
        self.truncated = np.zeros(n, dtype=np.bool_)
        self.aborted = np.zeros(n, dtype=np.bool_)

    @property
    def complete(self) -> bool:
        """Whether finished and lost rollouts account for all that were issued."""
        return self.n_finished + self.n_worker_lost + self.reported_lost >= self.issued

    def usable_rewards(self, oldest: int | None) -> Float64[np.ndarray, " issued"]:
        """Return the rewards of the issued rollouts, NaN where one is missing, aborted, or older than `oldest`.

        `oldest` is the lowest weight version that may be trained on; None: any.
        """
        usable = (self.holder >= 0) & ~self.aborted
        if oldest is not None:
            usable &= self.first_versions >= oldest
        return np.where(usable, self.rewards, np.nan)[: self.issued]

    def add(self, shard: GroupShard) -> int:
        """Add a shard and return how many of its rollouts were ignored because they are here already.

        A rollout that was lost with its worker and comes again from another one is taken. Raises ShardError when arrays
        differ in length, an index is out of range, or the size is not the one that was announced.
        """
        given = len(shard.indices)
        whole = given == self.size and not self.workers and bool((shard.indices == np.arange(given)).all())
        self._check(shard, indices_too=not whole)
        self.prompt_tokens = shard.prompt_tokens
        self.reported_lost += shard.lost
        if given == 0:
            return 0
        if shard.worker not in self.workers:
            self.workers.append(shard.worker)
        if shard.environment_tokens is not None and self.environment_tokens is None:
            self.environment_tokens = np.zeros(self.size, dtype=np.int32)
        if whole:  # one worker made the group: nothing to put in order
            self._take_whole(shard)
            return 0
        indices = shard.indices
        fresh: slice | Bool[np.ndarray, " rollouts"] = slice(None)
        if self.n_finished and (self.holder[indices] >= 0).any():
            fresh = self.holder[indices] < 0
            indices = indices[fresh]
        if self.n_worker_lost:
            self.n_worker_lost -= len(np.unique(indices[self.holder[indices] == _LOST]))
        self.holder[indices] = self.workers.index(shard.worker)
        self.rewards[indices] = shard.rewards[fresh]
        self.lengths[indices] = shard.lengths[fresh]
        self.first_versions[indices] = shard.first_versions[fresh]
        self.truncated[indices] = shard.truncated[fresh]
        self.aborted[indices] = shard.aborted[fresh]
        for name, values in shard.parts.items():
            if name not in self.parts:
                self.parts[name] = np.full(self.size, np.nan)
            self.parts[name][indices] = values[fresh]
        if shard.environment_tokens is not None and self.environment_tokens is not None:
            self.environment_tokens[indices] = shard.environment_tokens[fresh]
        before, self.n_finished = self.n_finished, int(np.count_nonzero(self.holder >= 0))
        return given - (self.n_finished - before)

    def _take_whole(self, shard: GroupShard) -> None:
        # Copies: the arrays that Ray delivers may be read-only views of a whole message.
        self.holder.fill(0)
        self.rewards = np.array(shard.rewards, dtype=np.float64)
        self.lengths = np.array(shard.lengths, dtype=np.int32)
        self.first_versions = np.array(shard.first_versions, dtype=np.int32)
        self.truncated = np.array(shard.truncated, dtype=np.bool_)
        self.aborted = np.array(shard.aborted, dtype=np.bool_)
        self.parts = {name: np.array(values, dtype=np.float64) for name, values in shard.parts.items()}
        if shard.environment_tokens is not None:
            self.environment_tokens = np.array(shard.environment_tokens, dtype=np.int32)
        self.n_finished = self.size

    def _check(self, shard: GroupShard, indices_too: bool) -> None:
        n = len(shard.indices)
        columns = (shard.rewards, shard.lengths, shard.first_versions, shard.truncated, shard.aborted)
        columns += tuple(shard.parts.values())
        if shard.environment_tokens is not None:
            columns += (shard.environment_tokens,)
        parallel = all(len(values) == n for values in columns)
        in_range = not (indices_too and n and (shard.indices.min() < 0 or shard.indices.max() >= self.size))
        if shard.size == self.size and shard.lost >= 0 and parallel and in_range:
            return
        where = f"shard of group {shard.group} from worker {shard.worker!r}"
        if shard.size != self.size:
            raise ShardError(
                f"{where}: size: {shard.size} is not the {self.size} rollouts that the group was announced with"
            )
        if shard.lost < 0:
            raise ShardError(f"{where}: lost: {shard.lost} is negative")
        names = ("rewards", "lengths", "first_versions", "truncated", "aborted", *shard.parts, "environment_tokens")
        for name, values in zip(names, columns, strict=False):
            if len(values) != n:
                raise ShardError(f"{where}: {name}: {len(values)} entries for {n} indices; arrays must be parallel")
        raise ShardError(f"{where}: indices: {shard.indices.tolist()} are not all in 0..{self.size - 1}")

    def mark_lost(self, worker: str) -> int:
        """Mark the rollouts that `worker` holds as lost, and return how many they are."""
        if worker not in self.workers:
            return 0
        held = self.holder == self.workers.index(worker)
        lost = int(np.count_nonzero(held))
        self.holder[held] = _LOST
        self.n_finished -= lost
        self.n_worker_lost += lost
        return lost

    def evaluate(
        self, policy: SelectionPolicy, learner_version: int, staleness: int, keep: int | None = None
    ) -> GroupEvaluation:
        """Select among the rollouts that are here and fresh: learner_version - first version <= staleness.

        `keep`: so many in place of the policy's. Raises RuleError when the rule fails.
        """
        finished, usable, fresh = self._masks(learner_version - staleness)
        outcome = select(
            self.rewards if fresh is None else np.where(fresh, self.rewards, np.nan),
            policy.config.keep if keep is None else keep,
            policy.rule,
            policy.seed,
            self.group,
            min_valid=policy.min_valid,
            no_signal_scope=policy.scope,
            lengths=self.lengths,
            truncated=self.truncated,
            parts=self.parts,
            prompt_tokens=self.prompt_tokens,
        )
        stats = group_stats(self, finished, usable, fresh, outcome)
        if outcome.fate is Fate.TOO_FEW_VALID:
            return GroupEvaluation(self._fate_of_too_few(policy.min_valid, usable), stats, None)
        if outcome.fate is Fate.NO_SIGNAL and policy.config.no_signal != "keep":
            return GroupEvaluation(Fate.NO_SIGNAL, stats, None)
        return GroupEvaluation(Fate.TRAINED, stats, self._selection(outcome, policy.mask_truncated))

    def _masks(self, oldest: int | None) -> tuple[Mask, Mask, Mask]:
        """Return which rollouts are finished, which of these usable, and which of those fresh; None stands for all."""
        if (
            self.n_finished == self.size
            and not np.count_nonzero(self.aborted)
            and (oldest is None or self.first_versions[self.first_versions.argmin()] >= oldest)
        ):
            return None, None, None
        finished = self.holder >= 0
        usable = finished & ~self.aborted
        return finished, usable, usable if oldest is None else usable & (self.first_versions >= oldest)

    def _fate_of_too_few(self, min_valid: int, usable: Mask) -> Fate:
        """Return why too few valid rewards are left: STALE or LOST where that made the difference, else TOO_FEW_VALID."""
        finite = np.isfinite(self.rewards)
        enough_but_stale = int(np.count_nonzero(finite if usable is None else finite & usable))
        if enough_but_stale >= min_valid:
            return Fate.STALE
        lost = finite & (self.holder == _LOST) & ~self.aborted
        never_came = int(np.count_nonzero(self.holder[: self.issued] == _PENDING))
        if enough_but_stale + int(np.count_nonzero(lost)) + never_came >= min_valid:
            return Fate.LOST
        return Fate.TOO_FEW_VALID

    def _selection(self, outcome: Outcome, mask_truncated: bool) -> Selection:
        kept, weights = outcome.kept, outcome.weights
        if mask_truncated and (cut := self.truncated[kept]).any():
            weights = np.where(cut, 0.0, 1.0 if weights is None else weights)
        if len(self.workers) == 1:
            workers: Iterable[str] = repeat(self.workers[0])
        else:
            workers = [self.workers[holder] for holder in self.holder[kept].tolist()]
        return Selection(
            group=self.group,
            locators=make_locators(workers, self.group, kept.tolist()),
            rewards=self.rewards[kept],
            lengths=self.lengths[kept],
            prompt_tokens=self.prompt_tokens,
            first_versions=self.first_versions[kept],
            group_mean=outcome.group_mean,
            group_std=outcome.group_std,
            group_valid=outcome.n_valid,
            settled=self.settled,
            weights=weights,
            environment_tokens=None if self.environment_tokens is None else self.environment_tokens[kept],
        )

    def stats(self) -> GroupStats:
        """Compute the statistics of the group as it is, without a selection."""
        return group_stats(self, *self._masks(None), None)
