"""PODS cluster: reinforcement learning of language models with separately scaled generator and learner pools."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pods_cluster.api.result import TrainResult as TrainResult
    from pods_cluster.api.train import train as train

__version__ = "0.1.0"

_ON_FIRST_USE = {"train": "pods_cluster.api.train", "TrainResult": "pods_cluster.api.result"}
"""Names that users import from here, and their modules: `import pods_cluster` loads nothing else."""


def __getattr__(name: str) -> Any:
    if name in _ON_FIRST_USE:
        return getattr(importlib.import_module(_ON_FIRST_USE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_ON_FIRST_USE])
