"""Status of a live run, as its controller answers it to the command and the dashboard."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel

from pods_cluster.actor_names import actor_name
from pods_cluster.config import Config

if TYPE_CHECKING:
    from pods_cluster.run.loop import Run


class WorkerState(BaseModel):
    """One worker of a live run; a generator says how many tokens it has made, and the best tokens a second that it kept up,
    by which prompts are shared out."""

    name: str
    role: Literal["controller", "selector", "generator", "learner"]
    state: str
    node: str | None = None
    pid: int | None = None
    detail: str | None = None
    generated_tokens: int | None = None
    tokens_per_second: float | None = None


class LiveStatus(BaseModel):
    """The state of a live run as its controller reports it."""

    live: bool
    step: int | None = None
    version: int | None = None
    generators: int | None = None
    learners: int | None = None
    target_generators: int | None = None
    target_learners: int | None = None
    stopping: str | None = None
    note: str | None = None
    workers: list[WorkerState] = []


def live_status(config: Config, run: Run | None, stopping: str | None) -> LiveStatus:
    """The status of a run, None while it starts. `stopping` is why it was told to end, where it was.

    Call it in the process of the controller.
    """
    name = config.run.name
    controller = WorkerState(name=actor_name(name, "controller"), role="controller", state="alive", pid=os.getpid())
    if run is None:
        return LiveStatus(live=True, stopping=stopping, note="starting", workers=[controller])
    selector = WorkerState(name=actor_name(name, "selector"), role="selector", state="alive")
    generators = [
        WorkerState(
            name=worker,
            role="generator",
            state=generator.phase.value,
            node=generator.info.node if generator.info is not None else None,
            pid=generator.info.pid if generator.info is not None else None,
            generated_tokens=generator.generated_tokens,
            tokens_per_second=generator.rate,
        )
        for worker, generator in run.pool.states().items()
    ]
    learners = [
        WorkerState(
            name=worker,
            role="learner",
            state=f"rank {info.rank}",
            node=info.node,
            pid=info.pid,
            detail=f"{info.device}, {info.kernels} kernels, {'packed' if info.packed else 'padded'}",
        )
        for worker, info in zip(run.learners.names, run.learners.infos, strict=False)
    ]
    there = run.scaler.now()
    return LiveStatus(
        live=True,
        step=run.step,
        version=run.version,
        generators=there.serving,
        learners=run.scaler.training_ranks,
        target_generators=run.scaler.target.generators,
        target_learners=run.scaler.target.learners,
        stopping=run.stop_reason or stopping,
        note=run.recovering or run.scaler.note,
        workers=[controller, selector, *generators, *learners],
    )
