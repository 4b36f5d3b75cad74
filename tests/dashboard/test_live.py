"""Controls of a run that is alive on a real Ray cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import ray

from pods_cluster.client.controls import ControlFailed, NotLive
from pods_cluster.client.ray_controls import NAMESPACE, RayControls


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        if ray.is_initialized():
            pytest.skip("another cluster is up in this process")
        ray.init("local", num_cpus=1, include_dashboard=False, namespace=NAMESPACE, log_to_driver=False)
        yield
        ray.shutdown()


def test_no_cluster_is_no_live_run() -> None:
    with pytest.raises(NotLive, match=r"no Ray cluster at 127\.0\.0\.1:1 can be reached"):
        asyncio.run(RayControls("127.0.0.1:1").status("run"))


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
