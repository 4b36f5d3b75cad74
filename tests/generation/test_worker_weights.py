"""New weights in a worker: they arrive beside a step of its engine, and are loaded after it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pods_cluster.config import Config
from pods_cluster.generation.engine_thread import EngineThread
from pods_cluster.generation.worker_weights import WeightCalls
from pods_cluster.weights.fingerprint import fingerprint
from pods_cluster.weights.protocol import WeightLoadError
from tests.generation.conftest import build
from tests.generation.learner import Learner
from tests.generation.test_engine_thread import LONG, Gated, submit


class Worker(WeightCalls):
    """A worker's calls around an engine whose steps wait for a gate."""

    def __init__(self, engine: Gated, staged: bool | str) -> None:
        tree: dict[str, Any] = {
            "model": {"path": "none"},
            "data": {"path": "none"},
            "reward": [{"name": "exact_match"}],
        }
        self.config = Config.model_validate({**tree, "run": {"name": "test"}, "weights": {"staged": staged}})
        self._engine = EngineThread(lambda: engine, lambda _: None)
        self._check = lambda: None


@pytest.fixture
def engine() -> Iterator[Gated]:
    engine = Gated()
    yield engine
    engine.gate.set()


@pytest.mark.parametrize("staged", ["auto", True, False])
def test_a_version_arrives_while_a_step_runs_and_counts_after_it(engine: Gated, staged: bool | str) -> None:
    worker, model = Worker(engine, staged), build("qwen2", seed=1)
    learner = Learner(model)
    invitation, update = learner.invite(), learner.update(1)
    sending = threading.Thread(target=learner._send, args=(update,), daemon=True)
    sending.start()
    worker.connect(invitation)
    submit(worker._engine)
    assert engine.stepping.wait(LONG)  # and stays in this step
    receiving = threading.Thread(target=worker.receive, args=(update,), daemon=True)
    receiving.start()
    sending.join(LONG if staged else 0.3)
    assert sending.is_alive() == (not staged)  # all of it is there, or none is taken yet
    assert receiving.is_alive()
    assert engine.version == 0
    engine.gate.set()
    for thread in (sending, receiving):
        thread.join(LONG)
    learner.sender.close()
    assert engine.version == 1
    assert engine.fingerprints() == {name: fingerprint(parameter) for name, parameter in model.named_parameters()}
    assert worker.staged == bool(staged)
    assert (worker.staging_seconds > 0) == bool(staged)
    assert worker._engine.seconds().weights > 0
    worker._engine.stop()


def test_fingerprints_are_taken_while_a_step_runs(engine: Gated) -> None:
    engine.gate.set()
    worker, model = Worker(engine, "auto"), build("qwen2", seed=1)
    Learner(model).publish(1, worker.connect, worker.receive)
    engine.gate.clear()
    engine.stepping.clear()
    submit(worker._engine)
    assert engine.stepping.wait(LONG)  # and stays in this step
    assert worker.fingerprints() == {name: fingerprint(parameter) for name, parameter in model.named_parameters()}
    assert worker._engine.seconds().verifying == 0
    engine.gate.set()
    worker._engine.stop()


def test_a_worker_that_cannot_take_versions_beside_its_steps_takes_them_between(
    engine: Gated, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stage(*_: Any, **__: Any) -> bool:
        raise WeightLoadError("no stream to copy on")

    monkeypatch.setattr(engine, "stage", stage)
    engine.gate.set()
    worker, model = Worker(engine, "auto"), build("qwen2", seed=1)
    with pytest.raises(WeightLoadError, match="no stream"):
        Learner(model).publish(1, worker.connect, worker.receive)
    assert (engine.version, engine.closed) == (0, False)
    Learner(model).publish(2, worker.connect, worker.receive)
    assert engine.version == 2
    assert caplog.text.count("taking them beside its steps failed: no stream to copy on") == 1
    worker._engine.stop()
