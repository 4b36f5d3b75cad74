"""`law(examples)`: hypothesis settings of a property test; `make check` tries fewer examples of each law."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

QUICK = "PODS_TEST_PURE"
"""Set in the environment while pytest runs with --pure."""
QUICK_EXAMPLES = 15


def law(examples: int, **fields: Any) -> settings:
    """Without a deadline for one example: a busy machine is no fault."""
    if os.environ.get(QUICK):
        examples = min(examples, QUICK_EXAMPLES)
    return settings(max_examples=examples, deadline=None, **fields)


def quick_laws() -> None:
    """Laws without settings of their own try fewer examples in this process, too."""
    settings.register_profile("quick", max_examples=QUICK_EXAMPLES, deadline=None)
    settings.load_profile("quick")
