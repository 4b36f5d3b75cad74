"""Reward functions that no module holds, as text that a configuration carries to the scorer processes of any node.

A closure, a lambda, or a function of a script or a notebook is pickled by value (cloudpickle): its code and what it reads
of its surroundings. The text is base64, so that it stands in `config.yaml` and a run resumes from its folder alone.
"""

from __future__ import annotations

import base64
import pickle
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

MAX_BYTES = 1 << 20
"""Size of a pickled function, compressed: it is written into the run's config.yaml and sent to every worker."""


class PickleError(ValueError):
    """A function that cannot be pickled, or not in `MAX_BYTES`; the text says why."""


def pickle_function(function: Callable[..., Any], own_module: str = "__main__") -> str:
    """Return the function as text. What `own_module` defines travels by value too. Raises PickleError."""
    import cloudpickle

    with _by_value(own_module):
        try:
            data = zlib.compress(cloudpickle.dumps(function, protocol=pickle.DEFAULT_PROTOCOL))
        except Exception as error:  # what a function holds may raise anything when it is pickled
            raise PickleError(f"{type(error).__name__}: {error}") from error
    if len(data) > MAX_BYTES:
        raise PickleError(
            f"it takes {len(data) / 2**20:.1f} MiB with what it holds, and {MAX_BYTES >> 20} MiB is the most"
        )
    return base64.b64encode(data).decode("ascii")


def unpickle_function(text: str) -> Callable[..., Any]:
    """Return the function of a text. Raises what unpickling raises: a module may be missing here."""
    return pickle.loads(zlib.decompress(base64.b64decode(text)))


@contextmanager
def _by_value(name: str) -> Iterator[None]:
    """Have what this module defines pickled by value; cloudpickle does so by itself for `__main__`."""
    import cloudpickle

    module = sys.modules.get(name)
    if module is None or name == "__main__" or name in cloudpickle.list_registry_pickle_by_value():
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)
