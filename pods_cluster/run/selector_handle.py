"""The selector actor as the loop calls it: every call has a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from pods_cluster.config import Config
from pods_cluster.run.errors import SelectorLost
from pods_cluster.selection.actor import start_selector
from pods_cluster.selection.policy import selection_policy
from pods_cluster.selection.selector_core import Decision
from pods_cluster.selection.stopping import Instructions
from pods_cluster.telemetry.number_format import first_line
from pods_cluster.types import GroupId

CALL_SECONDS = 30.0
"""The selector answers in milliseconds; one that does not in half a minute is stuck."""


class SelectorHandle:
    """Wraps the Ray handle of a `SelectorActor`. A call that gets no answer raises SelectorLost.

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

    async def expect(self, groups: Sequence[tuple[GroupId, int]]) -> list[int]:
        return await self._call("expect", list(groups))

    async def instructions(self, timeout: float) -> Instructions:
        return await self._call("instructions", timeout, extra=timeout)

    async def collect(self, want: int, version: int, timeout: float) -> Decision:
        how = {"straggler_s": self.straggler, "partial": not self.whole_steps}
        return await self._call("collect", want, version, timeout, extra=timeout, **how)

    async def mark_lost(self, worker: str) -> None:
        await self._call("mark_lost", worker)

    async def cancel(self, groups: Sequence[GroupId]) -> None:
        await self._call("cancel", list(groups))

    async def stats(self) -> dict[str, Any]:
        return await self._call("stats")

    def close(self) -> None:
        """End the selector's process."""
        ray.kill(self.handle)

    async def _call(self, method: str, *args: Any, extra: float = 0.0, **named: Any) -> Any:
        try:
            return await asyncio.wait_for(getattr(self.handle, method).remote(*args, **named), CALL_SECONDS + extra)
        except TimeoutError:
            raise SelectorLost(f"the selector did not answer {method!r} within {CALL_SECONDS + extra:g} s") from None
        except RayActorError as error:
            raise SelectorLost(f"the selector died: {first_line(error)}") from error
