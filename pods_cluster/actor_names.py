"""Names of a run's Ray actors, and the resources that one of its workers asks for."""

from __future__ import annotations

from collections.abc import Mapping

NAMESPACE = "pods"
"""The Ray namespace of every actor."""


def actor_name(run: str, role: str, index: int = 0) -> str:
    """Return `<run>/<role>/<index>`; the role is controller, selector, generator or learner."""
    return f"{run}/{role}/{index}"


def demand(resource: str, cpus: float, gpus: float, there: Mapping[str, float]) -> dict[str, float]:
    """Return the Ray resources of one worker on a cluster that offers `there`.

    One unit of the custom `resource` (the pool's) is among them only where the cluster offers it.
    """
    asked = {"CPU": cpus, "GPU": gpus, resource: 1.0 if there.get(resource) else 0.0}
    return {name: amount for name, amount in asked.items() if amount}
