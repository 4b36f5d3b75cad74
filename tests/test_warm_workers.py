"""What Ray's workers of the tests get from the server that they are forked from, and what not."""

from __future__ import annotations

import os
import sys
from typing import Any

import psutil
import pytest
import ray

from tests import warm_workers


class Told:
    def modules(self) -> set[str]:
        return set(sys.modules)

    def process(self) -> tuple[int, str, str, tuple[int, int], list[str]]:
        process = psutil.Process()
        files = [file.path for file in process.open_files()]
        return process.pid, os.environ.get("MINE", ""), os.getcwd(), process.rlimit(psutil.RLIMIT_NOFILE), files


def actor(**variables: str) -> Any:
    return ray.remote(Told).options(runtime_env={"env_vars": variables}).remote()  # type: ignore[attr-defined]


@pytest.fixture
def warm(cluster: None) -> None:
    if not os.environ.get(warm_workers.VARIABLE):
        pytest.skip("all workers start cold")


def test_a_worker_has_the_imports_and_all_else_of_its_own(warm: None) -> None:
    first, second = actor(MINE="1"), actor(MINE="2")
    assert set(warm_workers.IMPORTS) <= ray.get(first.modules.remote())
    one, other = ray.get([first.process.remote(), second.process.remote()])
    assert (one[1], other[1]) == ("1", "2")
    assert one[0] != other[0]
    assert one[2:4] == other[2:4]
    assert not [path for path in one[4] if str(other[0]) in path], "no file of another worker is open"
    ray.kill(first)
    ray.kill(second)
    psutil.wait_procs([psutil.Process(pid) for pid in (one[0], other[0]) if psutil.pid_exists(pid)], timeout=10)
    assert not psutil.pid_exists(one[0])
    assert not psutil.pid_exists(other[0])


def test_one_whose_libraries_are_to_be_set_otherwise_starts_cold(warm: None) -> None:
    cold = actor(OMP_NUM_THREADS="3")
    assert "torch" not in ray.get(cold.modules.remote())
    ray.kill(cold)


def test_what_the_imports_read_is_compared() -> None:
    environment = {"HF_HOME": "/x", "OMP_NUM_THREADS": "1", "RAY_JOB_ID": "3", "TORCHINDUCTOR_CACHE_DIR": "/y"}
    assert warm_workers.settings(environment) == {"HF_HOME": "/x", "OMP_NUM_THREADS": "1"}


def test_what_libraries_set_in_this_process_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = warm_workers.settings(dict(os.environ))
    for name in ("LD_LIBRARY_PATH", "LD_PRELOAD", "OMP_WAIT_POLICY", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "set by a library")
    warm_workers.restore_settings()
    assert warm_workers.settings(dict(os.environ)) == before
