"""A worker that starts on a node which is gone, as Ray does not know yet, is placed anew."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pods_cluster.config import Config
from pods_cluster.generation import members, placement
from pods_cluster.generation.messages import GeneratorError, NodeLost, WorkerInfo, WorkerPhase
from pods_cluster.generation.pool import GeneratorPool
from tests.run.parts import loop_config


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[GeneratorError | None]], list[str]]:
    """Make the attempts to start a worker end so, one after the other; the names that were started."""

    def begin(ends: list[GeneratorError | None]) -> list[str]:
        started: list[str] = []

        async def placed(*_: Any) -> None:
            if (error := ends.pop(0)) is not None:
                raise error

        async def ready(_: Config, name: str, __: Any) -> WorkerInfo:
            return WorkerInfo(name, "node", 1, "paced", 0)

        monkeypatch.setattr(members, "create_worker", lambda _, name, *__: started.append(name) or object())
        monkeypatch.setattr(members, "kill", lambda _: None)
        monkeypatch.setattr(members, "worker_placed", placed)
        monkeypatch.setattr(members, "worker_started", ready)
        return started

    return begin


def test_a_lost_node_costs_an_attempt_and_no_worker(attempts: Any) -> None:
    started = attempts([NodeLost("gone"), NodeLost("gone too"), None])
    pool = GeneratorPool(loop_config(), None)
    asyncio.run(pool.start())
    assert [status.phase for status in pool.states().values()] == [WorkerPhase.SERVING]
    assert started == [*pool.workers] * 3, "the name is the same: none of them has served"


@pytest.mark.parametrize("error", [NodeLost("gone"), GeneratorError("the model cannot be read")])
def test_what_does_not_help_is_told_and_leaves_nothing(attempts: Any, error: GeneratorError) -> None:
    started = attempts([error] * 5)
    pool = GeneratorPool(loop_config(), None)
    with pytest.raises(type(error), match=str(error)):
        asyncio.run(pool.start())
    assert pool.states() == {}
    assert len(started) == (members.PLACES_TRIED if isinstance(error, NodeLost) else 1)


def test_a_node_that_died_is_told_from_a_process_that_did() -> None:
    from ray.exceptions import RayActorError

    told = "The actor died because its node has died. Node Id: 12"
    assert isinstance(placement._died("g", RayActorError(error_msg=told)), NodeLost)
    assert type(placement._died("g", RayActorError(error_msg="The actor died unexpectedly"))) is GeneratorError
