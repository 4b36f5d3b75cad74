"""What holds for all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.tiny_run import Made

# Ray would start an idle process for each CPU slot of a cluster, but an actor with environment variables of its own, as
# workers and ranks have them, gets another one.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
# One thread a process: the processes of a test share few cores, and OpenMP threads that spin on them slow all of them.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module", autouse=True)
def no_handles_left_behind() -> Iterator[None]:
    """Ray gives the actors of a process's next cluster the ids of the last one: a handle from there that is collected
    late would end its namesake. This is set up first and so runs last, when the module's cluster is gone.
    """
    yield
    gc.collect()
    gc.freeze()  # what is left is imports for the most part; the next module's collection need not walk them again


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    from tests.tiny_run import made_in  # imports torch, which few tests need

    return made_in(tmp_path_factory.mktemp("made"))
