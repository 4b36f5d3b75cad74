"""Generators that a restart cannot put back, as there is no room for them any more, are left out while others serve."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pods_cluster.generation.messages import Failure, NoRoom
from pods_cluster.run.recovery import Recovery
from pods_cluster.sizing.moves import Pools, Sizes
from tests.run.parts import loop_config

TEXT = "loop/generator/2 was not placed within 20 s"


class Pool:
    def __init__(self, serving: list[str]) -> None:
        self.serving, self.replaced = serving, list[str]()

    async def begin_again(self, selector: Any) -> list[Failure]:
        return [Failure("loop/generator/1", "died: its node has died", [])]

    async def replace(self, worker: str) -> str:
        self.replaced.append(worker)
        raise NoRoom(TEXT)


def recovery(pool: Pool) -> tuple[Recovery, list[Failure]]:
    started: list[Failure] = []
    scaler = SimpleNamespace(target=Sizes(2, 1), start_another=started.append,
                             now=lambda: Pools(len(pool.serving), 0, 1, 0))  # fmt: skip
    run = SimpleNamespace(state=lambda: None, scaler=scaler, notice=lambda *_, **__: None)
    other = SimpleNamespace(handle=None)
    made = Recovery(loop_config(), cast(Any, run), pool=cast(Any, pool), selector=cast(Any, other),
                    learners=cast(Any, None), publisher=cast(Any, None))  # fmt: skip
    return made, started


def test_none_is_waited_for_where_another_one_serves() -> None:
    pool = Pool(["loop/generator/0"])
    made, started = recovery(pool)
    asyncio.run(made._empty_generators())
    assert (pool.replaced, [failure.worker for failure in started]) == ([], ["loop/generator/1"])


def test_without_any_other_it_is_a_failure_of_the_restart() -> None:
    pool = Pool([])
    made, started = recovery(pool)
    with pytest.raises(NoRoom, match="not placed"):
        asyncio.run(made._empty_generators())
    assert (pool.replaced, started) == (["loop/generator/1"], [])
