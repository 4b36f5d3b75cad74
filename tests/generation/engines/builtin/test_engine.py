"""The built-in engine against transformers itself."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from pods_cluster.generation.engine import EngineError
from pods_cluster.generation.engines.builtin.engine import TransformersEngine
from pods_cluster.types import FinishReason, GroupId, Rollout, RolloutRequest, SamplingParams
from tests.generation.conftest import (
    ARCHITECTURES,
    CONTEXT,
    EOS,
    VOCABULARY,
    build,
    first_end,
    three_letter_tokenizer,
)


def make_engine(model: PreTrainedModel, **options: int) -> TransformersEngine:
    engine = TransformersEngine(model, [EOS], **options)
    engine.version = 0
    return engine


def request(row: int, index: int, prompt: tuple[int, ...], **sampling: Any) -> RolloutRequest:
    params = SamplingParams(**{"max_tokens": 24, "seed": 7, **sampling})
    return RolloutRequest(GroupId(0, row), index, prompt, params)


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 12))) for _ in range(count)]


def run(engine: TransformersEngine, requests: list[RolloutRequest]) -> dict[str, Rollout]:
    engine.submit(requests)
    done: dict[str, Rollout] = {}
    while engine.in_flight:
        for rollout in engine.step():
            assert rollout.key not in done
            done[rollout.key] = rollout
    return done


@torch.inference_mode()
def forward_logprobs(model: PreTrainedModel, rollout: Rollout, temperature: float) -> torch.Tensor:
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.token_ids]])
    logp = torch.log_softmax(model(input_ids=ids).logits[0, :-1] / temperature, -1)
    start = len(rollout.prompt_ids) - 1
    return logp[start:].gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_equals_generate_token_for_token(name: str) -> None:
    model, reference = build(name), build(name)
    requests = [request(row, 0, prompt, temperature=0.0) for row, prompt in enumerate(prompts(9))]
    done = run(make_engine(model, max_sequences=4, prefill_tokens=24), requests)
    for item in requests:
        ids = torch.tensor([item.prompt_ids])
        expected = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, eos_token_id=EOS
        )[0, len(item.prompt_ids) :].tolist()  # type: ignore[operator]
        assert done[item.key].token_ids == expected
        assert done[item.key].finish_reason is (FinishReason.STOP if expected[-1] == EOS else FinishReason.LENGTH)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", ["qwen2", "qwen2_mixed"])
def test_logprobs_are_those_of_a_teacher_forced_forward(name: str, temperature: float) -> None:
    model, reference = build(name), build(name)
    engine = make_engine(model, max_sequences=5)
    requests = [request(row, i, p, temperature=temperature) for row, p in enumerate(prompts(4)) for i in range(3)]
    done = run(engine, requests)
    for rollout in done.values():
        expected = forward_logprobs(reference, rollout, temperature)
        assert rollout.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    scored = engine.score([(r.prompt_ids, r.token_ids) for r in done.values()], temperature)
    for rollout, values in zip(done.values(), scored, strict=True):
        assert rollout.logprobs == pytest.approx(values, abs=1e-4)


def test_greedy_logprobs_are_untempered(model: PreTrainedModel) -> None:
    rollout = run(make_engine(model), [request(0, 0, (5, 6), temperature=0.0)])["0.0.0/0"]
    assert rollout.logprobs == pytest.approx(forward_logprobs(build("qwen2"), rollout, 1.0).tolist(), abs=1e-4)


def test_a_rollout_is_the_same_in_any_batch(model: PreTrainedModel) -> None:
    rows = prompts(6, seed=3)
    requests = [request(row, i, prompt) for row, prompt in enumerate(rows) for i in range(6)]
    together = run(make_engine(model, max_sequences=64), requests)
    shuffled = random.Random(1).sample(requests, len(requests))
    few = run(make_engine(model, max_sequences=5, prefill_tokens=16), shuffled)
    alone = {item.key: run(make_engine(model), [item])[item.key] for item in requests[::5]}
    for item in requests:
        assert together[item.key].token_ids == few[item.key].token_ids
    for key, rollout in alone.items():
        assert rollout.token_ids == together[key].token_ids
    assert len({tuple(rollout.token_ids) for rollout in together.values()}) > 30


def test_another_seed_index_or_attempt_is_another_stream(model: PreTrainedModel) -> None:
    base = request(0, 0, (5, 6, 7))
    others = [
        request(0, 1, (5, 6, 7)),
        RolloutRequest(GroupId(0, 0, 1), 0, (5, 6, 7), base.sampling),
        RolloutRequest(GroupId(1, 0), 0, (5, 6, 7), base.sampling),
    ]
    done = run(make_engine(model), [base, *others])
    reseeded = run(make_engine(model), [request(0, 0, (5, 6, 7), seed=8)])
    texts = {tuple(rollout.token_ids) for rollout in [*done.values(), *reseeded.values()]}
    assert len(texts) == 5


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_follow_the_models_distribution(model: PreTrainedModel, temperature: float) -> None:
    count, prompt = 4000, (5, 9, 11)
    items = [request(0, i, prompt, max_tokens=1, temperature=temperature) for i in range(count)]
    done = run(make_engine(model, max_sequences=1000), items)
    drawn = Counter(rollout.token_ids[0] for rollout in done.values())
    with torch.inference_mode():
        p = torch.softmax(build("qwen2")(torch.tensor([prompt])).logits[0, -1].double() / temperature, -1).numpy()
    seen = np.array([drawn[token] for token in range(VOCABULARY)])
    often = p * count >= 5
    statistic = (((seen - p * count) ** 2)[often] / (p * count)[often]).sum()
    freedom = int(often.sum()) - 1
    # 5 standard deviations of a chi-square above its mean: fails by chance about once in a million draws of seeds
    assert statistic < freedom + 5 * np.sqrt(2 * freedom) + 10
    assert freedom >= 4


def test_mixed_sampling_in_one_batch(model: PreTrainedModel) -> None:
    prompt = (5, 9, 11)
    sampled = [request(0, i, prompt) for i in range(4)]
    greedy = [request(1, 0, prompt, temperature=0.0)]
    cut = [request(2, i, prompt, top_k=3) for i in range(4)] + [request(3, 0, prompt, top_p=0.5, min_p=0.01)]
    done = run(make_engine(model), [*sampled, *greedy, *cut])
    assert done["0.1.0/0"].token_ids == run(make_engine(model), greedy)["0.1.0/0"].token_ids
    for item in sampled:
        assert done[item.key].token_ids == run(make_engine(model), sampled)[item.key].token_ids
    reference = build("qwen2")
    for item in cut[:4]:
        rollout = done[item.key]
        ids = torch.tensor([[*prompt, *rollout.token_ids]])
        with torch.inference_mode():
            logits = reference(ids).logits[0, 2:-1]
        top = logits.topk(3, -1)
        for step, token in enumerate(rollout.token_ids):
            assert token in top.indices[step].tolist()
            expected = torch.log_softmax(top.values[step], -1)[top.indices[step].tolist().index(token)]
            assert rollout.logprobs is not None
            assert rollout.logprobs[step] == pytest.approx(float(expected), abs=1e-4)


def test_a_stop_string_ends_a_rollout_inside_a_token_and_leaves_its_log_probabilities(model: PreTrainedModel) -> None:
    made = three_letter_tokenizer()
    whole = run(make_engine(model), [request(row, i, p) for row, p in enumerate(prompts(6)) for i in range(4)])
    # the last letter of a token and three of the next, or two and two
    places = [("0.1.0/1", 2), ("0.2.0/2", 4), ("0.3.0/3", 8)]
    strings = tuple(made.decode(whole[key].token_ids)[place : place + 4] for key, place in places)
    engine = TransformersEngine(model, [EOS], max_sequences=5, tokenizer=made)
    engine.version = 0
    mixed = [
        request(row, i, p, stop_strings=strings if i else ()) for row, p in enumerate(prompts(6)) for i in range(4)
    ]
    cut = run(engine, mixed)
    shorter = 0
    for item in mixed:
        before, after = whole[item.key], cut[item.key]
        end = first_end(made, before.token_ids, item.sampling.stop_strings)
        assert after.token_ids == before.token_ids[:end]
        assert after.logprobs == pytest.approx(before.logprobs[:end] if before.logprobs else None, abs=1e-4)
        assert after.finish_reason is (before.finish_reason if end is None else FinishReason.STOP)
        shorter += len(after.token_ids) < len(before.token_ids)
    assert shorter >= 3


def test_finish_reasons_and_the_end_token(model: PreTrainedModel) -> None:
    done = run(make_engine(model), [request(0, i, (5, 6), max_tokens=12) for i in range(200)])
    reasons = Counter(rollout.finish_reason for rollout in done.values())
    assert reasons[FinishReason.STOP]
    assert reasons[FinishReason.LENGTH]
    for rollout in done.values():
        assert EOS not in rollout.token_ids[:-1]
        assert (rollout.token_ids[-1] == EOS) == (rollout.finish_reason is FinishReason.STOP)
        assert len(rollout.token_ids) == 12 or rollout.finish_reason is FinishReason.STOP
        assert rollout.first_version == rollout.last_version == 0


def test_a_request_may_add_end_tokens(model: PreTrainedModel) -> None:
    free = run(make_engine(model), [request(0, 0, (5, 6), temperature=0.0)])["0.0.0/0"].token_ids
    extra = free[3]
    item = request(0, 0, (5, 6), temperature=0.0, stop_token_ids=(extra,))  # type: ignore[arg-type]
    stopped = run(make_engine(model), [item, request(1, 0, (5, 6), temperature=0.0)])
    assert stopped["0.0.0/0"].token_ids == free[: free.index(extra) + 1]
    assert stopped["0.0.0/0"].finish_reason is FinishReason.STOP
    assert stopped["0.1.0/0"].token_ids == free


def test_abort_returns_partial_tokens_and_leaves_others_alone(model: PreTrainedModel) -> None:
    items = [request(row, i, prompt, max_tokens=40) for row, prompt in enumerate(prompts(4)) for i in range(4)]
    whole = run(make_engine(model), items)
    engine = make_engine(model, max_sequences=10)
    engine.submit(items)
    done: list[Rollout] = []
    for _ in range(5):
        done += engine.step()
    finished = {rollout.key for rollout in done}
    gone = [item.key for item in items[::2]]
    engine.abort([*gone, "9.9.9/9", *finished])
    while engine.in_flight:
        done += engine.step()
    assert {rollout.key for rollout in done} == set(whole)
    assert len(done) == len(items)
    aborted = [rollout for rollout in done if rollout.finish_reason is FinishReason.ABORT]
    assert {rollout.key for rollout in aborted} == set(gone) - finished
    for rollout in done:
        full = whole[rollout.key].token_ids
        if rollout in aborted:
            assert rollout.token_ids == full[: len(rollout.token_ids)]
            assert rollout.logprobs is not None
            assert len(rollout.logprobs) == len(rollout.token_ids)
        else:
            assert rollout.token_ids == full
    assert len({len(rollout.token_ids) for rollout in aborted} & {0, 6}) == 2  # waiting ones and those from the start
    stats = engine.stats()
    assert stats.aborted == len(aborted)
    assert stats.aborted_tokens == sum(len(r.token_ids) for r in aborted)
    assert stats.generated_tokens == sum(len(r.token_ids) for r in done)


def test_max_sequences_bounds_rows_in_flight(model: PreTrainedModel) -> None:
    engine = make_engine(model, max_sequences=3)
    engine.submit([request(0, i, (5, 6)) for i in range(20)])
    most, count = 0, 0
    while engine.in_flight:
        count += len(engine.step())
        stats = engine.stats()
        most = max(most, stats.running)
        assert stats.running + stats.waiting == engine.in_flight
        assert 0.0 <= stats.kv_cache_usage <= 1.0
    assert most <= 3
    assert count == 20


def test_the_memory_bound_limits_rows_too(model: PreTrainedModel) -> None:
    token_bytes = 2 * 2 * 2 * 8 * 4
    engine = make_engine(model, max_sequences=50, kv_bytes=token_bytes * 60)
    engine.submit([request(0, i, (5, 6), max_tokens=18) for i in range(10)])
    count = 0
    while engine.in_flight:
        count += len(engine.step())
        assert engine.stats().running <= 3
    assert count == 10
    with pytest.raises(EngineError, match=r"request 0.0.0/0.*kv_cache_gb"):
        engine.submit([request(0, 0, (5, 6), max_tokens=70)])


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (request(3, 1, tuple(range(3, 13)), max_tokens=CONTEXT - 9), "0.3.0/1.*context of 96.*generator.max_tokens"),
        (request(3, 1, ()), "0.3.0/1.*no tokens"),
        (request(3, 1, (5, VOCABULARY)), "0.3.0/1.*vocabulary"),
        (request(3, 1, (5,), max_tokens=0), "0.3.0/1.*max_tokens"),
        (request(3, 1, (5,), temperature=float("nan")), "0.3.0/1.*temperature"),
        (request(3, 1, (5,), top_p=0.0), "0.3.0/1.*top_p"),
    ],
)
def test_requests_that_can_never_run_are_refused_whole(model: PreTrainedModel, item: RolloutRequest, text: str) -> None:
    engine = make_engine(model)
    with pytest.raises(EngineError, match=text):
        engine.submit([request(0, 0, (5,)), item])
    assert engine.in_flight == 0


def test_no_rollout_before_a_version_and_no_key_twice(model: PreTrainedModel) -> None:
    engine = TransformersEngine(model, [EOS])
    with pytest.raises(EngineError, match="publish version 0"):
        engine.submit([request(0, 0, (5,))])
    engine.version = 0
    engine.submit([request(0, 0, (5,))])
    with pytest.raises(EngineError, match="already in flight"):
        engine.submit([request(0, 0, (5,))])


def test_the_last_context_place_can_be_used(model: PreTrainedModel) -> None:
    prompt = tuple(random.Random(0).choices(range(3, VOCABULARY), k=CONTEXT - 4))
    engine = TransformersEngine(model, [])
    engine.version = 0
    rollout = run(engine, [request(0, 0, prompt, max_tokens=4)])["0.0.0/0"]
    assert rollout.finish_reason is FinishReason.LENGTH
    assert len(rollout.token_ids) == 4


def test_missing_logprobs_are_filled_in_for_rollouts_of_the_served_version_alone() -> None:
    engine, reference = make_engine(build("qwen2")), build("qwen2")
    requests = [request(row, 0, prompt, temperature=0.7, logprobs=False) for row, prompt in enumerate(prompts(3))]
    first, second, stale = run(engine, requests).values()
    assert first.logprobs is second.logprobs is stale.logprobs is None
    stale.first_version = -1
    engine.rescore([first, second, stale], 0.7)
    for rollout in (first, second):
        assert rollout.logprobs == pytest.approx(forward_logprobs(reference, rollout, 0.7).tolist(), abs=1e-4)
    assert stale.logprobs is None


def test_a_version_is_adopted_without_a_transfer_unless_the_engine_is_closed() -> None:
    engine = TransformersEngine(build("qwen2"), [EOS])
    with pytest.raises(EngineError, match="no weight version yet"):
        engine.submit([request(0, 0, (3, 4))])
    engine.adopt_version(4)
    done = run(engine, [request(0, 0, (3, 4))])
    assert {(rollout.first_version, rollout.last_version) for rollout in done.values()} == {(4, 4)}
    engine.closed = True
    with pytest.raises(EngineError, match="adopt_version: the engine holds no usable weights"):
        engine.adopt_version(5)
