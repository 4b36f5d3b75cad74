"""A pool of scorer processes: it computes the rewards of finished rollouts, whatever the reward functions do.

Every request is scored alone, in order of arrival; several that wait travel in one message. A reward that raises,
hangs, dies or returns nonsense costs its own rollout that part and is counted under its name; all others go on.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from pods_cluster.config import RewardConfig, RewardConfigError, ScoringConfig
from pods_cluster.scoring.reward_registry import check_rewards
from pods_cluster.scoring.rows import Row, Rows
from pods_cluster.scoring.score import FailureKind, Score, ScoreFailure, ScoreRequest
from pods_cluster.scoring.scorer_main import Completion, Result
from pods_cluster.scoring.scorer_output import Printed, ScorerOutput
from pods_cluster.scoring.scorer_process import Call, ScorerLost, ScorerProcess, ScorerStartError
from pods_cluster.scoring.scorer_stats import ScorerStats, StatsCounter
from pods_cluster.scoring.total_reward import combine

IDLE_SECONDS = 60.0
"""How long a thread without work sleeps before it looks again; a request or `close` wakes it at once."""
START_GRACE_SECONDS = 30.0
"""Time beyond `scoring.load_timeout` for killing a process that did not start and for reading its end."""
MESSAGE_BYTES = 32 << 20
"""Size of the rows in one message to a process, after which it takes no more requests."""


@dataclass(slots=True)
class _Job:
    row: Row
    completion: Completion
    future: Future[Score]
    waiting: int
    parts: dict[str, float | None] = field(default_factory=dict)
    failures: list[ScoreFailure] = field(default_factory=list)


class ScorerPool:
    """Scores requests in `scoring.workers` processes. Usable from any thread; starts no process by fork.

    rewards: every request gets all of them; one call of a reward may take its `timeout`.
    scoring: how many processes, and their limits.
    columns: the dataset's columns (`answer` included), to refuse at start a reward that needs another one.
    max_batch: most requests in one message to a process.
    samples: failure messages kept for each reward and kind.
    beside: names, other than of rewards, under which `fail` counts and others add to `output`.

    Raises RewardConfigError or ScorerStartError when a reward cannot be loaded. Close it, or use it as a context.
    """

    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        scoring: ScoringConfig | None = None,
        *,
        columns: Collection[str] | None = None,
        max_batch: int = 64,
        samples: int = 3,
        beside: Collection[str] = (),
    ) -> None:
        check_rewards(rewards, columns)
        scoring = scoring or ScoringConfig()
        if max_batch < 1:
            raise ValueError(f"max_batch: {max_batch} must be at least 1")
        self._rewards = tuple(rewards)
        self._chunk = max(reward.batch for reward in rewards)
        self._max_batch = max(max_batch, self._chunk)
        names = list(dict.fromkeys([*(reward.key for reward in rewards), *beside]))
        self._stats = StatsCounter(names, samples)
        self.output = ScorerOutput(names)
        self._rows = Rows()
        self._submitted = 0
        self._queue: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._processes = [ScorerProcess(rewards, columns, scoring, self.output) for _ in range(scoring.workers)]
        started: list[Future[None]] = [Future() for _ in range(scoring.workers)]
        self._threads = [
            threading.Thread(target=self._serve, args=pair, name=f"scorer-{index}", daemon=True)
            for index, pair in enumerate(zip(self._processes, started, strict=True))
        ]
        for thread in self._threads:
            thread.start()
        try:
            for future in started:
                future.result(scoring.load_timeout + START_GRACE_SECONDS)
        except TimeoutError:
            self.close()
            raise ScorerStartError(
                f"a scorer process did not start within {scoring.load_timeout + START_GRACE_SECONDS:g} s"
            ) from None
        except BaseException:
            self.close()
            raise

    def submit(self, request: ScoreRequest, callback: Callable[[Future[Score]], object] | None = None) -> Future[Score]:
        """Queue one rollout; its Score comes as soon as its own rewards have run. Never blocks.

        Requests with the same `columns` and `messages` (the objects) share what is sent of them. `callback` gets the done
        future, in a thread of the pool. The future raises nothing of its own: what fails is in the Score. Raises
        TypeError when a column cannot be pickled, RuntimeError after close().
        """
        future: Future[Score] = Future()
        if callback is not None:
            future.add_done_callback(callback)
        with self._changed:
            if self._closed:
                raise RuntimeError("the scorer pool is closed")
            row = self._rows.of(request)
            completion = (
                row.number,
                request.completion,
                request.completion_ids,
                request.turns,
                request.environment_reward,
            )
            job = _Job(row, completion, future, waiting=len(self._rewards))
            self._queue.append(job)
            self._submitted += 1
            self._changed.notify()
        return future

    def fail(self, kind: FailureKind, name: str, message: str) -> Score:
        """Count a rollout that failed before it could be scored under `name`; returns its score, without a number."""
        failure = ScoreFailure(kind, name, message)
        with self._changed:
            self._submitted += 1
        self._stats.failed(name, kind, message)
        self._stats.scored(False)
        return Score(None, dict.fromkeys(reward.key for reward in self._rewards), (failure,))

    @property
    def pending(self) -> int:
        """Requests that no process has taken yet."""
        return len(self._queue)

    def stats(self) -> ScorerStats:
        """Return the counts so far, by reward and kind of failure, with samples of the messages."""
        return self._stats.read(self.output.total, self._submitted)

    def printed(self, after: int = 0) -> Printed:
        """Return what rewards printed after the first `after` lines, as far as it is kept."""
        return self.output.read(after)

    def close(self) -> None:
        """Kill the processes. What was not scored gets a Score whose failures say `closed`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for process in self._processes:
            process.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(15.0)

    def __enter__(self) -> ScorerPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _serve(self, process: ScorerProcess, started: Future[None]) -> None:
        """Run the thread that owns one process. (The process dies with this thread.)"""
        try:
            process.start()
            started.set_result(None)
        except BaseException as error:
            started.set_exception(error)
            return
        try:
            while jobs := self._next_jobs():
                try:
                    self._score(process, jobs)
                except Exception as error:  # a fault of ours must not leave anyone waiting
                    for job in jobs:
                        if not job.future.done():
                            job.future.set_exception(error)
                    process.kill()
        finally:
            process.kill()

    def _next_jobs(self) -> list[_Job]:
        """Wait for requests and take a fair share of the queue. After close() fail what is left and return nothing."""
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait(IDLE_SECONDS)
                closed = self._closed
                share = math.ceil(len(self._queue) / len(self._processes))
                size = len(self._queue) if closed else min(self._max_batch, max(share, self._chunk))
                taken: list[_Job] = []
                rows: set[int] = set()
                sending = 0
                while self._queue and len(taken) < size and (closed or sending < MESSAGE_BYTES):
                    taken.append(self._queue.popleft())
                    row = taken[-1].row
                    sending += 0 if row.number in rows else len(row.data)
                    rows.add(row.number)
            jobs = [job for job in taken if job.future.set_running_or_notify_cancel()]
            if closed:
                self._fail(jobs, self._calls(len(jobs)), FailureKind.CLOSED, "the scorer pool was closed")
                return []
            if jobs:
                return jobs

    def _calls(self, rows: int) -> list[Call]:
        """List all calls for `rows` requests, in an order that finishes the first requests first."""
        calls: list[Call] = []
        for first in range(0, rows, self._chunk):
            last = min(first + self._chunk, rows)
            for index, reward in enumerate(self._rewards):
                starts = range(first, last, reward.batch)
                calls += [(index, tuple(range(start, min(start + reward.batch, last)))) for start in starts]
        return calls

    def _score(self, process: ScorerProcess, jobs: list[_Job]) -> None:
        """Run every call; a call that fails for several rows is made again row by row, to find the bad one."""
        rows, completions = [job.row for job in jobs], [job.completion for job in jobs]
        calls = self._calls(len(jobs))
        while calls:
            again: list[Call] = []
            if not process.alive:
                try:
                    process.start()
                    self._stats.restarted()
                except (RewardConfigError, ScorerStartError) as error:
                    kind = FailureKind.CLOSED if self._closed else FailureKind.START
                    self._fail(jobs, calls, kind, str(error))
                    return
            done = 0
            try:
                for results in process.run(rows, completions, calls):
                    again += self._record(jobs, calls[done], results)
                    done += 1
            except ScorerLost as lost:
                kind = FailureKind.CLOSED if self._closed else lost.kind
                again += self._record(jobs, calls[done], [(None, kind, lost.message)] * len(calls[done][1]))
                done += 1
            calls = again + calls[done:]

    def _record(self, jobs: list[_Job], call: Call, results: list[Result]) -> list[Call]:
        """Record the results of one call, or return it split when the call as a whole failed on several rows."""
        index, rows = call
        whole = (FailureKind.ERROR, FailureKind.LENGTH, FailureKind.TIMEOUT, FailureKind.DIED, FailureKind.MEMORY)
        if len(rows) > 1 and len({(kind, text) for _, kind, text in results}) == 1 and results[0][1] in whole:
            return [(index, (row,)) for row in rows]
        reward = self._rewards[index]
        for row, (value, kind, message) in zip(rows, results, strict=True):
            job = jobs[row]
            job.parts[reward.key] = value
            if kind is FailureKind.NONE and reward.none == "skip":
                self._stats.skipped(reward.key)
            elif kind is not None:
                job.failures.append(ScoreFailure(kind, reward.key, message))
                self._stats.failed(reward.key, kind, message)
            job.waiting -= 1
            if job.waiting == 0:
                self._finish(job)
        return []

    def _fail(self, jobs: list[_Job], calls: Sequence[Call], kind: FailureKind, message: str) -> None:
        for reward, rows in calls:
            for row in rows:
                self._record(jobs, (reward, (row,)), [(None, kind, message)])

    def _finish(self, job: _Job) -> None:
        parts = {reward.key: job.parts[reward.key] for reward in self._rewards}  # in the order of the config
        total = combine(self._rewards, parts, {failure.reward for failure in job.failures})
        self._stats.scored(total is not None)
        job.future.set_result(Score(total, parts, tuple(job.failures)))
