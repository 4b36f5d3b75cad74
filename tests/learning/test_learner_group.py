"""The learner group on a real Ray cluster: two phases, lost rollouts, resume, a dead rank, no compiler."""

import asyncio
import os
import re
import resource
import shutil
import signal
from pathlib import Path

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pods_cluster.generation.packed_rollouts import pack
from pods_cluster.learning import rank_actors
from pods_cluster.learning.learner_group import LearnerError, LearnerGroup, ResizeError, StorageError
from pods_cluster.types import GroupId, Locator
from tests.learning.support import WORKER, OneBigBatch, config_for, make_step, true_log_probs
from tests.learning.test_trainer import assert_same_parameters
from tests.ray_cluster import RayCluster

PROBE = [((4, 5, 6), (7, 8, 9)), ((4, 5), (10, 11, 2))]


class Holder:
    """Keeps one step's rollouts as a generator worker does: `take` hands over what is here and names the rest."""

    def __init__(self):
        self.held = {}

    def put(self, rollouts):
        self.held = {(locator.group, locator.index): rollout for locator, rollout in rollouts.items()}

    def take(self, wanted):
        keys = [(GroupId(*group), index) for group, indices in wanted for index in indices]
        absent = {key: "not here" for key in keys if key not in self.held}
        return pack([self.held.pop(key) for key in keys if key in self.held], absent)


@pytest.fixture(scope="module")
def cluster(ray_cluster: RayCluster) -> None:
    ray_cluster.use(cards=2)  # where processes are put


@pytest.fixture
def holder(cluster):
    actor = ray.remote(num_cpus=0)(Holder).options(name=WORKER, namespace="pods").remote()
    yield actor
    ray.kill(actor)


async def give(holder, seed):
    selections, rollouts = make_step(seed)
    await holder.put.remote(rollouts)
    return selections, rollouts


async def write_to_a_full_disk(group, rank, write, path):
    pid = group.infos[rank].pid
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(StorageError, match=r"File too large|inline_container"):
            await write(path)
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    assert list(path.parent.glob(f"{path.name}*")) == []


async def as_if_with(group, optimizer):
    """The ranks save in the layout of this optimiser: 8-bit states need a GPU, what DeepSpeed writes for them does not."""

    def change(rank):
        learner = rank.config.learner.model_copy(update={"optimizer": optimizer})
        rank.config = rank.trainer.config = rank.config.model_copy(update={"learner": learner})

    await asyncio.gather(*(rank.__ray_call__.remote(change) for rank in group.handles))


async def a_full_disk_costs_the_state_alone(group, path):
    """A rank whose files may not grow says so; nothing of the state stays, and the group goes on."""
    (path.parent / "a-file").touch()
    for rank, write in ((1, group.save), (0, group.save), (0, group.export)):
        await write_to_a_full_disk(group, rank, write, path)
    with pytest.raises(StorageError, match="Not a directory"):
        await group.save(path.parent / "a-file" / "saved")
    await as_if_with(group, "adamw_8bit")
    for rank in (1, 0):
        await write_to_a_full_disk(group, rank, group.save, path)
    with pytest.raises(StorageError, match="Not a directory"):
        await group.save(path.parent / "a-file" / "saved")
    await group.save(path)
    assert (path / "state").is_dir()
    shutil.rmtree(path)
    await as_if_with(group, "adamw")
    with pytest.raises(ResizeError, match=r"cannot be written for another number of ranks .*; 2 go on"):
        await group.resize(1, path.parent / "a-file" / "saved")


async def two_phases_and_resume(config, holder, model_folder, folder):
    """One group's life in one start: a whole step, one with losses, save, more steps; then a second group resumes."""
    truth = OneBigBatch(config, AutoModelForCausalLM.from_pretrained(model_folder))
    group = LearnerGroup(config, fetch_timeout=20)
    infos = await group.start()
    try:
        assert [info.rank for info in infos] == [0, 1]
        assert all(info.device == "cpu" and info.chunked_head for info in infos)

        selections, rollouts = await give(holder, 0)
        result = await group.train(selections, 0)
        truth.step(selections, rollouts, result.metrics["learning_rate"])
        assert result.metrics["learning_rate"] == pytest.approx(config.learner.learning_rate / 2)
        assert (len(result.trained), result.lost, result.trained_rollouts, result.updates) == (4, [], 15, 1)
        assert result.metrics["grad_norm"] == pytest.approx(truth.norms[-1], rel=1e-4)
        assert result.metrics["loss"] == pytest.approx(truth.losses[-1], abs=1e-5)
        assert result.received_bytes > 0

        # one rollout of group 0 is not there, group 1's worker is unknown, group 2 (kept 3 of floor 3) loses one
        selections, rollouts = make_step(1)
        first, third = selections[0].locators[1], selections[2].locators[0]
        await holder.put.remote({k: v for k, v in rollouts.items() if k not in (first, third)})
        gone = selections[1]
        gone.locators = [Locator("learning-test/generator/9", x.group, x.index) for x in gone.locators]
        result = await group.train(selections, 1)
        assert result.trained == [selections[0].group, selections[3].group]
        lost = sorted(result.lost, key=lambda group: group.group)
        assert [(group.group, group.missing, group.kept) for group in lost] == [
            (gone.group, len(gone), len(gone)),
            (selections[2].group, 1, 3),
        ]
        assert lost[0].cause == "worker learning-test/generator/9 is gone"
        assert lost[1].cause == f"worker {WORKER}: not here"
        assert (result.trained_rollouts, result.lost_rollouts) == (7, 8)
        assert len(result.missing) == 6
        assert {missing.locator for missing in result.missing} == {first, third, *gone.locators}
        keep = [i for i, x in enumerate(selections[0].locators) if x != first]
        selections[0].locators = [selections[0].locators[i] for i in keep]
        selections[0].rewards, selections[0].lengths = selections[0].rewards[keep], selections[0].lengths[keep]
        truth.step([selections[0], selections[3]], rollouts, result.metrics["learning_rate"])
        assert result.metrics["grad_norm"] == pytest.approx(truth.norms[-1], rel=1e-4)

        # everything lost: nothing is updated, nothing hangs
        before = await group.score(PROBE, 0.8)
        await holder.put.remote({})
        result = await group.train(make_step(2)[0], 2)
        assert (result.updates, result.trained, len(result.lost)) == (0, [], 4)
        assert await group.score(PROBE, 0.8) == before

        await a_full_disk_costs_the_state_alone(group, folder / "saved")
        await group.save(folder / "saved")
        assert not (folder / "saved.partial").exists()
        copy = await group.copy_state(folder / "copied")
        assert not copy.fault
        after = []
        for step in (2, 3):
            selections, rollouts = await give(holder, step)
            after.append((await group.train(selections, step)).metrics)
            truth.step(selections, rollouts, after[-1]["learning_rate"])
        while not (copy := await group.copy_report()).written:
            assert not copy.fault
            await asyncio.sleep(0.05)
        for path in (folder / "saved").iterdir():  # it is of the state when it was asked for, though the ranks went on
            if not path.name.startswith("random"):
                assert (folder / "copied" / path.name).read_bytes() == path.read_bytes(), path.name
        await group.export(folder / "model")
        final = await group.score(PROBE, 0.8)
        memory = await group.memory()
        assert all(m.peak > m.optimizer > 0 for m in memory)
    finally:
        await group.close()

    exported = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert_same_parameters(dict(exported.named_parameters()), truth.parameters(), atol=2e-5)
    assert AutoTokenizer.from_pretrained(folder / "model").chat_template
    _, rollouts = make_step(0)
    rollout = next(iter(rollouts.values()))
    rollout.prompt_ids, rollout.token_ids = PROBE[0][0], list(PROBE[0][1])
    torch.testing.assert_close(torch.tensor(final[0]), true_log_probs(exported, rollout, 0.8), rtol=1e-4, atol=1e-4)

    resumed = LearnerGroup(config, fetch_timeout=20)
    await resumed.start()
    try:
        await resumed.load(folder / "copied")
        for step, metrics in zip((2, 3), after, strict=True):
            selections, _ = await give(holder, step)
            assert (await resumed.train(selections, step)).metrics == metrics
        assert await resumed.score(PROBE, 0.8) == final
        # a rank that is stopped is noticed by the state of its process, long before its silence would tell
        os.kill(resumed.infos[1].pid, signal.SIGSTOP)
        with pytest.raises(LearnerError, match=r"learner/1 did not answer for \d+ s: its process is stopped"):
            await asyncio.wait_for(resumed.watch(), 20)
        os.kill(resumed.infos[1].pid, signal.SIGCONT)
        resumed._broken = None
        # one that hangs by its silence, whatever it was asked to do
        hanging = resumed.handles[1].__ray_call__.remote(lambda _: sum(range(10**13)))  # holds Python's lock
        with pytest.MonkeyPatch.context() as shorter:
            shorter.setattr(rank_actors, "SILENCE_SECONDS", 6.0)
            with pytest.raises(LearnerError, match=r"learner/1 did not answer for \d+ s: its process hangs"):
                await asyncio.wait_for(resumed.watch(), 60)
        del hanging
        resumed._broken = None
        # a rank that dies is named, at once, and the group refuses to go on
        os.kill(resumed.infos[1].pid, signal.SIGKILL)
        selections, _ = await give(holder, 4)
        with pytest.raises(LearnerError, match=r"failed to take their rollouts|process died"):
            await resumed.train(selections, 4)
        with pytest.raises(LearnerError, match="broken"):
            await resumed.score(PROBE, 0.8)
    finally:
        await resumed.close()


def test_two_phases_resume_and_a_dead_rank(holder, model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(rank_actors, "_LOOK_SECONDS", 0.5)
    config = config_for(model_folder, workers=2, zero_stage=2, warmup_steps=2, top={"selector": {"min_valid": 3}})
    asyncio.run(two_phases_and_resume(config, holder, model_folder, tmp_path))


class NoSecondRank(LearnerGroup):
    """A group on a cluster where a second rank never comes up."""

    async def start(self):
        if self.workers == 2:
            raise LearnerError("no room")
        return await super().start()


def test_ranks_that_share_cards_with_generators_have_one_each(cluster, model_folder):
    """Generators of 0.4 cards fit where two ranks of 0.6 do not: the ranks choose first."""
    config = config_for(model_folder, workers=2, gpus_per_worker=0.6)

    async def places() -> list[str]:
        group = LearnerGroup(config)
        try:
            await group.place_ranks(60.0)
            others = [ray.remote(Holder).options(num_cpus=0, num_gpus=0.4).remote() for _ in range(2)]
            await asyncio.gather(*(other.__ray_ready__.remote() for other in others))
            for other in others:
                ray.kill(other)
            reserved = [rank.handle for rank in group._reserved]
            return [
                location.card
                for location in await asyncio.gather(*(rank.weights_location.remote() for rank in reserved))
            ]
        finally:
            await group.close()

    assert sorted(asyncio.run(places())) == ["0", "1"]


@pytest.mark.slow  # three groups of ranks
def test_a_change_of_size_that_fails_leaves_the_group_as_it_was(holder, model_folder, tmp_path):
    config = config_for(model_folder, top={"run": {"name": "no-second"}})

    async def change():
        group = NoSecondRank(config)
        await group.start()
        try:
            selections, _ = await give(holder, 0)
            await group.train(selections, 0)
            before, names = await group.score(PROBE, 0.8), group.names
            with pytest.raises(ResizeError, match=r"2 learner ranks could not start \(no room\); 1 go on"):
                await group.resize(2, tmp_path / "state")
            assert await group.score(PROBE, 0.8) == before
            assert group.workers == 1
            assert group.names != names  # another process with the same state
            selections, _ = await give(holder, 1)
            assert (await group.train(selections, 1)).updates == 1
            with pytest.raises(LearnerError, match=r"9 more learner ranks could not be placed within 1 s"):
                await group.reserve(10, 1.0)
        finally:
            await group.close()

    asyncio.run(change())


@pytest.mark.slow  # a group of its own
def test_starts_where_no_compiler_is(cluster, model_folder, tmp_path):
    """With no compiler on PATH and an empty operator cache a rank starts, and compiles nothing."""
    tools, cache = tmp_path / "bin", tmp_path / "cache"
    tools.mkdir()
    cache.mkdir()
    for folder in os.environ["PATH"].split(os.pathsep):
        for tool in Path(folder).glob("*"):
            if not re.search(r"\+\+|gcc|cc$|clang|ninja", tool.name) and not (tools / tool.name).is_symlink():
                (tools / tool.name).symlink_to(tool)
    assert all(shutil.which(name, path=str(tools)) is None for name in ("c++", "g++", "cc", "gcc", "ninja"))
    env = {"PATH": str(tools), "TORCH_EXTENSIONS_DIR": str(cache), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    config = config_for(model_folder, workers=1, top={"run": {"name": "no-compiler"}})

    async def start():
        group = LearnerGroup(config, actor_options={"runtime_env": {"env_vars": env}})
        try:
            await group.start()
            return await group.score(PROBE, 0.8)
        finally:
            await group.close()

    assert len(asyncio.run(start())) == 2
    assert list(cache.iterdir()) == []


def test_a_model_that_does_not_load_is_the_cause_that_is_named(cluster, tmp_path):
    config = config_for(tmp_path / "nothing-here", top={"run": {"name": "no-model"}})

    async def start():
        group = LearnerGroup(config)
        try:
            await group.start()
        finally:
            await group.close()

    with pytest.raises(LearnerError, match=r"model\.path: .*nothing-here"):
        asyncio.run(start())
