"""Which workers of a membership are neighbours: asked of each once in its life."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from pods_cluster.config import WeightsConfig
from pods_cluster.weights.relay_plan import Place, Seating, seat
from pods_cluster.weights.remote_calls import identity, reason_of, reply_to


class Neighbours:
    """Seats the workers of a membership by `weights.relay` (see there), for a transport that is decided."""

    def __init__(self, config: WeightsConfig, transport: str, ranks_per_worker: int) -> None:
        # NCCL takes one process a card; engines of several ranks have whole cards.
        by = "card" if transport == "nccl" and config.relay == "auto" else config.relay
        self._by = by if by in ("card", "node") and ranks_per_worker == 1 else ""
        self._ranks_per_worker = ranks_per_worker
        self._seconds = config.rendezvous_timeout
        self._places: dict[Any, Place] = {}

    async def seat(self, workers: Mapping[str, Any], sender: Any, token: str) -> Seating:
        """`sender` is learner rank 0. Who does not answer counts as alone: that it is gone shows when all meet."""
        if not self._by:
            return seat(list(workers), {}, ranks_per_worker=self._ranks_per_worker, token=token)
        everyone = {**workers, "": sender}
        unknown = {name: handle for name, handle in everyone.items() if identity(handle) not in self._places}
        asked = {name: reply_to(handle.weights_place.remote()) for name, handle in unknown.items()}
        if asked:
            await asyncio.wait(asked.values(), timeout=self._seconds)
        for name, call in asked.items():
            if not reason_of(call, self._seconds):
                self._places[identity(unknown[name])] = call.result()
        places = {name: self._places.get(identity(handle), Place()) for name, handle in everyone.items()}
        shared = {name: place.shared(self._by) for name, place in places.items()}
        return seat(list(workers), shared, shared[""], token=token)
