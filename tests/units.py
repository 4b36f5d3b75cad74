"""How two pytest processes share the suite (pytest-xdist)."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.heavy import UNIT_OF


class Units(LoadScopeScheduling):
    """Whole units of `tests/heavy.py`, whole modules of the others, in the order of the collection."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.split("::", 1)[0]
        return f"unit {UNIT_OF[module]}" if module in UNIT_OF else module
