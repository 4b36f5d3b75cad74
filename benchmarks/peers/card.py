"""Used memory and business of the card while an arm runs, as nvidia-smi shows them: the same measure for every trainer."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time

QUERY = [
    "nvidia-smi",
    "--query-gpu=memory.used,utilization.gpu",
    "--format=csv,noheader,nounits",
    "-lms",
    "250",
    "-i",
    "0",
]


class CardWatch:
    """Samples the first card four times a second until `stop`; nothing where there is no nvidia-smi."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, float, float]] = []
        """Time, GB in use, share of the last period in which any kernel ran."""
        self._process: subprocess.Popen[str] | None = None
        if shutil.which("nvidia-smi"):
            self._process = subprocess.Popen(QUERY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                memory, busy = (float(part) for part in line.split(","))
            except ValueError:
                continue  # "[N/A]" and the like
            self.samples.append((time.time(), memory * 2**20 / 1e9, busy / 100))

    def used_gb(self) -> float | None:
        """GB in use now; None where it is not known."""
        return self.samples[-1][1] if self.samples else None

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)

    def over(self, first: float, last: float) -> dict[str, float]:
        """`peak_gb` over everything so far, `busy` between two moments; empty without samples."""
        between = [busy for when, _, busy in self.samples if first <= when <= last]
        if not self.samples:
            return {}
        found = {"peak_gb": round(max(memory for _, memory, _ in self.samples), 2)}
        return found | ({"busy": round(sum(between) / len(between), 4)} if between else {})
