"""Stop strings that begin and end anywhere in tokens, against the text of the whole completion."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pods_cluster.generation.completion_text import CompletionText
from pods_cluster.generation.stop_strings import StopStrings, StopStringsByRequest, cut_at_stop
from pods_cluster.types import FinishReason, GroupId, Rollout
from tests.generation.conftest import first_end
from tests.law import law

TEXT = "so </answer> the answer is <answer>4</answer>\n\nObservation: a é 😀 👍🏽 ünder\n<|end|> stop ###"


@cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Byte-level pairs (GPT-2's, Qwen's) or pieces with `▁` and single bytes where a letter is unknown (Llama 2's)."""
    corpus = [TEXT, "the answer is a stop under the answer", "Observation: 123 456", "a b c d e f"] * 3
    if kind == "bytes":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, special_tokens=["<eos>"])  # pyright: ignore
        backend.train_from_iterator(corpus, trainer)
    else:
        letters = sorted({letter for letter in "▁".join(corpus) if ord(letter) < 128 and letter != " "} | {"▁"})
        pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), *letters]
        merges = [("▁", "t"), ("▁t", "h"), ("a", "n"), ("s", "w"), ("an", "sw"), ("answ", "e"), ("answe", "r"), ("<", "/"),
                  ("answer", ">"), ("▁", "answer"), ("o", "p"), ("▁", "▁")]  # fmt: skip
        merged = [left + right for left, right in merges]
        vocabulary = {piece: index for index, piece in enumerate(["<unk>", "<eos>", *pieces, *merged])}
        backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", clean_up_tokenization_spaces=False)


@law(60)
@given(st.data())
def test_a_completion_ends_with_the_token_that_completes_a_string(data: st.DataObject) -> None:
    made = tokenizer(data.draw(st.sampled_from(["bytes", "pieces"])))
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    if data.draw(st.booleans(), label="random tokens"):
        ids = [rng.randrange(len(made)) for _ in range(rng.randint(1, 60))]
    else:
        words = rng.choices(TEXT.split(" "), k=12)
        ids = made.encode(" ".join(words), add_special_tokens=False)
    whole = made.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False).replace("\ufffd", "")
    strings = []
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(max(1, len(whole)))
        strings.append(whole[start : start + rng.randint(1, 9)] or "x")
    stop = StopStrings(made, strings)
    found = next((count for count in range(1, len(ids) + 1) if stop.ends(ids[:count])), None)
    assert found == first_end(made, ids, strings)


def test_few_tokens_are_decoded() -> None:
    """Text is looked at only after tokens that can be the last one: at sixty thousand tokens a second that is the cost."""
    made = tokenizer("bytes")
    stop = StopStrings(made, ["</answer>"])
    possible = {made.decode([token]) for token in stop._last.nonzero()[0].tolist()}
    whole_characters = {text for text in possible if "\ufffd" not in text}
    assert "answer>" in whole_characters or ">" in whole_characters
    assert all(any("</answer>".endswith(text[:size]) for size in range(1, len(text) + 1)) for text in whole_characters)
    assert "the" not in possible


CUTS = [
    ("4</answer> so", ["</answer>"], "4", "4</answer>"),
    ("a STOP b END", ["END", "STOP"], "a ", "a STOP"),  # the one that is whole first, in whatever order
    ("xabc", ["abc", "bc"], "x", "xabc"),  # whole at the same letter: the first of the list, as in vLLM
    ("xabc", ["bc", "abc"], "xa", "xabc"),
    ("nothing", ["abc"], "nothing", "nothing"),
]
"""Text, stop strings, what is left without the string and with it; tests/generation/engines/vllm asks vLLM for the same."""


@pytest.mark.parametrize(("text", "strings", "without", "whole"), CUTS)
def test_the_text_is_cut_as_vllm_cuts_it(text: str, strings: list[str], without: str, whole: str) -> None:
    assert cut_at_stop(text, strings, include=False) == without
    assert cut_at_stop(text, strings, include=True) == whole


def test_rewards_get_the_text_and_the_learner_the_tokens() -> None:
    made = tokenizer("bytes")
    ids = made.encode("is 4</answer> so", add_special_tokens=False)

    def rollout(reason: FinishReason) -> Rollout:
        return Rollout(GroupId(0, 0), 0, (1,), list(ids), None, reason, 0, 0)

    read = CompletionText(made, ["</answer>"])
    assert read.of([rollout(FinishReason.STOP), rollout(FinishReason.LENGTH)]) == ["is 4", "is 4</answer> so"]
    assert CompletionText(made, ["</answer>"], True).of([rollout(FinishReason.STOP)]) == ["is 4</answer>"]


def test_an_engine_without_a_tokenizer_refuses_them() -> None:
    assert StopStringsByRequest(None).of(()) is None
    with pytest.raises(ValueError, match=r"stop_strings: \['x'\] need a tokenizer"):
        StopStringsByRequest(None).of(("x",))
