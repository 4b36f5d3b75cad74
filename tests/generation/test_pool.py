"""Workers and their pool as real Ray actors: engine, scorers, reports, weights, failures."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import AsyncMock

import numpy as np
import pytest
import ray

from pods_cluster import stopped_process
from pods_cluster.config import Config
from pods_cluster.generation import pool_calls, reporter
from pods_cluster.generation.completion_text import CompletionText
from pods_cluster.generation.engine import EngineError
from pods_cluster.generation.engines.builtin.engine import TransformersEngine
from pods_cluster.generation.messages import GeneratorError, GroupRequest, Portion
from pods_cluster.generation.packed_rollouts import unpack
from pods_cluster.generation.pool import GeneratorPool
from pods_cluster.group_shard import GroupShard
from pods_cluster.quickstart.character_tokenizer import build_tokenizer
from pods_cluster.types import (
    FinishReason,
    GroupId,
    Locator,
    Prompt,
    Rollout,
    RolloutRequest,
    SamplingParams,
    Selection,
)
from tests.generation.learner import Learner
from tests.generation.rewards import first_token_is_digit, length

pytestmark = pytest.mark.usefixtures("cluster")
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


@pytest.fixture
def reports() -> Iterator[Reports]:
    handle = start_collector()
    yield Reports(handle)
    ray.kill(handle)


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


@pytest.fixture(scope="module")
def shared(make_config: MakeConfig) -> Iterator[tuple[GeneratorPool, Reports]]:
    """Two workers with the built-in engine, started once, for tests that leave them whole; each has rows of its own."""
    handle = start_collector()
    config = make_config(workers=2)
    config = config.model_copy(update={"run": config.run.model_copy(update={"name": "generation-shared"})})
    pool = GeneratorPool(config, handle)

    async def start() -> None:
        await pool.start()
        await pool.adopt_version(0)

    try:
        asyncio.run(start())
        yield pool, Reports(handle)
    finally:
        asyncio.run(pool.close())
        ray.kill(handle)


Shared = tuple[GeneratorPool, Reports]


def ids(rows: range) -> list[GroupId]:
    return [GroupId(0, row) for row in rows]


def selection(shard: GroupShard, indices: list[int]) -> Selection:
    return Selection(
        shard.group,
        [Locator(shard.worker, shard.group, index) for index in indices],
        np.zeros(len(indices)),
        np.zeros(len(indices), np.int32),
        shard.prompt_tokens,
        np.zeros(len(indices), np.int32),
        0.0,
        0.0,
        len(shard),
    )


def merged(shards: list[GroupShard]) -> dict[int, tuple[float, int]]:
    return {
        int(index): (float(reward), int(tokens))
        for shard in shards
        for index, reward, tokens in zip(shard.indices, shard.rewards, shard.lengths, strict=True)
    }


def test_groups_are_generated_scored_reported_and_taken(shared: Shared) -> None:
    pool, reports = shared

    async def body() -> None:
        before = {name: stats.reported for name, stats in (await pool.stats()).workers.items()}
        await pool.submit(portions_of(range(4)))
        shards = await asyncio.to_thread(reports.wait, ids(range(4)))
        owners = {group: {part.worker for part in parts} for group, parts in shards.items()}
        assert all(len(workers) == 1 for workers in owners.values())  # whole groups
        assert {worker for workers in owners.values() for worker in workers} == set(pool.workers)
        for group, parts in shards.items():
            assert all(part.size == 6 for part in parts)
            numbers = merged(parts)
            assert sorted(numbers) == list(range(6))
            held = await pool.sample(group)
            assert [rollout.index for rollout in held] == list(range(6))
            for rollout in held:
                _check_rollout(rollout, group, numbers[rollout.index])
        # the selector keeps two of the first group; the others are forgotten
        first, name = GroupId(0, 0), shards[GroupId(0, 0)][0].worker
        worker = pool.workers[name]
        await pool.keep([selection(shards[first][0], [1, 4])])
        assert [rollout.index for rollout in await pool.sample(first)] == [1, 4]
        answer = await _call(worker.take.remote([(first, [0, 4])]))
        assert [rollout.index for rollout in unpack(answer)] == [4]
        assert list(answer.absent) == [(first, 0)]
        answer = await _call(worker.take.remote([(first, [1, 4])]))
        assert [rollout.index for rollout in unpack(answer)] == [1]
        assert list(answer.absent) == [(first, 4)]
        await pool.drop([GroupId(0, 1), GroupId(0, 2)])
        left = [await _call(handle.drain.remote(0.1)) for handle in pool.workers.values()]
        assert sorted(left) == [[], [GroupId(0, 3)]]
        stats = await pool.stats()
        for mine in stats.workers.values():
            assert mine.reported - before[mine.name] == 12
            assert mine.scoring == 0
            assert mine.error is None
        assert sorted(mine.stored for mine in stats.workers.values()) == [0, 6]
        assert sum(mine.scorers.scored for mine in stats.workers.values() if mine.scorers is not None) >= 24
        assert stats.metrics()["generator/workers"] == 2.0
        await pool.drop([GroupId(0, 3)])

    asyncio.run(body())


def _check_rollout(rollout: Rollout, group: GroupId, numbers: tuple[float, int]) -> None:
    tokenizer = build_tokenizer()
    assert rollout.group == group
    assert [rollout.text] == CompletionText(tokenizer).of([rollout])
    parts = {
        "first_token_is_digit": first_token_is_digit([""], [rollout.text])[0],
        "length": length([""], [rollout.text])[0],
    }
    assert rollout.reward_parts == parts
    assert rollout.reward == parts["first_token_is_digit"]
    expected = float("nan") if rollout.reward is None else rollout.reward
    np.testing.assert_equal(numbers, (expected, len(rollout.token_ids)))


async def _call(reference: Any) -> Any:
    """The answer; what the method raised itself."""
    try:
        return await reference
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None


def test_workers_make_the_rollouts_that_an_engine_alone_makes(shared: Shared, model_folder: str) -> None:
    from transformers import AutoModelForCausalLM

    pool, reports = shared
    config = pool.config.generator
    engine = TransformersEngine(AutoModelForCausalLM.from_pretrained(model_folder, dtype="float32"), [2])
    engine.version = 0
    sampling = SamplingParams(temperature=config.temperature, max_tokens=config.max_tokens, seed=pool.config.run.seed)
    engine.submit([r for group, item in groups_of(range(10, 13)) for r in _requests(group, item, sampling)])
    alone: dict[str, list[int]] = {}
    while engine.in_flight:
        alone |= {rollout.key: rollout.token_ids for rollout in engine.step()}

    async def body() -> dict[str, list[int]]:
        await pool.submit(portions_of(range(10, 13)))
        await asyncio.to_thread(reports.wait, ids(range(10, 13)))
        held = [await pool.sample(group) for group in ids(range(10, 13))]
        await pool.drop(ids(range(10, 13)))
        return {rollout.key: rollout.token_ids for group in held for rollout in group}

    assert asyncio.run(body()) == alone
    assert len(alone) == 18


def _requests(group: GroupId, item: Prompt, sampling: SamplingParams) -> list[RolloutRequest]:
    return GroupRequest(group, item, tuple(range(6)), 6, sampling).requests()


def test_one_group_can_be_spread_over_workers(shared: Shared) -> None:
    pool, reports = shared
    group = GroupId(0, 20)

    async def body() -> None:
        await pool.submit(portions_of(range(20, 21)))
        shards = (await asyncio.to_thread(reports.wait, [group]))[group]
        by_worker: dict[str, set[int]] = {}
        for shard in shards:
            by_worker.setdefault(shard.worker, set()).update(shard.indices.tolist())
        assert sorted(map(sorted, by_worker.values())) == [[0, 1, 2], [3, 4, 5]]
        assert len(await pool.sample(group)) == 6
        await pool.keep([selection(shards[0], [int(shards[0].indices[0])])])
        assert len(await pool.sample(group)) == 1
        await pool.drop([group])
        assert await pool.sample(group) == []

    asyncio.run(body())


def test_a_refused_request_queues_nothing_and_can_be_repaired(shared: Shared) -> None:
    pool, reports = shared

    async def body() -> None:
        long = Prompt(0, 31, "long", tuple([4] * 30))
        with pytest.raises(EngineError, match=r"0\.31\.0/\d.*context of 32"):
            await pool.submit([Portion(GroupId(0, 31), long, 6, 0, 6)])
        assert [await _call(handle.groups.remote()) for handle in pool.workers.values()] == [[], []]
        await pool.submit(portions_of(range(30, 31)))
        await asyncio.to_thread(reports.wait, [GroupId(0, 30)])
        with pytest.raises(GeneratorError, match="submitted here before"):
            await pool.submit(portions_of(range(30, 31)))
        assert await pool.check() == []
        await pool.drop([GroupId(0, 30), GroupId(0, 31)])

    asyncio.run(body())


def test_workers_are_added_and_drained_away(shared: Shared) -> None:
    pool, reports = shared

    async def body() -> None:
        added = await pool.prepare(60)
        assert added not in pool.workers
        await _call(pool.prepared_worker(added).adopt_version.remote(0))
        pool.admit(added)
        await pool.submit(portions_of(range(40, 43)))
        shards = await asyncio.to_thread(reports.wait, ids(range(40, 43)))
        owners = {parts[0].worker: group for group, parts in shards.items()}
        assert set(owners) == set(pool.workers)
        (leaves,) = pool.retire(1)
        draining = asyncio.ensure_future(pool.drain(leaves, 60))
        await asyncio.sleep(0.5)
        assert not draining.done()  # its rollouts were not taken yet
        await pool.submit(portions_of(range(43, 46)))
        shards = await asyncio.to_thread(reports.wait, ids(range(43, 46)))
        assert {parts[0].worker for parts in shards.values()} == set(pool.serving) == set(owners) - {leaves}
        await _call(pool.workers[leaves].take.remote([(owners[leaves], list(range(6)))]))
        await draining
        failure = await pool.dismiss(leaves)
        assert failure is not None
        assert failure.groups == []
        assert failure.leaving
        assert leaves not in pool.workers
        assert len(pool.workers) == 2
        with pytest.raises(GeneratorError, match="at least one must stay"):
            pool.retire(2)
        await pool.drop(ids(range(40, 46)))

    asyncio.run(asyncio.wait_for(body(), 240))


def test_weights_arrive_between_steps_and_evaluation_uses_them(
    make_config: MakeConfig, reports: Reports, model_folder: str
) -> None:
    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(model_folder, dtype="float32")
    for parameter in trained.parameters():
        parameter.data.add_(0.05)

    async def body(pool: GeneratorPool) -> None:
        (worker,) = pool.workers.values()
        with pytest.raises(EngineError, match="publish version 0"):
            await pool.submit(portions_of(range(1)))
        learner = Learner(trained)
        await asyncio.to_thread(
            learner.publish,
            1,
            lambda invitation: ray.get(worker.connect.remote(invitation)),
            lambda update: ray.get(worker.receive.remote(update)),
        )
        prompts = [prompt(row) for row in range(5)]
        rows = await pool.evaluate(prompts, SamplingParams(max_tokens=6, seed=1), 0)
        assert [(row.epoch, row.row, row.version) for row in rows] == [(0, row, 1) for row in range(5)]
        engine = TransformersEngine(trained, [2])
        engine.version = 1
        for row, item in zip(rows, prompts, strict=True):
            (sample,) = row.samples
            request = GroupRequest(GroupId(0, row.row), item, (0,), 1, SamplingParams(temperature=0.0, max_tokens=6))
            engine.submit(request.requests())
            while engine.in_flight:
                for rollout in engine.step():
                    assert CompletionText(build_tokenizer()).of([rollout]) == [sample.text]
                    assert sample.tokens == len(rollout.token_ids)
                    assert sample.truncated == (rollout.finish_reason is FinishReason.LENGTH)
            assert sample.parts["length"] == len(sample.text)
        again = [await pool.evaluate(prompts, SamplingParams(max_tokens=6, seed=1), 3) for _ in range(2)]
        assert again[0] == again[1]
        assert all(len(row.samples) == 3 for row in again[0])
        assert await pool.evaluate([], SamplingParams(), 1) == []
        completion = [(prompts[0].token_ids, [5, 6, 2])]
        assert await _call(worker.score.remote(completion, 0.7)) == [pytest.approx(engine.score(completion, 0.7)[0])]
        assert await _call(worker.fingerprints.remote()) == engine.fingerprints()
        assert reports.messages() == []

    with_pool(make_config(), reports.handle, body, adopt=None)


def test_dropped_groups_are_aborted_and_never_reported(make_config: MakeConfig, reports: Reports) -> None:
    config = make_config(
        engine="paced", engine_options={"tokens_per_second": 5.0, "shortest": 8, "longest": 8}, max_sequences=3
    )

    async def body(pool: GeneratorPool) -> None:
        (worker,) = pool.workers.values()
        await pool.submit(portions_of(range(3)))
        await pool.drop([GroupId(0, 0), GroupId(0, 2)])
        await _call(worker.abort.remote(GroupId(0, 1), [3, 4, 5]))
        shards = await asyncio.to_thread(reports.wait, [GroupId(0, 1)])
        assert {shard.group for message in reports.messages() for shard in message} == {GroupId(0, 1)}
        aborted = {
            int(index): bool(flag)
            for shard in shards[GroupId(0, 1)]
            for index, flag in zip(shard.indices, shard.aborted, strict=True)
        }
        assert aborted == {0: False, 1: False, 2: False, 3: True, 4: True, 5: True}
        rewards = merged(shards[GroupId(0, 1)])
        assert all(np.isnan(rewards[index][0]) for index in (3, 4, 5))
        stats = (await pool.stats()).workers["generation-test/generator/0"]
        assert stats.engine.aborted == 15
        assert (stats.stored, stats.groups) == (6, 1)

    with_pool(config, reports.handle, body)


def test_places_come_free_one_by_one_and_new_groups_go_where_they_are(
    make_config: MakeConfig, reports: Reports
) -> None:
    options = {"tokens_per_second": 60.0, "shortest": 6, "longest": 6}
    config = make_config(workers=2, engine="paced", engine_options=options, max_sequences=16)
    config = config.model_copy(update={"staleness": 1})

    async def body(pool: GeneratorPool) -> None:
        assert await pool.wait_for_room(16, 5.0) in (16, 32)  # of one or of both workers
        await pool.submit(portions_of(range(4)))
        load = {name: member.sampling for name, member in pool._members.items()}
        assert list(load.values()) == [12, 12]
        assert await pool.wait_for_room(12, 0.0) == 0 or any(member.sampling < 12 for member in pool._members.values())
        await asyncio.to_thread(reports.wait, ids(range(4)))
        room = 0
        async with asyncio.timeout(30):  # the answers that were out before the groups were sent come first
            while room < 32:
                room = await pool.wait_for_room(32, 5.0)
        busy, idle = pool._members
        pool._members[busy].sampling, pool._members[idle].sampling = 12, 0
        await pool.submit(portions_of(range(4, 6)))
        assert GroupId(0, 4) in pool._members[idle].groups
        assert GroupId(0, 5) in pool._members[idle].groups
        await pool.drop(ids(range(6)))

    with_pool(config, reports.handle, body)


@pytest.mark.parametrize(("prompts", "divided"), [(1, True), (4, False)])
def test_groups_are_divided_where_too_few_are_out_for_all_workers(
    make_config: MakeConfig, reports: Reports, prompts: int, divided: bool
) -> None:
    config = make_config(workers=2, engine="paced", engine_options={"tokens_per_second": 600.0}, max_sequences=16)
    learner = config.learner.model_copy(update={"prompts_per_step": prompts})
    config = config.model_copy(update={"staleness": 1, "learner": learner})

    async def body(pool: GeneratorPool) -> None:
        await pool.submit(portions_of(range(1)))
        assert sum(GroupId(0, 0) in member.groups for member in pool._members.values()) == (2 if divided else 1)
        await pool.drop(ids(range(1)))

    with_pool(config, reports.handle, body)


def test_a_killed_worker_is_found_with_its_groups_and_replaced(make_config: MakeConfig, reports: Reports) -> None:
    async def body(pool: GeneratorPool) -> None:
        await pool.submit(portions_of(range(4)))
        await asyncio.to_thread(reports.wait, ids(range(4)))
        assert await pool.check() == []
        name, handle = next(iter(pool.workers.items()))
        held = await _call(handle.groups.remote())
        assert len(held) == 2
        os.kill((await _call(handle.ready.remote())).pid, signal.SIGKILL)
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
            await _call(pool.workers[new].submit.remote([request]))
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
        with pytest.raises(GeneratorError, match=r"`fingerprints` within 1 s.*in a step.*generator\.request_timeout"):
            await _call(worker.fingerprints.remote())
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
        pid = (await _call(handle.ready.remote())).pid
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


def test_a_second_pool_of_the_same_name_is_refused(shared: Shared) -> None:
    pool, _ = shared

    async def body(second: GeneratorPool) -> None:
        raise AssertionError("it started")

    with pytest.raises(GeneratorError, match=r"generation-shared/generator/\d.*run\.name"):
        with_pool(pool.config, None, body)
    assert asyncio.run(pool.check()) == []


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
