"""The driver's watch over the controller: what it tells of the run, and when it answers no more."""

from __future__ import annotations

import logging
from typing import Any

import ray
from ray.exceptions import RayError

from pods_cluster.client.lost_controller import ControllerLost
from pods_cluster.stopped_process import Silence, Unanswered
from pods_cluster.telemetry.step_record import Feed

SILENCE_SECONDS = 30.0
"""How long a controller that has answered before may leave a question unanswered before it counts as hung. One that is
stopped is noticed sooner."""
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
        self._silence: Silence | None = None
        self._process: Any = controller.process.remote()
        self.step = 0
        """The newest step that was shown."""

    def feed(self) -> list[Any]:
        """Steps and events since the last call, not waiting for any. Raises RunError, the controller killed, when there
        was no answer for SILENCE_SECONDS."""
        if self._poll is None:
            self._poll = self.controller.poll.remote(self._cursor)
        if ray.wait([self._poll], timeout=0)[0]:
            answer, self._poll = self._poll, None
            return self._take(answer)
        if self._silence is None:
            return []
        self._silence.goes_on()
        try:
            self._silence.check_here(self._known_process(), SILENCE_SECONDS)
        except Unanswered as error:
            ray.kill(self.controller)
            log = "" if error.stopped else " (see its log in Ray's session folder)"
            raise ControllerLost(f"{self.name}: the run's controller {error}{log}; it was killed") from error
        return []

    def _known_process(self) -> int | None:
        if not isinstance(self._process, int):
            try:
                self._process = ray.get(self._process, timeout=0)
            except RayError:  # it is gone, which the call of `run` says, or this answer is on its way
                return None
        return self._process

    def last_feed(self) -> list[Any]:
        """The rest of a run that is over, if the controller still answers."""
        answer = self.controller.poll.remote(self._cursor)
        ray.wait([answer], timeout=LAST_SECONDS)
        return self._take(answer)

    def _take(self, answer: Any) -> list[Any]:
        try:
            feed: Feed = ray.get(answer, timeout=0)
        except RayError as error:  # where the controller died, the call of `run` says so
            log.debug("no answer from %s: %s", self.name, error)
            return []
        self._silence, self._cursor = Silence(), feed.cursor
        self.step = max((item["step"] for what, item in feed.items if what == "step"), default=self.step)
        return feed.items
