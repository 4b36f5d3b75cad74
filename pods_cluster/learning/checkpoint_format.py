"""What of a learner checkpoint's format is known without reading one (imports no torch)."""

from __future__ import annotations

from pods_cluster.config import LearnerConfig

FORMAT = 2
META_FILE = "learner.json"


def divisible(config: LearnerConfig) -> bool:
    """Whether the optimiser's state can be read by another number of ranks: 8-bit moments come in blocks that cannot
    be cut anywhere.
    """
    return config.optimizer != "adamw_8bit"
