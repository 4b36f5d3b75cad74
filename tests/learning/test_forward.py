from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from pods_cluster.learning.forward import Policy
from pods_cluster.learning.log_probs import LogProbLinear
from pods_cluster.learning.token_batch import pack, pad
from tests.learning.support import make_step, save_model, true_log_probs

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(model, chunk, temperature, chunked, *, packed=False, fused=False):
    """Policy and definition: the same log-probabilities, entropies and gradients."""
    _, rollouts = make_step(3)
    held = list(rollouts.values())
    policy = Policy(model, chunk=chunk, fused_loss=fused)
    assert policy.enable_chunked_head() is chunked
    if packed:
        assert policy.enable_packing() is None
    batch = (pack if packed else pad)([(r.prompt_ids, r.token_ids) for r in held])
    weights = torch.linspace(-1, 2, batch.tokens)
    log_probs, entropy, loss = policy(batch, temperature, lambda log_probs, tokens: weights[tokens] * log_probs)
    assert log_probs.dtype == entropy.dtype == torch.float32
    (3 * loss).backward()
    found = {name: gradient / 3 for name, gradient in gradients(model).items()}
    model.zero_grad()
    if packed:
        model.set_attn_implementation("sdpa")
    expected = torch.cat([true_log_probs(model, rollout, temperature) for rollout in held])
    (expected * weights).sum().backward()
    assert loss.item() == pytest.approx((expected * weights).sum().item(), rel=1e-4)
    torch.testing.assert_close(log_probs, expected, rtol=1e-4, atol=1e-5)
    truth = gradients(model)
    assert found.keys() == truth.keys()
    for name in truth:
        torch.testing.assert_close(found[name], truth[name], rtol=1e-3, atol=1e-4)
    first = held[0]
    ids = torch.tensor([[*first.prompt_ids, *first.token_ids]])
    logits = model(input_ids=ids).logits[0, len(first.prompt_ids) - 1] / temperature
    assert entropy[0].item() == pytest.approx(torch.distributions.Categorical(logits=logits).entropy().item(), rel=1e-4)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 1024])
@pytest.mark.parametrize("tied", [True, False])
def test_chunked_head_equals_the_definition(tmp_path, chunk, tied, fused):
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path, tied=tied))
    compare(model, chunk, 0.7, chunked=True, packed=chunk == 7, fused=fused)


@pytest.mark.parametrize("fused", [True, False])
def test_llama_with_a_bias_on_its_head(fused):
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.lm_head = torch.nn.Linear(32, 32, bias=True)
    torch.nn.init.normal_(model.lm_head.bias)
    compare(model, 5, 1.3, chunked=True, packed=True, fused=fused)


def test_a_model_that_caps_its_logits_goes_through_its_own_head():
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=32, final_logit_softcapping=2.0))
    compare(model, 5, 1.0, chunked=False)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("layout", [pad, pack])
def test_an_empty_batch_has_a_graph_and_zero_gradients(tmp_path, layout, fused):
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path))
    policy = Policy(model, fused_loss=fused)
    policy.enable_chunked_head()
    assert policy.enable_packing() is None
    log_probs, entropy, loss = policy(layout([]), 1.0, lambda log_probs, _: log_probs)
    assert log_probs.shape == entropy.shape == (0,)
    loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_the_output_layer_still_gives_logits():
    torch.manual_seed(0)
    layer = LogProbLinear(8, 5)
    hidden = torch.randn(3, 8)
    torch.testing.assert_close(layer(hidden), torch.nn.functional.linear(hidden, layer.weight, layer.bias))


@pytest.mark.parametrize("fused", [True, False])
def test_logits_of_one_chunk_only_exist_at_a_time(fused):
    """The largest tensor made in forward and backward is chunk x vocabulary, not tokens x vocabulary."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    tokens, vocabulary, chunk = 200, 1000, 16
    layer = LogProbLinear(4, vocabulary, bias=False)
    hidden = torch.randn(tokens, 4, requires_grad=True)
    with Watch():
        args = {"targets": torch.arange(tokens), "chunk": chunk, "fused": fused}
        layer(hidden, **args, token_loss=lambda log_probs, _: log_probs)[2].backward()
    assert largest == chunk * vocabulary
