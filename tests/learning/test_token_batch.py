import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.learning.loss_inputs import loss_inputs
from pods_cluster.learning.microbatches import MicroBatch, PlannedSequence
from pods_cluster.learning.token_batch import pack, pad
from pods_cluster.types import FinishReason, GroupId, Locator, Rollout
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


@law(100)
@given(groups, st.booleans(), st.randoms(use_true_random=False))
def test_tokens_of_an_environment_are_read_and_enter_no_term_of_the_loss(step, packed, random):
    """Whatever the engine says of them: the tensors are those of the whole sequences without their entries."""
    rollouts, planned = {}, []
    for row, (prompt, completions) in enumerate(step):
        for index, completion in enumerate(completions):
            start, stop = sorted(random.choices(range(len(completion) + 1), k=2))
            locator = Locator("worker", GroupId(0, row), index)
            rollouts[locator] = Rollout(
                locator.group, index, tuple(prompt), completion, [random.uniform(-9, 0) for _ in completion],
                FinishReason.STOP, 0, 0, environment=((start, stop),) if stop > start else (),
            )  # fmt: skip
            planned.append(PlannedSequence(locator, index + 0.5, 1.0, 0.1 * row, len(prompt), len(completion)))
    batch = MicroBatch(tuple(planned), packed=packed)
    masked = loss_inputs(batch, rollouts)
    sampled = np.concatenate([np.zeros(0, bool), *(rollout.sampled() for rollout in rollouts.values())])
    for rollout in rollouts.values():
        rollout.environment = ()
    whole = loss_inputs(batch, rollouts)
    assert torch.equal(masked.batch.input_ids, whole.batch.input_ids)
    for name in ("targets", "positions", "rows"):
        assert torch.equal(getattr(masked.batch, name), getattr(whole.batch, name)[sampled])
    for name in ("advantages", "token_weights", "engine_log_probs"):
        assert torch.equal(getattr(masked, name), getattr(whole, name)[sampled])
