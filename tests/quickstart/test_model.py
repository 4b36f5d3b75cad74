"""The tokenizer and the decoder: what they are, and that they survive a round trip through a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from pods_cluster.quickstart.answer_batch import IGNORED, accuracy, encode, render_prompt
from pods_cluster.quickstart.character_tokenizer import build_tokenizer
from pods_cluster.quickstart.task import ALPHABET, make_splits, row
from pods_cluster.quickstart.tiny_model import ModelSize, build_model

TINY = ModelSize(hidden=64, layers=1, heads=1, mlp=64)


@pytest.fixture(params=["built", "loaded"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> PreTrainedTokenizerBase:
    built = build_tokenizer()
    if request.param == "built":
        return built
    built.save_pretrained(tmp_path)
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tmp_path)
    return loaded


def test_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer.encode(ALPHABET, add_special_tokens=False)
    assert len(set(ids)) == len(ALPHABET) == len(tokenizer) - 4
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == ALPHABET
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == ALPHABET


def test_special_tokens_are_distinct(tokenizer: PreTrainedTokenizerBase) -> None:
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_chat_template_adds_the_start_token_and_closes_answers(tokenizer: PreTrainedTokenizerBase) -> None:
    assert render_prompt(tokenizer, row(47, 38)) == "<bos>47+38="
    turns = [
        {"role": "system", "content": "add"},
        {"role": "user", "content": "47+38="},
        {"role": "assistant", "content": "85"},
    ]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "<bos>47+38=85<eos>"


def test_a_batch_learns_the_answer_and_the_end_token_only() -> None:
    tokenizer = build_tokenizer()
    batch = encode(tokenizer, [row(47, 38), row(99, 99)])
    assert batch.ids.shape == (2, 1 + 6 + 3 + 1)
    assert tokenizer.decode(batch.ids[0].tolist()) == "<bos>47+38=85<eos><pad>"
    learned = [[token for token in labels if token != IGNORED] for labels in batch.labels.tolist()]
    assert [tokenizer.decode(tokens) for tokens in learned] == ["85<eos>", "198<eos>"]


def test_default_decoder_has_about_a_million_parameters_and_a_common_head_size() -> None:
    size = ModelSize()
    model = build_model(size, build_tokenizer(), seed=0)
    assert 0.9e6 < sum(weight.numel() for weight in model.parameters()) < 1.2e6
    assert size.hidden // size.heads in {32, 64, 128}


def test_weights_come_from_the_seed_and_leave_the_callers_random_state() -> None:
    tokenizer = build_tokenizer()
    state = torch.random.get_rng_state()
    first, same, other = (build_model(TINY, tokenizer, seed).lm_head.weight for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_saved_model_loads_and_computes_the_same(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    model = build_model(TINY, tokenizer, seed=0)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = encode(tokenizer, [row(47, 38)]).ids
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id


def test_accuracy_agrees_with_generation() -> None:
    tokenizer = build_tokenizer()
    model = build_model(TINY, tokenizer, seed=0)
    rows = make_splits(seed=0).test[:8]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = encode(tokenizer, rows[:4])
    for _ in range(60):  # learns four of the eight sums by heart, so that both outcomes occur
        logits = model(batch.ids[:, :-1]).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch.labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    right = 0
    for item in rows:
        prompt = torch.tensor([tokenizer.encode(render_prompt(tokenizer, item), add_special_tokens=False)])
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False)
        text = tokenizer.decode(out[0, prompt.shape[1] :].tolist())
        right += text.removesuffix("<pad>") == f"{item['answer']}<eos>"
    measured = accuracy(model, encode(tokenizer, rows))
    assert 0 < right < 8
    assert measured.greedy == right / 8
    assert 0.0 <= measured.sampled <= 1.0
