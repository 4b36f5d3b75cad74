"""vLLM's engine in a process of its own. Both tests are of one engine: its start is nearly all of their time."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from pods_cluster.generation.engines.vllm.engine import VllmEngine
from pods_cluster.generation.engines.vllm.start import make_vllm_engine
from pods_cluster.types import FinishReason
from pods_cluster.weights.fingerprint import difference, fingerprints
from pods_cluster.weights.protocol import WeightLoadError
from tests.generation.adapters import AdaptedModel
from tests.generation.engines.vllm import test_adapter as adapter
from tests.generation.engines.vllm.test_engine import (
    PROMPT,
    Engines,
    build,
    config,
    finish,
    forced,
    greedy,
    publish,
    request,
    run,
    unending,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    folder = Engines(tmp_path_factory.mktemp("models")).path("untied")
    engine = make_vllm_engine(config(folder, process=True), None)
    yield engine
    engine.close()
    gc.collect()


def test_adapters_are_merged_there(engine: VllmEngine) -> None:
    """First: an engine that took whole weights refuses adapters."""
    model = AdaptedModel(build("untied"), 3)
    learner = adapter.publish(engine, model)
    tokens = [rollout.token_ids for rollout in adapter.generate(engine, 1)]
    assert tokens == [greedy(model.merged(), list(prompt), 24) for prompt in adapter.PROMPTS]
    assert difference(learner.sender.fingerprints(), engine.fingerprints()) == ""


def test_updates_aborts_scores_and_a_refused_update(engine: VllmEngine) -> None:
    old, new = build("untied", 0), build("untied", 1)
    publish(engine, old, 0, relay=True)
    prompts = unending(old, 4, 40)
    items = [request(0, index, prompt=prompt, temperature=0.0, max_tokens=40) for index, prompt in enumerate(prompts)]
    engine.submit(items)
    made: dict[str, int] = {}
    while min(made.values(), default=0) < 3 and len(engine._by_key) == 4:
        assert not engine.step()
        made = {key: len(running.token_ids) for key, running in engine._by_key.items()}
    engine.abort([items[3].key])
    publish(engine, new, 1, relay=True)
    made = {key: len(running.token_ids) for key, running in engine._by_key.items()}
    done = finish(engine)
    assert done[items[3].key].finish_reason is FinishReason.ABORT
    for item in items[:3]:
        rollout = done[item.key]
        prefix = greedy(old, list(item.prompt_ids), 40)[: made[item.key]] if item.key in made else rollout.token_ids
        assert rollout.token_ids == prefix + greedy(new, [*item.prompt_ids, *prefix], 40 - len(prefix))
    assert difference(fingerprints(new.named_parameters()), engine.fingerprints()) == ""
    [scores] = engine.score([((9, 10), (11, 12, 13))], 0.7)
    assert scores == pytest.approx(forced(new, (9, 10), [11, 12, 13], 0.7), abs=1e-4)
    with pytest.raises(WeightLoadError, match="are not in the update"):
        publish(engine, build("tied"), 2)
    assert engine.closed
    publish(engine, old, 3)
    assert run(engine, [request(1, temperature=0.0)])[0].token_ids == greedy(old, list(PROMPT), 24)
