"""vLLM's engine arguments that follow from the number of places."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.config.vllm_options import VllmOptions, split_options
from pods_cluster.generation.engines.vllm.arguments import admission_portion, capture_sizes
from tests.law import law


@law(40)
@given(sequences=st.integers(1, 4096))
def test_graphs_reach_every_decoding_step_and_as_many_tokens_again(sequences: int) -> None:
    sizes = capture_sizes(sequences)
    assert sizes == sorted(set(sizes))
    assert sequences in sizes
    assert min(sizes) == 1
    assert sizes[-1] > 2 * sequences - max(8, sequences // 32)
    assert len(sizes) <= 40 + sequences // 16 + 33
    padding = [sizes[place + 1] - size for place, size in enumerate(sizes[:-1]) if size < sequences]
    assert max(padding, default=0) <= 16


def test_a_portion_is_a_share_of_the_places_on_a_gpu_and_a_place_on_a_cpu() -> None:
    assert admission_portion(VllmOptions(), 1024, gpu=True) == 64
    assert admission_portion(VllmOptions(), 8, gpu=True) == 1
    assert admission_portion(VllmOptions(), 1024, gpu=False) == 1
    assert admission_portion(VllmOptions(admit=300), 256, gpu=False) == 256


@pytest.mark.parametrize("value", [0, -3, 2.5, True, "all", None])
def test_a_portion_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"generator\.engine_options\.admit: .* must be auto, or a number of places"):
        split_options({"admit": value}, 1.0)
    with pytest.raises(ValueError, match=r"admit: 4 needs scheduler: pods"):
        split_options({"admit": 4, "scheduler": "vllm"}, 1.0)
