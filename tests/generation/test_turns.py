"""Rollouts of several turns on a real worker with the built-in engine: tokens, log-probabilities, limits, failures, aborts."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pods_cluster.config import Config
from pods_cluster.generation.messages import GroupRequest
from pods_cluster.generation.packed_rollouts import unpack
from pods_cluster.generation.worker import GeneratorWorker
from pods_cluster.types import FinishReason, GroupId, Prompt, Rollout, SamplingParams

PLAYED = Path(__file__).parents[1] / "environments" / "played.py"
COUNT = 6


@pytest.fixture(scope="module")
def with_environment(make_config: Callable[..., Config]) -> Callable[..., Config]:
    def make(name: str, reward: str = "environment", **environment: object) -> Config:
        tree = make_config(max_tokens=20).model_dump(mode="json")
        tree["environment"] = {"name": f"{PLAYED}:{name}", "turn_tokens": 4, **environment}
        tree["reward"] = [{"name": reward, "range": [-100, 100]}]
        # every letter but two ends a turn: turns of a random model are short then, and end by themselves
        tree["generator"]["stop_tokens"] = list(range(5, 20))
        tree["data"]["chat"] = False
        return Config.model_validate(tree)

    return make


def worker_of(config: Config) -> GeneratorWorker:
    worker = GeneratorWorker(config, "turns")
    worker.ready()
    worker.adopt_version(0)
    return worker


def prompt_of(config: Config, row: int = 0, **columns: object) -> Prompt:
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    return Prompt(0, row, "12+3=", tuple(tokenizer.encode("12+3=")), answer="15", columns=columns)


def sampling(config: Config, **changes: float) -> SamplingParams:
    generator = config.generator
    params = SamplingParams(max_tokens=generator.max_tokens, seed=3, stop_token_ids=generator.stop_ids)
    return dataclasses.replace(params, **changes)  # pyright: ignore[reportArgumentType]


def made(worker: GeneratorWorker, config: Config, prompt: Prompt, attempt: int = 0) -> list[Rollout]:
    group = GroupId(0, prompt.row, attempt)
    worker.submit([GroupRequest(group, prompt, tuple(range(COUNT)), COUNT, sampling(config))])
    wait(lambda: len(worker.sample(group)) == COUNT)
    stored = worker.sample(group)
    packed = unpack(worker.take([(group, range(COUNT))]))
    for sent, kept in zip(packed, stored, strict=True):
        assert (sent.token_ids, sent.environment) == (kept.token_ids, kept.environment)
        assert np.array_equal(sent.logprobs or [], kept.logprobs or [], equal_nan=True)
    return stored


def wait(until: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.01)


def test_turns_are_one_rollout_whose_log_probabilities_are_the_learners(
    with_environment: Callable[..., Config],
) -> None:
    config = with_environment("Counting", options={"turns": 3})
    worker = worker_of(config)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).eval()
    prompt = prompt_of(config)
    try:
        rollouts = made(worker, config, prompt)
        again = made(worker, config, prompt)
        stats = worker.stats()
        (row,) = worker.evaluate([prompt], sampling(config, temperature=0.0), 1)
    finally:
        worker.shutdown()
    whole = [rollout for rollout in rollouts if rollout.finish_reason is FinishReason.STOP]
    assert len(whole) >= 2
    for rollout in whole:
        assert rollout.turns == 3
        written = [
            tokenizer.decode(rollout.token_ids[start:stop]).replace(" ", "") for start, stop in rollout.environment
        ]
        assert written == ["1+", "2+"]
        turns = [rollout.token_ids[: rollout.environment[0][0]],
                 rollout.token_ids[rollout.environment[0][1] : rollout.environment[1][0]],
                 rollout.token_ids[rollout.environment[1][1] :]]  # fmt: skip
        assert all(
            (1 <= len(turn) <= 4 and turn[-1] in range(5, 20)) or turn[-1] == tokenizer.eos_token_id for turn in turns
        )
        assert rollout.reward is not None
        assert rollout.reward_parts == {"environment": rollout.reward}
        assert rollout.spans == ((0, rollout.sampled_tokens),)
        assert rollout.prompt_ids == prompt.token_ids
    for rollout in rollouts:
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.token_ids]])
        with torch.no_grad():
            predicted = torch.log_softmax(model(ids).logits[0, len(rollout.prompt_ids) - 1 : -1].float(), -1)
        expected = predicted.gather(-1, ids[0, len(rollout.prompt_ids) :, None])[:, 0].numpy()
        mine = rollout.sampled()
        assert np.isnan(np.array(rollout.logprobs)[~mine]).all()
        np.testing.assert_allclose(np.array(rollout.logprobs)[mine], expected[mine], atol=1e-4)
    assert [rollout.token_ids for rollout in again] == [rollout.token_ids for rollout in rollouts], "made again alike"
    firsts = {tuple(r.token_ids[r.environment[0][1] : r.environment[0][1] + 1]) for r in whole}
    assert firsts, "later turns draw from streams of their own"
    assert stats.turns["turns/rollouts"] == 2 * COUNT
    assert stats.turns["turns/total"] == 2 * sum(rollout.turns for rollout in rollouts)
    assert stats.turns["tokens/environment"] == 2 * sum(rollout.environment_tokens for rollout in rollouts)
    assert row.samples[0].reward is not None


def test_limits_of_turns_and_seconds_cut_a_rollout(with_environment: Callable[..., Config]) -> None:
    for limits, most in (({"max_turns": 2}, 2), ({"max_seconds": 1e-6}, 1)):
        config = with_environment("Counting", options={"turns": 99}, **limits)
        worker = worker_of(config)
        try:
            rollouts = made(worker, config, prompt_of(config))
        finally:
            worker.shutdown()
        assert {rollout.finish_reason for rollout in rollouts} == {FinishReason.LENGTH}
        assert max(rollout.turns for rollout in rollouts) == most
        assert all(rollout.reward is not None for rollout in rollouts), "what it gave for the turns that there were"


def test_failures_are_counted_and_never_a_number_and_aborts_end_at_once(
    with_environment: Callable[..., Config],
) -> None:
    config = with_environment("Faulty", timeout=5.0)
    worker = worker_of(config)
    try:
        rollouts = {
            way: made(worker, config, prompt_of(config, row, way=way)) for row, way in enumerate(["raise", "die"])
        }
        failures = worker.stats().scorers
        endless = made(worker, config, prompt_of(config, 3, way="go on"))
        group = GroupId(0, 7)
        slow = prompt_of(config, 7, way="hang")
        worker.submit([GroupRequest(group, slow, tuple(range(COUNT)), COUNT, sampling(config))])
        time.sleep(0.3)
        worker.abort(group)
        wait(lambda: len(worker.sample(group)) == COUNT)
        aborted = worker.sample(group)
        worker.submit([GroupRequest(GroupId(0, 8), prompt_of(config, 8, way="hang"), (0, 1), 2, sampling(config))])
        worker.drop([GroupId(0, 8)])
        worker.begin_again(None, 30.0)
    finally:
        worker.shutdown()
    assert {rollout.finish_reason for rollout in endless} == {FinishReason.LENGTH}
    assert all(len(rollout.token_ids) <= config.generator.max_tokens for rollout in endless)
    assert any(rollout.turns > 2 for rollout in endless)
    assert failures is not None
    ended = {way: [r for r in made if r.finish_reason is not FinishReason.LENGTH] for way, made in rollouts.items()}
    for way, words in (("raise", "environment: error: step(): ValueError"), ("die", "environment: died: its process")):
        assert ended[way]
        assert all(r.reward is None and r.reward_errors[0].startswith(words) for r in ended[way])
    counts = {kind.value: count for kind, count in failures.failures["environment"].items() if count}
    assert counts == {"error": len(ended["raise"]), "died": len(ended["die"])}
    assert failures.missing == len(ended["raise"]) + len(ended["die"])
    assert failures.pending == 0
    assert any(rollout.finish_reason is FinishReason.ABORT for rollout in aborted)
