"""Adapters: only their bytes travel, and the built-in engine computes what base and adapter compute."""

from __future__ import annotations

import copy

import pytest
import torch

from pods_cluster.generation.engine import EngineError
from pods_cluster.generation.engines.builtin.engine import TransformersEngine
from pods_cluster.types import GroupId, Rollout, RolloutRequest, SamplingParams
from pods_cluster.weights.fingerprint import difference, fingerprint
from pods_cluster.weights.protocol import WeightTransferError
from tests.generation.adapters import AdaptedModel
from tests.generation.conftest import EOS, build
from tests.generation.learner import Learner, ModelSource

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = [(5, 6, 7), (8, 9), (10, 11, 12, 13), (3,)]


def generate(engine: TransformersEngine, row: int = 0) -> list[Rollout]:
    engine.submit([RolloutRequest(GroupId(row, place), 0, prompt, GREEDY) for place, prompt in enumerate(PROMPTS)])
    done = []
    while engine.in_flight:
        done += engine.step()
    return sorted(done, key=lambda rollout: rollout.group)


def greedy(model: torch.nn.Module, prompt: tuple[int, ...]) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        while ids.shape[1] < len(prompt) + GREEDY.max_tokens and (ids.shape[1] == len(prompt) or ids[0, -1] != EOS):
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], -1)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_greedy_tokens_and_fingerprints_are_those_of_the_merged_model_version_after_version(name: str) -> None:
    base = build(name)
    engine = TransformersEngine(build(name), [EOS])
    before: list[list[int]] = [greedy(base, prompt) for prompt in PROMPTS]
    for version in range(3):
        model = AdaptedModel(base, seed=version)
        learner = model.learner()
        learner.publish(version, engine.connect, engine.receive)
        made = [rollout.token_ids for rollout in generate(engine, version)]
        assert made == [greedy(model.merged(), prompt) for prompt in PROMPTS]
        assert made != before, "an adapter that changes nothing proves nothing"
        before = made
        sent = learner.sender.fingerprints()
        assert sent.keys() == {name for name, _ in base.named_parameters()}
        assert difference(sent, engine.fingerprints()) == ""
    # A zero adapter brings the base back, to the bit: versions do not pile up on one another.
    AdaptedModel(base, seed=0, size=0.0).learner().publish(3, engine.connect, engine.receive)
    assert engine.fingerprints() == {name: fingerprint(parameter) for name, parameter in base.named_parameters()}


def test_a_newcomer_gets_base_and_adapter_from_one_transfer() -> None:
    model = AdaptedModel(build("qwen2"), seed=4)
    newcomer = TransformersEngine(build("qwen2"), [EOS])
    model.learner().publish(17, newcomer.connect, newcomer.receive)
    assert newcomer.version == 17
    assert [rollout.token_ids for rollout in generate(newcomer)] == [greedy(model.merged(), p) for p in PROMPTS]


def test_only_the_adapters_bytes_are_sent() -> None:
    base = build("qwen2")
    model = AdaptedModel(base, seed=0, rank=4)
    linear = {name: m for name, m in base.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"}
    expected = sum(4 * 4 * (layer.in_features + layer.out_features) for layer in linear.values())
    update = model.learner().update(0)
    assert update.adapter
    assert update.nbytes == expected
    assert {spec.factor.weight for spec in update.tensors if spec.factor} == {f"{name}.weight" for name in linear}
    assert not Learner(base).update(0).adapter


def test_bfloat16_log_probabilities_lie_near_base_and_adapter() -> None:
    base = build("qwen2")
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.mul_(0.6)  # the logits of the other tests' model are so large that bfloat16 rounds them coarsely
    base = base.bfloat16()
    model = AdaptedModel(base, seed=1)
    engine = TransformersEngine(copy.deepcopy(base), [EOS])
    learner = model.learner()
    learner.publish(0, engine.connect, engine.receive)
    assert difference(learner.sender.fingerprints(), engine.fingerprints()) == ""
    differences, moved = [], []
    for rollout in generate(engine):
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.token_ids]])
        start = len(rollout.prompt_ids)
        with torch.inference_mode():
            found = [torch.log_softmax(m(ids).logits[0].float(), -1) for m in (model.plain(), model.base)]
        targets = ids[0, start:, None]
        learners, bases = (log_probs[start - 1 : -1].gather(-1, targets).squeeze(-1) for log_probs in found)
        differences.append((torch.tensor(rollout.logprobs) - learners).abs())
        moved.append((learners - bases).abs())
    assert torch.cat(differences).mean() < 0.02
    assert torch.cat(moved).mean() > 0.1


def test_embeddings_and_single_projections_can_be_adapted() -> None:
    base = build("llama")
    model = AdaptedModel(base, seed=2, rank=8, target_modules=("embed_tokens", "q_proj", "down_proj"))
    engine = TransformersEngine(build("llama"), [EOS])
    learner = model.learner()
    learner.publish(0, engine.connect, engine.receive)
    assert difference(learner.sender.fingerprints(), engine.fingerprints()) == ""
    assert [rollout.token_ids for rollout in generate(engine)] == [greedy(model.merged(), p) for p in PROMPTS]


def test_an_adapter_of_another_model_is_refused_by_name_and_a_right_one_reopens() -> None:
    engine = TransformersEngine(build("qwen2"), [EOS])
    other = build("qwen2")
    other.model.layers[1].mlp.up_proj = torch.nn.Linear(32, 48, bias=False)
    with pytest.raises(
        WeightTransferError, match=r"layers\.1\.mlp\.up_proj\.weight has an adapter of shape \(48, 32\)"
    ):
        AdaptedModel(other, seed=0).learner().publish(0, engine.connect, engine.receive)
    assert engine.closed
    with pytest.raises(EngineError, match="no usable weights"):
        engine.step()
    model = AdaptedModel(build("qwen2"), seed=0)
    model.learner().publish(1, engine.connect, engine.receive)
    assert [rollout.token_ids for rollout in generate(engine)] == [greedy(model.merged(), p) for p in PROMPTS]


def test_an_adapter_without_one_of_its_factors_is_refused() -> None:
    class Half(ModelSource):
        def __init__(self, model: AdaptedModel) -> None:
            self._specs = model.adapter.specs()[:-1]
            self._model = model

        def specs(self):
            return self._specs

        def gather(self, start: int, stop: int) -> list[torch.Tensor]:
            return self._model.adapter.gather(start, stop)

    engine = TransformersEngine(build("qwen2"), [EOS])
    with pytest.raises(WeightTransferError, match=r"down_proj\.weight came without its B"):
        Learner(Half(AdaptedModel(build("qwen2"), seed=0))).publish(0, engine.connect, engine.receive)
    assert engine.closed


def test_an_adapter_after_whole_weights_is_refused() -> None:
    engine = TransformersEngine(build("qwen2"), [EOS])
    Learner(build("qwen2", seed=1)).publish(0, engine.connect, engine.receive)
    with pytest.raises(WeightTransferError, match="took whole weights before"):
        AdaptedModel(build("qwen2"), seed=0).learner().publish(1, engine.connect, engine.receive)
