"""Names of a run's actors on a Ray cluster."""

from __future__ import annotations

NAMESPACE = "pods"
"""The Ray namespace of every actor."""


def actor_name(run: str, role: str, index: int = 0) -> str:
    """`<run>/<role>/<index>`; the role is controller, selector, generator or learner."""
    return f"{run}/{role}/{index}"
