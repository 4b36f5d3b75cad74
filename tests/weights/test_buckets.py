"""The cut of a version into buckets, and a bucket's bytes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.weights import buckets
from pods_cluster.weights.protocol import TensorSpec, WeightSourceError, WeightUpdate, plan_buckets
from tests.law import law

LAW = law(50)
DTYPES = ["float32", "bfloat16", "int8", "float64"]
SPECS = st.lists(
    st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES)),
    max_size=12,
).map(lambda rows: tuple(TensorSpec(f"w{row}", tuple(shape), dtype) for row, (shape, dtype) in enumerate(rows)))


def sizes(specs: tuple[TensorSpec, ...], buckets: tuple[tuple[int, int], ...]) -> list[int]:
    return [sum(spec.nbytes for spec in specs[start:stop]) for start, stop in buckets]


@LAW
@given(SPECS, st.integers(1, 400), st.booleans())
def test_buckets_hold_every_tensor_once_and_in_order(specs, limit, overfill):
    buckets = plan_buckets(specs, limit, overfill=overfill)
    assert [index for start, stop in buckets for index in range(start, stop)] == list(range(len(specs)))
    assert all(start < stop for start, stop in buckets)


@LAW
@given(SPECS, st.integers(1, 400))
def test_a_bucket_exceeds_the_limit_only_by_being_one_tensor(specs, limit):
    buckets = plan_buckets(specs, limit)
    for (start, stop), size in zip(buckets, sizes(specs, buckets), strict=True):
        # Tensors without elements may ride along with a large one.
        assert size <= limit or sum(spec.nbytes > 0 for spec in specs[start:stop]) == 1
    for (start, stop), (_, after) in pairwise(buckets):
        assert sum(spec.nbytes for spec in specs[start : stop + 1]) > limit, (start, stop, after)


@LAW
@given(SPECS, st.integers(1, 400))
def test_overfilled_buckets_are_those_of_vllms_packed_transfer(specs, limit):
    """Its rule, as its consumer states it: take tensors until the size is past the limit."""
    expected, size, start = [], 0, 0
    for index, spec in enumerate(specs):
        size += spec.nbytes
        if size > limit:
            expected.append((start, index + 1))
            start, size = index + 1, 0
    if start < len(specs):
        expected.append((start, len(specs)))
    assert plan_buckets(specs, limit, overfill=True) == tuple(expected)


@LAW
@given(SPECS, st.integers(1, 400))
def test_what_is_packed_is_unpacked_bit_for_bit(specs, limit):
    generator = torch.Generator().manual_seed(0)
    for start, stop in plan_buckets(specs, limit):
        part = specs[start:stop]
        tensors = [
            torch.randint(0, 256, (spec.nbytes,), dtype=torch.uint8, generator=generator)
            .view(buckets.torch_dtype(spec))
            .view(spec.shape)
            for spec in part
        ]
        buffer = torch.empty(sum(spec.nbytes for spec in part), dtype=torch.uint8)
        buckets.pack(tensors, part, buffer)
        for (spec, found), tensor in zip(buckets.unpack(buffer, part), tensors, strict=True):
            assert found.dtype == tensor.dtype
            assert found.shape == spec.shape
            assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_a_tensor_unlike_its_spec_is_named():
    specs = (TensorSpec("model.up", (2, 3), "bfloat16"),)
    with pytest.raises(WeightSourceError, match=r"model\.up.*float32\[2, 3\].*bfloat16\[2, 3\]"):
        buckets.pack([torch.zeros(2, 3)], specs, torch.empty(12, dtype=torch.uint8))
    with pytest.raises(WeightSourceError, match="0 tensors where 1"):
        buckets.pack([], specs, torch.empty(12, dtype=torch.uint8))


def test_an_unknown_dtype_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"w: dtype 'complex64'.*bfloat16"):
        _ = TensorSpec("w", (1,), "complex64").nbytes


def test_bucket_bytes_must_be_positive():
    with pytest.raises(ValueError, match="bucket_bytes: 0"):
        plan_buckets((), 0)


def test_the_digest_tells_updates_apart():
    specs = (TensorSpec("a", (2,), "float32"), TensorSpec("b", (2,), "float32"))
    update = WeightUpdate(1, specs, ((0, 2),), 5.0)
    others = [
        WeightUpdate(2, specs, ((0, 2),), 5.0),
        WeightUpdate(1, specs, ((0, 1), (1, 2)), 5.0),
        WeightUpdate(1, specs[::-1], ((0, 2),), 5.0),
    ]
    assert buckets.digest(update) == buckets.digest(WeightUpdate(1, specs, ((0, 2),), 9.0))
    assert len({buckets.digest(update), *map(buckets.digest, others)}) == 4
