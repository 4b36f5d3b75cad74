"""Reports of scored rollouts to the selector: numbers alone, several groups a message, a few messages a second."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pods_cluster.generation.messages import GeneratorError
from pods_cluster.group_shard import GroupShard
from pods_cluster.types import FinishReason, GroupId, Rollout

FLUSH_SECONDS = 0.02
HOLD_SECONDS = 0.5
"""Longest time for which a rollout waits for the others of its group that are made here."""
REPORTS_IN_FLIGHT = 64


def build_shard(worker: str, size: int, rollouts: Sequence[Rollout]) -> GroupShard:
    """The numbers of finished rollouts of one group of `size`."""
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.reward_parts)
    environment = [rollout.environment_tokens for rollout in rollouts]
    return GroupShard(
        group=rollouts[0].group,
        worker=worker,
        size=size,
        prompt_tokens=len(rollouts[0].prompt_ids),
        indices=np.array([rollout.index for rollout in rollouts], np.int32),
        rewards=np.array([_number(rollout.reward) for rollout in rollouts], np.float64),
        lengths=np.array([rollout.sampled_tokens for rollout in rollouts], np.int32),
        first_versions=np.array([rollout.first_version for rollout in rollouts], np.int32),
        last_versions=np.array([rollout.last_version for rollout in rollouts], np.int32),
        truncated=np.array([rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts], np.bool_),
        aborted=np.array([rollout.finish_reason is FinishReason.ABORT for rollout in rollouts], np.bool_),
        parts={
            name: np.array([_number(rollout.reward_parts.get(name)) for rollout in rollouts], np.float64)
            for name in names
        },
        environment_tokens=np.array(environment, np.int32) if any(environment) else None,
    )


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


class Reporter:
    """Gathers scored rollouts and hands shards to `send` from a thread of its own.

    What arrives within `FLUSH_SECONDS` travels together; at most one message is sent in that time. Rollouts of a group of
    which more come wait for them, at most `HOLD_SECONDS`: nobody selects from half a group. An exception of `send` goes to
    `failed`, once, and ends the reporting.
    """

    def __init__(
        self, worker: str, send: Callable[[list[GroupShard]], None], failed: Callable[[BaseException], None]
    ) -> None:
        self._worker = worker
        self._send = send
        self._failed = failed
        self._pending: dict[GroupId, tuple[int, list[Rollout]]] = {}
        self._due: dict[GroupId, float] = {}
        self._next = 0.0  # earliest time of the next message
        self._changed = threading.Condition()
        self._closed = False
        self.reported = 0
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)
        self._thread.start()

    def add(self, rollout: Rollout, size: int, more: bool = False) -> None:
        """A scored rollout of a group of `size`, in this worker's store; `more` of the group come."""
        due = time.monotonic() + (HOLD_SECONDS if more else FLUSH_SECONDS)
        with self._changed:
            self._pending.setdefault(rollout.group, (size, []))[1].append(rollout)
            if due < self._due.get(rollout.group, math.inf):
                self._due[rollout.group] = due
                self._changed.notify()

    def begin_again(self, send: Callable[[list[GroupShard]], None]) -> None:
        """Report to another selector from now on; what was not reported to the one before is dropped."""
        with self._changed:
            self._pending.clear()
            self._due.clear()
            self._send = send
            self._changed.notify()

    def close(self) -> None:
        """Send what is left and end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(5.0)

    def _run(self) -> None:
        while taken := self._take():
            send, groups = taken
            if not groups:
                return
            shards = [build_shard(self._worker, size, rollouts) for size, rollouts in groups]
            try:
                send(shards)
            except BaseException as error:
                self._failed(error)
                return
            self.reported += sum(len(shard) for shard in shards)

    def _take(self) -> tuple[Callable[[list[GroupShard]], None], list[tuple[int, list[Rollout]]]]:
        """Wait for groups that are due, with the selector that they are for; none after the end."""
        with self._changed:
            while True:
                now = time.monotonic()
                first = max(self._next, min(self._due.values(), default=math.inf))
                if first <= now or self._closed:
                    due = [group for group, when in self._due.items() if when <= now or self._closed]
                    for group in due:
                        del self._due[group]
                    self._next = now + FLUSH_SECONDS
                    return self._send, [self._pending.pop(group) for group in due]
                self._changed.wait(None if first == math.inf else first - now)


class SelectorLink:
    """The way of shards to the selector's actor, which is not waited for; without a selector they go nowhere.

    Nor do they once the selector is dead, or the link cut: the run finds that out by itself, and another selector asks for
    these groups again.
    """

    def __init__(self, selector: Any, patience: float) -> None:
        self._selector = selector
        self._patience = patience
        self._sent: list[Any] = []

    def cut(self) -> None:
        """Send nothing any more, and wait for no answer."""
        self._selector = None

    def send(self, shards: list[GroupShard]) -> None:
        """Send one report. Raises GeneratorError when `REPORTS_IN_FLIGHT` reports are out and the selector takes none of
        them for `patience` seconds.
        """
        selector = self._selector
        if selector is None:
            return
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        self._sent.append(selector.report.remote(shards))
        done, waiting = ray.wait(self._sent, num_returns=len(self._sent), timeout=0)
        if len(waiting) > REPORTS_IN_FLIGHT:
            more, deadline = [], time.monotonic() + self._patience
            while not more and self._selector is not None and (left := deadline - time.monotonic()) > 0:
                more, waiting = ray.wait(waiting, num_returns=1, timeout=min(left, 1.0))
            if self._selector is None:
                return
            if not more:
                raise GeneratorError(
                    f"the selector has taken none of {len(waiting)} reports for {self._patience:g} s "
                    "(generator.request_timeout); see its log"
                )
            done += more
        self._sent = waiting
        for reference in done:
            # What the selector has against a report, its next `collect` raises.
            with contextlib.suppress(RayTaskError):
                try:
                    ray.get(reference)
                except RayActorError:
                    self.cut()
