"""A checkpoint on disk is whole or absent."""

from pathlib import Path

import pytest

from pods_cluster.run import checkpoints


def write(folder: Path, step: int, keep: int = 3) -> Path:
    temporary = checkpoints.begin(folder, step)
    (temporary / "model").mkdir()
    return checkpoints.finish(temporary, {"step": step}, keep)


def test_newest_are_kept_in_numeric_order(tmp_path: Path):
    for step in (5, 10, 999_999, 1_000_000):
        write(tmp_path, step, keep=2)
    assert [path.name for path in checkpoints.completed(tmp_path)] == ["step-999999", "step-1000000"]
    newest = checkpoints.latest(tmp_path)
    assert newest is not None
    assert checkpoints.read_state(newest)["step"] == 1_000_000


def test_a_half_written_checkpoint_is_not_seen(tmp_path: Path):
    write(tmp_path, 1)
    checkpoints.begin(tmp_path, 2)
    (tmp_path / "step-000003").mkdir()
    newest = checkpoints.latest(tmp_path)
    assert newest is not None
    assert newest.name == "step-000001"
    with pytest.raises(checkpoints.CheckpointError, match="not a whole checkpoint"):
        checkpoints.read_state(tmp_path / "step-000003")


def test_writing_a_step_again_replaces_it(tmp_path: Path):
    write(tmp_path, 7)
    (tmp_path / "step-000007" / "old").touch()
    write(tmp_path, 7)
    assert not (tmp_path / "step-000007" / "old").exists()


def test_another_format_is_refused(tmp_path: Path):
    path = write(tmp_path, 1)
    (path / "state.json").write_text('{"format": 99}')
    with pytest.raises(checkpoints.CheckpointError, match="format 99"):
        checkpoints.read_state(path)
