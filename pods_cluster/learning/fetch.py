"""The kept rollouts on their way from the generator workers' memory to the rank that trains them."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import exceptions

from pods_cluster.names import NAMESPACE
from pods_cluster.types import Locator, Rollout


@dataclass(slots=True)
class FetchReport:
    """What one rank got: `nbytes` is the size of the rollouts as they were sent, `reasons` counts the lost by cause."""

    received: int = 0
    lost: list[Locator] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0
    seconds: float = 0.0

    def lose(self, locators: Sequence[Locator], reason: str) -> None:
        self.lost.extend(locators)
        self.reasons[reason] = self.reasons.get(reason, 0) + len(locators)


class RolloutFetcher:
    """Takes rollouts by their locators: one request for each worker and group, all at the same time."""

    def __init__(self) -> None:
        self._workers: dict[str, Any] = {}

    def fetch(self, locators: Sequence[Locator], timeout: float) -> tuple[dict[Locator, Rollout], FetchReport]:
        """Take `locators` within `timeout` seconds.

        Never raises for a rollout that cannot be had: it is in `report.lost`.
        """
        started = time.monotonic()
        report = FetchReport()
        found: dict[Locator, Rollout] = {}
        batches: dict[tuple[str, Any], list[Locator]] = {}
        for locator in locators:
            batches.setdefault((locator.worker, locator.group), []).append(locator)
        failed = self._take(list(batches.values()), started + timeout, found, report, again=True)
        # One rollout that is gone refuses its whole request: ask for the others one by one.
        if failed:
            self._take([[one] for batch in failed for one in batch], started + timeout, found, report, again=False)
        report.received = len(found)
        report.seconds = time.monotonic() - started
        return found, report

    def _take(
        self,
        batches: list[list[Locator]],
        deadline: float,
        found: dict[Locator, Rollout],
        report: FetchReport,
        *,
        again: bool,
    ) -> list[list[Locator]]:
        pending: dict[Any, list[Locator]] = {}
        retry: list[list[Locator]] = []
        for batch in batches:
            try:
                worker = self._worker(batch[0].worker)
                indices = [locator.index for locator in batch]
                pending[worker.take.remote(batch[0].group, indices)] = batch
            except ValueError:
                report.lose(batch, f"worker {batch[0].worker} is gone")
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=max(deadline - time.monotonic(), 0.0))
            if not ready:
                for batch in pending.values():
                    report.lose(batch, f"worker {batch[0].worker} did not answer in time")
                break
            batch = pending.pop(ready[0])
            try:
                rollouts: list[Rollout] = ray.get(ready[0])
            except exceptions.RayActorError:
                self._workers.pop(batch[0].worker, None)
                report.lose(batch, f"worker {batch[0].worker} died")
            except exceptions.RayError as error:
                if again and len(batch) > 1:
                    retry.append(batch)
                else:
                    report.lose(batch, _first_line(error))
            else:
                by_index = {rollout.index: rollout for rollout in rollouts}
                report.nbytes += len(pickle.dumps(rollouts, protocol=pickle.HIGHEST_PROTOCOL))
                for locator in batch:
                    if locator.index in by_index:
                        found[locator] = by_index[locator.index]
                    else:
                        report.lose([locator], f"worker {locator.worker} left it out of its answer")
        return retry

    def _worker(self, name: str) -> Any:
        if name not in self._workers:
            self._workers[name] = ray.get_actor(name, namespace=NAMESPACE)
        return self._workers[name]


def _first_line(error: BaseException) -> str:
    cause = getattr(error, "cause", None) or error
    text = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {text[0] if text else ''}"
