import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.learning.support import save_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def one_rank():
    """A process group of one rank in this process, with DeepSpeed attached to it."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from pods_cluster.learning import process_group

    store = process_group.open_store("127.0.0.1", 1, 60)
    process_group.join(0, 1, "127.0.0.1", store.port, store=store, timeout=60, collective_timeout=60)
    yield
    process_group.leave()


@dataclass(frozen=True)
class Pair:
    """What two ranks found, each of them, after one rank (`before`) had left its states in `folder`."""

    folder: Path
    before: dict[str, Any]
    found: Sequence[Any]


@pytest.fixture(scope="session")
def two(one_rank, model_folder, tmp_path_factory):
    from tests.learning import resharding
    from tests.learning.pair import run_pair

    folder = tmp_path_factory.mktemp("pair")
    before = {case: resharding.first_half(case, model_folder, folder / "grown", 0, 1) for case in resharding.CASES}
    return Pair(folder, before, run_pair(model_folder, folder))
