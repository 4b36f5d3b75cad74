"""Secrets in a configuration: found by the names of their fields and by the form of an address (pure)."""

from __future__ import annotations

import re
from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C where PyYAML was built with it
HIDDEN = "(hidden)"
_NAME = re.compile(
    r"token$|secret|password|passwd|passphrase|credential|api_?key|private_?key|authorization", re.IGNORECASE
)
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
"""User and password of an address, as in https://user:password@host."""


def without_secrets(tree: Any) -> Any:
    """A copy of a nested configuration for showing and for services outside: secrets are replaced by `(hidden)`."""
    if isinstance(tree, dict):
        return {
            key: HIDDEN if isinstance(value, str) and value and _NAME.search(str(key)) else without_secrets(value)
            for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [without_secrets(item) for item in tree]
    return _IN_ADDRESS.sub(HIDDEN, tree) if isinstance(tree, str) else tree


def holds_secrets(config_yaml: str) -> bool:
    """Whether the text of a configuration has anything that `without_secrets` would hide."""
    try:
        tree = yaml.load(config_yaml, Loader=_LOADER)
    except yaml.YAMLError:
        return True  # it cannot be told
    return without_secrets(tree) != _plain(tree)


def _plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    return [_plain(item) for item in tree] if isinstance(tree, list | tuple) else tree
