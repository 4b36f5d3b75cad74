"""A stopped process is told from one that works, on this node and by a look from another one."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import ray

from pods_cluster import stopped_process
from pods_cluster.stopped_process import is_stopped, stays_stopped

BUSY = "print('there', flush=True)\nwhile True: pass"


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield process
        process.kill()


def stopped(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while not is_stopped(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_that_works_is_not_stopped_and_one_that_goes_on_is_not_any_more(
    cluster: None, process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopped_process, "APART_SECONDS", 0.2)
    here = ray.get_runtime_context().get_node_id()
    look = stopped_process._look_there
    assert not asyncio.run(stays_stopped(process.pid, here))
    assert not ray.get(look(process.pid, here), timeout=60)
    stopped(process)
    assert asyncio.run(stays_stopped(process.pid, here))
    assert ray.get(look(process.pid, here), timeout=60), "as another node asks it"

    async def goes_on_meanwhile() -> bool:
        looking = asyncio.ensure_future(stays_stopped(process.pid, here))
        await asyncio.sleep(0.05)
        process.send_signal(signal.SIGCONT)
        return await looking

    assert not asyncio.run(goes_on_meanwhile())
    process.kill()
    process.wait()
    assert not asyncio.run(stays_stopped(process.pid, here))


def test_a_node_that_is_gone_tells_nothing(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopped_process, "TASK_SECONDS", 2.0)
    assert not asyncio.run(stays_stopped(1, "f" * 56))
