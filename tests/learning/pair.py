"""Two learner ranks as plain processes of their own: `python -m tests.learning.pair RANK PORT MODEL FOLDER`.

One pair does all that tests want of two ranks, because a process spends far more time on its imports than on that.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pods_cluster.learning import process_group

ROOT = Path(__file__).parents[2]
SECONDS = 400


def run_pair(model: Path, folder: Path) -> Sequence[Any]:
    """Start both, and load what each saved as `folder`/rank-<rank>.pt: {module: what it found}."""
    store = process_group.open_store("127.0.0.1", 2, 120)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    logs = [folder / f"rank-{rank}.log" for rank in range(2)]
    ranks: list[subprocess.Popen[bytes]] = []
    for rank, log in enumerate(logs):
        command = [sys.executable, "-m", "tests.learning.pair", str(rank), str(store.port), str(model), str(folder)]
        with log.open("w") as out:
            ranks.append(subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT))
    try:
        codes = [rank.wait(SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]


def main() -> None:
    from tests.learning import resharding, skipping, two_ranks

    rank, port, model, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    process_group.join(rank, 2, "127.0.0.1", port, store=None, timeout=120, collective_timeout=120)
    found = {
        "two_ranks": two_ranks.found_by(rank, model),
        "skipping": skipping.found_by(rank, model),
        "resharding": resharding.found_by(rank, model, folder),
    }
    torch.save(found, folder / f"rank-{rank}.pt")
    process_group.leave()


if __name__ == "__main__":
    main()
