"""Two learner ranks as plain processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pods_cluster.learning import process_group

TESTS = Path(__file__).parents[1]
SECONDS = 400


def run_pair(module: str, folder: Path, *arguments: object) -> Sequence[Any]:
    """Run `python -m <module> RANK PORT ARGUMENTS…` twice at once, and load what each saved as `folder`/rank-<rank>.pt."""
    store = process_group.open_store("127.0.0.1", 2, 120)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    logs = [folder / f"rank-{rank}.log" for rank in range(2)]
    ranks: list[subprocess.Popen[bytes]] = []
    for rank, log in enumerate(logs):
        command = [sys.executable, "-m", module, str(rank), str(store.port), *map(str, arguments)]
        with log.open("w") as out:
            ranks.append(subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT))
    try:
        codes = [rank.wait(SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]
