import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.learning.token_batch import pack, pad
from tests.law import law

ids = st.lists(st.integers(0, 9), min_size=1, max_size=6)
completions = st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=4)
groups = st.lists(st.tuples(ids, completions), max_size=4)


def pairs_of(step):
    return [(prompt, completion) for prompt, completions in step for completion in completions]


@law(200)
@given(groups)
def test_a_pack_predicts_what_a_padded_batch_predicts(step):
    """Targets and rows are equal; at each position stands the token before the target, with its own place."""
    pairs = pairs_of(step)
    packed, padded = pack(pairs), pad(pairs)
    assert packed.targets.tolist() == padded.targets.tolist()
    assert packed.rows.tolist() == padded.rows.tolist()
    assert packed.tokens == sum(len(completion) for _, completion in pairs)
    places = [len(prompt) + i for prompt, completion in pairs for i in range(len(completion))]
    before = [
        (prompt + completion)[len(prompt) + i - 1] for prompt, completion in pairs for i in range(len(completion))
    ]
    assert (packed.position_ids[0][packed.positions] + 1).tolist() == places
    assert packed.input_ids[0][packed.positions].tolist() == before
    assert padded.input_ids.flatten()[padded.positions].tolist() == before


@law(200)
@given(groups)
def test_a_token_attends_to_its_own_sequence_up_to_itself(step):
    """The layout, read as a mask, gives every predicted token exactly the ids before it, in order."""
    pairs = pairs_of(step)
    batch = pack(pairs)
    allowed = mask_of(batch.layout)
    row = batch.input_ids[0]
    contexts = [prompt + completion[:i] for prompt, completion in pairs for i in range(len(completion))]
    for position, context in zip(batch.positions.tolist(), contexts, strict=True):
        assert row[allowed[position]].tolist() == context
        assert batch.position_ids[0][allowed[position]].tolist() == list(range(len(context)))
        assert len(context) <= batch.layout.longest_context


def mask_of(layout):
    """bool [T, T]: which token (column) each token (row) attends to."""
    total = sum(layout.segments)
    allowed = torch.zeros(total, total, dtype=torch.bool)
    begin = 0
    for length in layout.segments:
        allowed[begin : begin + length, begin : begin + length] = torch.ones(length, length).tril().bool()
        begin += length
    row = sum(layout.prompts)
    for start, prompt, answer in zip(layout.prompt_starts.tolist(), layout.prompts, layout.answers, strict=False):
        allowed[row : row + answer, start : start + prompt] = True
        row += answer
    return allowed


def test_a_prompt_is_there_once_and_last_tokens_are_not():
    prompt = list(range(10))
    batch = pack([(prompt, [1, 2, 3]), (prompt, [4]), (prompt, [5, 6]), ([7], [8, 9])])
    assert batch.input_ids.tolist() == [[*prompt, 1, 2, 5, 7, 8]]
    assert batch.position_ids.tolist() == [[*range(10), 10, 11, 10, 0, 1]]
    assert batch.positions.tolist() == [9, 10, 11, 9, 9, 12, 13, 14]
    assert (batch.layout.prompts, batch.layout.answers) == ((10,), (3,))
    assert batch.layout.segments == (10, 2, 1, 2)


def test_a_dummy_batch_has_a_token_and_predicts_nothing():
    for batch in (pack([]), pad([])):
        assert batch.input_ids.shape == (1, 1)
        assert batch.tokens == 0
    assert np.array_equal(pack([]).layout.segment_starts, [0, 1])
