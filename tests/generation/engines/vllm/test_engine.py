"""The vLLM engine on vLLM's CPU build, against transformers itself."""

from __future__ import annotations

import gc
import itertools
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from pods_cluster.config import Config
from pods_cluster.generation.completion_text import CompletionText
from pods_cluster.generation.engine import EngineError
from pods_cluster.generation.engines.sampling import restrict
from pods_cluster.generation.engines.vllm.engine import VllmEngine
from pods_cluster.generation.engines.vllm.start import describe, make_vllm_engine
from pods_cluster.generation.packed_rollouts import unpack
from pods_cluster.generation.stop_strings import StopStringsByRequest
from pods_cluster.generation.turns import ENVIRONMENT, Played, Turns
from pods_cluster.scoring.scorer_output import ScorerOutput
from pods_cluster.types import FinishReason, GroupId, Prompt, Rollout, RolloutRequest, SamplingParams
from pods_cluster.weights.fingerprint import difference, fingerprints
from pods_cluster.weights.protocol import Invitation, WeightLoadError, WeightTransferError
from tests.generation.conftest import EOS, VOCABULARY, first_end, three_letter_tokenizer
from tests.generation.learner import Learner
from tests.generation.test_stop_strings import CUTS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CONTEXT = 256
# head size 32, the smallest that vLLM's CPU attention takes; wide weights, so that tokens differ clearly
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "initializer_range": 0.3,
}
PROMPT = (5, 6, 7, 8)


def build(name: str, seed: int = 0) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name == "tied":
            return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)).eval()
        return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)).eval()


def config(path: Path | str, max_tokens: int = 40, dtype: str = "float32", parallel: int = 1, **options: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(path), "dtype": dtype},
            "data": {"path": "data.jsonl", "max_prompt_tokens": 200},
            "reward": [{"name": f"{Path(__file__).parents[2] / 'rewards.py'}:first_token_is_digit"}],
            "generator": {
                "engine": "vllm",
                "max_tokens": max_tokens,
                "max_sequences": 8,
                "rollouts_per_prompt": 8,
                "tensor_parallel": parallel,
                "engine_options": options,
            },
            "selector": {"keep": 2},
            "run": {"name": "test"},
        }
    )


class Engines:
    """One engine at a time: those of one process share vLLM's global state."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name = ""
        self._engine: VllmEngine | None = None
        self._rows = itertools.count(1)
        self.version = 0

    def path(self, name: str, seed: int = 0) -> Path:
        folder = self._folder / f"{name}-{seed}"
        if not folder.exists():
            build(name, seed).save_pretrained(folder)
        return folder

    def get(self, name: str) -> VllmEngine:
        """The engine with the weights of `build(name)`, whatever was done to it before."""
        if self._name != name:
            self.close()
            self._engine = make_vllm_engine(config(self.path(name)), None)
            self._name, self._engine.version = name, 0
        engine = self._engine
        assert engine is not None
        assert not engine.in_flight
        if engine.version != 0 or engine.closed:
            publish(engine, build(name), 0)
        return engine

    def row(self) -> int:
        return next(self._rows)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine, self._name = None, ""
        gc.collect()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    engines = Engines(tmp_path_factory.mktemp("models"))
    yield engines
    engines.close()


@pytest.fixture
def engine(engines: Engines) -> VllmEngine:
    return engines.get("tied")


def publish(
    engine: VllmEngine, model: PreTrainedModel, version: int, leave_out: str = "", *, relay: bool = False
) -> None:
    Learner(model, leave_out, relay=relay).publish(version, engine.connect, engine.receive)


def request(row: int, index: int = 0, prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> RolloutRequest:
    return RolloutRequest(GroupId(0, row), index, prompt, SamplingParams(**{"max_tokens": 24, "seed": 7, **sampling}))


def finish(engine: VllmEngine) -> dict[str, Rollout]:
    done: dict[str, Rollout] = {}
    while engine.in_flight:
        for rollout in engine.step():
            assert rollout.key not in done
            done[rollout.key] = rollout
    return done


def run(engine: VllmEngine, requests: list[RolloutRequest]) -> list[Rollout]:
    engine.submit(requests)
    done = finish(engine)
    return [done[item.key] for item in requests]


@torch.inference_mode()
def greedy(model: PreTrainedModel, prefix: list[int], count: int) -> list[int]:
    """Greedy tokens up to the end token."""
    ids = list(prefix)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == EOS:
            break
    return ids[len(prefix) :]


@torch.inference_mode()
def forced(model: PreTrainedModel, prompt: tuple[int, ...], tokens: list[int], temperature: float) -> list[float]:
    logp = torch.log_softmax(model(torch.tensor([[*prompt, *tokens]])).logits[0, :-1] / temperature, -1)
    return logp[len(prompt) - 1 :].gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def unending(model: PreTrainedModel, count: int, tokens: int) -> list[tuple[int, ...]]:
    """Prompts of two tokens whose greedy completion does not end within `tokens`."""
    pairs = itertools.product(range(3, VOCABULARY), range(3, VOCABULARY))
    return list(itertools.islice((pair for pair in pairs if len(greedy(model, list(pair), tokens)) == tokens), count))


def long_prompts() -> Iterator[tuple[int, ...]]:
    """Prompts of 150 tokens: more than a block of the CPU's cache (128), so that their beginning is cached."""
    for stride in range(5, 37):
        yield tuple(3 + (stride * place) % 37 for place in range(150))


def test_greedy_equals_transformers_token_for_token(engine: VllmEngine) -> None:
    model = build("tied")
    requests = [request(row, prompt=tuple(range(3, 4 + row * 3)), temperature=0.0) for row in range(10)]
    rollouts = run(engine, requests)
    for rollout in rollouts:
        assert rollout.token_ids == greedy(model, list(rollout.prompt_ids), 24)
        ended = rollout.token_ids[-1] == EOS
        assert rollout.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert (rollout.first_version, rollout.last_version) == (0, 0)
        assert rollout.logprobs == pytest.approx(forced(model, rollout.prompt_ids, rollout.token_ids, 1.0), abs=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_teacher_forced_forward(engine: VllmEngine, temperature: float) -> None:
    model = build("tied")
    rollouts = run(engine, [request(0, index, temperature=temperature) for index in range(6)])
    expected = [forced(model, r.prompt_ids, r.token_ids, temperature) for r in rollouts]
    for rollout, values in zip(rollouts, expected, strict=True):
        assert rollout.logprobs == pytest.approx(values, abs=1e-4)
    scores = engine.score([(r.prompt_ids, r.token_ids) for r in rollouts], temperature)
    for score, values in zip(scores, expected, strict=True):
        assert score == pytest.approx(values, abs=1e-4)


def test_scoring_leaves_requests_alone(engine: VllmEngine) -> None:
    model = build("tied")
    items = [request(0, index, temperature=0.0, prompt=(5 + index, 6)) for index in range(3)]
    alone = [rollout.token_ids for rollout in run(engine, items)]
    engine.submit(items)
    engine.step()
    [scores] = engine.score([((9, 10, 11), (12, 13))], 1.0)
    assert scores == pytest.approx(forced(model, (9, 10, 11), [12, 13], 1.0), abs=1e-4)
    done = finish(engine)
    assert [done[item.key].token_ids for item in items] == alone


def test_a_seed_makes_the_same_rollout_again_in_whatever_company(engine: VllmEngine) -> None:
    first = run(engine, [request(0, index, seed=11) for index in range(8)])
    assert len({tuple(rollout.token_ids) for rollout in first}) > 4
    again = run(engine, [request(0, 5, seed=11), *[request(3, index, seed=2) for index in range(5)]])
    assert again[0].token_ids == first[5].token_ids
    other = run(engine, [request(0, index, seed=12) for index in range(8)])
    assert [r.token_ids for r in other] != [r.token_ids for r in first]


def test_vllms_own_scheduler_makes_the_same_rollouts(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours takes those that only decode past vLLM's loops (test_vllm_scheduler.py has the steps themselves)."""
    requests = [request(0, index, seed=4, max_tokens=3 + 2 * index) for index in range(12)]  # more than fit at once
    ours = engines.get("tied")
    tokens: list[int] = []
    take = ours._take_decoded
    monkeypatch.setattr(ours, "_take_decoded", lambda *many: (tokens.append(len(many[1])), take(*many))[1])
    first = run(ours, requests)
    made = sum(len(rollout.token_ids) for rollout in first)
    assert sum(tokens) == made - len(requests)  # every token but the first of each
    engines.close()
    theirs = make_vllm_engine(config(engines.path("tied"), scheduler="vllm"), None)
    try:
        theirs.version = 0
        monkeypatch.setattr(theirs, "_take_decoded", lambda *_: pytest.fail("not asked for"))
        second = run(theirs, requests)
    finally:
        theirs.close()
        gc.collect()
    assert [rollout.token_ids for rollout in second] == [rollout.token_ids for rollout in first]
    assert [rollout.logprobs for rollout in second] == [pytest.approx(rollout.logprobs, abs=1e-5) for rollout in first]
    assert [rollout.finish_reason for rollout in second] == [rollout.finish_reason for rollout in first]


def test_more_prompts_than_fit_a_step_wait_whole(engines: Engines) -> None:
    """vLLM's CPU build cannot give a stream of random numbers back what a part of a prompt drew from it."""
    prompts = [tuple((row * 7 + place) % 30 + 5 for place in range(100)) for row in range(8)]
    requests = [request(row, prompt=prompt) for row, prompt in enumerate(prompts)]
    expected = run(engines.get("tied"), requests)
    engines.close()
    narrow = make_vllm_engine(config(engines.path("tied"), max_num_batched_tokens=256), None)
    try:
        narrow.version = 0
        found = run(narrow, requests)
    finally:
        narrow.close()
        gc.collect()
    assert [rollout.token_ids for rollout in found] == [rollout.token_ids for rollout in expected]


def test_rollouts_finish_one_by_one_and_abort_alone(engine: VllmEngine) -> None:
    before, model = engine.stats(), build("tied")
    prompts = unending(model, 3, 20)
    long = [request(0, index, max_tokens=20, temperature=0.0, prompt=prompt) for index, prompt in enumerate(prompts)]
    expected = {item.key: greedy(model, list(item.prompt_ids), 20) for item in long}
    engine.submit([*long, request(1, max_tokens=2)])
    short = []
    while not short:
        short = engine.step()
    assert [rollout.key for rollout in short] == ["0.1.0/0"]
    assert engine.in_flight == 3
    engine.abort([long[1].key, "0.99.0/0"])
    done = finish(engine)
    assert set(done) == {item.key for item in long}
    aborted = done.pop(long[1].key)
    assert aborted.finish_reason is FinishReason.ABORT
    assert aborted.token_ids == expected[long[1].key][: len(aborted.token_ids)]
    assert 1 <= len(aborted.token_ids) < 20
    assert aborted.logprobs is not None
    assert len(aborted.logprobs) == len(aborted.token_ids)
    for key, rollout in done.items():
        assert rollout.token_ids == expected[key]
    after = engine.stats()
    assert after.aborted == before.aborted + 1
    assert after.aborted_tokens == before.aborted_tokens + len(aborted.token_ids)
    assert after.finished == before.finished + 3
    made = sum(len(r.token_ids) for r in (*short, aborted, *done.values()))
    assert after.generated_tokens == before.generated_tokens + made
    assert after.busy_seconds > before.busy_seconds


def test_a_waiting_rollout_is_aborted_without_tokens(engine: VllmEngine) -> None:
    items = [request(0, index, max_tokens=10) for index in range(10)]  # two more than fit
    engine.submit(items)
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (8, 2)
    assert stats.kv_cache_usage > 0
    engine.abort([items[9].key])
    rollout = finish(engine)[items[9].key]
    assert (rollout.token_ids, rollout.logprobs, rollout.finish_reason) == ([], [], FinishReason.ABORT)


def test_stop_tokens_and_cuts_of_an_evaluation(engine: VllmEngine) -> None:
    tokens = run(engine, [request(0, temperature=0.0)])[0].token_ids
    stop = tokens[3]
    [rollout] = run(engine, [request(0, temperature=0.0, stop_token_ids=(stop,), logprobs=False)])
    assert rollout.token_ids == tokens[: tokens.index(stop) + 1]
    assert rollout.finish_reason is FinishReason.STOP
    assert rollout.logprobs is None
    narrow = run(engine, [request(1, index, top_k=1, logprobs=False) for index in range(3)])
    assert all(r.token_ids == tokens[: len(r.token_ids)] for r in narrow)
    assert run(engine, [request(2, top_p=1e-4, min_p=0.1, logprobs=False)])[0].token_ids == tokens


def test_the_log_probabilities_of_a_cut_distribution_are_those_of_what_was_left(engine: VllmEngine) -> None:
    model = build("tied")
    for rollout in run(engine, [request(0, index, top_k=6, top_p=0.8, min_p=0.05) for index in range(3)]):
        with torch.inference_mode():
            scores = model(torch.tensor([[*PROMPT, *rollout.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
        cut = restrict(scores, *(torch.tensor([[value]]).expand(len(scores), 1) for value in (0.8, 6, 0.05)))
        expected = torch.log_softmax(cut, -1).gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        assert (cut == -torch.inf).any()
        assert rollout.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_stop_string_ends_a_rollout_inside_a_token(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    made = three_letter_tokenizer()
    monkeypatch.setattr(engine, "_stop_strings", StopStringsByRequest(made))
    rows = [(row, index) for row in range(3) for index in range(4)]  # more than fit at once
    whole = run(engine, [request(*row) for row in rows])
    text = made.decode(whole[1].token_ids)
    strings = (text[2:6], "dadab")
    before = engine.stats()
    requests = [request(row, index, stop_strings=strings if index else ()) for row, index in rows]
    cut = run(engine, requests)
    for item, long, short in zip(requests, whole, cut, strict=True):
        end = first_end(made, long.token_ids, item.sampling.stop_strings)
        assert short.token_ids == long.token_ids[:end]
        assert short.logprobs == pytest.approx(long.logprobs[:end] if long.logprobs else None, abs=1e-4)
        assert short.finish_reason is (long.finish_reason if end is None else FinishReason.STOP)
    assert len(cut[1].token_ids) < len(whole[1].token_ids)
    after = engine.stats()
    assert (after.finished - before.finished, after.aborted - before.aborted) == (len(rows), 0)
    assert after.generated_tokens - before.generated_tokens == sum(len(rollout.token_ids) for rollout in cut)
    assert (after.running, after.waiting) == (0, 0)


@pytest.mark.parametrize(("text", "strings", "without", "whole"), CUTS)
def test_vllm_cuts_the_text_where_we_do(text: str, strings: list[str], without: str, whole: str) -> None:
    from vllm.v1.engine.detokenizer import check_stop_strings

    for include, expected in ((False, without), (True, whole)):
        found = check_stop_strings(text, len(text), strings, include)
        assert text[: len(text) if found is None or found[1] == -1 else found[1]] == expected


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (request(0, prompt=tuple([5] * 230), max_tokens=40), "engine_options.max_model_len"),
        (request(0, prompt=()), "the prompt has no tokens"),
        (request(0, prompt=(5, VOCABULARY)), "tokenizer and model differ"),
        (request(0, max_tokens=0), "max_tokens: 0"),
        (request(0, temperature=-1.0), "temperature: -1.0"),
        (request(0, top_p=0.0), "top_p: 0.0"),
    ],
)
def test_a_request_that_cannot_run_is_refused_with_all_that_came_with_it(
    engine: VllmEngine, item: RolloutRequest, text: str
) -> None:
    with pytest.raises(EngineError, match=text):
        engine.submit([request(1), item])
    assert engine.in_flight == 0
    assert engine.step() == []
    with pytest.raises(EngineError, match="already in flight"):
        engine.submit([request(1), request(1)])


def test_an_update_reaches_requests_in_flight_and_the_prefix_cache(engine: VllmEngine) -> None:
    old, new = build("tied", 0), build("tied", 1)
    long = next(prompt for prompt in long_prompts() if len(greedy(old, list(prompt), 24)) == 24)
    items = [
        request(0, index, prompt=prompt, temperature=0.0) for index, prompt in enumerate([long, *unending(old, 2, 24)])
    ]
    waiting = [request(1, index, max_tokens=30) for index in range(16)]
    engine.submit([*items, *waiting])
    for _ in range(6):
        engine.step()
    before = {key: list(running.token_ids) for key, running in engine._by_key.items()}
    publish(engine, new, 1)
    assert engine.version == 1
    done = finish(engine)
    for item in items:
        rollout, made = done[item.key], before[item.key]
        assert 4 <= len(made) < 24, "not in flight when the update came"
        assert (rollout.first_version, rollout.last_version) == (0, 1)
        assert rollout.spans == ((0, len(made)), (1, len(rollout.token_ids) - len(made)))
        assert made == greedy(old, list(item.prompt_ids), 24)[: len(made)]
        rest = greedy(new, [*item.prompt_ids, *made], 24 - len(made))
        assert rollout.token_ids == made + rest
        assert rest != greedy(old, [*item.prompt_ids, *made], 24 - len(made))
        assert rollout.logprobs is not None
        logprobs = forced(new, item.prompt_ids, rollout.token_ids, 1.0)[len(made) :]
        assert rollout.logprobs[len(made) :] == pytest.approx(logprobs, abs=1e-4)
    late = [done[item.key] for item in waiting if before.get(item.key) == []]
    assert late
    assert all((rollout.first_version, rollout.last_version) == (1, 1) for rollout in late)
    [again] = run(engine, [request(2, prompt=long, temperature=0.0)])
    assert again.token_ids == greedy(new, list(long), 24)
    assert engine.stats().preemptions == 0


def test_after_an_update_engine_and_learner_hold_and_compute_the_same(engine: VllmEngine) -> None:
    model = build("tied", 2)
    sent = fingerprints(model.named_parameters())
    assert difference(sent, engine.fingerprints()) != ""
    publish(engine, model, 5, relay=True)
    held = engine.fingerprints()
    assert difference(sent, held) == ""
    assert held["lm_head.weight"] == held["model.embed_tokens.weight"]  # tied, and packed anew
    probe = [((5, 6, 7), (8, 9, 10, 11)), ((3, 4), (20, 21))]
    for (prompt, tokens), values in zip(probe, engine.score(probe, 1.0), strict=True):
        assert values == pytest.approx(forced(model, prompt, list(tokens), 1.0), abs=1e-4)


def test_an_update_that_dies_midway_closes_the_engine_until_a_full_one(engine: VllmEngine) -> None:
    new = build("tied", 3)
    item = request(0, prompt=unending(build("tied"), 1, 24)[0], temperature=0.0)
    engine.submit([item])
    for _ in range(4):
        engine.step()
    made = list(engine._by_key[item.key].token_ids)
    learner = Learner(new)
    invitation, update = learner.invite(), learner.update(1, timeout=3)
    assert len(update.buckets) > 4

    def die_midway() -> None:
        gather, count = learner.source.gather, itertools.count()

        def gather_some(start: int, stop: int) -> list[torch.Tensor]:
            if next(count) == 3:
                learner.sender.close()
            return gather(start, stop)

        learner.source.gather = gather_some  # type: ignore[method-assign]
        learner.sender.connect(10)
        with pytest.raises(WeightTransferError):
            learner.sender.send(update)

    sending = threading.Thread(target=die_midway)
    sending.start()
    engine.connect(invitation)
    with pytest.raises(WeightTransferError):
        engine.receive(update)
    sending.join(20)
    assert engine.closed
    assert engine.version == 0
    assert engine.in_flight == 1
    for call in (engine.step, engine.fingerprints, lambda: engine.score([((1,), (2,))], 1.0)):
        with pytest.raises(EngineError, match="no usable weights"):
            call()
    with pytest.raises(WeightTransferError, match="connect first"):
        engine.receive(update)
    publish(engine, new, 1)
    assert not engine.closed
    rollout = finish(engine)[item.key]
    assert rollout.token_ids == made + greedy(new, [*item.prompt_ids, *made], 24 - len(made))
    assert (rollout.first_version, rollout.last_version) == (0, 1)
    assert difference(fingerprints(new.named_parameters()), engine.fingerprints()) == ""


def test_an_update_that_leaves_a_parameter_out_is_refused_by_name(engine: VllmEngine) -> None:
    left_out = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(WeightLoadError, match=left_out):
        publish(engine, build("tied", 1), 1, leave_out=left_out)
    assert engine.closed
    publish(engine, build("tied", 1), 1)
    assert not engine.closed


def test_an_update_of_another_model_says_which_parameter(engine: VllmEngine) -> None:
    with pytest.raises(WeightLoadError, match=r"are not in the update: .*k_proj\.bias"):
        publish(engine, build("untied"), 1)
    publish(engine, build("tied"), 1)


def test_a_rendezvous_that_hangs_ends_at_its_deadline_or_by_a_disconnect(engine: VllmEngine) -> None:
    learner = Learner(build("tied"))
    host, port = learner.sender.open("gloo", "hangs", 1, 30)
    try:
        with pytest.raises(WeightTransferError, match="hangs"):
            engine.connect(Invitation("gloo", host, port, 2, 1, "hangs", 0.5))
        threading.Timer(0.5, engine.disconnect).start()
        started = time.monotonic()
        with pytest.raises(WeightTransferError, match="hangs"):
            engine.connect(Invitation("gloo", host, port, 2, 1, "hangs", 60))
        assert time.monotonic() - started < 30
    finally:
        learner.sender.close()
    assert not engine.closed
    assert run(engine, [request(0, temperature=0.0)])[0].token_ids == greedy(build("tied"), list(PROMPT), 24)


def test_no_rollout_before_a_version(engine: VllmEngine) -> None:
    engine.version = -1
    try:
        with pytest.raises(EngineError, match="publish version 0"):
            engine.submit([request(0)])
    finally:
        engine.version = 0


def test_kept_rollouts_are_scored_afterwards(engine: VllmEngine) -> None:
    from dataclasses import replace

    options, engine.options = engine.options, replace(engine.options, logprobs="rescore")
    try:
        rollouts = run(engine, [request(0, index, temperature=0.7) for index in range(4)])
        assert all(rollout.logprobs is None for rollout in rollouts)
        rollouts[0].first_version = -1  # began under weights that are gone
        engine.rescore(rollouts, 0.7)
    finally:
        engine.options = options
    assert rollouts[0].logprobs is None
    for rollout in rollouts[1:]:
        assert rollout.logprobs == pytest.approx(
            forced(build("tied"), rollout.prompt_ids, rollout.token_ids, 0.7), abs=1e-4
        )


def test_options_are_checked_by_name(engines: Engines) -> None:
    """Those that vLLM has; what the configuration refuses by itself: tests/config/test_contradictions."""
    with pytest.raises(EngineError, match="did you mean gpu_memory_utilization"):
        make_vllm_engine(config(engines.path("tied"), gpu_memory_utilisation=0.5), None)


def test_a_model_that_cannot_run_here_is_refused_before_the_start(engines: Engines, tmp_path: Path) -> None:
    Qwen2ForCausalLM(Qwen2Config(**SIZES | {"num_attention_heads": 4})).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=r"heads of size 16.*32, 64"):
        make_vllm_engine(config(tmp_path), None)
    with pytest.raises(EngineError, match=r"model\.path"):
        make_vllm_engine(config(tmp_path / "nothing"), None)


def test_a_cache_too_small_for_one_rollout_fails_the_start_with_the_numbers(engines: Engines) -> None:
    engines.close()
    with pytest.raises(EngineError, match=r"(?s)GiB.*What to do: one rollout of 241 tokens.*kv_cache_gb"):
        make_vllm_engine(config(engines.path("tied"), kv_cache_gb=1e-4), None)


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "lower generator.max_sequences"),
        ("No available memory for the cache blocks. Try increasing", "raise generator.engine_options.gpu_memory_ut"),
        ("Free memory on device cuda:0 (3/79 GiB) on startup is less than desired GPU memory utilization", "below 1"),
        ("Failed to find C compiler. Please specify via CC environment variable", "enforce_eager"),
        ("no kernel image is available for execution on the device", "does not fit this GPU"),
        ("Engine core initialization failed. See root cause above.", "process: false"),
    ],
)
def test_failed_starts_say_what_to_change(message: str, advice: str) -> None:
    text = describe(RuntimeError(message), {"gpu_memory_utilization": 0.9, "max_num_seqs": 64}, True)
    assert message in text
    assert advice in text


def test_a_worker_generates_and_scores_with_it(engines: Engines, tmp_path: Path) -> None:
    from pods_cluster.generation.messages import GroupRequest
    from pods_cluster.generation.worker import GeneratorWorker
    from pods_cluster.quickstart.character_tokenizer import build_tokenizer

    engines.close()
    tokenizer = build_tokenizer()
    folder = tmp_path / "model"
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES | {"vocab_size": len(tokenizer)}, tie_word_embeddings=True)).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # log-probabilities of the kept rollouts alone, made when they are taken
    worker = GeneratorWorker(config(folder, max_tokens=12, logprobs="rescore"), "test/generator/0")
    try:
        info = worker.ready()
        assert info.engine == "vllm"
        Learner(model).publish(0, worker.connect, worker.receive)
        assert difference(fingerprints(model.named_parameters()), worker.fingerprints()) == ""
        group, prompt = GroupId(0, 3), Prompt(0, 3, "1+2=", tuple(tokenizer("1+2=")["input_ids"]))
        sampling = SamplingParams(max_tokens=12)
        worker.submit([GroupRequest(group, prompt, tuple(range(8)), 8, sampling)])
        end = time.monotonic() + 60
        while len(worker.sample(group)) < 8:
            assert worker.stats().error is None
            assert time.monotonic() < end
            time.sleep(0.05)
        rewards = {rollout.index: (rollout.text, rollout.reward) for rollout in worker.sample(group)}
        assert all(rollout.logprobs is None for rollout in worker.sample(group))
        rollouts = unpack(worker.take([(group, range(8))]))
        for rollout in rollouts:
            assert rollout.logprobs == pytest.approx(forced(model, prompt.token_ids, rollout.token_ids, 1.0), abs=1e-4)
            (text,) = CompletionText(tokenizer).of([rollout])
            assert rewards[rollout.index] == (text, float(text[0].isdigit()) if text else None)
        [row] = worker.evaluate([prompt], SamplingParams(max_tokens=12, logprobs=False), 0)
        assert row.version == 0
        assert len(row.samples) == 1
        [scores] = worker.score([(prompt.token_ids, rollouts[0].token_ids)], 1.0)
        assert scores == pytest.approx(rollouts[0].logprobs, abs=1e-4)
    finally:
        worker.shutdown()


def test_a_torchvision_of_another_torch_is_named_with_the_fix(tmp_path: Path) -> None:
    broken = tmp_path / "torchvision"
    broken.mkdir()
    (broken / "__init__.py").write_text('raise RuntimeError("operator torchvision::nms does not exist")\n')
    (tmp_path / "torchvision-0.27.0.dist-info").mkdir()
    (tmp_path / "torchvision-0.27.0.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 0.27.0\n")
    code = (
        "from pods_cluster.generation.engines.vllm import start\n"
        "start.prepare_environment(process=False, threads=1)\n"
        "start.import_vllm()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[4])])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "EngineError" in done.stderr
    assert "pip uninstall torchvision torchaudio torchcodec" in done.stderr


def test_turns_go_on_from_the_very_tokens_and_log_probabilities_are_the_learners(engines: Engines) -> None:
    """Three turns with an environment's process between them, on long prompts, and new weights within."""
    engine, model, new = engines.get("tied"), build("tied"), build("tied", 1)
    made, count = three_letter_tokenizer(), 6
    tree = config(engines.path("tied"), max_tokens=60).model_dump(mode="json")
    played = Path(__file__).parents[3] / "environments" / "played.py"
    tree["environment"] = {"name": f"{played}:Counting", "options": {"turns": 3, "says": "aac"}, "turn_tokens": 20}
    tree["reward"], tree["data"]["chat"] = [{"name": "environment"}], False
    asked, ended = queue.SimpleQueue[RolloutRequest](), queue.SimpleQueue[tuple[Rollout, Played]]()
    turns = Turns(
        Config.model_validate(tree), made, CompletionText(made), SimpleNamespace(output=ScorerOutput([ENVIRONMENT])),  # pyright: ignore
        submit=asked.put, abort=engine.abort, done=lambda *both: ended.put(both), failed=lambda error: pytest.fail(str(error)),
    )  # fmt: skip
    prompt_ids = next(long_prompts())
    prompt = Prompt(0, engines.row(), "", prompt_ids)
    ends = tuple(range(20, VOCABULARY))
    requests = [request(prompt.row, index, prompt_ids, max_tokens=60, stop_token_ids=ends) for index in range(count)]
    found: list[tuple[Rollout, Played]] = []
    try:
        engine.submit(turns.begin([(item, prompt) for item in requests]))
        deadline, updated = time.monotonic() + 120, False
        while len(found) < count:
            assert time.monotonic() < deadline
            while not asked.empty():
                later = asked.get()
                assert later.prompt_ids[: len(prompt_ids)] == prompt_ids
                assert len(later.prompt_ids) == len(prompt_ids) + later.start
                if not updated:  # between two turns of this rollout, and within turns of others
                    publish(engine, new, 1)
                    updated = True
                engine.submit([later])
            turns.take(engine.step()) if engine.in_flight else time.sleep(0.002)
            while not ended.empty():
                found.append(ended.get())
    finally:
        turns.close()
    whole = [rollout for rollout, _ in found if rollout.turns == 3 and rollout.finish_reason is FinishReason.STOP]
    assert len(whole) >= 2
    assert any(rollout.first_version == 0 and rollout.last_version == 1 for rollout in whole)
    for rollout in whole:
        mine, logprobs = rollout.sampled().tolist(), rollout.logprobs
        assert logprobs is not None
        assert [made.decode(rollout.token_ids[start:stop]) for start, stop in rollout.environment] == ["aac", "aac"]
        assert rollout.prompt_ids == prompt_ids
        assert all(math.isnan(value) for value, sampled in zip(logprobs, mine, strict=True) if not sampled)
        versions = [version for version, tokens in rollout.spans for _ in range(tokens)]
        assert len(versions) == rollout.sampled_tokens
        by_version = [forced(each, prompt_ids, rollout.token_ids, 1.0) for each in (model, new)]
        sampled = [place for place, sampled in enumerate(mine) if sampled]
        expected = [by_version[version][place] for version, place in zip(versions, sampled, strict=True)]
        assert [logprobs[place] for place in sampled] == pytest.approx(expected, abs=1e-4)
    firsts = {rollout.token_ids[rollout.environment[0][1] :][0] for rollout in whole}
    assert all(played.reward is not None and played.failure is None for _, played in found)
    assert len(firsts) > 1 or len(whole) < 4, "later turns draw from streams of their own"
