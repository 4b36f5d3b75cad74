"""Prompts that taught nothing of late are skipped by a chance that is their own, and none for ever."""

from __future__ import annotations

import asyncio
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pods_cluster.config import ConfigError
from pods_cluster.run import checkpoints
from pods_cluster.run.curriculum import share_of
from pods_cluster.run.prompt_history import MOST_SKIPPED, STEP, PromptHistory
from pods_cluster.run.prompt_supply import PromptSupply
from pods_cluster.selection.group_stats import GroupStats
from pods_cluster.types import GroupId, Prompt
from tests.law import law
from tests.run import made_up_loop
from tests.run.made_up_loop import Loop
from tests.run.parts import Stream, loop_config


def history(revisit: float | None, silent: dict[int, int], seed: int = 0) -> PromptHistory:
    """Rows with so many groups without signal in a row, the last in epoch 0."""
    found = PromptHistory(revisit, seed)
    found.restore([row, times, 0] for row, times in silent.items())
    return found


def test_groups_without_signal_in_a_row_are_counted_once_an_epoch() -> None:
    found = PromptHistory(0.5, 0)
    for epoch in (0, 0, 2):
        found.saw(epoch, 7, signal=False)
    assert found.state() == [[7, 2, 2, 0]]
    found.saw(3, 7, signal=True)
    found.saw(4, 7, signal=False)
    assert found.state() == [[7, 1, 4, 0]]


@pytest.mark.parametrize("times", [1, 2, 3])
def test_the_chance_to_be_tried_falls_with_each_group_without_signal(times: int) -> None:
    rows = 4000
    found = history(0.5, dict.fromkeys(range(rows), times))
    tried = sum(not found.skips(1, row) for row in range(rows)) / rows
    assert tried == pytest.approx(0.5**times, abs=5 * 0.5 / rows**0.5)


@law(40)
@given(st.integers(0, 10**6), st.integers(1, 50), st.floats(1e-6, 1.0), st.integers(0, 2**62))
def test_none_is_lost_for_ever(row: int, times: int, revisit: float, seed: int) -> None:
    found = history(revisit, {row: times}, seed)
    skipped = [found.skips(epoch, row) for epoch in range(1, MOST_SKIPPED + 2)]
    assert not skipped[-1]
    assert skipped == [found.skips(epoch, row) for epoch in range(1, MOST_SKIPPED + 2)]  # asked again, the same
    again = PromptHistory(revisit, seed)
    again.restore(found.state())
    assert skipped == [again.skips(epoch, row) for epoch in range(1, MOST_SKIPPED + 2)]


def test_a_signal_clears_a_row_and_without_the_setting_nothing_is_skipped() -> None:
    found = history(1e-9, {3: 5, 4: 5})
    assert found.skips(1, 3)
    assert not found.skips(0, 3)  # its own epoch: given back, it is served again
    found.saw(1, 3, signal=True)
    assert not found.skips(2, 3)
    assert found.state() == [[4, 5, 0, 0]]
    assert not any(history(None, {3: 5}).skips(epoch, 3) for epoch in range(9))
    assert not any(history(1.0, {3: 5}).skips(epoch, 3) for epoch in range(9))


def group(right: float) -> GroupStats:
    return GroupStats(8, parts_mean={"right": right})


def adapting(target: float, start: float = 0.5) -> PromptHistory:
    return PromptHistory(start, 3, target=target, rate=share_of("right", (0.0, 1.0)))


def a_step(found: PromptHistory, epoch: int, easy: int, hard: int, of: int) -> None:
    """A step's groups: so many without signal that were right and that were wrong, the others with one."""
    for row in range(of):
        kind = 1.0 if row < easy else 0.0
        found.saw(epoch, row, signal=row >= easy + hard, stats=group(kind if row < easy + hard else 0.5))
    found.adapt()


@law(40)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(24, 30)), max_size=40), st.floats(0.05, 0.9)
)
@example([(0, 9, 27)], 0.5)  # two thirds of the target, to the last bit
@example([(1, 2, 30)], 0.1)
def test_a_chance_falls_where_its_kind_has_its_part_of_the_target_and_else_rises(
    steps: list[tuple[int, int, int]], target: float
) -> None:
    found = adapting(target)
    for epoch, (easy, hard, of) in enumerate(steps):
        before = found.chances
        a_step(found, epoch, easy, hard, of)
        for old, new, count, thirds in zip(before, found.chances, (easy, hard), (1, 2), strict=True):
            enough = Fraction(3 * count, thirds * of) >= Fraction(str(target))
            assert new == pytest.approx(max(STEP, old - STEP) if enough else min(1.0, old + STEP))
    assert all(STEP <= chance <= 1 for chance in found.chances)


def test_the_share_without_signal_comes_to_the_target() -> None:
    # 30 % of the rows are always right, 40 % always wrong: served whole they are 70 % of the groups
    found, shares = adapting(0.25), []
    for epoch in range(80):
        served = [row for row in range(100) if not found.skips(epoch, row)]
        for row in served:
            right = 1.0 if row < 30 else 0.0 if row < 70 else 0.5
            found.saw(epoch, row, signal=row >= 70, stats=group(right))
        found.adapt()
        shares.append(sum(row < 70 for row in served) / len(served))
    assert shares[0] == 0.7
    # each row comes in one of five epochs at least: of the easy ones that alone is their part of the target, or more
    assert 0.25 <= sum(shares[-50:]) / 50 < 0.35
    assert found.chances[0] < 0.1
    few = adapting(0.25)  # 5 % without signal: all are tried
    for epoch in range(60):
        a_step(few, epoch, easy=1, hard=1, of=40)
    assert few.chances == [1.0, 1.0]
    assert not any(few.skips(60, row) for row in range(40))


def test_a_resumed_run_has_the_same_chances_and_kinds() -> None:
    found = adapting(0.3)
    for epoch in range(7):
        a_step(found, epoch, easy=1, hard=9, of=20)
    again = adapting(0.3)
    again.restore(found.state(), found.chances)
    assert (again.state(), again.chances) == (found.state(), found.chances)
    assert found.chances == pytest.approx([0.57, 0.43])
    older = adapting(0.3)
    older.restore([[4, 2, 6]])  # of a version without kinds
    assert (older.state(), older.chances) == ([[4, 2, 6, 0]], [0.5, 0.5])


class Rows:
    """A stream of epochs of eight rows in their order."""

    def __init__(self) -> None:
        self.at = self.taken = self.dropped = self.failed = 0
        self.epochs = 0.0

    def __len__(self) -> int:
        return 8

    def next(self, count: int) -> list[Prompt]:
        found = [Prompt((self.at + i) // 8, (self.at + i) % 8, "", (1,)) for i in range(count)]
        self.at += count
        self.taken += count
        return found


def test_the_supply_skips_counts_and_always_serves() -> None:
    supply = PromptSupply(Rows(), lambda *_, **__: None, history(1e-9, dict.fromkeys(range(4), 9)))  # type: ignore[arg-type]
    first = [prompt.row for prompt in supply.next(8)]
    assert first == list(range(8))
    served = Counter((prompt.epoch, prompt.row) for prompt in supply.next(4 * MOST_SKIPPED))
    assert {row for _, row in served} == {4, 5, 6, 7}
    assert supply.metrics()["data/prompts_skipped"] == 4 * MOST_SKIPPED
    assert {prompt.row for prompt in supply.next(8)} == set(range(8))  # in the epoch after that all come
    silent = PromptSupply(Rows(), lambda *_, **__: None, history(1e-9, dict.fromkeys(range(8), 9)))  # type: ignore[arg-type]
    silent.next(8)
    assert len(silent.next(1)) == 1  # of a whole epoch that would be skipped one is served


class Epochs(Stream):
    """Epochs of sixteen rows in their order; what was given back is not needed here."""

    def __len__(self) -> int:
        return 16

    def next(self, count: int) -> list[Prompt]:
        return [Prompt(*divmod(prompt.row, 16), "", (1, 2)) for prompt in super().next(count)]


def test_a_run_skips_what_had_no_signal_also_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_up_loop, "Stream", Epochs)

    def rewards(group: GroupId, index: int) -> float:
        return 1.0 if group.row % 2 else float(index)  # every second row teaches nothing

    config = loop_config("run.steps=40", "data.revisit=0.000001", "selector.no_signal=drop")
    loop = Loop(config, tmp_path, rewards)
    loop.main()
    records = loop.folder.read_metrics()
    skipped = sum(record["data/prompts_skipped"] for record in records if "data/prompts_skipped" in record)
    assert skipped > 10
    saved = checkpoints.latest(loop.folder.checkpoints)
    assert saved is not None
    silent = checkpoints.read_state(saved).silent
    assert silent == loop.run.assembler.supply.silent_rows
    assert silent
    assert all(row % 2 for row, *_ in silent)
    second = Loop(config, tmp_path / "second", rewards)
    asyncio.run(second.run.restore(saved))
    assert second.run.assembler.supply.silent_rows == silent


def test_the_setting_is_a_share() -> None:
    assert loop_config("data.revisit=0.3").data.revisit == 0.3
    with pytest.raises(ConfigError, match=r"data\.revisit: 0 is refused"):
        loop_config("data.revisit=0")
