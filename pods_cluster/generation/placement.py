"""One generator worker as a Ray actor: its resources, its start, and calls to it that may find it gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Collection, Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from pods_cluster.actor_names import NAMESPACE, demand
from pods_cluster.config import Config
from pods_cluster.config.labels import describe_labels
from pods_cluster.generation.messages import GeneratorError, NodeLost, NoRoom, WorkerInfo
from pods_cluster.generation.worker import CONCURRENCY, GeneratorWorker
from pods_cluster.node_reach import elsewhere
from pods_cluster.stopped_process import Process, Unanswered, answer_of

RESOURCE = "pods_generator"
ANSWER_SECONDS = 15.0
"""A healthy worker answers `stats` at once; after twice this in a row without an answer it counts as hung."""


def worker_demand(config: Config, there: Mapping[str, float]) -> dict[str, float]:
    """Ray resources of one worker on a cluster that offers `there`."""
    generator = config.generator
    return demand(RESOURCE, generator.cpus_per_worker, generator.gpus(there.get("GPU", 0.0)), there)


def create_worker(
    config: Config, name: str, selector: Any, actor_options: Mapping[str, Any], avoid: Collection[str] = ()
) -> Any:
    """The handle of a new actor, on none of the nodes `avoid`; it is not waited for. Raises GeneratorError when the name is
    taken."""
    generator, there = config.generator, ray.cluster_resources()
    threads = generator.threads or max(1, int(generator.cpus_per_worker))
    options: dict[str, Any] = {
        "name": name,
        "namespace": NAMESPACE,
        "num_cpus": generator.cpus_per_worker,
        "num_gpus": generator.gpus(there.get("GPU", 0.0)),
        "resources": {RESOURCE: 1} if there.get(RESOURCE) else {},
        "label_selector": elsewhere(avoid, generator.place),
        "max_concurrency": CONCURRENCY,
        "max_restarts": 0,  # a restarted process would hold neither rollouts nor weights: `replace` does that
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}},
    }
    actor = ray.remote(GeneratorWorker).options(**{**options, **actor_options})
    try:
        return actor.remote(config, name, selector)
    except ValueError as error:
        raise GeneratorError(
            f"{name} cannot be started ({error}); if another run has this run.name, stop it or choose another name"
        ) from error


async def worker_placed(config: Config, name: str, handle: Any, seconds: float) -> None:
    """Wait until Ray has found the actor a place. Raises NoRoom when it has not, NodeLost, GeneratorError with another cause."""
    generator = config.generator
    try:
        await asyncio.wait_for(as_coroutine(handle.__ray_ready__.remote()), seconds)
    except TimeoutError:
        free, there = ray.available_resources(), ray.cluster_resources()
        where = f" on a node with {describe_labels(generator.place)} (generator.place)" if generator.place else ""
        raise NoRoom(
            f"{name} was not placed within {seconds:g} s: it needs {generator.cpus_per_worker:g} CPU(s){where}, the "
            f"cluster has {free.get('CPU', 0):g} of {there.get('CPU', 0):g} free, and {free.get('GPU', 0):g} GPU(s); "
            f"lower generator.workers, add nodes, or raise cluster.placement_timeout"
        ) from None
    except RayActorError as error:
        raise _died(name, error) from error


async def worker_started(config: Config, name: str, handle: Any) -> WorkerInfo:
    """Wait for the engine of a worker that has its place. Raises NodeLost, and GeneratorError with another cause."""
    generator = config.generator
    try:
        return await asyncio.wait_for(as_coroutine(handle.ready.remote()), generator.start_timeout + ANSWER_SECONDS)
    except TimeoutError:
        raise GeneratorError(
            f"{name} has not started within generator.start_timeout: {generator.start_timeout:g} s"
        ) from None
    except RayActorError as error:
        raise _died(name, error) from error
    except RayTaskError as error:
        raise GeneratorError(f"{name} could not start: {cause(error)}") from error


def _died(name: str, error: RayActorError) -> GeneratorError:
    kind = NodeLost if "its node has died" in str(error) else GeneratorError
    return kind(f"{name} died while it started: {cause(error)}")


async def as_coroutine(reference: Awaitable[Any]) -> Any:
    """The answer to a remote call, as a coroutine: asyncio's functions take no object reference."""
    return await reference


async def answer_or_none(reference: Awaitable[Any], timeout: float, process: Process | None = None) -> Any:
    """The answer, or None from a worker that is gone or silent: the pool's `check` finds and reports those. One whose
    `process` is known is waited for no longer than until that is seen to be stopped, or its node to be lost."""
    with contextlib.suppress(RayActorError, RayTaskError, Unanswered):
        return await answer_of(as_coroutine(reference), process, timeout)
    return None


def cause(error: BaseException) -> str:
    """The error's own text, without Ray's frames."""
    origin = error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) else error
    return " ".join(str(origin).split("\n\n")[0].splitlines()[:8]) or type(origin).__name__


def kill(handle: Any) -> None:
    """End the actor's process now."""
    with contextlib.suppress(Exception):
        ray.kill(handle, no_restart=True)
