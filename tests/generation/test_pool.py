"""Workers and their pool as real Ray actors: engine, scorers, reports, weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import ray

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
from tests.generation.rewards import first_token_is_digit, length

pytestmark = pytest.mark.usefixtures("cluster")


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
        answer = await answer_of(worker.take.remote([(first, [0, 4])]))
        assert [rollout.index for rollout in unpack(answer)] == [4]
        assert list(answer.absent) == [(first, 0)]
        answer = await answer_of(worker.take.remote([(first, [1, 4])]))
        assert [rollout.index for rollout in unpack(answer)] == [1]
        assert list(answer.absent) == [(first, 4)]
        await pool.drop([GroupId(0, 1), GroupId(0, 2)])
        left = [await answer_of(handle.drain.remote(0.1)) for handle in pool.workers.values()]
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
        assert [await answer_of(handle.groups.remote()) for handle in pool.workers.values()] == [[], []]
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
        await answer_of(pool.prepared_worker(added).adopt_version.remote(0))
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
        await answer_of(pool.workers[leaves].take.remote([(owners[leaves], list(range(6)))]))
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
        assert await answer_of(worker.score.remote(completion, 0.7)) == [
            pytest.approx(engine.score(completion, 0.7)[0])
        ]
        assert await answer_of(worker.fingerprints.remote()) == engine.fingerprints()
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
        await answer_of(worker.abort.remote(GroupId(0, 1), [3, 4, 5]))
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


def test_a_second_pool_of_the_same_name_is_refused(shared: Shared) -> None:
    pool, _ = shared

    async def body(second: GeneratorPool) -> None:
        raise AssertionError("it started")

    with pytest.raises(GeneratorError, match=r"generation-shared/generator/\d.*run\.name"):
        with_pool(pool.config, None, body)
    assert asyncio.run(pool.check()) == []
