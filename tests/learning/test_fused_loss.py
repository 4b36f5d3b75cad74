import pytest
import torch

from pods_cluster.learning import fused_loss
from pods_cluster.learning.log_probs import LogProbLinear, TokenLogProbs

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def both_ways(dtype, device, tokens=37, hidden=16, vocabulary=301, bias=True, chunk=8):
    """Log-probabilities, entropies, loss and gradients: fused, and with the loss apart."""
    torch.manual_seed(0)
    layer = LogProbLinear(hidden, vocabulary, bias=bias).to(device, dtype)
    inputs = torch.randn(tokens, hidden, device=device).mul(3).to(dtype)
    targets = torch.randint(0, vocabulary, (tokens,), device=device)
    advantages, old = torch.randn(2, tokens, device=device)

    def token_loss(log_probs, rows):
        ratio = torch.exp(log_probs - (log_probs.detach() + 0.3 * old[rows]))
        return -torch.minimum(ratio * advantages[rows], ratio.clamp(0.8, 1.2) * advantages[rows])

    found = []
    for fused in (True, False):
        layer.zero_grad()
        free = inputs.clone().requires_grad_()
        log_probs, entropy, loss = layer(
            free, targets=targets, temperature=0.7, chunk=chunk, token_loss=token_loss, fused=fused
        )
        (loss * 2).backward()
        gradients = [parameter.grad for parameter in layer.parameters()]
        found.append([log_probs.detach(), entropy, loss.detach(), free.grad, *gradients])
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk", [1, 8, 100])
def test_equals_the_loss_apart_from_the_output_layer(bias, chunk):
    for fused, apart in zip(*both_ways(torch.float32, "cpu", bias=bias, chunk=chunk), strict=True):
        torch.testing.assert_close(fused, apart, rtol=1e-5, atol=1e-5)


def test_a_frozen_output_layer_gets_no_gradient():
    layer = LogProbLinear(4, 9, bias=False).requires_grad_(False)
    hidden = torch.randn(5, 4, requires_grad=True)
    args = {"targets": torch.arange(5), "token_loss": lambda log_probs, _: log_probs, "fused": True}
    layer(hidden, **args)[2].backward()
    assert layer.weight.grad is None
    assert hidden.grad.abs().sum() > 0


def test_without_gradient_it_gives_the_same_numbers():
    layer = LogProbLinear(4, 9)
    hidden, targets = torch.randn(5, 4), torch.arange(5)
    with torch.no_grad():
        log_probs, entropy, loss = layer(hidden, targets=targets, chunk=2, fused=True)
        apart = layer(hidden, targets=targets, chunk=2)
    assert loss is None
    torch.testing.assert_close((log_probs, entropy), apart[:2])


def test_chunks_are_equal_and_fit_the_room():
    hidden = torch.empty(1, 1)  # float32 on the CPU: 64 MB hold 106 tokens of 150,000 logits
    assert fused_loss.fused_chunk(1000, 150_000, hidden) == 106
    assert fused_loss.fused_chunk(1000, 50_000, hidden) == 256  # 4 chunks, not 3 of 320 and a rest of 40
    assert fused_loss.fused_chunk(10, 1000, hidden) == 128
    assert fused_loss.fused_chunk(0, 10**9, hidden) == 1


@GPU
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("vocabulary", [301, 20_000])
def test_triton_kernels_equal_the_formulas(dtype, tolerance, vocabulary):
    for fused, apart in zip(*both_ways(dtype, "cuda", vocabulary=vocabulary), strict=True):
        assert (fused.float() - apart.float()).norm() <= tolerance * apart.float().norm()


def test_the_entropy_apart_from_the_loss_carries_its_gradient():
    """Chunk by chunk against autograd over all logits; one that is only read changes no gradient."""
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(11, 6), torch.randn(17, 6), torch.randn(17)
    targets, scale = torch.randint(17, (11,)), 1 / 0.7
    factors = torch.rand(2, 11)

    def gradients(chunked, with_entropy):
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
        if chunked:
            log_probs, entropy = TokenLogProbs.apply(*leaves, targets, scale, 4)
        else:
            whole = torch.log_softmax(torch.nn.functional.linear(*leaves) * scale, dim=-1)
            log_probs, entropy = whole.gather(-1, targets[:, None]).squeeze(-1), -(whole.exp() * whole).sum(-1)
        total = (factors[0] * log_probs).sum() + ((factors[1] * entropy).sum() if with_entropy else 0.0)
        return torch.autograd.grad(total, leaves)

    for with_entropy in (False, True):
        for found, expected in zip(gradients(True, with_entropy), gradients(False, with_entropy), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
