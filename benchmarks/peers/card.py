"""The cards: which a trainer may use, and their used memory and business while an arm runs, as nvidia-smi shows them."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

from pods_cluster.client.lanes import named_cards

QUERY = [
    "nvidia-smi",
    "--query-gpu=index,uuid,memory.used,utilization.gpu",
    "--format=csv,noheader,nounits",
    "-lms",
    "250",
]
LIST = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
LIST_SECONDS = 30.0


def visible_cards() -> list[str]:
    """The cards that a process started here may use: those that CUDA_VISIBLE_DEVICES names (ids or UUIDs), or all."""
    named = named_cards()
    if named is not None:
        return list(named)
    try:
        listed = subprocess.run(LIST, capture_output=True, text=True, timeout=LIST_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listed.splitlines() if line.strip().isdecimal()]


class CardWatch:
    """Samples the cards four times a second until `stop`: the same measure for every trainer. Nothing without nvidia-smi.

    All cards where none is named, or one by what nvidia-smi does not list (a part of a card).
    """

    def __init__(self, cards: Sequence[str] = ()) -> None:
        self.samples: dict[int, list[tuple[float, float, float]]] = {}
        """By card: time, GB in use, share of the last period in which any kernel ran."""
        self._cards = cards if all(card.isdecimal() or card.startswith("GPU-") for card in cards) else ()
        self._process: subprocess.Popen[str] | None = None
        if shutil.which("nvidia-smi"):
            self._process = subprocess.Popen(QUERY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                index, uuid, memory, busy = (part.strip() for part in line.split(","))
                sample = (time.time(), float(memory) * 2**20 / 1e9, float(busy) / 100)
            except ValueError:
                continue  # "[N/A]" and the like
            if not self._cards or any(card == index or uuid.startswith(card) for card in self._cards):
                self.samples.setdefault(int(index), []).append(sample)

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
