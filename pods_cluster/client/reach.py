"""Finding a run that is alive, from its folder or by its name on a cluster, and asking it things."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pods_cluster.client.controls import LiveStatus, NotLive
from pods_cluster.client.ray_access import use_token
from pods_cluster.client.ray_controls import RayControls
from pods_cluster.run.checkpoints import latest
from pods_cluster.run.live_file import place_of
from pods_cluster.telemetry.run_folder import RunFolder

POLL_SECONDS = 0.5
T = TypeVar("T")


class ReachError(Exception):
    """A run that cannot be found or asked; the text says where it was looked for and what to do."""


@dataclass(slots=True)
class Found:
    """A run: its folder, where that is here, and the Ray cluster on which it is, or may be, alive."""

    name: str
    folder: RunFolder | None
    address: str | None

    @property
    def controls(self) -> RayControls:
        """Raises ReachError where it is known that the run is not alive."""
        if self.address is None:
            where = self.folder.path if self.folder is not None else self.name
            raise ReachError(f"{where}: the run is not alive; continue it with `pods train … --resume`")
        use_token()
        return RayControls(self.address)

    def ask(self, question: Coroutine[Any, Any, T]) -> T:
        """The answer. Raises NotLive and ControlFailed."""
        return asyncio.run(question)


def find(target: str, address: str | None = None, root: Path = Path("runs")) -> Found:
    """A run by its folder, or by its name: in `root`, or on the cluster at `address`. Raises ReachError."""
    for path in (Path(target).expanduser(), root / target):
        if (path / "config.yaml").is_file():
            folder = RunFolder.open(path)
            place = place_of(folder)
            return Found(folder.name, folder, address or (place["address"] if place else None))
    if address is None or "/" in target:
        raise ReachError(
            f"{target}: is no run's folder, and {root} holds no run of this name; give its folder, or --address of the "
            f"Ray cluster on which it is alive"
        )
    return Found(target, None, address)


def wait_for_sizes(found: Found, seconds: float) -> LiveStatus:
    """Wait until no change of the pools is under way. Raises ReachError at the deadline, NotLive if the run ends."""
    controls, deadline = found.controls, time.monotonic() + seconds
    while True:
        status = found.ask(controls.status(found.name))
        if status.note is None:
            return status
        if time.monotonic() > deadline:
            raise ReachError(f"{found.name}: after {seconds:g} s still: {status.note}; the request goes on")
        time.sleep(POLL_SECONDS)


def wait_for_end(found: Found, seconds: float) -> Path | None:
    """Wait until the run has ended; its newest checkpoint, where its folder is here. Raises ReachError."""
    controls, deadline = found.controls, time.monotonic() + seconds
    while True:
        try:
            found.ask(controls.status(found.name))
        except NotLive:
            return latest(found.folder.checkpoints) if found.folder is not None else None
        if time.monotonic() > deadline:
            raise ReachError(
                f"{found.name}: has not ended after {seconds:g} s; it was told to, and is saving its state"
            )
        time.sleep(POLL_SECONDS)


def controls_of(paths: Sequence[Path], address: str | None = None) -> RayControls:
    """Controls of the live runs in these folders: each is looked for where its folder says that it is."""
    use_token()

    def where(run: str) -> str | None:
        for path in paths:
            for folder in (path, path / run):
                if folder.name == run and (folder / "config.yaml").is_file():
                    place = place_of(RunFolder.open(folder))
                    return place["address"] if place else None
        return None

    return RayControls(address or where)


def alive(address: str) -> list[str]:
    """Names of the runs that are alive on a cluster. Raises NotLive."""
    use_token()
    return asyncio.run(RayControls(address).runs(address))
