"""What holds for all tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_handles_left_behind() -> Iterator[None]:
    """Ray gives the actors of a process's next cluster the ids of the last one: a handle from there that is collected
    late would end its namesake. This is set up first and so runs last, when the module's cluster is gone.
    """
    yield
    gc.collect()
