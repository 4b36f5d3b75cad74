"""The page's files, all from this package: ours, and the chart library."""

from __future__ import annotations

import gzip
import hashlib
import threading
from importlib import resources
from typing import NamedTuple

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PLOTLY = "plotly-basic.min.js"
"""Plotly.js as its npm package `plotly.js-basic-dist-min` ships it (MIT; plotly-LICENSE.txt lies beside it). The bundle
in the Python package `plotly` is four times as long: a browser works seconds on it before the first curve.
"""
FOREVER = "public, max-age=31536000, immutable"
ASK = "no-cache"


class Asset(NamedTuple):
    """A file as it is sent."""

    body: bytes
    packed: bytes
    """Its bytes, compressed with gzip."""
    etag: str
    media_type: str
    cache: str


class Assets:
    """Files under `static/` by name; they never change while the server runs."""

    def __init__(self) -> None:
        self._folder = resources.files("pods_cluster.dashboard") / "static"
        self._files = {
            entry.name: _asset(entry.read_bytes(), entry.name, ASK)
            for entry in self._folder.iterdir()
            if entry.is_file() and _suffix(entry.name) in TYPES and entry.name != PLOTLY
        }
        self._plotly: Asset | None = None
        self._lock = threading.Lock()

    def get(self, name: str) -> Asset | None:
        return self.plotly() if name == PLOTLY else self._files.get(name)

    def plotly(self) -> Asset:
        """The chart library, read and packed when it is first asked for."""
        with self._lock:
            if self._plotly is None:
                # its address carries its hash, so that a browser never asks again
                self._plotly = _asset((self._folder / PLOTLY).read_bytes(), PLOTLY, FOREVER, level=6)
            return self._plotly

    def page(self) -> Asset:
        """index.html, the chart library's hash written into its address."""
        version = self.plotly().etag.strip('"').encode()
        return _asset(self._files["index.html"].body.replace(b"PLOTLY_VERSION", version), "index.html", ASK)


def _suffix(name: str) -> str:
    return "." + name.rpartition(".")[2]


def _asset(body: bytes, name: str, cache: str, level: int = 9) -> Asset:
    packed = gzip.compress(body, level, mtime=0)
    return Asset(body, packed, '"' + hashlib.sha256(body).hexdigest()[:20] + '"', TYPES[_suffix(name)], cache)
