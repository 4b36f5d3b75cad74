"""Fingerprints of sharded tensors: the shards' sums make the whole's, and what does not fit together equals nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.weights import fingerprint as module
from pods_cluster.weights.fingerprint import fingerprint
from pods_cluster.weights.sharded_fingerprint import Shard, combine_shard_sums, shard_sum, shard_sums
from tests.law import law

LAW = law(60)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cut(tensor: torch.Tensor, dim: int, sizes: list[int]) -> list[tuple[torch.Tensor, Shard]]:
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    shape = tuple(tensor.shape)
    return [(part, Shard(shape, dim, start)) for part, start in zip(tensor.split(sizes, dim), starts, strict=True)]


def sums(name: str, shards: list[tuple[torch.Tensor, Shard]]):
    return [shard_sums([(name, part, shard)]) for part, shard in shards]


@LAW
@given(
    dim=st.integers(0, 2),
    outer=st.integers(1, 4),
    inner=st.integers(1, 3),
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.int64]),
    words=st.integers(1, 40),
    shuffled=st.randoms(),
)
def test_shards_make_the_whole(dim, outer, inner, sizes, dtype, words, shuffled):
    unit = 8 // dtype.itemsize  # shards of whole words
    shape = [outer, outer, outer][:dim] + [sum(sizes) * unit] + [inner] * (2 - dim)
    tensor = random_tensor(tuple(shape), dtype)
    shards = cut(tensor, dim, [size * unit for size in sizes])
    shuffled.shuffle(shards)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CPU_WORDS", words)
        assert combine_shard_sums(sums("w", shards)) == {"w": fingerprint(tensor)}


def test_the_last_shard_may_end_within_a_word():
    tensor = random_tensor((7,), torch.bfloat16)
    assert combine_shard_sums(sums("b", cut(tensor, 0, [4, 3]))) == {"b": fingerprint(tensor)}


def test_replicas_count_once():
    tensor = random_tensor((4, 8), torch.float32)
    one, other = cut(tensor, 0, [2, 2])
    assert combine_shard_sums(sums("k", [one, one, other, other])) == {"k": fingerprint(tensor)}
    whole = (tensor, Shard((4, 8)))
    assert combine_shard_sums(sums("norm", [whole, whole])) == {"norm": fingerprint(tensor)}
    scalar = torch.tensor(2.0)
    assert combine_shard_sums(sums("scale", [(scalar, Shard(()))] * 2)) == {"scale": fingerprint(scalar)}


def test_a_flipped_bit_in_one_shard_changes_it():
    tensor = random_tensor((4, 8), torch.bfloat16)
    shards = cut(tensor, 1, [4, 4])
    changed = shards[1][0].clone()
    changed.view(torch.uint8)[2, 3] ^= 1
    assert combine_shard_sums(sums("w", [shards[0], (changed, shards[1][1])])) != {"w": fingerprint(tensor)}


def test_shards_that_changed_places_change_it():
    one, other = cut(random_tensor((4, 8), torch.float32), 0, [2, 2])
    assert combine_shard_sums(sums("w", [(other[0], one[1]), (one[0], other[1])])) != combine_shard_sums(
        sums("w", [one, other])
    )


@pytest.mark.parametrize(
    ("shards", "text"),
    [
        (lambda one, other, last: [one, last], "hold 4 on after 2"),
        (lambda one, other, last: [one, other], "hold 4 of 6"),
        (lambda one, other, last: [one, other, (other[0] + 1, other[1]), last], "copies of 2 to 4 along dimension 0"),
        (lambda one, other, last: [one, (other[0].double(), other[1]), last], "other dtypes or shapes"),
    ],
)
def test_what_does_not_fit_together_is_told(shards, text):
    found = combine_shard_sums(sums("w", shards(*cut(random_tensor((6, 8), torch.float32), 0, [2, 2, 2]))))
    assert text in found["w"]


def test_shards_that_share_a_word_are_refused():
    (one, place), *_ = cut(random_tensor((3, 3), torch.bfloat16), 1, [1, 2])
    with pytest.raises(ValueError, match="within a word"):
        shard_sum(one, place)


def test_a_shard_of_another_whole_is_refused():
    with pytest.raises(ValueError, match="is none of"):
        shard_sum(torch.zeros(2, 3), Shard((4, 5), 0, 0))
    with pytest.raises(ValueError, match="is none of"):
        shard_sum(torch.zeros(2, 4), Shard((4, 4), 0, 3))
