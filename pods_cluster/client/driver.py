"""The driver: what `pods train` does on the machine where it is typed."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from rich.console import Console

from pods_cluster.actor_names import actor_name
from pods_cluster.client.controller_watch import LAST_SECONDS, ControllerWatch
from pods_cluster.client.lost_controller import END_SECONDS, ControllerLost, end_run, say_how_it_ended
from pods_cluster.client.paths import absolute
from pods_cluster.config import Config, ConfigError
from pods_cluster.run.cluster import ClusterError, connect
from pods_cluster.run.errors import RunError
from pods_cluster.run.restarts import Restarts
from pods_cluster.run.run_actors import end_actors, start_controller
from pods_cluster.telemetry.number_format import first_line
from pods_cluster.telemetry.progress import Progress
from pods_cluster.telemetry.summary import Summary
from pods_cluster.wording import counted

POLL_SECONDS = 0.25
OPEN_SECONDS = 3600.0
"""Deadline of opening a run: its process starts, the datasets are downloaded where they are not here, and rendered."""
STOP_SECONDS = 900.0
"""How long a stopping run may take to save its state before it is killed."""

OnStep = Callable[[dict[str, Any]], object]

log = logging.getLogger(__name__)


def train(
    config: Config,
    *,
    resume: bool = False,
    console: Console | None = None,
    live: bool | None = None,
    on_step: OnStep | None = None,
) -> Summary:
    """Run the configuration to its end, showing it. Ctrl-C, SIGTERM and SIGHUP end it with a saved state, another
    Ctrl-C at once.

    `on_step` gets the record of each step. StopIteration from it ends the run as Ctrl-C does; any other error too, and is
    raised once the state is saved. Raises ConfigError, ClusterError, RunError or what a stage raised, each with its cause.
    """
    console = console or Console()
    config = absolute(config)
    owned = not ray.is_initialized()
    with console.status("connecting to Ray"):
        connect(config)
    controller = None
    try:
        controller = start_controller(config, resume=resume)
        watch = ControllerWatch(controller, actor_name(config.run.name, "controller"))
        # On its own, so that what the controller refuses is told before anything is shown.
        steps = _open(watch)
        subtitle = (
            f"{Path(config.model.path).name} · {counted(config.generator.workers, 'generator')} → "
            f"{counted(config.learner.workers, 'learner')} · n={config.generator.rollouts_per_prompt} m={config.selector.keep}"
        )
        restarts = Restarts(config.run.restarts)
        taken = _Steps(on_step)
        with (
            Progress(config.run.name, steps, subtitle=subtitle, console=console, live=live) as progress,
            Interrupts() as interrupts,
        ):
            while True:
                try:
                    return _follow(watch, progress, interrupts, taken)
                except ControllerLost as error:
                    if interrupts.reason is not None or not config.run.restarts:
                        last = ControllerLost(f"{error}; --resume goes on from the newest saved state")
                        say_how_it_ended(config, last, watch.step)
                        raise last from error
                    watch = _start_again(config, error, watch.step, restarts, progress)
    finally:
        if owned:
            ray.shutdown()
        elif controller is not None:  # an error's traceback would keep its handle, and that the run's name
            with contextlib.suppress(Exception):
                end_actors(config.run.name, END_SECONDS)


class Interrupts:
    """Notes Ctrl-C, SIGTERM and SIGHUP in place of raising: an exception could come in the middle of any call, and be
    swallowed there.

    SIGTERM is what schedulers and Kubernetes send, SIGHUP what a terminal sends that closes: its output goes nowhere
    from then on. A signal that is ignored already, as under `nohup`, stays ignored.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        """The name of the first signal, as people know it."""
        self.ctrl_c = 0
        self._before: dict[int, Any] = {}
        self._terminals = [stream for stream in (1, 2) if os.isatty(stream)]

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number is signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        self.ctrl_c += number == signal.SIGINT
        if self.reason is None:
            self.reason = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if number == signal.SIGHUP:  # writing to a terminal that is gone fails
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for stream in self._terminals:
                os.dup2(nowhere, stream)
            os.close(nowhere)


def _open(watch: ControllerWatch) -> int:
    opening = watch.controller.open.remote()
    deadline = time.monotonic() + OPEN_SECONDS
    while not ray.wait([opening], timeout=POLL_SECONDS)[0]:
        watch.feed()
        if time.monotonic() > deadline:
            ray.kill(watch.controller)
            raise RunError(
                f"{watch.name}: the run's controller did not open the run within {OPEN_SECONDS:g} s, so it was killed; "
                f"it loads the model's tokenizer and the datasets then (model.path, data.path): see whether their "
                f"folder or server answers"
            )
    return _result(opening)


class _Steps:
    """Hands step records to the caller's function, and keeps the error that it raises first."""

    def __init__(self, on_step: OnStep | None) -> None:
        self._on_step = on_step
        self.error: Exception | None = None
        self.stopped = False

    def take(self, items: Sequence[tuple[str, dict[str, Any]]]) -> None:
        for what, record in items:
            if what != "step" or self._on_step is None or self.stopped:
                continue
            try:
                self._on_step(record)
            except StopIteration:
                self.stopped = True
            except Exception as error:
                self.stopped, self.error = True, error


def _follow(watch: ControllerWatch, progress: Progress, interrupts: Interrupts, steps: _Steps) -> Summary:
    done = watch.controller.run.remote()
    stopped_at = None
    while not ray.wait([done], timeout=POLL_SECONDS)[0]:
        progress.feed(items := watch.feed())
        steps.take(items)
        if steps.stopped and interrupts.reason is None:
            interrupts.reason = "a callback" if steps.error is None else f"a callback failed ({steps.error!r})"
        if interrupts.reason is not None and stopped_at is None:
            stopped_at = time.monotonic()
            progress.event(
                "stopping", f"{interrupts.reason}: ending after this step, saving the state (Ctrl-C again: kill)"
            )
            watch.controller.stop.remote(interrupts.reason)
        if interrupts.ctrl_c > (interrupts.reason == "Ctrl-C"):
            ray.kill(watch.controller)
            raise RunError("killed by Ctrl-C; the last checkpoint is what is left")
        if stopped_at is not None and time.monotonic() - stopped_at > STOP_SECONDS:
            ray.kill(watch.controller)
            raise RunError(f"the run did not end within {STOP_SECONDS:g} s of being told to; it was killed")
    progress.feed(items := watch.last_feed())
    steps.take(items)
    summary = _result(done)
    if steps.error is not None:
        raise steps.error
    return summary


def _start_again(
    config: Config, error: ControllerLost, step: int, restarts: Restarts, progress: Progress
) -> ControllerWatch:
    """A new controller in place of one that is lost, which goes on from the newest saved state. Raises RunError."""
    began = time.monotonic()
    try:
        wait = restarts.failed(first_line(error), step)
    except RunError as end:
        say_how_it_ended(config, end, step)
        raise end from error
    text = f"{first_line(error)}; restart {restarts.in_a_row} of {restarts.limit} (run.restarts) by another controller"
    progress.event("restarting", text, level="warning")
    end_run(config)
    time.sleep(wait)
    watch = ControllerWatch(
        start_controller(config, resume=True, after=text), actor_name(config.run.name, "controller")
    )
    _open(watch)
    restarts.going_on(step)
    progress.event("restarted", f"another controller is there after {time.monotonic() - began:.1f} s")
    return watch


def _result(answer: Any) -> Any:
    """The value of a call that has answered, or the error that it raised there, as itself."""
    try:
        return ray.get(answer, timeout=LAST_SECONDS)
    except RayTaskError as error:
        raise _for_people(error.cause if isinstance(error.cause, Exception) else error) from error
    except ActorDiedError as error:
        cause = getattr(error, "cause", None)
        raise ControllerLost(f"the controller died: {cause or first_line(error)}") from error
    except RayError as error:  # its node is gone, or the whole cluster
        raise RunError(f"the run's controller cannot be reached: {str(error).splitlines()[0]}") from error


def _for_people(error: Exception) -> Exception:
    """Errors made for people pass; others keep their type in the text."""
    if isinstance(error, (ConfigError, ClusterError, RunError)) or type(error).__module__.startswith("pods_cluster."):
        return error
    return RunError(f"{type(error).__name__}: {error}")
