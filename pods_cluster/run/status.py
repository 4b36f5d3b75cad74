"""What a live run says of itself to whoever asks its controller."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from pods_cluster.actor_names import actor_name
from pods_cluster.config import Config

if TYPE_CHECKING:
    from pods_cluster.run.loop import Run


def status(config: Config, run: Run | None, stopping: str | None) -> dict[str, Any]:
    """The fields of `LiveStatus` (see pods_cluster/client/controls.py) in plain values."""
    name = config.run.name
    workers: list[dict[str, Any]] = [
        {"name": actor_name(name, "controller"), "role": "controller", "state": "alive", "pid": os.getpid()},
        {"name": actor_name(name, "selector"), "role": "selector", "state": "alive"},
    ]
    if run is None:
        return {"stopping": stopping, "note": "starting", "workers": workers[:1]}
    for worker, (state, info) in run.pool.states().items():
        workers.append(
            {
                "name": worker,
                "role": "generator",
                "state": state,
                "node": info.node if info is not None else None,
                "pid": info.pid if info is not None else None,
            }
        )
    for worker, info in zip(run.learners.names, run.learners.infos, strict=False):
        workers.append(
            {
                "name": worker,
                "role": "learner",
                "state": f"rank {info.rank}",
                "node": info.node,
                "pid": info.pid,
                "detail": info.device,
            }
        )
    there = run.scaler.now()
    return {
        "step": run.step,
        "version": run.version,
        "generators": there.serving,
        "learners": there.learners,
        "target_generators": run.scaler.target.generators,
        "target_learners": run.scaler.target.learners,
        "stopping": run.stop_reason or stopping,
        "note": run.scaler.note,
        "workers": workers,
    }
