"""Tiny random models, as real as any other Hugging Face model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from pods_cluster.config import Config, build_config
from pods_cluster.quickstart.character_tokenizer import build_tokenizer
from pods_cluster.quickstart.tiny_model import ModelSize, build_model

if TYPE_CHECKING:
    from tests.generation.pool_parts import Reports

VOCABULARY = 40
EOS = 2
CONTEXT = 96

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    # random weights of the usual scale give an almost uniform distribution, which would hide errors
    "initializer_range": 0.3,
}


def three_letter_tokenizer() -> PreTrainedTokenizerFast:
    """Each of the models' tokens is three letters, so that a text may begin and end inside of them."""
    texts = ["".join(letters) for letters in itertools.product("abcd", repeat=3)][:VOCABULARY]
    backend = Tokenizer(models.WordLevel({text: index for index, text in enumerate(texts)}, unk_token=texts[0]))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


def first_end(made: PreTrainedTokenizerFast, ids: list[int], strings: Sequence[str]) -> int | None:
    """The number of tokens with which one of `strings` is whole, from the whole text at each token."""
    for count in range(1, len(ids) + 1):
        text = made.decode(ids[:count], skip_special_tokens=False, spaces_between_special_tokens=False)
        if any(string in text for string in strings):
            return count
    return None


def _qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**_SIZES, tie_word_embeddings=True))


def _llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_SIZES))


def _mistral_with_window() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**_SIZES, sliding_window=6, head_dim=8))


def _qwen2_with_mixed_layers() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**_SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1))


def _gemma2_with_softcap() -> PreTrainedModel:
    return Gemma2ForCausalLM(Gemma2Config(**_SIZES, head_dim=8, sliding_window=6, query_pre_attn_scalar=8))


ARCHITECTURES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2": _qwen2,
    "llama": _llama,
    "mistral_window": _mistral_with_window,
    "qwen2_mixed": _qwen2_with_mixed_layers,
    "gemma2": _gemma2_with_softcap,
}


def build(name: str, seed: int = 0) -> PreTrainedModel:
    """A float32 model with random weights drawn from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ARCHITECTURES[name]().eval()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def model() -> PreTrainedModel:
    return build("qwen2")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The quickstart's tokenizer with a smaller random decoder, saved as any model."""
    tokenizer = build_tokenizer()
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(folder)
    build_model(ModelSize(hidden=64, layers=2, heads=1, mlp=64, context=32), tokenizer, seed=0).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def make_config(model_folder: str) -> Callable[..., Config]:
    """A run's configuration around that model; keyword arguments replace fields of `generator`."""

    def make(**generator: Any) -> Config:
        reward = f"{Path(__file__).parent / 'rewards.py'}:"
        return build_config(
            {
                "model": {"path": model_folder, "dtype": "float32"},
                "data": {"path": "train.jsonl", "max_prompt_tokens": 16},
                "reward": [
                    {"name": f"{reward}first_token_is_digit", "style": "trl"},
                    {"name": f"{reward}length", "style": "trl", "weight": 0.0},
                ],
                "generator": {
                    "engine": "transformers",
                    "workers": 1,
                    "rollouts_per_prompt": 6,
                    "max_tokens": 8,
                    "max_sequences": 32,
                    "cpus_per_worker": 0.5,
                    "start_timeout": 120,
                    **generator,
                },
                "selector": {"keep": 2},
                "learner": {"prompts_per_step": 2},
                "run": {"name": "generation-test", "seed": 11},
                "cluster": {"placement_timeout": 60},
            }
        )

    return make


@pytest.fixture
def reports() -> Iterator[Reports]:
    """The reports to an actor of their own, which ends with them."""
    import ray  # not at the top: most tests here do without

    from tests.generation.pool_parts import Reports, start_collector

    handle = start_collector()
    yield Reports(handle)
    ray.kill(handle)
