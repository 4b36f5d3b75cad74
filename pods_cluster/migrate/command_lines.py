"""Reading of other trainers' command lines: hydra overrides, and flags with their values."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import yaml

from pods_cluster.config import ConfigError


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Read the words of a verl command (`python3 -m verl.trainer.main_ppo data.train_batch_size=256 …`).

    Hydra's `+`, `++` and `~` are taken off. Words before the first override, and a redirection at the end, are passed
    over. Raises ConfigError for a word that is no override, and where there is none.
    """
    found: dict[str, Any] = {}
    for word in words:
        if word in (";", "|", "&&", "&") or re.fullmatch(r"\d?>+.*", word):
            break
        key, separator, raw = word.partition("=")
        key = key.lstrip("+~")
        if not separator or not re.fullmatch(r"[A-Za-z_][\w@/]*(\.[\w@/]+)+", key):
            if not found:
                continue  # python3 -m verl.trainer.main_ppo, PYTHONUNBUFFERED=1
            raise ConfigError(f"{word!r}: is no override of verl; write them as name=value, each one word of the shell")
        try:
            found[key] = yaml.safe_load(os.path.expandvars(raw)) if raw else None
        except yaml.YAMLError as error:
            raise ConfigError(f"{word!r}: the value cannot be read ({error}); quote it for the shell") from None
        if isinstance(found[key], str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", found[key]):
            found[key] = float(found[key])  # YAML 1.1 reads 1e-6 as a text
    if not found:
        raise ConfigError("pods import verl: no override was given; copy the words behind main_ppo: data.train_files=…")
    return found


def parse_flags(words: Sequence[str]) -> dict[str, Any]:
    """Read `--name value` pairs; words before the first flag are passed over. Raises ConfigError where there is none."""
    found: dict[str, Any] = {}
    name = None
    start = next((place + 1 for place in reversed(range(len(words))) if words[place].startswith("openrlhf.cli.")), 0)
    for word in words[start:]:
        if word in (";", "|", "&&", "&") or re.fullmatch(r"\d?>+.*", word):
            break
        if word.startswith("--") and len(word) > 2:
            name, separator, raw = word[2:].partition("=")
            found[name] = _value(raw) if separator else True
        elif name is not None:
            held = found[name]
            found[name] = (
                _value(word) if held is True else [*(held if isinstance(held, list) else [held]), _value(word)]
            )
    if not found:
        raise ConfigError(
            "pods import openrlhf: no flag was given; copy the words behind train_ppo_ray: -- --data.input_key …"
        )
    return found


def _value(word: str) -> Any:
    if re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", word):
        return float(word)
    try:
        return yaml.safe_load(word)
    except yaml.YAMLError:
        return word
