"""A model's own settings files: its context, which bounds the prompts of a run, and what cannot be saved again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pods_cluster.config import Config
from pods_cluster.data.errors import DataError
from pods_cluster.data.tokenizer import PromptTokenizer

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "min_p": None, "top_k": 50, "typical_p": 1.0}
"""Sampling flags of a generation configuration with the values that are as good as absent."""
_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx", "seq_length")


def model_context(path: str, revision: str | None = None, overrides: Mapping[str, Any] | None = None) -> int | None:
    """Return the context of a model in tokens, from its `config.json`; None where it has no limit, or no known one.

    A hub name is looked up in the local cache alone.
    """
    settings = _settings_of(path, "config.json", revision)
    text = settings.get("text_config")
    return _context_of({**(text if isinstance(text, Mapping) else settings), **(overrides or {})})


def prompt_limit(config: Config) -> int:
    """Return the longest prompt in tokens: `data.max_prompt_tokens`, or less where the context is shorter.

    Raises DataError when `generator.max_tokens` leaves no room for a prompt.
    """
    limits = (
        [model_context(config.model.path, config.model.revision, config.model.overrides)]
        if config.generator.engine != "paced"
        else []
    )
    limits.append(config.generator.engine_options.get("max_model_len") if config.generator.engine == "vllm" else None)
    known = [limit for limit in limits if isinstance(limit, int)]
    if not known:
        return config.data.max_prompt_tokens
    room = min(known) - config.generator.max_tokens
    if room < 1:
        raise DataError(
            f"generator.max_tokens: {config.generator.max_tokens} leaves no room for a prompt in the context of "
            f"{min(known)} tokens of {config.model.path!r}; lower it"
        )
    return min(config.data.max_prompt_tokens, room)


def unsavable_settings(path: str) -> list[str]:
    """Notes on generation settings of a model that transformers refuses to save, and a run changes: see
    `learning/savable_config.py`, which asks transformers itself."""
    settings = _settings_of(path, "generation_config.json")
    flags = [f"{name}: {settings[name]}" for name, default in SAMPLING.items()
             if settings.get(name) not in (None, default) and not settings.get("do_sample")]  # fmt: skip
    top_p = settings.get("top_p")
    notes = []
    if flags:
        notes.append(f"generation_config.json of {path!r} has {', '.join(flags)} without do_sample: true, which is set "
                     f"when the trained model is saved")  # fmt: skip
    if isinstance(top_p, int | float) and not 0 < top_p <= 1:
        notes.append(f"generation_config.json of {path!r} has top_p: {top_p}, outside (0, 1]; the trained model is saved "
                     f"with its special tokens alone")  # fmt: skip
    return notes


def without_end_token(path: str, tokenizer: PromptTokenizer) -> list[str]:
    """A note on a model for which nothing ends a completion."""
    special = getattr(tokenizer, "special_tokens", None)
    named = special.get("eos_token") if isinstance(special, Mapping) else getattr(tokenizer, "eos_token", None)
    files = ("generation_config.json", "config.json")
    if named is not None or any(_settings_of(path, name).get("eos_token_id") is not None for name in files):
        return []
    return [
        f"model.path: {path!r} has no end token (eos_token_id, eos_token): every completion goes on to generator.max_tokens; "
        f"name one in its tokenizer_config.json, or set generator.stop_strings"
    ]


def _settings_of(path: str, name: str, revision: str | None = None) -> Mapping[str, Any]:
    """Content of a model's settings file; empty where it cannot be read."""
    file = Path(path).expanduser() / name
    if not file.is_file():
        from huggingface_hub import try_to_load_from_cache

        try:
            found = try_to_load_from_cache(path, name, revision=revision)
        except ValueError:  # no name that a hub could have
            return {}
        if not isinstance(found, str):
            return {}
        file = Path(found)
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, Mapping) else {}


def _context_of(settings: Mapping[str, Any]) -> int | None:
    context = next((settings[name] for name in _NAMES if isinstance(settings.get(name), int)), None)
    if context is None or context < 1:
        return None
    scaling = settings.get("rope_scaling") or settings.get("rope_parameters")
    factor = scaling.get("factor") if isinstance(scaling, Mapping) else None
    return int(context * max(factor, 1.0)) if isinstance(factor, int | float) else context
