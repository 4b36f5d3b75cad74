"""Packing rollouts for the learner loses nothing that it reads."""

from __future__ import annotations

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.generation.packed_rollouts import pack, unpack
from pods_cluster.types import FinishReason, GroupId, Rollout

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=12)


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    ids = draw(tokens)
    width = draw(st.sampled_from([32, 64]))
    logprobs = st.lists(st.floats(-80, 0, width=width), min_size=len(ids), max_size=len(ids))
    return Rollout(
        group=GroupId(draw(st.integers(0, 3)), draw(st.integers(0, 9)), draw(st.integers(0, 2))),
        index=draw(st.integers(0, 63)),
        prompt_ids=tuple(draw(st.sampled_from([(1, 2, 3), (4,), ()]))),
        token_ids=ids,
        logprobs=draw(st.none() | logprobs),
        finish_reason=draw(st.sampled_from(FinishReason)),
        first_version=draw(st.integers(-1, 9)),
        last_version=draw(st.integers(0, 99)),
        reward=draw(st.none() | st.floats(-5, 5)),
        environment=draw(st.sampled_from([(), ((0, 1),), ((1, 3), (4, 9))])) if len(ids) > 8 else (),
    )


@given(st.lists(rollouts(), max_size=8))
def test_what_the_learner_reads_comes_back_exactly(given: list[Rollout]) -> None:
    packed = pickle.loads(pickle.dumps(pack(given)))
    assert unpack(packed) == given


def test_bytes_are_eight_a_token_and_a_little() -> None:
    ids = list(range(5000))
    scores = np.linspace(-3, 0, 5000).astype(np.float32).tolist()
    one = Rollout(GroupId(0, 1), 2, (1,) * 100, ids, scores, FinishReason.STOP, 3, 4, text="x" * 9999)
    assert 8 * 5000 <= pack([one]).nbytes < 8 * 5000 + 600


def test_what_is_not_here_is_named() -> None:
    absent = {(GroupId(0, 1), 5): "dropped"}
    assert pickle.loads(pickle.dumps(pack([], absent))).absent == absent
    assert unpack(pack([], absent)) == []
