"""Names of a run's actors on a Ray cluster, and what they ask of it."""

from __future__ import annotations

from collections.abc import Mapping

NAMESPACE = "pods"
"""The Ray namespace of every actor."""


def actor_name(run: str, role: str, index: int = 0) -> str:
    """`<run>/<role>/<index>`; the role is controller, selector, generator or learner."""
    return f"{run}/{role}/{index}"


def demand(resource: str, cpus: float, gpus: float, there: Mapping[str, float]) -> dict[str, float]:
    """Ray resources of one worker on a cluster that offers `there`; of `resource` only where that is offered."""
    asked = {"CPU": cpus, "GPU": gpus, resource: 1.0 if there.get(resource) else 0.0}
    return {name: amount for name, amount in asked.items() if amount}
