"""The protocol of live runs: ask one for its status, change the sizes of its pools, stop it."""

from __future__ import annotations

from typing import Protocol

from pods_cluster.run.status import LiveStatus, WorkerState

__all__ = ["ControlFailed", "Controls", "LiveStatus", "NotLive", "WorkerState"]


class NotLive(Exception):
    """The run is not alive on the cluster that was asked."""


class ControlFailed(Exception):
    """A live run did not do what was asked; the text says why."""


class Controls(Protocol):
    """Calls to live runs by name. Every call has its own deadline and raises NotLive or ControlFailed."""

    async def status(self, run: str) -> LiveStatus: ...

    async def scale(self, run: str, generators: int | None, learners: int | None) -> str:
        """Ask for new sizes of the pools; returns a sentence on what the run does about it."""
        ...

    async def stop(self, run: str, reason: str) -> str:
        """Ask the run to save its state and end after what it is doing; returns a sentence."""
        ...
