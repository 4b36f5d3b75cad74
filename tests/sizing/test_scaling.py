"""Live scaling: what is decided, and that the loop goes on through every change, with every prompt trained once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.generation.messages import Failure, WorkerPhase
from pods_cluster.learning.reports import LearnerError
from pods_cluster.run import checkpoints, step_assembly
from pods_cluster.sizing import scaler
from pods_cluster.sizing.moves import Moves, Pools, ScaleError, Sizes, check_request, describe, moves, rebuild_due
from pods_cluster.types import Fate, GroupId
from tests.run.made_up_loop import Loop
from tests.run.parts import loop_config


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step_assembly, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(scaler, "WAIT_NOTICE_SECONDS", 0.005)
    monkeypatch.setattr(scaler, "NODE_SECONDS", 0.002)


counts = st.integers(1, 40)


@given(counts, counts, counts, st.integers(0, 40), counts, st.none() | counts)
def test_moves_lead_to_the_target_and_then_end(generators, learners, serving, coming, ranks, reserved):
    target, pools = Sizes(generators, learners), Pools(serving, coming, ranks, reserved)
    do = moves(target, pools)
    assert serving - do.retire >= 1, "one worker always serves"
    assert not (do.start and (do.withdraw or do.retire))
    # newcomers are sent away before anyone who serves
    assert do.withdraw == coming or not do.retire
    serving, coming = serving - do.retire, coming + do.start - do.withdraw
    reserved = do.reserve if do.reserve is not None else None if do.release else reserved
    assert serving + coming == generators
    pools = Pools(serving, coming, ranks, reserved)
    assert moves(target, pools) == Moves()
    if learners != ranks:
        assert rebuild_due(target, pools, room=True)
        assert rebuild_due(target, pools, room=False) == (learners < ranks)
    else:
        assert not rebuild_due(target, pools, room=True)
        assert reserved is None


@pytest.mark.parametrize(
    ("generators", "learners", "text"),
    [
        (None, None, "give generators, learners, or both"),
        (0, None, "generators: 0 workers; each pool has at least 1"),
        (None, -2, "learners: -2 workers"),
        (True, None, "generators: True workers"),
        (1.5, None, r"generators: 1\.5 workers"),
        (10**9, None, "generators: 1,000,000,000 workers; a pool has at most 10,000"),
        (None, 10**9, "learners: 1,000,000,000 workers"),
        (None, 17, r"learners: 17 ranks cannot share the 16 rollouts.*ask for 16 or fewer"),
    ],
)
def test_a_size_that_cannot_be_is_refused(generators, learners, text):
    with pytest.raises(ScaleError, match=text):
        check_request(loop_config(), generators, learners)


def test_a_state_in_blocks_keeps_its_ranks():
    config = loop_config("learner.optimizer=adamw_8bit")
    check_request(config, 5, 1)
    with pytest.raises(ScaleError, match=r"learner\.optimizer: adamw_8bit"):
        check_request(config, None, 2)


def test_a_request_is_told_in_a_sentence():
    assert (
        describe(Sizes(3, 2), Pools(1, 0, 2)) == "generators go from 1 to 3; each change takes effect between two steps"
    )
    assert describe(Sizes(3, 2), Pools(3, 0, 2)) == "the run has 3 generators and 2 learner ranks already"


class Scaled(Loop):
    """A run to which something happens when the learner is given a step."""

    def __init__(self, tmp_path: Path, *overrides: str, steps: int = 12) -> None:
        super().__init__(loop_config(f"run.steps={steps}", *overrides), tmp_path)
        self.at: dict[int, Callable[[], Any]] = {}
        self.sizes: list[tuple[int, int]] = []
        train = self.learners.train

        async def train_after_what_happens(selections: Any, step: int) -> Any:
            self.sizes.append((len(self.pool.serving), self.learners.workers))
            if step in self.at:
                self.at[step]()
            await asyncio.sleep(0.01)
            async with asyncio.timeout(10):  # however busy the machine is
                while self.moving():
                    await asyncio.sleep(0.001)
            return await train(selections, step)

        self.learners.train = train_after_what_happens  # type: ignore[method-assign]

    def moving(self) -> bool:
        """Whether a start, a drain or a search for room goes on that ends without another step."""
        phases = [worker.phase for worker in self.pool.states().values()]
        placed = len(phases) - phases.count(WorkerPhase.WAITING)
        scaler = self.run.scaler
        drains = [task for task in scaler._generators._drains.values() if not task.done()]
        return (
            len(scaler._generators._starts) > phases.count(WorkerPhase.WAITING)
            or (WorkerPhase.WAITING in phases and placed < self.pool.room)
            or (scaler._learners.waits_for_room and scaler.target.learners <= self.learners.room)
            or (self.pool.drained.is_set() and bool(drains))
        )

    def ask(self, generators: int | None = None, learners: int | None = None) -> Callable[[], Any]:
        return lambda: self.run.scaler.request(generators, learners)

    def events(self, kind: str) -> list[str]:
        return [event["text"] for event in self.folder.read_events() if event["kind"] == kind]

    def each_prompt_once(self) -> None:
        rows = sorted(self.trained_rows())
        assert rows == list(range(len(rows)))
        assert not self.run.ledger.in_flight


@pytest.mark.parametrize("staleness", [0, 2])
def test_one_run_goes_through_all_sizes(tmp_path: Path, staleness: int):
    loop = Scaled(tmp_path, f"staleness={staleness}")
    loop.pool.drained.set()
    loop.at = {1: loop.ask(3), 4: loop.ask(2, 2), 8: loop.ask(learners=1)}
    loop.main()
    loop.each_prompt_once()
    assert loop.sizes == [(1, 1)] * 2 + [(3, 1)] * 3 + [(2, 2)] * 4 + [(2, 1)] * 3
    assert loop.learners.resized == [(5, 2), (9, 1)]
    assert loop.publisher.ranks == ["2/0"]
    assert loop.publisher.open
    assert len(loop.events("generator_joined")) == 2
    assert len(loop.events("generator_left")) == 1
    assert not list(loop.folder.checkpoints.glob("*.tmp"))
    records = {record["step"]: record for record in loop.folder.read_metrics()}
    assert [records[step]["generator/workers"] for step in (1, 4, 12)] == [1, 3, 2]
    assert [records[step]["learner/workers"] for step in (1, 7, 12)] == [1, 2, 1]
    assert records[2]["generator/target"] == 3


def test_newcomers_hold_the_weights_of_the_learner_before_they_serve(tmp_path: Path):
    loop = Scaled(tmp_path, steps=4)
    given_to: list[tuple[int, list[str]]] = []
    publish = loop.publisher.publish

    async def remember(version: int, workers: Any) -> Any:
        given_to.append((version, [name for name in workers if name not in loop.pool.handles]))
        return await publish(version, workers)

    loop.publisher.publish = remember  # type: ignore[method-assign]
    loop.at = {1: loop.ask(2)}
    loop.main()
    assert (2, ["loop/generator/1"]) in given_to


def test_a_run_without_room_goes_on_and_the_request_is_given_up(tmp_path: Path):
    loop = Scaled(tmp_path, "cluster.scale_timeout=0.05")
    loop.pool.room, loop.learners.room = 2, 1
    loop.at = {1: loop.ask(4, 3), 2: lambda: notes.append(loop.run.scaler.note)}
    notes: list[str | None] = []
    loop.main()
    loop.each_prompt_once()
    assert loop.sizes[-1] == (2, 1)
    assert notes[0] is not None
    assert "2 generators waiting for room" in notes[0]
    assert "learner group goes to 3 ranks when there is room" in notes[0]
    assert loop.events("scale_waiting") == [
        "no room yet for 2 generators and 2 learner ranks; the run goes on, the request waits up to 0.05 s "
        "(cluster.scale_timeout)"
    ]
    failed = loop.events("scale_failed")
    assert len(failed) == 2
    assert any("the run goes on with 2 generators" in text for text in failed)
    assert any("the run goes on with 1 learner rank" in text for text in failed)
    assert loop.run.scaler.target == Sizes(2, 1)
    assert loop.run.scaler.note is None


def test_a_request_that_waits_gets_the_room_when_it_comes(tmp_path: Path):
    loop = Scaled(tmp_path)
    loop.pool.room, loop.learners.room = 1, 1

    def grow() -> None:
        loop.pool.room, loop.learners.room = 3, 2

    loop.at = {1: loop.ask(3, 2), 6: grow}
    loop.main()
    loop.each_prompt_once()
    assert loop.sizes[6] == (1, 1)
    assert loop.sizes[-1] == (3, 2)


def test_ranks_that_a_lost_node_took_come_back_when_there_is_room(tmp_path: Path):
    loop = Scaled(tmp_path, "learner.workers=2")
    loop.learners.workers = 2

    def lose() -> None:
        loop.run.scaler.give_up_room()
        loop.learners.workers, loop.learners.room = 1, 1
        loop.run.scaler.look_for_ranks()

    loop.at = {1: lose, 3: lose, 6: lambda: setattr(loop.learners, "room", 2)}
    loop.main()
    loop.each_prompt_once()
    assert loop.sizes[:2] == [(1, 2)] * 2
    assert loop.sizes[2:7] == [(1, 1)] * 5
    assert loop.sizes[-1] == (1, 2)
    assert loop.events("scale_failed") == []


def test_a_new_request_replaces_one_that_waits(tmp_path: Path):
    loop = Scaled(tmp_path)
    loop.pool.room, loop.learners.room = 1, 1
    loop.at = {1: loop.ask(6, 4), 4: loop.ask(1, 1)}
    loop.main()
    assert loop.sizes[-1] == (1, 1)
    assert loop.pool.starting == {}
    assert loop.learners.resized == []
    assert loop.events("scale_failed") == []


def test_a_generator_that_does_not_start_is_told_and_the_others_serve(tmp_path: Path):
    loop = Scaled(tmp_path)
    loop.pool.faulty = 1
    loop.at = {1: loop.ask(3)}
    loop.main()
    loop.each_prompt_once()
    assert loop.sizes[-1] == (2, 1)
    assert loop.events("scale_failed") == [
        "loop/generator/1 could not start: no such model; the run goes on with 2 generators"
    ]


def test_a_newcomer_that_takes_no_weights_does_not_serve(tmp_path: Path):
    loop = Scaled(tmp_path)
    loop.publisher.fails = lambda version, worker: worker == "loop/generator/1"
    loop.at = {1: loop.ask(2)}
    loop.main()
    loop.each_prompt_once()
    assert loop.sizes[-1] == (1, 1)
    assert "did not take version 2: did not answer" in loop.events("scale_failed")[0]


def test_ranks_that_do_not_start_leave_the_group_as_it_was(tmp_path: Path):
    loop = Scaled(tmp_path)
    loop.learners.impossible = frozenset({2})
    loop.at = {1: loop.ask(learners=2)}
    loop.main()
    loop.each_prompt_once()
    assert loop.sizes[-1] == (1, 1)
    assert "2 learner ranks could not start; 1 go on" in loop.events("scale_failed")[0]


def test_the_change_is_under_way_until_the_new_ranks_can_train(tmp_path: Path):
    loop = Scaled(tmp_path)
    loop.at = {1: loop.ask(learners=2)}
    seen: list[tuple[int, str | None]] = []
    resize, use_ranks = loop.learners.resize, loop.publisher.use_ranks

    def look() -> None:
        seen.append((loop.run.scaler.training_ranks, loop.run.scaler.note))

    async def resize_and_look(workers: int, folder: Path) -> None:
        await resize(workers, folder)  # from here on the group says that it has the new size
        look()

    async def use_and_look(ranks: Any) -> None:
        look()
        await use_ranks(ranks)

    loop.learners.resize, loop.publisher.use_ranks = resize_and_look, use_and_look  # type: ignore[method-assign]
    loop.main()
    assert seen == [(1, "learner group is rebuilt with 2 ranks in place of 1")] * 2
    assert (loop.run.scaler.training_ranks, loop.run.scaler.note) == (2, None)


def test_a_group_that_is_lost_leaves_a_state_to_resume_from(tmp_path: Path):
    loop = Scaled(tmp_path)
    loop.learners.fatal = frozenset({2})
    loop.at = {2: loop.ask(learners=2)}
    with pytest.raises(LearnerError, match="neither size starts"):
        loop.main()
    saved = checkpoints.latest(loop.folder.checkpoints)
    assert saved is not None
    state = checkpoints.read_state(saved)
    assert state.step == 3
    assert (saved / "learner").is_dir()
    # the step's prompts were out: they come again
    assert sorted(loop.trained_rows() + state.stream["returned"]) == list(range(state.stream["next"]))


def test_what_a_leaving_generator_has_not_finished_goes_to_others(tmp_path: Path):
    loop = Scaled(tmp_path, "staleness=1", "cluster.drain_timeout=0.02")
    stuck = GroupId(0, 11)
    loop.pool.hold = lambda group: group == stuck
    loop.at = {0: loop.ask(2), 2: loop.ask(1)}

    def leave_with_it() -> None:
        loop.pool.unfinished["loop/generator/1"] = [stuck]

    loop.at[1] = leave_with_it
    loop.main()
    loop.each_prompt_once()
    assert loop.fates[Fate.LOST] == 1
    assert loop.sizes[-1] == (1, 1)
    assert loop.events("generator_left") == ["loop/generator/1 has left; others take 1 group that it had not finished"]
    assert loop.events("worker_replaced") == []


def test_a_worker_that_dies_while_it_leaves_is_not_replaced(tmp_path: Path):
    loop = Scaled(tmp_path)
    loop.pool.hold = lambda group: group == GroupId(0, 20)
    loop.at = {0: loop.ask(2), 3: loop.ask(1)}

    def die() -> None:
        loop.pool.failures = [Failure("loop/generator/1", "died", [GroupId(0, 20)], leaving=True)]

    loop.at[4] = die
    loop.main()
    loop.each_prompt_once()
    assert loop.sizes[-1] == (1, 1)
    assert loop.events("worker_replaced") == []


def test_a_bad_request_changes_nothing(tmp_path: Path):
    loop = Scaled(tmp_path, steps=3)

    def ask() -> None:
        with pytest.raises(ScaleError):
            loop.run.scaler.request(0, None)

    loop.at = {1: ask}
    loop.main()
    assert loop.run.scaler.target == Sizes(1, 1)
    assert loop.events("scaling") == []


def test_hints_say_what_is_wanted_while_it_waits(tmp_path: Path):
    hints: list[Sizes | None] = []

    async def hint(sizes: Sizes | None) -> None:
        hints.append(sizes)

    loop = Scaled(tmp_path)
    loop.run.scaler._hint = hint
    loop.at = {1: loop.ask(3)}
    loop.main()
    assert hints == [Sizes(3, 1), None]


def test_a_generator_whose_node_goes_is_drained_and_replaced(tmp_path: Path):
    loop = Scaled(tmp_path, "generator.workers=2", "staleness=1")
    loop.pool.handles["loop/generator/1"] = object()
    loop.pool.count = 2
    loop.pool.drained.set()
    loop.at = {3: lambda: loop.pool.going.update({"loop/generator/0": 20.0})}
    loop.main()
    loop.each_prompt_once()
    assert sorted(loop.pool.handles) == ["loop/generator/1", "loop/generator/2"]
    (text,) = loop.events("node_leaving")
    assert "the node of loop/generator/0 goes in 20 s: it gets no new groups" in text
    assert loop.sizes[-1] == (2, 1)


def test_the_last_generator_stays_on_a_node_that_goes_until_another_one_serves(tmp_path: Path):
    loop = Scaled(tmp_path, "staleness=1")
    loop.pool.drained.set()
    loop.at = {3: lambda: loop.pool.going.update({"loop/generator/0": None})}
    loop.main()
    loop.each_prompt_once()
    assert list(loop.pool.handles) == ["loop/generator/1"]
    (text,) = loop.events("node_leaving")
    assert "is told to go: it goes on until another one serves" in text
    assert all(generators >= 1 for generators, _ in loop.sizes)


def test_a_node_that_goes_where_there_is_room_for_no_other_costs_no_step(tmp_path: Path):
    loop = Scaled(tmp_path, "staleness=1", "cluster.scale_timeout=0.05")
    loop.pool.room = 1
    loop.at = {3: lambda: loop.pool.going.update({"loop/generator/0": 20.0})}
    loop.main()
    loop.each_prompt_once()
    assert list(loop.pool.handles) == ["loop/generator/0"]
    assert len(loop.sizes) == 12
