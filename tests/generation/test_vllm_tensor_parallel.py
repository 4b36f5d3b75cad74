"""vLLM over two tensor-parallel processes: each takes all weights and keeps its share. One engine for all of it: its
start is nearly all of the time."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from pods_cluster.weights.fingerprint import difference, fingerprints

from .learner import Learner
from .test_vllm_engine import PROMPT, Engines, build, config, finish, forced, greedy, request, run, unending

vllm = pytest.importorskip("vllm", exc_type=ImportError)

from pods_cluster.generation.vllm_engine import VllmEngine, make_vllm_engine  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    folder = Engines(tmp_path_factory.mktemp("models")).path("tied")
    engine = make_vllm_engine(config(folder, parallel=2), None)
    yield engine
    engine.close()
    gc.collect()


def publish(engine: VllmEngine, model, version: int) -> None:
    Learner(model, ranks=2).publish(version, engine.connect, engine.receive)


def test_updates_scores_and_fingerprints_of_shards(engine: VllmEngine) -> None:
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
        made = len(engine._keys[item.key].token_ids)
    publish(engine, new, 1)
    made = len(engine._keys[item.key].token_ids)
    rollout = finish(engine)[item.key]
    prefix = greedy(old, list(prompt), 40)[:made]
    assert rollout.token_ids == prefix + greedy(new, [*prompt, *prefix], 40 - made)
    assert (rollout.first_version, rollout.last_version) == (0, 1)
    assert difference(fingerprints(new.named_parameters()), engine.fingerprints()) == ""
    assert run(engine, [request(1, temperature=0.0)])[0].token_ids == greedy(new, list(PROMPT), 24)
    [scores] = engine.score([((9, 10), (11, 12, 13))], 0.7)
    assert scores == pytest.approx(forced(new, (9, 10), [11, 12, 13], 0.7), abs=1e-4)
