"""Settings that the tokenizer and the rows decide."""

from __future__ import annotations

from typing import Any

import pytest

from pods_cluster.config import Config, ConfigError, parse_config
from pods_cluster.data import DataError, resolved

BASE = """
model: {path: some/model}
data: {path: rows.jsonl}
reward: [{name: math_answer}]
run: {name: test}
"""


class Letters:
    """One token a letter."""

    chat_template = None
    bos_token_id = None

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]:
        return [ord(letter) for letter in text]

    def apply_chat_template(self, conversation: Any, **_: Any) -> Any:
        raise NotImplementedError


def config_of(*overrides: str) -> Config:
    return parse_config(BASE, overrides)


def test_texts_of_stop_tokens_become_ids() -> None:
    config = config_of("generator.stop_tokens=[a, 7, '!']")
    with pytest.raises(ValueError, match="are not ids yet"):
        _ = config.generator.stop_ids
    assert resolved(config, Letters(), rows=10).generator.stop_ids == (97, 7, 33)
    assert config_of().generator.stop_ids == ()
    with pytest.raises(
        DataError, match=r"generator\.stop_tokens: '</a>' is 4 tokens of 'some/model'.*name a text that is one"
    ):
        resolved(config_of("generator.stop_tokens=['</a>']"), Letters(), rows=10)


@pytest.mark.parametrize(("epochs", "steps"), [("1", 63), ("0.5", 32), ("3", 188), ("0.001", 1)])
def test_epochs_become_steps(epochs: str, steps: int) -> None:
    run = resolved(config_of(f"run.epochs={epochs}"), Letters(), rows=1000).run
    assert (run.steps, run.epochs) == (steps, None), "16 prompts a step"
    kept = resolved(config_of(f"run.epochs={epochs}"), Letters(), rows=None).run
    assert (kept.steps, kept.epochs) == (100, float(epochs)), "an evaluation knows no rows of training"
    assert resolved(config_of("run.steps=7"), Letters(), rows=1000).run.steps == 7


def test_a_warm_up_as_a_share() -> None:
    assert config_of("learner.warmup_ratio=0.1").learner.warmup(55) == 6
    assert config_of("learner.warmup_steps=3").learner.warmup(55) == 3
    with pytest.raises(ConfigError, match=r"learner\.warmup_ratio: 0\.1 and warmup_steps: 3 say the same"):
        config_of("learner.warmup_ratio=0.1", "learner.warmup_steps=3")
    with pytest.raises(DataError, match=r"learner\.warmup_steps: 30 is more than the 7 steps of run\.epochs: 0\.1"):
        resolved(config_of("run.epochs=0.1", "learner.warmup_steps=30"), Letters(), rows=1000)
    with pytest.raises(ConfigError, match=r"learner\.importance: sequence has no ratio of a token"):
        config_of("learner.importance=sequence", "learner.objective=cispo")
