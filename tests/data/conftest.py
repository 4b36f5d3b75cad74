"""Real tokenizers, small enough to train in a test, and a datasets cache that is thrown away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pods_cluster.config import Config, build_config

CORPUS = [
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May.",
    "How many clips did Natalia sell altogether? Solve the problem below. Reason step by step.",
    "Put your final answer within \\boxed{}. <think> </think> <answer> </answer> user assistant system",
]

# One start token at the head, roles in headers: the way of Llama 3. A system message is optional.
HEADER_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|head|>{{ message['role'] }}<|tail|>{{ message['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|tail|>{% endif %}"
)
# No start token; the tags of ChatML, a loop control, `tojson`, and a refusal, as real templates have them.
CHATML_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unknown role ' + message.role | tojson) }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>\\n' }}{%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets-cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def _save(folder: Path, special: list[str], template: str | None, bos: bool, **names: str) -> Path:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    if bos:
        start = (special[0], backend.token_to_id(special[0]))
        backend.post_processor = processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=[start])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **names)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`header` (adds a start token; its chat template writes one), `chatml` (no start token), `base` (no template)."""
    root = tmp_path_factory.mktemp("tokenizers")
    header = ["<|begin|>", "<|head|>", "<|tail|>", "<|eot|>"]
    chatml = ["<|im_start|>", "<|im_end|>"]
    return {
        "header": _save(root / "header", header, HEADER_TEMPLATE, True, bos_token="<|begin|>", eos_token="<|eot|>"),
        "chatml": _save(root / "chatml", chatml, CHATML_TEMPLATE, False, eos_token="<|im_end|>"),
        "base": _save(root / "base", header, None, True, bos_token="<|begin|>", eos_token="<|eot|>"),
    }


@pytest.fixture(scope="session")
def tokenizers(tokenizer_folders: dict[str, Path]) -> dict[str, Any]:
    """The same, as AutoTokenizer loads them."""
    return {name: AutoTokenizer.from_pretrained(folder) for name, folder in tokenizer_folders.items()}


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., Config]:
    """A run's configuration with these `data` and `model` fields."""

    def make(model: dict[str, Any] | None = None, seed: int = 0, **data: Any) -> Config:
        return build_config(
            {
                "model": {"path": "some/model"} | (model or {}),
                "data": {"path": str(tmp_path / "rows.jsonl")} | data,
                "reward": [{"name": "math_answer"}],
                "run": {"name": "test", "seed": seed},
            }
        )

    return make
