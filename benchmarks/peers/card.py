"""Used memory and business of the cards while an arm runs, as nvidia-smi shows them: the same measure for every trainer."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

QUERY = [
    "nvidia-smi",
    "--query-gpu=index,memory.used,utilization.gpu",
    "--format=csv,noheader,nounits",
    "-lms",
    "250",
]


def own_card() -> int | None:
    """Index of the first card that a trainer sees; None where CUDA_VISIBLE_DEVICES names it otherwise."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    return int(first) if first.isdecimal() else None


class CardWatch:
    """Samples the trainer's card, or `every` one, four times a second until `stop`; nothing where there is no nvidia-smi."""

    def __init__(self, *, every: bool = False) -> None:
        self.samples: dict[int, list[tuple[float, float, float]]] = {}
        """By card: time, GB in use, share of the last period in which any kernel ran."""
        card = None if every else own_card()
        query = QUERY if card is None else [*QUERY, "-i", str(card)]
        self._process: subprocess.Popen[str] | None = None
        if shutil.which("nvidia-smi"):
            self._process = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                card, memory, busy = (float(part) for part in line.split(","))
            except ValueError:
                continue  # "[N/A]" and the like
            self.samples.setdefault(int(card), []).append((time.time(), memory * 2**20 / 1e9, busy / 100))

    def used_gb(self) -> float | None:
        """GB in use now, over the cards; None where it is not known."""
        return sum(rows[-1][1] for rows in self.samples.values()) if self.samples else None

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)

    def over(self, first: float, last: float) -> dict[str, Any]:
        """`peak_gb` over everything so far, over the cards; `busy` between two moments, their mean. With several, `each` has
        both by card. Empty without samples."""
        each = {card: _over(rows, first, last) for card, rows in sorted(self.samples.items())}
        if not each:
            return {}
        found: dict[str, Any] = {"peak_gb": round(sum(one["peak_gb"] for one in each.values()), 2)}
        busy = [one["busy"] for one in each.values() if "busy" in one]
        if busy:
            found["busy"] = round(sum(busy) / len(busy), 4)
        return found | ({"each": each} if len(each) > 1 else {})


def _over(rows: Sequence[tuple[float, float, float]], first: float, last: float) -> dict[str, float]:
    between = [busy for when, _, busy in rows if first <= when <= last]
    found = {"peak_gb": round(max(memory for _, memory, _ in rows), 2)}
    return found | ({"busy": round(sum(between) / len(between), 4)} if between else {})
