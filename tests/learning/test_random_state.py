"""The random streams of a rank on disk: read back as they were, and never as code."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pods_cluster.learning.rank_checkpoint import (
    LearnerCheckpointError,
    _random_state,
    _read_random_state,
    _restore_random_state,
)


def numbers() -> list[Any]:
    return [torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random(), np.random.normal(), random.gauss(0, 1)]


@pytest.fixture(autouse=True)
def streams_go_on() -> Any:
    before = _random_state()
    yield
    _restore_random_state(before)


def test_streams_go_on_where_they_were_saved(tmp_path: Path) -> None:
    numbers()
    torch.save(_random_state(), tmp_path / "random.pt")
    expected = numbers()
    numbers()
    _restore_random_state(_read_random_state(tmp_path / "random.pt"))
    assert numbers() == expected


def test_a_file_of_the_first_versions_is_read(tmp_path: Path) -> None:
    state = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    torch.save(state, tmp_path / "random.pt")
    expected = numbers()
    numbers()
    _restore_random_state(_read_random_state(tmp_path / "random.pt"))
    assert numbers() == expected


class Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_file_that_would_run_something_is_refused(tmp_path: Path) -> None:
    torch.save({"torch": Runs(tmp_path / "ran")}, tmp_path / "random.pt")
    with pytest.raises(LearnerCheckpointError, match=r"random\.pt: holds more than random states .*another checkpoint"):
        _read_random_state(tmp_path / "random.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    with pytest.raises(LearnerCheckpointError, match=r"plain\.pt"):
        _read_random_state(tmp_path / "plain.pt")
    assert not (tmp_path / "ran").exists()
