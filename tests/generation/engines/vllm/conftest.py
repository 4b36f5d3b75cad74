from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def vllm_is_there(request: pytest.FixtureRequest) -> None:
    """Modules that need vLLM import it here and not when tests are collected, which each pytest process does for all."""
    if request.node.get_closest_marker("vllm") is not None:
        pytest.importorskip("vllm", exc_type=ImportError)
