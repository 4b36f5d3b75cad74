"""Updates straight into a vLLM model's storage: only where the first one proved it, and then the same model."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pods_cluster.generation.engines.vllm.engine import VllmEngine
from pods_cluster.generation.engines.vllm.start import make_vllm_engine
from pods_cluster.weights.fingerprint import difference, fingerprints
from pods_cluster.weights.protocol import WeightLoadError, WeightTransferError
from tests.generation.engines.builtin.test_weights import over_a_kept_cache, staged
from tests.generation.engines.vllm.test_engine import (
    PROMPT,
    Engines,
    build,
    config,
    finish,
    greedy,
    publish,
    request,
    run,
    unending,
)
from tests.generation.learner import Learner

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def _plain(layer: Any, remove_weight: bool) -> None:
    """In the place of vLLM's packing for a CPU: parameters stay as they are, as on a GPU."""
    layer.cpu_linear = torch.nn.functional.linear


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def engine(engines: Engines) -> Iterator[VllmEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm", _plain)
        engine = make_vllm_engine(config(engines.path("tied")), None)
        publish(engine, build("tied"), 0)
        yield engine
        engine.close()
        gc.collect()


def transfer_engine(engine: VllmEngine) -> Any:
    [found] = engine._core.call_workers(lambda worker: worker.weight_transfer_engine)  # type: ignore[arg-type]
    return found


@pytest.fixture
def unloaded(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> VllmEngine:
    """The engine, whose loaders must not be called."""

    def load(*_: Any) -> None:
        raise AssertionError("through vLLM's loaders")

    assert transfer_engine(engine).direct
    model = transfer_engine(engine).model
    monkeypatch.setattr(type(model), "load_weights", load)
    return engine


def test_an_update_in_the_middle_of_requests(unloaded: VllmEngine) -> None:
    engine, old, new = unloaded, build("tied", 0), build("tied", 1)
    publish(engine, old, 1)
    [prompt] = unending(old, 1, 40)
    item = request(0, prompt=prompt, temperature=0.0, max_tokens=40)
    engine.submit([item])
    while len(engine._by_key[item.key].token_ids) < 3:
        assert not engine.step()
    before = engine.stats().recomputed_tokens
    publish(engine, new, 2)
    made = len(engine._by_key[item.key].token_ids)
    assert engine.stats().recomputed_tokens - before == len(prompt) + made
    rollout = finish(engine)[item.key]
    prefix = greedy(old, list(prompt), 40)[:made]
    assert rollout.token_ids == prefix + greedy(new, [*prompt, *prefix], 40 - made)
    assert difference(fingerprints(new.named_parameters()), engine.fingerprints()) == ""


def test_a_version_arrives_while_the_engine_goes_on_under_the_old_one(unloaded: VllmEngine) -> None:
    engine, old, new = unloaded, build("tied", 0), build("tied", 1)
    publish(engine, old, 1)
    [prompt] = unending(old, 1, 40)
    item = request(0, prompt=prompt, temperature=0.0, max_tokens=40)
    engine.submit([item])

    def decode() -> None:
        while len(engine._by_key[item.key].token_ids) < 5:
            assert not engine.step()

    assert staged(engine, new, 2, decode)
    made = len(engine._by_key[item.key].token_ids)
    rollout = finish(engine)[item.key]
    assert rollout.spans == ((1, made), (2, len(rollout.token_ids) - made))
    prefix = greedy(old, list(prompt), 40)[:made]
    assert rollout.token_ids == prefix + greedy(new, [*prompt, *prefix], 40 - made)
    assert difference(fingerprints(new.named_parameters()), engine.fingerprints()) == ""


def test_a_kept_cache_is_not_computed_again_and_no_newcomer_reads_it(
    unloaded: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, old, new = unloaded, build("tied", 0), build("tied", 1)
    monkeypatch.setattr(engine, "_keep_cache", True)
    publish(engine, old, 1)
    [prompt] = unending(old, 1, 40)
    item, late = (request(row, prompt=prompt, temperature=0.0, max_tokens=40) for row in (0, 1))
    engine.submit([item])
    while len(engine._by_key[item.key].token_ids) < 5:
        assert not engine.step()
    read = engine.stats().prompt_tokens
    publish(engine, new, 2)
    made = len(engine._by_key[item.key].token_ids)
    engine.submit([late])
    rollouts = finish(engine)
    held, fresh = (
        over_a_kept_cache(old, new, list(prompt), made, 40),
        over_a_kept_cache(new, new, list(prompt), 0, 40),
    )
    ended = len(rollouts[item.key].token_ids)
    assert rollouts[item.key].token_ids == held[:ended]
    assert rollouts[item.key].spans == ((1, made), (2, ended - made))
    assert rollouts[late.key].token_ids == fresh[: len(rollouts[late.key].token_ids)]
    assert (engine.stats().prompt_tokens - read, engine.stats().preemptions) == (len(prompt), 0)


def test_what_does_not_fit_closes_the_engine_until_a_full_version(unloaded: VllmEngine) -> None:
    from pods_cluster.generation.engines.vllm.direct_load import DirectLoader

    engine, new = unloaded, build("tied", 2)
    with pytest.raises(WeightLoadError, match="are not in the update"):
        publish(engine, new, 3, "model.layers.1.mlp.down_proj.weight")
    assert engine.closed
    with pytest.raises(WeightLoadError, match=r"1 parameter\(s\) of the engine are not in the update, b first"):
        DirectLoader(dict.fromkeys("ab")).check(["a", "c"])  # type: ignore[arg-type]
    learner = Learner(new)
    specs = learner.source.specs
    wrong = tuple(
        spec if spec.name != "model.norm.weight" else type(spec)(spec.name, (spec.shape[0] // 2,), spec.dtype)
        for spec in specs()
    )
    tensors = [p.detach()[: spec.shape[0]] for spec, (_, p) in zip(wrong, new.named_parameters(), strict=True)]
    learner.source.specs = lambda: wrong  # type: ignore[method-assign]
    learner.source.gather = lambda start, stop: tensors[start:stop]  # type: ignore[method-assign]
    with pytest.raises(WeightTransferError, match=r"model.norm.weight \[32\]: the engine holds no such parameter"):
        learner.publish(3, engine.connect, engine.receive)
    assert engine.closed
    publish(engine, new, 4)
    assert run(engine, [request(1, temperature=0.0)])[0].token_ids == greedy(new, list(PROMPT), 24)
    assert difference(fingerprints(new.named_parameters()), engine.fingerprints()) == ""


def test_a_check_refuses_a_model_that_changes_what_it_loads(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = transfer_engine(engine)
    model, load = inner.model, type(inner.model).load_weights

    def doubled(self: Any, rows: Any) -> Any:
        return load(self, [(name, 2 * tensor if name.endswith("o_proj.weight") else tensor) for name, tensor in rows])

    for change, expected in ((doubled, False), (load, True)):
        monkeypatch.setattr(type(model), "load_weights", change)
        inner._checked, inner._direct = False, None
        publish(engine, build("tied", 3), 5)
        assert inner.direct is expected


def test_packed_weights_and_reload_go_through_the_loaders(engines: Engines, engine: VllmEngine) -> None:
    inner = transfer_engine(engine)
    inner._checked, inner._direct = False, None
    engine._weights._loading = "reload"
    publish(engine, build("tied", 4), 6)
    assert not inner.direct
    assert run(engine, [request(2, temperature=0.0)])[0].token_ids == greedy(build("tied", 4), list(PROMPT), 24)
