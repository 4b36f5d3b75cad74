"""A checkpoint on disk is whole or absent."""

import itertools
import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from pods_cluster.run import checkpoints
from pods_cluster.run.checkpoints import RunState


def write(folder: Path, step: int, keep: int = 3) -> Path:
    temporary = checkpoints.begin(folder, step)
    (temporary / "model").mkdir()
    state = RunState(step=step, version=step, stream={}, ledger={}, attempts=[])
    return checkpoints.finish(temporary, state, keep)


def test_newest_are_kept_in_numeric_order(tmp_path: Path):
    for step in (5, 10, 999_999, 1_000_000):
        write(tmp_path, step, keep=2)
    assert [path.name for path in checkpoints.completed(tmp_path)] == ["step-999999", "step-1000000"]
    newest = checkpoints.latest(tmp_path)
    assert newest is not None
    assert checkpoints.read_state(newest).step == 1_000_000


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


def test_the_state_is_read_as_it_was_written(tmp_path: Path):
    path = tmp_path / "step-000002"
    path.mkdir()
    state = {
        "step": 2,
        "version": 2,
        "seconds": 12.5,
        "trained_tokens": 900,
        "seed": 3,
        "stream": {"position": 16, "returned": [[0, 4, 0]]},
        "ledger": {"issued": 9, "fates": {"trained": 8}},
        "attempts": [[0, 4, 1]],
        "given_up": [7],
        "silent": [[3, 2, 0, 1]],
        "revisit": [0.49, 0.51],
        "pass_rates": [[3, 0.1, 0]],
        "rollouts_per_prompt": 8,
    }
    (path / "state.json").write_text(json.dumps({"format": 1, **state}))
    read = checkpoints.read_state(path)
    assert asdict(read) == state
    again = checkpoints.finish(checkpoints.begin(tmp_path, 3), read, keep=3)
    assert json.loads((again / "state.json").read_text()) == {"format": 1, **state, "files": {}}


def test_a_state_from_before_a_value_was_there_is_read(tmp_path: Path):
    path = write(tmp_path, 1)
    (path / "state.json").write_text(
        '{"format": 1, "step": 1, "version": 1, "seed": 0, "stream": {}, "ledger": {}, "attempts": []}'
    )
    assert checkpoints.read_state(path).seconds == 0.0
    assert checkpoints.read_state(path).trained_tokens == 0
    assert checkpoints.read_state(path).rollouts_per_prompt is None
    (path / "state.json").write_text('{"format": 1, "step": 1}')
    with pytest.raises(checkpoints.CheckpointError, match=r"a value is missing.*'version'"):
        checkpoints.read_state(path)


def test_another_format_is_refused(tmp_path: Path):
    path = write(tmp_path, 1)
    (path / "state.json").write_text('{"format": 99}')
    with pytest.raises(checkpoints.CheckpointError, match="format 99"):
        checkpoints.read_state(path)


def with_files(folder: Path, step: int) -> Path:
    temporary = checkpoints.begin(folder, step)
    (temporary / "learner" / "rank").mkdir(parents=True)
    (temporary / "learner" / "rank" / "state.bin").write_bytes(bytes(range(256)) * 100)
    (temporary / "model.safetensors").write_bytes(b"weights" * 1000)
    return checkpoints.finish(temporary, RunState(step=step, version=step, stream={}, ledger={}, attempts=[]), 3)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (flip, "has other bytes than were written"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "25,599 bytes, 25,600 were written"),
        (lambda file: file.unlink(), "is missing"),
    ],
    ids=["changed", "torn", "missing"],
)
def test_a_harmed_checkpoint_is_refused_by_name_and_the_one_before_is_used(tmp_path: Path, harm, said: str):
    before, newest = with_files(tmp_path, 1), with_files(tmp_path, 2)
    assert checkpoints.newest_sound(tmp_path) == (newest, [])
    file = newest / "learner" / "rank" / "state.bin"
    harm(file)
    found, refused = checkpoints.newest_sound(tmp_path)
    assert found == before
    assert len(refused) == 1
    assert str(file) in refused[0]
    assert said in refused[0]
    # put aside, so that it neither counts as the newest nor takes a sound one's place
    assert checkpoints.completed(tmp_path) == [before]
    assert (tmp_path / "step-000002.broken" / "model.safetensors").is_file()


def test_where_none_is_sound_all_are_named_and_left(tmp_path: Path):
    first, second = with_files(tmp_path, 1), with_files(tmp_path, 2)
    flip(first / "model.safetensors")
    (second / checkpoints.STATE_FILE).write_text("{")
    with pytest.raises(checkpoints.CheckpointError, match=r"no checkpoint is whole .*step-000002.*step-000001"):
        checkpoints.newest_sound(tmp_path)
    assert checkpoints.completed(tmp_path) == [first, second]


def test_no_checkpoint_at_all_is_no_fault(tmp_path: Path):
    assert checkpoints.newest_sound(tmp_path) == (None, [])


def test_a_checkpoint_from_before_checksums_is_taken(tmp_path: Path):
    path = with_files(tmp_path, 1)
    state = json.loads((path / checkpoints.STATE_FILE).read_text())
    del state["files"]
    (path / checkpoints.STATE_FILE).write_text(json.dumps(state))
    assert checkpoints.newest_sound(tmp_path) == (path, [])


class Killed(BaseException):
    """In place of SIGKILL: nothing of the checkpoint's code runs after it."""


class Kill:
    """Ends the work with the file system at its n-th operation (Python's audit events), and at all later ones."""

    OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")

    def __init__(self) -> None:
        self.left: int | None = None
        sys.addaudithook(self._hook)  # stays as long as the process

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.left is None or event not in self.OPERATIONS:
            return
        self.left -= 1
        if self.left < 0:
            raise Killed

    def at(self, operation: int, work: Callable[[], object]) -> bool:
        """Whether `work` was ended."""
        self.left = operation
        try:
            work()
        except Killed:
            return True
        finally:
            self.left = None
        return False


KILL = Kill()


@pytest.mark.parametrize("again", [False, True], ids=["another-step", "the-same-step"])
@pytest.mark.parametrize("keep", [1, 2])
def test_a_kill_at_any_moment_of_a_checkpoint_leaves_one_that_is_sound(tmp_path: Path, keep: int, again: bool) -> None:
    def save(folder: Path, step: int) -> None:
        temporary = checkpoints.begin(folder, step)
        (temporary / "learner").mkdir()
        (temporary / "learner" / "weights").write_bytes(b"x" * 1000)
        checkpoints.finish(temporary, RunState(step=step, version=step, stream={}, ledger={}, attempts=[]), keep)

    moments = itertools.count()
    for moment in moments:
        folder = tmp_path / str(moment)
        save(folder, 1)
        if not KILL.at(moment, lambda folder=folder: save(folder, 1 if again else 2)):
            break
        newest, refused = checkpoints.newest_sound(folder)
        assert newest is not None, f"none is left after a kill at operation {moment}"
        assert not refused
        assert checkpoints.read_state(newest).step in (1, 2)
        assert not [path.name for path in folder.iterdir() if path.suffix], "half a checkpoint is left"
        save(folder, 3)
        assert checkpoints.newest_sound(folder)[0] == folder / checkpoints.name_of(3)
    assert moment > 8


def test_the_newest_of_checkpoints_and_light_copies_is_taken(tmp_path: Path) -> None:
    saved, copies = tmp_path / "checkpoints", tmp_path / "copies"
    for step in (2, 6):
        write(saved, step)
    write(copies, 4)
    assert checkpoints.newest_sound(saved, copies)[0] == saved / "step-000006"
    write(copies, 6, keep=1)
    assert checkpoints.newest_sound(saved, copies)[0] == saved / "step-000006", "that has the model too"
    copy = write(copies, 8, keep=1)
    assert checkpoints.newest_sound(saved, copies)[0] == copy
    (copy / "state.json").write_text("{")
    newest, refused = checkpoints.newest_sound(saved, copies)
    assert newest == saved / "step-000006"
    assert len(refused) == 1


def test_the_newest_is_looked_for_once_a_checkpoint_under_way_has_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1, keep=1)
    reached, go = threading.Event(), threading.Event()

    def slow(folder: Path) -> dict[str, tuple[int, int]]:
        reached.set()
        assert go.wait(10)
        return {}

    monkeypatch.setattr(checkpoints, "_checksums", slow)
    with ThreadPoolExecutor(2) as threads:
        writing = threads.submit(write, tmp_path, 2, keep=1)
        assert reached.wait(10)
        looking = threads.submit(checkpoints.newest_sound, tmp_path)
        with pytest.raises(TimeoutError):
            looking.result(0.1)
        go.set()
        assert looking.result(10) == (writing.result(10), [])
