import pytest
import torch
from torch import nn
from torch.nn import functional

from pods_cluster.learning.packed_attention import UnsupportedAttention, packed_attention
from pods_cluster.learning.token_batch import pack
from tests.learning.test_token_batch import mask_of

SEQUENCES = [
    ([1] * 5, [2] * 4),
    ([1] * 5, [3]),
    ([1] * 5, [4] * 7),
    ([5] * 3, [6] * 6),
    ([7] * 2, [8] * 3),
    ([7] * 2, [9] * 2),
]
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def compare(sequences, heads, kv_heads, dim, device, dtype, tolerance):
    """Output and gradients against attention under the layout's mask, in float64."""
    torch.manual_seed(0)
    layout = pack(sequences).to(device).layout
    total = sum(layout.segments)
    shapes = [(1, heads, total, dim), (1, kv_heads, total, dim), (1, kv_heads, total, dim)]
    inputs = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
    found, _ = packed_attention(nn.Module(), *inputs, None, layout=layout)
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in inputs]
    expected = functional.scaled_dot_product_attention(
        *exact, attn_mask=mask_of(layout), enable_gqa=heads != kv_heads
    ).transpose(1, 2)
    weight = torch.randn(expected.shape, dtype=torch.float64).to(dtype)
    (found * weight.to(device)).sum().backward()
    (expected * weight.double()).sum().backward()
    for ours, truth in zip([found, *[t.grad for t in inputs]], [expected, *[t.grad for t in exact]], strict=True):
        assert ours.dtype == dtype
        assert (ours.double().cpu() - truth).norm() <= tolerance * truth.norm()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_equals_attention_under_a_mask(kv_heads):
    compare(SEQUENCES, 4, kv_heads, 8, "cpu", torch.float32, 1e-5)


def test_without_shared_prompts_it_is_causal_attention_of_each_sequence():
    compare([([1] * 3, [2] * 4), ([5] * 2, [6] * 6), ([7], [8])], 2, 2, 8, "cpu", torch.float32, 1e-5)


@GPU
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(14, 2, 64), (16, 2, 128), (4, 4, 96)])
def test_flash_attention_merges_the_parts_of_one_softmax(heads, kv_heads, dim):
    long = [([1] * 300, [2] * n) for n in (200, 1, 90, 350)] + [([3] * 40, [4] * 130)] + [([5] * 77, [6] * 20)] * 3
    compare(long, heads, kv_heads, dim, "cuda", torch.bfloat16, 8e-3)
    compare(SEQUENCES, heads, kv_heads, dim, "cuda", torch.float32, 1e-4)


@pytest.mark.parametrize(
    ("options", "what"),
    [({"dropout": 0.1}, "dropout"), ({"sliding_window": 10}, "window of 10"), ({"softcap": 30.0}, "softcap")],
)
def test_what_it_cannot_compute_is_refused(options, what):
    layout = pack(SEQUENCES).layout
    tensor = torch.randn(1, 2, sum(layout.segments), 8)
    packed_attention(nn.Module(), tensor, tensor, tensor, None, layout=layout, sliding_window=layout.longest_context)
    with pytest.raises(UnsupportedAttention, match=what):
        packed_attention(nn.Module(), tensor, tensor, tensor, None, layout=layout, **options)
