"""The driver's watch over the controller: what it tells of the run, and when it answers no more."""

from __future__ import annotations

import logging
import time
from typing import Any

import ray
from ray.exceptions import RayError

from pods_cluster.client.lost_controller import ControllerLost
from pods_cluster.stopped_process import APART_SECONDS, SILENT_SECONDS, is_stopped
from pods_cluster.telemetry.step_record import Feed

SILENCE_SECONDS = 30.0
"""How long a controller that has answered before may leave a question unanswered before it counts as hung. One that is
stopped is noticed sooner."""
STOPPED_SECONDS = 5.0
"""Time between two looks, which come every quarter of a second, after which this process counts as having been stopped."""
LAST_SECONDS = 30.0
"""Deadline of the last questions to a run that is over."""

log = logging.getLogger(__name__)


class ControllerWatch:
    """Keeps one `poll` of a controller under way: shows what it answers, and notices when it answers no more.

    `poll` runs on the controller's event loop, so silence means that the loop is held up or the process is stopped, which
    the process's state tells, as it runs on this node. Silence does not count before the first answer: until then the
    process starts.
    """

    def __init__(self, controller: Any, name: str) -> None:
        self.controller, self.name = controller, name
        self._cursor = 0
        self._poll: Any = None
        self._answered_at: float | None = None
        self._looked_at = 0.0
        self._process: Any = controller.process.remote()
        self._stopped_at: float | None = None
        self.step = 0
        """The newest step that was shown."""

    def feed(self) -> list[Any]:
        """Steps and events since the last call, not waiting for any. Raises RunError, the controller killed, when there
        was no answer for SILENCE_SECONDS."""
        if self._poll is None:
            self._poll = self.controller.poll.remote(self._cursor)
        now = time.monotonic()
        if self._answered_at is not None and now - self._looked_at > STOPPED_SECONDS:
            self._answered_at = now  # this process was stopped itself, and an answer may be on its way
        self._looked_at = now
        if ray.wait([self._poll], timeout=0)[0]:
            answer, self._poll = self._poll, None
            return self._take(answer, now)
        if self._answered_at is None:
            return []
        silent = now - self._answered_at
        stopped = silent > SILENT_SECONDS and self._stays_stopped(now)
        if stopped or silent > SILENCE_SECONDS:
            ray.kill(self.controller)
            why = "is stopped" if stopped else "hangs (see its log in Ray's session folder)"
            raise ControllerLost(
                f"{self.name}: the run's controller has not answered for {silent:.0f} s, so it was killed; its process {why}"
            )
        return []

    def _stays_stopped(self, now: float) -> bool:
        """Whether the controller's process is stopped and was so a second ago."""
        if not isinstance(self._process, int):
            try:
                self._process = ray.get(self._process, timeout=0)
            except RayError:  # it is gone, which the call of `run` says, or this answer is on its way
                return False
        if not is_stopped(self._process):
            self._stopped_at = None
            return False
        self._stopped_at = self._stopped_at or now
        return now - self._stopped_at > APART_SECONDS

    def last_feed(self) -> list[Any]:
        """The rest of a run that is over, if the controller still answers."""
        answer = self.controller.poll.remote(self._cursor)
        ray.wait([answer], timeout=LAST_SECONDS)
        return self._take(answer, time.monotonic())

    def _take(self, answer: Any, now: float) -> list[Any]:
        try:
            feed: Feed = ray.get(answer, timeout=0)
        except RayError as error:  # where the controller died, the call of `run` says so
            log.debug("no answer from %s: %s", self.name, error)
            return []
        self._answered_at, self._cursor = now, feed.cursor
        self.step = max((item["step"] for what, item in feed.items if what == "step"), default=self.step)
        return feed.items
