"""Groups of a step that are kept for people to read: some that were selected, and some that were dropped."""

from __future__ import annotations

from collections.abc import Collection

from pods_cluster.config import Config
from pods_cluster.run.stages import Generators
from pods_cluster.selection.selector_core import GroupFate
from pods_cluster.telemetry.step_record import SampleGroup
from pods_cluster.types import Fate, GroupId, Prompt, Selection


class GroupSamples:
    """Samples of the step that is being assembled, at most `run.samples_groups` selected groups and as many dropped ones.

    Dropped ones are also taken from the first step that has any: that is where one looks when a run learns nothing.
    """

    def __init__(self, config: Config, pool: Generators) -> None:
        self._config, self._pool = config, pool
        self._selected: list[SampleGroup] = []
        self._dropped: list[SampleGroup] = []
        self._drops_seen = False

    async def selected(self, selection: Selection, prompt: Prompt, step: int) -> None:
        """Take the whole group, if it is wanted, before the rollouts that were left out are forgotten."""
        if not self._due(step) or len(self._selected) >= self._config.run.samples_groups:
            return
        reason = f"{len(selection)} of {selection.group_valid} scored rollouts by {self._config.selector.rule}"
        kept = [locator.index for locator in selection.locators]
        self._selected.append(await self._sample(selection.group, prompt, kept, reason))

    async def dropped(self, ended: GroupFate, prompt: Prompt, step: int) -> None:
        """Take the whole group, if it is wanted, before it is forgotten."""
        if (self._drops_seen and not self._due(step)) or len(self._dropped) >= self._config.run.samples_groups:
            return
        if self._config.run.samples_every:
            needed = self._config.selector.min_valid or self._config.selector.keep
            sample = await self._sample(ended.group, prompt, (), _why(ended, needed))
            sample.fate = ended.fate
            self._dropped.append(sample)

    def of_step(self, lost: Collection[GroupId] = ()) -> list[SampleGroup]:
        """The step's samples, which are forgotten here; selected groups were trained, but for those that were `lost`."""
        for sample in self._selected:
            sample.fate = Fate.LOST if sample.group in lost else Fate.TRAINED
        samples = self._selected + self._dropped
        self._drops_seen = self._drops_seen or bool(self._dropped)
        self._selected, self._dropped = [], []
        return samples

    def clear(self) -> None:
        """Forget what was taken: its step is not made."""
        self._selected, self._dropped = [], []

    def _due(self, step: int) -> bool:
        every = self._config.run.samples_every
        return bool(every) and step % every == 0

    async def _sample(self, group: GroupId, prompt: Prompt, kept: Collection[int], reason: str) -> SampleGroup:
        rollouts = await self._pool.sample(group)
        rule = self._config.selector.rule
        return SampleGroup(group, prompt.text, rollouts, kept, answer=prompt.answer, rule=rule, reason=reason)


def _why(ended: GroupFate, needed: int) -> str:
    """Why a group was dropped, in words; `needed` rollouts have to be valid."""
    stats = ended.stats
    if ended.fate is Fate.NO_SIGNAL:
        if stats.reward_min == stats.reward_max:
            return f"dropped: all {stats.n_valid} rewards are {stats.reward_mean:g}, which teaches nothing"
        return "dropped: the rewards of those that would be kept are all equal, which teaches nothing"
    if ended.fate is Fate.STALE:
        return f"dropped: {stats.n_stale} of {stats.size} rollouts are too old for this step"
    if ended.fate is Fate.TOO_FEW_VALID:
        return f"dropped: {stats.n_valid} of {stats.size} rollouts can be trained on, {needed} are needed"
    return f"dropped: {ended.fate.value}"
