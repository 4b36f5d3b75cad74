"""A stopped process is told from one that works, on this node and by a look from another one."""

from __future__ import annotations

import asyncio
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from unittest.mock import AsyncMock

import pytest
import ray

from pods_cluster import node_reach, stopped_process
from pods_cluster.stopped_process import Process, Silence, Unanswered, answer_of, is_stopped, stays_stopped

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
    seen = Process(process.pid, here)
    assert not asyncio.run(stays_stopped(seen))
    assert not ray.get(look(seen), timeout=60)
    stopped(process)
    assert asyncio.run(stays_stopped(seen))
    assert ray.get(look(seen), timeout=60), "as another node asks it"

    async def goes_on_meanwhile() -> bool:
        looking = asyncio.ensure_future(stays_stopped(seen))
        await asyncio.sleep(0.05)
        process.send_signal(signal.SIGCONT)
        return await looking

    assert not asyncio.run(goes_on_meanwhile())
    process.kill()
    process.wait()
    assert not asyncio.run(stays_stopped(seen))


def test_a_node_that_is_gone_tells_nothing(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopped_process, "TASK_SECONDS", 2.0)
    assert not asyncio.run(stays_stopped(Process(1, "f" * 56)))


def test_ray_places_nothing_on_a_node_that_is_left_out(cluster: None) -> None:
    here = ray.get_runtime_context().get_node_id()
    assert asyncio.run(node_reach.reaches(here))
    assert not asyncio.run(node_reach.unreached_nodes())
    task = ray.remote(lambda: "there")
    elsewhere = task.options(num_cpus=0, label_selector=node_reach.elsewhere([here], {})).remote()
    others = task.options(num_cpus=0, label_selector=node_reach.elsewhere(["f" * 56, "e" * 56], {})).remote()
    assert ray.get(others, timeout=60) == "there"
    assert not ray.wait([elsewhere], timeout=0.5)[0]
    ray.cancel(elsewhere, force=True)


@pytest.mark.parametrize("reached", [(), (1, 3, 5, 7, 9)], ids=["never", "each second look"])
def test_a_node_counts_as_lost_when_no_look_reached_it(
    monkeypatch: pytest.MonkeyPatch, reached: tuple[int, ...]
) -> None:
    """A network that drops packets costs a look now and then, and the process nothing."""
    looks = itertools.count()
    monkeypatch.setattr(stopped_process, "reaches", AsyncMock(side_effect=lambda _: next(looks) in reached))
    monkeypatch.setattr(stopped_process, "stays_stopped", AsyncMock(return_value=False))
    for name, seconds in (("SILENT_SECONDS", 0.1), ("LISTEN_SECONDS", 0.05), ("UNREACHED_SECONDS", 0.2)):
        monkeypatch.setattr(stopped_process, name, seconds)
    asked = answer_of(asyncio.sleep(0.5, "there"), Process(1, "node"), 30.0)
    if reached:
        assert asyncio.run(asked) == "there"
    else:
        with pytest.raises(Unanswered, match="its node cannot be reached") as error:
            asyncio.run(asked)
        assert error.value.cut_off
        assert error.value.seen


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(stopped_process.time, "monotonic", lambda: self.now)


def test_a_silence_ends_with_an_answer_and_is_no_longer_than_was_listened(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, silence = Clock(monkeypatch), Silence()
    for _ in range(4):
        clock.now += 2.0
        silence.goes_on()
    assert silence.seconds == 8.0
    clock.now += 3600.0  # this process was stopped itself: the answer may lie in its queue
    silence.goes_on()
    assert silence.seconds == 8.0 + stopped_process.LAPSE_SECONDS
    silence.check_here(None, 30.0)
    silence.end()
    assert silence.seconds == 0.0
    for _ in range(31):
        clock.now += 1.0
        silence.goes_on()
    with pytest.raises(Unanswered, match=r"^did not answer for 31 s: its process hangs$"):
        silence.check_here(None, 30.0)


def test_an_answer_is_waited_for_as_long_as_its_process_works(
    cluster: None, process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("APART_SECONDS", 0.1), ("SILENT_SECONDS", 0.3), ("LISTEN_SECONDS", 0.1)):
        monkeypatch.setattr(stopped_process, name, seconds)
    seen = Process(process.pid, ray.get_runtime_context().get_node_id())

    async def ask(patience: float, answers_after: float, lasts: float = 0.0) -> str:
        return await answer_of(asyncio.sleep(answers_after, "there"), seen, patience, lasts=lasts)

    assert asyncio.run(ask(30.0, 0.0)) == "there"
    assert asyncio.run(ask(30.0, 0.8)) == "there"
    with pytest.raises(Unanswered, match=r"its process hangs") as error:
        asyncio.run(ask(0.5, 60.0))
    assert not error.value.stopped
    stopped(process)
    with pytest.raises(Unanswered, match=r"its process is stopped") as error:
        asyncio.run(ask(3600.0, 60.0))
    assert error.value.stopped
    assert asyncio.run(ask(3600.0, 0.8, lasts=2.0)) == "there", "it is not looked at while it may take its time"
