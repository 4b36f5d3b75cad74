"""Which operation makes engine and learner differ in bfloat16, and how little they could: 3B shapes, layer by layer.

    python -m benchmarks.agreement_parts [--layers 36] [--tokens 64] [--check-layers 2]

Engine and learner read the same weights and compute the same sums, in other orders and with other roundings between them.
Here one model (Qwen2.5-3B's shapes, random weights as its initialisation makes them) is computed in many ways at once, on a
CPU: products are summed in float32 and rounded to bfloat16 where the way says so, as a GPU's matrix units do. The engine is
one way; every learner differs from it in one thing, and `nats` is the mean absolute difference of the log-probabilities of
tokens that the engine sampled. Beside it stands `float32`, a learner that rounds nothing at all: what is left there is the
engine's own rounding, which no learner can mend.

`--check-layers` runs transformers' own Qwen2 in bfloat16 at that depth on this CPU and says how far it is from float32
beside how far the emulated learner is: the emulation's own test. Writes `benchmarks/results/agreement_parts.json`.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor

from benchmarks._machine import machine
from benchmarks._model_shapes import SHAPES
from benchmarks._result_file import write_result

RESULT = Path(__file__).parent / "results" / "agreement_parts.json"
SHAPE = SHAPES["3b"]
HIDDEN, INNER = SHAPE["hidden_size"], SHAPE["intermediate_size"]
HEADS, KV_HEADS = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]
HEAD = HIDDEN // HEADS
THETA, EPSILON, STD = 1e6, 1e-6, 0.02


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute the model. A field that is true rounds to bfloat16 at that place.

    `products` are results of matrix products (and attention), which are stored in bfloat16; inputs of products always are,
    except where `exact`. `rope_steps` rounds each of rope's two products before their sum, `activation_steps` the
    gate's activation before it meets the other half, `probabilities` attention's before they meet the values. `halves`
    sums each product in two halves: another order.
    """

    name: str
    exact: bool = False
    residual: bool = True
    products: bool = True
    rope_steps: bool = False
    activation_steps: bool = False
    probabilities: bool = True
    logits: bool = True
    halves: bool = False


ENGINE = Way("engine")
WAYS = (
    ENGINE,
    replace(ENGINE, name="another order of sums", halves=True),
    replace(ENGINE, name="rope in steps", rope_steps=True),
    replace(ENGINE, name="activation in steps", activation_steps=True),
    replace(ENGINE, name="probabilities in float32", probabilities=False),
    replace(ENGINE, name="logits in float32", logits=False),
    replace(ENGINE, name="all of these", halves=True, rope_steps=True, activation_steps=True, probabilities=False),
    replace(ENGINE, name="residual in float32", residual=False),
    replace(ENGINE, name="residual and logits in float32", residual=False, logits=False),
    replace(ENGINE, name="products in float32", products=False),
    replace(ENGINE, name="residual, products and logits in float32", residual=False, products=False, logits=False),
    Way("float32", True, False, False, False, False, False, False),
)


def rounded(x: Tensor, where: Tensor | bool) -> Tensor:
    """`x` rounded to bfloat16 for the ways that are marked in `where` ([ways, 1, 1]), still as float32."""
    if isinstance(where, bool):
        return x.bfloat16().float() if where else x
    return torch.where(where.view(-1, *[1] * (x.dim() - 1)), x.bfloat16().float(), x)


class Ways:
    """All ways side by side: states are [ways, tokens, width]."""

    def __init__(self, ways: tuple[Way, ...]) -> None:
        self.ways = ways
        self.on = {
            field.name: torch.tensor([bool(getattr(way, field.name)) for way in ways])
            for field in fields(Way)
            if field.name != "name"
        }
        self.inputs = ~self.on["exact"]
        self._halves = self.on["halves"].nonzero().flatten()

    def product(self, x: Tensor, weight: Tensor, stored: Tensor) -> Tensor:
        """x @ weight.T with float32 sums; the result rounded where it is `stored` so."""
        x = rounded(x, self.inputs)
        result = x @ weight.T
        if len(self._halves):
            half, part = weight.shape[1] // 2, x[self._halves]
            result[self._halves] = part[..., :half] @ weight[:, :half].T + part[..., half:] @ weight[:, half:].T
        return rounded(result, stored)

    def norm(self, x: Tensor) -> Tensor:
        """RMS norm (its weights are one), computed in float32; its result is a product's input."""
        return rounded(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON), self.inputs)

    def rope(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """x: [ways, tokens, heads, width of a head]."""
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
        steps = self.on["rope_steps"]
        return rounded(rounded(x * cosine, steps) + rounded(turned * sine, steps), self.inputs)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of one sequence; [ways, tokens, heads x width]."""
        q, k, v = (item.transpose(1, 2) for item in (q, k, v))
        k, v = (item.repeat_interleave(HEADS // KV_HEADS, 1) for item in (k, v))
        scores = q @ k.transpose(-1, -2) / HEAD**0.5
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))  # divided after the product, as fused kernels do
        result = rounded(weights, self.on["probabilities"]) @ v / weights.sum(-1, keepdim=True)
        return rounded(result.transpose(1, 2).flatten(2), self.on["products"])

    def layer(self, x: Tensor, weights: dict[str, Tensor], cosine: Tensor, sine: Tensor) -> Tensor:
        on, normed = self.on, self.norm(x)
        q, k, v = (
            self.product(normed, weights[name], on["products"]).unflatten(-1, (-1, HEAD)) for name in ("q", "k", "v")
        )
        mixed = self.attention(self.rope(q, cosine, sine), self.rope(k, cosine, sine), rounded(v, self.inputs))
        x = rounded(x + self.product(mixed, weights["o"], on["products"]), on["residual"])
        normed = self.norm(x)
        gate, up = (self.product(normed, weights[name], on["products"]) for name in ("gate", "up"))
        inner = rounded(torch.nn.functional.silu(gate), on["activation_steps"]) * up
        return rounded(x + self.product(inner, weights["down"], on["products"]), on["residual"])


LAYER = {
    "q": (HEADS * HEAD, HIDDEN),
    "k": (KV_HEADS * HEAD, HIDDEN),
    "v": (KV_HEADS * HEAD, HIDDEN),
    "o": (HIDDEN, HEADS * HEAD),
    "gate": (INNER, HIDDEN),
    "up": (INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}


def layer_weights(layer: int) -> dict[str, Tensor]:
    """Random weights of one layer, bfloat16 values as float32; the same for the same layer."""
    random = torch.Generator().manual_seed(1000 + layer)
    return {name: _normal(shape, random) for name, shape in LAYER.items()}


def _normal(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    return torch.empty(shape).normal_(0.0, STD, generator=random).bfloat16().float()


def embedding() -> Tensor:
    return _normal((SHAPE["vocab_size"], HIDDEN), torch.Generator().manual_seed(1))


def rotation(tokens: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [tokens, 1, width of a head], rounded to bfloat16 as both ends keep them."""
    frequencies = THETA ** -(torch.arange(0, HEAD, 2).float() / HEAD)
    angles = torch.arange(tokens).float()[:, None] * torch.cat((frequencies, frequencies))
    return angles.cos().bfloat16().float()[:, None], angles.sin().bfloat16().float()[:, None]


@torch.no_grad()
def differences(layers: int, tokens: int, ways: tuple[Way, ...] = WAYS) -> tuple[dict[str, dict[str, float]], Tensor]:
    """Each way beside the first: nats a sampled token, and the relative difference of the last hidden state. The second
    result holds the log-probabilities of the sampled tokens, [ways, tokens]."""
    together, table = Ways(ways), embedding()
    random = torch.Generator().manual_seed(2)
    ids = torch.randint(0, SHAPE["vocab_size"], (tokens,), generator=random)
    cosine, sine = rotation(tokens)
    x = table[ids].expand(len(ways), -1, -1).clone()
    for layer in range(layers):
        began = time.monotonic()
        x = together.layer(x, layer_weights(layer), cosine, sine)
        print(f"layer {layer + 1} of {layers}: {time.monotonic() - began:.1f} s", flush=True)
    logits = [
        Ways((way,)).product(together.norm(x)[place : place + 1], table, torch.tensor([way.logits]))[0]
        for place, way in enumerate(ways)
    ]
    sampled = torch.multinomial(logits[0].softmax(-1), 1, generator=random)
    logprobs = torch.stack([row.log_softmax(-1).gather(1, sampled)[:, 0] for row in logits])
    found = {
        way.name: {
            "nats": float((logprobs[place] - logprobs[0]).abs().mean()),
            "hidden": float((x[place] - x[0]).norm() / x[0].norm()),
        }
        for place, way in enumerate(ways)
        if place
    }
    return found, logprobs


@torch.no_grad()
def check(layers: int, tokens: int) -> dict[str, float]:
    """Relative error of the last hidden state against float32: transformers' own model in bfloat16, and its emulation."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes: dict[str, Any] = SHAPE | {"num_hidden_layers": layers, "vocab_size": 1024}
    config = Qwen2Config(
        **sizes,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        rms_norm_eps=EPSILON,
        tie_word_embeddings=True,
    )
    model: Any = Qwen2ForCausalLM(config)
    for place, layer in enumerate(model.model.layers):
        weights = layer_weights(place)
        attention, mlp = layer.self_attn, layer.mlp
        targets = {"q": attention.q_proj, "k": attention.k_proj, "v": attention.v_proj, "o": attention.o_proj}
        targets |= {"gate": mlp.gate_proj, "up": mlp.up_proj, "down": mlp.down_proj}
        for name, target in targets.items():
            target.weight.copy_(weights[name])
            if target.bias is not None:
                target.bias.zero_()
    ids = torch.arange(tokens)[None]
    table = model.model.embed_tokens.weight.data.bfloat16().float()
    model.model.embed_tokens.weight.data.copy_(table)
    theirs = model.to(torch.bfloat16).model(ids).last_hidden_state[0].float()
    learner = Way("learner", rope_steps=True, activation_steps=True)
    together = Ways((WAYS[-1], learner))
    x = table[ids[0]].expand(2, -1, -1).clone()
    for place in range(layers):
        x = together.layer(x, layer_weights(place), *rotation(tokens))
    exact, ours = together.norm(x)
    size = exact.norm()
    return {
        "transformers": float((theirs - exact).norm() / size),
        "emulation": float((ours - exact).norm() / size),
        "between": float((theirs - ours).norm() / size),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--check-layers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "layers": options.layers, "tokens": options.tokens}
    if options.check_layers:
        result["check"] = {"layers": options.check_layers, **check(options.check_layers, 32)}
        print(result["check"], flush=True)
    result["beside_the_engine"], _ = differences(options.layers, options.tokens)
    for name, row in result["beside_the_engine"].items():
        print(f"{name:45} {row['nats']:.4f} nats, last hidden state {row['hidden']:.2%}")
    write_result(options.out, result)


if __name__ == "__main__":
    main()
