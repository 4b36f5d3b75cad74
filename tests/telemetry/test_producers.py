"""Every metric of the catalogue has a place in the code that makes it."""

from __future__ import annotations

import re
from pathlib import Path

import pods_cluster
from pods_cluster.telemetry.catalog import registry

PACKAGE = Path(pods_cluster.__file__).parent
READERS = ("dashboard", "client")
BY_STAGE = {"timing_s/publish": 'clock("publish")', "timing_s/generate": 'clock("generate")',
            "timing_s/scale": 'clock("scale")'}  # fmt: skip


def test_every_metric_is_made_somewhere() -> None:
    source = "\n".join(
        path.read_text(encoding="utf-8")
        for path in PACKAGE.rglob("*.py")
        if path.name != "catalog.py" and path.relative_to(PACKAGE).parts[0] not in READERS
    )
    missing = []
    for metric in registry:
        # a place of a family is a field of an f-string, or one of its choices written out
        pattern = r"(?:\{[^}]*\}|[a-z]+)".join(map(re.escape, re.split(r"<[a-z_]+>", metric.name)))
        if not re.search(f'"{pattern}"', source) and BY_STAGE.get(metric.name, "\0") not in source:
            missing.append(metric.name)
    assert missing == []
