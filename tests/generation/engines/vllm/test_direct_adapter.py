"""Adapters straight into a vLLM model's storage: only where it holds the weights of the files, and then the same model."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pods_cluster.generation.engines.vllm import direct_adapter
from pods_cluster.generation.engines.vllm.direct_adapter import DirectAdapter
from pods_cluster.generation.engines.vllm.engine import VllmEngine
from pods_cluster.generation.engines.vllm.parameters import LocalParameter
from pods_cluster.generation.engines.vllm.start import make_vllm_engine
from pods_cluster.weights.adapter import WeightAdapter
from pods_cluster.weights.fingerprint import difference
from pods_cluster.weights.protocol import WeightTransferError
from pods_cluster.weights.sharded_fingerprint import Shard
from tests.generation.adapters import AdaptedModel
from tests.generation.engines.vllm.test_adapter import PROMPTS, generate, publish
from tests.generation.engines.vllm.test_direct_load import _plain, transfer_engine
from tests.generation.engines.vllm.test_engine import Engines, build, config, finish, greedy, request, unending

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@contextmanager
def started(folder: Path) -> Iterator[VllmEngine]:
    """An engine whose parameters stay as they are, as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm", _plain)
        engine = make_vllm_engine(config(Engines(folder).path("tied")), None)
        try:
            yield engine
        finally:
            engine.close()
            gc.collect()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    with started(tmp_path_factory.mktemp("models")) as engine:
        yield engine


def merging(engine: VllmEngine) -> Any:
    return transfer_engine(engine)._adapter


def anew(engine: VllmEngine) -> None:
    """The engine as if just started: with the weights of the files, and nothing proven."""
    publish(engine, AdaptedModel(build("tied"), 0, size=0.0))
    transfer_engine(engine)._adapter = None


@pytest.mark.parametrize("free", [None, 0])
def test_versions_follow_one_another_past_the_loaders(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, free: int | None
) -> None:
    """With the base kept on the device and, where memory is short, from the files."""
    anew(engine)
    if free is not None:
        monkeypatch.setattr(direct_adapter, "free_bytes", lambda device: free)

    def load(*_: Any) -> None:
        raise AssertionError("through vLLM's loaders")

    monkeypatch.setattr(type(transfer_engine(engine).model), "load_weights", load)
    base = build("tied")
    for seed in range(3):
        model = AdaptedModel(base, seed)
        learner = publish(engine, model)
        assert merging(engine).direct
        assert merging(engine)._direct.keeps_base is (free is None)
        assert difference(learner.sender.fingerprints(), engine.fingerprints()) == ""
        made = generate(engine, 10 * (free is None) + seed)
        assert [r.token_ids for r in made] == [greedy(model.merged(), list(prompt), 24) for prompt in PROMPTS]


def test_requests_in_flight_go_on_under_the_new_adapter(engine: VllmEngine) -> None:
    anew(engine)
    base = build("tied")
    old, new = AdaptedModel(base, 6), AdaptedModel(base, 7)
    publish(engine, old)
    [prompt] = unending(old.merged(), 1, 40)
    item = request(40, prompt=prompt, temperature=0.0, max_tokens=40)
    engine.submit([item])
    while len(engine._by_key[item.key].token_ids) < 3:
        assert not engine.step()
    publish(engine, new)
    assert merging(engine).direct
    made = len(engine._by_key[item.key].token_ids)
    prefix = greedy(old.merged(), list(prompt), 40)[:made]
    assert finish(engine)[item.key].token_ids == prefix + greedy(new.merged(), [*prompt, *prefix], 40 - made)


def changed(engine: VllmEngine) -> None:
    """A weight that the files do not have, as after a load that scales or sorts it."""
    transfer_engine(engine).model.model.layers[1].mlp.down_proj.weight.data[3, 4] += 0.5


def reloading(engine: VllmEngine) -> None:
    engine._weights._loading = "reload"


@pytest.mark.parametrize("prepare", [changed, reloading])
def test_where_it_is_not_proven_the_loaders_do_it(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[VllmEngine], None]
) -> None:
    anew(engine)
    monkeypatch.setattr(engine._weights, "_loading", "auto")
    prepare(engine)
    model = AdaptedModel(build("tied"), 11)
    for _ in range(2):
        learner = publish(engine, model)
        assert not merging(engine).direct
        assert difference(learner.sender.fingerprints(), engine.fingerprints()) == ""
    engine._weights._loading = "auto"


def test_an_adapter_of_other_weights_or_shapes_is_left_to_the_loaders(engine: VllmEngine) -> None:
    anew(engine)
    base = build("tied")
    publish(engine, AdaptedModel(base, 1, size=0.0))
    assert merging(engine).direct
    some = publish(engine, AdaptedModel(base, 1, target_modules=("q_proj", "up_proj")))
    assert not merging(engine).direct
    assert difference(some.sender.fingerprints(), engine.fingerprints()) == ""
    anew(engine)
    other = build("tied")
    other.model.layers[1].mlp.down_proj = torch.nn.Linear(80, 64, bias=False)
    with pytest.raises(WeightTransferError, match=r"layers\.1\.mlp\.down_proj\.weight has an adapter of shape"):
        publish(engine, AdaptedModel(other, 8))
    learner = publish(engine, AdaptedModel(base, 9))
    assert difference(learner.sender.fingerprints(), engine.fingerprints()) == ""


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dim", "start", "length"), [(0, 0, 5), (0, 7, 5), (1, 0, 3), (1, 4, 4)])
@pytest.mark.parametrize("kept", [False, True])
def test_a_workers_part_is_that_part_of_the_merged_whole(
    dim: int, start: int, length: int, transposed: bool, kept: bool
) -> None:
    """As under tensor parallelism: rows of a column-parallel layer, columns of a row-parallel one."""
    generator = torch.Generator().manual_seed(3)
    rows, columns, rank = 12, 8, 4

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    whole = normal(rows, columns)
    out, into = (columns, rows) if transposed else (rows, columns)
    item = WeightAdapter("w", normal(rank, into), normal(out, rank), 0.7, transposed)
    tensor = whole.narrow(dim, start, length).clone()
    part = LocalParameter("w", tensor, Shard((rows, columns), dim, start))
    direct = DirectAdapter({"w": part}, {"w": whole}, {"w": tensor.clone()} if kept else {})
    assert direct.takes([item])
    for _ in range(2):  # each version from the base anew
        direct.load([item])
        assert torch.equal(tensor, item.merged_with(whole).narrow(dim, start, length))
