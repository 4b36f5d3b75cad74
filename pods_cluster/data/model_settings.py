"""Values in a model's settings files that no loader takes, told before anything is loaded. Pure: no file is read here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pods_cluster.data.errors import DataError


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _counts(value: Any) -> bool:
    """One for all layers, or one for each."""
    return _count(value) or (isinstance(value, list) and all(_count(item) for item in value))


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _token(value: Any) -> bool:
    """A token's text, or an object that has it."""
    return isinstance(value, str) or (isinstance(value, Mapping) and isinstance(value.get("content"), str))


def _token_id(value: Any) -> bool:
    # some models come with -1 for none
    return isinstance(value, int) and not isinstance(value, bool)


def _token_ids(value: Any) -> bool:
    return _token_id(value) or (isinstance(value, list) and all(_token_id(item) for item in value))


Kind = tuple[Callable[[Any], bool], str]
COUNT: Kind = _count, "a whole number from 1"
COUNTS: Kind = _counts, "a whole number from 1, or a list of them"
TEXT: Kind = _text, "a text"
TOKEN: Kind = _token, "a token's text"
OBJECT: Kind = (lambda value: isinstance(value, Mapping)), "an object"
BOOLEAN: Kind = (lambda value: isinstance(value, bool)), "true or false"
TOKEN_ID: Kind = _token_id, "a token's id"
TOKEN_IDS: Kind = _token_ids, "a token's id or a list of ids"

REQUIRED = dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"), COUNT)
"""Sizes of every decoder that has them: where they are there, they are not null."""
CONFIG: dict[str, Kind] = {
    **dict.fromkeys(("intermediate_size", "num_key_value_heads", "head_dim", "max_position_embeddings"), COUNTS),
    "hidden_act": TEXT,
    "tie_word_embeddings": BOOLEAN,
    "bos_token_id": TOKEN_IDS,
    "eos_token_id": TOKEN_IDS,
    "pad_token_id": TOKEN_ID,
    "auto_map": OBJECT,
    "text_config": OBJECT,
    "rope_scaling": OBJECT,
    "rope_parameters": OBJECT,
}
"""Of config.json; null is as good as absent."""
GENERATION: dict[str, Kind] = {"bos_token_id": TOKEN_IDS, "eos_token_id": TOKEN_IDS, "pad_token_id": TOKEN_ID}
"""Of generation_config.json."""
TOKENIZER: dict[str, Kind] = {
    **{f"{name}_token": TOKEN for name in ("bos", "eos", "pad", "unk")},
    "tokenizer_class": TEXT,
    "chat_template": ((lambda value: isinstance(value, str | list)), "a text, or a list of named templates"),
    "padding_side": ((lambda value: value in ("left", "right")), "left or right"),
    "truncation_side": ((lambda value: value in ("left", "right")), "left or right"),
}
"""Of tokenizer_config.json."""


def refuse_settings(settings: Mapping[str, Any], kinds: Mapping[str, Kind], file: str, path: str, field: str) -> None:
    """Raise DataError for a value of `file` that is of none of its kinds."""
    for name, (fits, meant) in kinds.items():
        value = settings.get(name)
        if value is not None and not fits(value):
            raise DataError(
                f"{field}: {name} in the {file} of {path!r} is {_shown(value)}; it must be {meant}, copy it again"
            )


def refuse_config(settings: Mapping[str, Any], path: str, field: str) -> None:
    """Raise DataError for a value of config.json, or of its `text_config`, that no decoder has."""
    refuse_settings(settings, CONFIG, "config.json", path, field)
    text = settings.get("text_config") or settings
    refuse_settings(text, CONFIG, "config.json", path, field)
    for name, (fits, meant) in REQUIRED.items():
        if not fits(value := text.get(name, 1)):
            raise DataError(
                f"{field}: {name} in the config.json of {path!r} is {_shown(value)}; it must be {meant}, copy it again"
            )
    width, heads, groups = (text.get(name) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    told = None
    if width and heads and width % heads and not text.get("head_dim"):
        told = f"hidden_size {width} in the config.json of {path!r} cannot be divided into num_attention_heads {heads}"
    elif heads and isinstance(groups, int) and heads % groups:
        told = f"num_attention_heads {heads} in the config.json of {path!r} cannot be divided by num_key_value_heads {groups}"
    if told is not None:
        raise DataError(f"{field}: {told}; copy it again")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
