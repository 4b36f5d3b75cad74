"""Packs decisions into columns for pickling: sixteen locators one by one would cost more than selecting a group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any

import numpy as np

from pods_cluster.selection.group_stats import GroupStats
from pods_cluster.types import GroupId, Locator, Selection

_STATS = attrgetter(*(field.name for field in fields(GroupStats)))
_new_locator: Callable[[Any], Locator] = partial(tuple.__new__, Locator)
_HEAD = attrgetter("prompt_tokens", "group_mean", "group_std", "group_valid", "settled")


def make_locators(workers: Iterable[str], group: GroupId, indices: Sequence[int]) -> list[Locator]:
    """Locators of rollouts of one group, made without a call in Python for each."""
    return list(map(_new_locator, zip(workers, repeat(group), indices, strict=False)))


def pack_stats(stats: GroupStats) -> tuple[Any, ...]:
    """Return the values of all fields, in their order."""
    return _STATS(stats)


def unpack_stats(values: tuple[Any, ...]) -> GroupStats:
    """Make the statistics of what `pack_stats` returned."""
    return GroupStats(*values)


def pack_selections(selections: list[Selection]) -> tuple[Any, ...]:
    """Return one array a field over the kept rollouts of all groups, and a table of the workers' names."""
    if not selections:
        return ()
    workers: dict[str, int] = {}
    holders = [
        workers.setdefault(locator.worker, len(workers)) for selection in selections for locator in selection.locators
    ]
    return (
        [(*_HEAD(selection), *selection.group) for selection in selections],
        [len(selection) for selection in selections],
        list(workers),
        np.array(holders, dtype=np.int32),
        np.array([locator.index for selection in selections for locator in selection.locators], dtype=np.int32),
        np.concatenate([selection.rewards for selection in selections]),
        np.concatenate([selection.lengths for selection in selections]),
        np.concatenate([selection.first_versions for selection in selections]),
        [selection.weights for selection in selections],
        [selection.environment_tokens for selection in selections],
    )


def unpack_selections(packed: tuple[Any, ...]) -> list[Selection]:
    """Unpack what `pack_selections` made; the arrays are copies, which may be written to."""
    if not packed:
        return []
    heads, counts, workers, holders, indices, rewards, lengths, first_versions, weights, environment = packed
    names, positions = [workers[holder] for holder in holders.tolist()], indices.tolist()
    selections, start = [], 0
    for (prompt_tokens, mean, std, valid, settled, *group), count, own, written in zip(
        heads, counts, weights, environment, strict=True
    ):
        end = start + count
        group_id = GroupId(*group)
        selections.append(
            Selection(
                group=group_id,
                locators=make_locators(names[start:end], group_id, positions[start:end]),
                rewards=rewards[start:end].copy(),
                lengths=lengths[start:end].copy(),
                prompt_tokens=prompt_tokens,
                first_versions=first_versions[start:end].copy(),
                group_mean=mean,
                group_std=std,
                group_valid=valid,
                settled=settled,
                weights=own,
                environment_tokens=written,
            )
        )
        start = end
    return selections
