"""Adapters into vLLM's CPU build: merged in place, they compute what base and adapter compute."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

from pods_cluster.generation.engines.vllm.engine import VllmEngine
from pods_cluster.generation.engines.vllm.start import make_vllm_engine
from pods_cluster.types import GroupId, Rollout, RolloutRequest, SamplingParams
from pods_cluster.weights.fingerprint import difference
from pods_cluster.weights.protocol import WeightTransferError
from tests.generation.adapters import AdaptedModel
from tests.generation.engines.vllm.test_engine import Engines, build, config, finish, forced, greedy
from tests.generation.learner import Learner

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PROMPTS = [(5, 6, 7, 8), (9, 10, 11), (12, 13), tuple(range(3, 35)) * 5]
"""The last one is longer than a block of the prefix cache."""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """Tied embeddings, biases on some projections, q, k, v and gate, up fused by vLLM."""
    folder = Engines(tmp_path_factory.mktemp("models")).path("tied")
    engine = make_vllm_engine(config(folder), None)
    yield engine
    engine.close()


def generate(engine: VllmEngine, row: int) -> list[Rollout]:
    sampling = SamplingParams(temperature=0.0, max_tokens=24)
    items = [RolloutRequest(GroupId(row, place), 0, prompt, sampling) for place, prompt in enumerate(PROMPTS)]
    engine.submit(items)
    done = finish(engine)
    return [done[item.key] for item in items]


def publish(engine: VllmEngine, model: AdaptedModel) -> Learner:
    learner = model.learner()
    learner.publish(engine.version + 1, engine.connect, engine.receive)
    return learner


def test_versions_follow_one_another_and_both_ends_hold_the_same(started: VllmEngine) -> None:
    """Rank 64, alpha 64, all linear layers: greedy tokens, log-probabilities, prefix cache and fingerprints."""
    base = build("tied")
    before: list[list[int]] = []
    for seed in range(3):
        model = AdaptedModel(base, seed)
        learner = publish(started, model)
        truth = model.merged()
        made = generate(started, seed)
        assert [rollout.token_ids for rollout in made] == [greedy(truth, list(prompt), 24) for prompt in PROMPTS]
        for rollout in made:
            expected = forced(truth, rollout.prompt_ids, rollout.token_ids, 1.0)
            assert rollout.logprobs is not None
            scores = started.score([(rollout.prompt_ids, rollout.token_ids)], 1.0)[0]
            assert scores == pytest.approx(expected, abs=1e-4)
        assert [rollout.token_ids for rollout in made] != before
        before = [rollout.token_ids for rollout in made]
        sent = learner.sender.fingerprints()
        assert sent.keys() == {name for name, _ in base.named_parameters()}
        assert difference(sent, started.fingerprints()) == ""
    plain = AdaptedModel(base, 0, size=0.0)
    assert difference(publish(started, plain).sender.fingerprints(), started.fingerprints()) == ""
    assert [r.token_ids for r in generate(started, 9)] == [greedy(base, list(prompt), 24) for prompt in PROMPTS]


def test_one_projection_of_a_fused_layer(started: VllmEngine) -> None:
    model = AdaptedModel(build("tied"), 5, target_modules=("q_proj", "up_proj"))
    # What an earlier version adapted and this one does not, an update cannot know: a run's layers never change.
    publish(started, AdaptedModel(build("tied"), 5, size=0.0))
    learner = publish(started, model)
    assert difference(learner.sender.fingerprints(), started.fingerprints()) == ""
    assert [r.token_ids for r in generate(started, 20)] == [greedy(model.merged(), list(p), 24) for p in PROMPTS]


def test_requests_in_flight_go_on_under_the_new_adapter(started: VllmEngine) -> None:
    base = build("tied")
    old, new = AdaptedModel(base, 6), AdaptedModel(base, 7)
    publish(started, old)
    first = started.version
    sampling = SamplingParams(temperature=0.0, max_tokens=40)
    started.submit([RolloutRequest(GroupId(30, place), 0, prompt, sampling) for place, prompt in enumerate(PROMPTS)])
    for _ in range(6):
        started.step()
    publish(started, new)
    crossed = 0
    for rollout in finish(started).values():
        if rollout.first_version == rollout.last_version:
            continue
        assert (rollout.first_version, rollout.last_version) == (first, first + 1)
        prompt, tokens = list(rollout.prompt_ids), rollout.token_ids
        cut = next(i for i in range(len(tokens) + 1) if greedy(new.merged(), prompt + tokens[:i], 40 - i) == tokens[i:])
        assert tokens[:cut] == greedy(old.merged(), prompt, 40)[:cut]
        crossed += 1
    assert crossed


def test_a_wrong_adapter_closes_the_engine_until_a_right_one(started: VllmEngine) -> None:
    base = build("tied")
    other = copy.deepcopy(base)
    other.model.layers[1].mlp.down_proj = torch.nn.Linear(80, 64, bias=False)
    with pytest.raises(WeightTransferError, match=r"layers\.1\.mlp\.down_proj\.weight has an adapter of shape"):
        publish(started, AdaptedModel(other, 8))
    assert started.closed
    learner = publish(started, AdaptedModel(base, 9))
    assert not started.closed
    assert difference(learner.sender.fingerprints(), started.fingerprints()) == ""


def test_an_adapter_after_whole_weights_is_refused(started: VllmEngine) -> None:
    """The engine's base is gone afterwards."""
    Learner(build("tied", 1)).publish(started.version + 1, started.connect, started.receive)
    with pytest.raises(WeightTransferError, match="took whole weights before"):
        publish(started, AdaptedModel(build("tied"), 0))
    assert started.closed
