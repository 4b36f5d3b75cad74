"""The owner's side of the environment host: one process for each rollout's environment, and calls with deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from pods_cluster.config import ConfigError, EnvironmentConfig
from pods_cluster.scoring import scorer_keeper
from pods_cluster.scoring.channel import packed, receive_from
from pods_cluster.scoring.score import FailureKind
from pods_cluster.scoring.scorer_output import ScorerOutput

T = TypeVar("T")

# A plain interpreter, as for scorers.
_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[6]); "
    "from pods_cluster.environments.host_main import main; main(*map(int, sys.argv[1:6]))"
)
_BEGINNING = 8
"""Processes that are started at the same time; the host forks them one after the other."""
_END_SECONDS = 2.0
"""Longest wait for the word of how an environment's process ended."""


class EnvironmentStartError(ConfigError):
    """The environment could not be imported or started; the text names the field and the cause."""


class EnvironmentFailed(Exception):
    """An environment raised, hung, died or ate memory: its rollout has failed."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind, self.message = kind, message


class EnvironmentHost:
    """Starts environments and talks with them, on an event loop in a thread of its own. Close it at the end.

    What environments print goes to `output`, under its name number `speaker`. A host that has died is started again with
    the next environment. Raises EnvironmentStartError where the environment cannot be imported within `load_timeout`
    seconds.
    """

    def __init__(
        self, config: EnvironmentConfig, load_timeout: float, output: ScorerOutput | None = None, speaker: int = 0
    ) -> None:
        self.config = config
        self._load_timeout = load_timeout
        self._output = output or ScorerOutput(["environment"])
        self._speaker = speaker
        self._numbers = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self._commands: socket.socket | None = None
        self._ends: dict[int, asyncio.Future[tuple[int, int | None]]] = {}
        self._starting = asyncio.Lock()
        self._beginning = asyncio.Semaphore(_BEGINNING)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="environments", daemon=True)
        self._thread.start()
        try:
            self.run(self._start()).result(load_timeout + 30.0)
        except BaseException:
            self.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin `work` on the loop, from another thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def begin(self) -> RunningEnvironment:
        """Start the process of one rollout's environment. Raises EnvironmentFailed."""
        async with self._starting:
            if self._process is None or self._process.poll() is not None:
                try:
                    await self._start()
                except EnvironmentStartError as error:
                    raise EnvironmentFailed(FailureKind.START, str(error)) from error
        ours, theirs = socket.socketpair()
        number = next(self._numbers)
        self._ends[number] = self.loop.create_future()
        try:
            async with self._beginning:
                await self._command(f"begin {number}", theirs.fileno())
                theirs.close()  # so that an end of the process is seen here
                reader, writer = await asyncio.open_connection(sock=ours)
                await asyncio.wait_for(receive_from(reader), self._load_timeout)
        except BaseException as error:
            ours.close()
            self.end(number)
            if isinstance(error, OSError | EOFError | TimeoutError):
                text = f"its process could not be started: {error!r}"
                raise EnvironmentFailed(FailureKind.START, text) from error
            raise
        finally:
            theirs.close()
        return RunningEnvironment(self, number, reader, writer)

    async def _command(self, text: str, *descriptors: int) -> None:
        """Tell the host, waiting while it has much to do."""
        assert self._commands is not None
        while True:
            try:
                socket.send_fds(self._commands, [text.encode()], descriptors)
                return
            except BlockingIOError:
                await asyncio.sleep(0.005)

    def end(self, number: int) -> None:
        """Kill a rollout's environment and all that it started. In the loop's thread."""

        async def tell() -> None:
            with contextlib.suppress(OSError):
                await self._command(f"end {number}")

        task = self.loop.create_task(tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def how_it_ended(self, number: int) -> EnvironmentFailed:
        """The end of a process that closed its connection, as a failure."""
        try:
            code, held = await asyncio.wait_for(asyncio.shield(self._ends[number]), _END_SECONDS)
        except TimeoutError:
            return EnvironmentFailed(FailureKind.DIED, "its process closed its connection")
        if held is not None:
            limit = self.config.memory_limit
            text = f"it held {held / 2**30:.3g} GiB, more than environment.memory_limit: {limit:g}, and was killed"
            return EnvironmentFailed(FailureKind.MEMORY, text)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return EnvironmentFailed(FailureKind.DIED, f"its process {how}")

    def forget(self, number: int) -> None:
        """No more is asked about this environment."""
        self._ends.pop(number, None)

    def close(self) -> None:
        """End the host with all environments, and the loop."""
        self._closed = True
        if self._process is not None:
            self._process.terminate()  # the keeper kills all that is below it
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(scorer_keeper.END_SECONDS + 1.0)
            if self._process.poll() is None:
                self._process.kill()
        if self.loop.is_running():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(5.0)

    async def _start(self) -> None:
        if self._closed:
            raise EnvironmentStartError("environment: the host is closed")
        if self._commands is not None:
            self._commands.close()
        ours, theirs = socket.socketpair()
        self._commands, obeyed = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._commands.setblocking(False)
        printed, prints = os.pipe()
        report, reports = os.pipe()
        descriptors = (theirs.fileno(), obeyed.fileno(), os.getpid(), reports, self._speaker)
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *map(str, descriptors), path],
                stdin=subprocess.DEVNULL,
                stdout=prints,
                stderr=prints,
                pass_fds=(theirs.fileno(), obeyed.fileno(), reports),
                start_new_session=True,
            )
        finally:
            for descriptor in (prints, reports, report):
                os.close(descriptor)
            theirs.close()
            obeyed.close()
        self._output.follow(printed)
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            writer.write(packed(self.config))
            what, problem = await asyncio.wait_for(receive_from(reader), self._load_timeout)
        except (TimeoutError, EOFError, ConnectionError) as error:
            self._process.terminate()
            late = isinstance(error, TimeoutError)
            how = (
                f"was not loaded within {self._load_timeout:g} s (scoring.load_timeout)"
                if late
                else "ended its process"
            )
            raise EnvironmentStartError(
                f"environment.name: {self.config.name!r} {how}; {self._output.tail() or 'nothing was printed'}"
            ) from None
        if what == "failed":
            raise EnvironmentStartError(
                f"environment.name: {self.config.name!r} cannot be used: {problem}; correct it, or environment.options "
                f"({', '.join(self.config.options) or 'none are set'})"
            )
        task = asyncio.ensure_future(self._listen(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                _, (number, code, held) = await receive_from(reader)
                if (end := self._ends.get(number)) is not None and not end.done():
                    end.set_result((code, held))
        writer.close()


class RunningEnvironment:
    """One rollout's environment in its process."""

    def __init__(
        self, host: EnvironmentHost, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._host, self._number, self._reader, self._writer = host, number, reader, writer

    async def call(self, method: str, argument: Any = None, seconds: float | None = None) -> Any:
        """The result of a method, which may take so many `seconds` (None: `environment.timeout`).

        Raises EnvironmentFailed; the process is dead then unless the method itself raised.
        """
        seconds = self._host.config.timeout if seconds is None else seconds
        try:
            self._writer.write(packed((method, argument)))
            what, *result = await asyncio.wait_for(receive_from(self._reader), seconds)
        except TimeoutError:
            self.kill()
            text = f"{method}() gave no answer within {seconds:g} s (environment.timeout); its process was killed"
            raise EnvironmentFailed(FailureKind.TIMEOUT, text) from None
        except (EOFError, ConnectionError):
            raise await self._host.how_it_ended(self._number) from None
        if what == "error":
            raise EnvironmentFailed(FailureKind(result[0]), f"{method}(): {result[1]}")
        return result[0]

    async def close(self) -> None:
        """Let the environment free what it holds, and end its process."""
        with contextlib.suppress(EnvironmentFailed):
            await self.call("close")
        self.kill()

    def kill(self) -> None:
        """End the process at once."""
        self._writer.close()
        self._host.end(self._number)
        self._host.loop.call_later(_END_SECONDS + 1.0, self._host.forget, self._number)
