"""The engine's thread: callers are never left waiting for an engine that hangs or has failed."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from pods_cluster.generation.engine import Engine, EngineError
from pods_cluster.generation.engine_thread import IDLE_SECONDS, EngineHangs, EngineThread
from pods_cluster.generation.engines.paced.engine import PacedEngine
from pods_cluster.generation.messages import GeneratorError
from pods_cluster.types import GroupId, Rollout, RolloutRequest, SamplingParams

SETTING = "generator.request_timeout"
LONG = 60.0


class Gated(PacedEngine):
    """Its steps wait for a gate."""

    def __init__(self) -> None:
        super().__init__(tokens=range(3, 9), end_id=2, tokens_per_second=1e6, longest=4)
        self.adopt_version(0)
        self.gate = threading.Event()
        self.stepping = threading.Event()
        self.fails = False

    def step(self) -> list[Rollout]:
        self.stepping.set()
        assert self.gate.wait(LONG)
        if self.fails:
            raise ValueError("out of luck")
        return super().step()


@pytest.fixture
def engine() -> Gated:
    return Gated()


@pytest.fixture
def thread(engine: Gated) -> Iterator[EngineThread]:
    thread = EngineThread(lambda: engine, lambda _: None)
    yield thread
    engine.gate.set()
    thread.stop()


def submit(thread: EngineThread) -> None:
    request = RolloutRequest(GroupId(0, 0), 0, (3, 4), SamplingParams(max_tokens=4))
    thread.call("submit", lambda engine: engine.submit([request]), LONG, SETTING)


def test_a_step_that_hangs_is_named_and_the_command_never_runs(thread: EngineThread, engine: Gated) -> None:
    ran: list[str] = []
    submit(thread)
    assert engine.stepping.wait(LONG)
    with pytest.raises(
        EngineHangs, match=r"`score` within 0\.1 s: it is still in a step.*raise generator\.request_time"
    ):
        thread.call("score", lambda _: ran.append("late"), 0.1, SETTING)
    engine.gate.set()
    thread.call("stats", lambda _: ran.append("after"), LONG, SETTING)
    assert ran == ["after"]


def test_a_command_that_hangs_is_named_to_those_behind_it(thread: EngineThread, engine: Gated) -> None:
    begun = threading.Event()

    def wait(engine: Engine) -> bool:
        begun.set()
        return isinstance(engine, Gated) and engine.gate.wait(LONG)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(thread.call, "receive", wait, LONG, "weights.transfer_timeout")
        assert begun.wait(LONG)
        with pytest.raises(EngineHangs, match=r"`fingerprints` within 0\.1 s: it is still in `receive`"):
            thread.call("fingerprints", lambda engine: engine.fingerprints(), 0.1, SETTING)
        with pytest.raises(EngineHangs, match=r"`receive`.*raise weights\.transfer_timeout"):
            thread.call("receive", wait, 0.1, "weights.transfer_timeout")
        engine.gate.set()
        assert first.result(LONG) is True


def test_the_thread_s_seconds_are_all_told(thread: EngineThread, engine: Gated) -> None:
    began = time.perf_counter()
    thread.call("receive", lambda _: time.sleep(0.05), LONG, SETTING)
    submit(thread)
    assert engine.stepping.wait(LONG)
    time.sleep(0.05)  # its first step hangs so long
    engine.gate.set()
    thread.call("score", lambda _: time.sleep(0.05), LONG, SETTING)
    while engine.in_flight or not thread.stats().finished:
        thread.call("score", lambda _: None, LONG, SETTING)
    thread.stop()
    lasted, seconds = time.perf_counter() - began, thread.seconds()
    assert min(seconds.weights, seconds.steps, seconds.between) >= 0.05
    assert seconds.count >= 1
    told = seconds.weights + seconds.verifying + seconds.steps + seconds.between + seconds.empty
    assert lasted - 0.05 <= told <= lasted + IDLE_SECONDS + 0.5


def test_what_a_command_raises_is_its_callers_alone(thread: EngineThread) -> None:
    def fail(_: Engine) -> None:
        raise TimeoutError("a peer was silent")

    with pytest.raises(TimeoutError, match="a peer was silent"):
        thread.call("connect", fail, LONG, SETTING)
    assert thread.call("fingerprints", lambda engine: engine.fingerprints(), LONG, SETTING) == {}


def test_an_engine_that_fails_reaches_everyone_who_waits(thread: EngineThread, engine: Gated) -> None:
    submit(thread)
    assert engine.stepping.wait(LONG)
    engine.fails = True
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(thread.call, "score", lambda _: None, LONG, SETTING)
        while not thread._commands.qsize():
            assert not waiting.done()
        engine.gate.set()
        with pytest.raises(GeneratorError, match="ValueError: out of luck"):
            waiting.result(LONG)
    with pytest.raises(GeneratorError, match="ValueError: out of luck"):
        thread.call("score", lambda _: None, LONG, SETTING)
    assert engine.closed


def test_a_start_that_hangs_is_told_with_the_setting() -> None:
    gate = threading.Event()

    def make() -> Engine:
        assert gate.wait(LONG)
        return Gated()

    thread = EngineThread(make, lambda _: None)
    try:
        with pytest.raises(GeneratorError, match=r"not started within 0\.1 s; raise generator\.start_timeout"):
            thread.ready(0.1)
        with pytest.raises(EngineHangs, match="still in its start"):
            thread.call("connect", lambda _: None, 0.1, SETTING)
    finally:
        gate.set()
        thread.stop()


@pytest.mark.parametrize(
    ("error", "told", "place"),
    [(EngineError("model.path: 'm' has no config.json; give another"), "EngineError: model.path: 'm' has no", False),
     (KeyError("sinks"), "KeyError: 'sinks'", True)],
)  # fmt: skip
def test_an_error_that_is_meant_for_people_has_no_traceback(error: Exception, told: str, place: bool) -> None:
    """It names what to correct; where it was raised helps with others alone."""

    def fail() -> Engine:
        raise error

    thread = EngineThread(fail, lambda _: None)
    with pytest.raises(Exception, match=re.escape(told)):
        thread.ready(LONG)
    described = thread.describe_error() or ""
    assert f"the engine failed: {told}" in described
    assert ("File " in described) == place
