"""`python -m pods_cluster.client.sweep_run PARENT CORES CONFIG [--resume]`: `pods train` of one run of a sweep.

CORES are the cores that it and its workers keep to, as in `0,1,2`; empty: any.

It ends, with its state saved, when the sweep's process is gone: a sweep that was killed leaves no run behind.
"""

from __future__ import annotations

import os
import signal
import sys

from pods_cluster.scoring.scorer_keeper import die_with_parent

if __name__ == "__main__":
    _, parent, cores, *arguments = sys.argv
    if sys.platform == "linux":
        die_with_parent(signal.SIGTERM)
        if cores:
            os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    if os.getppid() != int(parent):
        sys.exit("the sweep's process is gone")
    from pods_cluster.client.cli import main  # what it imports counts the cores, for as many threads

    sys.argv = ["pods", "train", "--plain", *arguments]
    main()
