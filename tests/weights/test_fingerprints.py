"""Fingerprints: exact on bytes, dtype, shape and place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from pods_cluster.weights import fingerprint as module
from pods_cluster.weights.fingerprint import WordSums, combined, difference, fingerprint, fingerprints, word_sum
from tests.law import law

LAW = law(50)
BYTES = st.binary(min_size=1, max_size=200)


def tensor_of(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def reference(data: bytes) -> int:
    """The definition in plain integers."""
    mask = (1 << 64) - 1
    total = 0
    for place in range(-(-len(data) // 8)):
        z = int.from_bytes(data[8 * place : 8 * place + 8], "little") ^ (place * 0x9E3779B97F4A7C15 & mask)
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        total += z ^ (z >> 31)
    return total & mask


@LAW
@given(BYTES)
def test_equals_its_definition(data):
    assert fingerprint(tensor_of(data)) == f"uint8[{len(data)}]:{reference(data):016x}"


@LAW
@given(st.binary(min_size=100, max_size=400), st.integers(1, 9))
def test_does_not_depend_on_how_it_was_cut(data, words):
    whole = fingerprint(tensor_of(data))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CPU_WORDS", words)
        assert fingerprint(tensor_of(data)) == whole


@LAW
@given(st.lists(st.binary(max_size=70), max_size=9), st.integers(1, 20))
def test_sums_of_tensors_that_are_gathered_are_those_of_each(contents: list[bytes], words: int) -> None:
    tensors = [tensor_of(data) for data in contents]
    gathered, alone = WordSums(gather=words), WordSums(gather=0)
    for tensor in tensors:
        gathered.add(tensor)
        alone.add(tensor)
    assert [value % (1 << 64) for value in gathered.values()] == [reference(data) for data in contents]
    assert gathered.values() == alone.values()


def test_parameters_of_a_model_are_gathered_exactly() -> None:
    torch.manual_seed(0)
    rows = torch.randn(40, 12).to(torch.bfloat16)
    shapes = [
        torch.randn(7, 3),
        rows,
        rows[4:20],
        rows[:, 2:5],
        torch.randn(5).to(torch.float16),
        torch.zeros(0),
        torch.ones(()),
    ]
    gathered = WordSums(gather=64)
    for tensor in shapes:
        gathered.add(tensor)
    assert gathered.values() == [int(word_sum(tensor)) for tensor in shapes]


@LAW
@given(BYTES, st.data())
def test_one_flipped_bit_changes_it(data, draw):
    tensor = tensor_of(data)
    place = draw.draw(st.integers(0, len(data) - 1))
    other = tensor.clone()
    other[place] ^= 1 << draw.draw(st.integers(0, 7))
    assert fingerprint(other) != fingerprint(tensor)


@LAW
@given(st.binary(min_size=2, max_size=200), st.data())
def test_swapped_values_change_it(data, draw):
    tensor = tensor_of(data)
    first, second = (draw.draw(st.integers(0, len(data) - 1)) for _ in range(2))
    assume(tensor[first] != tensor[second])
    other = tensor.clone()
    other[first], other[second] = tensor[second].item(), tensor[first].item()
    assert fingerprint(other) != fingerprint(tensor)


def test_words_that_differ_in_a_sign_alone_cannot_swap_places():
    tensor = torch.ones(4096, dtype=torch.bfloat16)
    seen = set()
    for place in range(3, 4096, 4):  # the last value of each 64-bit word: its sign is the word's top bit
        tensor[place] = -1
        seen.add(fingerprint(tensor))
        tensor[place] = 1
    assert len(seen) == 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_copies_are_equal_whatever_their_layout(dtype):
    tensor = torch.randn(37, 53).to(dtype)
    expected = fingerprint(tensor)
    assert fingerprint(tensor.clone()) == expected
    assert fingerprint(tensor.t().contiguous().t()) == expected
    padded = torch.zeros(37 * 53 + 3, dtype=dtype)
    padded[3:] = tensor.reshape(-1)
    assert fingerprint(padded[3:].view(37, 53)) == expected  # not aligned to a word
    assert fingerprint(torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point())) == expected


def test_dtype_and_shape_count():
    tensor = torch.randn(6, 4)
    others = [tensor.reshape(4, 6), tensor.reshape(24), tensor.view(torch.int32), tensor.to(torch.bfloat16)]
    assert len({fingerprint(tensor), *map(fingerprint, others)}) == 5


def test_bits_count_not_values():
    assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0]))
    nan = torch.tensor([float("nan")])
    assert fingerprint(nan) == fingerprint(nan.clone())


def test_scalars_and_empty_tensors_have_one():
    assert fingerprint(torch.tensor(1.5)).startswith("float32[]:")
    assert fingerprint(torch.zeros(0, 3)) != fingerprint(torch.zeros(3, 0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same():
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        tensor = (torch.randn(1001, 77) * 100).to(dtype)
        assert fingerprint(tensor.cuda()) == fingerprint(tensor)
        assert fingerprint(tensor.cuda().reshape(-1)[1:]) == fingerprint(tensor.reshape(-1)[1:])


def test_many_at_once_are_those_of_each():
    named = {"a": torch.randn(5), "b": torch.randn(3, 3).to(torch.bfloat16), "c": torch.zeros(0)}
    assert fingerprints(named) == {name: fingerprint(tensor) for name, tensor in named.items()}
    assert fingerprints({}) == {}


def test_a_tensor_may_change_once_the_next_is_asked_for():
    buffer = torch.zeros(8)

    def reused():
        for value in (1.0, 2.0):
            yield str(value), buffer.fill_(value)

    assert fingerprints(reused()) == {
        "1.0": fingerprint(torch.full((8,), 1.0)),
        "2.0": fingerprint(torch.full((8,), 2.0)),
    }


def test_combined_ignores_order_and_sees_everything_else():
    parts = {"a": "x", "b": "y"}
    assert combined(parts) == combined({"b": "y", "a": "x"})
    assert len({combined(parts), combined({"a": "y", "b": "x"}), combined({"a": "x"}), combined({})}) == 4


def test_difference_names_tensors():
    named = {f"w{index}": torch.full((2,), float(index)) for index in range(9)}
    sent = fingerprints(named)
    assert difference(sent, dict(sent)) == ""
    changed = sent | fingerprints({"w3": torch.zeros(2)})
    assert difference(sent, changed).startswith("1 tensor differs: w3: sent float32[2]:")
    assert "w5: sent, not held" in difference(sent, {name: value for name, value in sent.items() if name != "w5"})
    assert "and 4 more" in difference(sent, {})


def test_a_tied_copy_may_be_held_but_not_a_stale_one():
    embedding = torch.randn(4, 4)
    sent = fingerprints({"embed": embedding})
    assert difference(sent, fingerprints({"embed": embedding, "head": embedding.clone()})) == ""
    assert "head: held" in difference(sent, fingerprints({"embed": embedding, "head": embedding + 1}))
