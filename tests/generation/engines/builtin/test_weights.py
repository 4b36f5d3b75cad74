"""New weights in the built-in engine, over the real transport."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pods_cluster.generation.engine import Engine, EngineError
from pods_cluster.generation.engines.builtin.engine import TransformersEngine
from pods_cluster.generation.engines.paced.engine import PacedEngine
from pods_cluster.types import FinishReason, GroupId, Rollout, RolloutRequest, SamplingParams
from pods_cluster.weights.fingerprint import fingerprint
from pods_cluster.weights.protocol import WeightTransferError, WeightUpdate
from tests.generation.conftest import EOS, build
from tests.generation.learner import Learner

GREEDY = SamplingParams(temperature=0.0, max_tokens=30)


def publish(
    engine: TransformersEngine | PacedEngine, model: PreTrainedModel, version: int, leave_out: str = ""
) -> None:
    Learner(model, leave_out).publish(version, engine.connect, engine.receive)


def finish(engine: TransformersEngine) -> list[Rollout]:
    done = []
    while engine.in_flight:
        done += engine.step()
    return done


def greedy(model: PreTrainedModel, prefix: list[int], count: int) -> list[int]:
    ids = torch.tensor([prefix])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, eos_token_id=EOS
    )  # type: ignore[operator]
    return output[0, len(prefix) :].tolist()


@pytest.mark.parametrize("name", ["qwen2", "llama", "qwen2_mixed"])
def test_generation_after_an_update_equals_a_fresh_load(name: str) -> None:
    engine = TransformersEngine(build(name, seed=0), [EOS])
    publish(engine, build(name, seed=1), version=0)
    assert engine.version == 0
    for row in range(4):
        engine.submit([RolloutRequest(GroupId(0, row), 0, (5, 6, 7 + row), GREEDY)])
    fresh = build(name, seed=1)
    for rollout in finish(engine):
        assert rollout.token_ids == greedy(fresh, list(rollout.prompt_ids), 30)
    expected = {name: fingerprint(parameter) for name, parameter in fresh.named_parameters()}
    assert engine.fingerprints() == expected


@pytest.mark.parametrize("name", ["qwen2", "qwen2_mixed"])
def test_requests_in_flight_go_on_under_the_new_weights(name: str) -> None:
    engine = TransformersEngine(build(name, seed=0), [], max_sequences=6, prefill_tokens=20)
    engine.version = 3
    prompts = [(5, 6, 7), (8,), (9, 10, 11, 12, 13), (5, 6, 7), (20, 21), (3, 4, 5, 6, 7, 8, 9)]
    engine.submit([RolloutRequest(GroupId(0, i), 0, prompt, GREEDY) for i, prompt in enumerate(prompts)])
    engine.submit([RolloutRequest(GroupId(0, 9), 0, (5, 6), GREEDY)])
    for _ in range(7):
        engine.step()
    old = build(name, seed=0)
    publish(engine, build(name, seed=1), version=4)
    new = build(name, seed=1)
    changed = 0
    for rollout in finish(engine):
        prompt = list(rollout.prompt_ids)
        if rollout.group.row == 9:  # it was waiting
            assert (rollout.first_version, rollout.last_version) == (4, 4)
            assert rollout.spans == ((4, 30),)
            assert rollout.token_ids == greedy_without_end(new, prompt, 30)
            continue
        assert (rollout.first_version, rollout.last_version) == (3, 4)
        assert rollout.spans == ((3, 8), (4, 22))
        before, after = rollout.token_ids[:8], rollout.token_ids[8:]
        assert before == greedy_without_end(old, prompt, 8)
        assert after == greedy_without_end(new, prompt + before, 22)
        changed += after != greedy_without_end(old, prompt + before, 22)
        with torch.inference_mode():
            logp = torch.log_softmax(new(torch.tensor([prompt + rollout.token_ids])).logits[0], -1)
        expected = [float(logp[len(prompt) + t - 1, rollout.token_ids[t]]) for t in range(8, 30)]
        assert rollout.logprobs is not None
        assert rollout.logprobs[8:] == pytest.approx(expected, abs=1e-4)
    assert changed


def greedy_without_end(model: PreTrainedModel, prefix: list[int], count: int) -> list[int]:
    """Greedy tokens that do not stop at the end token."""
    ids = torch.tensor([prefix])
    with torch.inference_mode():
        for _ in range(count):
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], -1)
    return ids[0, len(prefix) :].tolist()


def test_a_version_that_lacks_a_parameter_closes_the_engine_until_a_full_one(model: PreTrainedModel) -> None:
    engine = TransformersEngine(model, [EOS])
    engine.version = 0
    engine.submit([RolloutRequest(GroupId(0, 0), 0, (5, 6), GREEDY)])
    with pytest.raises(WeightTransferError, match=r"1 parameter.*model\.norm\.weight"):
        publish(engine, build("qwen2", seed=1), version=1, leave_out="model.norm.weight")
    assert engine.closed
    assert engine.version == 0
    with pytest.raises(EngineError, match="no usable weights"):
        engine.step()
    publish(engine, build("qwen2", seed=1), version=2)
    assert not engine.closed
    (rollout,) = finish(engine)
    assert rollout.first_version == 2
    assert rollout.token_ids == greedy(build("qwen2", seed=1), [5, 6], 30)


def test_another_models_weights_are_refused_by_name(model: PreTrainedModel) -> None:
    engine = TransformersEngine(model, [EOS])
    with pytest.raises(WeightTransferError, match=r"lm_head\.weight|no parameter|shape"):
        publish(engine, build("gemma2", seed=1), version=1)
    assert engine.closed


def test_receive_without_a_group_says_so(model: PreTrainedModel) -> None:
    engine = TransformersEngine(model, [EOS])
    with pytest.raises(WeightTransferError, match="connect first"):
        engine.receive(Learner(model).update(1))


def test_disconnect_frees_a_transfer_that_hangs(model: PreTrainedModel) -> None:
    engine = TransformersEngine(model, [EOS])
    learner = Learner(build("qwen2", seed=1))
    invitation, update = learner.invite(), learner.update(1)
    meeting = threading.Thread(target=learner.sender.connect, args=(30.0,), daemon=True)
    meeting.start()
    engine.connect(invitation)
    meeting.join(30.0)
    raised: list[BaseException] = []

    def receive() -> None:
        try:
            engine.receive(update)
        except BaseException as error:
            raised.append(error)

    hanging = threading.Thread(target=receive, daemon=True)  # the learner never sends
    hanging.start()
    time.sleep(0.3)
    assert hanging.is_alive()
    engine.disconnect()
    hanging.join(10.0)
    assert not hanging.is_alive()
    assert isinstance(raised[0], WeightTransferError)
    assert engine.closed
    learner.sender.close()


def staged(
    engine: Engine, model: PreTrainedModel, version: int, beside: Callable[[], None], leave_out: str = ""
) -> bool:
    """Have `engine` take a version in another thread; `beside` runs while it waits for the learner to send."""
    learner = Learner(model, leave_out)
    invitation, update = learner.invite(), learner.update(version)
    meeting = threading.Thread(target=learner.sender.connect, args=(30.0,), daemon=True)
    meeting.start()
    engine.connect(invitation)
    meeting.join(30.0)
    taken: list[bool] = []
    taking = threading.Thread(target=lambda: taken.append(engine.stage(update)), daemon=True)
    taking.start()
    try:
        beside()
        assert taking.is_alive()
        learner.sender.send(update)
        taking.join(30.0)
        engine.receive(update)
    finally:
        learner.sender.close()
    return taken == [True]


def test_a_version_arrives_while_the_engine_goes_on_under_the_old_one() -> None:
    engine = TransformersEngine(build("qwen2", seed=0), [])
    engine.version = 3
    engine.submit([RolloutRequest(GroupId(0, 0), 0, (5, 6, 7), GREEDY)])

    def decode() -> None:
        for _ in range(9):
            engine.step()
        assert (engine.version, engine.closed) == (3, False)

    old, new = build("qwen2", seed=0), build("qwen2", seed=1)
    assert staged(engine, new, 4, decode)
    assert engine.version == 4
    assert engine.fingerprints() == {name: fingerprint(parameter) for name, parameter in new.named_parameters()}
    [rollout] = finish(engine)
    assert rollout.spans == ((3, 10), (4, 20))
    before = greedy_without_end(old, [5, 6, 7], 10)
    assert rollout.token_ids == before + greedy_without_end(new, [5, 6, 7, *before], 20)


def test_a_staged_version_that_lacks_a_parameter_closes_the_engine_until_a_full_one(model: PreTrainedModel) -> None:
    engine = TransformersEngine(model, [EOS])
    with pytest.raises(WeightTransferError, match=r"1 parameter.*model\.norm\.weight"):
        staged(engine, build("qwen2", seed=1), 1, lambda: None, leave_out="model.norm.weight")
    assert engine.closed
    assert staged(engine, build("qwen2", seed=1), 2, lambda: None)
    assert (engine.version, engine.closed) == (2, False)


def test_a_staged_transfer_that_breaks_off_leaves_the_engine_at_work_on_its_old_weights(model: PreTrainedModel) -> None:
    engine = TransformersEngine(model, [])
    engine.version = 0
    learner = Learner(build("qwen2", seed=1))
    invitation, update = learner.invite(), learner.update(1)
    meeting = threading.Thread(target=learner.sender.connect, args=(30.0,), daemon=True)
    meeting.start()
    engine.connect(invitation)
    meeting.join(30.0)
    threading.Timer(0.2, learner.sender.close).start()
    with pytest.raises(WeightTransferError):
        engine.stage(update)
    engine.submit([RolloutRequest(GroupId(0, 0), 0, (5, 6), GREEDY)])
    [rollout] = finish(engine)
    assert rollout.token_ids == greedy_without_end(build("qwen2", seed=0), [5, 6], 30)
    assert (engine.version, engine.closed) == (0, False)
    with pytest.raises(WeightTransferError):  # nothing is half there to be loaded
        engine.receive(update)


def over_a_kept_cache(
    old: PreTrainedModel, new: PreTrainedModel, prompt: list[int], made: int, count: int
) -> list[int]:
    """Greedy tokens: `made` of `old`, then up to `count` of `new` over the keys and values that `old` computed."""
    tokens: list[int] = []
    cache: Any = None
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        while len(tokens) < count:
            model = old if len(tokens) < made else new
            output = model(ids, past_key_values=cache, use_cache=True)
            cache, ids = output.past_key_values, output.logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(int(ids))
    return tokens


def test_a_kept_cache_is_not_computed_again_and_no_newcomer_reads_it() -> None:
    old, new = build("qwen2", seed=0), build("qwen2", seed=1)
    engine = TransformersEngine(build("qwen2", seed=0), [], keep_cache=True)
    engine.version = 3
    engine.submit([RolloutRequest(GroupId(0, 0), 0, (5, 6, 7), GREEDY)])
    for _ in range(9):
        engine.step()
    publish(engine, new, version=4)
    engine.submit([RolloutRequest(GroupId(0, 1), 0, (5, 6, 7), GREEDY)])
    held, fresh = sorted(finish(engine), key=lambda rollout: rollout.group.row)
    assert held.spans == ((3, 10), (4, 20))
    assert held.token_ids == over_a_kept_cache(old, new, [5, 6, 7], 10, 30)
    assert held.token_ids[10:] != greedy_without_end(new, [5, 6, 7, *held.token_ids[:10]], 20)
    assert fresh.token_ids == greedy_without_end(new, [5, 6, 7], 30)


@pytest.mark.parametrize("looked", [True, False])
def test_no_room_for_a_second_set_of_weights(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, looked: bool
) -> None:
    if looked:
        monkeypatch.setattr("pods_cluster.weights.staging.free_bytes", lambda device: 1000)
    else:
        monkeypatch.setattr("pods_cluster.weights.staging.ALIGNED", 2**54)  # more than any machine has
    engine = TransformersEngine(model, [EOS])
    taken: list[bool] = []

    def receive(update: WeightUpdate) -> None:
        taken.append(engine.stage(update, check_memory=looked))
        engine.receive(update)

    Learner(build("qwen2", seed=1)).publish(1, engine.connect, receive)
    assert taken == [False]
    assert (engine.version, engine.closed) == (1, False)


def test_the_paced_engine_receives_for_real_and_is_deterministic() -> None:
    def make() -> PacedEngine:
        return PacedEngine(
            tokens=range(3, 30), end_id=2, tokens_per_second=1e6, longest=20, accuracy=0.4, reward_token=7
        )

    engine = make()
    source = build("qwen2", seed=1)
    with pytest.raises(EngineError, match="publish version 0"):
        engine.submit([RolloutRequest(GroupId(0, 0), 0, (5,), SamplingParams(max_tokens=16))])
    publish(engine, source, version=5)  # type: ignore[arg-type]
    assert engine.version == 5
    assert engine.fingerprints() == {name: fingerprint(parameter) for name, parameter in source.named_parameters()}
    requests = [
        RolloutRequest(GroupId(0, g), i, (5, 6), SamplingParams(max_tokens=16)) for g in range(50) for i in range(8)
    ]
    outcomes = []
    for order in (requests, requests[::-1]):
        engine = make()
        engine.version = 5
        engine.submit(order)
        done: dict[str, Rollout] = {}
        while engine.in_flight:
            done |= {rollout.key: rollout for rollout in engine.step()}
        outcomes.append({key: (r.token_ids, r.finish_reason) for key, r in done.items()})
    assert outcomes[0] == outcomes[1]
    lengths = [len(ids) for ids, _ in outcomes[0].values()]
    assert min(lengths) == 1
    assert max(lengths) == 16
    assert {reason for _, reason in outcomes[0].values()} == {FinishReason.STOP, FinishReason.LENGTH}
    hits = sum(7 in ids for ids, _ in outcomes[0].values()) / len(requests)
    assert 0.25 < hits < 0.5
