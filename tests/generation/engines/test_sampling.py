"""The sampler alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.generation.engines import sampling
from pods_cluster.generation.engines.sampling import restrict, sample, stream_key, uniforms
from pods_cluster.types import GroupId


def draw(logits: torch.Tensor, seed: int = 0, **change: float) -> tuple[np.ndarray, np.ndarray]:
    rows = len(logits)
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, **change}
    return sample(
        logits,
        temperature=np.full(rows, values["temperature"], np.float32),
        keys=np.array([stream_key(seed, GroupId(0, row), 0) for row in range(rows)], np.uint64),
        counters=np.zeros(rows, np.int64),
        top_p=np.full(rows, values["top_p"], np.float32),
        top_k=np.full(rows, values["top_k"], np.int64),
        min_p=np.full(rows, values["min_p"], np.float32),
    )


def test_streams_are_uniform_and_do_not_overlap() -> None:
    keys = np.array([stream_key(1, GroupId(0, row), index) for row in range(40) for index in range(25)], np.uint64)
    assert len(set(keys.tolist())) == 1000
    table = np.stack([uniforms(keys, np.full(1000, t, np.int64)) for t in range(50)])
    assert table.min() >= 0.0
    assert table.max() < 1.0
    counts, _ = np.histogram(table, bins=64, range=(0, 1))
    expected = table.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 5 * np.sqrt(126)
    # neighbours in a stream and between streams are uncorrelated (5 standard errors)
    limit = 5 / np.sqrt(table.size)
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < limit
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < limit


@given(st.integers(0, 2**63 - 1), st.integers(0, 1000), st.floats(0.01, 5.0))
def test_a_token_without_probability_is_never_drawn(seed: int, salt: int, temperature: float) -> None:
    logits = torch.randn(16, 12, generator=torch.Generator().manual_seed(salt)) * 10
    logits[:, ::2] = -torch.inf
    tokens, logprobs = draw(logits, seed, temperature=temperature)
    assert (tokens % 2 == 1).all()
    assert np.isfinite(logprobs).all()
    full = torch.log_softmax(logits / np.float32(temperature), -1)
    np.testing.assert_allclose(logprobs, full[torch.arange(16), torch.from_numpy(tokens)].numpy(), rtol=1e-5)


def test_one_certain_token_is_drawn_at_any_number() -> None:
    logits = torch.full((1000, 5), -torch.inf)
    logits[:, 4] = 3.0
    tokens, logprobs = draw(logits)
    assert (tokens == 4).all()
    assert (logprobs == 0.0).all()


def test_chunks_do_not_change_the_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(37, 50, generator=torch.Generator().manual_seed(0))
    whole = draw(logits, top_p=0.9)
    monkeypatch.setattr(sampling, "CHUNK_ELEMENTS", 200)
    parts = draw(logits, top_p=0.9)
    np.testing.assert_array_equal(whole[0], parts[0])
    np.testing.assert_allclose(whole[1], parts[1], rtol=1e-6)


def test_cuts_keep_what_they_say() -> None:
    p = torch.tensor([[0.4, 0.3, 0.2, 0.06, 0.04]])
    everything = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
    cases = [
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.4}, [0]),
        ({"top_p": 0.41}, [0, 1]),
        ({"top_p": 0.95}, [0, 1, 2, 3]),
        ({"min_p": 0.5}, [0, 1, 2]),
        ({"min_p": 0.2, "top_k": 4, "top_p": 0.5}, [0, 1]),
        ({"top_k": 1, "top_p": 0.01, "min_p": 1.0}, [0]),
        ({}, [0, 1, 2, 3, 4]),
    ]
    for change, kept in cases:
        cuts = {name: torch.tensor([[value]]) for name, value in {**everything, **change}.items()}
        scores = restrict(p.log(), **cuts)
        assert torch.isfinite(scores[0]).nonzero()[:, 0].tolist() == kept, change


def test_ties_of_the_greedy_choice_go_to_the_lowest_id() -> None:
    tokens, _ = draw(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]), temperature=0.0)
    assert tokens.tolist() == [1, 0]
