"""Two learner ranks as processes of their own: `python -m tests.learning.pair PORT MODEL FOLDER`.

One pair does all that tests want of two ranks, and the second is a fork of the first, because a process spends far more time
on its imports than on that.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pods_cluster.learning import process_group
from tests.warm_workers import assert_forkable

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
    command = [sys.executable, "-m", "tests.learning.pair", str(store.port), str(model), str(folder)]
    first = subprocess.Popen(command, env=env, start_new_session=True, stderr=subprocess.PIPE)
    try:
        _, error = first.communicate(timeout=SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(first.pid, signal.SIGKILL)  # with the second
    logs = [log.read_text()[-3000:] for log in folder.glob("rank-*.log")]
    assert first.returncode == 0, "\n".join([error.decode(), *logs])
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]


def main() -> None:
    from tests.learning import resharding, skipping, two_ranks

    port, model, folder = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    assert_forkable()
    gc.collect()
    gc.freeze()  # DeepSpeed collects at each start of ZeRO 3
    second = os.fork()
    rank = 0 if second else 1
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    process_group.join(rank, 2, "127.0.0.1", port, store=None, timeout=120, collective_timeout=120)
    found = {
        "two_ranks": two_ranks.found_by(rank, model),
        "skipping": skipping.found_by(rank, model),
        "resharding": resharding.found_by(rank, model, folder),
    }
    torch.save(found, folder / f"rank-{rank}.pt")
    process_group.leave()
    if second:
        _, status = os.waitpid(second, 0)
        assert os.waitstatus_to_exitcode(status) == 0, "the second rank failed"


if __name__ == "__main__":
    main()
