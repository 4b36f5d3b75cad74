"""Fetching of the kept rollouts from the generator workers' memory, by the rank that trains them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray import exceptions

from pods_cluster.actor_names import NAMESPACE
from pods_cluster.generation.packed_rollouts import PackedRollouts, unpack
from pods_cluster.learning.reports import FetchReport
from pods_cluster.node_reach import node_of, reaches_now
from pods_cluster.stopped_process import LISTEN_SECONDS, SILENT_SECONDS, UNREACHED_SECONDS
from pods_cluster.types import GroupId, Locator, Rollout
from pods_cluster.weights.transport import first_line


class RolloutFetcher:
    """Takes rollouts by their locators: one request to each worker, all at the same time."""

    def __init__(self) -> None:
        self._workers: dict[str, Any] = {}

    def fetch(self, locators: Sequence[Locator], timeout: float) -> tuple[dict[Locator, Rollout], FetchReport]:
        """Take `locators` within `timeout` seconds.

        Never raises for a rollout that cannot be had: it is in the report's `missing`, with the cause.
        """
        started = time.monotonic()
        deadline = started + timeout
        report = FetchReport()
        found: dict[Locator, Rollout] = {}
        by_worker: dict[str, list[Locator]] = {}
        for locator in locators:
            by_worker.setdefault(locator.worker, []).append(locator)
        pending: dict[Any, list[Locator]] = {}
        for name, batch in by_worker.items():
            groups: dict[GroupId, list[int]] = {}
            for locator in batch:
                groups.setdefault(locator.group, []).append(locator.index)
            try:
                pending[self._worker(name).take.remote(list(groups.items()))] = batch
            except ValueError:
                report.add_missing(batch, f"worker {name} is gone")
        lost = _LostNodes()
        while pending:
            left = max(deadline - time.monotonic(), 0.0)
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=min(left, lost.patience()))
            if ready:
                self._receive(ready[0], pending.pop(ready[0]), deadline, found, report)
                continue
            if not left:
                for batch in pending.values():
                    report.add_missing(batch, f"worker {batch[0].worker} did not answer in time")
                break
            for call, batch in list(pending.items()):
                if lost.holds(self._workers[batch[0].worker]):
                    report.add_missing(pending.pop(call), f"worker {batch[0].worker}: its node cannot be reached")
        report.received = len(found)
        report.seconds = time.monotonic() - started
        return found, report

    def _receive(
        self,
        reference: Any,
        batch: list[Locator],
        deadline: float,
        found: dict[Locator, Rollout],
        report: FetchReport,
    ) -> None:
        worker = batch[0].worker
        try:
            packed: PackedRollouts = ray.get(reference, timeout=max(deadline - time.monotonic(), 1.0))
        except exceptions.RayActorError:
            self._workers.pop(worker, None)
            report.add_missing(batch, f"worker {worker} died")
            return
        except exceptions.RayError as error:
            report.add_missing(batch, f"worker {worker}: {first_line(getattr(error, 'cause', None) or error)}")
            return
        report.received_bytes += packed.nbytes
        arrived = {(rollout.group, rollout.index): rollout for rollout in unpack(packed)}
        for locator in batch:
            rollout = arrived.get((locator.group, locator.index))
            if rollout is not None:
                found[locator] = rollout
            else:
                cause = packed.absent.get((locator.group, locator.index), "left out of the answer")
                report.add_missing([locator], f"worker {worker}: {cause}")

    def _worker(self, name: str) -> Any:
        if name not in self._workers:
            self._workers[name] = ray.get_actor(name, namespace=NAMESPACE)
        return self._workers[name]


class _LostNodes:
    """Looks at the nodes of workers that do not answer: one that cannot be reached is not waited for till the deadline."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._since: dict[Any, float] = {}

    def patience(self) -> float:
        """Seconds until the next look."""
        return max(self._began + SILENT_SECONDS - time.monotonic(), LISTEN_SECONDS)

    def holds(self, worker: Any) -> bool:
        """Whether the worker's node could not be reached for UNREACHED_SECONDS."""
        began = time.monotonic()
        if (node := node_of(worker)) is None or reaches_now(node):
            self._since.pop(worker, None)
            return False
        return time.monotonic() - self._since.setdefault(worker, began) >= UNREACHED_SECONDS
