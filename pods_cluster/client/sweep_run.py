"""`python -m pods_cluster.client.sweep_run PARENT CONFIG [--resume]`: `pods train` of one run of a sweep.

It ends, with its state saved, when the sweep's process is gone: a sweep that was killed leaves no run behind.
"""

from __future__ import annotations

import os
import signal
import sys

from pods_cluster.client.cli import main
from pods_cluster.scoring.scorer_keeper import die_with_parent

if __name__ == "__main__":
    _, parent, *arguments = sys.argv
    if sys.platform == "linux":
        die_with_parent(signal.SIGTERM)
    if os.getppid() != int(parent):
        sys.exit("the sweep's process is gone")
    sys.argv = ["pods", "train", "--plain", *arguments]
    main()
