"""What a generator pool does about workers that die, hang, fail or cannot start, as real Ray actors."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import ray

from pods_cluster import stopped_process
from pods_cluster.generation import pool_calls, reporter
from pods_cluster.generation.engine import EngineError
from pods_cluster.generation.messages import GeneratorError, GroupRequest
from pods_cluster.generation.pool import GeneratorPool
from pods_cluster.group_shard import GroupShard
from pods_cluster.types import (
    GroupId,
    SamplingParams,
)
from tests.generation.pool_parts import (
    MakeConfig,
    Reports,
    answer_of,
    groups_of,
    ids,
    portions_of,
    prompt,
    start_collector,
    with_pool,
)

pytestmark = pytest.mark.usefixtures("cluster")


def test_a_killed_worker_is_found_with_its_groups_and_replaced(make_config: MakeConfig, reports: Reports) -> None:
    async def body(pool: GeneratorPool) -> None:
        await pool.submit(portions_of(range(4)))
        await asyncio.to_thread(reports.wait, ids(range(4)))
        assert await pool.check() == []
        name, handle = next(iter(pool.workers.items()))
        held = await answer_of(handle.groups.remote())
        assert len(held) == 2
        os.kill((await answer_of(handle.ready.remote())).pid, signal.SIGKILL)
        # groups that are sent to it before anyone has noticed are reported with it; the other worker's go on
        await pool.submit(portions_of(range(4, 8)))
        rows = await pool.evaluate([prompt(row) for row in range(3)], SamplingParams(max_tokens=4), 1)
        assert [row.row for row in rows] == [0, 1, 2]
        (failure,) = await pool.check()
        assert failure.worker == name
        assert "died" in failure.cause
        assert set(held) < set(failure.groups)
        assert len(failure.groups) == 4
        alive = set(ids(range(8))) - set(failure.groups)
        await asyncio.to_thread(reports.wait, sorted(alive))
        assert set(pool.workers) == {"generation-test/generator/1"}
        assert await pool.check() == []
        new = await pool.replace(name)
        assert new == "generation-test/generator/2"
        assert set(pool.workers) == {"generation-test/generator/1", new}
        request = GroupRequest(GroupId(9, 9), prompt(1), (0,), 1, SamplingParams())
        with pytest.raises(EngineError, match="publish version 0"):  # it holds no weights that anyone named
            await answer_of(pool.workers[new].submit.remote([request]))
        assert (await pool.stats()).metrics()["generator/replaced"] == 1.0

    with_pool(make_config(workers=2), reports.handle, body)


def test_a_hung_engine_is_found(make_config: MakeConfig, reports: Reports) -> None:
    config = make_config(
        engine="paced", request_timeout=1.0, engine_options={"tokens_per_second": 0.01, "shortest": 8, "longest": 8}
    )

    async def body(pool: GeneratorPool) -> None:
        await pool.submit(portions_of(range(1)))
        deadline = time.monotonic() + 60
        while not (failures := await pool.check()):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        (failure,) = failures
        assert "hangs" in failure.cause
        assert "generator.request_timeout: 1" in failure.cause
        assert failure.groups == [GroupId(0, 0)]
        assert pool.workers == {}
        with pytest.raises(GeneratorError, match="no generator worker"):
            await pool.submit(portions_of(range(1, 2)))

    with_pool(config, reports.handle, body)


def test_a_hung_engine_does_not_end_the_run_that_submits_to_it(make_config: MakeConfig, reports: Reports) -> None:
    config = make_config(
        engine="paced", request_timeout=1.0, engine_options={"tokens_per_second": 0.01, "shortest": 8, "longest": 8}
    )

    async def body(pool: GeneratorPool) -> None:
        (worker,) = pool.workers.values()
        await pool.submit(portions_of(range(1)))
        with pytest.raises(GeneratorError, match=r"`adopt_version` within 1 s.*in a step.*generator\.request_timeout"):
            await answer_of(worker.adopt_version.remote(1))
        await pool.submit(portions_of(range(1, 2)))
        (failure,) = await pool.check()
        assert "`submit` within 1 s" in failure.cause
        assert failure.groups == [GroupId(0, 0), GroupId(0, 1)]

    with_pool(config, reports.handle, body)


POISON = """
import os
from transformers import {base}


class Poisoned({base}):
    def forward(self, input_ids=None, **kwargs):
        if input_ids is not None and input_ids.shape[1] > 3 and (input_ids[:, 1:4] == input_ids.new_tensor({ids})).all(1).any():
            {fails}
        return super().forward(input_ids=input_ids, **kwargs)
"""


@pytest.mark.parametrize(
    ("fails", "text"),
    [
        ('raise RuntimeError("illegal memory access")', "the engine failed: RuntimeError: illegal memory access"),
        ("os._exit(1)", "died: "),
    ],
)
def test_an_engine_that_fails_on_a_prompt_is_reported_with_its_groups_and_no_call_raises(
    make_config: MakeConfig, reports: Reports, tmp_path: Path, fails: str, text: str
) -> None:
    config = make_config()
    model = shutil.copytree(config.model.path, tmp_path / "model")
    settings = json.loads((model / "config.json").read_text())
    ids = list(prompt(1).token_ids[1:4])
    source = POISON.format(base=settings["architectures"][0], ids=ids, fails=fails)
    (model / "modeling_poisoned.py").write_text(source)
    settings |= {"auto_map": {"AutoModelForCausalLM": "modeling_poisoned.Poisoned"}, "architectures": ["Poisoned"]}
    (model / "config.json").write_text(json.dumps(settings))
    trusted = config.model.model_copy(update={"path": str(model), "trust_remote_code": True})

    async def body(pool: GeneratorPool) -> None:
        await pool.submit(portions_of(range(1)))
        await asyncio.to_thread(reports.wait, [GroupId(0, 0)])
        await pool.submit(portions_of(range(1, 3)))
        deadline = time.monotonic() + 60
        while not (failures := await pool.check()) and time.monotonic() < deadline:
            await pool.submit(portions_of(range(3, 4)))
            await pool.drop([GroupId(0, 3)])
            await asyncio.sleep(0.05)
        (failure,) = failures
        assert text in failure.cause
        assert {GroupId(0, 1), GroupId(0, 2)} <= set(failure.groups)
        with pytest.raises(GeneratorError, match="no generator worker is left to evaluate on"):
            await pool.evaluate([prompt(0)], SamplingParams(max_tokens=4), 1)

    with_pool(config.model_copy(update={"model": trusted}), reports.handle, body)


@pytest.mark.parametrize(
    ("seen", "cause"),
    [(True, "did not answer for 3 s: its process is stopped"), (False, "did not answer for 2 s")],
    ids=["stopped", "hangs"],
)
def test_a_silent_worker_is_not_waited_for(
    make_config: MakeConfig, reports: Reports, monkeypatch: pytest.MonkeyPatch, seen: bool, cause: str
) -> None:
    """Its process is there and answers nothing; the others do its work. Whether it is stopped may not be seen."""
    if not seen:
        monkeypatch.setattr(stopped_process, "stays_stopped", AsyncMock(return_value=False))

    async def body(pool: GeneratorPool) -> None:
        name, handle = next(iter(pool.workers.items()))
        pid = (await answer_of(handle.ready.remote())).pid
        os.kill(pid, signal.SIGSTOP)
        try:
            monkeypatch.setattr(pool_calls, "ANSWER_SECONDS", 1.0)
            rows = await pool.evaluate([prompt(row) for row in range(4)], SamplingParams(max_tokens=4), 1)
            assert [row.row for row in rows] == [0, 1, 2, 3]
            (failure,) = await pool.check()
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (failure.worker, failure.cause) == (name, cause)

    with_pool(make_config(workers=2), reports.handle, body)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"engine_options": {"device": "nowhere"}},
            r"generator\.engine_options\.device: 'nowhere' cannot be used.*nowhere",
        ),
        ({"cpus_per_worker": 64.0, "threads": 1}, "not placed.*64 CPU"),
    ],
)
def test_a_pool_that_cannot_start_says_why(make_config: MakeConfig, change: dict[str, Any], text: str) -> None:
    config = make_config(**change)
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"placement_timeout": 3.0})})
    if "engine_options" in change:
        config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"placement_timeout": 60.0})})

    async def body(pool: GeneratorPool) -> None:
        raise AssertionError("it started")

    with pytest.raises(GeneratorError, match=text):
        with_pool(config, None, body)


def test_a_model_that_is_not_there_is_named(make_config: MakeConfig) -> None:
    config = make_config()
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": "/nowhere/at/all"})})

    async def body(pool: GeneratorPool) -> None:
        raise AssertionError("it started")

    with pytest.raises(GeneratorError, match="/nowhere/at/all"):
        with_pool(config, None, body)


def test_a_selector_that_takes_no_report_surfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf:
        def report(self, shards: list[GroupShard]) -> None:
            time.sleep(600)

    monkeypatch.setattr(reporter, "REPORTS_IN_FLIGHT", 2)
    selector = ray.remote(num_cpus=0)(Deaf).remote()
    try:
        link = reporter.SelectorLink(selector, 0.5)
        link.send([])
        link.send([])
        with pytest.raises(GeneratorError, match=r"none of 3 reports for 0\.5 s \(generator\.request_timeout\)"):
            link.send([])
    finally:
        ray.kill(selector)


def test_workers_outlive_a_dead_selector_and_begin_again_with_another(make_config: MakeConfig) -> None:
    dead, second, reports = start_collector(), Reports(start_collector()), Reports(start_collector())
    groups = [group for group, _ in groups_of(range(3))]

    async def body(pool: GeneratorPool) -> None:
        ray.kill(dead)
        for row in range(3):
            await pool.submit(portions_of(range(row, row + 1)))
            await asyncio.sleep(0.2)
            assert not await pool.check()
        # another selector learns of what they hold, and of what comes later; nothing is made again
        await pool.report_again(second.handle, groups)
        shards = await asyncio.to_thread(second.wait, groups)
        (stats,) = (await pool.stats()).workers.values()
        made = sum(int(shard.lengths.sum()) for each in shards.values() for shard in each)
        assert stats.engine.generated_tokens == made
        starting = await pool.prepare(60)
        assert not await pool.begin_again(reports.handle)
        pool.admit(starting)
        (before,) = [name for name in pool.serving if name != starting]
        await pool.adopt_version(0)
        await pool.fail(before, "so that the new one makes them all")
        # the same groups, as a run that goes on from an older state asks for them
        await pool.submit(portions_of(range(3)))
        await asyncio.to_thread(reports.wait, groups)
        assert not await pool.check()

    with_pool(make_config(), dead, body)
