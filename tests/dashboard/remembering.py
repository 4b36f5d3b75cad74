from __future__ import annotations

from pods_cluster.client.controls import ControlFailed, LiveStatus, NotLive


class Remembering:
    """Controls that note what they were asked, of one run that is alive."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    async def status(self, run: str) -> LiveStatus:
        self._alive(run)
        return LiveStatus(live=True, step=3)

    async def scale(self, run: str, generators: int | None, learners: int | None) -> str:
        self._alive(run)
        if generators == 4096:
            raise ControlFailed("the cluster is too small")
        self.asked.append(("scale", run, generators, learners))
        return "asked for"

    async def stop(self, run: str, reason: str) -> str:
        self._alive(run)
        self.asked.append(("stop", run, reason))
        return "ends"

    def _alive(self, run: str) -> None:
        if run != "first":
            raise NotLive(f"{run}: is not alive")
