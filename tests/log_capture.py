"""`caplog` where pytest runs without its logging plugin, as `make check` has it: for the tests that ask for it alone.

The plugin goes through all loggers before and after each phase of each test, thousands of them once torch and its like are
imported.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from _pytest.logging import LogCaptureHandler, caplog_handler_key, caplog_records_key, catching_logs


@pytest.fixture
def caplog(request: pytest.FixtureRequest) -> Iterator[pytest.LogCaptureFixture]:
    """pytest's own fixture, with a handler for this test."""
    handler = LogCaptureHandler()
    request.node.stash[caplog_handler_key], request.node.stash[caplog_records_key] = handler, {}
    fixture = pytest.LogCaptureFixture(request.node, _ispytest=True)
    with catching_logs(handler):
        yield fixture
        fixture._finalize()
