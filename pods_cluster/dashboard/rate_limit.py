"""A limit on how often one address may ask."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

MAX_ADDRESSES = 4096


class RateLimit:
    """A bucket of `burst` requests for each address, refilled with `rate` a second."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = rate
        self.burst = burst
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, address: str, cost: float = 1.0) -> float:
        """0 if the request may pass, otherwise the seconds to wait."""
        now = self._clock()
        left, then = self._buckets.pop(address, (self.burst, now))
        left = min(self.burst, left + (now - then) * self.rate)
        wait = 0.0 if left >= cost else (cost - left) / self.rate
        self._buckets[address] = (left if wait else left - cost, now)
        while len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        return wait

    def empty(self, address: str) -> float:
        """The seconds that an address with nothing left has to wait; 0 if it has something left. Takes nothing."""
        left, then = self._buckets.get(address, (self.burst, self._clock()))
        left = min(self.burst, left + (self._clock() - then) * self.rate)
        return 0.0 if left >= 1 else (1 - left) / self.rate
