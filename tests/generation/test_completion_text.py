"""The text that rewards see: special tokens stay, what only ends a text does not."""

from __future__ import annotations

import pytest

from pods_cluster.generation.completion_text import CompletionText
from pods_cluster.quickstart.character_tokenizer import build_tokenizer
from pods_cluster.scoring.builtin import think_answer_format
from pods_cluster.types import FinishReason, GroupId, Rollout

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
TAGGED = "<think>1</think><answer>2</answer>"
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.fixture(scope="module")
def tokenizer():
    made = build_tokenizer()
    made.add_special_tokens({"extra_special_tokens": [*TAGS, "<|tool|>", "<|eot_id|>"]})
    return made


@pytest.mark.parametrize(
    ("written", "reason", "text"),
    [
        (TAGGED, LENGTH, TAGGED),
        (TAGGED + "<eos>", STOP, TAGGED),
        (TAGGED + "<eos><pad><pad>", STOP, TAGGED),
        (TAGGED, STOP, TAGGED),  # `</answer>` is among the model's end tokens
        (TAGGED + "<|eot_id|>", STOP, TAGGED),  # a second end token of the model
        ("1<|tool|>", STOP, "1"),
        ("1<|tool|>", LENGTH, "1<|tool|>"),
        ("1<|tool|>2<eos>", STOP, "1<|tool|>2"),
        ("<|tool|><eos>", STOP, "<|tool|>"),
        ("12", STOP, "12"),  # an end token that is plain text stays
        ("<pad>1<eos>", STOP, "<pad>1"),
        ("<eos>", STOP, ""),
        ("", LENGTH, ""),
    ],
)
def test_special_tokens_stay_but_for_those_that_end_the_text(tokenizer, written, reason, text):
    ids = tokenizer.encode(written, add_special_tokens=False)
    rollout = Rollout(GroupId(0, 0), 0, (1,), ids, None, reason, 0, 0)
    assert CompletionText(tokenizer).of([rollout]) == [text]


def test_a_format_reward_sees_tags_that_are_special_tokens(tokenizer):
    ids = tokenizer.encode(TAGGED + "<eos>", add_special_tokens=False)
    rollout = Rollout(GroupId(0, 0), 0, (1,), ids, None, STOP, 0, 0)
    (text,) = CompletionText(tokenizer).of([rollout])
    assert think_answer_format(text) == 1.0
    assert rollout.token_ids == ids
