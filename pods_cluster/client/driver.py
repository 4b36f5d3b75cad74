"""The driver: what `pods train` does on the machine where it is typed."""

from __future__ import annotations

import logging
import signal
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from rich.console import Console

from pods_cluster.client.paths import absolute
from pods_cluster.config import Config, ConfigError
from pods_cluster.run.cluster import ClusterError, connect
from pods_cluster.run.controller import start_controller
from pods_cluster.run.loop import RunError
from pods_cluster.telemetry.progress import Progress
from pods_cluster.telemetry.summary import Summary

POLL_SECONDS = 0.25
STOP_SECONDS = 900.0
"""How long a stopping run may take to save its state before it is killed."""

log = logging.getLogger(__name__)


def train(config: Config, *, resume: bool = False, console: Console | None = None, live: bool | None = None) -> Summary:
    """Run the configuration to its end, showing it; Ctrl-C ends it with a saved state, a second one at once.

    Raises ConfigError, ClusterError, RunError or what a stage raised, each with its cause.
    """
    console = console or Console()
    config = absolute(config)
    owned = not ray.is_initialized()
    with console.status("connecting to Ray"):
        connect(config)
    try:
        controller = start_controller(config, resume=resume)
        # On its own, so that what the controller refuses is told before anything is shown.
        _result(controller.open.remote(), timeout=None)
        subtitle = (
            f"{Path(config.model.path).name} · {config.generator.workers} generator(s) → "
            f"{config.learner.workers} learner(s) · n={config.generator.rollouts_per_prompt} m={config.selector.keep}"
        )
        with Progress(config.run.name, config.run.steps, subtitle=subtitle, console=console, live=live) as progress:
            return _follow(controller, progress)
    finally:
        if owned:
            ray.shutdown()


class _Interrupts:
    """Counts Ctrl-C in place of raising: an exception could come in the middle of any call, and be swallowed there."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> _Interrupts:
        self._before = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, *_: object) -> None:
        self.count += 1


def _follow(controller: Any, progress: Progress) -> Summary:
    done = controller.run.remote()
    cursor, stopped_at = 0, None
    with _Interrupts() as interrupts:
        while True:
            finished, _ = ray.wait([done], timeout=POLL_SECONDS)
            cursor = _show(controller, progress, cursor)
            if finished:
                return _result(done, timeout=None)
            if interrupts.count and stopped_at is None:
                stopped_at = time.monotonic()
                progress.event("stopping", "Ctrl-C: ending after this step, saving the state (again: kill)")
                controller.stop.remote("Ctrl-C")
            if interrupts.count > 1:
                ray.kill(controller)
                raise RunError("killed by a second Ctrl-C; the last checkpoint is what is left")
            if stopped_at is not None and time.monotonic() - stopped_at > STOP_SECONDS:
                ray.kill(controller)
                raise RunError(f"the run did not end within {STOP_SECONDS:g} s of being told to; it was killed")


def _show(controller: Any, progress: Progress, cursor: int) -> int:
    try:
        feed: Any = ray.get(controller.poll.remote(cursor), timeout=30)
    except RayError as error:
        log.debug("no answer from the controller: %s", error)
        return cursor
    progress.feed(feed.items)
    return feed.cursor


def _result(reference: Any, timeout: float | None) -> Any:
    """The value of a call, or the error that it raised there, as itself."""
    try:
        return ray.get(reference, timeout=timeout)
    except RayTaskError as error:
        raise _told(error.cause if isinstance(error.cause, Exception) else error) from error
    except ActorDiedError as error:
        cause = getattr(error, "cause", None)
        raise RunError(f"the controller died: {cause or error}") from error
    except RayError as error:  # its node is gone, or the whole cluster
        raise RunError(f"the run's controller cannot be reached: {str(error).splitlines()[0]}") from error


def _told(error: Exception) -> Exception:
    """Errors made for people pass; others keep their type in the text."""
    if isinstance(error, (ConfigError, ClusterError, RunError)) or type(error).__module__.startswith("pods_cluster."):
        return error
    return RunError(f"{type(error).__name__}: {error}")
