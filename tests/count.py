"""`make test-count`: how many tests each folder holds."""

from __future__ import annotations

import contextlib
import io
from collections import Counter

import pytest


class Counting:
    def __init__(self) -> None:
        self.folders: Counter[str] = Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.folders.update(item.nodeid.split("/")[1].partition("::")[0] for item in session.items)


def main() -> int:
    counting = Counting()
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        code = pytest.main(["--collect-only", "-qqq", "-o", "addopts="], plugins=[counting])
    if code:
        print(told.getvalue())
    for folder, count in sorted(counting.folders.items()):
        print(f"{folder:<12} {count:>5}")
    print(f"{'all':<12} {counting.folders.total():>5}")
    return int(code)


if __name__ == "__main__":
    raise SystemExit(main())
