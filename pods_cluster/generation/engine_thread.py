"""The one thread that drives an engine: commands run between steps, finished rollouts leave, a failure reaches all."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from pods_cluster.config import Config
from pods_cluster.generation.engine import Engine, EngineStats
from pods_cluster.generation.messages import ENGINE_FAILED, GeneratorError, WorkerFailed
from pods_cluster.generation.thread_seconds import Stopwatch, ThreadSeconds
from pods_cluster.types import Rollout

T = TypeVar("T")

IDLE_SECONDS = 0.5
PARTS = {"connect": "weights", "receive": "weights", "adopt_version": "weights", "fingerprints": "verifying"}
"""The parts of `ThreadSeconds` that commands belong to by their names; others run between steps."""
WINDOW_SECONDS = 1.0
LONG_WINDOWS = 8
"""Windows in the span over which a rate counts as kept up."""


class EngineHangs(GeneratorError):
    """The engine's thread did not come to a command, or did not end it, within the time that its caller gave."""


class _Command(NamedTuple):
    name: str
    run: Callable[[Engine], Any]
    result: Future[Any]


class EngineThread:
    """Makes an engine with `make` in its own thread and steps it while anything is in flight.

    `finished` gets each step's rollouts, in this thread. What `make`, a step or `finished` raises ends the thread: it
    is `error`, and every call raises it from then on. What a command raises goes to its caller alone.

    A step or command that hangs cannot be interrupted: those who wait for the engine give up at their deadlines, and
    `stalled_seconds` tells the pool to end the worker.
    """

    def __init__(self, make: Callable[[], Engine], finished: Callable[[list[Rollout]], None]) -> None:
        self._make = make
        self._finished = finished
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ready: Future[Engine] = Future()
        self._ended = False
        self._busy_with = "its start"
        self._progress = time.monotonic()
        self._stats = EngineStats()
        self._seconds = ThreadSeconds()
        self.engine: Engine | None = None
        self.error: BaseException | None = None
        self.rate = RateMeter()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def ready(self, timeout: float) -> Engine:
        """The engine once it has started. Raises GeneratorError with the cause, or when `timeout` seconds pass."""
        try:
            return self._ready.result(timeout)
        except TimeoutError:
            raise GeneratorError(
                f"the engine has not started within {timeout:g} s; raise generator.start_timeout if it needs longer"
            ) from None
        except BaseException as error:
            raise self._failure() from error

    def call(self, name: str, command: Callable[[Engine], T], timeout: float, setting: str) -> T:
        """Run `command(engine)` between two steps and return its result; raises what it raises.

        Raises WorkerFailed when the engine has failed. Raises EngineHangs when `timeout` seconds pass, which follow
        from `setting` of the configuration: a command that has not begun then never runs, one that has goes on.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._ended:
                raise self._failure() from self.error
            self._commands.put(_Command(name, command, future))
        try:
            return future.result(timeout)
        except TimeoutError:
            if future.done():  # the command's own
                raise
            future.cancel()
            raise EngineHangs(
                f"the engine has not done `{name}` within {timeout:g} s: it is still in {self._busy_with}, which hangs or "
                f"is slow; see the worker's log, and raise {setting} if it needs longer"
            ) from None

    def post(self, name: str, command: Callable[[Engine], Any]) -> None:
        """Run `command(engine)` between two steps, not waiting for it; it must not raise."""
        with self._lock:
            if not self._ended:
                self._commands.put(_Command(name, command, Future()))

    @property
    def stalled_seconds(self) -> float:
        """Seconds for which a busy engine has neither finished a rollout nor taken new weights."""
        busy = self.engine is None or self.engine.in_flight > 0
        return time.monotonic() - self._progress if busy and not self._ended else 0.0

    def stats(self) -> EngineStats:
        """The engine's counts after its last step (it is asked in its own thread)."""
        return self._stats

    def seconds(self) -> ThreadSeconds:
        """What its time went into, as of its last step or command."""
        return self._seconds

    def stop(self, timeout: float = 10.0) -> None:
        """End after the step that runs, and free the engine."""
        self._commands.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            engine = self.engine = self._make()
            self._progress = time.monotonic()
            self._ready.set_result(engine)
            watch = Stopwatch()
            while self._serve(engine, watch):
                self._busy_with = "a step"
                working = engine.in_flight > 0 and not engine.closed
                finished = engine.step() if working else []
                self._stats = engine.stats()
                if working:
                    watch.stepped(self._stats.running)
                if finished:
                    self._progress = time.monotonic()
                    self._finished(finished)
                self._seconds = watch.read()
                self.rate.update(self._stats.generated_tokens, self._stats.busy_seconds)
        except BaseException as error:
            self.error = error
        finally:
            self._end()

    def _serve(self, engine: Engine, watch: Stopwatch) -> bool:
        """Run the commands that wait; wait for one while there is nothing else to do. False: stop."""
        while True:
            working = engine.in_flight > 0 and not engine.closed
            watch.lap("between")
            try:
                item = self._commands.get(block=not working, timeout=None if working else IDLE_SECONDS)
            except queue.Empty:
                if not working:
                    watch.lap("weights" if engine.in_flight else "empty")
                return True
            if item is None:
                return False
            if not working:  # a closed engine waits for its weights
                watch.lap("weights" if engine.in_flight else "empty")
            if not item.result.set_running_or_notify_cancel():
                continue  # its caller has given up
            self._busy_with = f"`{item.name}`"
            before = (engine.in_flight == 0, engine.version)
            try:
                item.result.set_result(item.run(engine))
            except BaseException as error:
                item.result.set_exception(error)
            watch.lap(PARTS.get(item.name, "between"))
            self._seconds = watch.read()
            if before != (False, engine.version):
                self._progress = time.monotonic()

    def _end(self) -> None:
        with self._lock:
            self._ended = True
        if not self._ready.done():
            self._ready.set_exception(self.error or GeneratorError("stopped before it started"))
        while True:
            try:
                item = self._commands.get_nowait()
            except queue.Empty:
                break
            if item is not None and item.result.set_running_or_notify_cancel():
                item.result.set_exception(self._failure())
        if self.engine is not None:
            try:
                self.engine.close()
            except Exception as error:
                self.error = self.error or error

    def _failure(self) -> WorkerFailed:
        return WorkerFailed(self.describe_error() or "the engine was stopped")

    def describe_error(self) -> str | None:
        """The error that ended the engine, or None: with the place where it was raised, unless its text is for people."""
        error = self.error
        if error is None:
            return None
        if type(error).__module__.startswith("pods_cluster."):
            return f"{ENGINE_FAILED}: {type(error).__name__}: {error}"
        trace = "".join(traceback.format_tb(error.__traceback__)[-3:])
        return f"{ENGINE_FAILED}: {type(error).__name__}: {error}\n{trace}".rstrip()


class RateMeter:
    """`now` is over the last whole window of wall time; `saturated` is the best over a span of busy time.

    Busy time leaves out the pauses between bursts, but not the steps that decode one straggler. The span is
    `LONG_WINDOWS` windows: in its first second a batch makes far more tokens than it can keep up, all of them with short
    contexts and no new prompt among them. Until a whole span has passed, the best single window stands in.
    """

    def __init__(self, window: float = WINDOW_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._window = window
        self._clock = clock
        self._wall = (clock(), 0)
        self._marks = [(0.0, 0)]  # (busy seconds, tokens) at the ends of the last windows
        self._rate = 0.0
        self._short = 0.0
        self._long = 0.0

    def update(self, tokens: int, busy_seconds: float) -> None:
        """Tokens generated, and seconds spent generating, since the engine's start."""
        now = self._clock()
        if (seconds := now - self._wall[0]) >= self._window:
            self._rate = (tokens - self._wall[1]) / seconds
            self._wall = (now, tokens)
        if (seconds := busy_seconds - self._marks[-1][0]) >= self._window:
            self._short = max(self._short, (tokens - self._marks[-1][1]) / seconds)
            self._marks.append((busy_seconds, tokens))
            if len(self._marks) > LONG_WINDOWS:
                busy, made = self._marks.pop(0)
                self._long = max(self._long, (tokens - made) / (busy_seconds - busy))

    @property
    def saturated(self) -> float:
        return self._long or self._short

    @property
    def now(self) -> float:
        """0 when the last whole window ended long ago."""
        return self._rate if self._clock() - self._wall[0] < 3 * self._window else 0.0


class EngineCalls:
    """Base of a worker's calls to its engine's thread."""

    config: Config
    _engine: EngineThread
    _check: Callable[[], None]
    """Raises WorkerFailed if the worker has failed."""

    def _call(self, name: str, command: Callable[[Engine], T]) -> T:
        """Have the engine's thread carry a command out, within `generator.request_timeout`."""
        return self._engine.call(name, command, self.config.generator.request_timeout, "generator.request_timeout")
