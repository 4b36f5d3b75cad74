"""A user's file of rewards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scoring.support import USER


@pytest.fixture
def user(tmp_path: Path) -> str:
    """Path of a file of rewards that do what the completion says."""
    path = tmp_path / "user.py"
    path.write_text(USER)
    return str(path)
