"""The named actors of a run, from outside: its controller is started, and what a lost controller left is ended."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pods_cluster.actor_names import NAMESPACE, actor_name
from pods_cluster.config import Config
from pods_cluster.run.controller import Controller
from pods_cluster.run.errors import RunError


def start_controller(config: Config, *, resume: bool, after: str = "") -> Any:
    """Start the controller of a run on this node; `after`: why it goes on in place of another one.

    Raises RunError if a run of this name is alive on the cluster.
    """
    name = actor_name(config.run.name, "controller")
    try:
        return (
            ray.remote(Controller)
            .options(
                name=name,
                namespace=NAMESPACE,
                num_cpus=0,
                max_concurrency=64,
                scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
            )
            .remote(config, resume, after=after)
        )
    except ValueError as error:
        raise RunError(
            f"run.name: {config.run.name!r} is running on this cluster already; stop it, or choose another name"
        ) from error


def end_actors(run: str, timeout: float) -> None:
    """End every actor of a run whose controller is gone, by its name. Raises RunError when some are left."""
    deadline = time.monotonic() + timeout
    names = {actor_name(run, "controller")}
    while True:
        there: list[Any] = ray.util.list_named_actors(all_namespaces=True)
        names |= {
            actor["name"] for actor in there if actor["namespace"] == NAMESPACE and actor["name"].startswith(f"{run}/")
        }
        for name in list(names):
            try:
                ray.kill(ray.get_actor(name, NAMESPACE))
            except ValueError:  # this process knows too that it is gone, and the name is free
                names.remove(name)
        if not names:
            return
        if time.monotonic() > deadline:
            raise RunError(f"{', '.join(sorted(names))}: could not be ended within {timeout:g} s")
        time.sleep(0.2)
