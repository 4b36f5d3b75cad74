"""Packing of kept rollouts for their way from a worker to the learner rank that trains them: a few flat arrays.

Texts and reward parts stay behind: the learner reads token ids, log-probabilities and versions, and has the rewards from
the selection. Pickled one by one, lists of Python numbers would take two to three times the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Float64, Int32

from pods_cluster.types import FinishReason, GroupId, Rollout

_REASONS = tuple(FinishReason)
_NO_LOGPROBS = 1
"""Bit of a rollout's flags: its log-probabilities are left to the learner."""


@dataclass(frozen=True, slots=True)
class PackedRollouts:
    """A worker's answer to a request for rollouts.

    `absent` says of each (group, index) that is not here why. The columns of `heads` are epoch, row, attempt, index, first
    version, last version, finish reason, flags; `prompt_of` points into the prompts, one for a group; token ids and
    log-probabilities (natural logs) lie end to end, `lengths` tokens each. `environment` has a row (rollout, start, stop)
    for each stretch of tokens that an environment wrote.
    """

    heads: Int32[np.ndarray, "rollouts 8"]
    rewards: Float64[np.ndarray, " rollouts"]
    lengths: Int32[np.ndarray, " rollouts"]
    tokens: Int32[np.ndarray, " tokens"]
    logprobs: Float[np.ndarray, " tokens"]
    prompt_of: Int32[np.ndarray, " rollouts"]
    prompt_lengths: Int32[np.ndarray, " prompts"]
    prompt_tokens: Int32[np.ndarray, " prompt_tokens"]
    environment: Int32[np.ndarray, "places 3"]
    absent: dict[tuple[GroupId, int], str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the rollouts as they are sent, the few of the envelope aside."""
        return sum(value.nbytes for name in self.__slots__ if isinstance(value := getattr(self, name), np.ndarray))


def pack(rollouts: Sequence[Rollout], absent: dict[tuple[GroupId, int], str] | None = None) -> PackedRollouts:
    """The rollouts as arrays. Log-probabilities travel as float32 where that loses nothing (engines compute so)."""
    prompts: dict[tuple[int, ...], int] = {}
    heads = np.empty((len(rollouts), 8), np.int32)
    logprobs: list[float] = []
    for place, rollout in enumerate(rollouts):
        flags = _NO_LOGPROBS if rollout.logprobs is None else 0
        reason = _REASONS.index(rollout.finish_reason)
        heads[place] = (*rollout.group, rollout.index, rollout.first_version, rollout.last_version, reason, flags)
        logprobs.extend(rollout.logprobs or ())
        prompts.setdefault(rollout.prompt_ids, len(prompts))
    exact = np.array(logprobs, np.float64)
    short = exact.astype(np.float32)
    return PackedRollouts(
        heads=heads,
        rewards=np.array([np.nan if r.reward is None else r.reward for r in rollouts], np.float64),
        lengths=np.array([len(rollout.token_ids) for rollout in rollouts], np.int32),
        tokens=_flat([rollout.token_ids for rollout in rollouts]),
        logprobs=short if np.array_equal(short.astype(np.float64), exact, equal_nan=True) else exact,
        prompt_of=np.array([prompts[rollout.prompt_ids] for rollout in rollouts], np.int32),
        prompt_lengths=np.array([len(prompt) for prompt in prompts], np.int32),
        prompt_tokens=_flat(list(prompts)),
        environment=np.array(
            [(place, *span) for place, rollout in enumerate(rollouts) for span in rollout.environment], np.int32
        ).reshape(-1, 3),
        absent=absent or {},
    )


def unpack(packed: PackedRollouts) -> list[Rollout]:
    """The rollouts again, without text and reward parts."""
    prompts = [tuple(ids) for ids in _cut(packed.prompt_tokens, packed.prompt_lengths)]
    rollouts: list[Rollout] = []
    environment: dict[int, list[tuple[int, int]]] = {}
    for place, begin, end in packed.environment.tolist():
        environment.setdefault(place, []).append((begin, end))
    start = 0
    for place, (head, reward, ids, prompt) in enumerate(
        zip(
            packed.heads.tolist(),
            packed.rewards.tolist(),
            _cut(packed.tokens, packed.lengths),
            packed.prompt_of.tolist(),
            strict=True,
        )
    ):
        epoch, row, attempt, index, first, last, reason, flags = head
        logprobs: list[float] | None = None
        if not flags & _NO_LOGPROBS:
            logprobs = packed.logprobs[start : start + len(ids)].tolist()
            start += len(ids)
        rollouts.append(
            Rollout(
                group=GroupId(epoch, row, attempt),
                index=index,
                prompt_ids=prompts[prompt],
                token_ids=ids,
                logprobs=logprobs,
                finish_reason=_REASONS[reason],
                first_version=first,
                last_version=last,
                reward=None if reward != reward else reward,
                environment=tuple(environment.get(place, ())),
            )
        )
    return rollouts


def _flat(parts: Sequence[Sequence[int]]) -> Int32[np.ndarray, " tokens"]:
    return np.array([token for part in parts for token in part], np.int32)


def _cut(flat: Int32[np.ndarray, " tokens"], lengths: Int32[np.ndarray, " parts"]) -> list[list[int]]:
    ends = np.cumsum(lengths).tolist()
    values = flat.tolist()
    return [values[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]
