"""The selector actor as the loop calls it: every call has a deadline."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from pods_cluster.config import Config
from pods_cluster.run.errors import SelectorLost
from pods_cluster.selection.actor import start_selector
from pods_cluster.selection.policy import selection_policy
from pods_cluster.selection.selector_core import Decision
from pods_cluster.selection.stopping import Instructions
from pods_cluster.stopped_process import Process, Unanswered, answer_of
from pods_cluster.telemetry.number_format import first_line
from pods_cluster.types import GroupId

CALL_SECONDS = 30.0
"""The selector answers in milliseconds; one that does not in half a minute is stuck. One that is stopped is noticed sooner."""


class SelectorHandle:
    """Wraps the Ray handle of a `SelectorActor`. A call that gets no answer raises SelectorLost, or has `repair` put another
    actor in its place (`replace`, `expect_again`) and is made again there.

    `straggler` is how many seconds a step that could be filled waits for the oldest groups. `whole_steps`: the groups of a
    step come together, as they share what they keep.
    """

    @classmethod
    def start(cls, config: Config, name: str, index: int = 0) -> SelectorHandle:
        """Start the selector of this configuration as `<name>/selector/<index>`.

        Raises ConfigError (see `selection_policy`); raised by the actor it would arrive as the actor's death.
        """
        selection_policy(config)
        handle = start_selector(name, config, index)
        straggler = config.selector.straggler_timeout if config.staleness else 0.0
        return cls(handle, straggler=straggler, whole_steps=config.selector.budget == "step")

    def __init__(self, handle: Any, *, straggler: float = 0.0, whole_steps: bool = False) -> None:
        self.handle = handle
        self.straggler = straggler
        self.whole_steps = whole_steps
        self.repair: Callable[[SelectorLost], Awaitable[None]] | None = None
        self._repairing = asyncio.Lock()
        self._expected: dict[GroupId, int] = {}  # sizes of the groups without a fate, in the order of issue
        self._process: asyncio.Future[Process] | None = None

    def replace(self, config: Config, name: str, index: int) -> None:
        """End the actor and start another one as `<name>/selector/<index>`."""
        with contextlib.suppress(Exception):
            self.close()
        self._process = None
        self.handle = start_selector(name, config, index)

    async def expect_again(self) -> list[GroupId]:
        """Announce all groups without a fate to an actor that knows none; returns them. Raises SelectorLost."""
        await self._ask("expect", list(self._expected.items()))
        return list(self._expected)

    async def expect(self, groups: Sequence[tuple[GroupId, int]]) -> list[int]:
        first = await self._call("expect", list(groups))
        self._expected.update(groups)
        return first

    async def instructions(self, timeout: float) -> Instructions:
        return await self._call("instructions", timeout, extra=timeout)

    async def collect(self, want: int, version: int, timeout: float) -> Decision:
        how = {"straggler_s": self.straggler, "partial": not self.whole_steps}
        decision: Decision = await self._call("collect", want, version, timeout, extra=timeout, **how)
        for ended in (*decision.selections, *decision.fates):
            self._expected.pop(ended.group, None)
        return decision

    async def mark_lost(self, worker: str) -> None:
        await self._call("mark_lost", worker)

    async def cancel(self, groups: Sequence[GroupId]) -> None:
        for group in groups:
            self._expected.pop(group, None)
        await self._call("cancel", list(groups))

    async def stats(self) -> dict[str, Any]:
        return await self._call("stats")

    def close(self) -> None:
        """End the selector's process."""
        ray.kill(self.handle)

    async def _call(self, method: str, *args: Any, extra: float = 0.0, **named: Any) -> Any:
        while True:
            handle = self.handle
            try:
                return await self._ask(method, *args, extra=extra, **named)
            except SelectorLost as error:
                if self.repair is None:
                    raise
                async with self._repairing:
                    if self.handle is handle:  # else another call found it lost before
                        await self.repair(error)

    async def _ask(self, method: str, *args: Any, extra: float = 0.0, **named: Any) -> Any:
        if self._process is None:
            self._process = asyncio.ensure_future(_value(self.handle.process.remote()))
            self._process.add_done_callback(lambda known: known.cancelled() or known.exception())  # calls tell that too
        call = _value(getattr(self.handle, method).remote(*args, **named))
        try:
            return await answer_of(call, self._known_process(), CALL_SECONDS, lasts=extra)
        except Unanswered as error:
            raise SelectorLost(f"the selector did not answer {method!r}: {error}") from error
        except RayActorError as error:
            raise SelectorLost(f"the selector died: {first_line(error)}") from error

    def _known_process(self) -> Process | None:
        process = self._process
        if process is None or not process.done() or process.cancelled() or process.exception() is not None:
            return None
        return process.result()


async def _value(answer: Any) -> Any:
    return await answer
