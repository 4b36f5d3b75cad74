"""The nodes under the workers: of which kind they are, and which of them, or of the workers' processes, are about to go."""

from __future__ import annotations

import signal
import threading
import time

NOT_A_KIND = ("ray.io/node-id", "ray.io/availability-zone", "ray.io/availability-region")
"""Labels that Ray gives to single nodes, and that say nothing about how fast they are."""


def node_labels() -> dict[str, str]:
    """Ray's labels of the node that this process runs on; none outside of Ray."""
    import ray

    labels = (ray.get_runtime_context().get_node_labels() or {}) if ray.is_initialized() else {}
    return {name: str(value) for name, value in labels.items()}


def node_kind() -> str:
    """Kind of the node that this process runs on: its labels, the type of its cards among them; "" outside of Ray."""
    labels = node_labels()
    return ", ".join(f"{key}: {labels[key]}" for key in sorted(labels) if key not in NOT_A_KIND)


def draining_nodes() -> dict[str, float | None]:
    """The Ray nodes that are about to go, by id: seconds that they have left (None: not told).

    A node says so when it gets SIGTERM (`ray start --block`, as KubeRay runs it), or `ray drain-node` and the autoscaler
    say it for the node. Ray offers this to its own libraries; where a release does not, no node is.
    """
    try:
        from ray._private.state import state

        found = state.get_draining_nodes()
    except Exception:
        return {}
    return {node: max(0.0, end / 1000 - time.time()) if end else None for node, end in found.items()}


def note_sigterm() -> threading.Event:
    """Set once this actor's process gets SIGTERM, as schedulers send it to all processes of a job. The process serves on, to
    be drained; a second SIGTERM ends it, as Ray's own handler does. Outside of an actor nothing changes.
    """
    import ray

    told = threading.Event()
    in_actor = ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
    if in_actor and threading.current_thread() is threading.main_thread():
        before = signal.getsignal(signal.SIGTERM)

        def note(*_: object) -> None:
            told.set()
            signal.signal(signal.SIGTERM, before)

        signal.signal(signal.SIGTERM, note)
    return told
