"""Light copies: each is the state of its own moment, in memory that is made ready beforehand and used again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pods_cluster.learning import rank_checkpoint, state_copy
from pods_cluster.learning.state_copy import StateCopier
from pods_cluster.learning.trainer import Trainer
from tests.learning.resharding import config_of, steps
from tests.learning.test_resharding import whole


@pytest.fixture
def trained(one_rank: Any, model_folder: Path) -> tuple[Trainer, Any]:
    config = config_of("zero1", model_folder, 1, 0)
    trainer = Trainer(config, 0, 1)
    steps(trainer, config, 0)
    return trainer, config


def written(copier: StateCopier) -> None:
    copier._join()
    assert copier.report().written, copier.report().fault


def free(monkeypatch: pytest.MonkeyPatch, nbytes: float) -> None:
    monkeypatch.setattr(state_copy, "free_memory", lambda: int(nbytes))


def places(copier: StateCopier) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in copier._memory.items()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_memory_is_made_ready_once_and_holds_each_copy_in_turn(trained: tuple[Trainer, Any], tmp_path: Path) -> None:
    trainer, config = trained
    copier = StateCopier()
    copier.prepare(trainer, 1)
    copier._join()
    ready = places(copier)
    assert sum(tensor.numel() for tensor in copier._memory.values()) == 3 * trainer.trainable
    copier.prepare(trainer, 1)
    for number in range(2):
        assert not copier.begin(trainer, tmp_path / f"copy-{number}", 1).fault
        rank_checkpoint.save(trainer, tmp_path / f"saved-{number}", 1)
        steps(trainer, config, 1)  # while it is written
        written(copier)
        assert places(copier) == ready
        assert_equal(whole(tmp_path / f"copy-{number}"), whole(tmp_path / f"saved-{number}"))
    with pytest.raises(AssertionError):  # the state went on
        assert_equal(whole(tmp_path / "copy-0"), whole(tmp_path / "copy-1"))


def test_without_plenty_of_memory_each_copy_gives_its_own_back(
    trained: tuple[Trainer, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = trained
    copier = StateCopier()
    free(monkeypatch, 3 * trainer.engine.optimizer_bytes())
    copier.prepare(trainer, 1)
    assert not places(copier)
    for number in range(2):
        assert not copier.begin(trainer, tmp_path / str(number), 1).fault
        written(copier)
        assert not places(copier)


@pytest.mark.parametrize(
    ("ranks", "times", "told"),
    [(1, 1.9, ""), (4, 4.9, " in each of up to 4 ranks"), (64, 8.9, " in each of up to 8 ranks")],
)
def test_a_copy_that_all_ranks_of_a_node_have_no_room_for_is_not_made(
    trained: tuple[Trainer, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, times: float, told: str
) -> None:
    trainer, _ = trained
    free(monkeypatch, times * trainer.engine.optimizer_bytes())
    copier = StateCopier()
    report = copier.begin(trainer, tmp_path / "copy", ranks)
    assert report.fault == f"0.0 GiB of state{told}, 0.0 GiB of memory free"
    assert not (tmp_path / "copy").exists()
    free(monkeypatch, (times + 0.2) * trainer.engine.optimizer_bytes())
    assert not copier.begin(trainer, tmp_path / "copy", ranks).fault
    written(copier)


def test_memory_that_cannot_be_had_beforehand_is_asked_for_by_each_copy(
    trained: tuple[Trainer, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = trained
    copier = StateCopier()
    with monkeypatch.context() as patch:

        def none(*_: Any, **__: Any) -> torch.Tensor:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        patch.setattr(state_copy.torch, "empty", none)
        copier.prepare(trainer, 1)
        copier._join()
    assert not places(copier)
    assert not copier.begin(trainer, tmp_path / "copy", 1).fault
    written(copier)
    assert not places(copier)
