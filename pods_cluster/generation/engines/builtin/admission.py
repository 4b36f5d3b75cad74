"""Admission to the built-in engine: requests wait until the key/value cache has room for them at full length."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence, Set

from pods_cluster.generation.engines.cache_memory import KVBudget
from pods_cluster.types import RolloutRequest

VACANCY_SHARE = 8
"""While others decode, fewer vacancies than one in so many rows are left to add up: admission costs a prefill."""


class AdmissionQueue:
    """Requests that wait for a row, first come first served."""

    def __init__(self, budget: KVBudget) -> None:
        self._budget = budget
        self._waiting: deque[RolloutRequest] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, requests: Sequence[RolloutRequest]) -> None:
        self._waiting.extend(requests)

    def admit(self, running: int, longest: int) -> list[RolloutRequest]:
        """Take the requests that get a row now, beside `running` rows of which one may reach `longest` tokens."""
        admitted: list[RolloutRequest] = []
        for request in self._waiting:
            needed = max(longest, len(request.prompt_ids) + request.sampling.max_tokens)
            if running + len(admitted) >= self._budget.rows(needed):
                break
            longest = needed
            admitted.append(request)
        few = len(admitted) < self._budget.rows(longest) // VACANCY_SHARE
        if running and few and len(admitted) < len(self._waiting):
            return []
        for _ in admitted:
            self._waiting.popleft()
        return admitted

    def remove(self, keys: Set[str]) -> list[RolloutRequest]:
        """Take the requests of these keys out of the queue."""
        removed = [request for request in self._waiting if request.key in keys]
        for request in removed:
            self._waiting.remove(request)
        return removed

    def clear(self) -> None:
        self._waiting.clear()


def prompt_batches(
    requests: Sequence[RolloutRequest], tokens: int
) -> Iterator[tuple[list[RolloutRequest], dict[tuple[int, ...], int]]]:
    """Batches of requests with their distinct prompts, each prompt numbered within its batch.

    Requests of one prompt are together, short prompts come first, and a batch of more than one prompt is at most
    `tokens` in size, padding included.
    """
    by_prompt: dict[tuple[int, ...], list[RolloutRequest]] = {}
    for request in requests:
        by_prompt.setdefault(request.prompt_ids, []).append(request)
    batch: list[RolloutRequest] = []
    prompts: dict[tuple[int, ...], int] = {}
    for prompt in sorted(by_prompt, key=len):
        if prompts and (len(prompts) + 1) * len(prompt) > tokens:
            yield batch, prompts
            batch, prompts = [], {}
        prompts[prompt] = len(prompts)
        batch.extend(by_prompt[prompt])
    yield batch, prompts
