"""A pool with a stand-in for the selector that it reports to, and groups to make."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import ray

from pods_cluster.config import Config
from pods_cluster.generation.messages import Portion
from pods_cluster.generation.pool import GeneratorPool
from pods_cluster.group_shard import GroupShard
from pods_cluster.quickstart.character_tokenizer import build_tokenizer
from pods_cluster.types import (
    GroupId,
    Prompt,
)

T = TypeVar("T")
MakeConfig = Callable[..., Config]


def start_collector() -> Any:
    """An actor that takes reports as the selector does, and shows them. (A local class travels to Ray by value.)"""

    class Collector:
        def __init__(self) -> None:
            self.messages: list[list[GroupShard]] = []

        def report(self, shards: list[GroupShard]) -> None:
            self.messages.append(shards)

        def read(self) -> list[list[GroupShard]]:
            return self.messages

    return ray.remote(num_cpus=0)(Collector).remote()


class Reports:
    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def messages(self) -> list[list[GroupShard]]:
        return ray.get(self.handle.read.remote(), timeout=30)

    def wait(self, groups: Sequence[GroupId], size: int = 6, timeout: float = 90.0) -> dict[GroupId, list[GroupShard]]:
        """The shards of `groups` once `size` rollouts of each were reported."""
        deadline = time.monotonic() + timeout
        while True:
            found: dict[GroupId, list[GroupShard]] = {group: [] for group in groups}
            for message in self.messages():
                for shard in message:
                    if shard.group in found:
                        found[shard.group].append(shard)
            counts = [sum(map(len, shards)) for shards in found.values()]
            if min(counts) >= size or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        assert counts == [size] * len(groups)
        return found


def prompt(row: int, epoch: int = 0) -> Prompt:
    text = f"{10 + row}+{20 + row}="
    ids = build_tokenizer().encode("<bos>" + text, add_special_tokens=False)
    return Prompt(epoch, row, text, tuple(ids), answer=str(30 + 2 * row))


def groups_of(rows: range) -> list[tuple[GroupId, Prompt]]:
    return [(GroupId(0, row), prompt(row)) for row in rows]


def portions_of(rows: range, size: int = 6) -> list[Portion]:
    return [Portion(group, item, size, 0, size) for group, item in groups_of(rows)]


def with_pool(
    config: Config,
    selector: Any,
    body: Callable[[GeneratorPool], Awaitable[T]],
    *,
    adopt: int | None = 0,
    **options: Any,
) -> T:
    """Run `body` with a started pool, and end the pool whatever happens."""

    async def run() -> T:
        pool = GeneratorPool(config, selector, **options)
        try:
            await pool.start()
            if adopt is not None:
                await pool.adopt_version(adopt)
            return await asyncio.wait_for(body(pool), 240)
        finally:
            await pool.close()

    return asyncio.run(run())


def ids(rows: range) -> list[GroupId]:
    return [GroupId(0, row) for row in rows]


async def answer_of(reference: Any) -> Any:
    """The answer; what the method raised itself."""
    try:
        return await reference
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
