"""vLLM over two tensor-parallel processes: each takes all weights and keeps its share. One engine for all of it, as its
start is nearly all of the time; it lives in a process of its own, which is killed at the end: no process of an engine may
outlive its owner, as it would hold the card.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pods_cluster.generation.engines.vllm.engine import VllmEngine
from pods_cluster.generation.engines.vllm.start import make_vllm_engine
from pods_cluster.weights.fingerprint import difference, fingerprints
from tests.generation.engines.vllm.test_engine import (
    PROMPT,
    Engines,
    build,
    config,
    finish,
    forced,
    greedy,
    request,
    run,
    unending,
)
from tests.generation.learner import Learner

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]  # an engine of two processes

ROOT = Path(__file__).parents[4]


class Owner:
    """A process with an engine. `lines`: what it said, with `children` and the numbers of the engine's processes, up to
    `checked` or its end."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        model = Engines(folder).path("tied")
        with self.log.open("w") as log:
            command = [sys.executable, "-m", "tests.generation.engines.vllm.test_tensor_parallel", str(model)]
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        self.lines: list[str] = []
        for line in self.process.stdout:
            self.lines.append(line.strip())
            if line.startswith("checked"):
                break


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    owner = Owner(tmp_path_factory.mktemp("owner"))
    yield owner
    owner.process.kill()
    owner.process.wait(30)


def test_updates_scores_and_fingerprints_of_shards(owner: Owner) -> None:
    assert "checked" in owner.lines, owner.log.read_text()[-3000:]


def test_no_process_outlives_its_killed_owner(owner: Owner) -> None:
    line = next((line for line in owner.lines if line.startswith("children")), None)
    assert line is not None, owner.log.read_text()[-3000:]
    children = [psutil.Process(int(pid)) for pid in line.split()[1:]]
    names = sorted(child.name() for child in children if child.name().startswith("VLLM"))
    assert len(names) == 3, names  # the core and two workers
    owner.process.kill()
    owner.process.wait(30)
    try:
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not [child.name() for child in alive if child.status() != psutil.STATUS_ZOMBIE]
    finally:
        for child in children:
            if child.is_running():
                child.kill()


def publish(engine: VllmEngine, model, version: int) -> None:
    Learner(model, ranks=2).publish(version, engine.connect, engine.receive)


def check(engine: VllmEngine) -> None:
    old, new = build("tied", 0), build("tied", 1)
    publish(engine, old, 0)
    assert difference(fingerprints(old.named_parameters()), engine.fingerprints()) == ""
    assert "differ" in difference(fingerprints(new.named_parameters()), engine.fingerprints())
    [prompt] = unending(old, 1, 40)
    item = request(0, prompt=prompt, temperature=0.0, max_tokens=40)
    engine.submit([item])
    made = 0
    while made < 3:
        assert not engine.step()
        made = len(engine._by_key[item.key].token_ids)
    publish(engine, new, 1)
    made = len(engine._by_key[item.key].token_ids)
    rollout = finish(engine)[item.key]
    prefix = greedy(old, list(prompt), 40)[:made]
    assert rollout.token_ids == prefix + greedy(new, [*prompt, *prefix], 40 - made)
    assert (rollout.first_version, rollout.last_version) == (0, 1)
    assert difference(fingerprints(new.named_parameters()), engine.fingerprints()) == ""
    assert run(engine, [request(1, temperature=0.0)])[0].token_ids == greedy(new, list(PROMPT), 24)
    [scores] = engine.score([((9, 10), (11, 12, 13))], 0.7)
    assert scores == pytest.approx(forced(new, (9, 10), [11, 12, 13], 0.7), abs=1e-4)


if __name__ == "__main__":
    held = make_vllm_engine(config(sys.argv[1], parallel=2), None)
    print("children", *(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
    check(held)
    print("checked", flush=True)
    time.sleep(600)
