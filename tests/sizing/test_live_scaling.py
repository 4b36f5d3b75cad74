"""A real run on the CPU changes the sizes of its pools: 1 + 1, 3 + 1, 2 + 2. Paced engines, DeepSpeed ranks on gloo."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import ray

from pods_cluster.actor_names import NAMESPACE
from pods_cluster.client.demo import CONFIG
from pods_cluster.config import load_config
from pods_cluster.run.live_file import LIVE_FILE
from pods_cluster.run.run_actors import start_controller
from pods_cluster.run.status import LiveStatus, WorkerState
from pods_cluster.sizing.moves import ScaleError
from pods_cluster.telemetry.run_folder import RunFolder
from tests.tiny_run import Made

NAME = "scaled"
GROUPS = 4


def wait_for(what: str, check: Any, seconds: float = 150.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.2)
    return found


def test_a_run_changes_its_pools_while_it_goes_on(cluster: None, made: Made, tmp_path: Path):
    settings = [
        "generator.engine=paced",
        "generator.engine_options={tokens_per_second: 600, shortest: 4, longest: 12}",
        "generator.rollouts_per_prompt=8",
        "selector.no_signal=keep",
        f"learner.prompts_per_step={GROUPS}",
        f"run.name={NAME}",
        "run.steps=100000",
        "run.eval.every=0",
        "run.checkpoint.every=0",
        "run.samples_every=1",
        f"run.samples_groups={GROUPS}",
        "run.export=false",
        "weights.verify=true",
        "staleness=1",
    ]
    controller = start_controller(load_config(CONFIG, [*made.overrides(tmp_path), *settings]), resume=False)
    done = controller.run.remote()
    folder = RunFolder(tmp_path / NAME)

    def status() -> LiveStatus:
        if ray.wait([done], timeout=0)[0]:
            ray.get(done)
        return ray.get(controller.status.remote(), timeout=60)

    def becomes(generators: int, learners: int) -> int:
        """The step at which the pools have these sizes and nothing is under way."""
        told = wait_for(
            f"{generators} + {learners}",
            lambda: (s := status()).note is None and (s.generators, s.learners) == (generators, learners) and s,
        )
        first = told.step
        wait_for("two more steps", lambda: status().step >= first + 2)
        return first

    with pytest.raises(ScaleError, match="still starting"):
        raise _cause(controller.scale.remote(2, None))
    wait_for("the first step", lambda: (status().step or 0) >= 2)
    assert (folder.path / LIVE_FILE).is_file()
    text = ray.get(controller.scale.remote(3, None))
    assert text == "generators go from 1 to 3; each change takes effect between two steps"
    three = becomes(3, 1)
    ray.get(controller.scale.remote(2, 2))
    two = becomes(2, 2)

    roles = Counter(worker.role for worker in status().workers)
    assert roles == {"controller": 1, "selector": 1, "generator": 2, "learner": 2}
    prints = wait_for("one version everywhere", lambda: equal_fingerprints(status().workers))
    assert len(prints) > 10

    ray.get(controller.stop.remote("enough"))
    summary = ray.get(done, timeout=120)
    assert summary.status == "stopped"
    ray.kill(controller)
    assert not (folder.path / LIVE_FILE).exists()

    records = {record["step"]: record for record in folder.read_metrics()}
    assert records[three]["learner/workers"] == 1
    assert records[three + 1]["weights/receivers"] == records[three + 1]["generator/workers"] == 3
    assert records[two + 1]["weights/receivers"] == records[two + 1]["generator/workers"] == 2
    assert records[two + 1]["learner/workers"] == 2
    assert sum(record.get("weights/failed", 0) for record in records.values()) == 0
    assert all(record["rollouts/trained"] == GROUPS * 4 for step, record in records.items() if step)
    # every group that was trained is in the samples: no row is there twice in an epoch, none is left out
    trained = Counter(sample["group"].rsplit(".", 1)[0] for sample in folder.read_samples())
    assert set(trained.values()) == {1}
    assert len(trained) == GROUPS * max(records)
    fates = {name: sum(r.get(f"groups/{name}", 0) for r in records.values()) for name in ("trained", "lost", "stale")}
    assert fates == {"trained": GROUPS * max(records), "lost": 0, "stale": 0}
    kinds = Counter(event["kind"] for event in folder.read_events())
    assert (kinds["generator_joined"], kinds["generator_left"], kinds["learners_rebuilt"]) == (2, 1, 1)


def equal_fingerprints(workers: list[WorkerState]) -> dict[str, str] | None:
    """The tensors' fingerprints if all generators and learner ranks have the same, as they do between two updates."""

    def ask(role: str, method: str) -> list[dict[str, str]]:
        handles = [ray.get_actor(worker.name, NAMESPACE) for worker in workers if worker.role == role]
        return ray.get([getattr(handle, method).remote() for handle in handles], timeout=60)

    generators, learners = ask("generator", "fingerprints"), ask("learner", "weights_fingerprints")
    prints = [*generators, *[found for found in learners if found]]
    return prints[0] if len(prints) >= 3 and all(found == prints[0] for found in prints) else None


def _cause(call: Any) -> BaseException:
    with pytest.raises(ray.exceptions.RayTaskError) as error:
        ray.get(call, timeout=60)
    cause = error.value.cause
    assert isinstance(cause, BaseException)
    return cause
