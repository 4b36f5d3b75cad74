"""The selector's instructions on a group that is being made (its next wave of rollouts, or its end), sent to generators."""

from __future__ import annotations

import asyncio
import math

from pods_cluster.generation.distribute import ExpectedLengths
from pods_cluster.generation.messages import Portion
from pods_cluster.run.issued_groups import IssuedGroups
from pods_cluster.run.stages import Generators, Selector
from pods_cluster.selection.stopping import Instructions

POLL_SECONDS = 1.0
"""Deadline of one question to the selector; when it brings nothing the workers' health is checked."""
PAUSE_SECONDS = 0.02
"""Pause where no worker serves: all have died, and whoever found it starts another."""


async def pass_instructions(
    selector: Selector, pool: Generators, groups: IssuedGroups, lengths: ExpectedLengths, sending: asyncio.Lock
) -> None:
    """Pass the selector's instructions about groups in flight on, without end, also while the learner trains.

    `sending` is held meanwhile: nothing is sent for a group that is being given up. While no worker serves the next portions
    of groups wait; most of these groups have died with the workers and are given up. Raises what the selector or the pool
    raises.
    """
    while True:
        instructions = await selector.instructions(POLL_SECONDS)
        while not await _pass_on(instructions, pool, groups, lengths, sending):
            await asyncio.sleep(PAUSE_SECONDS)


async def _pass_on(
    instructions: Instructions,
    pool: Generators,
    groups: IssuedGroups,
    lengths: ExpectedLengths,
    sending: asyncio.Lock,
) -> bool:
    """Whether it was done; it was not where there is nobody to send a portion to."""
    async with sending:
        # Since the selector's answer a group may have been given up.
        portions = [
            Portion(
                wave.group,
                groups.prompt(wave.group),
                groups.size(wave.group),
                wave.start,
                wave.stop,
                wave.mean_length if math.isfinite(wave.mean_length) else lengths.expected(wave.group.row),
            )
            for wave in instructions.waves
            if wave.group in groups
        ]
        if portions and not pool.serving:
            return False
        if portions:
            await pool.submit(portions)
        if aborted := [group for group in instructions.abort if group in groups]:
            await pool.abort(aborted)
        return True
