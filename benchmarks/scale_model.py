"""A discrete-event model of a run: engines, selector, controller, learner ranks and the broadcast, as processes in simpy.

Rollouts are not computed and no weights move: each part takes the time that it was measured to take (`Parts`), in the
order in which the service does things. An engine is a processor that its rollouts share; groups are placed by the
service's own `assign`, held to its own bound of staleness, and trained oldest first.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import simpy

from benchmarks.scale_inputs import EngineSpeed, Outcome, Parts, Workload
from pods_cluster.generation.distribute import assign
from pods_cluster.generation.pool import WHOLE_GROUPS

FLUSH_SECONDS = 0.02
"""Rollouts that end within it leave their engine together (the reporter's pause)."""
TOGETHER_SECONDS = 0.01
"""Engines that have room within it are given groups together (the controller's watch over them)."""
SKIP = 3
"""First steps that are left out of the numbers: the queue fills."""


PARTS: tuple[str, ...] = ("selector", "controller", "plan", "fetch", "update", "calls", "publish")
"""Parts whose time at work is added up."""


class _Engine:
    """A processor that its rollouts share equally: they are ordered by the value of its clock (tokens) at their end."""

    def __init__(self, model: PipelineModel, speed: EngineSpeed) -> None:
        self.model, self.speed = model, speed
        self.places = speed.slots + math.ceil(speed.slots / 8)  # those that wait included
        self.clock = 0.0
        self.running = 0
        self.waiting: deque[tuple[float, int, int]] = deque()  # tokens, rollouts, group
        self.heap: list[
            tuple[float, int, int, float]
        ] = []  # the clock at the end, rollouts, group, the clock at the start
        self.outstanding = 0
        self.left: dict[int, int] = {}  # rollouts of a group that are still to end here
        self.busy = 0.0
        self.tokens = 0.0
        self.stale = False  # new weights have come
        self.wake = model.env.event()
        model.env.process(self._run())

    def submit(self, group: int, lengths: np.ndarray) -> None:
        size = self.model.work.bundle
        for start in range(0, len(lengths), size):
            part = lengths[start : start + size]
            self.waiting.append((float(part.mean()), len(part), group))
        self.left[group] = self.left.get(group, 0) + len(lengths)
        self.outstanding += len(lengths)
        self.model.outstanding += len(lengths)
        if not self.wake.triggered:
            self.wake.succeed()

    def _admit(self) -> None:
        while self.waiting and self.running < self.speed.slots:
            tokens, count, group = self.waiting.popleft()
            heapq.heappush(self.heap, (self.clock + tokens, count, group, self.clock))
            self.running += count

    def _run(self) -> Generator[Any, Any, None]:
        env = self.model.env
        while True:
            self._admit()
            if not self.heap:
                self.wake = env.event()
                yield self.wake
                continue
            if self.stale:
                self.stale = False
                yield env.timeout(self.model.parts.pause + self._context() / self.model.parts.recompute)
            began, pace = env.now, self.speed.step_seconds(self.running) / self.model.speed
            wait = max((self.heap[0][0] - self.clock) * pace, FLUSH_SECONDS * self.model.work.grain)
            until: Any = env.timeout(wait)
            if self.running < self.speed.slots:  # more may come, and all become slower
                self.wake = env.event()
                until = until | self.wake
            yield until if self.model.parts.share == 1 else until | self.model.other_speed
            passed = env.now - began
            self.clock += passed / pace
            self.busy += passed
            self.tokens += self.running * passed / pace
            self._take_finished()

    def _context(self) -> float:
        """Tokens of the rollouts in flight, their prompts included."""
        prompt = self.model.work.prompt_tokens
        return sum(count * (prompt + self.clock - began) for _, count, _, began in self.heap)

    def _take_finished(self) -> None:
        ended: list[int] = []
        while self.heap and self.heap[0][0] <= self.clock + 1e-9:
            _, count, group, _ = heapq.heappop(self.heap)
            self.running -= count
            self.outstanding -= count
            self.model.outstanding -= count
            self.left[group] -= count
            if not self.left[group]:
                del self.left[group]
                ended.append(group)
        if ended:
            self.model.report(ended)
        self.model.room(self)


class PipelineModel:
    """The run as a whole; `outcome` is what came of it."""

    def __init__(self, work: Workload, engine: EngineSpeed | Sequence[EngineSpeed], parts: Parts) -> None:
        self.work, self.parts = work, parts
        self.env = simpy.Environment()
        self.random = np.random.default_rng(work.seed)
        speeds = [engine] * work.generators if isinstance(engine, EngineSpeed) else list(engine)
        self.engines = [_Engine(self, speed) for speed in speeds]
        self.by_name = {str(place): item for place, item in enumerate(self.engines)}
        self.places, self.outstanding = sum(engine.places for engine in self.engines), 0
        self.mean = float(work.lengths(np.random.default_rng(0), 4096).mean())
        self.capacity = (work.staleness + 1) * work.prompts
        self.in_flight: dict[int, float] = {}  # groups in order of issue, and their tokens
        self.shards: dict[int, int] = {}
        self.ready: set[int] = set()
        self.missing = -1  # the group that the oldest step waited for last
        self.next_group = 0
        self.holding = False
        self.issue_asked = self.env.event()
        self.changed = self.env.event()
        self.speed = 1.0  # of engines on the learner's card
        self.other_speed = self.env.event()
        self.selectors = [simpy.Store(self.env) for _ in range(parts.selectors)]
        self.at_work: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self.marks: list[tuple[float, float, int, float, dict[str, float]]] = []
        for store in self.selectors:
            self.env.process(self._selector(store))
        if work.staleness:
            self.env.process(self._issue_continuously())
        self.finished = self.env.process(self._steps())

    def run(self) -> Outcome:
        """Let it run to the end of its steps."""
        self.env.run(until=self.finished)
        first, last = self.marks[min(SKIP, len(self.marks) - 2)], self.marks[-1]
        seconds = last[0] - first[0]
        steps = len(self.marks) - 1 - min(SKIP, len(self.marks) - 2)
        busy = {name: (last[4][name] - first[4][name]) / seconds for name in last[4]}
        busy["selector"] /= self.parts.selectors
        busy["controller"] /= self.parts.controllers
        busy["generator"] = (last[3] - first[3]) / seconds / len(self.engines)
        return Outcome(seconds / steps, (last[1] - first[1]) / seconds, (last[2] - first[2]) / seconds, busy)

    # Groups go out.

    def _issue_continuously(self) -> Generator[Any, Any, None]:
        """As `ContinuousIssue`: as many groups as there are free slots and places in the engines."""
        while True:
            free = 0 if self.holding else self.capacity - len(self.in_flight)
            places = self.places - self.outstanding
            count = free if self.work.batches else min(free, math.ceil(places / self.work.n))
            if count <= 0:
                self.issue_asked = self.env.event()
                yield self.issue_asked
                yield self.env.timeout(TOGETHER_SECONDS * self.work.grain)
                continue
            yield from self._issue(count)

    def _issue(self, count: int) -> Generator[Any, Any, None]:
        """Names the groups, divides them by the service's own rule, and sends them, at the controller's pace."""
        seconds = count * self.parts.controller_group / self.parts.controllers
        if seconds:
            self.at_work["controller"] += count * self.parts.controller_group
            yield self.env.timeout(seconds)
        n = self.work.n
        loads = {name: engine.outstanding * self.mean for name, engine in self.by_name.items()}
        whole = n <= self.engines[0].places / 2 and count < len(self.engines)
        whole = whole and self.capacity >= WHOLE_GROUPS * len(self.engines)
        spread = not self.work.staleness or not whole
        for share in assign([(n, self.mean)] * count, loads, spread=spread):
            group, self.next_group = self.next_group, self.next_group + 1
            lengths = self.work.lengths(self.random, n)
            if self.work.bundle > 1:
                lengths = np.sort(lengths)
            self.in_flight[group] = float(lengths.sum())
            self.shards[group] = len(share)
            for name, places in share.items():
                self.by_name[name].submit(group, lengths[list(places)])

    def room(self, engine: _Engine) -> None:
        """An engine's rollouts have ended: there may be room for a group."""
        if not self.issue_asked.triggered and engine.outstanding < engine.places:
            self.issue_asked.succeed()

    # Groups come back.

    def report(self, groups: list[int]) -> None:
        """A message of an engine to the selector that these groups belong to."""
        for place, store in enumerate(self.selectors):
            mine = [group for group in groups if group % len(self.selectors) == place]
            if mine:
                store.put(mine)

    def _selector(self, store: simpy.Store) -> Generator[Any, Any, None]:
        while True:
            groups = yield store.get()
            seconds = self.parts.selector_message + len(groups) * self.parts.selector_group
            if seconds:
                self.at_work["selector"] += seconds
                yield self.env.timeout(seconds)
            replace = 0
            for group in groups:
                self.shards[group] -= 1
                if self.shards[group]:
                    continue
                del self.shards[group]
                if self.work.no_signal and self.random.random() < self.work.no_signal:
                    del self.in_flight[group]
                    replace += 1
                else:
                    self.ready.add(group)
            if replace and not self.work.staleness:
                yield from self._issue(replace)
            if not self.issue_asked.triggered and replace:
                self.issue_asked.succeed()
            if not self.changed.triggered:
                self.changed.succeed()

    def _oldest(self) -> list[int] | None:
        """The step's groups, the oldest ones, once all of them are there."""
        if len(self.ready) < self.work.prompts or (self.missing in self.in_flight and self.missing not in self.ready):
            return None
        oldest = []
        for group in self.in_flight:
            if group not in self.ready:
                self.missing = group
                return None
            oldest.append(group)
            if len(oldest) == self.work.prompts:
                break
        return oldest

    # The learner's chain: fetch, update, publish.

    def _steps(self) -> Generator[Any, Any, None]:
        env, work, parts = self.env, self.work, self.parts
        self._mark(0)
        for step in range(1, work.steps + 1):
            if work.batches or not work.staleness:
                yield from self._issue(self.capacity - len(self.in_flight))
            while (chosen := self._oldest()) is None:
                self.changed = env.event()
                yield self.changed
            self.holding = work.batches
            kept = len(chosen) * work.m
            tokens = sum(self.in_flight[group] for group in chosen) * work.m / work.n
            yield from self._spend("plan", kept * parts.plan_rollout)
            per_rank = math.ceil(kept / parts.ranks)
            asked = min(len(self.engines), per_rank)
            carried = tokens / parts.ranks * parts.bytes_per_token / parts.link
            yield from self._spend("fetch", asked * parts.fetch_call + per_rank * parts.fetch_rollout + carried)
            self._set_speed(parts.share)
            yield from self._spend("update", parts.update(kept, tokens))
            self._set_speed(1.0)
            self.holding = True
            for group in chosen:
                del self.in_flight[group]
                self.ready.discard(group)
            calls = len(self.engines) * parts.calls_per_step * parts.controller_call / parts.controllers
            yield from self._spend("calls", calls)
            for engine in self.engines:
                engine.stale = True
            yield from self._spend("publish", parts.publish)
            self.holding = False
            if not self.issue_asked.triggered:
                self.issue_asked.succeed()
            self._mark(step)

    def _set_speed(self, speed: float) -> None:
        if speed != self.speed:
            self.speed = speed
            self.other_speed.succeed()
            self.other_speed = self.env.event()

    def _spend(self, part: str, seconds: float) -> Generator[Any, Any, None]:
        if seconds > 0:
            self.at_work[part] += seconds
            yield self.env.timeout(seconds)

    def _mark(self, step: int) -> None:
        made = sum(engine.tokens for engine in self.engines)
        busy = sum(engine.busy for engine in self.engines)
        trained = step * self.work.prompts * self.work.m
        self.marks.append((self.env.now, made, trained, busy, dict(self.at_work)))


def simulate(work: Workload, engine: EngineSpeed | Sequence[EngineSpeed], parts: Parts) -> Outcome:
    """Model a run to its end."""
    return PipelineModel(work, engine, parts).run()
