"""Controls of a run that is alive on a real Ray cluster."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
import ray

from pods_cluster.client.controls import ControlFailed, NotLive
from pods_cluster.client.ray_controls import NAMESPACE, RayControls


def test_no_cluster_is_no_live_run() -> None:
    """In a process of its own, as this one may have a cluster."""
    code = (
        "import asyncio\n"
        "from pods_cluster.client.ray_controls import RayControls\n"
        "asyncio.run(RayControls('127.0.0.1:1').status('run'))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    *_, told = result.stderr.splitlines()
    assert told.startswith(f"{NotLive.__module__}.NotLive: ")
    assert "no Ray cluster at 127.0.0.1:1 can be reached" in told


def answering() -> type:
    class Answering:
        """The calls of a controller that the dashboard uses."""

        def __init__(self) -> None:
            self.told: list[object] = []

        def poll(self, cursor: int = 0) -> int:
            return cursor

        def stop(self, reason: str) -> None:
            if reason == "hang":
                import time

                time.sleep(60)
            self.told.append(("stop", reason))

        def scale(self, generators: int | None = None, learners: int | None = None) -> str | None:
            if generators == 99:
                raise ValueError("generators: 99 do not fit")
            self.told.append(("scale", generators, learners))
            return None

        def heard(self) -> list[object]:
            return self.told

    return Answering  # a class within a function travels to its process by value


def test_calls_reach_the_controller_by_name(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = ray.remote(answering()).options(name="run/controller/0", namespace=NAMESPACE, num_cpus=0).remote()
    controls = RayControls()

    async def ask() -> None:
        assert (await controls.status("run")).live
        assert "3 generators" in await controls.scale("run", 3, None)
        await controls.stop("run", "enough")
        with pytest.raises(ControlFailed, match="99 do not fit"):
            await controls.scale("run", 99, None)
        with pytest.raises(NotLive, match="no run of this name"):
            await controls.stop("another", "enough")

    asyncio.run(ask())
    assert ray.get(actor.heard.remote()) == [("scale", 3, None), ("stop", "enough")]

    monkeypatch.setattr("pods_cluster.client.ray_controls.CALL_SECONDS", 0.5)
    with pytest.raises(ControlFailed, match="did not answer in"):
        asyncio.run(controls.stop("run", "hang"))
    ray.kill(actor)
    with pytest.raises(NotLive):
        asyncio.run(controls.status("run"))
