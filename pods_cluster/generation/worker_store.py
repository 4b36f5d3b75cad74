"""The rollouts that a generator worker holds: taken by ranks, forgotten, and reported to another selector."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pods_cluster.generation.engine_thread import EngineCalls
from pods_cluster.generation.messages import WorkerFailed
from pods_cluster.generation.packed_rollouts import PackedRollouts, pack
from pods_cluster.generation.reporter import Reporter, SelectorLink
from pods_cluster.generation.rollout_store import RolloutStore
from pods_cluster.types import GroupId, Rollout


class StoreCalls(EngineCalls):
    """The calls of a worker about groups and rollouts that are here; the worker itself has the engine and the scorers."""

    _store: RolloutStore
    _reporter: Reporter
    _link: SelectorLink
    _abort: Callable[[list[str]], None]
    """Ends unfinished requests, by their keys, not waiting for the engine."""

    def take(self, wanted: Iterable[tuple[GroupId, Sequence[int]]]) -> PackedRollouts:
        """Finished rollouts, which are forgotten here; those that are not here are named in the answer."""
        found: list[Rollout] = []
        absent: dict[tuple[GroupId, int], str] = {}
        for group, indices in wanted:
            taken, missing = self._store.take(GroupId(*group), list(indices))
            found += taken
            absent.update(((GroupId(*group), index), "not finished, or taken or dropped before") for index in missing)
        self._rescore(found)
        return pack(found, absent)

    def keep(self, selections: Iterable[tuple[GroupId, Iterable[int]]]) -> None:
        """Keep only these rollouts of these groups: others are forgotten, unfinished ones aborted."""
        self._abort([key for group, indices in selections for key in self._store.keep(GroupId(*group), indices)])

    def drop(self, groups: Iterable[GroupId]) -> None:
        """Forget these groups: finished rollouts go, unfinished ones are aborted."""
        self._abort([key for group in groups for key in self._store.drop(GroupId(*group))])

    def abort(self, group: GroupId, indices: Sequence[int] | None = None) -> None:
        """End unfinished rollouts early; they are reported as aborted, with the tokens they have and no reward."""
        self._abort(self._store.pending_keys(GroupId(*group), indices))

    def begin_again(self, selector: Any, timeout: float) -> None:
        """Forget every group, and report to `selector` from now on: the run goes on from another state.

        A group may come again under the same id, so nothing of it may be left here then. Raises WorkerFailed when
        rollouts are still in the engine or at the scorers after `timeout` seconds.
        """
        self._check()
        self._link.cut()
        self.drop(self._store.groups())
        if not self._store.wait_finished(timeout):
            raise WorkerFailed(f"rollouts that were given up had not ended after {timeout:g} s")
        self._link = SelectorLink(selector, self.config.generator.request_timeout)
        self._reporter.begin_again(self._link.send)

    def report_again(self, selector: Any, groups: Sequence[GroupId]) -> None:
        """Report to `selector` from now on, first the finished rollouts of these groups that are here."""
        self._check()
        self._link.cut()
        self._link = SelectorLink(selector, self.config.generator.request_timeout)
        self._reporter.begin_again(self._link.send)  # before the look: what finishes after it reports itself
        for group in groups:
            size, rollouts = self._store.finished(GroupId(*group))
            for rollout in rollouts:
                self._reporter.add(rollout, size)

    def sample(self, group: GroupId) -> list[Rollout]:
        """Copies of the group's finished rollouts that are here."""
        return self._store.sample(GroupId(*group))

    def groups(self) -> list[GroupId]:
        """Groups with unfinished or stored rollouts here."""
        return self._store.groups()

    def drain(self, timeout: float) -> list[GroupId]:
        """Wait until every rollout here was taken or given up; returns the groups left after `timeout` seconds."""
        self._check()
        self._store.wait_empty(timeout)
        return self._store.groups()

    def _rescore(self, rollouts: list[Rollout]) -> None:
        """Log-probabilities of kept rollouts alone, where the engine leaves them out while it samples."""
        if any(rollout.logprobs is None for rollout in rollouts):
            temperature = self.config.generator.temperature
            self._call("rescore", lambda engine: engine.rescore(rollouts, temperature))
