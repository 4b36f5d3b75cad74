"""A run over the made-up stages of `parts.py`, with everything that a test asks of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from pods_cluster.config import Config, dump_config
from pods_cluster.run.loop import Run
from pods_cluster.telemetry.recorder import Recorder
from pods_cluster.telemetry.run_folder import RunFolder
from pods_cluster.types import Fate, GroupId
from tests.run.parts import CoreSelector, Learners, Pool, Publisher, Stream


def varied(group: GroupId, index: int) -> float:
    return float(index % 2)


class Loop:
    """A run and its parts."""

    def __init__(self, config: Config, tmp_path: Path, rewards: Callable[[GroupId, int], float] = varied) -> None:
        self.selector = CoreSelector(config)
        self.pool = Pool(self.selector, config.generator.rollouts_per_prompt, rewards)
        self.learners = Learners()
        self.publisher = Publisher(self.pool)
        self.stream = Stream()
        self.folder = RunFolder.create(tmp_path, config.run.name, dump_config(config))
        self.recorder = Recorder.for_run(self.folder, strict=True)
        self.run = Run(
            config,
            pool=self.pool,
            selector=self.selector,
            learners=self.learners,
            publisher=self.publisher,
            stream=cast(Any, self.stream),
            held_out=[],
            recorder=self.recorder,
            folder=self.folder,
        )

    def main(self) -> None:
        try:
            asyncio.run(self.run.main())
        finally:
            self.recorder.close()

    @property
    def fates(self) -> dict[Fate, int]:
        return dict(self.run.ledger.fates)

    def trained_rows(self) -> list[int]:
        return [selection.group.row for step in self.learners.steps for selection in step]


async def until(condition: Callable[[], bool]) -> None:
    """Others go on until it holds."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)
